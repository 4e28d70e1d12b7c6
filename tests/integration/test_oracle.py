"""Gradients and losses on every topology equal those of one process that runs one sample at a time.

Real megatron-core ranks over gloo, with the strict transport (NCCL's ordering rules). Two optimizer steps: the second
shows that nothing is left over from the first, and that clipping and updates agree.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.config import OptimizerSettings
from dynapipe_ext.costs.analytic import ModelShape
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.collate import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.lowering import lower
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.stages.megatron import MegatronStage, main_grads, wrap_ddp
from dynapipe_ext.executor.stages.megatron_model import (
    build_model,
    global_name,
    initialize_parallel,
    tensor_slice,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron_optimizer import MegatronOptimizer
from dynapipe_ext.executor.transport.groups import make_pipeline_groups
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.verify import verify
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import GlobalBatchPlan, Layout, LossNorm, MicroBatch, Recompute, ReplicaPlan
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.adaptive import adaptive
from dynapipe_ext.schedules.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.simulate import makespan_ns, simulate
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.topology import Topology

megatron_cpu.install()  # here, so that forked ranks find megatron imported

NUM_STEPS, NUM_SAMPLES, NUM_LAYERS = 2, 14, 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    tied: bool = True
    position: str = "rope"
    modern: bool = True  # RMSNorm, gated MLP, grouped queries, no biases; else GPT-2's

    @property
    def shape(self) -> ModelShape:
        if self.modern:
            return ModelShape(NUM_LAYERS, 32, 4, 2, 64, True, 256, 64, self.tied, self.position, "rmsnorm", False)
        return ModelShape(NUM_LAYERS, 32, 4, 4, 64, False, 256, 64, self.tied, self.position, "layernorm", True)


@dataclass(frozen=True)
class Case:
    topology: Topology
    layout: Layout = "padded"
    model: Model = Model()
    sequence_parallel: bool = False
    loss_norm: LossNorm = "tokens"
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    distributed_optimizer: bool = False
    dropout: float = 0.0
    weights_lag: int | None = None  # split backwards: W of a micro-batch follows I of the one this many places later

    def __str__(self) -> str:
        t, m = self.topology, self.model
        words = [f"tp{t.tp}pp{t.pp}dp{t.dp}", self.layout, self.schedule, "tied" if m.tied else "untied", m.position]
        words += ["sp"] * self.sequence_parallel + ["gpt2"] * (not m.modern)
        words += ["samples"] * (self.loss_norm != "tokens")
        words += [f"split{self.weights_lag}"] * (self.weights_lag is not None)
        words += [self.recompute] * (self.recompute != "none") + ["zero1"] * self.distributed_optimizer
        return "-".join(words + [str(n) for n in t.layers_per_stage])


TP2, TP2PP2, ALL = Topology(tp=2), Topology(tp=2, pp=2), Topology(tp=2, pp=2, dp=2)
UNTIED, LEARNED = Model(tied=False), Model(position="learned")
GPT2 = Model(tied=False, position="learned", modern=False)
CASES = [
    Case(Topology()),
    Case(Topology(), "packed", loss_norm="samples"),
    Case(Topology(pp=2), schedule="adaptive"),
    Case(Topology(pp=2), "packed", UNTIED),
    Case(Topology(pp=4), "packed", schedule="adaptive"),
    Case(Topology(pp=4), model=GPT2),
    Case(Topology(pp=3, layers_per_stage=(1, 2, 1)), "packed"),
    Case(TP2),
    Case(TP2, "packed", GPT2),
    Case(TP2, sequence_parallel=True),
    Case(TP2, "packed", UNTIED, sequence_parallel=True),
    Case(Topology(dp=2), loss_norm="samples"),
    Case(Topology(dp=2), "packed", UNTIED, distributed_optimizer=True),
    Case(TP2PP2, "packed", LEARNED),
    Case(TP2PP2, model=GPT2, sequence_parallel=True, recompute="full"),
    Case(TP2PP2, "packed", recompute="selective"),
    Case(ALL, schedule="adaptive"),
    Case(ALL, "packed", UNTIED, sequence_parallel=True),
    Case(ALL, "packed", GPT2, recompute="full", loss_norm="samples"),
    Case(ALL, model=LEARNED, distributed_optimizer=True),
    Case(TP2PP2, "packed", UNTIED, sequence_parallel=True, weights_lag=1),
    Case(Topology(pp=4), schedule="adaptive", weights_lag=2),
    Case(TP2, recompute="full", weights_lag=0),
]


def samples_of(step: int) -> list[TokenSample]:
    """Samples whose lengths differ by a factor of ten; prompts of random length carry no loss."""
    rng = np.random.default_rng(100 + step)
    lengths = rng.integers(4, 41, NUM_SAMPLES)
    return [TokenSample(i, rng.integers(0, 256, n + 1), int(rng.integers(1, n + 1))) for i, n in enumerate(lengths)]


def length_of(sample: TokenSample) -> SampleLength:
    return SampleLength(sample.index, sample.positions, 0, sample.target)


def tensors_of(micro_batch: MicroBatch, samples: list[TokenSample], loss_norm: LossNorm) -> dict[str, torch.Tensor]:
    arrays = collate(micro_batch, [samples[s.index] for s in micro_batch.samples], loss_norm=loss_norm)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def build(case: Case, topology: Topology, rank: int):
    initialize_parallel(topology, 0)
    config = transformer_config(
        case.model.shape,
        topology,
        dtype="float32",
        sequence_parallel=case.sequence_parallel,
        dropout=case.dropout,
    )
    model = build_model(case.model.shape, topology, topology.coordinates(rank).pp_rank, config, seed=7, device=CPU)
    ddp = wrap_ddp(model, config, distributed_optimizer=case.distributed_optimizer)
    settings = OptimizerSettings(
        lr=1e-3, min_lr=1e-4, warmup_steps=1, weight_decay=0.01, clip_grad=0.5, distributed=case.distributed_optimizer
    )
    return model, ddp, MegatronOptimizer(ddp, config, settings, num_steps=10)


def join(env) -> None:
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size, timeout=limit)


def oracle(case: Case, path: Path):
    """One process, one sample at a time: saves [(loss, norm, {name: gradient})] of each step."""

    def main(env) -> None:
        join(env)
        _, ddp, optimizer = build(Case(Topology(), model=case.model), Topology(), 0)
        record = []
        for step in range(NUM_STEPS):
            ddp.zero_grad_buffer()
            for parameter in ddp.parameters():
                parameter.grad = None
            samples, loss_sum = samples_of(step), 0.0
            divisor = NUM_SAMPLES if case.loss_norm == "samples" else sum(s.target for s in samples)
            for sample in samples:
                batch = tensors_of(MicroBatch((length_of(sample),)), samples, case.loss_norm)
                losses = ddp(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
                loss = (losses * batch["loss_weights"]).sum() / divisor
                loss.backward()
                loss_sum += float(loss.detach())
            gradients = {name: gradient.clone() for name, gradient in main_grads(ddp).items()}
            record.append((loss_sum, optimizer.step(), gradients))
        torch.save(record, path)
        dist.destroy_process_group()

    return main


def step_plan_of(case: Case, step: int) -> tuple[StepPlan, list]:
    """Uneven micro-batches (5, 2, 1, 3 and 3 samples); of two replicas one has two of them, the other three."""
    lengths = [length_of(sample) for sample in samples_of(step)]
    cuts = [lengths[:5], lengths[5:7], lengths[7:8], lengths[8:11], lengths[11:]]
    parts = [MicroBatch(tuple(cut), case.layout, case.recompute, pad_multiple=4) for cut in cuts]
    replicas = [parts] if case.topology.dp == 1 else [parts[:2], parts[2:]]
    model, pp = TokenCosts(case.topology.pp, transfer_ns_per_token=10), case.topology.pp
    costs = [model.evaluate(replica) for replica in replicas]
    schedules = tuple(
        adaptive(c, memory_limit_bytes=10**12) if case.schedule == "adaptive" else one_f_one_b(pp, c.num_micro_batches)
        for c in costs
    )
    if case.weights_lag is not None:
        schedules = tuple(split_backwards(schedule, case.weights_lag) for schedule in schedules)
    predictions = tuple(
        Prediction(
            makespan_ns=makespan_ns(s, c),
            lower_bound_ns=0,
            peak_bytes=(0,) * pp,
            bubble_ratio=0.0,
            trace=simulate(s, c),
        )
        for s, c in zip(schedules, costs, strict=True)
    )
    batch = GlobalBatchPlan(
        step=step,
        replicas=tuple(ReplicaPlan(i, tuple(r)) for i, r in enumerate(replicas)),
        loss_norm=case.loss_norm,
    )
    return StepPlan(batch, schedules, predictions), costs


def split_backwards(schedule: PipelineSchedule, lag: int) -> PipelineSchedule:
    """Every B as I, and its W after the I of the micro-batch `lag` places later (the last ones at the end)."""
    ranks = []
    for rank in schedule.ranks:
        actions: list[Action] = []
        waiting: list[Action] = []
        for action in rank:
            if action.kind is Kind.BACKWARD:
                actions.append(replace(action, kind=Kind.BACKWARD_INPUT))
                waiting.append(replace(action, kind=Kind.BACKWARD_WEIGHT))
                if len(waiting) > lag:
                    actions.append(waiting.pop(0))
            else:
                actions.append(action)
        ranks.append((*actions, *waiting))
    return replace(schedule, ranks=tuple(ranks))


def rank_main(case: Case, oracle_path: Path):
    """Returns [(loss, norm, worst relative gradient error)] of each step."""

    def main(env):
        join(env)
        topology, me = case.topology, case.topology.coordinates(env.rank)
        model, ddp, optimizer = build(case, topology, env.rank)
        groups = make_pipeline_groups(topology, env.rank, timeout_s=60)
        transport = StrictTransport(topology, env.rank, groups, timeout_s=30)
        executor = PipelineExecutor(MegatronStage(ddp, dropout=case.dropout > 0), transport)
        shards = topology.tp if case.sequence_parallel else 1
        form = ActivationFormat(case.model.shape.hidden_size, sequence_shards=shards)
        expected = torch.load(oracle_path, weights_only=True)
        results = []
        for step in range(NUM_STEPS):
            step_plan, costs = step_plan_of(case, step)
            plans = lower(step_plan, costs, form)
            for replica in plans:
                verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
            plan = plans[me.dp_rank][me.pp_rank]
            samples = samples_of(step)
            loss = executor.execute(plan, [tensors_of(m, samples, case.loss_norm) for m in plan.micro_batches])
            # Under a distributed optimizer sums are reduce-scattered: the buffer holds only this rank's shard of them.
            whole = not case.distributed_optimizer
            error = worst_error(case, model, me, expected[step][2]) if whole else 0.0
            results.append((loss, optimizer.step(), error))
        transport.close()
        dist.barrier()
        dist.destroy_process_group()
        return results

    return main


def worst_error(case: Case, model: torch.nn.Module, me, expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any gradient entry, relative to the largest entry of its parameter's gradient."""
    first_layer = sum(case.topology.with_layers(NUM_LAYERS).layers_per_stage[: me.pp_rank])
    worst = 0.0
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, first_layer)
        if name == "output_layer.weight" and case.model.tied:
            name = "embedding.word_embeddings.weight"
        wanted = tensor_slice(expected[name], parameter, me.tp_rank, case.topology.tp)
        scale = float(expected[name].abs().max())
        worst = max(worst, float((parameter.main_grad - wanted).abs().max()) / max(scale, 1e-12))
    return worst


