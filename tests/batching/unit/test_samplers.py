"""Samplers: what they promise beyond completeness (see ../property), and what they refuse."""

import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from dynapipe_ext.batching.sampling.epoch_plan import EpochPlan
from dynapipe_ext.batching.sampling.multipack import (
    MultipackDistributedBatchSampler,
    MultipackDistributedBatchSampler_LinearAttention,
)
from dynapipe_ext.batching.sampling.samplers import (
    DistributedTokenBatchSampler,
    quadratic_coefficients,
    quadratic_costs,
)
from dynapipe_ext.batching.sampling.streaming import StreamingTokenBatches
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, PlanError


def chat_lengths(count: int = 6144) -> Any:
    """Like conversations cut at 2,048 tokens: most are cut."""
    drawn = np.random.default_rng(0).lognormal(7.5, 0.7, count)
    return np.clip(drawn, 24, 2048).astype(np.int64)


def tailed_lengths(count: int = 30_000, seed: int = 0) -> Any:
    return np.maximum(np.random.default_rng(seed).lognormal(6, 1, count), 1).astype(np.int64)


def multipack_steps(lengths: Any, num_replicas: int, cap: int) -> int:
    """Steps of multipack's rule: as many samples a step as the longest-first rule fits into the ranks' bins."""
    bench = Path(__file__).resolve().parents[2] / "bench" / "samplers.py"
    rule = runpy.run_path(str(bench))["multipack"]
    return len(rule(lengths, num_replicas, cap)) // num_replicas


def sampler(lengths: Any, num_replicas: int = 8, max_tokens: int = 32_768, **rest: Any) -> DistributedTokenBatchSampler:
    return DistributedTokenBatchSampler(lengths, max_tokens=max_tokens, num_replicas=num_replicas, rank=0, **rest)


