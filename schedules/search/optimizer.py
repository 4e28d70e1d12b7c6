"""The best schedules from some starts, searched by the native core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import SamplePieces
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.partitioning.padded import Cut
from dynapipe_ext.schedules.actions import Action, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import SharedCores, peak_bytes, validate
from dynapipe_ext.schedules.evaluation.timing_noise import spread_of
from dynapipe_ext.schedules.search.problem import (
    NEVER,
    Chosen,
    CostField,
    DispatchRule,
    Noise,
    Problem,
    SearchState,
    Walk,
    piece_positions,
    records_of,
    rules,
    schedules_of,
    start_orders,
)

TRIAL = 500  # moves for each of several starts
_COOLING = 1000  # After so many moves, a move may cost half of what the first may.
_REPLICAS = 4  # One measure of effort is for so many replicas.
# From 16 replicas of 16 micro-batches on, a search makes only as many moves as for replicas of 8 micro-batches, but at
# least half of the effort. Where samples come in pieces, rows are many and a move costs more: moves are so many that
# they cost what they would with 12 rows.
_MANY, _LONG, _ROWS = 16, 8, 12
_STEADY = 256  # A step may take 1/256 longer as predicted, if it loses less where times are disturbed.
_CORE_HAS_NO_CAP = 1 << 20  # The native core takes this for a rule without a cap.


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the search is asked for; `seed` and `effort` make it a function.

    `effort` is the number of random moves for up to 7 replicas, twice as many for 8, three times for 12, and so on, but
    fewer where `has_long_replicas`. Of the same starts a larger effort never makes less. With `noise` as many moves
    again look for the best mean over disturbed times near what the first ones found.
    """

    memory_limit_bytes: int
    split: bool  # run backwards as I and W
    effort: int
    seed: int = 0
    stage_ranks: Sequence[int] | None = None  # default: stage s on rank s
    short_stages: Sequence[int] = ()  # what is ready there goes first (`DispatchRule`)
    equal_counts: bool = False
    cores: SharedCores | None = None  # None: every rank has its own
    noise: float = 0.0  # the largest share by which times are disturbed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Cuts, which cover the items of a batch in turn, grouped by replica.

    `kind_costs` price every shape under each kind of recomputation (INFEASIBLE forwards: cannot run so);
    `shapes[j, r - 1]`, int32, is the shape of the cut of r items that ends at item j, or -1 where that may not be a
    micro-batch. With one column only, items are micro-batches and stay what they are. `sample_pieces`, only with one
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
        """Micro-batches as they are, each with its index into `kind_costs`."""
        return cls(
            kind_costs=tuple(kind_costs),
            shapes=np.arange(len(kinds), dtype=np.int32).reshape(-1, 1),
            cuts=tuple(Cut(m, m + 1, kind) for m, kind in enumerate(kinds)),
            groups=tuple(map(tuple, groups)),
            sample_pieces=sample_pieces,
        )


