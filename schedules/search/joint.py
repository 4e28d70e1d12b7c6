"""Joint search: where the ordered items are cut into micro-batches, which replica runs each, in what order, recomputing
what, dispatched by which rule.

Every state is judged by its simulated makespan. The reference of the native core's `search.hpp`, step for step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import Chain
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.schedules.judge.simulate import SharedCores
from dynapipe_ext.schedules.search.dispatch import (
    NEVER,
    Chosen,
    DispatchRule,
    Pipeline,
    chain_positions,
    dispatch,
    in_piece_order,
    place_apart,
    put_in_place,
    splitmix64,
)

Run = tuple[int, int, int]  # items first .. end - 1 as one micro-batch, and the index of its kind of recomputation
GONE: Run = (-1, -1, 0)  # a run that was merged away

# How often each kind of move is tried, of the sum of what there is to move.
_MOVES = {"swap": 3, "insert": 3, "rule": 2, "recompute": 6, "give": 1, "exchange": 1, "shift": 4, "cut": 2, "chain": 4}
_MOST_APART = 3  # runs between two pieces where a chain is put elsewhere
_MOST_WEIGHT = 4
_ALLOWANCE = 4096  # a move may cost up to one part in so many at first


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What the search may do, and what it costs.

    `records` (kinds, shapes, stages, 6): forward, gradient (I alone if `split`), weight, stored, working and transfer
    of every shape under every kind of recomputation; INFEASIBLE forwards: cannot run so. `shapes[j, r - 1]`, int32, is
    the shape of the run of r items that ends at item j, or -1 where that may not be a micro-batch. With one column
    only, items are micro-batches and stay what they are, and some may carry a sample between them (`chains`; run i is
    item i). On shared `cores` a step takes at least its work over them.
    """

    stage_ranks: tuple[int, ...]
    free_bytes: tuple[int, ...]  # of each rank: limit - static
    split: bool
    working_in_backward: bool
    records: IntArray
    shapes: npt.NDArray[np.int32]
    rules: tuple[DispatchRule, ...]
    cores: SharedCores | None = None
    chains: tuple[Chain, ...] = ()

    def floor_ns(self, runs: Sequence[Run]) -> int:
        """What a step of these runs takes at least where ranks share cores; 0 where they do not."""
        if self.cores is None:
            return 0
        ran = slice(3 if self.split else 2)
        work = 0
        for first, end, kind in runs:
            if (first, end) != GONE[:2]:
                work += int(self.records[kind, self.shapes[end - 1, end - first - 1], :, ran].sum())
        return self.cores.floor_ns(work)

    def cost_record(self, run: Run) -> IntArray | None:
        """Costs (stages, 6) of a run, or None where it cannot be a micro-batch."""
        first, end, kind = run
        if end - first > self.shapes.shape[1] or (shape := int(self.shapes[end - 1, end - first - 1])) < 0:
            return None
        record: IntArray = self.records[kind, shape]
        return None if record[0, 0] >= INFEASIBLE else record


def records_of(kind_costs: Sequence[MicroBatchCosts], *, split: bool) -> IntArray:
    """`Problem.records` of shapes priced under every kind of recomputation."""
    first = kind_costs[0]
    records = np.zeros((len(kind_costs), first.num_micro_batches, first.num_stages, 6), np.int64)
    for record, costs in zip(records, kind_costs, strict=True):
        gradient = costs.input_ns if split else costs.backward_ns
        tables = (costs.forward_ns, gradient, costs.weight_ns, costs.stored_bytes, costs.working_bytes)
        for field, table in enumerate(tables):
            record[:, :, field] = table.T
        record[:, :-1, 5] = costs.transfer_ns.T
        record[costs.forward_ns.max(axis=0) >= INFEASIBLE, :, 0] = INFEASIBLE
    return records


