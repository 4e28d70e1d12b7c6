"""Every sample once in an epoch: no more steps than multipack, no costlier than the default, as alike in length."""

import heapq
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dynapipe_ext.batching.sampling import bins
from dynapipe_ext.batching.sampling import packed_runs as runs
from dynapipe_ext.batching.sampling.composition import length_variation
from dynapipe_ext.batching.sampling.packed_runs import fewest_steps, packed_runs, run_ends
from dynapipe_ext.batching.sampling.samplers import DistributedTokenBatchSampler, quadratic_costs
from dynapipe_ext.data.batches import permutation
from dynapipe_ext.errors import PlanError

BENCH = runpy.run_path(str(Path(__file__).resolve().parents[2] / "bench" / "samplers.py"))
COEFFICIENTS = st.sampled_from([(1.0, 0.0), (24576, 1), (300, 1), (7, 0.001)])


def drawn(kind: str, count: int, cap: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    lengths: Any
    match kind:
        case "uniform":
            lengths = rng.integers(1, rng.integers(2, cap + 2), count)
        case "equal":
            lengths = np.full(count, rng.integers(1, cap + 1))
        case "pareto":
            lengths = (rng.pareto(rng.choice([0.8, 1.1, 1.5, 2.5]), count) + 1) * cap / 300
        case _:
            lengths = np.where(rng.random(count) < rng.choice([0.01, 0.2, 0.5]), cap * rng.uniform(0.4, 1), cap / 40)
    return np.clip(lengths, 1, cap).astype(np.int64)


@st.composite
def epochs(draw: Any) -> tuple[Any, int, int]:
    """(lengths, ranks, cap)."""
    num_ranks = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 33, 64])))
    cap = draw(st.sampled_from([60, 1000, 8192]))
    kind = draw(st.sampled_from(["uniform", "equal", "pareto", "two-point"]))
    count = draw(st.integers(num_ranks, 700))
    return drawn(kind, count, cap, draw(st.integers(0, 2**32))), num_ranks, cap


def dearest(plan: Any, costs: Any) -> tuple[int, float]:
    load = np.add.reduceat(costs[plan.samples], plan.starts[:-1]).reshape(-1, plan.num_replicas)
    return int(load.max(axis=1).sum()), float((load.max(axis=1) / load.mean(axis=1)).mean())


def multipack_runs(lengths: Any, num_ranks: int, cap: int) -> tuple[int, int, float]:
    """Steps and dropped samples of multipack's rule, written anew in the bench, and how its mean lengths vary."""
    order = permutation(len(lengths), seed=0, epoch=0)
    BENCH["multipack"].__globals__["shuffled"] = lambda _: order.tolist()
    bins = BENCH["multipack"](lengths, num_ranks, cap)
    if not bins:
        return 0, len(lengths), 0.0
    starts = np.cumsum([0, *map(len, bins)])
    samples = np.concatenate([np.array(held, np.int64) for held in bins])
    varied = length_variation(samples, starts, lengths, num_ranks=num_ranks)
    return len(bins) // num_ranks, len(lengths) - len(samples), varied


@settings(max_examples=8)
@given(epochs(), COEFFICIENTS)
def test_an_epoch_has_no_more_steps_than_multipack_no_dearer_than_the_default_and_alike_in_length(
    epoch: tuple[Any, int, int], coefficients: tuple[float, float]
) -> None:
    lengths, num_ranks, cap = epoch
    options: Any = {"max_tokens": cap, "num_replicas": num_ranks, "rank": 0}
    steps, num_dropped, varied = multipack_runs(lengths, num_ranks, cap)
    least = fewest_steps(lengths, num_ranks=num_ranks, cap=cap)
    try:
        default = DistributedTokenBatchSampler(lengths, **options).plan
    except PlanError:
        assert (max(steps, least) + (num_dropped > 0)) * num_ranks > len(lengths), "multipack's own steps could be fed"
        reject()
    own = DistributedTokenBatchSampler(lengths, coefficients=coefficients, **options).plan
    again = DistributedTokenBatchSampler(lengths, coefficients=coefficients, **options).plan
    assert own.to_bytes() == again.to_bytes()
    for plan in (default, own):
        assert sorted(plan.samples.tolist()) == list(range(len(lengths)))
        assert np.add.reduceat(lengths[plan.samples], plan.starts[:-1]).max() <= cap
        assert np.diff(plan.starts).min() >= 1
        assert least <= plan.num_steps <= max(steps, least) + (num_dropped > 0)
        if not num_dropped:
            here = length_variation(plan.samples, plan.starts, lengths, num_ranks=num_ranks)
            assert here <= max(0.15, 1.1 * varied) + 1e-9
    costs = quadratic_costs(lengths, coefficients)
    for mine, other in zip(dearest(own, costs), dearest(default, costs), strict=True):
        assert mine <= other * (1 + 1e-12)


