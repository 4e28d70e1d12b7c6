"""Cut samples train to the loss and gradients of whole ones: real megatron-core ranks against one process.

Rows mix a piece and whole documents; orders are random among those that pieces allow. All in float32, so what differs
is the order of sums alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.costs.estimated import Strategy, estimate_costs
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.drop_in.forward_step import ForwardStepStage, LoopStep, MicroBatchShapes
from dynapipe_ext.executor.drop_in.gradient_sync import StepGradients
from dynapipe_ext.executor.drop_in.groups import groups_of_call
from dynapipe_ext.executor.drop_in.samples import megatron_arrays
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan, lower
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage, unwrapped
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from tests.support.limits import LIMIT_S
from tests.support.lowered import forwards_of
from tests.support.megatron_ranks import (
    CPU,
    Case,
    Model,
    Spans,
    build_ddps,
    join,
    length_of,
    main_grads,
    samples_of,
    tensors_of,
    worst_error,
)
from tests.support.pieces import cut_sample, hand_made, pieced_replicas, random_legal_schedule
from tests.support.rank_jobs import forget_models

SAMPLES = samples_of(0)[:8]
ONE = Topology()
TP2V = Topology(tp=2, pp=2, placement=(0, 1, 1, 0))
TP2DP2 = Topology(tp=2, dp=2)
GQA, LEARNED = Model(), Model(tied=False, position="learned", modern=False)
LONG = 768
HELD_KINDS: tuple[Recompute, ...] = ("none", "selective", "full", "stage")
KEYS_BYTES = 2 * GQA.shape.num_layers * LONG * GQA.shape.kv_size * 4  # and values, of all layers

Kinds = tuple[tuple[Recompute, bool], ...]  # recomputation, and whether backwards are split
KINDS: dict[Model, Kinds] = {
    GQA: (("none", False), ("selective", False), ("full", True), ("stage", True)),
    LEARNED: (("none", True),),
}


@dataclass(frozen=True)
class Alone:
    """What one process found: loss and gradients of whole samples by model, and of its own steps of pieces."""

    whole: dict[Model, tuple[float, dict[str, np.ndarray]]]
    errors: list[tuple[Any, ...]]
    evaluated: list[tuple[float, int]]
    in_a_loop: float
    dropped: list[tuple[float, dict[str, np.ndarray]]]
    refusals: list[str]
    held: dict[Recompute, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Alone]:
    return {}


@pytest.fixture
def alone(recorded, run_ranks) -> Alone:
    """Made once, in one process that makes a model after the other."""
    if not recorded:
        (recorded["alone"],) = run_ranks(1, in_one_process)
    return recorded["alone"]


def in_one_process(env) -> Alone:
    join(env)
    whole, errors, evaluated, refusals, loop_error = {}, [], [], [], 0.0
    for model, kinds in KINDS.items():
        with in_job(Case(ONE, model=model), env) as (ddps, stage, transport):
            whole[model] = one_at_a_time(ddps[0])
            for plan, what in plans_of(Case(ONE, model=model), env, kinds):
                errors.append((model, *what, *step(plan, env, ddps, stage, transport, model, whole[model])))
            evaluated.append(
                (PipelineExecutor(stage, transport).execute(forwards_of(plan), batches_of(plan)), stage.held_bytes())
            )
            refusals += [refused(stage, plan)] if model == GQA else refused_models(ddps, plan)
            loop_error = error_in_a_loop(plan, ddps, transport, whole[model]) if model == GQA else loop_error
    dropped = []
    with in_job(Case(ONE, model=GQA, dropout=0.2), env) as (ddps, stage, transport):
        for plan, _ in plans_of(Case(ONE), env, (("none", True), ("full", False), ("stage", True)), same=True):
            loss = PipelineExecutor(stage, transport).execute(plan, batches_of(plan))
            dropped.append((loss, {name: gradient.numpy().copy() for name, gradient in main_grads(ddps[0]).items()}))
    with in_job(Case(ONE, model=GQA), env) as (ddps, stage, transport):
        held = {kind: [held_of(stage, transport, kind, count) for count in (2, 16)] for kind in HELD_KINDS}
    dist.destroy_process_group()
    return Alone(whole, errors, evaluated, loop_error, dropped, refusals, held)  # type: ignore[arg-type]


def one_at_a_time(ddp: Any) -> tuple[float, dict[str, np.ndarray]]:
    ddp.zero_grad_buffer()
    total = 0.0
    for sample in SAMPLES:
        batch = tensors_of(MicroBatch((length_of(sample),)), SAMPLES, "tokens")
        losses = ddp(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = (losses * batch["loss_weights"]).sum() / sum(s.target for s in SAMPLES)
        loss.backward()
        total += float(loss.detach())
    return total, {name: gradient.numpy().copy() for name, gradient in main_grads(ddp).items()}


@contextmanager
def in_job(case: Case, env) -> Iterator[tuple[list[Any], MegatronStage, StrictTransport]]:
    """This rank's chunks, stage and transport; the model's groups are left afterwards, not the job."""
    ddps = build_ddps(case, case.topology, env.rank)
    groups = make_pipeline_groups(case.topology, env.rank, timeout_s=LIMIT_S)
    transport = StrictTransport(case.topology, env.rank, groups, timeout_s=LIMIT_S)
    yield ddps, MegatronStage(ddps, dropout=case.dropout > 0), transport
    transport.close()
    dist.barrier()
    forget_models()


def plans_of(case: Case, env, kinds: Kinds, *, same: bool = False) -> Iterator[tuple[ExecutionPlan, tuple[Any, ...]]]:
    """This rank's proven plan of a random step of each kind; of the `same` pieces and order, if said."""
    topology = case.topology
    form = ActivationFormat(32, sequence_shards=topology.tp if case.sequence_parallel else 1)
    for seed, (recompute, split) in enumerate(kinds):
        random = Random(f"{case}{0 if same else seed}")
        replicas = pieced_replicas(SAMPLES, topology.dp, recompute, random)
        schedules = [random_legal_schedule(topology, own, random, split=split) for own in replicas]
        plans = lower(hand_made(topology, replicas, schedules), form)
        for replica in plans:
            verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
        me = topology.coordinates(env.rank)
        yield plans[me.dp_rank][me.pp_rank], (recompute, split)


