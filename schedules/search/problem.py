"""What the search is given and what it returns: a problem, dispatch rules, start orders, a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
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


class CostField(IntEnum):
    """The place of each number in a record of costs. The first three are the actions: F, the gradient (B, or I alone
    where backwards are split) and W. Twin: `Field` in the native core."""

    FORWARD = 0
    GRADIENT = 1
    WEIGHT = 2
    STORED = 3
    WORKING = 4
    TRANSFER = 5


class Chosen(NamedTuple):
    """An action that a dispatch rule has chosen. `position` is a place in the injection order."""

    action: CostField
    stage: int
    position: int


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """How a free rank chooses its next action.

    extra: stage s holds at most S - s + `extra` micro-batches. With pieces it holds (pieces of the longest sample) - 1
    more (the warm-up of Seq1F1B, arXiv 2406.03488). None: as many as memory allows.
    rhythm: 0: gradients go first. 1: after a gradient a forward goes first. 2: forwards always go first, and the rank
    even waits for them (with `extra` 0 that is the order of 1F1B).
    patience: a W may delay the next known arrival by up to `patience` quarters of its own time.
    most_pending: with more W's pending than this a W goes first. None: never for that reason.

    The rule does not apply to short stages, such as a part of a head alone. Their actions run as soon as they are
    ready, and do not count as turns of forwards or gradients.
    """

    extra: int | None
    rhythm: int
    patience: int = 0
    most_pending: int | None = 0


def rules(*, split: bool) -> Sequence[DispatchRule]:
    """The rules that a search chooses from."""
    extras = (0, 1, 2, 4, None)
    if not split:
        return [DispatchRule(0, 2), *(DispatchRule(extra, rhythm) for extra in extras for rhythm in (1, 0))]
    return [
        DispatchRule(extra, rhythm, patience, most_pending)
        for extra in extras
        for rhythm in (1, 0)
        for patience, most_pending in ((0, None), (2, None), (4, None), (0, 0))
    ]


@dataclass(frozen=True, slots=True)
class Noise:
    """Times are disturbed by up to `spread` (`mean_makespan_ns`). No order may take more than `most_ns` undisturbed."""

    spread: int
    most_ns: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What the search may do, and what it costs.

    `records` (kinds, shapes, stages, fields): the numbers of `CostField` for every shape under every kind of
    recomputation; a forward of INFEASIBLE means that the shape cannot run so. `shapes[j, r - 1]`, int32, is the shape
    of the cut of r items that ends at item j, or -1 where that may not be a micro-batch. With one column only, items
    are micro-batches and stay what they are; `sample_pieces` then says which of them are pieces of one sample (cut i is
    item i). Where ranks share `cores`, a step takes at least its work over them. With `noise` an order is judged by its
    mean makespan over disturbed times.
    """

    stage_ranks: tuple[int, ...]
    free_bytes: tuple[int, ...]  # of each rank: limit - static
    split: bool
    working_in_backward: bool
    records: IntArray
    shapes: npt.NDArray[np.int32]
    rules: tuple[DispatchRule, ...]
    cores: SharedCores | None = None
    sample_pieces: tuple[SamplePieces, ...] = ()
    noise: Noise | None = None
    short_stages: tuple[int, ...] = ()

    def floor_ns(self, cuts: Sequence[Cut | None]) -> int:
        """What a step of these cuts takes at least where ranks share cores; 0 where they do not."""
        if self.cores is None:
            return 0
        actions = slice(CostField.WEIGHT + 1 if self.split else CostField.WEIGHT)
        work = 0
        for cut in cuts:
            if cut is not None:
                shape = self.shapes[cut.end - 1, cut.end - cut.first - 1]
                work += int(self.records[cut.kind, shape, :, actions].sum())
        return self.cores.floor_ns(work)