@settings(max_examples=20)
@given(epochs())
def test_runs_end_where_multipacks_do_and_their_steps_keep_every_sample_and_the_cap(
    epoch: tuple[Any, int, int],
) -> None:
    lengths, num_ranks, cap = epoch
    tokens = lengths[permutation(len(lengths), seed=0, epoch=0)]
    ends = run_ends(tokens, num_ranks=num_ranks, cap=cap, most=len(tokens) + 1)
    steps, num_dropped, _ = multipack_runs(lengths, num_ranks, cap)
    assert ends is not None
    assert (len(ends), len(tokens) - ends[-1]) == (steps, num_dropped)
    assert steps + (num_dropped > 0) >= fewest_steps(tokens, num_ranks=num_ranks, cap=cap)
    few = run_ends(tokens, num_ranks=num_ranks, cap=cap, most=steps)
    assert few is None, "as many as that is not fewer"
    packed = packed_runs(tokens, tokens**2, ends, num_ranks=num_ranks, cap=cap)
    assert sorted([*packed.places.tolist(), *packed.left.tolist()]) == list(range(len(tokens)))
    assert np.add.reduceat(tokens[packed.places], packed.starts[:-1]).max() <= cap
    assert np.diff(packed.starts).min() >= 1
    assert len(packed.starts) - 1 in (steps * num_ranks, (steps + 1) * num_ranks)


def longest_first(tokens: Any, ends: list[int], num_ranks: int) -> list[list[int]]:
    """The places of each bin of each run, one heap a run: a place goes to the emptiest bin, the first of several."""
    all_bins = []
    for start, end in pairwise([0, *ends]):
        bins = list[list[int]]([[] for _ in range(num_ranks)])
        heap = [(0, rank) for rank in range(num_ranks)]
        for place in sorted(range(start, end), key=lambda place: (-tokens[place], place)):
            load, rank = heap[0]
            bins[rank].append(place)
            heapq.heapreplace(heap, (load + tokens[place], rank))
        all_bins += bins
    return all_bins


@settings(max_examples=12)
@given(epochs(), st.integers(1, 400), st.booleans())
def test_runs_side_by_side_and_exchanges_in_parts_give_what_they_give_one_by_one(
    epoch: tuple[Any, int, int], cached: int, is_heavy: bool
) -> None:
    lengths, num_ranks, cap = epoch
    tokens = lengths[permutation(len(lengths), seed=1, epoch=0)]
    ends = run_ends(tokens, num_ranks=num_ranks, cap=cap, most=len(tokens) + 1)
    assert ends is not None
    wanted = longest_first(tokens.tolist(), ends, num_ranks)
    steps = []
    for side_by_side, most in ((0, cached), (len(tokens) + 1, 1 << 40)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs, "_SIDE_BY_SIDE", side_by_side)
            patch.setattr(bins, "_CACHED", most)
            places, counts = runs._longest_first(tokens, ends, num_ranks)
            assert [one.tolist() for one in np.split(places, np.cumsum(counts)[:-1])] == wanted
            steps.append(packed_runs(tokens, tokens ** (1 + is_heavy), ends, num_ranks=num_ranks, cap=cap))
    assert [steps[0].places.tolist(), steps[0].starts.tolist()] == [steps[1].places.tolist(), steps[1].starts.tolist()]
    assert steps[0].left.tolist() == steps[1].left.tolist()


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "cap", "steps"),
    [
        (np.full(20_000, 1024), 3, 8192, 834),
        (np.full(100_000, 512), 8, 4200, 1563),
        (np.full(20_032, 1000), 64, 1000, 313),
        (np.where(np.arange(8000) % 2, 20_000, 9000), 8, 32_768, 500),
    ],
)
def test_lengths_that_fill_bins_by_their_number_need_no_step_above_the_floor_or_multipack(
    lengths: Any, num_ranks: int, cap: int, steps: int
) -> None:
    plan = DistributedTokenBatchSampler(lengths, max_tokens=cap, num_replicas=num_ranks, rank=0).plan
    assert fewest_steps(lengths, num_ranks=num_ranks, cap=cap) <= steps
    assert plan.num_steps <= max(steps, multipack_runs(lengths, num_ranks, cap)[0])


def test_too_few_samples_for_the_steps_that_lengths_need_are_refused_with_that_number() -> None:
    with pytest.raises(PlanError, match="20000 samples do not feed 313 steps of 64 ranks"):
        DistributedTokenBatchSampler(np.full(20_000, 1000), max_tokens=1000, num_replicas=64, rank=0)


@pytest.mark.parametrize(("alpha", "num_ranks"), [(1.05, 64), (1.2, 8), (1.5, 2)])
def test_heavy_tails_are_balanced_on_the_cost_that_was_asked_with_steps_alike_in_length(
    alpha: float, num_ranks: int
) -> None:
    lengths = np.minimum((np.random.default_rng(0).pareto(alpha, 6_000) + 1) * 64, 32_768).astype(np.int64)
    options: Any = {"max_tokens": 32_768, "num_replicas": num_ranks, "rank": 0}
    default = DistributedTokenBatchSampler(lengths, **options).plan
    own = DistributedTokenBatchSampler(lengths, coefficients=(24576, 1), **options).plan
    costs = quadratic_costs(lengths, (24576, 1))
    assert dearest(own, costs)[0] <= dearest(default, costs)[0]
    varied = multipack_runs(lengths, num_ranks, 32_768)[2]
    for plan in (default, own):
        assert length_variation(plan.samples, plan.starts, lengths, num_ranks=num_ranks) <= max(0.15, 1.1 * varied)
