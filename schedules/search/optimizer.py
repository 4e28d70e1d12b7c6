"""The search for the best plan: starts, moves, and samples exchanged between micro-batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import Chain, MicroBatch, round_up
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.reproducible import non_negative_least_squares
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.judge.simulate import SharedCores, peak_bytes, validate
from dynapipe_ext.schedules.search.dispatch import NEVER, Chosen, chain_positions, rules, splitmix64, start_orders
from dynapipe_ext.schedules.search.joint import GONE, Problem, Run, SearchState, records_of, search
from dynapipe_ext.splits.padded import Cut, Runs, bottleneck

ShapeLaw = tuple[float, float, float, float, float, float]  # see `fitted_law`

_NEAR = (0.6, 1.5)  # times the usual micro-batch's time: shapes that a law is fitted to, as only these will come about
_FEWEST_SHAPES = 32
_LONGER = 1.1  # times what it took: how long a micro-batch may become that was not below the median
_ALLOWANCE = 2000  # a move may cost up to one part in so many at first
_MOVES = 256  # for every sample
_SEED = 0


def exchanged(runs: Runs, cuts: Sequence[Cut]) -> list[MicroBatch]:
    """As many micro-batches as cuts, each under its cut's kind of recomputation, with samples exchanged between them.

    They keep the cap on tokens; their prices are not asked for. Raises PlanError where too little is priced for a law.
    """
    times, usual = bottleneck(runs.kind_costs[0], stage_ranks=runs.stage_ranks)[0], sorted(runs.times(cuts))
    law = fitted_law(runs.sizes, times, usual[len(usual) // 2])
    if law is None:
        raise PlanError("too few shapes are priced to say what others take")
    order, multiple = runs.order, runs.caps.pad_multiple
    encoder = [round_up(s.encoder, multiple) for s in order]
    decoder = [round_up(s.decoder, multiple) for s in order]
    groups = [range(first, end) for first, end, _ in cuts]
    most = runs.caps.max_tokens or INFEASIBLE
    found = regrouped(groups, encoder, decoder, law, moves=_MOVES * len(order), most_tokens=most)
    return [
        MicroBatch(tuple(order[i] for i in sorted(group)), recompute=runs.kinds[kind], pad_multiple=multiple)
        for group, (_, _, kind) in zip(found, cuts, strict=True)
    ]


def fitted_law(sizes: IntArray, times_ns: IntArray, usual_ns: int) -> ShapeLaw | None:
    """c of c0 + rows (c1 e + c2 d + c3 e e + c4 d d + c5 e d), about the time of `rows` samples padded to (e, d).

    `sizes` (3, shapes): rows, e and d of shapes that take about so long as a micro-batch does (`usual_ns`), with their
    `times_ns`. None where there are too few of these to tell.
    """
    near = (times_ns > _NEAR[0] * usual_ns) & (times_ns < min(_NEAR[1] * usual_ns, INFEASIBLE))
    if int(near.sum()) < _FEWEST_SHAPES:
        return None
    rows, e, d = sizes[:, near].astype(np.float64)
    law = np.stack([np.ones_like(rows), rows * e, rows * d, rows * e * e, rows * d * d, rows * e * d], axis=1)
    c0, c1, c2, c3, c4, c5 = non_negative_least_squares(law, times_ns[near].astype(np.float64)).tolist()
    return c0, c1, c2, c3, c4, c5


def regrouped(
    groups: Sequence[Sequence[int]],
    encoder: Sequence[int],
    decoder: Sequence[int],
    law: ShapeLaw,
    *,
    moves: int,
    most_tokens: int = INFEASIBLE,
) -> list[list[int]]:
    """As many groups of the same items (with these padded lengths), their sum by `law` as small as so many moves found.

    A move gives an item to another group or exchanges two, mostly one that is its group's longest on a side. No group
    becomes much longer, or comes to have more positions, padding included, than `most_tokens`. Record-to-record travel
    (Dueck 1993), as in `joint`. A function of its arguments.
    """
    if len(groups) < 2:
        return list(map(list, groups))
    if native is not None:
        found: list[list[int]] = native.regrouped(
            list(map(list, groups)), list(encoder), list(decoder), law, most_tokens, moves, _SEED
        )
        return found
    return Regrouping(groups, encoder, decoder, law, most_tokens).after(moves, _SEED)


class Regrouping:
    """The native core's twin: groups, and what moves have made of their costs."""

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        encoder: Sequence[int],
        decoder: Sequence[int],
        law: ShapeLaw,
        most_tokens: int,
    ) -> None:
        self.groups, self.lengths, self.law = [list(group) for group in groups], (encoder, decoder), law
        self.most_tokens = most_tokens
        self.cost = [self._cost(group) for group in self.groups]
        median = sorted(self.cost)[len(self.cost) // 2]
        self.most = [max(cost * _LONGER, median) for cost in self.cost]

    def after(self, moves: int, seed: int) -> list[list[int]]:
        state, energy = seed, 0.0
        for cost in self.cost:  # one after the other, as the native core adds; `sum` compensates
            energy += cost
        record, allowance = energy, energy / _ALLOWANCE
        for move in range(moves):
            state, choice = splitmix64(state)
            state, places = splitmix64(state)
            a, b = choice % len(self.groups), (choice >> 16) % len(self.groups)
            if a == b or (len(self.groups[a]) < 2 and not choice >> 34 & 1):
                continue
            mine, theirs = self._moved(a, b, choice >> 32, places)
            costs = self._cost(mine), self._cost(theirs)
            changed = energy + (costs[0] + costs[1] - self.cost[a] - self.cost[b])
            if not self._possible(a, mine, costs[0]) or not self._possible(b, theirs, costs[1]):
                continue
            if changed > record + allowance * (moves - move) / moves:
                continue
            self.groups[a], self.groups[b] = mine, theirs
            self.cost[a], self.cost[b] = costs
            energy, record = changed, min(record, changed)
        return self.groups

    def _moved(self, a: int, b: int, choice: int, places: int) -> tuple[list[int], list[int]]:
        """Groups a and b after the move; bits of the choice: the side, exchange or gift, any item or the longest."""
        mine, theirs = list(self.groups[a]), list(self.groups[b])
        lengths = self.lengths[choice & 1]
        i = places % len(mine)
        if choice >> 3 & 3:
            i = max(range(len(mine)), key=lambda at: lengths[mine[at]])
        if choice >> 2 & 1:
            j = (places >> 32) % len(theirs)
            mine[i], theirs[j] = theirs[j], mine[i]
        else:
            theirs.append(mine[i])
            mine[i] = mine[-1]
            mine.pop()
        return mine, theirs

    def _possible(self, g: int, items: Sequence[int], cost: float) -> bool:
        return cost <= max(self.cost[g], self.most[g]) and len(items) * sum(self._shape(items)) <= self.most_tokens

    def _cost(self, items: Sequence[int]) -> float:
        c0, c1, c2, c3, c4, c5 = self.law
        e, d = self._shape(items)
        return (c1 * e + c2 * d + c3 * (e * e) + c4 * (d * d) + c5 * (e * d)) * len(items) + c0

    def _shape(self, items: Sequence[int]) -> tuple[int, int]:
        encoder, decoder = self.lengths
        return max(encoder[item] for item in items), max(decoder[item] for item in items)


_TRIAL = 16  # of the moves, one part in so many for each of several starts
_REPLICAS = 4  # that one measure of effort is for
_ROWS = 12  # likewise, with samples in pieces, which are many rows: moves are fewer, as each costs more


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked of the search; `seed` and `effort` make it a function.

    `effort` is the number of random moves for up to 7 replicas, twice as many for 8, three times for 12, and so on.
    """

    memory_limit_bytes: int
    split: bool  # run backwards as I and W
    effort: int
    seed: int = 0
    stage_ranks: Sequence[int] | None = None  # default: stage s on rank s
    equal_counts: bool = False
    use_native: bool = True
    cores: SharedCores | None = None  # None: every rank has its own


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Runs, which cover the items of a batch in turn, grouped by replica.

    `kind_costs` price every shape under each kind of recomputation (INFEASIBLE forwards: cannot run so);
    `shapes[j, r - 1]`, int32, is the shape of the run of r items that ends at item j, or -1 where that may not be a
    micro-batch. With one column only, items are micro-batches and stay what they are.
    """

    kind_costs: tuple[MicroBatchCosts, ...]
    shapes: npt.NDArray[np.int32]
    runs: tuple[Run, ...]
    groups: tuple[tuple[int, ...], ...]
    chains: tuple[Chain, ...] = ()  # of items that carry one sample, each within one group; only with one column

    @classmethod
    def of_micro_batches(
        cls,
        kind_costs: Sequence[MicroBatchCosts],
        groups: Sequence[Sequence[int]],
        kinds: Sequence[int],
        chains: tuple[Chain, ...] = (),
    ) -> Start:
        """Micro-batches as they are, each with its index into `kind_costs`."""
        shapes = np.arange(len(kinds), dtype=np.int32).reshape(-1, 1)
        runs = tuple((m, m + 1, kind) for m, kind in enumerate(kinds))
        grouped = tuple(map(tuple, groups))
        return cls(kind_costs=tuple(kind_costs), shapes=shapes, runs=runs, groups=grouped, chains=chains)


@dataclass(frozen=True, slots=True)
class Optimized:
    """Each replica's runs in injection order, and schedules in which micro-batch i is the replica's i-th run."""

    replicas: tuple[tuple[Run, ...], ...]
    schedules: tuple[PipelineSchedule, ...]
    makespan_ns: tuple[int, ...]


def optimize(
    costs: MicroBatchCosts,
    *,
    memory_limit_bytes: int,
    split: bool,
    effort: int,
    seed: int = 0,
    stage_ranks: Sequence[int] | None = None,
) -> PipelineSchedule:
    """The best schedule found for one replica's micro-batches in `effort` random moves; a function of its arguments.

    `split` runs every backward as I and W. `stage_ranks` places stages on ranks (default: stage s on rank s). No rank
    exceeds the limit at any time.

    Errors: PlanError for a micro-batch that does not fit alone; ConfigError for a negative effort or a bad placement.
    """
    count = costs.num_micro_batches
    settings = Settings(
        memory_limit_bytes=memory_limit_bytes, split=split, effort=effort, seed=seed, stage_ranks=stage_ranks
    )
    _, found = optimize_best([Start.of_micro_batches([costs], [range(count)], [0] * count)], settings)
    schedule = renumbered(found.schedules[0], {i: first for i, (first, _, _) in enumerate(found.replicas[0])})
    validate(schedule, count)
    peaks = peak_bytes(schedule, costs)
    if max(peaks) > memory_limit_bytes:
        raise PlanError(
            f"the {schedule.name} schedule needs {max(peaks)} B on rank {peaks.index(max(peaks))} but the limit is"
            f" {memory_limit_bytes} B: raise the limit, tp or pp"
        )
    return schedule


def optimize_best(starts: Sequence[Start], settings: Settings) -> tuple[int, Optimized]:
    """The best found from the best start (the first of equals), and which that is.

    Of several starts each is tried with a small part of the moves, in threads where there are cores, and the best goes
    on with all of them; how many cores there are changes nothing else.
    Moves change the order, the rule, a run's kind, its replica and, where there is a choice, where the items are cut;
    `equal_counts` keeps the number of runs of each replica. Nothing is proven here: simulate and validate the result.

    Errors: PlanError where no start has an order that fits; ConfigError as optimize.
    """
    moves = [_moves(start, settings) for start in starts]
    possible: list[tuple[int, Problem, list[Run], list[list[list[int]]]]] = []
    records: dict[int, IntArray] = {}  # starts share costs
    refusal: PlanError | None = None
    for index, start in enumerate(starts):
        try:
            if id(start.kind_costs) not in records:
                records[id(start.kind_costs)] = records_of(start.kind_costs, split=settings.split)
            problem = _problem(start, settings, records[id(start.kind_costs)])
            runs = _fitting(problem, start, settings.memory_limit_bytes)
        except PlanError as error:
            refusal = refusal or error
            continue
        orders = [
            [
                [group[i] for i in order]
                for order in start_orders(_costs(start, runs, group), chain_positions(group, start.chains))
            ]
            for group in start.groups
        ]
        possible.append((index, problem, runs, orders))

    def trial(one: tuple[int, Problem, list[Run], list[list[list[int]]]]) -> SearchState:
        index, problem, runs, orders = one
        return _found(problem, runs, orders, settings, moves[index] // _TRIAL if len(starts) > 1 else 0)

    cores = len(os.sched_getaffinity(0))
    if min(cores, len(possible)) > 1 and settings.use_native and native is not None:  # the core runs without the lock
        with ThreadPoolExecutor(min(cores, len(possible))) as pool:
            founds = list(pool.map(trial, possible))
    else:
        founds = [trial(one) for one in possible]
    tried = [(*one[:2], found) for one, found in zip(possible, founds, strict=True) if max(found.makespan_ns) < NEVER]
    if not tried:
        limit = settings.memory_limit_bytes
        raise refusal or PlanError(f"no order of these micro-batches fits in {limit} B: raise the limit, tp or pp")
    index, problem, found = min(tried, key=lambda one: (one[2].value, one[0]))
    if settings.effort:
        runs, orders = _in_turn(found)
        found = _found(problem, runs, orders, settings, moves[index])
    return index, Optimized(
        tuple(tuple(found.runs[m] for m in group) for group in found.groups),
        tuple(_schedule(actions, problem) for actions in found.actions),
        tuple(found.makespan_ns),
    )


def _moves(start: Start, settings: Settings) -> int:
    """What the effort comes to: as many moves, but where samples come in pieces no more work than of a few rows."""
    moves = settings.effort * max(1, len(start.groups) // _REPLICAS)
    return moves * _ROWS // max(_ROWS, len(start.runs)) if start.chains else moves


def _in_turn(found: SearchState) -> tuple[list[Run], list[list[list[int]]]]:
    """Runs that cover the items in turn, and each replica's one order of them."""
    alive = sorted((m for m, run in enumerate(found.runs) if run != GONE), key=lambda m: found.runs[m])
    place = {m: i for i, m in enumerate(alive)}
    return [found.runs[m] for m in alive], [[[place[m] for m in group]] for group in found.groups]


def _found(
    problem: Problem, runs: Sequence[Run], orders: Sequence[Sequence[Sequence[int]]], settings: Settings, effort: int
) -> SearchState:
    return search(
        problem,
        runs,
        orders,
        effort=effort,
        seed=settings.seed,
        equal_counts=settings.equal_counts,
        use_native=settings.use_native,
    )


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
        split=settings.split,
        working_in_backward=first.working_in != "F",
        records=records,
        shapes=start.shapes,
        rules=tuple(rules(split=settings.split)),
        cores=settings.cores,
        chains=start.chains,
    )


def _fitting(problem: Problem, start: Start, limit_bytes: int) -> list[Run]:
    """Each run under its kind, or the first that lets it run alone (and pieces of a sample all together); PlanError
    where none does."""
    ranks, free = np.array(problem.stage_ranks), np.array(problem.free_bytes, np.int64)
    runs = start.runs
    shapes = _shapes(start, runs)
    stored, working = np.zeros((2, len(start.kind_costs), len(free), len(runs)), np.int64)
    possible = np.zeros((len(start.kind_costs), len(runs)), bool)
    for kind, costs in enumerate(start.kind_costs):
        possible[kind] = costs.forward_ns[:, shapes].max(axis=0) < INFEASIBLE
        for rank in range(len(free)):
            stored[kind, rank] = costs.stored_bytes[ranks == rank][:, shapes].sum(axis=0)
            working[kind, rank] = costs.working_bytes[ranks == rank][:, shapes].max(axis=0)
    needed = stored + working
    fits = (needed <= free[:, None]).all(axis=1) & possible
    if (alone := ~fits.any(axis=0)).any():
        m = int(alone.argmax())
        over = (needed[:, :, m] - free).min(axis=0)
        rank = int(over.argmax())
        most = limit_bytes - int(free[rank])
        raise PlanError(
            f"micro-batch {m} alone needs {int(needed[:, rank, m].min()) + most} B on rank {rank} but the limit is"
            f" {limit_bytes} B: make the micro-batch smaller, recompute more of it, or raise tp or pp"
        )
    own = np.array([kind for _, _, kind in runs], np.int64)
    kinds = np.where(fits[own, np.arange(len(runs))], own, fits.argmax(axis=0))
    for chain in start.chains:
        pieces = np.array(chain)
        kinds[pieces] = _fitting_chain(stored[:, :, pieces], working[:, :, pieces], kinds[pieces], free, limit_bytes)
    return [(first, end, kind) for (first, end, _), kind in zip(runs, kinds.tolist(), strict=True)]


def _fitting_chain(stored: IntArray, working: IntArray, kinds: IntArray, free: IntArray, limit_bytes: int) -> IntArray:
    """The kinds of a sample's pieces, or that of least bytes for as many of the first ones, which cost least to compute
    again, as it takes for all to be held at once; PlanError where no number of them will do. Bytes: (kinds, ranks,
    pieces)."""
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


def _costs(start: Start, runs: Sequence[Run], group: Sequence[int]) -> MicroBatchCosts:
    """Costs of some runs, each under its own kind."""
    mine = [runs[m] for m in group]
    return MicroBatchCosts.choose(start.kind_costs, np.array([kind for _, _, kind in mine]), _shapes(start, mine))


def _shapes(start: Start, runs: Sequence[Run]) -> IntArray:
    first, end, _ = np.array(runs, np.int64).reshape(-1, 3).T
    shapes: IntArray = start.shapes[end - 1, end - first - 1].astype(np.int64)
    return shapes


def _schedule(actions: list[list[Chosen]], problem: Problem) -> PipelineSchedule:
    letters = (Kind.FORWARD, Kind.BACKWARD_INPUT if problem.split else Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    ranks = tuple(tuple(Action(s, letters[letter], position) for letter, s, position in rank) for rank in actions)
    name = "adaptive-split" if problem.split else "adaptive"
    return PipelineSchedule(name, ranks or tuple(() for _ in set(problem.stage_ranks)), problem.stage_ranks)


def renumbered(schedule: PipelineSchedule, place: dict[int, int]) -> PipelineSchedule:
    """The schedule with micro-batch m called place[m]."""
    return PipelineSchedule(
        schedule.name,
        tuple(tuple(Action(a.stage, a.kind, place[a.micro_batch]) for a in rank) for rank in schedule.ranks),
        schedule.stage_ranks,
    )
