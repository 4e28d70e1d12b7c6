"""The search problem, and the best schedules that a search from some starts finds. The native core makes the moves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import SamplePieces
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.partitioning.padded import Cut
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import SharedCores, compute_peak_bytes, count_spread, validate

NEVER = 1 << 60  # a makespan that no order has
NO_LIMIT_BYTES = 1 << 60  # Sums of bytes, and of bytes times time, stay within 64 bits.
NO_LIMIT = 1 << 20  # of micro-batches, for a dispatch policy


class CostField(IntEnum):
    """Index of each number in a record of costs. First come ns of actions: F, the gradient (B, or I if backwards are
    split) and W. Then stored and working bytes, and ns of the transfer. The native core has the same order."""

    FORWARD = 0
    GRADIENT = 1
    WEIGHT = 2
    STORED = 3
    WORKING = 4
    TRANSFER = 5


class DispatchPolicy(NamedTuple):
    """The rule by which a free rank chooses its next action.

    `extra`: stage s of S holds at most S - s + `extra` micro-batches (NO_LIMIT: as many as memory allows). With pieces
    it holds (pieces of the longest sample) - 1 more (the warm-up of Seq1F1B, arXiv 2406.03488). `rhythm` 0: gradients
    go first. 1: after a gradient a forward goes first. 2: forwards always go first, and the rank even waits for them
    (with `extra` 0 that is 1F1B). `patience`: a W may delay the next known arrival by this many quarters of its own
    time.

    The policy does not apply to short stages, such as those with a part of the output head. Their actions run as soon
    as they are ready, and do not count as turns of forwards or gradients.
    """

    extra: int
    rhythm: int
    patience: int = 0


def list_policies(*, split: bool) -> list[DispatchPolicy]:
    """List the policies that a search chooses from, with full or with `split` backwards."""
    extras = (0, 1, 2, 4, NO_LIMIT)
    if not split:
        return [DispatchPolicy(0, 2), *(DispatchPolicy(extra, rhythm) for extra, rhythm in product(extras, (1, 0)))]
    return [DispatchPolicy(*policy) for policy in product(extras, (1, 0), (2, 4))]


class AnnealingSchedule(NamedTuple):
    """A part of an endless search walk: `moves` moves after the first `begun`. Move n may make the step longer by
    cooling / (cooling + n) of what the first move may. So a longer walk begins as a shorter one, and ends no worse."""

    seed: int
    moves: int
    begun: int = 0
    cooling: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Cuts that cover a batch's items (samples or micro-batches) in turn. `groups[d]`: replica d's cuts, by index.

    `kind_costs[k]`: costs of all shapes under the recomputation mode of kind k (INFEASIBLE forwards: cannot run so).
    `shapes[j, r - 1]`: the shape of the cut of r items that ends with item j, or -1 if not allowed. With one column,
    items are micro-batches and stay as they are. `sample_pieces`, only then: for each sample in pieces, its items, all
    in one group.
    """

    kind_costs: tuple[MicroBatchCosts, ...]
    shapes: npt.NDArray[np.int32]
    cuts: tuple[Cut, ...]
    groups: tuple[tuple[int, ...], ...]
    sample_pieces: tuple[SamplePieces, ...] = ()

    @classmethod
    def from_micro_batches(
        cls,
        kind_costs: Sequence[MicroBatchCosts],
        groups: Sequence[Sequence[int]],
        kinds: Sequence[int],
        sample_pieces: tuple[SamplePieces, ...] = (),
    ) -> Start:
        """Return a start of micro-batches that stay as they are. `kinds`: each one's mode, an index into `kind_costs`;
        `groups`: indices of each replica's micro-batches."""
        return cls(
            kind_costs=tuple(kind_costs),
            shapes=np.arange(len(kinds), dtype=np.int32).reshape(-1, 1),
            cuts=tuple(Cut(m, m + 1, kind) for m, kind in enumerate(kinds)),
            groups=tuple(map(tuple, groups)),
            sample_pieces=sample_pieces,
        )


