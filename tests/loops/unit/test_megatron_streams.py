"""Corpora in Megatron-LM's loops: mixed, repeated, cut at the model's length, in steps that ramp up or count tokens."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import GlobalBatches, GlobalBatchRule
from dynapipe_ext.data.dataset import prepare
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.drop_in.corpora import DataArguments, Part, StepMaker, opened_parts, ramp_sizes
from dynapipe_ext.executor.drop_in.datasets import PlannedDatasets, planned_iterators
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps, steps_taken
from dynapipe_ext.executor.drop_in.sample_streams import end_to_end, mixture, of_bounded_length, parse_mixture
from dynapipe_ext.executor.drop_in.samples import LabelledSample
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.transport.inline import InlineHub


class Source:
    """Samples whose tokens count up from 1,000 times their number; `masks` say which labels count."""

    def __init__(self, positions: list[int], masks: list[list[int]] | None = None, first: int = 0) -> None:
        self.masks = masks or [[1] * n for n in positions]
        self.first = first
        self.lengths = np.array([[n, 0, sum(mask)] for n, mask in zip(positions, self.masks, strict=True)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> LabelledSample:
        start, length = 1000 * (self.first + index), int(self.lengths[index, 0])
        tokens = np.arange(start, start + length + 1)
        return LabelledSample(tokens[:-1], tokens[1:], np.array(self.masks[index], np.float32))


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    count=st.integers(1, 80),
    more=st.integers(0, 40),
)
def test_a_mixture_takes_turns_by_weights_and_a_longer_one_goes_on(
    weights: list[float], sizes: list[int], count: int, more: int
) -> None:
    sources = [Source([3] * size) for size, _ in zip(sizes, weights, strict=False)]
    stream = mixture(sources, weights, seed=5, count=count)
    longer = mixture(sources, weights, seed=5, count=count + more)
    assert len(stream) == count
    assert longer.which[:count].tolist() == stream.which.tolist()
    assert longer.indices[:count].tolist() == stream.indices.tolist()
    for number, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        taken = stream.indices[stream.which == number].tolist()
        assert abs(len(taken) - count * weight / sum(weights)) <= (1 if len(weights) < 3 else len(weights) / 2 + 1)
        for first in range(0, len(taken), len(source)):  # every epoch has each sample once
            assert max(Counter(taken[first : first + len(source)]).values()) == 1


def test_places_of_a_stream_are_the_samples_of_its_sources() -> None:
    first, second = Source([2, 3]), Source([4], first=7)
    stream = end_to_end([first, second])
    assert stream.lengths[:, 0].tolist() == [2, 3, 4]
    assert [int(stream[i].tokens[0]) for i in range(3)] == [0, 1000, 7000]
    mixed = mixture([first, second], [1, 3], seed=0, count=8)
    for place in range(8):
        assert len(mixed[place].tokens) == mixed.lengths[place, 0]
    assert Counter(mixed.which.tolist()) == {0: 2, 1: 6}


@given(data=st.data(), most=st.integers(1, 7), how=st.sampled_from(["truncate", "chunk"]))
def test_long_samples_are_truncated_or_cut_with_each_label_once(data: st.DataObject, most: int, how: Any) -> None:
    positions = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in positions]
    source = Source(positions, masks)
    expected: list[tuple[int, ...]] = []
    for index, length in enumerate(positions):
        starts = range(0, length, most) if how == "chunk" else [0]
        for start in starts:
            run = range(start, min(start + most, length))
            if length <= most or any(masks[index][i] for i in run):
                expected.append(tuple(1000 * index + i for i in run))
    if not expected:
        with pytest.raises(DataError, match="no sample has a target within"):
            of_bounded_length(source, most, long_samples=how, what="the data")
        return
    cut, note = of_bounded_length(source, most, long_samples=how, what="the data")
    assert [tuple(LabelledSample.of(cut[i]).tokens.tolist()) for i in range(len(cut))] == expected
    assert bool(note) == (max(positions) > most)
    for i in range(len(cut)):
        sample = LabelledSample.of(cut[i])
        assert (sample.labels == sample.tokens + 1).all()
        assert sample.loss_mask.tolist() == [masks[t // 1000][t % 1000] for t in sample.tokens.tolist()]
        assert np.asarray(cut.lengths)[i].tolist() == [len(sample.tokens), 0, int(sample.loss_mask.sum())]


def test_a_long_sample_is_refused_with_what_can_be_done() -> None:
    with pytest.raises(DataError, match=r"sample 1 has 9 positions but --seq-length is 8: .*--dynapipe-long-samples"):
        of_bounded_length(Source([3, 9]), 8, long_samples="refuse", what="training data")
    _, note = of_bounded_length(Source([3, 9, 17]), 8, long_samples="chunk", what="training data")
    assert note == "training data: 2 samples of more than 8 positions are cut into 5 samples"


@pytest.mark.parametrize("words", [["0.5", "a", "b"], ["0", "a"], ["nan", "a", "1", "b"]])
def test_weights_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        parse_mixture(words)


@given(sizes=st.lists(st.integers(1, 5), max_size=4), size=st.integers(1, 6), count=st.integers(7, 40))
def test_batches_of_first_sizes_come_first_and_every_sample_is_in_one(sizes: list[int], size: int, count: int) -> None:
    rule = GlobalBatchRule(batch_size=size, first_sizes=tuple(sizes))
    batches = rule.batches(np.ones(count, np.int64), 0)
    found = [len(batches[step]) for step in range(len(batches))]
    assert sum(found) == count
    assert found[: len(sizes)][:-1] == sizes[: len(found)][: len(found[: len(sizes)]) - 1]
    assert all(one == size for one in found[len(sizes) : -1])
    assert GlobalBatchRule.from_json(rule.to_json()) == rule
    assert [i for step in range(len(batches)) for i in batches[step]] == list(range(count))
    for step in range(len(found) - 1):
        assert steps_taken(sum(found[:step]), size, sizes) == step


def arguments(**changes: Any) -> Namespace:
    defaults = {
        "split": None, "seq_length": 64, "sft": False, "global_batch_size": 8, "micro_batch_size": 1, "seed": 0,
        "data_parallel_size": 2, "consumed_train_samples": 0, "consumed_valid_samples": 0, "skip_train": False,
        "train_iters": 9, "eval_iters": 2, "iteration": 0, "decrease_batch_size_if_needed": False,
    }  # fmt: skip
    return Namespace(**defaults | changes)


def test_ramp_up_takes_the_samples_that_megatrons_own_count_says() -> None:
    megatron_cpu.install()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    args = arguments(global_batch_size=24, rampup_batch_size=["8", "8", "50"])
    calculator = RampupBatchsizeNumMicroBatchesCalculator(24, 1, 2, False, 0, 8, 8, 50)
    consumed, sizes = 0, []
    for _ in range(9):  # as `train` of Megatron-LM does before each step
        calculator.update(consumed, consistency_check=True)
        sizes.append(2 * calculator.get())
        consumed += sizes[-1]
    ramp = ramp_sizes(args)
    assert (*ramp, *[24] * (9 - len(ramp))) == tuple(sizes)
    steps = _maker(args).training(Part((Source([5] * 30),), (None,)))
    taken = _samples(steps, 9)
    assert [len(one) for one in taken] == sizes
    again = _maker(arguments(**vars(args) | {"consumed_train_samples": sum(sizes[:4])}))
    assert _samples(again.training(Part((Source([5] * 30),), (None,))), 5) == taken[4:]
    with pytest.raises(ConfigError, match="13 samples were consumed"):
        _maker(arguments(**vars(args) | {"consumed_train_samples": 13})).training(Part((Source([5] * 30),), (None,)))


def test_conversations_are_cut_to_the_tokens_that_megatrons_own_data_set_keeps() -> None:
    """SFTDataset pads the first 64 tokens of one of 65 or more, so 63 of its labels count."""
    part = Part((Source([62, 63, 64, 65, 200]),), (None,))
    for changes, kept in (({"sft": True}, [62, 63, 63, 63, 63]), ({}, [62, 63, 64, 64, 64])):
        maker = _maker(arguments(global_batch_size=5, **changes), DataArguments(long_samples="truncate"))
        assert sorted(_samples(maker.training(part), 1)[0]) == kept
    assert sorted(_samples(_maker(arguments(global_batch_size=5, sft=True)).training(part), 1)[0]) == [62, *[63] * 4]


def test_steps_of_tokens_hold_as_many_samples_as_fit_and_go_on_where_they_stopped() -> None:
    source = Source([1 + i * 7 % 60 for i in range(40)])
    data_arguments = DataArguments(tokens_per_batch=100)

    def trained(consumed: int, num_steps: int) -> list[list[int]]:
        maker = _maker(arguments(consumed_train_samples=consumed), data_arguments)
        return _samples(maker.training(Part((source,), (None,))), num_steps)

    steps = trained(0, 9)
    sums = [sum(lengths) for lengths in steps]
    assert all(60 < one <= 100 for one in sums)
    assert len({len(lengths) for lengths in steps}) > 2
    assert trained(5 * 8, 4) == steps[5:]  # the loop counts 8 a step
    maker = _maker(arguments(), data_arguments).training(Part((source,), (None,)))
    next(_bound(maker))
    assert maker.last_count == 8
    one = Source([60, 60])
    with pytest.raises(ConfigError, match="1 samples for 2 replicas"):
        _bound(_maker(arguments(), data_arguments).training(Part((one,), (None,))), Topology(dp=2))


def test_small_validation_sets_repeat_each_sample_as_often() -> None:
    said: list[str] = []
    maker = StepMaker(args=arguments(), data_arguments=DataArguments(), num_samples=lambda: (0, 0, 0), say=said.append)
    steps = maker.evaluation(Part((Source([1, 2, 3, 4, 5, 6]),), (None,)), "validation", 0)
    lengths = [length for step in _samples(steps, 6) for length in step]
    assert Counter(lengths) == dict.fromkeys(range(1, 7), 8)
    assert said == ["the validation data are 6 samples, fewer than a global batch of 8: they repeat"]


def test_a_mixture_is_validated_in_its_shares_and_on_after_what_was_consumed() -> None:
    part = Part((Source([3] * 20), Source([7] * 20)), (1.0, 3.0))

    def validated(consumed: int, num_steps: int) -> list[list[int]]:
        maker = StepMaker(
            args=arguments(), data_arguments=DataArguments(), num_samples=lambda: (72, 40, 16), say=lambda _: None
        )
        return _samples(maker.evaluation(part, "validation", consumed), num_steps)

    steps = validated(0, 5)
    assert Counter(length for step in steps for length in step) == {3: 10, 7: 30}
    assert validated(24, 2) == steps[3:]


@pytest.mark.parametrize("count", [2, 7, 8, 9, 17])
def test_a_full_validation_takes_each_sample_once(count: int) -> None:
    steps = _maker(arguments()).whole(Part((Source(list(range(1, count + 1))),), (None,)))
    taken = _samples(steps, 2 * len(steps))
    assert [length for step in taken for length in step] == 2 * list(range(1, count + 1))
    assert min(map(len, taken)) >= 2
    assert max(map(len, taken)) <= 8
    with pytest.raises(DataError, match="has 1 samples for 2 replicas"):
        _maker(arguments()).whole(Part((Source([5]),), (None,)))


def test_several_validation_sets_and_full_validation_set_what_megatron_lm_reads() -> None:
    training = Namespace(get_train_valid_test_num_samples=lambda: (72, None, 16))
    sets = [Source([3] * 20), Source([4] * 3)]
    provider = PlannedDatasets(lambda _: (Source([5] * 30), sets, Source([6] * 4)))
    args = arguments(full_validation=True, multiple_validation_sets=True)
    said: list[str] = []
    _, valid, test = planned_iterators(provider, args, DataArguments(), training, said.append)  # type: ignore[misc]
    assert isinstance(valid, list)
    assert args.eval_iters == [3, 1]
    assert (test, args.do_test) == (None, 0)
    assert "the test data are left out" in said[0]
    args = arguments(full_validation=True)
    _, valid, test = planned_iterators(provider, args, DataArguments(), training, said.append)  # type: ignore[misc]
    assert isinstance(valid, PlannedSteps)
    assert (args.eval_iters, len(valid), args.full_validation) == (3, 3, False)
    assert test is not None
    with pytest.raises(ConfigError, match="multiple_validation_sets is True with full_validation False"):
        planned_iterators(provider, arguments(multiple_validation_sets=True), DataArguments(), training)


def test_corpora_are_named_as_megatron_lm_names_them(tmp_path: Path) -> None:
    for name, count in (("a", 20), ("b", 40)):
        prepare(
            lambda count=count: generate_examples(num_samples=count, seed=count),  # type: ignore[misc]
            tmp_path / name,
            tokenizer="bytes",
            max_seq_len=64,
            truncate=True,
        )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    train, valid, test = opened_parts(DataArguments(data=("0.25", a, "0.75", b)), arguments(split="80,20,0"), None)
    assert train is not None
    assert valid is not None
    assert (train.shares, [*map(len, train.sources)], [*map(len, valid.sources)]) == ([0.25, 0.75], [16, 32], [4, 8])
    assert test is None
    by_size, _, _ = opened_parts(DataArguments(data=(a, b)), arguments(), None)
    assert by_size is not None
    assert by_size.shares == [20, 40]
    _, named, _ = opened_parts(DataArguments(data=(a,), valid_data=(b,)), arguments(), None)
    assert named is not None
    assert len(named) == 40
    with pytest.raises(ConfigError, match="--split is 80,20,0 but --dynapipe-valid-data"):
        DataArguments(data=(a,), valid_data=(b,)).check(arguments(split="80,20,0"))
    with pytest.raises(ConfigError, match="goes with --dynapipe-data"):
        DataArguments(valid_data=(b,)).check(arguments())
    with pytest.raises(ConfigError, match="with --rampup-batch-size, which counts"):
        DataArguments(data=(a,), tokens_per_batch=9).check(arguments(rampup_batch_size=[1, 1, 1]))


def _maker(args: Namespace, data_arguments: DataArguments | None = None) -> StepMaker:
    return StepMaker(
        args=args, data_arguments=data_arguments or DataArguments(), num_samples=lambda: (0, 0, 0), say=lambda _: None
    )


def _bound(steps: PlannedSteps, topology: Topology | None = None) -> PlannedSteps:
    topology = topology or Topology()
    pipeline = MegatronPipeline(
        topology=topology,
        coordinates=topology.coordinates(0),
        transport=InlineHub().transport(0),
        activation_format=ActivationFormat(8),
        costs=TokenCosts(topology.num_stages, bytes_per_token=10),
        counts_memory=True,
        recompute="none",
        pad_multiple=1,
        replica_collectives=ReplicaCollectives(),
        device=None,  # type: ignore[arg-type]
        usable_bytes=1 << 30,
    )
    steps.bind(pipeline, DropInSettings())
    return steps


def _samples(steps: PlannedSteps, count: int) -> list[list[int]]:
    """The lengths of the samples of each of the next steps, in the order of the data."""
    found = []
    for _, plan in islice(_bound(steps), count):
        planned = sorted((s.index, s.encoder) for m in plan.micro_batches for s in m.samples)
        assert sorted(steps.last_lengths) == sorted(length for _, length in planned)
        found.append([length for _, length in planned])
    return found


def test_global_batches_of_first_sizes_go_with_samples_alone() -> None:
    with pytest.raises(ConfigError, match="first_sizes"):
        GlobalBatches(np.ones(9, np.int64), tokens_per_batch=3, first_sizes=(1,), seed=0)