@dataclass(slots=True)
class SearchState:
    """Runs (some may be GONE), and per replica: runs in injection order, index of the rule, makespan (NEVER: nothing
    fits), and the actions of each rank as (letter, stage, position). `floor_ns` is what the step takes at least where
    ranks share cores."""

    runs: list[Run]
    groups: list[list[int]]
    rules: list[int]
    makespan_ns: list[int]
    actions: list[list[list[Chosen]]]
    floor_ns: int = 0

    @property
    def value(self) -> tuple[int, int]:
        """What is best: the smallest largest makespan, if not under the floor, then the smallest sum."""
        return max(self.floor_ns, *self.makespan_ns), sum(self.makespan_ns)

    @property
    def energy(self) -> int:
        """What moves may raise a little: mostly the largest makespan, and a little the mean, so that other replicas
        make room."""
        most, whole = self.value
        return _MOST_WEIGHT * len(self.makespan_ns) * most + whole


def search(
    problem: Problem,
    runs: Sequence[Run],
    starts: Sequence[Sequence[Sequence[int]]],
    *,
    effort: int,
    seed: int,
    equal_counts: bool = False,
    use_native: bool = True,
) -> SearchState:
    """The best state found from `runs`, which cover the items in turn, and from `starts` (per replica, the orders of
    runs to begin with) in `effort` random moves.

    Record-to-record travel (Dueck 1993): a move may cost up to an allowance that shrinks to nothing. A function of its
    arguments; ties go to what was found first.
    """
    if native is None or not use_native:
        return _search(problem, runs, starts, effort, seed, equal_counts)
    found_runs, groups, rules, makespans, actions = native.search(
        problem.records,
        np.ascontiguousarray(problem.shapes, np.int32),
        list(problem.stage_ranks),
        list(problem.free_bytes),
        problem.split,
        problem.working_in_backward,
        [(rule.extra, rule.rhythm, rule.patience, rule.most_pending) for rule in problem.rules],
        list(runs),
        [[list(order) for order in replica] for replica in starts],
        effort,
        seed % (1 << 64),
        equal_counts,
        (0, 1) if problem.cores is None else (problem.cores.tp, problem.cores.num_cores),
        list(map(list, problem.chains)),
    )
    stages = len(problem.stage_ranks)

    def decoded(code: int, count: int) -> Chosen:
        rest, position = divmod(code, count)
        return rest // stages, rest % stages, position

    chosen = [
        [[decoded(code, len(group)) for code in rank] for rank in replica]
        for replica, group in zip(actions, groups, strict=False)
    ]
    found_runs = [run if run[0] >= 0 else GONE for run in found_runs]
    return SearchState(found_runs, groups, rules, makespans, chosen, problem.floor_ns(found_runs))


def _search(
    problem: Problem,
    runs: Sequence[Run],
    starts: Sequence[Sequence[Sequence[int]]],
    effort: int,
    seed: int,
    equal_counts: bool,
) -> SearchState:
    replicas = len(starts)
    state = SearchState(list(runs), [list(orders[0]) for orders in starts], [0] * replicas, [NEVER] * replicas, [])
    for d, orders in enumerate(starts):
        best = (NEVER, state.groups[d], 0)
        for order in orders:
            for rule in range(len(problem.rules)):
                state.groups[d], state.rules[d] = list(order), rule
                best = min(
                    best, (_makespan_of(problem, state, d, best[0]), state.groups[d], rule), key=lambda found: found[0]
                )
        state.makespan_ns[d], state.groups[d], state.rules[d] = best
    if max(state.makespan_ns) >= NEVER:
        return state
    state.floor_ns = problem.floor_ns(state.runs)
    best_state = _Search(problem, state, seed, equal_counts).improve(effort)
    for d in range(replicas):
        ranks: list[list[Chosen]] = [[] for _ in problem.free_bytes]
        _makespan_of(problem, best_state, d, NEVER, ranks)
        best_state.actions.append(ranks)
    return best_state


