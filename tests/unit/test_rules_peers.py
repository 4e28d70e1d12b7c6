"""Megatron's first fit and verl's balancing: what they make of batches small enough to read, and of random ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import (
    GlobalBatchPlan,
    MicroBatch,
    ReplicaPlan,
    SampleLength,
    check_cover,
    sample_lengths,
)
from dynapipe_ext.errors import PlanError
from tests.bench.peer_rules import first_fit_in_order, verl_rule

STEADY = settings(derandomize=True)
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


def indices(replicas: list[list[MicroBatch]]) -> list[list[list[int]]]:
    return [[[s.index for s in m.samples] for m in replica] for replica in replicas]


def covers(replicas: list[list[MicroBatch]], samples: list[SampleLength]) -> None:
    plan = GlobalBatchPlan(step=0, replicas=tuple(ReplicaPlan(d, tuple(r)) for d, r in enumerate(replicas)))
    check_cover(plan, samples)


def test_first_fit_keeps_the_order_of_the_data_and_returns_to_rows_with_room() -> None:
    samples = sample_lengths([6, 7, 3, 5, 4, 1])
    assert indices(first_fit_in_order(samples, max_tokens=10, dp=1)) == [[[0, 2, 5], [1], [3, 4]]]
    assert indices(first_fit_in_order(samples, max_tokens=10, dp=2)) == [[[0, 2, 5], [3, 4]], [[1]]]


def test_first_fit_of_padded_rows_counts_the_padding() -> None:
    samples = sample_lengths([6, 3, 2, 2, 4])
    (replica,) = first_fit_in_order(samples, max_tokens=12, dp=1, layout="padded")
    assert [[s.encoder for s in m.samples] for m in replica] == [[6, 3], [2, 2, 4]]
    assert [m.padded_tokens for m in replica] == [12, 12]
    rounded = first_fit_in_order(samples, max_tokens=12, dp=1, layout="padded", pad_multiple=4)
    assert [m.padded_tokens for m in rounded[0]] == [8, 12, 4]


@STEADY
@given(LENGTHS, st.integers(1, 4), st.sampled_from([200, 512]), st.sampled_from(["padded", "packed"]))
def test_first_fit_trains_every_sample_once_within_the_cap(lengths: list[int], dp: int, cap: int, layout: str) -> None:
    samples = sample_lengths(lengths)
    replicas = first_fit_in_order(samples, max_tokens=cap, dp=dp, layout=layout)  # type: ignore[arg-type]
    covers(replicas, samples)
    assert len(replicas) == dp
    assert max(m.padded_tokens for replica in replicas for m in replica) <= cap
    assert max(map(len, replicas)) - min(map(len, replicas)) <= 1


def test_verl_balances_work_over_replicas_and_counts_over_both() -> None:
    samples = sample_lengths([4000, 100, 100, 100, 100, 100, 100, 3500])
    replicas = verl_rule(samples, max_tokens=4096, dp=2)
    assert [sum(len(m.samples) for m in replica) for replica in replicas] == [4, 4]
    assert len({len(replica) for replica in replicas}) == 1
    assert sorted(max(s.encoder for m in replica for s in m.samples) for replica in replicas) == [3500, 4000]


def test_verl_puts_the_cheap_micro_batches_first_and_last() -> None:
    (replica,) = verl_rule(sample_lengths([100, 90, 80, 70, 60, 50]), max_tokens=100, dp=1)
    assert [m.real_tokens for m in replica] == [70, 90, 110, 100, 80]


def test_verl_gives_all_replicas_the_count_of_the_one_that_needs_most_while_samples_last() -> None:
    assert indices(verl_rule(sample_lengths([100, 60, 60]), max_tokens=100, dp=2)) == [[[1], [2]], [[0]]]
    longer = verl_rule(sample_lengths([100, 3, 3, 3, 60, 60, 60]), max_tokens=100, dp=2)
    assert [len(replica) for replica in longer] == [2, 2]


def test_verl_weighs_long_samples_by_more_than_their_tokens() -> None:
    replicas = verl_rule(sample_lengths([20_000, 10_000, 10_000, 1000, 1000]), max_tokens=32_768, dp=2)
    assert sorted(sum(m.real_tokens for m in replica) for replica in replicas) == [20_000, 22_000]


@STEADY
@given(LENGTHS, st.integers(1, 4))
def test_verl_trains_every_sample_once_in_as_many_micro_batches_on_all_replicas(lengths: list[int], dp: int) -> None:
    samples = sample_lengths(lengths)
    replicas = verl_rule(samples, max_tokens=256, dp=dp)
    covers(replicas, samples)
    assert len(replicas) == dp
    counts = {min(len(r), sum(len(m.samples) for m in r)) for r in replicas if r}
    if len(lengths) % dp == 0:
        assert len({sum(len(m.samples) for m in r) for r in replicas}) == 1
        assert len(counts) == 1


@pytest.mark.parametrize("rule", [first_fit_in_order, verl_rule])
def test_a_sample_longer_than_a_micro_batch_is_named(rule: object) -> None:
    with pytest.raises(PlanError, match=r"sample 1 .* 300"):
        rule(sample_lengths([5, 300]), max_tokens=256, dp=1)  # type: ignore[operator]
