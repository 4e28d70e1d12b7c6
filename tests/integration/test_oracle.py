"""Gradients and losses on every topology equal those of one process that runs one sample at a time.

Real megatron-core ranks over gloo, with the strict transport (NCCL's ordering rules). Two optimizer steps: the second
shows that nothing is left over from the first, and that clipping and updates agree.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.lowering import lower
from dynapipe_ext.executor.proof.replica import verify
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.megatron import (
    MegatronGradients,
    MegatronStage,
    finalize_grads,
    main_grads,
    unwrapped,
)
from dynapipe_ext.executor.stages.megatron_model import destroy_parallel
from dynapipe_ext.executor.transport.groups import make_pipeline_groups
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.update import ExecutedStep
from dynapipe_ext.plan import MicroBatch
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.topology import Topology
from tests.support.lowered import forwards_of
from tests.support.megatron_ranks import (
    NUM_SAMPLES,
    Case,
    Model,
    Spans,
    build,
    build_ddps,
    join,
    length_of,
    samples_of,
    step_plan_of,
    tensors_of,
    worst_error,
)

NUM_STEPS = 2
TP2, TP2PP2, ALL = Topology(tp=2), Topology(tp=2, pp=2), Topology(tp=2, pp=2, dp=2)
INTERLEAVED, V = Topology(pp=2, placement=(0, 1, 0, 1)), Topology(pp=2, placement=(0, 1, 1, 0))
TP2V = replace(V, tp=2)
UNTIED, LEARNED = Model(tied=False), Model(position="learned")
GPT2 = Model(tied=False, position="learned", modern=False)
MAIN_JOB = Model(modern=False)  # as `dynapipe train` builds it where nothing else is said
CASES = [
    Case(Topology()),
    Case(Topology(), "packed", loss_norm="samples"),
    Case(Topology(pp=2), schedule="adaptive"),
    Case(Topology(pp=2), "packed", UNTIED),
    Case(Topology(pp=4), "packed", schedule="adaptive"),
    Case(Topology(pp=4), model=GPT2),
    Case(Topology(pp=3, layers_per_stage=(1, 2, 1)), "packed"),
    Case(TP2),
    Case(TP2, "packed", GPT2, recompute="stage"),
    Case(TP2, sequence_parallel=True),
    Case(TP2, "packed", UNTIED, sequence_parallel=True),
    Case(Topology(dp=2), loss_norm="samples"),
    Case(Topology(dp=2), "packed", UNTIED, distributed_optimizer=True),
    Case(TP2PP2, "packed", LEARNED),
    Case(TP2PP2, model=GPT2, sequence_parallel=True, recompute="full"),
    Case(TP2PP2, "packed", recompute="selective"),
    Case(ALL, schedule="adaptive"),
    Case(ALL, "packed", UNTIED, sequence_parallel=True, recompute="stage"),
    Case(ALL, "packed", GPT2, recompute="full", loss_norm="samples"),
    Case(ALL, model=LEARNED, distributed_optimizer=True),
    Case(TP2PP2, "packed", UNTIED, sequence_parallel=True, weights_lag=1),
    Case(Topology(pp=4), schedule="adaptive", weights_lag=2),
    Case(TP2, recompute="full", weights_lag=0),
    Case(Topology(pp=4), "packed", MAIN_JOB, schedule="zb-h1"),
    Case(ALL, model=MAIN_JOB, schedule="zb-h2"),
    Case(TP2PP2, "packed", MAIN_JOB, sequence_parallel=True, schedule="adaptive-split"),
]


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
            record.append((loss_sum, optimizer.update(), gradients))
        torch.save(record, path)
        dist.destroy_process_group()

    return main


def rank_main(case: Case, oracle_path: Path):
    """Returns [(loss, norm, worst relative gradient error)] of each step."""

    def main(env):
        join(env)
        topology, me = case.topology, case.topology.coordinates(env.rank)
        model, ddp, optimizer = build(case, topology, env.rank)
        groups = make_pipeline_groups(topology, env.rank, timeout_s=60)
        transport = StrictTransport(topology, env.rank, groups, timeout_s=30)
        executor = PipelineExecutor(MegatronStage([ddp], dropout=case.dropout > 0), transport)
        shards = topology.tp if case.sequence_parallel else 1
        form = ActivationFormat(case.model.shape.hidden_size, sequence_shards=shards)
        expected = torch.load(oracle_path, weights_only=True)
        results = []
        for step in range(NUM_STEPS):
            step_plan = step_plan_of(case, step)
            plans = lower(step_plan, form)
            for replica in plans:
                verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
            plan = plans[me.dp_rank][me.pp_rank]
            samples = samples_of(step)
            loss = executor.execute(plan, [tensors_of(m, samples, case.loss_norm) for m in plan.micro_batches])
            # Under a distributed optimizer sums are reduce-scattered: the buffer holds only this rank's shard of them.
            whole = not case.distributed_optimizer
            error = worst_error(case.model.shape, topology, env.rank, [model], expected[step][2]) if whole else 0.0
            results.append((loss, optimizer.step(ExecutedStep(plan, loss)), error))
        transport.close()
        dist.barrier()
        dist.destroy_process_group()
        return results

    return main


@pytest.fixture(scope="module")
def oracle_folder():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def recorded(case: Case, run_ranks, folder: Path) -> Path:
    """The oracle's record for a model and a norm, made once."""
    path = folder / f"{case.model}-{case.loss_norm}.pt"
    if not path.exists():
        run_ranks(1, oracle(case, path))
    return path


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_losses_equal_one_process_one_sample_at_a_time(case, run_ranks, oracle_folder):
    path = recorded(case, run_ranks, oracle_folder)
    expected = torch.load(path, weights_only=True)
    results = run_ranks(case.topology.world_size, rank_main(case, path))
    for rank, steps in enumerate(results):
        for step, (loss, norm, error) in enumerate(steps):
            # After an update, entries whose gradient is rounding noise have moved by Adam's full step: allow more.
            limit = 1e-5 if step == 0 else 1e-3
            assert loss == pytest.approx(expected[step][0], rel=limit), f"rank {rank} step {step}"
            assert norm == pytest.approx(expected[step][1], rel=limit), f"rank {rank} step {step}"
            assert error <= limit, f"rank {rank} step {step}"


