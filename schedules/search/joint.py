"""The Python twin of the native core's `search.hpp`, step for step: the specification, and the search of installs that
have no compiled core.

A state says where the ordered items are cut into micro-batches, which replica runs each, in what order, recomputing
what, and by which dispatch rule. Random moves change it; its simulated makespan judges it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import numpy as np

from dynapipe_ext.batch.micro_batches import SamplePieces
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.reproducible import splitmix64
from dynapipe_ext.schedules.judge.disturbances import mean_makespan_ns
from dynapipe_ext.schedules.search.dispatch import Pipeline, dispatch
from dynapipe_ext.schedules.search.problem import (
    NEVER,
    Chosen,
    CostField,
    Problem,
    SearchState,
    Walk,
    piece_positions,
    schedules_of,
)
from dynapipe_ext.splits.padded import Cut

Move = Literal["swap", "insert", "rule", "recompute", "give", "exchange", "shift", "divide", "apart"]

# How often each kind of move is tried, of the sum of what there is to move.
_MOVES: dict[Move, int] = {
    "swap": 3,
    "insert": 3,
    "rule": 2,
    "recompute": 6,
    "give": 1,
    "exchange": 1,
    "shift": 4,
    "divide": 2,
    "apart": 4,
}
_MOST_APART = 3  # micro-batches between two pieces of a sample that is put elsewhere


def search_in_python(
    problem: Problem,
    cuts: Sequence[Cut],
    starts: Sequence[Sequence[Sequence[int]]],
    walk: Walk,
    *,
    equal_counts: bool,
) -> SearchState:
    """`optimizer.search` without the native core."""
    replicas = len(starts)
    state = SearchState(list(cuts), [list(orders[0]) for orders in starts], [0] * replicas, [NEVER] * replicas, [])
    for d, orders in enumerate(starts):
        _settle(problem, state, d, orders)
    if max(state.makespan_ns) >= NEVER:
        return state
    state.floor_ns = problem.floor_ns(state.cuts)
    best_state = _Search(problem, state, walk, equal_counts).improve()
    for d in range(replicas):
        ranks: list[list[Chosen]] = [[] for _ in problem.free_bytes]
        _makespan_of(problem, best_state, d, NEVER, ranks)
        best_state.actions.append(ranks)
    return best_state


def _settle(problem: Problem, state: SearchState, d: int, orders: Sequence[Sequence[int]]) -> None:
    """Give replica d the best of all rules over some orders; the first order where nothing runs."""
    best_ns, best_order, best_rule = NEVER, list(orders[0]), 0
    for order in orders:
        for rule in range(len(problem.rules)):
            state.groups[d], state.rules[d] = list(order), rule
            makespan_ns = _makespan_of(problem, state, d, best_ns)
            if makespan_ns < best_ns:
                best_ns, best_order, best_rule = makespan_ns, list(order), rule
    state.makespan_ns[d], state.groups[d], state.rules[d] = best_ns, best_order, best_rule


def _makespan_of(
    problem: Problem, state: SearchState, d: int, give_up: int, orders: list[list[Chosen]] | None = None
) -> int:
    """Makespan of replica d, the mean of the disturbed ones where the problem has noise; at least `give_up` as soon
    as the makespan is known to reach that."""
    records = []
    for m in state.groups[d]:
        record = problem.cost_record(state.cut(m))
        if record is None:
            return NEVER
        records.append(record)
    if not records:
        return 0
    tables = np.stack(records).transpose(2, 1, 0).tolist()
    pipe = Pipeline(
        short_stages=problem.short_stages,
        stage_ranks=problem.stage_ranks,
        free_bytes=problem.free_bytes,
        split=problem.split,
        working_in_backward=problem.working_in_backward,
        forward=tables[CostField.FORWARD],
        gradient=tables[CostField.GRADIENT],
        weight=tables[CostField.WEIGHT],
        stored=tables[CostField.STORED],
        working=tables[CostField.WORKING],
        transfer=tables[CostField.TRANSFER],
        sample_pieces=piece_positions(state.groups[d], problem.sample_pieces),
    )
    rule = problem.rules[state.rules[d]]
    if problem.noise is None:
        return dispatch(pipe, rule, give_up=give_up, orders=orders)
    ranks = [[] for _ in problem.free_bytes] if orders is None else orders
    if dispatch(pipe, rule, give_up=min(give_up, problem.noise.most_ns + 1), orders=ranks) >= NEVER:
        return NEVER
    return mean_makespan_ns(schedules_of([ranks], problem)[0], _costs_of(pipe), problem.noise.spread)


def _costs_of(pipe: Pipeline) -> MicroBatchCosts:
    gradient, weight = np.array(pipe.gradient, np.int64), np.array(pipe.weight, np.int64)
    return MicroBatchCosts(
        forward_ns=np.array(pipe.forward, np.int64),
        backward_ns=gradient + weight if pipe.split else gradient,
        weight_ns=weight,
        stored_bytes=np.array(pipe.stored, np.int64),
        working_bytes=np.array(pipe.working, np.int64),
        transfer_ns=np.array(pipe.transfer[:-1], np.int64).reshape(-1, pipe.count),
        transfer_bytes=np.zeros((len(pipe.stage_ranks) - 1, pipe.count), np.int64),
        static_bytes=np.zeros(len(pipe.stage_ranks), np.int64),
    )


class _Random:
    def __init__(self, state: int) -> None:
        self.state = state % (1 << 64)

    def next(self) -> int:
        self.state, number = splitmix64(self.state)
        return number

    def below(self, n: int) -> int:
        return self.next() % n


class _Search:
    """Random moves of a state. A method that makes a move changes `state`, and returns whether the result can run."""

    def __init__(self, problem: Problem, state: SearchState, walk: Walk, equal_counts: bool) -> None:
        self.problem, self.state, self.walk, self.equal_counts = problem, state, walk, equal_counts
        self.random = _Random(walk.seed + walk.begun)
        possible: dict[Move, bool] = {
            "recompute": len(problem.records) > 1,
            "give": len(state.groups) > 1,
            "exchange": len(state.groups) > 1,
            "shift": problem.shapes.shape[1] > 1,
            "divide": problem.shapes.shape[1] > 1,
            "apart": bool(problem.sample_pieces),
        }
        self.moves = [move for move, share in _MOVES.items() if possible.get(move, True) for _ in range(share)]
        self.touched: list[int] = []  # replicas that the move changes
        self.pieces_with = {m: pieces for pieces in problem.sample_pieces for m in pieces}

    def improve(self) -> SearchState:
        """The best state of the walk. Record-to-record travel (Dueck 1993)."""
        walk, best, record = self.walk, copy.deepcopy(self.state), self.state.energy
        for step in range(walk.begun, walk.begun + walk.moves):
            before = copy.deepcopy(self.state)
            self.touched = []
            can_run = self._move()
            for d in self.touched:
                in_piece_order(self.state.groups[d], self.problem.sample_pieces)
            if not can_run or not self._within(walk.most(record, step), step):
                self.state = before
                continue
            record = min(record, self.state.energy)
            if self.state.value < best.value:
                best = copy.deepcopy(self.state)
        return best

    def _within(self, most_energy: int, step: int) -> bool:
        """Simulate what the move changed, for as long as the energy may stay within the bound. Where that is a single
        replica, it may take longer by no more than its own allowance: else those that are not the slowest become so."""
        state = self.state
        own_ns = [self.walk.most(state.makespan_ns[d], step) for d in self.touched] if len(self.touched) == 1 else []
        state.floor_ns = self.problem.floor_ns(state.cuts)
        for d in self.touched:
            state.makespan_ns[d] = 0
        for d in self.touched:
            room = min([state.most_ns_within(most_energy, d), *own_ns])
            state.makespan_ns[d] = _makespan_of(self.problem, state, d, room + 1)
            if state.makespan_ns[d] > room:
                return False
        return True

    def _touch(self, d: int) -> None:
        if d not in self.touched:
            self.touched.append(d)

    def _can_run(self, *cuts: int) -> bool:
        return all(self.problem.cost_record(self.state.cut(m)) is not None for m in cuts)

    def _move(self) -> bool:
        random, state = self.random, self.state
        d = self._replica_to_change()
        move, a, b = self.moves[random.below(len(self.moves))], random.next(), random.next()
        own = state.groups[d]
        if not own:
            return False
        self._touch(d)
        i, j = a % len(own), b % len(own)
        match move:
            case "swap":
                own[i], own[j] = own[j], own[i]
                return i != j
            case "insert":
                own.insert(j, own.pop(i))
                return i != j
            case "rule":
                old, state.rules[d] = state.rules[d], a % len(self.problem.rules)
                return state.rules[d] != old
            case "recompute":
                cut = state.cut(own[i])
                fresh = state.cuts[own[i]] = cut._replace(kind=b % len(self.problem.records))
                return fresh != cut and self._can_run(own[i])
            case "give":
                return self._give(d, i, b)
            case "exchange":
                return self._exchange(d, i, b)
            case "apart":
                return self._apart(own, i, b)
            case "shift":
                return self._shift(own[i], b)
            case "divide":
                return self._divide(d, own[i], b, random.next())

    def _replica_to_change(self) -> int:
        """Any, or in half of the cases the slowest."""
        d = self.random.below(len(self.state.groups))
        if self.random.below(2):
            for e, makespan in enumerate(self.state.makespan_ns):
                if makespan > self.state.makespan_ns[d]:
                    d = e
        return d

    def _other_replica(self, d: int) -> int:
        other = self.random.below(len(self.state.groups) - 1)
        other += other >= d
        self._touch(other)
        return other

    def _unit(self, m: int) -> tuple[int, ...]:
        """The cuts that go together with one: all pieces of its sample."""
        return self.pieces_with.get(m, (m,))

    def _give(self, d: int, i: int, b: int) -> bool:
        """Replica d gives a unit to another, where it stands together."""
        other = self._other_replica(d)
        own, theirs = self.state.groups[d], self.state.groups[other]
        unit = self._unit(own[i])
        if self.equal_counts or len(own) == len(unit):
            return False
        put_in_place(own, i, unit, ())
        at = b % (len(theirs) + 1)
        theirs[at:at] = unit
        return True

    def _exchange(self, d: int, i: int, b: int) -> bool:
        """Replica d exchanges a unit with another."""
        other = self._other_replica(d)
        own, theirs = self.state.groups[d], self.state.groups[other]
        if not theirs:
            return False
        j = b % len(theirs)
        own_unit, their_unit = self._unit(own[i]), self._unit(theirs[j])
        if self.equal_counts and len(own_unit) != len(their_unit):
            return False
        put_in_place(own, i, own_unit, their_unit)
        put_in_place(theirs, j, their_unit, own_unit)
        return True

    def _apart(self, own: list[int], i: int, b: int) -> bool:
        """The pieces of a sample begin elsewhere, with as many other micro-batches between any two."""
        if own[i] not in self.pieces_with:
            return False
        place_apart(own, self.pieces_with[own[i]], b >> 2, b % (_MOST_APART + 1))
        return True

    def _shift(self, m: int, b: int) -> bool:
        """The boundary between a cut and a neighbour moves by some items; a cut that loses all of them is gone."""
        cuts, groups = self.state.cuts, self.state.groups
        at_end, grows, b = bool(b & 1), bool(b & 2), b >> 2
        boundary = self.state.cut(m).end if at_end else self.state.cut(m).first
        low = next((k for k, cut in enumerate(cuts) if cut and cut.end == boundary), m)
        high = next((k for k, cut in enumerate(cuts) if cut and cut.first == boundary), m)
        if low == high:  # the end of the items
            return False
        giver = high if grows == at_end else low
        taker = low if giver == high else high
        whole = self.state.cut(giver).end - self.state.cut(giver).first
        by = min(whole, 1 + (b >> 3) % (1 << b % 6))
        owner = {k: d for d, group in enumerate(groups) for k in group}
        self._touch(owner[low])
        self._touch(owner[high])
        moved = boundary + by if giver == high else boundary - by
        cuts[low] = self.state.cut(low)._replace(end=moved)
        cuts[high] = self.state.cut(high)._replace(first=moved)
        if by < whole:
            return self._can_run(low, high)
        group = groups[owner[giver]]
        if self.equal_counts or len(group) == 1:
            return False
        group.remove(giver)
        cuts[giver] = None
        return self._can_run(taker)

    def _divide(self, d: int, m: int, b: int, c: int) -> bool:
        """A cut becomes two."""
        cuts, own = self.state.cuts, self.state.groups[d]
        first, end, kind = self.state.cut(m)
        if end - first < 2 or self.equal_counts:
            return False
        fresh = next((k for k, cut in enumerate(cuts) if cut is None), len(cuts))
        if fresh == len(cuts):
            cuts.append(None)
        at = first + 1 + b % (end - first - 1)
        cuts[m], cuts[fresh] = Cut(first, at, kind), Cut(at, end, kind)
        own.insert(c % (len(own) + 1), fresh)
        return self._can_run(m, fresh)


def in_piece_order(group: list[int], sample_pieces: Sequence[SamplePieces]) -> None:
    """Put the pieces of each sample into their order, at the places where they stand.

    >>> group = [3, 9, 1, 2]
    >>> in_piece_order(group, [(1, 2, 3)])
    >>> group
    [1, 9, 2, 3]
    """
    own = [pieces for pieces in sample_pieces if pieces[0] in group]
    for positions, pieces in zip(piece_positions(group, own), own, strict=True):
        for position, m in zip(sorted(positions), pieces, strict=True):
            group[position] = m


def put_in_place(group: list[int], i: int, old: Sequence[int], new: Sequence[int]) -> None:
    """Replace the cut at place i, and all others of `old`, by those of `new`, which then stand together.

    >>> group = [3, 9, 4, 8]
    >>> put_in_place(group, 2, (3, 4), (5, 6))
    >>> group
    [9, 5, 6, 8]
    """
    at = sum(m not in old for m in group[:i])
    group[:] = [m for m in group if m not in old]
    group[at:at] = new


def place_apart(group: list[int], pieces: SamplePieces, at: int, between: int) -> None:
    """Put the pieces of a sample at the `at`-th place among the others (counted round), with `between` of the others
    after each piece.

    >>> group = [3, 9, 4, 8, 7]
    >>> place_apart(group, (3, 4), 1, 1)
    >>> group
    [9, 3, 8, 4, 7]
    """
    group[:] = [m for m in group if m not in pieces]
    at %= len(group) + 1
    for k, m in enumerate(pieces):
        group.insert(min(at + k * (1 + between), len(group)), m)