def _makespan_of(
    problem: Problem, state: SearchState, d: int, give_up: int, orders: list[list[Chosen]] | None = None
) -> int:
    """Makespan of replica d, or at least `give_up` once it is known to be that."""
    records = [problem.cost_record(state.runs[m]) for m in state.groups[d]]
    if not records:
        return 0
    if any(record is None for record in records):
        return NEVER
    tables = np.stack(records).transpose(2, 1, 0).tolist()  # type: ignore[arg-type]
    pipe = Pipeline(
        stage_ranks=problem.stage_ranks,
        free_bytes=problem.free_bytes,
        split=problem.split,
        working_in_backward=problem.working_in_backward,
        forward=tables[0],
        gradient=tables[1],
        weight=tables[2],
        stored=tables[3],
        working=tables[4],
        transfer=tables[5],
        chains=chain_positions(state.groups[d], problem.chains),
    )
    return dispatch(pipe, problem.rules[state.rules[d]], give_up=give_up, orders=orders)


class _Random:
    def __init__(self, state: int) -> None:
        self.state = state % (1 << 64)

    def next(self) -> int:
        self.state, number = splitmix64(self.state)
        return number

    def below(self, n: int) -> int:
        return self.next() % n


class _Search:
    """Random moves of a state; the methods of a move change `state` and tell whether it can run."""

    def __init__(self, problem: Problem, state: SearchState, seed: int, equal_counts: bool) -> None:
        self.problem, self.state, self.equal_counts = problem, state, equal_counts
        self.random = _Random(seed)
        possible = {
            "recompute": len(problem.records) > 1,
            "give": len(state.groups) > 1,
            "exchange": len(state.groups) > 1,
            "shift": problem.shapes.shape[1] > 1,
            "cut": problem.shapes.shape[1] > 1,
            "chain": bool(problem.chains),
        }
        self.moves = [move for move, share in _MOVES.items() if possible.get(move, True) for _ in range(share)]
        self.touched: list[int] = []  # replicas that the move changes
        self.chain_of = {m: chain for chain in problem.chains for m in chain}

    def improve(self, effort: int) -> SearchState:
        best, record = copy.deepcopy(self.state), self.state.energy
        for step in range(effort):
            before = copy.deepcopy(self.state)
            self.touched = []
            moved = self._move()
            for d in self.touched:
                in_piece_order(self.state.groups[d], self.problem.chains)
            if not moved or not self._within(record + record // _ALLOWANCE * (effort - step) // effort):
                self.state = before
                continue
            record = min(record, self.state.energy)
            if self.state.value < best.value:
                best = copy.deepcopy(self.state)
        return best

    def _within(self, allowed: int) -> bool:
        """Run what the move changed, as long as the energy may stay within what is allowed."""
        makespans = self.state.makespan_ns
        replicas = len(makespans)
        self.state.floor_ns = self.problem.floor_ns(self.state.runs)
        for d in self.touched:
            makespans[d] = 0
        for d in self.touched:
            most = max([self.state.floor_ns, *makespans[:d], *makespans[d + 1 :]])
            left = allowed - (sum(makespans) - makespans[d])
            below = left - _MOST_WEIGHT * replicas * most
            room = below if below <= most else left // (_MOST_WEIGHT * replicas + 1)
            makespans[d] = _makespan_of(self.problem, self.state, d, room + 1)
            if makespans[d] > room:
                return False
        return True

    def _touch(self, d: int) -> None:
        if d not in self.touched:
            self.touched.append(d)

    def _runs(self, *runs: int) -> bool:
        return all(self.problem.cost_record(self.state.runs[m]) is not None for m in runs)

    def _move(self) -> bool:
        random, state = self.random, self.state
        replicas = len(state.groups)
        d = random.below(replicas)
        if random.below(2):
            for e, makespan in enumerate(state.makespan_ns):
                if makespan > state.makespan_ns[d]:
                    d = e
        move, a, b = self.moves[random.below(len(self.moves))], random.next(), random.next()
        mine = state.groups[d]
        n = len(mine)
        if n == 0:
            return False
        self._touch(d)
        i, j = a % n, b % n
        match move:
            case "swap":
                mine[i], mine[j] = mine[j], mine[i]
                return i != j
            case "insert":
                mine.insert(j, mine.pop(i))
                return i != j
            case "rule":
                old, state.rules[d] = state.rules[d], a % len(self.problem.rules)
                return state.rules[d] != old
            case "recompute":
                first, end, old = state.runs[mine[i]]
                kind = b % len(self.problem.records)
                state.runs[mine[i]] = (first, end, kind)
                return kind != old and self._runs(mine[i])
            case "give" | "exchange":
                return self._between(move, d, i, b)
            case "chain":
                return self._apart(mine, i, b)
            case "shift":
                return self._shift(mine[i], b)
            case _:
                return self._cut(d, mine[i], b, random.next())

    def _between(self, move: str, d: int, i: int, b: int) -> bool:
        """Replica d gives a run to another, or exchanges one; runs of a chain go together, one behind the other."""
        groups = self.state.groups
        other = self.random.below(len(groups) - 1)
        other += other >= d
        mine, theirs = groups[d], groups[other]
        self._touch(other)
        given = self.chain_of.get(mine[i], (mine[i],))
        if move == "exchange":
            if not theirs:
                return False
            j = b % len(theirs)
            taken = self.chain_of.get(theirs[j], (theirs[j],))
            if self.equal_counts and len(given) != len(taken):
                return False
            put_in_place(mine, i, given, taken)
            put_in_place(theirs, j, taken, given)
            return True
        if self.equal_counts or len(mine) == len(given):
            return False
        put_in_place(mine, i, given, ())
        at = b % (len(theirs) + 1)
        theirs[at:at] = given
        return True

    def _apart(self, mine: list[int], i: int, b: int) -> bool:
        """The chain of a run begins elsewhere, with as many runs between its pieces."""
        if mine[i] not in self.chain_of:
            return False
        place_apart(mine, self.chain_of[mine[i]], b >> 2, b % (_MOST_APART + 1))
        return True

    def _shift(self, m: int, b: int) -> bool:
        """The boundary between a run and a neighbour moves by some items; a run that loses all of them is gone."""
        runs, groups = self.state.runs, self.state.groups
        at_end, grows, b = bool(b & 1), bool(b & 2), b >> 2
        boundary = runs[m][1] if at_end else runs[m][0]
        low = next((k for k, run in enumerate(runs) if run != GONE and run[1] == boundary), m)
        high = next((k for k, run in enumerate(runs) if run[0] == boundary), m)
        if low == high:  # the end of the items
            return False
        giver = high if grows == at_end else low
        taker = low if giver == high else high
        whole = runs[giver][1] - runs[giver][0]
        by = min(whole, 1 + (b >> 3) % (1 << b % 6))
        owner = {k: d for d, group in enumerate(groups) for k in group}
        self._touch(owner[low])
        self._touch(owner[high])
        moved = boundary + by if giver == high else boundary - by
        runs[low], runs[high] = (runs[low][0], moved, runs[low][2]), (moved, *runs[high][1:])
        if by < whole:
            return self._runs(low, high)
        group = groups[owner[giver]]
        if self.equal_counts or len(group) == 1:
            return False
        group.remove(giver)
        runs[giver] = GONE
        return self._runs(taker)

    def _cut(self, d: int, m: int, b: int, c: int) -> bool:
        """A run becomes two."""
        runs, mine = self.state.runs, self.state.groups[d]
        first, end, kind = runs[m]
        if end - first < 2 or self.equal_counts:
            return False
        fresh = next((k for k, run in enumerate(runs) if run == GONE), len(runs))
        if fresh == len(runs):
            runs.append(GONE)
        at = first + 1 + b % (end - first - 1)
        runs[m], runs[fresh] = (first, at, kind), (at, end, kind)
        mine.insert(c % (len(mine) + 1), fresh)
        return self._runs(m, fresh)