@pytest.fixture(scope="module")
def oracle_folder():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_losses_equal_one_process_one_sample_at_a_time(case, run_ranks, oracle_folder):
    path = oracle_folder / f"{case.model}-{case.loss_norm}.pt"
    if not path.exists():
        run_ranks(1, oracle(case, path))
    expected = torch.load(path, weights_only=True)
    results = run_ranks(case.topology.world_size, rank_main(case, path))
    for rank, steps in enumerate(results):
        for step, (loss, norm, error) in enumerate(steps):
            # After an update, entries whose gradient is rounding noise have moved by Adam's full step: allow more.
            limit = 1e-5 if step == 0 else 1e-3
            assert loss == pytest.approx(expected[step][0], rel=limit), f"rank {rank} step {step}"
            assert norm == pytest.approx(expected[step][1], rel=limit), f"rank {rank} step {step}"
            assert error <= limit, f"rank {rank} step {step}"


def one_step(case: Case):
    """Returns (loss, {name: gradient}, bytes held after each action) of one step on this rank."""

    def main(env):
        join(env)
        me = case.topology.coordinates(env.rank)
        _, ddp, _ = build(case, case.topology, env.rank)
        groups = make_pipeline_groups(case.topology, env.rank, timeout_s=60)
        transport = StrictTransport(case.topology, env.rank, groups, timeout_s=30)
        step_plan, costs = step_plan_of(case, 0)
        shards = case.topology.tp if case.sequence_parallel else 1
        form = ActivationFormat(case.model.shape.hidden_size, sequence_shards=shards)
        plan = lower(step_plan, costs, form)[me.dp_rank][me.pp_rank]
        batches = [tensors_of(m, samples_of(0), case.loss_norm) for m in plan.micro_batches]
        spans = Spans()
        stage = MegatronStage(ddp, dropout=case.dropout > 0)
        loss = PipelineExecutor(stage, transport, recorder=spans).execute(plan, batches)
        gradients = {name: gradient.numpy().copy() for name, gradient in main_grads(ddp).items()}
        transport.close()
        dist.barrier()
        dist.destroy_process_group()
        return loss, gradients, [span.num_bytes for span in spans]

    return main


