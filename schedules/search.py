"""Joint search: which replica runs each micro-batch, in what order, recomputing what, dispatched by which rule.

Every state is judged by its simulated makespan: the slowest replica's, then the sum over replicas. The reference of the
native core's `search.hpp`, step for step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.schedules.dispatch import NEVER, Chosen, Pipeline, Rule, dispatch
from dynapipe_ext.schedules.order import splitmix64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Costs of each micro-batch under each kind of recomputation: arrays (kinds, stages, micro-batches), int64.

    `transfer` is (stages - 1, micro-batches). A kind that a micro-batch cannot run has INFEASIBLE as its forward.
    """

    stage_ranks: tuple[int, ...]
    free_bytes: tuple[int, ...]
    split: bool
    working_in_backward: bool
    forward: IntArray
    gradient: IntArray
    weight: IntArray
    stored: IntArray
    working: IntArray
    transfer: IntArray
    rules: tuple[Rule, ...]


@dataclass(slots=True)
class Found:
    """Per replica: micro-batches in injection order, index of the rule, makespan (NEVER: nothing fits), and the actions
    of each rank as (letter, stage, micro-batch); per micro-batch: its kind of recomputation."""

    groups: list[list[int]]
    kinds: list[int]
    rules: list[int]
    makespan_ns: list[int]
    actions: list[list[list[Chosen]]]

    @property
    def value(self) -> tuple[int, int]:
        return max(self.makespan_ns), sum(self.makespan_ns)


def search(
    problem: Problem,
    starts: Sequence[Sequence[Sequence[int]]],
    kinds: Sequence[int],
    *,
    effort: int,
    seed: int,
    equal_counts: bool = False,
    use_native: bool = True,
) -> Found:
    """The best state found from `starts` (per replica, the orders to begin with) in `effort` random moves.

    Record-to-record travel (Dueck 1993): a move may cost up to an allowance that shrinks to nothing. A
    function of its arguments; ties go to what was found first.
    """
    if native is None or not use_native:
        return _search(problem, starts, kinds, effort, seed, equal_counts)
    num_kinds, stages, count = problem.forward.shape
    groups, found_kinds, rules, makespans, actions = native.search(
        num_kinds,
        stages,
        count,
        *(
            np.ascontiguousarray(table, np.int64)
            for table in (
                problem.forward,
                problem.gradient,
                problem.weight,
                problem.stored,
                problem.working,
                problem.transfer,
            )
        ),
        list(problem.stage_ranks),
        list(problem.free_bytes),
        problem.split,
        problem.working_in_backward,
        [(rule.extra, rule.alternate, rule.patience, rule.most_pending) for rule in problem.rules],
        [[list(order) for order in replica] for replica in starts],
        list(kinds),
        effort,
        seed % (1 << 64),
        equal_counts,
    )

    def decoded(code: int) -> Chosen:
        rest, m = divmod(code, count)
        return rest // stages, rest % stages, m

    decoded_actions = [[[decoded(code) for code in rank] for rank in replica] for replica in actions]
    return Found(groups, found_kinds, rules, makespans, decoded_actions)


def _run(
    problem: Problem,
    order: Sequence[int],
    kinds: Sequence[int],
    rule: int,
    give_up: int,
    orders: list[list[Chosen]] | None = None,
) -> int:
    if not order:
        return 0
    chosen = [kinds[m] for m in order]
    taken = [
        table[chosen, :, order].T.tolist()
        for table in (problem.forward, problem.gradient, problem.weight, problem.stored, problem.working)
    ]
    if max(map(max, taken[0])) >= INFEASIBLE:
        return NEVER
    pipe = Pipeline(
        stage_ranks=problem.stage_ranks,
        free_bytes=problem.free_bytes,
        split=problem.split,
        working_in_backward=problem.working_in_backward,
        forward=taken[0],
        gradient=taken[1],
        weight=taken[2],
        stored=taken[3],
        working=taken[4],
        transfer=problem.transfer[:, order].tolist(),
    )
    return dispatch(pipe, problem.rules[rule], give_up=give_up, orders=orders)


