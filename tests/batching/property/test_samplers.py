"""Samplers over random lengths, ranks and settings: complete, within the cap, alike on all ranks, resumable."""

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dynapipe_ext.batching.sampling.even_steps import even_steps, least_cost
from dynapipe_ext.batching.sampling.samplers import DistributedTokenBatchSampler
from dynapipe_ext.batching.sampling.streaming import StreamingTokenBatches
from dynapipe_ext.errors import ConfigError, PlanError

OBJECTIVES = st.sampled_from(["tokens", "quadratic", "padded"])
LASTS = st.sampled_from(["spread", "pad", "carry"])


@st.composite
def lengths_and_cap(draw: Any) -> tuple[list[int], int]:
    """Few or many samples, of like lengths or with a tail up to the cap; enough for three steps of three ranks."""
    longest = draw(st.sampled_from([1, 7, 60, 400]))
    cap = max(draw(st.sampled_from([longest, longest * 3 // 2, longest * 5])), 2)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tail = draw(st.sampled_from([0.0, 0.5, 1.5]))
    count = draw(st.integers(20, 300)) + 9 * cap
    lengths = np.minimum(np.maximum(longest * np.exp(-tail * np.abs(rng.normal(size=count))), 1), longest)
    kept = int(np.searchsorted(np.cumsum(lengths.astype(int)), 9 * cap)) + draw(st.integers(0, 60)) + 1
    return lengths.astype(int)[:kept].tolist(), cap


def every_rank(lengths: Any, num_replicas: int, **settings_: Any) -> list[DistributedTokenBatchSampler]:
    return [
        DistributedTokenBatchSampler(lengths, num_replicas=num_replicas, rank=rank, **settings_)
        for rank in range(num_replicas)
    ]


@settings(max_examples=40)
@given(lengths_and_cap(), st.integers(1, 3), OBJECTIVES, LASTS, st.integers(0, 99))
def test_an_epoch_trains_every_sample_once_within_the_cap_in_equally_many_steps_of_all_ranks(
    data: tuple[list[int], int], num_replicas: int, objective: Any, last: Any, seed: int
) -> None:
    lengths, cap = data
    try:
        samplers = every_rank(lengths, num_replicas, max_tokens=cap, objective=objective, last=last, seed=seed)
    except PlanError:
        # Only where lengths force so many steps that there are fewer samples than bins.
        assert last == "spread"
        assert len(lengths) < 2 * sum(2 * n > cap for n in lengths) + 2 * num_replicas or objective == "padded"
        return
    batches = [list(sampler) for sampler in samplers]
    assert {len(found) for found in batches} == {len(samplers[0])} == {samplers[0].plan.num_steps}
    for batch in (batch for found in batches for batch in found):
        assert batch
        used = [lengths[i] for i in batch]
        assert (len(used) * max(used) if objective == "padded" else sum(used)) <= cap
    times = Counter(i for found in batches for batch in found for i in batch)
    plan = samplers[0].plan
    if last == "spread":
        assert times == Counter(range(len(lengths)))
    elif last == "carry":
        assert times + Counter(plan.rest.tolist()) == Counter(range(len(lengths)))
    else:
        assert set(times) == set(range(len(lengths)))
        assert sum(times.values()) == len(lengths) + plan.num_repeated


@settings(max_examples=20)
@given(lengths_and_cap(), st.integers(1, 3), OBJECTIVES, st.integers(0, 99))
def test_what_is_carried_is_never_twice_in_a_step_and_epochs_together_train_all_samples_equally_often(
    data: tuple[list[int], int], num_replicas: int, objective: Any, seed: int
) -> None:
    lengths, cap = data
    sampler = DistributedTokenBatchSampler(
        lengths, max_tokens=cap, num_replicas=num_replicas, rank=0, objective=objective, last="carry", seed=seed
    )
    times: Counter[int] = Counter()
    carried: list[int] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert set(carried) <= set(sampler.plan.samples.tolist())
        carried = sampler.plan.rest.tolist()
        assert len(set(carried)) == len(carried)
        times += Counter(sampler.plan.samples.tolist())
        for step in range(sampler.plan.num_steps):
            of_step = [sampler.plan.batch(step, rank) for rank in range(num_replicas)]
            assert max(Counter(i for batch in of_step for i in batch).values()) == 1
            for used in ([lengths[i] for i in batch] for batch in of_step):
                assert 0 < (len(used) * max(used) if objective == "padded" else sum(used)) <= cap
    assert times + Counter(sampler.plan.rest.tolist()) == Counter(list(range(len(lengths))) * 3)
    again = DistributedTokenBatchSampler(
        lengths, max_tokens=cap, num_replicas=num_replicas, rank=0, objective=objective, last="carry", seed=seed
    )
    again.set_epoch(2)
    assert again.plan.samples.tolist() == sampler.plan.samples.tolist()


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(9, 12), st.integers(2, 4), OBJECTIVES)
def test_of_few_samples_too_none_is_carried_twice(
    lengths: list[int], cap: int, num_replicas: int, objective: Any
) -> None:
    try:
        sampler = every_rank(lengths, num_replicas, max_tokens=cap, objective=objective, last="carry")[0]
    except (ConfigError, PlanError):
        reject()  # too few to fill a step
    for epoch in range(1, 4):
        carried = sampler.plan.rest.tolist()
        sampler.set_epoch(epoch)
        assert set(carried) <= set(sampler.plan.samples.tolist())
        for step in range(sampler.plan.num_steps):
            of_step = [i for rank in range(num_replicas) for i in sampler.plan.batch(step, rank)]
            assert len(set(of_step)) == len(of_step) >= num_replicas


@settings(max_examples=12)
@given(lengths_and_cap(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), OBJECTIVES, LASTS, st.data())
def test_a_state_resumes_bit_for_bit_also_under_other_numbers_of_ranks(
    data: tuple[list[int], int], first: int, second: int, third: int, objective: Any, last: Any, draw: Any
) -> None:
    lengths, cap = data
    options = {"max_tokens": cap, "objective": objective, "last": last, "seed": 3}

    def at(num_replicas: int, state: dict[str, Any] | None) -> DistributedTokenBatchSampler:
        try:
            sampler = DistributedTokenBatchSampler(lengths, num_replicas=num_replicas, rank=num_replicas - 1, **options)
            if state is None:
                sampler.set_epoch(1)
        except PlanError:
            reject()  # lengths may need more bins than there are samples
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
            sampler.set_epoch(1)  # as training loops do after a resume: no change
        return sampler

    state, trained, expected, repeated = None, Counter[int](), Counter[int](), 0
    for num_replicas in (first, second, third):
        sampler = at(num_replicas, state)
        expected = expected or Counter(sampler.plan.samples.tolist()) + Counter(sampler.plan.rest.tolist())
        if last == "pad":  # what it repeats is not asked for
            expected = Counter(set(expected))
        start = sampler.plan.num_steps - len(sampler)
        steps = draw.draw(st.integers(0, len(sampler)))
        batches = iter(sampler)
        before = [next(batches) for _ in range(steps)]
        state = sampler.state_dict()
        same = at(num_replicas, state)
        after = list(batches)
        assert len(same) == len(after)
        assert list(same) == after
        done = sampler.plan
        assert [done.batch(start + k, num_replicas - 1) for k in range(steps)] == before
        gone = done.starts[start * num_replicas], done.starts[(start + steps) * num_replicas]
        trained += Counter(done.samples[gone[0] : gone[1]].tolist())
        repeated += done.num_repeated if steps else 0
    rest = same.plan
    repeated += rest.num_repeated if start + steps < rest.num_steps else 0
    trained += Counter(rest.samples[rest.starts[(start + steps) * third] :].tolist()) + Counter(rest.rest.tolist())
    if repeated:  # what was too few for all ranks, of each plan that trained
        assert set(trained) == set(expected)
        assert trained.total() <= expected.total() + repeated
    else:
        assert trained == expected


@settings(max_examples=8)
@given(lengths_and_cap(), st.integers(1, 3), st.integers(1, 3), OBJECTIVES, st.data())
def test_a_stream_is_trained_whole_alike_on_all_ranks_and_resumes_where_it_was(
    data: tuple[list[int], int], num_replicas: int, later: int, objective: Any, draw: Any
) -> None:
    lengths, cap = data
    samples = list(enumerate(lengths))

    def stream(ranks: int, rank: int) -> StreamingTokenBatches[tuple[int, int]]:
        return StreamingTokenBatches(
            lambda: samples,
            lambda sample: sample[1],
            max_tokens=cap,
            num_replicas=ranks,
            rank=rank,
            objective=objective,
            window_steps=2,
        )

    batches = [list(stream(num_replicas, rank)) for rank in range(num_replicas)]
    assert len({len(found) for found in batches}) == 1
    times = Counter(number for found in batches for batch in found for number, _ in batch)
    assert set(times) == set(range(len(lengths)))
    for batch in (batch for found in batches for batch in found):
        used = [length for _, length in batch]
        assert 0 < (len(used) * max(used) if objective == "padded" else sum(used)) <= cap

    stop = draw.draw(st.integers(0, len(batches[0])))
    reading = stream(num_replicas, 0)
    iterator = iter(reading)
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(reading.state_dict()))
    same = stream(num_replicas, 0)
    same.load_state_dict(state)
    assert list(same) == batches[0][stop:]
    assert list(same) == batches[0], "once the stream has ended the next pass is a whole one"

    done = Counter(number for found in batches for batch in found[:stop] for number, _ in batch)
    for rank in range(later):
        other = stream(later, rank)
        other.load_state_dict(state)
        done += Counter(number for batch in other for number, _ in batch)
    assert set(done) == set(range(len(lengths)))


@settings(max_examples=30)
@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([2, 5, 30]),
    st.sampled_from([0, 10, 400]),
    st.integers(0, 2**32),
)
def test_evened_steps_have_the_same_samples_within_the_cap_and_no_block_is_worse(
    num_ranks: int, steps_each: int, num_blocks: int, most: int, slack: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_bins = num_ranks * steps_each
    counts = rng.integers(1, most, num_bins * num_blocks)
    starts = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.maximum(rng.lognormal(4, 1.2, starts[-1]), 1).astype(np.int64)
    costs = tokens**2
    places = np.concatenate(
        [s + starts[b * num_bins] for b in range(num_blocks)
         for s in [rng.permutation(starts[(b + 1) * num_bins] - starts[b * num_bins])]]
    )  # fmt: skip
    cap = int(np.add.reduceat(tokens[places], starts[:-1]).max()) + slack
    found, new_starts = even_steps(places, starts, tokens, costs, num_ranks=num_ranks, num_bins=num_bins, cap=cap)

    def excess(places: Any, starts: Any) -> Any:
        shape = (-1, num_ranks)
        load = np.add.reduceat(costs[places], starts[:-1]).reshape(shape)
        largest = np.maximum.reduceat(costs[places], starts[:-1]).reshape(shape).max(axis=1)
        return (load.max(axis=1) / np.maximum(load.mean(axis=1), largest)).reshape(-1, steps_each).max(axis=1)

    assert (np.diff(new_starts) > 0).all()
    assert np.add.reduceat(tokens[found], new_starts[:-1]).max() <= cap
    for block in range(num_blocks):
        ends = starts[block * num_bins], starts[(block + 1) * num_bins]
        assert (new_starts[block * num_bins], new_starts[(block + 1) * num_bins]) == ends
        assert sorted(found[slice(*ends)]) == sorted(places[slice(*ends)])
    assert (excess(found, new_starts) <= excess(places, starts) * (1 + 1e-12)).all()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 150)), min_size=2, max_size=6),
    st.integers(2, 3),
    st.integers(0, 6),
)
def test_no_assignment_within_the_cap_is_below_the_least_cost(
    samples: list[tuple[int, int]], num_ranks: int, slack: int
) -> None:
    tokens, costs = np.array(samples).T
    cap = max(int(tokens.max()), -(-int(tokens.sum()) // num_ranks)) + slack
    least = least_cost(tokens, costs, num_ranks=num_ranks, cap=cap)
    for ranks in itertools.product(range(num_ranks), repeat=len(samples)):
        if np.bincount(ranks, tokens, num_ranks).max() <= cap:
            assert np.bincount(ranks, costs, num_ranks).max() >= least * (1 - 1e-12)