CHUNK_CASES = [
    Case(INTERLEAVED, "packed", UNTIED, weights_lag=1, schedule="interleaved-1f1b"),
    Case(Topology(pp=2, placement=(0, 1, 0), layers_per_stage=(1, 2, 1)), model=LEARNED, schedule="adaptive"),
    Case(TP2V, "packed", sequence_parallel=True, recompute="selective", schedule="zb-v"),
    Case(replace(TP2V, dp=2), model=GPT2, recompute="full", schedule="adaptive"),
]


@pytest.mark.parametrize("case", CHUNK_CASES, ids=str)
def test_several_chunks_a_rank_have_loss_and_gradients_of_one_process(case, run_ranks, oracle_folder):
    """A second run of the step shows that nothing is left over; its forwards alone find the loss and change nothing."""
    path = recorded(case, run_ranks, oracle_folder)
    expected_loss, _, gradients = torch.load(path, weights_only=True)[0]

    def main(env):
        join(env)
        ddps = build_ddps(case, case.topology, env.rank)
        models = [ddp.module for ddp in ddps]
        found = []
        with in_job(case, env, MegatronStage(ddps)) as (executor, plan, batches):
            for step in (plan, plan, forwards_of(plan)):
                loss = executor.execute(step, batches)
                found.append((loss, worst_error(case.model.shape, case.topology, env.rank, models, gradients)))
        return found

    for rank, found in enumerate(run_ranks(case.topology.world_size, main)):
        for loss, error in found:
            assert loss == pytest.approx(expected_loss, rel=1e-5), f"rank {rank}"
            assert error <= 1e-5, f"rank {rank}"


# What a planner is told, and the letters of its actions; all of a topology run on one model, one after the other.
PLANNED = {
    INTERLEAVED: [({"schedule": "interleaved-1f1b"}, "FB"), ({"split_backward": True, "layout": "packed"}, "FIW")],
    V: [({"schedule": "zb-v", "layout": "packed"}, "FIW"), ({"schedule": "v-half"}, "FIW"), ({}, "FB")],
    Topology(pp=2): [({"schedule": "cyclic", "rule": "dynapipe"}, "FB")],
}


def test_steps_that_a_planner_puts_on_any_placement_have_loss_and_gradients_of_one_process(run_ranks, oracle_folder):
    """Published schedules of several stages a rank, the search's own, and DynaPipe's; proven, and then run strictly."""
    path = recorded(Case(V), run_ranks, oracle_folder)
    expected_loss, _, gradients = torch.load(path, weights_only=True)[0]
    samples, form = samples_of(0), ActivationFormat(Model().shape.hidden_size)

    def main(env):
        join(env)
        found = []
        for topology, asked in PLANNED.items():
            ddps, spans = build_ddps(Case(topology), topology, env.rank), Spans()
            groups = make_pipeline_groups(topology, env.rank, timeout_s=60)
            transport = StrictTransport(topology, env.rank, groups, timeout_s=30)
            executor = PipelineExecutor(MegatronStage(ddps), transport, recorder=spans)
            for options, _ in asked:
                costs = TokenCosts(topology.num_stages, overhead_ns=0, transfer_ns_per_token=10)
                planner = Planner(topology, costs, 1e12, effort=50, max_tokens=96, format=form, **options)
                proven = prove_step(planner, [length_of(sample) for sample in samples], step=0)
                plan = proven.plans[0][env.rank]
                batches = [tensors_of(m, samples, "tokens") for m in plan.micro_batches]
                spans.clear()
                loss = executor.execute(plan, batches)
                letters = {letter for span in spans for letter in span.label if letter.isalpha()}
                error = worst_error(Model().shape, topology, env.rank, [ddp.module for ddp in ddps], gradients)
                found.append((options, letters, len(batches), loss, error))
            transport.close()
            dist.barrier()
            destroy_parallel()
        dist.destroy_process_group()
        return found

    wanted = [letters for asked in PLANNED.values() for _, letters in asked]
    for found in run_ranks(2, main):
        assert [letters for _, letters, *_ in found] == list(map(set, wanted))
        for options, _, num_micro_batches, loss, error in found:
            assert num_micro_batches > 3, options
            assert loss == pytest.approx(expected_loss, rel=1e-5), options
            assert error <= 1e-5, options