class _Random:
    def __init__(self, state: int) -> None:
        self.state = state % (1 << 64)

    def next(self) -> int:
        self.state, number = splitmix64(self.state)
        return number

    def below(self, n: int) -> int:
        return self.next() % n


def _search(
    problem: Problem,
    starts: Sequence[Sequence[Sequence[int]]],
    kinds: Sequence[int],
    effort: int,
    seed: int,
    equal_counts: bool,
) -> Found:
    replicas = len(starts)
    state = Found([[] for _ in starts], list(kinds), [0] * replicas, [NEVER] * replicas, [])
    for d, orders in enumerate(starts):
        state.groups[d] = list(orders[0])
        for order in orders:
            for rule in range(len(problem.rules)):
                found = _run(problem, order, kinds, rule, state.makespan_ns[d])
                if found < state.makespan_ns[d]:
                    state.groups[d], state.rules[d], state.makespan_ns[d] = list(order), rule, found
    if max(state.makespan_ns) >= NEVER:
        return state
    best = _improve(problem, state, effort, _Random(seed), equal_counts)
    for d, group in enumerate(best.groups):
        ranks: list[list[Chosen]] = [[] for _ in problem.free_bytes]
        _run(problem, group, best.kinds, best.rules[d], NEVER, ranks)
        best.actions.append([[(letter, s, group[p]) for letter, s, p in rank] for rank in ranks])
    return best


def _improve(problem: Problem, state: Found, effort: int, random: _Random, equal_counts: bool) -> Found:
    best = copy.deepcopy(state)
    for step in range(effort):
        d = random.below(len(state.groups))
        if random.below(4):
            for e, makespan in enumerate(state.makespan_ns):
                if makespan > state.makespan_ns[d]:
                    d = e
        moved = Found(
            [list(g) for g in state.groups], list(state.kinds), list(state.rules), list(state.makespan_ns), []
        )
        other = _move(problem, moved, d, random, equal_counts)
        if (moved.groups, moved.kinds, moved.rules) == (state.groups, state.kinds, state.rules):
            continue
        record = best.value[0]
        allowed = max(record + record // 256 * (effort - step) // effort, record)
        for changed in (d,) if other < 0 else (d, other):
            found = _run(problem, moved.groups[changed], moved.kinds, moved.rules[changed], allowed + 1)
            moved.makespan_ns[changed] = found
            if found > allowed:
                break
        if moved.value[0] > allowed:
            continue
        state = moved
        if state.value < best.value:
            best = copy.deepcopy(state)
    return best


def _move(problem: Problem, moved: Found, d: int, random: _Random, equal_counts: bool) -> int:
    """Change something of replica d at random; the other replica that changed with it, or -1."""
    mine, replicas = moved.groups[d], len(moved.groups)
    n = len(mine)
    kind, a, b = random.below(8), random.next(), random.next()
    if n == 0:
        return -1
    if kind <= 1:
        mine[a % n], mine[b % n] = mine[b % n], mine[a % n]
    elif kind <= 3:
        m = mine.pop(a % n)
        mine.insert(b % n, m)
    elif kind == 4:
        moved.rules[d] = a % len(problem.rules)
    elif kind == 5:
        moved.kinds[mine[a % n]] = b % len(problem.forward)
    elif replicas > 1:
        other = random.below(replicas - 1)
        other += other >= d
        theirs = moved.groups[other]
        if kind == 6 and not equal_counts and n > 1:
            m = mine.pop(a % n)
            theirs.insert(b % (len(theirs) + 1), m)
        elif theirs:
            i, j = a % n, b % len(theirs)
            mine[i], theirs[j] = theirs[j], mine[i]
        return other
    return -1
