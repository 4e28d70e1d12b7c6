"""The search problem: starts, dispatch policies, the value that the native core searches, and the state it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import SamplePieces
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.partitioning.padded import Cut
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import SharedCores

NEVER = 1 << 60  # a makespan that no order has
NO_LIMIT_BYTES = 1 << 60  # Sums of bytes, and of bytes times time, stay within 64 bits.
NO_LIMIT = 1 << 20  # of micro-batches, for a dispatch policy


class CostField(IntEnum):
    """The index of each number in a record of costs. The first three are the actions: F, the gradient (B, or I if
    backwards are split) and W. The native core has the same order."""

    FORWARD = 0
    GRADIENT = 1
    WEIGHT = 2
    STORED = 3
    WORKING = 4
    TRANSFER = 5


class DispatchPolicy(NamedTuple):
    """The rule by which a free rank chooses its next action.

    extra: stage s holds at most S - s + `extra` micro-batches. With pieces it holds (pieces of the longest sample) - 1
    more (the warm-up of Seq1F1B, arXiv 2406.03488). NO_LIMIT: as many as memory allows.
    rhythm: 0: gradients go first. 1: after a gradient a forward goes first. 2: forwards always go first, and the rank
    even waits for them (with `extra` 0 that is the order of 1F1B).
    patience: a W may delay the next known arrival by up to `patience` quarters of its own time.

    The policy does not apply to short stages, such as a part of a head. Their actions run as soon as they are ready,
    and do not count as turns of forwards or gradients.
    """

    extra: int
    rhythm: int
    patience: int = 0


def list_policies(*, split: bool) -> list[DispatchPolicy]:
    """List the policies that a search chooses from."""
    extras = (0, 1, 2, 4, NO_LIMIT)
    if not split:
        return [DispatchPolicy(0, 2), *(DispatchPolicy(extra, rhythm) for extra, rhythm in product(extras, (1, 0)))]
    return [DispatchPolicy(*policy) for policy in product(extras, (1, 0), (2, 4))]


class AnnealingSchedule(NamedTuple):
    """The moves of an endless walk that a search makes: `moves` of them, after the `begun` ones. After `cooling` moves,
    a move may cost half of what the first may. So a longer walk begins as a shorter one, and ends no worse."""

    seed: int
    moves: int
    begun: int = 0
    cooling: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Cuts, which cover the items of a batch in turn, grouped by replica.

    `kind_costs` price every shape under each recomputation mode (INFEASIBLE forwards: cannot run so);
    `shapes[j, r - 1]`, int32, is the shape of the cut of r items that ends at item j, or -1 if that may not be a
    micro-batch. With only one column, items are micro-batches and stay what they are. `sample_pieces`, only with one
    column: the items that are pieces of one sample, each sample's within one group.
    """

    kind_costs: tuple[MicroBatchCosts, ...]
    shapes: npt.NDArray[np.int32]
    cuts: tuple[Cut, ...]
    groups: tuple[tuple[int, ...], ...]
    sample_pieces: tuple[SamplePieces, ...] = ()

    @classmethod
    def of_micro_batches(
        cls,
        kind_costs: Sequence[MicroBatchCosts],
        groups: Sequence[Sequence[int]],
        kinds: Sequence[int],
        sample_pieces: tuple[SamplePieces, ...] = (),
    ) -> Start:
        """Make a start of micro-batches as they are, each with its index into `kind_costs`."""
        return cls(
            kind_costs=tuple(kind_costs),
            shapes=np.arange(len(kinds), dtype=np.int32).reshape(-1, 1),
            cuts=tuple(Cut(m, m + 1, kind) for m, kind in enumerate(kinds)),
            groups=tuple(map(tuple, groups)),
            sample_pieces=sample_pieces,
        )