def forward_step(iterator, model):
    """As in Megatron-LM's pretrain_gpt.py: (output, what makes (loss sum, number of tokens, log) of it)."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_func(losses):
        weights = batch["loss_weights"]
        loss = (losses.float() * weights).sum()
        return loss, weights.sum(), {"lm loss": loss.detach()}

    return output, loss_func


def test_the_call_of_the_model_and_the_end_of_its_gradients_are_the_users(run_ranks, oracle_folder):
    """Behind the call stands a `forward_step` of Megatron-LM; its caller finalises the gradients."""
    case = Case(INTERLEAVED, schedule="interleaved-1f1b")
    expected_loss, _, gradients = torch.load(recorded(case, run_ranks, oracle_folder), weights_only=True)[0]

    def call(chunk, batch, *inputs):
        unwrapped(chunk).set_input_tensor(inputs[0] if inputs else None)
        output, loss_func = forward_step(iter([batch]), chunk)
        return loss_func(output)[0] if unwrapped(chunk).post_process else output

    def main(env):
        join(env)
        ddps = build_ddps(case, case.topology, env.rank)
        models = [ddp.module for ddp in ddps]
        stage = MegatronStage(ddps, call=call, gradients=MegatronGradients(ddps, finalize=None))
        with in_job(case, env, stage) as (executor, plan, batches):
            loss = executor.execute(plan, batches)
            unfinished = worst_error(case.model.shape, case.topology, env.rank, models, gradients)
            finalize_grads(ddps)
            finished = worst_error(case.model.shape, case.topology, env.rank, models, gradients)
        return loss, unfinished, finished

    for loss, unfinished, finished in run_ranks(2, main):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert unfinished > 1e-3  # the two copies of the tied embedding had a part of its gradient each
        assert finished <= 1e-5


@contextmanager
def in_job(case: Case, env, stage: MegatronStage, recorder=None):
    """This rank's executor over the strict transport, its plan of step 0 and the batches; leaves the job afterwards."""
    topology, me = case.topology, case.topology.coordinates(env.rank)
    groups = make_pipeline_groups(topology, env.rank, timeout_s=60)
    transport = StrictTransport(topology, env.rank, groups, timeout_s=30)
    form = ActivationFormat(case.model.shape.hidden_size, sequence_shards=topology.tp if case.sequence_parallel else 1)
    plans = lower(step_plan_of(case, 0), form)
    for replica in plans:
        verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
    plan = plans[me.dp_rank][me.pp_rank]
    batches = [tensors_of(m, samples_of(0), case.loss_norm) for m in plan.micro_batches]
    yield PipelineExecutor(stage, transport, recorder=recorder), plan, batches
    transport.close()
    dist.barrier()
    dist.destroy_process_group()


def one_step(case: Case):
    """Returns (loss, {name: gradient}, bytes held after each action) of one step on this rank."""

    def main(env):
        join(env)
        ddps, spans = build_ddps(case, case.topology, env.rank), Spans()
        stage = MegatronStage(ddps, dropout=case.dropout > 0)
        with in_job(case, env, stage, spans) as (executor, plan, batches):
            loss = executor.execute(plan, batches)
            grads = {f"{i}.{name}": g for i, ddp in enumerate(ddps) for name, g in main_grads(ddp).items()}
            gradients = {name: gradient.numpy().copy() for name, gradient in grads.items()}
        return loss, gradients, [span.num_bytes for span in spans]

    return main


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


def test_dropout_masks_depend_neither_on_the_pipeline_nor_on_the_replica_nor_on_chunks(run_ranks):
    dropping = Case(TP2, "packed", GPT2, dropout=0.2)
    runs = [
        run_ranks(topology.world_size, one_step(replace(dropping, topology=topology, schedule=name, recompute=kind)))
        for topology, name, kind in (
            (TP2, "1f1b", "none"),
            (TP2PP2, "1f1b", "none"),
            (ALL, "1f1b", "none"),
            (TP2V, "zb-v", "none"),
            (TP2V, "zb-v", "full"),
        )
    ]
    losses = [ranks[0][0] for ranks in runs]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 4
    for (_, gradients, _), (_, recomputed, _) in zip(runs[3], runs[4], strict=True):
        for name, gradient in gradients.items():
            scale = max(1e-12, float(np.abs(gradient).max()))
            assert float(np.abs(recomputed[name] - gradient).max()) <= 1e-5 * scale, name


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
            if case.recompute == "full":  # I does the work of W
                assert max(split_held) == max(held)
            elif lag:
                assert max(split_held) > max(held)
            for name, gradient in gradients.items():
                assert np.array_equal(split_gradients[name], gradient), f"lag {lag}: {name}"