@dataclass(frozen=True, slots=True)
class Optimized:
    """Each replica's cuts in injection order, and schedules in which micro-batch i is the replica's i-th cut.
    `makespan_ns`: under noise the means over disturbed times."""

    replicas: tuple[tuple[Cut, ...], ...]
    schedules: tuple[PipelineSchedule, ...]
    makespan_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A start that can run: its `index` among the starts, the `orders` that each replica begins with, and the walks
    from there, first the trial, then what follows if it is chosen."""

    index: int
    problem: Problem
    cuts: list[Cut]
    orders: list[list[list[int]]]
    trial: Walk
    rest: Walk


def optimize(
    costs: MicroBatchCosts,
    *,
    memory_limit_bytes: int,
    split: bool,
    effort: int,
    seed: int = 0,
    stage_ranks: Sequence[int] | None = None,
) -> PipelineSchedule:
    """The best schedule of one replica's micro-batches in `effort` random moves; a function of its arguments.

    `split` runs every backward as I and W. `stage_ranks` places stages on ranks (default: stage s on rank s). No rank
    exceeds the limit at any time.

    Errors: PlanError for a micro-batch that does not fit alone; ConfigError for a negative effort or a bad placement.
    """
    count = costs.num_micro_batches
    settings = Settings(
        memory_limit_bytes=memory_limit_bytes, split=split, effort=effort, seed=seed, stage_ranks=stage_ranks
    )
    _, best = optimize_best([Start.of_micro_batches([costs], [range(count)], [0] * count)], settings)
    schedule = renumbered(best.schedules[0], {i: cut.first for i, cut in enumerate(best.replicas[0])})
    validate(schedule, count)
    peaks = peak_bytes(schedule, costs)
    if max(peaks) > memory_limit_bytes:
        raise PlanError(
            f"the {schedule.name} schedule needs {max(peaks)} B on rank {peaks.index(max(peaks))} but the limit is"
            f" {memory_limit_bytes} B: raise the limit, tp or pp"
        )
    return schedule


def optimize_best(starts: Sequence[Start], settings: Settings) -> tuple[int, Optimized]:
    """The best result from the best start (the first of equals), and which start that is.

    With several starts, each is tried with the first few moves, in threads where there are cores, and the best goes on
    with the others. A larger effort begins as a smaller one, so it never ends worse. The number of cores changes
    nothing else. Moves change the order, the rule, a cut's kind
    of recomputation, its replica and, where there is a choice, where the items are cut; `equal_counts` keeps the number
    of cuts of each replica. Nothing is proven here: simulate and validate the result.

    Errors: PlanError where no start has an order that fits; ConfigError as optimize.
    """
    candidates, refusal = _candidates(starts, settings)
    tried = [
        (candidate, state)
        for candidate, state in zip(candidates, _trials(candidates, settings), strict=True)
        if max(state.makespan_ns) < NEVER
    ]
    if not tried:
        limit = settings.memory_limit_bytes
        raise refusal or PlanError(f"no order of these micro-batches fits in {limit} B: raise the limit, tp or pp")
    best, state = min(tried, key=lambda one: (one[1].value, one[0].index))
    if best.rest.moves:
        cuts, orders = _in_turn(state)
        state = _searched(best.problem, cuts, orders, settings, best.rest)
    state = _of_least_work(best.problem, state, settings)
    if settings.noise:
        state = _steady(best, state, settings)
    return best.index, Optimized(
        tuple(tuple(state.cut(m) for m in group) for group in state.groups),
        schedules_of(state.actions, best.problem),
        tuple(state.makespan_ns),
    )


def _candidates(starts: Sequence[Start], settings: Settings) -> tuple[list[_Candidate], PlanError | None]:
    """The starts whose micro-batches all fit alone, and the first refusal of another."""
    candidates: list[_Candidate] = []
    records: dict[int, IntArray] = {}  # starts share costs
    refusal: PlanError | None = None
    for index, start in enumerate(starts):
        try:
            if id(start.kind_costs) not in records:
                records[id(start.kind_costs)] = records_of(start.kind_costs, split=settings.split)
            problem = _problem(start, settings, records[id(start.kind_costs)])
            cuts = _fitting(problem, start, settings.memory_limit_bytes)
        except PlanError as error:
            refusal = refusal or error
            continue
        orders = [_start_orders(start, cuts, group) for group in start.groups]
        trial, rest = _walks(start, settings, are_several=len(starts) > 1)
        candidates.append(_Candidate(index, problem, cuts, orders, trial, rest))
    return candidates, refusal


def _start_orders(start: Start, cuts: Sequence[Cut], group: Sequence[int]) -> list[list[int]]:
    orders = start_orders(_costs(start, cuts, group), piece_positions(group, start.sample_pieces))
    return [[group[i] for i in order] for order in orders]


def _trials(candidates: Sequence[_Candidate], settings: Settings) -> list[SearchState]:
    """Each start's result after its trial; a single start is not searched yet."""

    def trial(one: _Candidate) -> SearchState:
        return _searched(one.problem, one.cuts, one.orders, settings, one.trial, with_actions=not one.rest.moves)

    threads = min(len(os.sched_getaffinity(0)), len(candidates))
    if threads > 1:  # the native core releases Python's lock
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(trial, candidates))
    return [trial(one) for one in candidates]


