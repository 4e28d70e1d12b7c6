"""Splits, rules and balance over random batches: nothing lost, caps kept, and brute force no better."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import (
    GlobalBatchPlan,
    MicroBatch,
    ReplicaPlan,
    SampleLength,
    check_cover,
)
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.balance import assign_replicas
from dynapipe_ext.partitioning.packing import RowPackingPolicy, RowPackings, fill_lightest, make_evaluate
from dynapipe_ext.partitioning.padded import (
    MicroBatchLimits,
    SortOrder,
    find_best_partition,
    price_cuts,
    sort_samples,
)
from dynapipe_ext.partitioning.rules import cut_fixed_rows, pack_documents, pad_to_batch_max, split_as_dynapipe

COSTS = TokenCosts(3, ns_per_token=100, ns_per_token_squared=0.5, overhead_ns=3000, bytes_per_token=10)
BY_BATCH = make_evaluate(COSTS, min_in_flight=3)
# Times so short that every bound between them can be tried, and an overhead worth several samples.
SHORT = TokenCosts(3, ns_per_token=1, ns_per_token_squared=0.005, overhead_ns=30, bytes_per_token=10)
MERGING = TokenCosts(3, ns_per_token=100, ns_per_token_squared=0.05, overhead_ns=30_000, bytes_per_token=10)
NO_CAPS = MicroBatchLimits()
STEADY = settings(derandomize=True, max_examples=60)
Ranges = list[tuple[int, int]]
LENGTH = st.one_of(st.just(1), st.integers(1, 40), st.integers(1, 400))


@st.composite
def batches(draw: st.DrawFn, *, least: int = 1, most: int = 40, decoder: bool | None = None) -> list[SampleLength]:
    with_decoder = draw(st.booleans()) if decoder is None else decoder
    samples = []
    for index in draw(st.permutations(range(draw(st.integers(least, most))))):
        encoder, dec = draw(LENGTH), draw(LENGTH) if with_decoder else 0
        samples.append(SampleLength(index, encoder, dec, target=draw(st.integers(0, dec or encoder))))
    return samples


def check(replicas: list[list[MicroBatch]], samples: list[SampleLength], dp: int) -> None:
    assert len(replicas) == dp
    assert all(replicas), "a replica is empty"
    plan = GlobalBatchPlan(step=0, replicas=tuple(ReplicaPlan(d, tuple(r)) for d, r in enumerate(replicas)))
    check_cover(plan, samples)
    assert plan.target_tokens == sum(s.target for s in samples)


def replicate(micro_batches: list[MicroBatch], dp: int) -> list[list[MicroBatch]]:
    times, _ = BY_BATCH(micro_batches)
    return [[micro_batches[i] for i in share] for share in assign_replicas(times.tolist(), dp)]


def split_padded(
    samples: list[SampleLength],
    costs: TokenCosts,
    *,
    pp: int,
    dp: int,
    caps: MicroBatchLimits = NO_CAPS,
    in_flight: int = 1,
    order: SortOrder = "sorted",
    thinning_ns: int = 1,
) -> list[MicroBatch]:
    """The exact optimum over the ranges of the samples in this order."""
    priced = price_cuts(
        sort_samples(samples, order),
        costs,
        ("none",),
        caps,
        weight=dp * (pp - 1),
        min_in_flight=in_flight,
        is_exact=True,
    )
    cuts = priced.make_first_cuts(pp=pp, dp=dp, min_in_flight=in_flight, thinning_ns=thinning_ns)
    return [priced.make_micro_batch(cut) for cut in cuts]


@STEADY
@given(batches(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 8]))
def test_every_split_trains_every_sample_once(samples: list[SampleLength], dp: int, pp: int, multiple: int) -> None:
    dp = min(dp, len(samples))
    padded = split_padded(samples, SHORT, pp=pp, dp=dp, caps=MicroBatchLimits(pad_multiple=multiple))
    rows = RowPackings.from_samples(samples, BY_BATCH, RowPackingPolicy(max_tokens=510, pad_multiple=multiple))
    packed = list(rows.list_finalists(BY_BATCH, pp=pp, dp=dp, max_bytes=None, equal_counts=False)[0])
    check(replicate(padded, dp), samples, dp)
    check(replicate(packed, dp), samples, dp)
    assert max(max(m.encoder_len, m.decoder_len) for m in packed) <= 510
    assert all(m.pad_multiple == multiple for m in (*padded, *packed))


@STEADY
@given(batches(decoder=False), st.integers(1, 4), st.integers(1, 9), st.integers(1, 64))
def test_every_rule_for_decoder_only_models_trains_every_sample_once(
    samples: list[SampleLength], dp: int, rows: int, row_len: int
) -> None:
    dp = min(dp, len(samples))
    check(pad_to_batch_max(samples, dp=dp, rows_per_micro_batch=rows, pad_multiple=8), samples, dp)
    bounded = pad_to_batch_max(samples, dp=dp, max_tokens=1024, pad_multiple=8)
    check([replica for replica in bounded if replica], samples, min(dp, sum(map(bool, bounded))))
    fits = -(-sum(s.encoder for s in samples) // row_len) >= dp
    cut = cut_fixed_rows(samples, row_len=row_len, dp=dp if fits else 1)
    check(cut, samples, dp if fits else 1)
    assert {m.encoder_len for replica in cut for m in replica} == {row_len}
    shortfalls = [row_len - m.real_tokens for replica in cut for m in replica]
    assert sum(gap > 0 for gap in shortfalls) <= 1


@STEADY
@given(batches(), st.integers(1, 4))
def test_the_rules_for_both_kinds_of_model_train_every_sample_once(samples: list[SampleLength], dp: int) -> None:
    dp = min(dp, len(samples))
    check(pack_documents(samples, BY_BATCH, max_tokens=512, dp=dp), samples, dp)
    check(split_as_dynapipe(samples, COSTS, ("none",), pp=3, dp=dp), samples, dp)
    check(split_as_dynapipe(samples, COSTS, ("none",), pp=3, dp=dp, thinning_ns=1000, pad_multiple=8), samples, dp)


def partitions(count: int) -> Iterator[Ranges]:
    for cuts in itertools.product((False, True), repeat=count - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        yield list(itertools.pairwise(bounds))


CAPS = st.builds(
    MicroBatchLimits,
    pad_multiple=st.sampled_from([1, 8]),
    max_tokens=st.none() | st.integers(16, 3000),
    max_bytes=st.none() | st.integers(5_000, 100_000),
)


def time_ns(costs: TokenCosts, members: Sequence[SampleLength], caps: MicroBatchLimits, in_flight: int) -> int | None:
    """Of one micro-batch; None if it breaks a cap."""
    one = MicroBatch(tuple(members), pad_multiple=caps.pad_multiple)
    times, num_bytes = make_evaluate(costs, min_in_flight=in_flight)([one])
    if caps.max_tokens and one.padded_tokens > caps.max_tokens:
        return None
    return None if caps.max_bytes and num_bytes[0] > caps.max_bytes else int(times[0])


@STEADY
@given(
    batches(most=9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    CAPS,
    st.sampled_from(["sorted", "classes"]),
)
def test_padded_split_equals_brute_force_over_contiguous_partitions(
    samples: list[SampleLength], dp: int, pp: int, in_flight: int, caps: MicroBatchLimits, name: SortOrder
) -> None:
    """With bounds on the longest micro-batch as far apart as they are by default, it is as near as they let it be."""
    dp = min(dp, len(samples))
    order, weight = sort_samples(samples, name), dp * (pp - 1)
    ranges = itertools.combinations(range(len(order) + 1), 2)
    times = {one: time_ns(SHORT, order[slice(*one)], caps, in_flight) for one in ranges}

    def value(split: Ranges) -> int | None:
        each = [time for one in split if (time := times[one]) is not None]
        return sum(each) + weight * max(each) if len(each) == len(split) else None

    tried = [(found, len(split)) for split in partitions(len(order)) if (found := value(split)) is not None]
    if not tried:
        with pytest.raises(PlanError, match="sample"):
            split_padded(samples, SHORT, pp=pp, dp=dp, caps=caps, in_flight=in_flight, order=name)
        return
    longest_ns = max(times[i, i + 1] or 0 for i in range(len(order)))
    for thinning_ns, off in ((1, 0), (0, weight * max(0, longest_ns // 16 - 1))):
        micro_batches = split_padded(
            samples, SHORT, pp=pp, dp=dp, caps=caps, in_flight=in_flight, order=name, thinning_ns=thinning_ns
        )
        assert [s for m in micro_batches for s in m.samples] == order
        ends = list(itertools.accumulate(m.rows for m in micro_batches))
        got, (best, count) = value(list(itertools.pairwise([0, *ends]))), min(tried)
        assert got is not None
        assert got >= best
        assert len(ends) >= dp
        if count >= dp:  # else the optimum would leave a replica empty
            assert got <= best + off


@settings(STEADY, max_examples=300)
@given(st.integers(1, 9), st.integers(0, 12), st.sampled_from([1, 1, 30, 500]), st.randoms(use_true_random=False))
def test_best_partition_equals_brute_force_on_any_costs_up_to_its_thinning(
    count: int, weight: int, thinning_ns: int, rng: object
) -> None:
    """Costs need not grow with the run, and some runs may be impossible."""
    costs: IntArray = np.full((count, count), INFEASIBLE, np.int64)
    for end in range(count):
        for rows in range(1, end + 2):
            possible = rows == 1 or rng.random() < 0.8  # type: ignore[attr-defined]
            costs[end, rows - 1] = rng.randint(1, 3000) if possible else INFEASIBLE  # type: ignore[attr-defined]
    values = []
    for runs in partitions(count):
        each = [int(costs[b - 1, b - a - 1]) for a, b in runs]
        if max(each) < INFEASIBLE:
            values.append(sum(each) + weight * max(each))
    ends = find_best_partition(costs, weight, thinning_ns)
    each = [int(costs[b - 1, b - a - 1]) for a, b in itertools.pairwise([0, *ends])]
    assert 0 <= sum(each) + weight * max(each) - min(values) <= weight * (thinning_ns - 1)


@STEADY
@given(batches(most=60, decoder=False), st.integers(1, 3))
def test_long_runs_are_not_cut_off_by_the_search_window(samples: list[SampleLength], pp: int) -> None:
    """With overhead only, fewest micro-batches are best: one for one replica, whatever the number of samples."""
    more = [SampleLength(1000 + i, 7) for i in range(200)]
    costs = TokenCosts(2, ns_per_token=0, overhead_ns=1000)
    assert len(split_padded([*samples, *more], costs, pp=pp, dp=1)) == 1


@STEADY
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_is_within_grahams_bound_of_the_optimum(costs: list[int], replicas: int) -> None:
    replicas = min(replicas, len(costs))
    shares = assign_replicas(costs, replicas)
    optimum = min(
        max(sum(c for c, r in zip(costs, choice, strict=True) if r == k) for k in range(replicas))
        for choice in itertools.product(range(replicas), repeat=len(costs))
    )
    assert 3 * replicas * max(sum(costs[i] for i in s) for s in shares) <= (4 * replicas - 1) * optimum
    assert sorted(i for s in shares for i in s) == list(range(len(costs)))
    assert all(s and s == sorted(s) for s in shares)


@STEADY
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_equal_counts_are_equal(costs: list[int], replicas: int) -> None:
    costs = (costs * replicas)[: max(1, len(costs) // replicas) * replicas]
    shares = assign_replicas(costs, replicas, equal_counts=True)
    assert {len(s) for s in shares} == {len(costs) // replicas}
    assert sorted(i for s in shares for i in s) == list(range(len(costs)))


@STEADY
@given(batches(most=25), st.integers(0, 3))
def test_splits_do_not_depend_on_the_order_of_the_batch(samples: list[SampleLength], turn: int) -> None:
    turned = [*samples[turn:], *samples[:turn]]
    assert split_padded(samples, SHORT, pp=3, dp=1) == split_padded(turned, SHORT, pp=3, dp=1)


def fill_by_looking_at_all(
    samples: list[SampleLength], weights: list[int], filled: list[list[int]], loads: list[int], room: int
) -> list[list[int]] | None:
    """Rows of sample indices, or None where one finds no room: the rule of `fill_lightest`, word for word."""
    rows: list[list[int]] = [[] for _ in loads]
    for sample, weight in zip(samples, weights, strict=True):
        fits = [
            row
            for row, (encoder, decoder) in enumerate(filled)
            if encoder + sample.encoder <= room and decoder + sample.decoder <= room
        ]
        if not fits:
            return None
        row = min(fits, key=lambda row: (loads[row], row))
        rows[row].append(sample.index)
        loads[row] += weight
        filled[row] = [filled[row][0] + sample.encoder, filled[row][1] + sample.decoder]
    return rows


@STEADY
@given(samples=batches(), seed=st.integers(0, 2**32), count=st.integers(1, 8), room=st.integers(400, 2000))
def test_each_document_goes_to_the_lightest_row_with_room_in_any_order_of_lengths(samples, seed, count, room) -> None:
    rng = np.random.default_rng(seed)
    weights, loads = rng.integers(0, 9, len(samples)).tolist(), rng.integers(0, 20, count).tolist()
    filled = rng.integers(0, (room, room // 4), (count, 2)).tolist()
    expected = fill_by_looking_at_all(samples, weights, [list(row) for row in filled], list(loads), room)
    starts = [(load, encoder, decoder) for load, (encoder, decoder) in zip(loads, filled, strict=True)]
    rows = fill_lightest(samples, weights, range(len(samples)), starts, room)
    assert expected == (None if rows is None else [[sample.index for sample in row] for row in rows])