def batches_of(plan: ExecutionPlan) -> list[Any]:
    return [tensors_of(m, SAMPLES, "tokens") for m in plan.micro_batches]


def step(plan, env, ddps, stage, transport, model, whole, topology=ONE) -> tuple[float, float, int]:
    """Of one step: the error of its loss, its worst gradient's, and what is still held."""
    loss = PipelineExecutor(stage, transport).execute(plan, batches_of(plan))
    error = worst_error(model.shape, topology, env.rank, [ddp.module for ddp in ddps], whole[1])
    return abs(loss - whole[0]) / whole[0], error, stage.held_bytes()


def assert_exact(found: list[tuple[Any, ...]]) -> None:
    for *what, loss_error, gradient_error, held_bytes in found:
        assert loss_error <= 1e-6, what
        assert gradient_error <= 2e-6, what
        assert held_bytes == 0, what


def test_pieces_have_loss_and_gradients_of_whole_samples_in_one_process(alone):
    assert len(alone.errors) == sum(map(len, KINDS.values()))
    assert_exact(alone.errors)


JOBS = {
    "tp2dp2": (Case(TP2DP2, sequence_parallel=True), (("selective", True), ("stage", True))),
    "v": (Case(TP2V, model=LEARNED), (("full", True), ("stage", False))),
    "pp4": (Case(Topology(pp=4)), (("none", False), ("full", False))),
}