@dataclass(slots=True)
class SearchState:
    """`cuts` in the order of the items. Per replica: `groups`, the indices of its cuts in injection order;
    `makespan_ns`, under timing noise the mean (NEVER: nothing fits); and each rank's `actions` as numbers
    (`Problem.make_schedules`). `floor_ns`: the least time of the step if ranks share cores."""

    cuts: list[Cut]
    groups: list[list[int]]
    makespan_ns: list[int]
    actions: list[list[list[int]]]
    floor_ns: int

    @property
    def value(self) -> tuple[int, int]:
        """The smaller the better: the largest makespan (at least `floor_ns`), then the sum of all makespans."""
        return max(self.floor_ns, *self.makespan_ns), sum(self.makespan_ns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The moves that a search may make, and their costs. The native core reads the fields by their names.

    `records` (modes, shapes, stages, fields) are those of `make_records`, and `shapes` those of a `Start`. `free_bytes`
    of each rank: the limit less static bytes. `working_in_backward`: B and I need working bytes, too. `noise`: the
    spread of perturbed times (`count_spread`), and the maximum predicted ns of an order. With a spread, orders are
    judged by their mean makespan over perturbed times. The other fields are as in `SearchSettings`.
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
        """Return the best state of random moves from `cuts`, which cover the items in turn, and from `orders`: for each
        replica one or more orders of its cuts to begin with.

        Record-to-record travel (Dueck 1993): a move may make the step longer by up to an allowance, which shrinks with
        the moves made so far, whatever the number that is to follow. The state is a function of the arguments; the
        first of equals stays. Writing the actions down takes long, so `with_actions` can leave them out.
        """
        ranges, groups, makespans, actions = native.search(self, cuts, orders, schedule, with_actions)
        left, new_groups = drop_merged(ranges, groups)
        new_cuts, floor_ns = [Cut(*cut) for cut in left], 0
        if self.cores is not None:
            floor_ns = self.cores.floor_ns(int(self.work_ns(self.find_records(new_cuts)).sum()))
        return SearchState(new_cuts, new_groups, makespans, actions, floor_ns)

    def find_records(self, cuts: Sequence[Cut], *, every_kind: bool = False) -> IntArray:
        """Return the records of cuts in their modes: (cuts, stages, fields); with `every_kind`, those in all modes:
        (modes, cuts, stages, fields)."""
        firsts, ends, kinds = np.array(cuts, np.int64).reshape(-1, 3).T
        shapes = self.shapes[ends - 1, ends - firsts - 1]
        return self.records[:, shapes] if every_kind else self.records[kinds, shapes]

    def work_ns(self, records: IntArray) -> IntArray:
        """Return the time in ns of all actions of each record, summed over stages."""
        actions = slice(CostField.WEIGHT + 1 if self.split else CostField.WEIGHT)
        work_ns: IntArray = records[..., actions].sum(axis=(-2, -1))
        return work_ns

    def make_schedules(self, state: SearchState) -> tuple[PipelineSchedule, ...]:
        """Return each replica's schedule; in `state` an action is its index in (kind, stage, cut of the replica)."""
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
    """Return the native core's cuts without those merged into others, in the order of the items; and `groups` with the
    indices of these cuts."""
    left = sorted((cut, m) for m, cut in enumerate(cuts) if cut[0] >= 0)
    place = {m: i for i, (_, m) in enumerate(left)}
    return [cut for cut, _ in left], [[place[m] for m in group] for group in groups]


def make_records(kind_costs: Sequence[MicroBatchCosts], *, split: bool) -> IntArray:
    """Make the array of times and bytes: (modes, shapes, stages, CostField); with `split`, B as I and W."""
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
    """List the first orders of a replica's cuts `group` (indices): as given, and by time, up and then down, for a short
    fill and drain. `work_ns[m]`: ns of cut m on all stages; m counts all replicas' cuts. Pieces of a sample stay one
    unit."""
    later = {m for pieces in sample_pieces for m in pieces[1:]}
    units = {pieces[0]: pieces for pieces in sample_pieces}
    firsts = [m for m in group if m not in later]
    ascending = sorted(firsts, key=lambda m: sum(work_ns[k] for k in units.get(m, (m,))))
    hill = ascending[::2] + ascending[1::2][::-1]
    orders = [firsts, hill] if hill != firsts else [firsts]
    return [[k for m in order for k in units.get(m, (m,))] for order in orders]


TRIAL = 500  # moves for each of several starts
_COOLING = 1000  # After this many moves, a move may cost half of what the first may.
_REPLICAS = 4  # One measure of effort is for this many replicas.
# From 16 replicas of 16 micro-batches on, a search makes only as many moves as for replicas of 8 micro-batches, but at
# least half of the effort. If samples come in pieces, rows are many and a move costs more: moves are so many that they
# cost what they would with 12 rows.
_MANY, _LONG, _ROWS = 16, 8, 12
_STEADY = 256  # A step may take 1/256 longer as predicted, if it loses less under disturbed times.


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Settings of a search; `seed` and `effort` make its result a function of its starts.

    `effort` is the number of random moves for up to 7 replicas, twice as many for 8, three times for 12, and so on, but
    fewer if `has_long_replicas`. From equal starts a larger effort never ends worse. `split`: run backwards as I and W.
    `stage_ranks`: the rank of each stage (None: stage s on rank s). `short_stages`: what is ready there goes first
    (`DispatchPolicy`). `equal_counts`: replicas keep their numbers of cuts. `cores`: None if each rank has its own.
    `noise`: the largest share by which times are perturbed; as many moves again then look for the best mean near what
    the first ones found.
    """

    memory_limit_bytes: int
    split: bool
    effort: int
    seed: int = 0
    stage_ranks: Sequence[int] | None = None
    short_stages: Sequence[int] = ()
    equal_counts: bool = False
    cores: SharedCores | None = None
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Optimized:
    """Each replica's cuts in injection order, and its schedule, in which micro-batch i is the replica's i-th cut.
    `makespan_ns`: of each replica; under timing noise, the mean."""

    replicas: tuple[tuple[Cut, ...], ...]
    schedules: tuple[PipelineSchedule, ...]
    makespan_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A start that can run: its `index` among the starts, the `orders` that each replica begins with, and the moves
    from there, first those of the trial, then the `rest` if it is chosen."""

    index: int
    problem: Problem
    cuts: list[Cut]
    orders: list[list[list[int]]]
    first: AnnealingSchedule
    rest: AnnealingSchedule

    def run(self) -> SearchState:
        return self.problem.search(self.cuts, self.orders, self.first, with_actions=not self.rest.moves)


def optimize(
    costs: MicroBatchCosts,
    *,
    memory_limit_bytes: int,
    split: bool,
    effort: int,
    seed: int = 0,
    stage_ranks: Sequence[int] | None = None,
) -> PipelineSchedule:
    """Return the best schedule of one replica's micro-batches in `effort` random moves; a function of the arguments.

    `split` runs every backward as I and W. `stage_ranks` places stages on ranks (default: stage s on rank s). No rank
    exceeds the limit at any time.

    Raises PlanError for a micro-batch that does not fit alone; ConfigError for a negative effort or a bad placement.
    """
    count = costs.num_micro_batches
    settings = SearchSettings(
        memory_limit_bytes=memory_limit_bytes, split=split, effort=effort, seed=seed, stage_ranks=stage_ranks
    )
    _, best = optimize_best([Start.from_micro_batches([costs], [range(count)], [0] * count)], settings)
    (schedule,), (cuts,) = best.schedules, best.replicas
    ranks = tuple(tuple(Action(a.stage, a.kind, cuts[a.micro_batch].first) for a in rank) for rank in schedule.ranks)
    schedule = replace(schedule, ranks=ranks)
    validate(schedule, count)
    peaks = compute_peak_bytes(schedule, costs)
    if max(peaks) > memory_limit_bytes:
        raise PlanError(
            f"the {schedule.name} schedule needs {max(peaks)} B on rank {peaks.index(max(peaks))} but the limit is"
            f" {memory_limit_bytes} B: raise the limit, tp or pp"
        )
    return schedule


def optimize_best(starts: Sequence[Start], settings: SearchSettings) -> tuple[int, Optimized]:
    """Return the index of the best start (the first of equals), and the best result from it.

    Several starts are each tried with the first few moves, in threads if there are cores, and the best continues with
    the rest of the moves. A larger effort begins as a smaller one, so it never ends worse. The number of cores changes
    nothing else. Moves change the order, the policy, a cut's recomputation mode, its replica and, if there is a choice,
    where the items are cut; `equal_counts` keeps the number of cuts of each replica. Nothing is proven here: simulate
    and validate the result.

    Raises PlanError if no start has an order that fits; ConfigError as `optimize`.
    """
    trials, refusal = _make_trials(starts, settings)
    threads = min(len(os.sched_getaffinity(0)), len(trials))
    if threads > 1:  # the native core releases Python's lock
        with ThreadPoolExecutor(threads) as pool:
            states = list(pool.map(_Trial.run, trials))
    else:
        states = list(map(_Trial.run, trials))
    fitting = [pair for pair in zip(states, trials, strict=True) if max(pair[0].makespan_ns) < NEVER]
    if not fitting:
        limit = settings.memory_limit_bytes
        raise refusal or PlanError(f"no order of these micro-batches fits in {limit} B: raise the limit, tp or pp")
    state, best = min(fitting, key=lambda pair: pair[0].value)
    problem = best.problem
    if best.rest.moves:
        state = _search_on(problem, state, best.rest)
    state = _recompute_least(problem, state, settings.seed)
    if settings.noise:
        # The slowest replica takes no more than a little longer undisturbed.
        undisturbed_ns = state.value[0]
        noise = count_spread(settings.noise), undisturbed_ns + undisturbed_ns // _STEADY
        moves = best.first.moves + best.rest.moves
        state = _search_on(replace(problem, noise=noise), state, best.first._replace(moves=moves))
    replicas = tuple(tuple(state.cuts[m] for m in group) for group in state.groups)
    return best.index, Optimized(replicas, problem.make_schedules(state), tuple(state.makespan_ns))


def _search_on(problem: Problem, state: SearchState, moves: AnnealingSchedule) -> SearchState:
    return problem.search(state.cuts, [[group] for group in state.groups], moves)


def _make_trials(starts: Sequence[Start], settings: SearchSettings) -> tuple[list[_Trial], PlanError | None]:
    """Make trials of the starts whose micro-batches all fit alone, and return the first refusal of another."""
    trials: list[_Trial] = []
    records: dict[int, IntArray] = {}  # starts share costs
    refusal: PlanError | None = None
    for index, start in enumerate(starts):
        if id(start.kind_costs) not in records:
            records[id(start.kind_costs)] = make_records(start.kind_costs, split=settings.split)
        problem = _make_problem(start, settings, records[id(start.kind_costs)])
        try:
            cuts = _choose_fitting_kinds(problem, start, settings.memory_limit_bytes)
        except PlanError as error:
            refusal = refusal or error
            continue
        work_ns = problem.work_ns(problem.find_records(cuts)).tolist()
        orders = [list_start_orders(group, work_ns, start.sample_pieces) for group in start.groups]
        moves = _count_moves(start, settings.effort)
        # Several starts under one kind are judged without moves, if trials would take the whole effort.
        is_tried = len(starts) > 1 and (settings.effort > TRIAL or len(start.kind_costs) > 1)
        tried = _count_moves(start, min(settings.effort, TRIAL)) if is_tried else 0
        cooling = max(1, _count_moves(start, _COOLING))
        first = AnnealingSchedule(settings.seed, tried, cooling=cooling)
        rest = first._replace(moves=moves - tried, begun=tried)
        trials.append(_Trial(index, problem, cuts, orders, first, rest))
    return trials, refusal


def _make_problem(start: Start, settings: SearchSettings, records: IntArray) -> Problem:
    costs = start.kind_costs[0]
    stages = costs.num_stages
    ranks = tuple(range(stages)) if settings.stage_ranks is None else tuple(settings.stage_ranks)
    if settings.effort < 0:
        raise ConfigError(f"effort is {settings.effort} but must be a count of at least 0")
    if len(ranks) != stages or set(ranks) != set(range(max(ranks) + 1)):
        raise ConfigError(f"placement {ranks} must put each of {stages} stages on a rank, with none left out")
    free = [settings.memory_limit_bytes] * (max(ranks) + 1)
    for rank, num_bytes in zip(ranks, costs.static_bytes.tolist(), strict=True):
        free[rank] -= num_bytes
    return Problem(
        stage_ranks=ranks,
        free_bytes=tuple(free),
        split=settings.split,
        working_in_backward=costs.working_in != "F",
        records=records,
        shapes=start.shapes,
        policies=list_policies(split=settings.split),
        short_stages=settings.short_stages,
        sample_pieces=start.sample_pieces,
        equal_counts=settings.equal_counts,
        cores=settings.cores,
    )


def _count_moves(start: Start, effort: int) -> int:
    """Count the moves of an effort; if samples come in pieces, no more work than that of a few rows."""
    replicas, cuts = len(start.groups), len(start.cuts)
    moves = effort * max(1, replicas // _REPLICAS)
    if has_long_replicas(replicas, cuts):  # a simulation takes as long as a replica has micro-batches
        moves = max(effort // 2, moves * _LONG * replicas // cuts)
    return moves * _ROWS // max(_ROWS, cuts) if start.sample_pieces else moves


def has_long_replicas(num_replicas: int, num_micro_batches: int) -> bool:
    """Return whether there are 16 replicas or more, of over 16 micro-batches each on average: moves are then fewer."""
    return num_replicas >= _MANY and num_micro_batches > _MANY * num_replicas


def _sum_by_rank(problem: Problem, records: IntArray) -> tuple[IntArray, IntArray]:
    """Return the bytes (..., ranks) that micro-batches store on each rank, and that their stages work with at most."""
    ranks = np.array(problem.stage_ranks)
    own = [records[..., ranks == rank, :] for rank in range(len(problem.free_bytes))]
    stored = np.stack([record[..., CostField.STORED].sum(axis=-1) for record in own], axis=-1)
    return stored, np.stack([record[..., CostField.WORKING].max(axis=-1) for record in own], axis=-1)


def _recompute_least(problem: Problem, state: SearchState, seed: int) -> SearchState:
    """Return the state with every cut in the recomputation mode of the least work, if memory holds all of them at once
    and the step ends at the same time. Moves that cost no time may have recomputed some. A state that ends sooner is
    not taken, as a search of more effort might miss it."""
    if not state.cuts:
        return state
    records = problem.find_records(state.cuts, every_kind=True)
    least = problem.work_ns(records).argmin(axis=0)
    if least.tolist() == [cut.kind for cut in state.cuts]:
        return state
    stored, working = _sum_by_rank(problem, records[least, np.arange(len(least))])
    for group in filter(None, state.groups):
        if (stored[group].sum(axis=0) + working[group].max(axis=0) > problem.free_bytes).any():
            return state
    cuts = [cut._replace(kind=kind) for cut, kind in zip(state.cuts, least.tolist(), strict=True)]
    lighter = _search_on(problem, replace(state, cuts=cuts), AnnealingSchedule(seed, 0))
    return lighter if lighter.makespan_ns == state.makespan_ns else state


def _choose_fitting_kinds(problem: Problem, start: Start, limit_bytes: int) -> list[Cut]:
    """Return each cut under its kind, or under the first that lets it run alone (and the pieces of a sample all
    together). Raises PlanError if no kind does."""
    free = np.array(problem.free_bytes, np.int64)
    records = problem.find_records(start.cuts, every_kind=True)
    stored, working = _sum_by_rank(problem, records)  # (kinds, cuts, ranks)
    needed = stored + working
    fits = (needed <= free).all(axis=-1) & (records[:, :, 0, CostField.FORWARD] < INFEASIBLE)
    if (alone := ~fits.any(axis=0)).any():
        m = int(alone.argmax())
        least = needed[:, m].min(axis=0)
        rank = int((least - free).argmax())
        raise PlanError(
            f"micro-batch {m} alone needs {int(least[rank]) + limit_bytes - int(free[rank])} B on rank {rank} but the"
            f" limit is {limit_bytes} B: make the micro-batch smaller, recompute more of it, or raise tp or pp"
        )
    own = np.array([cut.kind for cut in start.cuts], np.int64)
    kinds = np.where(fits[own, np.arange(len(own))], own, fits.argmax(axis=0))
    for sample_pieces in start.sample_pieces:
        pieces = np.array(sample_pieces)
        kinds[pieces] = _fit_pieces(stored[:, pieces], working[:, pieces], kinds[pieces], free, limit_bytes)
    return [Cut(cut.first, cut.end, kind) for cut, kind in zip(start.cuts, kinds.tolist(), strict=True)]


def _fit_pieces(stored: IntArray, working: IntArray, kinds: IntArray, free: IntArray, limit_bytes: int) -> IntArray:
    """Return kinds of recomputation under which all pieces of a sample fit at once. Bytes: (kinds, pieces, ranks).

    As few pieces as possible change to the kind of least bytes. The first pieces change first, as they cost least to
    compute again. Raises PlanError if even changing all of them does not fit.
    """
    pieces = np.arange(len(kinds))
    lean = int(stored.sum(axis=(1, 2)).argmin())
    for changed in range(len(kinds) + 1):
        chosen = np.where(pieces < changed, lean, kinds)
        needed = stored[chosen, pieces].sum(axis=0) + working[chosen, pieces].max(axis=0)
        if (needed <= free).all():
            return chosen
    rank = int((needed - free).argmax())
    raise PlanError(
        f"the {len(kinds)} pieces of one sample need {int(needed[rank]) + limit_bytes - int(free[rank])} B at once on"
        f" rank {rank}, recomputed, but the limit is {limit_bytes} B: raise tp or pp, or truncate the sample"
    )