def test_spread_steps_are_as_few_as_tokens_need_and_even_in_tokens_and_squares() -> None:
    short = np.clip(np.random.default_rng(0).lognormal(5, 0.4, 7500), 20, 460).astype(np.int64)
    for lengths, cap in ((chat_lengths(), 32_768), (short, int(short.sum() / (9 * 8 * 0.9988)))):  # nearly full
        found = sampler(lengths, max_tokens=cap).metrics()
        assert found.num_steps == -(-int(lengths.sum()) // (8 * cap))
        assert found.utilization >= 0.999
        assert found.l2_lag_mean <= 300


def test_carried_steps_are_full_and_even() -> None:
    lengths = chat_lengths()
    found = sampler(lengths, last="carry").metrics()
    assert found.num_steps == int(lengths.sum()) // (8 * 32_768)
    assert found.efficiency >= 0.999
    assert found.l2_lag_mean <= 438


@pytest.mark.parametrize("num_replicas", [8, 64])
def test_steps_of_any_lengths_are_no_more_than_multipacks_even_in_cost_and_alike_in_length(num_replicas: int) -> None:
    rng = np.random.default_rng(0)
    documents = np.clip(rng.lognormal(9.4, 0.5, 900), 2500, 36_000).astype(np.int64)
    tasks = np.clip(rng.lognormal(4.6, 1, 20_000), 5, 900).astype(np.int64)
    mixed = np.concatenate([documents[:300], tasks])
    drawn = [(tailed_lengths(20_000), 0), (mixed, 0), (documents, 0), (chat_lengths(), 16_384), (tasks, 32_768)]
    for lengths, cap in drawn if num_replicas == 8 else drawn[:2]:
        cap = max(cap, int(lengths.max()))
        found = sampler(lengths, num_replicas, cap)
        plan, metrics = found.plan, found.metrics()
        assert metrics.num_steps <= multipack_steps(lengths, num_replicas, cap)
        assert metrics.num_left == metrics.num_repeated == 0
        assert metrics.cost_excess_mean <= 1.06
        starts = plan.starts[::num_replicas]
        mean_lengths = np.add.reduceat(lengths[plan.samples], starts[:-1]) / np.diff(starts)
        assert mean_lengths.std() <= 0.15 * mean_lengths.mean()


def test_one_heavy_sample_costs_no_step_more() -> None:
    lengths = np.append(np.full(80_000, 100), 32_000)
    found = sampler(lengths).metrics()
    assert found.num_steps == -(-int(lengths.sum()) // (8 * 32_768))
    assert found.cost_excess_max <= 1.02


def test_full_batches_around_a_long_sample_are_near_what_full_batches_must_cost() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([np.clip(rng.lognormal(4.4, 0.5, 60_000), 20, 700), rng.integers(2000, 4000, 12)])
    found = sampler(lengths.astype(np.int64), 8, 32_768, last="carry").metrics()
    assert found.efficiency >= 0.999
    assert found.cost_excess_max > 1.05, "the long samples alone are less than a full batch costs"
    assert found.cost_gap_max <= 1.02


def test_tokens_alone_balance_tokens() -> None:
    assert sampler(chat_lengths(), objective="tokens").metrics().utilization >= 0.9999


@pytest.mark.parametrize("num_replicas", [1, 8])
def test_padded_batches_hold_like_lengths_within_rows_times_longest(num_replicas: int) -> None:
    lengths = tailed_lengths(20_000)
    found = sampler(lengths, num_replicas, int(lengths.max()), objective="padded")
    assert found.metrics().padding_efficiency >= 0.95
    for batch in found:
        assert len(batch) * max(lengths[batch]) <= lengths.max()


def test_long_samples_that_fill_no_bin_in_twos_get_a_bin_each() -> None:
    lengths = np.full(64, 600)
    found = sampler(lengths, 8, 1000)
    assert found.plan.num_steps == 8
    assert {len(batch) for batch in found} == {1}


def test_one_rank_comes_to_an_end_and_knows_its_length() -> None:
    found = DistributedTokenBatchSampler(chat_lengths(500), max_tokens=4096)
    batches = list(found)
    assert len(batches) == len(found)
    assert sorted(i for batch in batches for i in batch) == list(range(500))


def test_epochs_differ_seeds_differ_and_each_can_be_had_again() -> None:
    lengths = chat_lengths(200)
    found = sampler(lengths, 2, 8192)
    first = list(found)
    assert list(found) == first
    found.set_epoch(1)
    assert list(found) != first
    found.set_epoch(0)
    assert list(found) == first
    assert list(sampler(lengths, 2, 8192, seed=1)) != first


def test_the_given_order_is_kept_to_a_few_steps() -> None:
    lengths = chat_lengths(3000)
    plan = sampler(lengths, 8, 8192, shuffle=False).plan
    step = np.repeat(np.arange(plan.num_steps), np.diff(plan.starts[:: plan.num_replicas]))
    near = plan.samples / len(lengths) * plan.num_steps
    moved = np.abs(step - near)
    assert (moved <= 17).mean() >= 0.98, "128 bins of 8 ranks are dealt together"


def test_ranks_take_turns_in_having_the_dearest_batch() -> None:
    lengths = tailed_lengths(20_000)
    found = sampler(lengths, 4, int(lengths.max()))
    plan = found.plan
    load = np.add.reduceat(lengths[plan.samples] ** 2, plan.starts[:-1]).reshape(-1, 4)
    times = np.bincount(load.argmax(axis=1), minlength=4)
    assert times.min() * 3 >= times.max()


def test_carried_samples_are_trained_in_the_first_steps_of_the_next_epoch_and_no_step_has_one_twice() -> None:
    found = sampler(chat_lengths(2000), 2, 4096, last="carry")
    rest = found.plan.rest
    assert len(rest)
    found.set_epoch(1)
    plan = found.plan
    first_block = plan.samples[: plan.starts[2 * 70]]
    assert set(rest.tolist()) <= set(first_block.tolist())
    for step in range(plan.num_steps):
        of_step = plan.batch(step, 0) + plan.batch(step, 1)
        assert len(set(of_step)) == len(of_step)


def test_padding_up_repeats_samples_in_the_last_step_only() -> None:
    found = sampler(chat_lengths(2100), 8, 8192, last="pad")
    plan = found.plan
    before = plan.trained(plan.num_steps - 1)
    assert plan.num_repeated > 0
    assert len(set(before.tolist())) == len(before)
    assert found.metrics().efficiency > 0.98


def test_samples_fewer_than_ranks_are_refused_or_repeated() -> None:
    with pytest.raises(PlanError, match=r"3 samples cannot feed 8 ranks: use fewer ranks, or last='pad'"):
        sampler([5, 5, 5], 8, 10)
    assert sampler([5, 5, 5], 8, 10, last="pad").plan.num_repeated == 5
    with pytest.raises(PlanError, match="12 samples do not feed 2 steps of 8 ranks"):
        sampler([9] * 12, 8, 10)


def test_over_long_samples_are_refused_by_name_or_cut_as_chosen() -> None:
    with pytest.raises(DataError, match=r"sample 1 has 90 tokens but max_tokens is 64 \(2 samples .*longest has 99"):
        sampler([5, 90, 99], 1, 64)
    found = sampler([5, 90, 99], 1, 64, over_long="truncate")
    assert found.truncated.tolist() == [1, 2]
    assert sorted(i for batch in found for i in batch) == [0, 1, 2]
    assert found.metrics().tokens == 5 + 64 + 64


@pytest.mark.parametrize(
    ("error", "says", "make"),
    [
        (DataError, "sample 1 has 0 tokens", lambda: sampler([5, 0], 1, 8)),
        (DataError, "lengths is empty", lambda: sampler(np.zeros(0, np.int64), 1, 8)),
        (DataError, "must be integers", lambda: sampler([0.5], 1, 8)),
        (ConfigError, "max_tokens is 0", lambda: sampler([5], 1, 0)),
        (ConfigError, "objective is 'cubic' but must be one of tokens", lambda: sampler([5], 1, 8, objective="cubic")),
        (ConfigError, "last is 'drop'", lambda: sampler([5], 1, 8, last="drop")),
        (ConfigError, "over_long is 'drop'", lambda: sampler([5], 1, 8, over_long="drop")),
        (ConfigError, "an epoch would have no step", lambda: sampler([5], 1, 8, last="carry")),
        (ConfigError, "coefficients are", lambda: sampler([5], 1, 8, coefficients=(0, 0))),
        (ConfigError, "rank is 2", lambda: DistributedTokenBatchSampler([5], max_tokens=8, num_replicas=2, rank=2)),
        (ConfigError, "epoch is -1", lambda: sampler([5], 1, 8).set_epoch(-1)),
        (DataError, "no epoch plan", lambda: EpochPlan.from_bytes(b"x")),
        (DataError, "has format None", lambda: sampler([5], 1, 8).load_state_dict({})),
        (ConfigError, "num_batches is 9", lambda: sampler([5], 1, 8).state_dict(num_batches=9)),
    ],
)
def test_what_cannot_work_is_refused_with_value_and_bound(
    error: type[Exception], says: str, make: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_state_of_other_lengths_or_settings_is_refused() -> None:
    state = sampler([5, 6, 7], 1, 8).state_dict()
    for other in (sampler([5, 6, 8], 1, 8), sampler([5, 6, 7], 1, 9), sampler([5, 6, 7], 1, 8, seed=1)):
        with pytest.raises(DataError, match="of other lengths or settings"):
            other.load_state_dict(state)


def test_batches_done_before_a_resume_are_counted_until_the_epoch_ends() -> None:
    lengths = chat_lengths(200)
    first = sampler(lengths, 2, 8192)
    assert first.num_done == 0
    second = sampler(lengths, 4, 8192)
    second.load_state_dict(first.state_dict(num_batches=5))
    assert second.num_done == 5
    third = sampler(lengths, 4, 8192)
    third.load_state_dict(second.state_dict(num_batches=7))
    assert third.num_done == 7
    assert third.state_dict(num_batches=9)["segments"] == [[2, 5], [4, 4]]
    _ = list(third)
    assert third.num_done == 0
    third.set_epoch(1)
    assert third.num_done == 0


def test_batches_of_one_of_several_ranks_cannot_be_taken_for_those_of_all() -> None:
    with pytest.raises(ConfigError, match=r"already those of rank 0 of 2 .* do not give their loader to accelerate"):
        _ = sampler([5, 6, 7, 8], 2, 8).batch_size
    assert getattr(sampler([5, 6, 7], 1, 8), "batch_size", 0) is None


def test_after_a_resumed_epoch_the_next_iteration_is_a_whole_one() -> None:
    lengths = chat_lengths(200)
    first = sampler(lengths, 2, 8192)
    iterator = iter(first)
    _ = [next(iterator) for _ in range(5)]
    for num_replicas in (2, 4):
        resumed = sampler(lengths, num_replicas, 8192)
        whole = list(resumed)
        resumed.load_state_dict(first.state_dict())
        assert len(list(resumed)) < len(whole)
        assert list(resumed) == whole


def test_a_state_may_name_the_batches_trained_where_a_loader_fetches_ahead() -> None:
    lengths = chat_lengths(200)
    found = sampler(lengths, 2, 8192)
    expected = list(found)
    rows = [[i, int(n)] for i, n in enumerate(lengths)]
    loader = DataLoader(rows, batch_sampler=found, num_workers=1, collate_fn=lambda batch: [row[0] for row in batch])  # type: ignore[arg-type,var-annotated]
    assert len(loader) == len(expected)
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == expected[:3]
    resumed = sampler(lengths, 2, 8192)
    resumed.load_state_dict(found.state_dict(num_batches=3))
    assert list(resumed) == expected[3:]


def test_one_rank_plans_for_all_where_a_plan_is_shared() -> None:
    lengths, sent, made = chat_lengths(200), list[bytes](), list[int]()

    def on_rank_0(make: Callable[[], bytes]) -> bytes:
        made.append(1)
        sent.append(make())
        return sent[-1]

    def elsewhere(make: Callable[[], bytes]) -> bytes:
        return sent[-1]

    zero = DistributedTokenBatchSampler(lengths, max_tokens=8192, num_replicas=2, rank=0, share=on_rank_0)
    one = DistributedTokenBatchSampler(lengths, max_tokens=8192, num_replicas=2, rank=1, share=elsewhere)
    alone = DistributedTokenBatchSampler(lengths, max_tokens=8192, num_replicas=2, rank=1)
    assert list(one) == list(alone)
    assert made == [1]
    zero.set_epoch(1)
    one.set_epoch(1)
    alone.set_epoch(1)
    assert list(one) == list(alone)
    assert made == [1, 1]


def test_ranks_are_those_of_torch_distributed_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 4, get_rank=lambda: 3
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)  # type: ignore[arg-type]
    found = MultipackDistributedBatchSampler(8, [4] * 16)
    assert (found.plan.num_replicas, found.rank) == (4, 3)


@pytest.mark.parametrize("kind", [MultipackDistributedBatchSampler, MultipackDistributedBatchSampler_LinearAttention])
def test_multipack_classes_take_what_their_namesakes_take_and_say_what_they_said(
    kind: type[MultipackDistributedBatchSampler],
) -> None:
    names = list(inspect.signature(kind).parameters)
    assert names == ["batch_max_length", "lengths", "num_replicas", "rank", "seed"]
    lengths = chat_lengths(1000)
    found = kind(8192, lengths, 2, 1, 7)
    found.set_epoch(3)
    assert found.num_batches() == len(found) == len(list(found))
    assert (found.num_replicas, found.rank, found.seed, found.batch_max_length) == (2, 1, 7, 8192)
    assert found.lengths.tolist() == lengths.tolist()
    assert [batch.tolist() for batch in found.generate_batches()] == list(found)


@pytest.mark.parametrize("kind", [MultipackDistributedBatchSampler, MultipackDistributedBatchSampler_LinearAttention])
def test_multipack_classes_sum_tokens_and_room_of_all_ranks_over_the_steps_they_gave(
    kind: type[MultipackDistributedBatchSampler],
) -> None:
    lengths = chat_lengths(1000)
    found = kind(8192, lengths, 2, 1)
    room = found.num_batches() * 2 * 8192
    assert found.efficiency() == pytest.approx(lengths.sum() / room)
    _ = list(found), found.generate_batches()
    assert (found.eff_total_used, found.eff_total_slots) == (lengths.sum(), room)
    found.set_epoch(1)
    _ = found.generate_batches(set_stats=True)
    assert (found.eff_total_used, found.eff_total_slots) == (2 * lengths.sum(), room + found.num_batches() * 2 * 8192)
    found.set_epoch(2)
    first, used = next(iter(found)), found.eff_total_used
    other_rank = kind(8192, lengths, 2, 0)
    other_rank.set_epoch(2)
    assert used == 2 * lengths.sum() + lengths[first].sum() + lengths[next(iter(other_rank))].sum()
    assert found.efficiency() == found.eff_total_used / found.eff_total_slots


def test_multipack_classes_balance_squares_and_tokens() -> None:
    lengths = tailed_lengths(20_000)
    cap = int(lengths.max())
    quadratic = MultipackDistributedBatchSampler(cap, lengths, 8, 0).metrics()
    linear = MultipackDistributedBatchSampler_LinearAttention(cap, lengths, 8, 0).metrics()
    assert quadratic.cost_excess_mean <= 1.03
    assert linear.utilization > max(0.9995, quadratic.utilization)


def test_coefficients_come_back_from_the_times_of_a_cost_model() -> None:
    costs = TokenCosts(num_stages=3, ns_per_token=1000, ns_per_token_squared=2, overhead_ns=0)
    a, b = quadratic_coefficients(costs, [128, 512, 1024, 4096])
    assert a / b == pytest.approx(500, rel=1e-6)
    assert quadratic_coefficients(TokenCosts(num_stages=1, overhead_ns=0), [64, 128])[1] < 1e-6
    with pytest.raises(ConfigError, match="two different ones"):
        quadratic_coefficients(costs, [128, 128])


def test_costs_of_fractions_keep_their_ratios_and_never_overflow() -> None:
    lengths = np.array([10, 1000, 100_000])
    found = quadratic_costs(lengths, (0.5, 0.25))
    assert found / found[-1] == pytest.approx((0.5 * lengths + 0.25 * lengths**2) / (5e4 + 2.5e9), rel=1e-3, abs=1e-9)
    many = np.full(10**6, 10**6)
    assert int(quadratic_costs(many, (0, 10**9)).sum()) < 2**62


def test_a_stream_balances_by_coefficients_and_knows_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2, get_rank=lambda: 1
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)  # type: ignore[arg-type]
    samples = [16] + 20 * [4]
    by_tokens = list(StreamingTokenBatches(lambda: samples, int, max_tokens=640, coefficients=(1, 0)))
    by_squares = list(StreamingTokenBatches(lambda: samples, int, max_tokens=640, coefficients=(0, 1)))
    assert [sum(batch) for batch in by_tokens] == [48]
    assert [sum(n * n for n in batch) for batch in by_squares] == [288]
    with pytest.raises(ConfigError, match="coefficients are"):
        list(StreamingTokenBatches(lambda: samples, int, max_tokens=640, coefficients=(0, 0)))


def test_a_stream_reads_no_further_than_its_window_and_refuses_what_is_too_long() -> None:
    read: list[int] = []

    def numbers() -> Any:
        for number in range(10_000):
            read.append(number)
            yield number

    batches = StreamingTokenBatches(numbers, lambda _: 8, max_tokens=64, num_replicas=2, rank=0, window_steps=4)
    next(iter(batches))
    assert len(read) == 4 * 2 * 8
    with pytest.raises(DataError, match="sample 1 of the stream has 65 tokens"):
        next(iter(StreamingTokenBatches(lambda: [8, 65], int, max_tokens=64, num_replicas=1, rank=0)))