class Spans(list):
    def record(self, span) -> None:
        self.append(span)


def test_dropout_depends_neither_on_the_schedule_nor_on_recomputation(run_ranks):
    """Random numbers are keyed by step, micro-batch and stage, and replayed when activations are computed again."""
    runs = [
        run_ranks(4, one_step(Case(TP2PP2, "packed", GPT2, schedule=schedule, recompute=kind, dropout=rate)))
        for schedule, kind, rate in (
            ("1f1b", "none", 0.2),
            ("adaptive", "none", 0.2),
            ("1f1b", "full", 0.2),
            ("1f1b", "selective", 0.2),
            ("1f1b", "none", 0.3),
        )
    ]
    for other in runs[1:4]:
        for (loss, gradients, _), (other_loss, other_gradients, _) in zip(runs[0], other, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-6)
            for name, gradient in gradients.items():
                scale = max(1e-12, float(np.abs(gradient).max()))
                assert float(np.abs(other_gradients[name] - gradient).max()) <= 1e-5 * scale, name
    assert abs(runs[4][0][0] - runs[0][0][0]) > 1e-5  # it does drop


def test_dropout_masks_depend_neither_on_the_pipeline_nor_on_the_replica(run_ranks):
    losses = [
        run_ranks(topology.world_size, one_step(Case(topology, "packed", GPT2, dropout=0.2)))[0][0]
        for topology in (TP2, TP2PP2, ALL)
    ]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 2


SPLIT_CASES = [
    Case(Topology(), model=GPT2),
    Case(Topology(pp=2), "packed", UNTIED),
    Case(TP2, model=UNTIED),
    Case(TP2, "packed", GPT2, sequence_parallel=True),
    Case(TP2PP2, model=UNTIED, recompute="full"),
]


@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_a_split_backward_gives_the_bits_of_the_whole_one_and_holds_memory_until_w(case, run_ranks):
    whole = run_ranks(case.topology.world_size, one_step(case))
    for lag in (0, 2):
        split = run_ranks(case.topology.world_size, one_step(replace(case, weights_lag=lag)))
        for (loss, gradients, held), (split_loss, split_gradients, split_held) in zip(whole, split, strict=True):
            assert split_loss == loss
            assert held[-1] == split_held[-1] == 0
            assert max(split_held) >= max(held) * (1 if lag else 0)
            for name, gradient in gradients.items():
                assert np.array_equal(split_gradients[name], gradient), f"lag {lag}: {name}"
