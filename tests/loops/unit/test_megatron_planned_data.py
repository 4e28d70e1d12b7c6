"""Steps of planned data for Megatron's training loops, and plans of micro-batches of one shape."""

from __future__ import annotations

import dataclasses
import json
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, PlacementName, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample, prepare
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.drop_in import drop_in
from dynapipe_ext.executor.drop_in.arguments import ScriptSettings, add_arguments
from dynapipe_ext.executor.drop_in.conversations import HostShare, kept_conversations
from dynapipe_ext.executor.drop_in.corpora import DataArguments
from dynapipe_ext.executor.drop_in.datasets import PlannedDatasets, planned_iterators, real_flops
from dynapipe_ext.executor.drop_in.drop_in import ForwardBackward, _say_planned
from dynapipe_ext.executor.drop_in.given_micro_batches import GivenPlanner, GivenShapes
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps, batch_once, data_planner, replicas_meet
from dynapipe_ext.executor.drop_in.samples import LabelledSample, megatron_arrays, open_samples, split_source
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.proven_step import prove, prove_step
from dynapipe_ext.executor.store.address import named_store
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.store import asked_store
from dynapipe_ext.schedules.actions import Kind
from dynapipe_ext.schedules.evaluation.simulate import compute_peak_bytes
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b


