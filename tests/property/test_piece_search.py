"""The search over micro-batches with pieces of samples: orders that may run, no deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import SamplePieces
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes, validate
from dynapipe_ext.schedules.search.optimizer import (
    NEVER,
    NO_LIMIT,
    DispatchPolicy,
    SearchSettings,
    Start,
    list_policies,
    optimize_best,
)
from tests.bench.noise import dispatch

PLACEMENTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)]


def random_costs(rng: np.random.Generator, stages: int, count: int, working_in: str) -> MicroBatchCosts:
    def table(low: int, high: int, rows: int = stages) -> np.ndarray:
        return rng.integers(low, high, (rows, count))

    backward = table(1, 60)
    return MicroBatchCosts(
        forward_ns=table(1, 40),
        backward_ns=backward,
        weight_ns=backward // 2,
        stored_bytes=table(1, 30),
        working_bytes=table(0, 15),
        transfer_ns=table(0, 9, stages - 1),
        transfer_bytes=table(0, 9, stages - 1),
        static_bytes=rng.integers(0, 9, stages),
        working_in=working_in,
    )


@st.composite
def pieced(draw):
    """(stage_ranks, a start of several replicas with pieces among its items, the least limit, random numbers)."""
    stage_ranks = draw(st.sampled_from(PLACEMENTS))
    count, dp = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    costs = random_costs(rng, len(stage_ranks), count, draw(st.sampled_from(["FBI", "F"])))
    kinds = [costs]
    if draw(st.booleans()):
        kinds.append(replace(costs, stored_bytes=costs.stored_bytes // 3, backward_ns=costs.backward_ns + 7))
    items = rng.permutation(count).tolist()
    sizes = rng.integers(1, 5, count).tolist()
    sample_pieces, at = [], 0
    for size in sizes:
        if at + size <= count and size > 1:
            sample_pieces.append(tuple(items[at : at + size]))
        at += size
    units = [*sample_pieces, *((m,) for m in items if not any(m in pieces for pieces in sample_pieces))]
    groups = [[] for _ in range(dp)]
    for unit in units:
        groups[int(rng.integers(dp))] += unit
    start = Start.from_micro_batches(kinds, groups, [0] * count, tuple(sample_pieces))
    ranks = np.array(stage_ranks)
    least = 0
    for rank in set(stage_ranks):
        own = ranks == rank
        whole = max(int(costs.stored_bytes[own][:, unit].sum() + costs.working_bytes[own].max()) for unit in units)
        least = max(least, whole + int(costs.static_bytes[own].sum()))
    return stage_ranks, start, least, rng


@settings(max_examples=70)
@given(case=pieced(), split=st.booleans(), effort=st.integers(0, 80), more=st.integers(0, 60))
def test_what_is_found_runs_pieces_in_order_within_the_limit_and_as_fast_as_it_says(case, split, effort, more) -> None:
    stage_ranks, start, least, _ = case
    limit = least + more
    asked = SearchSettings(memory_limit_bytes=limit, split=split, effort=effort, stage_ranks=stage_ranks)
    _, found = optimize_best([start], asked)
    assert sorted(first for replica in found.replicas for first, _, _ in replica) == list(range(len(start.cuts)))
    for replica, schedule, makespan in zip(found.replicas, found.schedules, found.makespan_ns, strict=True):
        items = [first for first, _, _ in replica]
        costs = MicroBatchCosts.choose(
            start.kind_costs, np.array([kind for _, _, kind in replica], int), np.array(items, int)
        )
        mine = piece_positions(items, start.sample_pieces)
        assert all(list(pieces) == sorted(pieces) for pieces in mine)
        assert sum(map(len, mine)) == sum(m in pieces for m in items for pieces in start.sample_pieces), (
            "a sample was torn"
        )
        validate(schedule, len(items), mine)
        assert max(compute_peak_bytes(schedule, costs)) <= limit
        assert compute_makespan_ns(schedule, costs) <= makespan


@settings(max_examples=60)
@given(case=pieced(), split=st.booleans(), short=st.sets(st.integers(0, 5)))
def test_no_order_blocks_where_every_sample_fits_with_all_that_stands_between_its_pieces(case, split, short) -> None:
    """Any interleaving of pieces and whole micro-batches, under every rule, with the bytes that the argument needs and
    not one more."""
    stage_ranks, start, _, rng = case
    group = rng.permutation(len(start.cuts)).tolist()
    standing = sorted(piece_positions(group, start.sample_pieces))
    order = list(group)
    for pieces, items in zip(standing, (start.sample_pieces[i] for i in _by_first(start, group)), strict=True):
        for position, item in zip(sorted(pieces), items, strict=True):
            order[position] = item
    sample_pieces = tuple(tuple(sorted(pieces)) for pieces in standing)
    costs = start.kind_costs[0].take(order)
    free = []
    positions = range(len(order))
    span_of = {position: (pieces[0], pieces[-1]) for pieces in sample_pieces for position in pieces}
    short_stages = tuple(stage for stage in range(len(stage_ranks)) if stage in short)
    for rank in range(max(stage_ranks) + 1):
        own = [s for s, r in enumerate(stage_ranks) if r == rank]
        stored, working = costs.stored_bytes[own].sum(axis=0), costs.working_bytes[own].max(axis=0)
        spanning = [  # what is inside once all before has gone: samples whose pieces span the place, and it
            [q for q in positions if span_of.get(q, (q, q))[0] <= last <= span_of.get(q, (q, q))[1]]
            for last in positions
        ]
        free.append(max(int(stored[inside].sum() + working[inside].max()) for inside in spanning))
    for rule in list_policies(split=split):
        if rule.rhythm < 2:  # which waits for forwards that memory may keep back
            makespan_ns, _ = dispatch(
                costs, rule, stage_ranks, free, split=split, short_stages=short_stages, sample_pieces=sample_pieces
            )
            assert makespan_ns < NEVER


def test_what_a_younger_micro_batch_took_does_not_keep_the_oldest_from_going_on() -> None:
    """Rank 1 takes both on stage 1, as 6 bytes hold each of them to its end. The first then works with 3 there, which
    are no longer needed when the second one comes to its 4: counting them beside these would stop the first."""
    ones = [[1, 1]] * 4
    costs = costs_of(
        forward=ones, gradient=ones, weight=[[0, 0]] * 4, stored=[[1, 1], [1, 1], [1, 1], [1, 3]],
        working=[[0, 0], [2, 0], [0, 0], [3, 0]], transfer=[[0, 0]] * 3,
    )  # fmt: skip
    makespan_ns, found = dispatch(costs, DispatchPolicy(extra=NO_LIMIT, rhythm=1), (0, 1, 0, 1), (9, 6), split=False)
    assert makespan_ns == 12
    shown = [" ".join(map(str, rank)) for rank in found.ranks]
    assert shown == ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3B0 1B0 3F1 3B1 1B1"]


def test_what_pieces_work_with_stays_while_others_come_and_go() -> None:
    """Pieces (2, 3, 6) come to the last stage before 4, and stay: with 7 on the first one nothing would go on."""
    costs = costs_of(
        forward=[
            [3, 15, 9, 31, 31, 6, 9, 23], [10, 34, 34, 11, 29, 7, 18, 6], [20, 23, 13, 26, 35, 26, 26, 29],
            [30, 16, 4, 2, 12, 25, 35, 31], [19, 8, 36, 39, 7, 16, 26, 21], [26, 2, 36, 32, 20, 5, 7, 7],
        ],
        gradient=[
            [22, 28, 9, 14, 28, 12, 28, 21], [25, 16, 3, 19, 11, 30, 22, 23], [13, 3, 20, 14, 5, 25, 8, 21],
            [22, 6, 20, 29, 11, 11, 21, 8], [7, 19, 25, 4, 20, 22, 7, 14], [27, 1, 22, 22, 10, 28, 15, 4],
        ],
        weight=[
            [22, 28, 9, 14, 27, 12, 28, 20], [25, 15, 3, 19, 11, 29, 21, 23], [12, 2, 19, 13, 5, 24, 7, 20],
            [22, 6, 20, 28, 10, 11, 21, 8], [7, 18, 24, 4, 20, 21, 7, 13], [27, 1, 21, 22, 10, 28, 15, 3],
        ],
        stored=[
            [26, 15, 16, 22, 19, 24, 11, 1], [25, 12, 13, 23, 1, 26, 8, 1], [15, 22, 8, 16, 25, 3, 18, 26],
            [5, 22, 22, 6, 11, 8, 29, 24], [29, 18, 6, 9, 14, 25, 11, 10], [29, 22, 18, 27, 20, 24, 28, 27],
        ],
        working=[
            [14, 3, 4, 8, 10, 1, 10, 13], [13, 3, 6, 12, 9, 11, 12, 13], [2, 8, 5, 4, 5, 4, 9, 11],
            [6, 3, 3, 9, 13, 2, 1, 0], [13, 2, 4, 3, 12, 9, 7, 1], [1, 6, 2, 2, 4, 6, 14, 9],
        ],
        transfer=[
            [2, 1, 4, 0, 1, 5, 4, 0], [0, 7, 1, 6, 2, 2, 2, 5], [2, 5, 2, 2, 4, 1, 2, 2],
            [4, 2, 2, 6, 6, 3, 4, 4], [3, 0, 5, 0, 0, 2, 2, 2],
        ],
    )  # fmt: skip
    rule, stage_ranks = DispatchPolicy(extra=0, rhythm=1), (0, 1, 2, 2, 1, 0)
    pieces = ((2, 3, 6), (1, 5))
    assert dispatch(costs, rule, stage_ranks, (260, 179, 203), split=True, sample_pieces=pieces)[0] < NEVER


def piece_positions(group: list[int], sample_pieces: Sequence[SamplePieces]) -> tuple[SamplePieces, ...]:
    """The pieces of each sample that a replica has, as positions in its order."""
    place = {m: i for i, m in enumerate(group)}
    return tuple(tuple(place[m] for m in pieces) for pieces in sample_pieces if pieces[0] in place)


def costs_of(**tables: list[list[int]]) -> MicroBatchCosts:
    """Costs of split backwards by name; nothing is static."""
    forward, gradient, weight, stored, working, transfer = (
        np.array(tables[name]) for name in ("forward", "gradient", "weight", "stored", "working", "transfer")
    )
    return MicroBatchCosts(
        forward_ns=forward, backward_ns=gradient + weight, weight_ns=weight, stored_bytes=stored, working_bytes=working,
        transfer_ns=transfer, transfer_bytes=transfer, static_bytes=np.zeros(len(forward), np.int64),
    )  # fmt: skip


def _by_first(start: Start, group: list[int]) -> list[int]:
    """Samples in the order of their first places in a group."""
    places = {i: min(group.index(m) for m in pieces) for i, pieces in enumerate(start.sample_pieces)}
    firsts = {piece_positions(group, [pieces])[0][0]: i for i, pieces in enumerate(start.sample_pieces)}
    assert len(places) == len(firsts)
    return [firsts[pieces[0]] for pieces in sorted(piece_positions(group, start.sample_pieces))]