@dataclass(slots=True)
class SearchState:
    """Cuts in the order of the items, and per replica: its cuts in injection order, its makespan, under noise the mean
    over disturbed times (NEVER: nothing fits), and the numbers of each rank's actions. `floor_ns`: the least time of
    the step if ranks share cores."""

    cuts: list[Cut]
    groups: list[list[int]]
    makespan_ns: list[int]
    actions: list[list[list[int]]]
    floor_ns: int

    @property
    def value(self) -> tuple[int, int]:
        """The smaller the better: the largest makespan (at least the floor), then the sum of all."""
        return max(self.floor_ns, *self.makespan_ns), sum(self.makespan_ns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The moves that a search may make, and their costs. The native core reads the fields by their names.

    `records` (kinds, shapes, stages, fields) and `shapes` are those of a `Start`; `free_bytes` of each rank are the
    limit less what is static. With `equal_counts` each replica keeps its number of cuts. Under `noise`, the
    spread of disturbed times and the most ns that an order may take undisturbed, orders are judged by their mean
    makespan over disturbed times (`mean_makespan_ns`).
    """

    stage_ranks: tuple[int, ...]
    free_bytes: tuple[int, ...]
    split: bool
    working_in_backward: bool
    records: IntArray
    shapes: npt.NDArray[np.int32]
    policies: Sequence[DispatchPolicy]
    short_stages: Sequence[int] = ()
    sample_pieces: Sequence[SamplePieces] = ()
    equal_counts: bool = False
    cores: SharedCores | None = None
    noise: tuple[int, int] = (0, 0)

    def search(
        self,
        cuts: Sequence[Cut],
        orders: Sequence[Sequence[Sequence[int]]],
        schedule: AnnealingSchedule,
        *,
        with_actions: bool = True,
    ) -> SearchState:
        """Return the best state of random moves from `cuts`, which cover the items in turn, and from `orders` (per
        replica, the orders of cuts to begin with).

        Record-to-record travel (Dueck 1993): a move may cost up to an allowance, which shrinks with the moves made so
        far, whatever the number that is to follow. A function of its arguments; the first of equals stays. The actions
        take long to write down, so they can be left out.
        """
        ranges, groups, makespans, actions = native.search(self, cuts, orders, schedule, with_actions)
        left, new_groups = drop_merged(ranges, groups)
        new_cuts, floor_ns = [Cut(*cut) for cut in left], 0
        if self.cores is not None:
            floor_ns = self.cores.floor_ns(int(self.work_ns(self.records_of(new_cuts)).sum()))
        return SearchState(new_cuts, new_groups, makespans, actions, floor_ns)

    def records_of(self, cuts: Sequence[Cut], *, every_kind: bool = False) -> IntArray:
        """Return the records (cuts, stages, fields) of cuts under their kinds; of every kind as a first axis."""
        firsts, ends, kinds = np.array(cuts, np.int64).reshape(-1, 3).T
        shapes = self.shapes[ends - 1, ends - firsts - 1]
        return self.records[:, shapes] if every_kind else self.records[kinds, shapes]

    def work_ns(self, records: IntArray) -> IntArray:
        """Return the time of all actions of each record, over all stages."""
        actions = slice(CostField.WEIGHT + 1 if self.split else CostField.WEIGHT)
        work_ns: IntArray = records[..., actions].sum(axis=(-2, -1))
        return work_ns

    def make_schedules(self, state: SearchState) -> tuple[PipelineSchedule, ...]:
        """Make the schedule of each replica from the numbers of its actions."""
        kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT if self.split else Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        stages, name = range(len(self.stage_ranks)), "adaptive-split" if self.split else "adaptive"
        idle: tuple[tuple[Action, ...], ...] = tuple(() for _ in set(self.stage_ranks))
        tables: dict[int, list[Action]] = {}  # replicas of as many cuts share their actions
        schedules = []
        for group, ranks in zip(state.groups, state.actions, strict=True):
            if len(group) not in tables:
                every = product(kinds, stages, range(len(group)))
                tables[len(group)] = [Action(stage, kind, position) for kind, stage, position in every]
            numbered = tables[len(group)]
            orders = tuple(tuple(map(numbered.__getitem__, rank)) for rank in ranks)
            schedules.append(PipelineSchedule(name, orders or idle, self.stage_ranks))
        return tuple(schedules)


def drop_merged(
    cuts: Sequence[tuple[int, ...]], groups: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Return the native core's cuts in the order of the items, without those merged away, and the groups of these."""
    left = sorted((cut, m) for m, cut in enumerate(cuts) if cut[0] >= 0)
    place = {m: i for i, (_, m) in enumerate(left)}
    return [cut for cut, _ in left], [[place[m] for m in group] for group in groups]


def make_records(kind_costs: Sequence[MicroBatchCosts], *, split: bool) -> IntArray:
    """Make one record of times and bytes per recomputation mode, shape and stage; with `split`, I and W apart."""
    first = kind_costs[0]
    shape = (len(kind_costs), first.num_micro_batches, first.num_stages, len(CostField))
    records = np.zeros(shape, np.int64)  # the last stage sends nothing on
    for record, costs in zip(records, kind_costs, strict=True):
        tables = {
            CostField.FORWARD: costs.forward_ns,
            CostField.GRADIENT: costs.input_ns if split else costs.backward_ns,
            CostField.WEIGHT: costs.weight_ns,
            CostField.STORED: costs.stored_bytes,
            CostField.WORKING: costs.working_bytes,
            CostField.TRANSFER: costs.transfer_ns,
        }
        for field, table in tables.items():
            record[:, : len(table), field] = table.T
        record[costs.forward_ns.max(axis=0) >= INFEASIBLE, :, CostField.FORWARD] = INFEASIBLE
    return records


def list_start_orders(
    group: Sequence[int], work_ns: Sequence[int], sample_pieces: Sequence[SamplePieces] = ()
) -> list[list[int]]:
    """List a replica's orders to begin with: the natural one, and another one that is cheap at both ends (a short fill
    and drain, and neighbours alike). `work_ns` are of all cuts. The pieces of a sample stay together, and count as
    one."""
    later = {m for pieces in sample_pieces for m in pieces[1:]}
    units = {pieces[0]: pieces for pieces in sample_pieces}
    firsts = [m for m in group if m not in later]
    ascending = sorted(firsts, key=lambda m: sum(work_ns[k] for k in units.get(m, (m,))))
    hill = ascending[::2] + ascending[1::2][::-1]
    orders = [firsts, hill] if hill != firsts else [firsts]
    return [[k for m in order for k in units.get(m, (m,))] for order in orders]