def records_of(kind_costs: Sequence[MicroBatchCosts], *, split: bool) -> IntArray:
    """`Problem.records` of shapes priced under every kind of recomputation."""
    first = kind_costs[0]
    records = np.empty((len(kind_costs), first.num_micro_batches, first.num_stages, len(CostField)), np.int64)
    records[:, :, -1, CostField.TRANSFER] = 0  # the last stage sends nothing on
    for record, costs in zip(records, kind_costs, strict=True):
        tables = {
            CostField.FORWARD: costs.forward_ns,
            CostField.GRADIENT: costs.input_ns if split else costs.backward_ns,
            CostField.WEIGHT: costs.weight_ns,
            CostField.STORED: costs.stored_bytes,
            CostField.WORKING: costs.working_bytes,
            CostField.TRANSFER: costs.transfer_ns,
        }
        native.fill_records([np.ascontiguousarray(tables[field]) for field in CostField], record)
        record[costs.forward_ns.max(axis=0) >= INFEASIBLE, :, CostField.FORWARD] = INFEASIBLE
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Which moves of an endless walk a search makes: `moves` of them, after the `begun` ones. After `cooling` moves a
    move may cost half of what the first may. So a longer walk begins as a shorter one, and ends no worse."""

    seed: int
    moves: int
    begun: int = 0
    cooling: int = 1


@dataclass(slots=True)
class SearchState:
    """Cuts (None: merged into a neighbour), and per replica: its cuts in injection order, the index of its rule, its
    makespan, under noise the mean over disturbed times (NEVER: nothing fits), and the actions of each rank. `floor_ns`:
    what the step takes at least where ranks share cores."""

    cuts: list[Cut | None]
    groups: list[list[int]]
    rules: list[int]
    makespan_ns: list[int]
    actions: list[list[list[Chosen]]]
    floor_ns: int = 0

    def cut(self, m: int) -> Cut:
        """A cut that is not merged away, as all are that a replica has."""
        cut = self.cuts[m]
        assert cut is not None
        return cut

    @property
    def value(self) -> tuple[int, int]:
        """The smaller the better: the largest makespan (at least the floor), then the sum of all."""
        return max(self.floor_ns, *self.makespan_ns), sum(self.makespan_ns)


def start_orders(costs: MicroBatchCosts, sample_pieces: Sequence[SamplePieces] = ()) -> list[list[int]]:
    """Orders to begin with: natural, ascending, descending, alternating between the two halves, and cheap at both ends
    (a short fill and drain, and neighbours alike). The pieces of a sample stand together, and count as one."""
    times: list[int] = (costs.forward_ns + costs.backward_ns).sum(axis=0).tolist()
    if not sample_pieces:
        return _orders(range(len(times)), times)
    later = {m for pieces in sample_pieces for m in pieces[1:]}
    units = {m: (m,) for m in range(len(times)) if m not in later} | {pieces[0]: pieces for pieces in sample_pieces}
    work = {m: sum(times[k] for k in unit) for m, unit in units.items()}
    return [[k for m in order for k in units[m]] for order in _orders(sorted(units), work)]


def _orders(items: Sequence[int], work: Sequence[int] | Mapping[int, int]) -> list[list[int]]:
    """Those of `start_orders`, each once, of ascending items."""
    ascending = sorted(items, key=work.__getitem__)
    half = len(ascending) // 2
    alternating = [m for pair in zip(ascending[half:], ascending[:half], strict=False) for m in pair]
    alternating += [ascending[-1]] if len(ascending) % 2 else []
    hill = ascending[::2] + ascending[1::2][::-1]
    orders = [list(items), ascending, ascending[::-1], alternating, hill]
    return [order for i, order in enumerate(orders) if order not in orders[:i]]


def piece_positions(group: Sequence[int], sample_pieces: Sequence[SamplePieces]) -> tuple[SamplePieces, ...]:
    """The pieces of each sample that a replica has, as positions in its order of cuts."""
    place = {m: i for i, m in enumerate(group)}
    return tuple(tuple(place[m] for m in pieces) for pieces in sample_pieces if pieces[0] in place)


def schedules_of(replicas: list[list[list[Chosen]]], problem: Problem) -> tuple[PipelineSchedule, ...]:
    """The actions of each replica's ranks as schedules."""
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT if problem.split else Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    name = "adaptive-split" if problem.split else "adaptive"
    chosen = {id(one): one for ranks in replicas for rank in ranks for one in rank}  # what replicas share, once
    made = {key: Action(one.stage, kinds[one.action], one.position) for key, one in chosen.items()}
    idle: tuple[tuple[Action, ...], ...] = tuple(() for _ in set(problem.stage_ranks))
    orders = (tuple(tuple(made[id(one)] for one in rank) for rank in ranks) for ranks in replicas)
    return tuple(PipelineSchedule(name, ranks or idle, problem.stage_ranks) for ranks in orders)