class Source:
    """Samples of 4 to 11 positions, each filled with its number."""

    def __init__(self, count: int = 30) -> None:
        positions = 4 + np.arange(count) % 8
        self.lengths = np.stack([positions, 0 * positions, positions], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        return TokenSample(index, np.full(self.lengths[index, 0] + 1, index), 1)


def pipeline(topology: Topology, rank: int = 0, *, ep: int = 1) -> MegatronPipeline:
    return MegatronPipeline(
        topology=topology,
        coordinates=topology.coordinates(rank),
        transport=InlineHub().transport(0),
        activation_format=ActivationFormat(8),
        costs=TokenCosts(topology.num_stages, bytes_per_token=10),
        counts_memory=True,
        recompute="none",
        pad_multiple=1,
        replica_collectives=ReplicaCollectives.of_zero(0, ep=ep),
        device=torch.device("cpu"),
        usable_bytes=1 << 30,
    )


def samples_of_steps(topology: Topology, count: int, consumed: int = 0, *, seed: int = 3) -> list[set[int]]:
    """The samples of each of `count` steps over all replicas."""
    found: list[set[int]] = [set() for _ in range(count)]
    for dp_rank in range(topology.dp):
        rank = topology.rank(tp_rank=0, pp_rank=0, dp_rank=dp_rank)
        steps = PlannedSteps(Source(), batch_size=8, seed=seed, consumed_samples=consumed)
        steps.bind(pipeline(topology, rank), DropInSettings())
        for number, (micro_batches, plan) in enumerate(islice(steps, count)):
            own = [s.index for m in plan.micro_batches for s in m.samples]
            assert not found[number] & set(own)
            found[number].update(own)
            assert sorted(steps.last_lengths)  # of the whole batch
            for batch, planned in zip(micro_batches, plan.micro_batches, strict=True):
                assert batch["tokens"].shape == (planned.rows, planned.encoder_len)
    return found


def test_a_step_has_the_same_samples_on_any_ranks_and_after_any_stop() -> None:
    whole = samples_of_steps(Topology(), 7)  # two epochs of three steps, and one of the third
    assert all(len(samples) == 8 for samples in whole)
    assert samples_of_steps(Topology(), 3, consumed=4 * 8) == whole[4:]
    assert samples_of_steps(Topology(pp=2, dp=2), 7) == whole
    assert samples_of_steps(Topology(), 7, seed=4) != whole


@pytest.mark.parametrize("placement", ["linear", "interleaved"])
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_replicas_that_share_experts_run_as_many_micro_batches_in_one_order(
    placement: PlacementName, split_backward: bool, forward_only: bool
) -> None:
    """Their proof is of tokens that are exchanged inside every micro-batch."""
    topology = Topology(pp=2, dp=2, placement=() if placement == "linear" else place_stages(placement, 2, 2))
    settings = DropInSettings(split_backward=split_backward, memory_limit_gb=20e-6)
    sharing = pipeline(topology, ep=2)
    if split_backward and placement != "linear":
        with pytest.raises(ConfigError, match="give one stage a rank"):
            data_planner(sharing, settings, forward_only=forward_only)
        return
    planner = data_planner(sharing, settings, forward_only=forward_only)
    lengths = [4] * 9 + [60] * 5 + [31]
    samples = [SampleLength(i, length, 0, length) for i, length in enumerate(lengths)]
    first, second = prove_step(planner, samples, step=0).plans[0][0].num_micro_batches
    assert first == second > 1


def test_experts_within_blocks_leave_replicas_free_and_samples_may_be_cut() -> None:
    """Of a named width; where each step takes one, some would not hold the ranks that share experts."""
    samples = [SampleLength(i, length, 0, length) for i, length in enumerate([8] * 4 + [400, 31])]
    settings = DropInSettings(width=2, layout="packed", pieces=64, memory_limit_gb=20e-6)
    sharing = pipeline(Topology(pp=2, dp=4), ep=2)
    planner = data_planner(sharing, settings, forward_only=False)
    plans = prove_step(planner, samples, step=0).plans
    counts = plans[0][0].num_micro_batches
    assert len(counts) == 2
    assert counts[0] != counts[1]
    assert any(m.attention == "carried" for own in plans for m in own[0].micro_batches)
    assert not replicas_meet(sharing, settings)
    for other in (dataclasses.replace(settings, width=1), dataclasses.replace(settings, width="auto")):
        assert replicas_meet(sharing, other)


def test_steps_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 samples were consumed, which is no multiple of the global batch of 8"):
        PlannedSteps(Source(), batch_size=8, seed=0, consumed_samples=12)
    with pytest.raises(ConfigError, match="drop_last leaves no global batch"):
        PlannedSteps(Source(5), batch_size=8, seed=0)
    with pytest.raises(ConfigError, match="another schedule"):
        next(PlannedSteps(Source(), batch_size=8, seed=0))
    steps = PlannedSteps(Source(), batch_size=8, seed=0)
    unknown = pipeline(Topology())
    object.__setattr__(unknown, "counts_memory", False)
    object.__setattr__(unknown, "topology", Topology(pp=2, placement=(0, 1, 1, 0)))
    with pytest.raises(ConfigError, match="a V has no schedule to measure them by: give costs"):
        steps.bind(unknown, DropInSettings())


def arguments(**changes: Any) -> Namespace:
    return Namespace(
        **{
            "split": "80,20,0",
            "seq_length": 11,
            "sft": False,
            "global_batch_size": 4,
            "seed": 0,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "skip_train": False,
            "train_iters": 5,
            "eval_iters": 1,
            "iterations_to_skip": [],
            "iteration": 0,
        }
        | changes
    )


def test_every_stage_reads_its_data_and_each_micro_batch_once() -> None:
    """A script's forward step may ask its iterator anywhere, as one on Megatron's own data may."""
    topology = Topology(pp=3)
    for rank in range(3):
        steps = PlannedSteps(Source(), batch_size=8, seed=0)
        steps.bind(pipeline(topology, rank), DropInSettings(layout="packed"))
        micro_batches, _ = next(steps)
        assert {"tokens", "labels", "loss_mask", "position_ids"} <= set(micro_batches[0])
    read = batch_once(micro_batches[0])
    assert next(read) is micro_batches[0]
    with pytest.raises(ConfigError, match="twice for one planned micro-batch"):
        next(read)


@pytest.mark.parametrize("per_token", [True, False])
def test_what_a_loss_of_the_older_kind_weighs_is_said(
    per_token: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    _say_planned(Namespace(calculate_per_token_loss=per_token), "packed")
    said = capsys.readouterr().out
    assert "planned micro-batches, rows packed" in said
    assert ("every micro-batch weighs the same" in said) == (not per_token)


@pytest.mark.parametrize(
    ("wishes", "argument", "told"),
    [
        (ScriptSettings(layout="packed"), None, "layout is 'packed', but no data are planned"),
        (ScriptSettings(pieces="auto", layout="packed"), None, "layout is 'packed' and pieces is 'auto', but"),
        (ScriptSettings(store="redis://:secret@there"), None, "store was given, but no data are planned"),
        (ScriptSettings(), "packed", "layout is 'packed'"),
        (ScriptSettings(layout="padded", pieces="off"), "packed", None),
        (ScriptSettings(), None, None),
    ],
)
def test_wishes_for_planned_data_are_refused_without(
    wishes: ScriptSettings, argument: str | None, told: str | None
) -> None:
    with pytest.raises(ConfigError, match=told) if told else nullcontext() as error:
        wishes.check_unplanned(Namespace(dynapipe_layout=argument))
    assert "secret" not in str(error)


def test_iterators_are_made_for_what_the_arguments_ask() -> None:
    provider = PlannedDatasets(lambda _: (Source(24), Source(6), None))
    args = arguments()
    assert planned_iterators(lambda _: None, args, DataArguments(), None) is None
    sources = provider([1, 1, 1])
    steps = [steps for steps in (_iterators(provider, args)) if steps is not None]
    assert [one.forward_only for one in steps] == [False, True]
    assert (args.do_train, args.do_valid, args.do_test) == (1, 1, 0)
    assert sources[2] is None
    with pytest.raises(DataError, match="sample 7 has 11 positions but --seq-length is 10"):
        _iterators(provider, arguments(seq_length=10))
    with pytest.raises(ConfigError, match="the training data set is a list without `lengths`"):
        _iterators(PlannedDatasets(lambda _: ([1], None, None)), arguments())  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="--dynapipe-data was given, but the script has a datasets_provider"):
        planned_iterators(provider, arguments(), DataArguments(data=("data",)), None)


def test_a_checkpoint_that_says_no_samples_goes_on_by_its_steps_and_evaluation_alone_begins_anew() -> None:
    """As Megatron-LM's own loaders do."""
    provider = PlannedDatasets(lambda _: (Source(24), Source(24), None))
    args = arguments(iteration=3)
    train, _, _ = _iterators(provider, args)
    assert args.consumed_train_samples == 12
    expected = PlannedSteps(Source(24), batch_size=4, seed=0, consumed_samples=12)
    assert steps_of(train) == steps_of(expected)
    _, anew, _ = _iterators(provider, arguments(consumed_valid_samples=8, skip_train=True))
    _, later, _ = _iterators(provider, arguments(consumed_valid_samples=8))
    assert steps_of(anew) != steps_of(later)


def steps_of(steps: PlannedSteps) -> list[int]:
    """The samples of the next step."""
    steps.bind(pipeline(Topology()), DropInSettings())
    _, plan = next(steps)
    return sorted(s.index for m in plan.micro_batches for s in m.samples)


def test_prepared_data_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Tensor parallel ranks would embed tokens that no rank has as zeros."""
    prepare(
        lambda: generate_examples(num_samples=8, seed=0),
        tmp_path / "data",
        tokenizer="bytes",
        max_seq_len=11,
        truncate=True,
    )
    args = arguments(padded_vocab_size=256, global_batch_size=2, split="1,0,0")
    data = DataArguments(data=(str(tmp_path / "data"),))
    with pytest.raises(DataError, match="tokens of a vocabulary of 258, but the model's has 256"):
        planned_iterators(lambda _: None, args, data, None)
    args.padded_vocab_size = 258
    assert planned_iterators(lambda _: None, args, data, None)


def test_data_planned_for_training_are_not_evaluated_on() -> None:
    evaluation: Any = Namespace(forward_only=True)
    with pytest.raises(ConfigError, match="forward_only is True but these data are planned with False"):
        ForwardBackward()._run_planned(evaluation, None, PlannedSteps(Source(), batch_size=8, seed=0), None)  # type: ignore[arg-type]


def _iterators(provider: PlannedDatasets, args: Namespace) -> Any:
    training = Namespace(get_train_valid_test_num_samples=lambda: (20, 4, 4))
    return planned_iterators(provider, args, DataArguments(), training)


def test_flops_are_those_of_samples_at_their_own_lengths() -> None:
    steps = PlannedSteps(Source(8), batch_size=8, seed=0)
    steps.bind(pipeline(Topology()), DropInSettings())
    next(steps)
    args = Namespace(seq_length=99)
    squares = real_flops(lambda own, count: count * own.seq_length**2, steps, args, 16)
    assert squares == 2 * sum(n * n for n in range(4, 12))
    assert args.seq_length == 99


def test_rows_are_those_that_megatrons_loaders_make() -> None:
    lengths = tuple(SampleLength(i, n, 0, n) for i, n in enumerate((3, 2)))
    prompt = TokenSample(0, np.array([5, 6, 7, 8]), 2)  # the label at position 0 is of the prompt
    masked = {"tokens": [1, 2], "labels": [2, -100]}
    padded = megatron_arrays(MicroBatch(lengths, pad_multiple=4), [prompt, masked])
    assert {name: array.tolist() for name, array in padded.items()} == {
        "tokens": [[5, 6, 7, 0], [1, 2, 0, 0]],
        "labels": [[6, 7, 8, 0], [2, 0, 0, 0]],
        "loss_mask": [[0, 1, 1, 0], [1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3], [0, 1, 2, 3]],
    }
    packed = megatron_arrays(MicroBatch(lengths, "packed", pad_multiple=8), [prompt, masked])
    assert packed["tokens"].tolist() == [[5, 6, 7, 1, 2, 0, 0, 0]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed["loss_mask"].tolist() == [[0, 1, 1, 1, 0, 0, 0, 0]]
    with pytest.raises(DataError, match="sample 1 has 4 tokens"):
        megatron_arrays(MicroBatch(lengths), [prompt, {"tokens": [1] * 4, "labels": [1] * 4}])
    with pytest.raises(DataError, match="a sample is a list"):
        megatron_arrays(MicroBatch(lengths), [prompt, [1, 2]])


class Tokenizer:
    """A token a character; what users say is not to be learnt."""

    eod = 0

    def tokenize_conversation(self, messages: Any, **_: Any) -> tuple[Any, Any]:
        tokens = [ord(c) for m in messages for c in m["content"]]
        targets = [ord(c) if m["role"] == "assistant" else -100 for m in messages for c in m["content"]]
        return np.array(tokens), np.array(targets)


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def test_conversations_teach_what_the_assistant_says(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    first = said(("system", "ab"), ("user", "c"), ("assistant", "de"))
    path.write_text(json.dumps({"messages": [*first, *said(("system", "f"), ("assistant", "ghijkl"))]}) + "\n\n")

    def kept() -> Any:
        return kept_conversations(path, Tokenizer(), kept_in=tmp_path / "kept", share=HostShare())

    found = kept()
    assert found.lengths.tolist() == [[5, 0, 3], [7, 0, 7]]
    sample = LabelledSample.of(found[0])
    assert sample.tokens.tolist() == [*map(ord, "abcde")]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert sample.labels.tolist()[2:] == [ord("d"), ord("e"), Tokenizer.eod]
    for line, told in (
        ("{}", 'it has no "messages"'),
        ('{"messages": [{"from": "a"}]}', "a message has no role and con"),
        ('{"messages": [{"role": "assistant", "content": 5}]}', "the tokenizer refuses the conversation"),
    ):
        path.write_text(line)
        with pytest.raises(DataError, match=f"line 1: {told}"):
            kept()
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no conversations"):
        kept()
    with pytest.raises(DataError, match="neither prepared tokens"):
        open_samples(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="split is 'a,b'"):
        split_source(Source(), "a,b")


class CountingTokenizer(Tokenizer):
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def tokenize_conversation(self, messages: Any, **others: Any) -> tuple[Any, Any]:
        self.num_asked += 1
        return super().tokenize_conversation(messages, **others)


class UpperTokenizer(CountingTokenizer):
    """Of the same name, with another template."""

    def tokenize_conversation(self, messages: Any, **others: Any) -> tuple[Any, Any]:
        return super().tokenize_conversation([m | {"content": m["content"].upper()} for m in messages], **others)


def test_conversations_are_tokenized_once_for_all_ranks_of_a_host_and_kept(tmp_path: Path) -> None:
    """Three ranks are three threads, whose gathered values meet at a barrier."""
    path = tmp_path / "chat.jsonl"
    texts = [f"{i} {'x' * (i % 7)}" for i in range(300)]
    path.write_text("".join(json.dumps({"messages": said(("user", "a"), ("assistant", t))}) + "\n" for t in texts))

    def ranks(make: Callable[[], CountingTokenizer], hosts: Sequence[str]) -> tuple[list[Any], list[int]]:
        table: list[Any] = [None] * len(hosts)
        barrier, tokenizers = threading.Barrier(len(hosts), timeout=60), [make() for _ in hosts]

        def run(rank: int) -> Any:
            def gather(value: Any) -> list[Any]:
                table[rank] = value
                barrier.wait()
                values = list(table)
                barrier.wait()
                return values

            share = HostShare.of_ranks(hosts[rank], rank, gather)
            return kept_conversations(path, tokenizers[rank], kept_in=tmp_path / hosts[rank], share=share)

        with ThreadPoolExecutor(len(hosts)) as pool:
            found = list(pool.map(run, range(len(hosts))))
        return found, [tokenizer.num_asked for tokenizer in tokenizers]

    found, asked = ranks(CountingTokenizer, ["one"] * 3)
    assert sum(asked) == 300
    assert max(asked) < 150  # blocks of lines are shared
    for one in found:
        assert ["".join(map(chr, sample.tokens[1:-1])) for sample in one] == texts  # in the order of the file
    _, again = ranks(CountingTokenizer, ["one", "two", "one"])  # whose disks are their own
    assert again == [16, 300, 0]  # the first of a host looks at 16
    UpperTokenizer.__name__ = "CountingTokenizer"
    upper, anew = ranks(UpperTokenizer, ["one"] * 2)
    assert sum(anew) == 301
    assert chr(upper[0][6].tokens[-2]) == "X"


def test_a_store_is_named_by_a_file_of_ones_own_or_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "store"
    file.touch(0o600)
    file.write_text("rediss://:hidden@node0:6380/0\n")
    for store_of in (named_store, asked_store):
        store = ScriptSettings(store_of=store_of).settings(Namespace(dynapipe_store=str(file))).store
        assert store is not None
        assert (store.url, store.password) == ("rediss://node0:6380/0", "hidden")
        assert ScriptSettings(store_of=store_of).settings(Namespace()).store is None
    monkeypatch.setenv("DYNAPIPE_KV_HOST", "node1")
    monkeypatch.setenv("DYNAPIPE_STORE_PASSWORD", "secret")
    store = ScriptSettings(store_of=asked_store).settings(Namespace()).store
    assert store is not None
    assert store.password == "secret"
    assert "node1" in store.url
    ScriptSettings(store_of=asked_store).check_unplanned(
        Namespace()
    )  # which other runs of a shell that has it may ignore
    with pytest.raises(ConfigError, match="store was given, but no data are planned"):
        ScriptSettings().check_unplanned(Namespace(dynapipe_store=str(file)))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others, who would see the password") as error:
        ScriptSettings().settings(Namespace(dynapipe_store=str(file)))
    assert "hidden" not in str(error.value)


@settings(max_examples=25)
@given(
    pp=st.integers(1, 4),
    chunks=st.sampled_from([1, 2]),
    count=st.integers(1, 9),
    split=st.booleans(),
    forward_only=st.booleans(),
)
def test_every_stage_takes_micro_batches_of_one_shape_in_the_order_of_the_data(
    pp: int, chunks: int, count: int, split: bool, forward_only: bool
) -> None:
    placement = place_stages("interleaved", pp, chunks) if pp > 1 and chunks > 1 else ()
    topology = Topology(pp=pp, dp=3, placement=placement)
    given = GivenShapes.alike(count, rows=2, seq_len=8, forward_only=forward_only)
    planner = GivenPlanner(pipeline=pipeline(topology), given=given, split_backward=split)
    step_plan = planner.plan(planner.samples(), step=0)
    (schedule,) = step_plan.schedules
    for stage in range(topology.num_stages):
        actions = schedule.ranks[schedule.stage_ranks[stage]]
        assert [a.micro_batch for a in actions if (a.stage, a.kind) == (stage, Kind.FORWARD)] == list(range(count))
    prove(step_plan, planner.activation_format, planner.replica_collectives)
    if not forward_only:
        megatrons = interleaved_1f1b(pp, count, topology.num_stages // pp)
        assert max(compute_peak_bytes(schedule, step_plan.costs[0])) <= max(
            compute_peak_bytes(megatrons, step_plan.costs[0])
        )


def test_a_loops_own_micro_batches_are_searched_with_the_effort_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = GivenShapes(shapes=tuple((1, length) for length in (700, 8, 256, 64, 16, 128, 700, 8, 64, 256)))
    planners: list[GivenPlanner] = []
    monkeypatch.setattr(drop_in, "given_plan", lambda planner, *_, **__: planners.append(planner))
    monkeypatch.setattr(drop_in, "_say", lambda *_: None)
    for effort in (0, 3000):
        model: Any = Namespace(plans={}, pipeline=pipeline(Topology(pp=4)), groups=Namespace(pp=None))
        loop = ForwardBackward(DropInSettings(effort=effort, memory_limit_gb=1e3))
        loop._given_plan(model, shapes, compare=False)
    few, many = (planner.plan(planner.samples(), step=0).makespan_s for planner in planners)
    assert many < few


def test_pieces_are_asked_for_by_the_command_line_or_by_the_script() -> None:
    args = add_arguments(ArgumentParser()).parse_args(["--dynapipe-layout", "packed", "--dynapipe-pieces", "64"])
    asked, said = ScriptSettings().settings(args), ScriptSettings(pieces="auto").settings(args)
    assert (asked.pieces, said.pieces, ScriptSettings().settings(None).pieces) == (64, "auto", "off")
    planner = data_planner(pipeline(Topology()), asked, forward_only=False)
    assert planner.pieces == 64
    assert data_planner(pipeline(Topology()), asked, forward_only=True).pieces == "off"
