"""The drop-in beside Megatron's own schedules: the same model, data and `forward_step`, one step of each."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.executor.stages import megatron_cpu

megatron_cpu.install()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402
from megatron.core.transformer.attention import Attention, SelfAttention  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

import dynapipe_ext.megatron as dynapipe  # noqa: E402
from dynapipe_ext.data.dataset import TokenSample, prepare  # noqa: E402
from dynapipe_ext.data.examples import generate_examples  # noqa: E402
from dynapipe_ext.errors import ConfigError, DynaPipeError  # noqa: E402
from dynapipe_ext.executor import loader  # noqa: E402
from dynapipe_ext.executor.drop_in import (  # noqa: E402
    drop_in,
    megatron_lm,
)
from dynapipe_ext.executor.drop_in.gradient_sync import StepGradients  # noqa: E402
from dynapipe_ext.executor.store.address import StoreAddress  # noqa: E402
from dynapipe_ext.launch import megatron_core  # noqa: E402
from tests.support.megatron_loops import (  # noqa: E402
    LENGTH,
    VOCAB,
    Loop,
    Stepped,
    forward_step,
    run_step,
    start,
    told_chunks,
)

LOOPS = {
    "one stage": Loop(),
    "two stages, tied embeddings, two replicas": Loop(pp=2, tied=True),
    "tensor parallel": Loop(tp=2, pp=2),
    "four stages": Loop(pp=4, tied=True),
    "two stages": Loop(pp=2),
    "two chunks a rank, overlap": Loop(pp=2, chunks=2, overlap=True),
    "overlap and distributed optimizer": Loop(pp=2, overlap=True, distributed=True),
    "mean of micro-batches, scaled": Loop(pp=2, per_token=False, loss_scale=1024.0),
    "experts on two replicas, auxiliary loss": Loop(pp=2, ep=2),
}
COMPARED = ("two stages", "two chunks a rank, overlap")  # with each other
SPLIT = dynapipe.DropInSettings(split_backward=True, memory_limit_gb=1)


@dataclass(frozen=True)
class Found:
    """Of one loop on a rank: reports of a step under Megatron's schedule, the same under plans whole and split, and of
    forwards alone; the weights whose gradients under plans are others, or are there after forwards alone."""

    reports: list[list[list[float]]]
    different: list[str]
    gradients: dict[str, torch.Tensor]  # under whole plans
    collected: int


def _reversed_buckets(chunk: Any) -> None:
    for group in reversed(chunk.bucket_groups):
        group.start_grad_sync()


def _miscounted(gradients: StepGradients, num_tokens: torch.Tensor) -> None:
    gradients._num_tokens += num_tokens + 1


def _without_last_backward(num_micro_batches: int) -> Callable[..., None]:
    calls = count(1)

    def backward(_: StepGradients, *ends_and_gradients: Any) -> None:
        if next(calls) < num_micro_batches:
            torch.autograd.backward(*ends_and_gradients)

    return backward


def mutants_unnoticed(loop: Loop) -> list[str]:
    """Mutations of the drop-in under which a step leaves what Megatron's own does here, its buckets in its order (later
    pipeline ranks have one alone)."""
    chunks, _ = start(loop)
    stock = run_step(get_forward_backward_func(), loop, chunks)
    mutants = {
        "bucket order": (DistributedDataParallel, "start_grad_sync", lambda chunk, *_: _reversed_buckets(chunk)),
        "divisor": (StepGradients, "count_tokens", _miscounted),
        "last micro-batch": (StepGradients, "backward", _without_last_backward(loop.num_micro_batches)),
        "none": (StepGradients, "add", StepGradients.add),
    }
    unnoticed = []
    for name, (owner, attribute, mutant) in mutants.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, mutant)
            stepped, started = counted_reductions(chunks, dynapipe.ForwardBackward(), loop)
        alike = all(torch.equal(stepped.gradients[weight], gradient) for weight, gradient in stock.gradients.items())
        if alike and started == sorted(started):
            unnoticed.append(name)
    return unnoticed


def run_loops(env: Any) -> tuple[dict[str, Found], list[str], list[str]]:
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, init_method=env.init_method)
    stock, ours, split = get_forward_backward_func, dynapipe.ForwardBackward(), dynapipe.ForwardBackward(SPLIT)
    found = {}
    for name, loop in LOOPS.items():
        chunks, _ = start(loop)
        # Over gloo Megatron's interleaved schedule may swap messages, which go both ways between the same two ranks:
        # steps of several chunks are compared with those of the same weights in two stages.
        expected = run_step(stock() if loop.chunks == 1 else ours, loop, chunks)
        orders = [counted_reductions(chunks, ours, loop), counted_reductions(chunks, split, loop)]
        buckets = [*range(len(bucket_groups(chunks)))]
        assert [started for _, started in orders] == [buckets, buckets]  # whatever the plan
        forwards = run_step(ours, loop, chunks, forward_only=True)
        collected = len(run_step(ours, loop, chunks, forward_only=True, collect_non_loss_data=True).reports)
        planned = [stepped for stepped, _ in orders]
        different = [
            weight
            for weight, gradient in expected.gradients.items()
            if any(not torch.equal(one.gradients[weight], gradient) for one in planned)
            or forwards.gradients[weight].any()
        ]
        reports = [one.reports for one in (expected, *planned, forwards)]
        found[name] = Found(reports, different, planned[0].gradients, collected)
    of_chunks = LOOPS["two chunks a rank, overlap"]
    assert told_chunks(ours, of_chunks) == told_chunks(stock(), of_chunks)
    loop = LOOPS["overlap and distributed optimizer"]
    chunks, _ = start(loop)
    (theirs, mine) = (run_step(function, loop, chunks, force_all_reduce=True) for function in (stock(), ours))
    assert all(torch.equal(mine.gradients[weight], gradient) for weight, gradient in theirs.gradients.items())
    scattered = found["overlap and distributed optimizer"].gradients  # each replica has its shard's alone
    assert any(not torch.equal(scattered[weight], gradient) for weight, gradient in theirs.gradients.items())
    refused, unnoticed = [*refusals(), *planned_refusals()], mutants_unnoticed(loop)
    dist.destroy_process_group()
    return {n: one if n in COMPARED else replace(one, gradients={}) for n, one in found.items()}, refused, unnoticed


def bucket_groups(chunks: list[Any]) -> list[Any]:
    return [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def counted_reductions(chunks: list[Any], function: Any, loop: Loop) -> tuple[Stepped, list[int]]:
    """A step, and the buckets of this rank in the order in which their reductions started."""
    groups = bucket_groups(chunks)
    started: list[int] = []
    original = _ParamAndGradBucketGroup.start_grad_sync

    def start_grad_sync(group: Any, **keywords: Any) -> None:
        if group.grad_reduce_handle is None:
            started.append(groups.index(group))
        original(group, **keywords)

    _ParamAndGradBucketGroup.start_grad_sync = start_grad_sync
    try:
        return run_step(function, loop, chunks), started
    finally:
        _ParamAndGradBucketGroup.start_grad_sync = original


def refusals() -> list[str]:
    """What is said of settings that cannot go together."""
    said = []
    loop = Loop(pp=2)

    def refused(**keywords: Any) -> None:
        with pytest.raises(DynaPipeError) as error:
            run_step(dynapipe.ForwardBackward(), loop, chunks, **keywords)
        said.append(str(error.value))

    chunks, config = start(loop)
    for name, value in {"overlap_moe_expert_parallel_comm": True, "cuda_graph_impl": "local"}.items():
        before = getattr(config, name)
        setattr(config, name, value)
        refused()
        setattr(config, name, before)
    chunks, config = start(replace(loop, overlap=True))
    config.no_sync_func = None
    refused()
    return said


def planned_step(chunk: Any, forward: Callable[..., Any] = forward_step, **keywords: Any) -> list[Any]:
    """What the loss functions report of a step of `Samples`, in packed rows."""
    chunk.zero_grad_buffer()
    steps = Kept(Samples(), batch_size=24, seed=0, forward_only="forward_only" in keywords)
    shape = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": 2}
    function = dynapipe.ForwardBackward(dynapipe.DropInSettings(layout="packed"))
    reports: list[Any] = function(forward_step_func=forward, data_iterator=steps, model=chunk, **shape, **keywords)
    return reports


def reduced_in(group: Any, *, by_loss: bool) -> Callable[..., Any]:
    """A forward step that sums something over ranks, by itself or in its loss function."""

    def forward(*arguments: Any) -> Any:
        if not by_loss:
            dist.all_reduce(torch.ones(1), group=group)
        output, loss_func = forward_step(*arguments)

        def loss(values: torch.Tensor) -> Any:
            if by_loss:
                dist.all_reduce(torch.ones(1), group=group)
            return loss_func(values)

        return output, loss

    return forward


class OtherAttention(Attention):
    """Stands for any other kind of attention, by its name."""


def planned_refusals() -> list[str]:
    """What is said of planned data on four replicas; of their evaluation under --sft, that it is of all of them."""
    (chunk,), config = start(Loop())
    said = []

    def refused(**keywords: Any) -> None:
        with pytest.raises(ConfigError) as error:
            planned_step(chunk, **keywords)
        said.append(str(error.value))

    ddps = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for group, by_loss in ((None, True), (parallel_state.get_data_parallel_group(), False), (ddps, True)):
        refused(forward=reduced_in(group, by_loss=by_loss))
    (chunk,), config = start(Loop())
    layer = chunk.module.decoder.layers[1].self_attention
    for name, value in {"window_size": (4, 0), "softmax_type": "learnable"}.items():
        before = getattr(config, name)
        setattr(config, name, value)
        refused()
        setattr(config, name, before)
    own, layer.__class__, before = layer.__class__, OtherAttention, layer.core_attention
    layer.core_attention = DotProductAttention(config, 2, AttnMaskType.causal, "self")
    refused()
    layer.__class__, layer.core_attention = own, before
    with pytest.MonkeyPatch.context() as patch:
        of_replica = torch.stack([report["lm loss"] for report in planned_step(chunk, forward_only=True)]).sum(dim=0)
        dist.all_reduce(of_replica)
        patch.setattr(drop_in, "parsed_arguments", lambda: Namespace(sft=True))
        (whole,) = planned_step(chunk, forward_only=True)
        assert torch.equal(whole["lm loss"], of_replica)
        patch.setattr(megatron_lm, "parsed_arguments", lambda: Namespace(sft=True))
        refused(forward_only=True, collect_non_loss_data=True)
    return said


def test_steps_by_plans_leave_the_gradients_and_reports_of_megatrons_schedules(run_ranks: Any) -> None:
    ranks = run_ranks(4, run_loops)
    for name, loop in LOOPS.items():
        for rank, (loops, *_) in enumerate(ranks):
            found = loops[name]
            assert all(reports == found.reports[0] for reports in found.reports), (name, rank)
            assert found.different == [], (name, rank)
            assert found.collected == len(found.reports[0])
        assert sum(len(loops[name].reports[1]) for loops, *_ in ranks) == loop.num_micro_batches * 4 // loop.pp
    for replica in (0, 1):
        stages = [ranks[replica + 2 * pp_rank][0] for pp_rank in (0, 1)]
        whole, chunks = ({n: g for loops in stages for n, g in loops[name].gradients.items()} for name in COMPARED)
        assert whole.keys() == chunks.keys()
        for weight, gradient in whole.items():
            assert torch.allclose(chunks[weight], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max())), weight
        assert stages[1][COMPARED[0]].reports[0] == stages[1][COMPARED[1]].reports[1]
    assert set.intersection(*(set(unnoticed) for *_, unnoticed in ranks)) == {"none"}
    for _, refused, _ in ranks:
        assert [message.split()[0] for message in refused] == [
            "overlap_moe_expert_parallel_comm", "cuda_graph_impl", "overlap_grad_reduce", *["forward_step"] * 3,
            "window_size", "softmax_type", "a", "collect_non_loss_data",
        ]  # fmt: skip


class Samples:
    """Of 1 to 16 positions."""

    lengths = np.stack([1 + np.arange(24) % LENGTH, 0 * np.arange(24), 1 + np.arange(24) % LENGTH], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        tokens = np.random.default_rng(index).integers(0, VOCAB, self.lengths[index, 0] + 1)
        return TokenSample(index, tokens, 1)


class Kept(dynapipe.PlannedSteps):
    """Keeps the plan of its last step."""

    def __next__(self) -> Any:
        loaded = super().__next__()
        self.plan = loaded[1]
        return loaded


def recomputed(env: Any, **settings: Any) -> tuple[list[str], Counter[str], dict[str, torch.Tensor]]:
    """A planned step's kinds of recomputation; how often layers ran forwards and core attention was recomputed; the
    gradients."""
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, init_method=env.init_method)
    (chunk,), _ = start(Loop())
    ran: Counter[str] = Counter()
    for module in chunk.modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_hook(lambda *_: ran.update(["layer"]))
        if isinstance(module, SelfAttention):
            checkpointed = module._checkpointed_attention_forward
            module._checkpointed_attention_forward = lambda *a, f=checkpointed, **k: (
                ran.update(["attention"]) or f(*a, **k)
            )
    steps = Kept(Samples(), batch_size=24, seed=0)
    function = dynapipe.ForwardBackward(dynapipe.DropInSettings(**settings))
    shape = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": 2}
    function(forward_step_func=forward_step, data_iterator=steps, model=chunk, **shape)
    steps.close()
    gradients = {name: parameter.main_grad for name, parameter in chunk.module.named_parameters()}
    return [micro_batch.recompute for micro_batch in steps.plan.micro_batches], ran, gradients


def test_each_micro_batch_recomputes_what_its_plan_says(run_ranks: Any) -> None:
    ((plain, ran, expected),) = run_ranks(1, recomputed)
    assert set(plain) == {"none"}
    assert ran == {"layer": 4 * len(plain)}
    ((kinds, ran, gradients),) = run_ranks(1, lambda env: recomputed(env, memory_limit_gb=0.0021))
    assert len(set(kinds)) > 1
    assert ran["layer"] == 4 * (len(kinds) + kinds.count("full"))
    assert ran["attention"] == 4 * kinds.count("selective")
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max())), name


@pytest.mark.usefixtures("forked_planners")
def test_plans_come_from_a_planner_process_where_a_store_is_given(
    run_ranks: Any, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = {"memory_limit_gb": 0.0021}, {"memory_limit_gb": 0.0021, "store": redis_server.address}
    ((kinds, _, expected),) = run_ranks(1, lambda env: recomputed(env, **own))
    monkeypatch.setattr(loader, "prove_step", None)  # no rank plans
    ((others, _, gradients),) = run_ranks(1, lambda env: recomputed(env, **theirs))
    assert others == kinds
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def test_what_is_installed_stands_wherever_the_name_was_imported_and_is_undone() -> None:
    before = schedules.get_forward_backward_func
    assert get_forward_backward_func is before
    with dynapipe.installed(memory_limit_gb=3, store="redis://:secret@127.0.0.1:1/0"):
        assert get_forward_backward_func is schedules.get_forward_backward_func
        made = get_forward_backward_func()
        assert isinstance(made, dynapipe.ForwardBackward)
        assert made.settings.memory_limit_gb == 3
        assert made.settings.store == StoreAddress("redis://127.0.0.1:1/0", "secret")
        assert "secret" not in repr(made.settings)
        assert get_forward_backward_func() is made
        assert get_forward_backward_func(pp_size=2, vp_size=None).settings is made.settings
        with pytest.raises(ConfigError, match="schedule_pg_collection is a MultiModuleProcessGroupCollection"):
            get_forward_backward_func(schedule_pg_collection=type("MultiModuleProcessGroupCollection", (), {})())
    assert get_forward_backward_func is schedules.get_forward_backward_func is before


def test_the_script_on_megatron_core_alone_trains_alike_on_padded_and_packed_rows(
    run_ranks: Any, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    prepare(lambda: generate_examples(num_samples=64, seed=0), data, tokenizer="bytes", max_seq_len=64, truncate=True)
    arguments = ["--data", str(data), "--tp", "2", "--pp", "2", "--steps", "3", "--hidden-size", "32"]

    def train(env: Any, *more: str) -> list[float]:
        env.export()
        return megatron_core.main([*arguments, *more])

    padded = run_ranks(4, train)[-1]
    packed = run_ranks(4, lambda env: train(env, "--layout", "packed", "--split-backward"))[-1]
    assert packed == pytest.approx(padded, abs=2e-5)
    assert len(padded) == 3
    assert padded[-1] < padded[0]


def joined_steps(env: Any) -> list[tuple[Any, ...]]:
    """Of planned steps of several widths: the width, the sum of losses over all ranks, and gradients."""
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, init_method=env.init_method)
    found = []
    for layout, width, pieces in (
        ("packed", 1, "off"), ("packed", 2, "off"), ("packed", 4, 8), ("padded", 2, "off"), ("padded", 4, "off"),
    ):  # fmt: skip
        (chunk,), _ = start(Loop())
        chunk.zero_grad_buffer()
        steps = Kept(Samples(), batch_size=24, seed=0)
        settings = dynapipe.DropInSettings(layout=layout, width=width, pieces=pieces, pad_multiple=2)
        function = dynapipe.ForwardBackward(settings)
        shape = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": 2}
        reports = function(forward_step_func=forward_step, data_iterator=steps, model=chunk, **shape)
        total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
        dist.all_reduce(total)
        gradients = {name: parameter.main_grad.clone() for name, parameter in chunk.module.named_parameters()}
        assert (pieces == "off") != any(m.attention == "carried" for m in steps.plan.micro_batches)
        found.append((layout, steps.plan.width, total.tolist(), gradients))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_loop_whose_planned_data_join_ranks_learns_what_it_learns_without(run_ranks: Any) -> None:
    for (_, _, expected, gradients), *others in run_ranks(4, joined_steps):
        assert [(layout, width) for layout, width, *_ in others] == [
            ("packed", 2), ("packed", 4), ("padded", 2), ("padded", 4)
        ]  # fmt: skip
        for layout, width, total, found in others:
            assert total == pytest.approx(expected, rel=1e-5), (layout, width)
            for name, gradient in gradients.items():
                error = float((found[name] - gradient).abs().max() / gradient.abs().max())
                assert error <= 1e-5, (layout, width, name)