def _walks(start: Start, settings: Settings, *, are_several: bool) -> tuple[Walk, Walk]:
    """A start's trial and the rest of its search. The only one has a trial of no moves; so have several under one kind
    of recomputation, of which the best is seen without, where trials alone would take the effort."""
    moves = _num_moves(start, settings.effort)
    tries = are_several and (settings.effort > TRIAL or len(start.kind_costs) > 1)
    tried = _num_moves(start, min(settings.effort, TRIAL)) if tries else 0
    trial = Walk(seed=settings.seed, moves=tried, cooling=max(1, _num_moves(start, _COOLING)))
    return trial, replace(trial, moves=moves - tried, begun=tried)


def _num_moves(start: Start, effort: int) -> int:
    """The moves of an effort; where samples come in pieces, no more work than that of a few rows."""
    replicas, cuts = len(start.groups), len(start.cuts)
    moves = effort * max(1, replicas // _REPLICAS)
    if has_long_replicas(replicas, cuts):  # a simulation takes as long as a replica has micro-batches
        moves = max(effort // 2, moves * _LONG * replicas // cuts)
    return moves * _ROWS // max(_ROWS, len(start.cuts)) if start.sample_pieces else moves


def has_long_replicas(num_replicas: int, num_micro_batches: int) -> bool:
    """Whether replicas are many and each has many micro-batches: then the search has few moves for each."""
    return num_replicas >= _MANY and num_micro_batches > _MANY * num_replicas


def _in_turn(state: SearchState) -> tuple[list[Cut], list[list[list[int]]]]:
    """The cuts that are left, in the order of the items, and each replica's one order of them."""
    left = sorted((cut, m) for m, cut in enumerate(state.cuts) if cut is not None)
    place = {m: i for i, (_, m) in enumerate(left)}
    return [cut for cut, _ in left], [[[place[m] for m in group]] for group in state.groups]


def _of_least_work(problem: Problem, state: SearchState, settings: Settings) -> SearchState:
    """The state with every cut in the kind of recomputation that takes the least work, if memory holds all of them at
    once and the step ends at the same time. Moves that cost no time may have recomputed some. A state that ends sooner
    is not taken, as a search of more effort might miss it."""
    cuts, orders = _in_turn(state)
    if not cuts:
        return state
    firsts, ends, kinds = np.array(cuts).T
    records = problem.records[:, problem.shapes[ends - 1, ends - firsts - 1]]  # (kinds, cuts, stages, fields)
    work = records[..., : CostField.STORED if problem.split else CostField.WEIGHT].sum(axis=(2, 3))
    least = work.argmin(axis=0)
    if (least == kinds).all():
        return state
    records = records[least, np.arange(len(cuts))]
    ranks = np.array(problem.stage_ranks)
    for (group,) in orders:
        if not group:
            continue
        stored = records[group, :, CostField.STORED].sum(axis=0)
        working = records[group, :, CostField.WORKING].max(axis=0)
        for rank, free_bytes in enumerate(problem.free_bytes):
            if stored[ranks == rank].sum() + working[ranks == rank].max() > free_bytes:
                return state
    lightest = [cut._replace(kind=kind) for cut, kind in zip(cuts, least.tolist(), strict=True)]
    lighter = _searched(problem, lightest, orders, settings, Walk(seed=settings.seed, moves=0))
    return lighter if lighter.makespan_ns == state.makespan_ns else state


def _steady(best: _Candidate, state: SearchState, settings: Settings) -> SearchState:
    """The best state near this one by its mean makespan over disturbed times, from as many moves again. The slowest
    replica takes no more than a little longer undisturbed."""
    cuts, orders = _in_turn(state)
    undisturbed_ns = state.value[0]
    noise = Noise(spread_of(settings.noise), undisturbed_ns + undisturbed_ns // _STEADY)
    walk = replace(best.trial, moves=best.trial.moves + best.rest.moves)
    return _searched(replace(best.problem, noise=noise), cuts, orders, settings, walk)


def _searched(
    problem: Problem,
    cuts: Sequence[Cut],
    orders: Sequence[Sequence[Sequence[int]]],
    settings: Settings,
    walk: Walk,
    *,
    with_actions: bool = True,
) -> SearchState:
    return search(problem, cuts, orders, walk, equal_counts=settings.equal_counts, with_actions=with_actions)


def search(
    problem: Problem,
    cuts: Sequence[Cut],
    starts: Sequence[Sequence[Sequence[int]]],
    walk: Walk,
    *,
    equal_counts: bool = False,
    with_actions: bool = True,
) -> SearchState:
    """The best state of a walk of random moves from `cuts`, which cover the items in turn, and from `starts` (per
    replica, the orders of cuts to begin with).

    Record-to-record travel (Dueck 1993): a move may cost up to an allowance, which shrinks with the moves made so far,
    whatever the number that is to follow. A function of its arguments; of equals the first stays. The native core can
    leave out its actions, which take long to write down.
    """
    new_cuts, groups, chosen_rules, makespans, actions = native.search(
        problem.records,
        np.ascontiguousarray(problem.shapes, np.int32),
        list(problem.stage_ranks),
        list(problem.free_bytes),
        list(problem.short_stages),
        problem.split,
        problem.working_in_backward,
        [_rule_for_core(rule) for rule in problem.rules],
        list(cuts),
        [[list(order) for order in replica] for replica in starts],
        (walk.seed % (1 << 64), walk.moves, walk.begun, walk.cooling),
        equal_counts,
        (0, 1) if problem.cores is None else (problem.cores.tp, problem.cores.num_cores),
        list(map(list, problem.sample_pieces)),
        (0, 0) if problem.noise is None else (problem.noise.spread, problem.noise.most_ns),
        with_actions,
    )
    stages = len(problem.stage_ranks)
    state_cuts = [Cut(*cut) if cut[0] >= 0 else None for cut in new_cuts]
    tables: dict[int, list[Chosen]] = {}  # by the number of cuts: replicas share the actions of equal numbers
    for group in groups if with_actions else ():
        if len(group) not in tables:
            tables[len(group)] = [Chosen(*one) for one in product(_ACTIONS, range(stages), range(len(group)))]
    chosen = [
        [list(map(tables[len(group)].__getitem__, codes)) for codes in replica]
        for replica, group in zip(actions, groups, strict=False)
    ]
    return SearchState(state_cuts, groups, chosen_rules, makespans, chosen, problem.floor_ns(state_cuts))


def _rule_for_core(rule: DispatchRule) -> tuple[int, int, int, int]:
    extra = _CORE_HAS_NO_CAP if rule.extra is None else rule.extra
    most_pending = _CORE_HAS_NO_CAP if rule.most_pending is None else rule.most_pending
    return extra, rule.rhythm, rule.patience, most_pending


_ACTIONS = (CostField.FORWARD, CostField.GRADIENT, CostField.WEIGHT)  # as the native core's numbers count them


def _problem(start: Start, settings: Settings, records: IntArray) -> Problem:
    first = start.kind_costs[0]
    stages = first.num_stages
    ranks = tuple(range(stages)) if settings.stage_ranks is None else tuple(settings.stage_ranks)
    if settings.effort < 0:
        raise ConfigError(f"effort is {settings.effort} but must be a count of at least 0")
    if len(ranks) != stages or set(ranks) != set(range(max(ranks) + 1)):
        raise ConfigError(f"placement {ranks} must put each of {stages} stages on a rank, with none left out")
    free = [settings.memory_limit_bytes] * (max(ranks) + 1)
    for rank, num_bytes in zip(ranks, first.static_bytes.tolist(), strict=True):
        free[rank] -= num_bytes
    return Problem(
        stage_ranks=ranks,
        free_bytes=tuple(free),
        short_stages=tuple(settings.short_stages),
        split=settings.split,
        working_in_backward=first.working_in != "F",
        records=records,
        shapes=start.shapes,
        rules=tuple(rules(split=settings.split)),
        cores=settings.cores,
        sample_pieces=start.sample_pieces,
    )


def _fitting(problem: Problem, start: Start, limit_bytes: int) -> list[Cut]:
    """Each cut under its kind, or under the first that lets it run alone (and the pieces of a sample all together).

    Errors: PlanError where no kind does.
    """
    ranks, free = np.array(problem.stage_ranks), np.array(problem.free_bytes, np.int64)
    cuts = start.cuts
    shapes = _shapes(start, cuts)
    stored, working = np.zeros((2, len(start.kind_costs), len(free), len(cuts)), np.int64)
    possible = np.zeros((len(start.kind_costs), len(cuts)), bool)
    for kind, costs in enumerate(start.kind_costs):
        possible[kind] = costs.forward_ns[:, shapes].max(axis=0) < INFEASIBLE
        for rank in range(len(free)):
            stored[kind, rank] = costs.stored_bytes[ranks == rank][:, shapes].sum(axis=0)
            working[kind, rank] = costs.working_bytes[ranks == rank][:, shapes].max(axis=0)
    needed = stored + working
    fits = (needed <= free[:, None]).all(axis=1) & possible
    if (alone := ~fits.any(axis=0)).any():
        m = int(alone.argmax())
        raise _too_large(m, needed[:, :, m], free, limit_bytes)
    own = np.array([cut.kind for cut in cuts], np.int64)
    kinds = np.where(fits[own, np.arange(len(cuts))], own, fits.argmax(axis=0))
    for sample_pieces in start.sample_pieces:
        pieces = np.array(sample_pieces)
        kinds[pieces] = _fitting_pieces(stored[:, :, pieces], working[:, :, pieces], kinds[pieces], free, limit_bytes)
    return [Cut(cut.first, cut.end, kind) for cut, kind in zip(cuts, kinds.tolist(), strict=True)]


def _too_large(m: int, needed: IntArray, free: IntArray, limit_bytes: int) -> PlanError:
    """Why micro-batch m does not fit. `needed` (kinds, ranks): its bytes."""
    over = (needed - free).min(axis=0)
    rank = int(over.argmax())
    num_bytes = int(needed[:, rank].min()) + limit_bytes - int(free[rank])
    return PlanError(
        f"micro-batch {m} alone needs {num_bytes} B on rank {rank} but the limit is {limit_bytes} B: make the"
        " micro-batch smaller, recompute more of it, or raise tp or pp"
    )


def _fitting_pieces(stored: IntArray, working: IntArray, kinds: IntArray, free: IntArray, limit_bytes: int) -> IntArray:
    """Kinds of recomputation under which all pieces of a sample fit at once. Bytes: (kinds, ranks, pieces).

    As few pieces as possible change to the kind of least bytes. The first pieces change first, as they cost least to
    compute again. Errors: PlanError where even changing all of them does not fit.
    """
    pieces = np.arange(len(kinds))
    lean = int(stored.sum(axis=(1, 2)).argmin())
    for changed in range(len(kinds) + 1):
        chosen = np.where(pieces < changed, lean, kinds)
        needed = stored[chosen, :, pieces].sum(axis=0) + working[chosen, :, pieces].max(axis=0)
        if (needed <= free).all():
            return chosen
    rank = int((needed - free).argmax())
    raise PlanError(
        f"the {len(kinds)} pieces of one sample need {int(needed[rank]) + limit_bytes - int(free[rank])} B at once on"
        f" rank {rank}, recomputed, but the limit is {limit_bytes} B: raise tp or pp, or truncate the sample"
    )


def _costs(start: Start, cuts: Sequence[Cut], group: Sequence[int]) -> MicroBatchCosts:
    """Costs of some cuts, each under its own kind."""
    own = [cuts[m] for m in group]
    return MicroBatchCosts.choose(start.kind_costs, np.array([cut.kind for cut in own]), _shapes(start, own))


def _shapes(start: Start, cuts: Sequence[Cut]) -> IntArray:
    first, end, _ = np.array(cuts, np.int64).reshape(-1, 3).T
    shapes: IntArray = start.shapes[end - 1, end - first - 1].astype(np.int64)
    return shapes


def renumbered(schedule: PipelineSchedule, place: dict[int, int]) -> PipelineSchedule:
    """The schedule with micro-batch m called place[m]."""
    return PipelineSchedule(
        schedule.name,
        tuple(tuple(Action(a.stage, a.kind, place[a.micro_batch]) for a in rank) for rank in schedule.ranks),
        schedule.stage_ranks,
    )