@pytest.mark.parametrize("job", JOBS)
def test_pieces_have_loss_and_gradients_of_whole_samples_on_ranks(job, alone, run_ranks):
    case, kinds = JOBS[job]

    def main(env):
        join(env)
        with in_job(case, env) as (ddps, stage, transport):
            whole = alone.whole[case.model]
            found = [
                (*what, *step(plan, env, ddps, stage, transport, case.model, whole, case.topology))
                for plan, what in plans_of(case, env, kinds)
            ]
        dist.destroy_process_group()
        return found

    for found in run_ranks(case.topology.world_size, main):
        assert len(found) == len(kinds)
        assert_exact(found)


def test_an_evaluation_in_pieces_has_the_same_loss_and_keeps_nothing(alone):
    for (loss, held_bytes), (wanted, _) in zip(alone.evaluated, alone.whole.values(), strict=True):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert held_bytes == 0


def test_dropout_of_pieces_is_replayed_when_they_are_recomputed(alone):
    (loss, gradients), *others = alone.dropped
    assert abs(loss - alone.whole[GQA][0]) > 1e-4  # it does drop
    for other, found in others:
        assert other == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert np.abs(found[name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name


def error_in_a_loop(plan: ExecutionPlan, ddps: list[Any], transport: Any, whole: Any) -> float:
    """The worst gradient's error where the micro-batches are calls of Megatron-LM's forward_step_func."""
    for ddp in ddps:
        ddp.zero_grad_buffer()
    model = unwrapped(ddps[0])
    loop = LoopStep(
        forward_step_func=forward_step, chunks=ddps, iterators=[None], config=model.config, num_micro_batches=1
    )
    shapes = MicroBatchShapes(ddps, None, CPU, restarts_attention=True)
    with StepGradients(ddps, model.config, groups_of_call(None, None)) as gradients:
        stage = ForwardStepStage(loop, gradients, lambda _, __, batch: iter([batch]), shapes.of)
        arrays = [megatron_arrays(m, [SAMPLES[s.index] for s in m.samples]) for m in plan.micro_batches]
        batches = [{name: torch.from_numpy(array) for name, array in each.items()} for each in arrays]
        PipelineExecutor(stage, transport).execute(plan, batches)
    targets = sum(sample.target for sample in SAMPLES)
    summed = {name: gradient * targets for name, gradient in whole[1].items()}
    return worst_error(GQA.shape, ONE, 0, [ddp.module for ddp in ddps], summed)


def forward_step(iterator: Any, model: Any) -> Any:
    """As in Megatron-LM's pretrain_gpt.py; packed rows and their pieces are added to the call from outside."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_func(losses: torch.Tensor) -> Any:
        weights = batch["loss_mask"]
        return (losses * weights).sum(), weights.sum().int(), {}

    return output, loss_func


def test_pieces_have_the_gradients_of_whole_samples_in_a_loop_of_megatron_lm(alone):
    assert alone.in_a_loop <= 2e-6


def refused(stage: MegatronStage, plan: ExecutionPlan) -> str:
    """What the stage says where the last piece of a sample comes first."""
    first = next(m for m, row in enumerate(plan.micro_batches) if row.attention == "carried")
    sample = plan.micro_batches[first].samples[0].index
    last = max(
        (m for m, row in enumerate(plan.micro_batches) if row.samples[0].index == sample),
        key=lambda m: plan.micro_batches[m].samples[0].start,
    )
    stage.start_step(plan)
    stage.load(last, batches_of(plan)[last])
    with pytest.raises(ExecutionError) as caught:
        stage.forward(0, last, ())
    return str(caught.value)


def refused_models(ddps: list[Any], plan: ExecutionPlan) -> list[str]:
    """What a new stage says to models whose keys do not go on from piece to piece."""
    said = []
    model = unwrapped(ddps[0])
    own = model.decoder.layers[1].self_attention.core_attention
    for change in ({"window_size": (7, 0)}, {"moe_expert_capacity_factor": 1.0}, {"multi_latent_attention": True}, {}):
        for name, value in change.items():
            setattr(model.config, name, value)
        if not change:
            own.carries = False
        model.dynapipe_takes_pieces = False
        with pytest.raises(ConfigError) as caught:
            MegatronStage(ddps).start_step(plan)
        said.append(str(caught.value))
        for name in change:
            setattr(model.config, name, False if name == "multi_latent_attention" else None)
    return said


def test_a_piece_out_of_turn_and_models_that_cannot_are_refused_by_name(alone):
    patterns = (
        r"stage 0 was to run the forward of piece [2-4] of sample \d+ .*the forward of piece 1 .* is due",
        r"GPTModel has windows of attention \(window_size \(7, 0\)\)",
        r"GPTModel has experts of limited capacity \(moe_expert_capacity_factor 1.0\)",
        r"GPTModel compresses keys and values",
        r"GPTModel attends by CoreAttention, which does not attend to keys of earlier pieces",
    )
    for pattern, said in zip(patterns, alone.refusals, strict=True):
        assert re.search(pattern, said), said


def held_of(stage: MegatronStage, transport: Any, recompute: Recompute, num_pieces: int) -> tuple[int, ...]:
    """Bytes held after each action of one long sample in so many pieces."""
    sample = TokenSample(0, np.random.default_rng(0).integers(0, 256, LONG + 1), 1)
    pieces = cut_sample(sample, [LONG * i // num_pieces for i in range(1, num_pieces)])
    rows = [MicroBatch((piece,), "packed", recompute, "carried") for piece in pieces]
    actions = [Action(0, Kind.FORWARD, m) for m in range(num_pieces)]
    actions += [Action(0, Kind.BACKWARD, m) for m in reversed(range(num_pieces))]
    schedule = PipelineSchedule("long", (tuple(actions),), (0,))
    ((plan,),) = lower(hand_made(ONE, [rows], [schedule]), ActivationFormat(32))
    spans = Spans()
    batches = [tensors_of(m, [sample], "tokens") for m in rows]
    PipelineExecutor(stage, transport, recorder=spans).execute(plan, batches)
    return tuple(span.num_bytes for span in spans)


def test_sixteen_pieces_hold_what_two_hold_and_gradients_of_keys_beside(alone):
    """No joined prefix is kept. Sums of key and value gradients, whose share is large where layers keep their inputs
    alone, are those of all pieces but the last."""
    for recompute, (two, sixteen) in alone.held.items():
        assert sixteen[15] <= 1.001 * two[1], recompute  # after all forwards
        assert sixteen[-1] == two[-1] == 0
        assert max(sixteen) <= (1.03 * max(two) if recompute == "none" else max(two) + KEYS_BYTES * 14 / 16)


@pytest.mark.parametrize("recompute", HELD_KINDS)
@pytest.mark.parametrize("num_pieces", [2, 16])
def test_pieces_hold_what_is_predicted_of_unfused_layers(alone, recompute, num_pieces):
    """After all forwards, and after the last piece's backward, from which on sums of gradients are there."""
    rows = [
        MicroBatch((SampleLength(0, LONG // num_pieces, start=start),), "packed", recompute, "carried")
        for start in range(0, LONG, LONG // num_pieces)
    ]
    shape, cpu = (
        replace(GQA.shape, max_seq_len=LONG, family="llama"),
        Cluster.from_device(DEVICES["cpu"], gpus_per_node=1),
    )
    strategy = Strategy(topology=ONE)
    costs = estimate_costs(shape, cpu, strategy, precision="fp32", recipe="fp32", layout="packed").evaluate(rows)
    held = alone.held[recompute][num_pieces == 16]
    sums = KEYS_BYTES * (num_pieces - 1) // num_pieces
    stored = costs.stored_bytes[0]
    assert held[num_pieces - 1] == pytest.approx(int(stored.sum()) - sums, rel=0.02)
    assert held[num_pieces] == pytest.approx(int(stored[:-1].sum()), rel=0.02)


def test_a_first_stage_that_is_recomputed_holds_keys_and_values_alone(alone):
    for held in alone.held["stage"]:
        assert held[len(held) // 2 - 1] == KEYS_BYTES  # after all forwards
