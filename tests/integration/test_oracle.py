"""Gradients and losses on every topology equal those of one process that runs one sample at a time.

Real megatron-core ranks over gloo, with the strict transport (NCCL's ordering rules). A second optimizer step shows
that nothing is left over from the first, and that clipping and updates agree. Four ranks take it only where they divide
the optimizer: all else that they have is also in a case of two, or in the one of eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan, lower
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.megatron.model import global_names
from dynapipe_ext.executor.stages.megatron.stage import (
    MegatronGradients,
    MegatronStage,
    finalize_grads,
    unwrapped,
)
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S
from tests.support.lowered import forwards_of
from tests.support.megatron_ranks import (
    NUM_SAMPLES,
    Case,
    Model,
    Spans,
    build,
    build_ddps,
    build_trained,
    format_of,
    join,
    length_of,
    main_grads,
    samples_of,
    step_plan_of,
    tensors_of,
    worst_error,
)
from tests.support.rank_jobs import in_turn

SAMPLES_OF = ((5, 2, 1, 3, 3), (6, 1, 7))  # each micro-batch of the first step, and of the second
TP2, TP2PP2, ALL = Topology(tp=2), Topology(tp=2, pp=2), Topology(tp=2, pp=2, dp=2)
INTERLEAVED, V = Topology(pp=2, placement=(0, 1, 0, 1)), Topology(pp=2, placement=(0, 1, 1, 0))
TP2V = replace(V, tp=2)
TIED, UNTIED, LEARNED = Model(), Model(tied=False), Model(position="learned")
GPT2 = Model(tied=False, position="learned", modern=False)
ONE_KEY = Model(tied=False, key_heads=1)  # which two ranks share
MAIN_JOB = Model(modern=False)  # as `dynapipe train` builds it where nothing else is said

# Cases of whole backwards, and by how many micro-batches later weight gradients come where the same are split.
LAGS = {
    Case(Topology(), model=GPT2): (2,),
    Case(Topology(pp=2), "packed", UNTIED): (0, 2),
    Case(TP2, "packed", GPT2, sequence_parallel=True): (2,),
    Case(TP2PP2, model=GPT2, sequence_parallel=True, recompute="full"): (2,),
}
# Stages that begin or end between attention and MLP, each with the same in one process or cut between layers.
HALVES = {
    Case(Topology(pp=2, layers_per_stage=(2.5, 1.5)), "packed", UNTIED): Case(Topology(), "packed", UNTIED),
    Case(replace(V, layers_per_stage=(0.5, 1, 1.5, 1)), model=GPT2, recompute="full", schedule="adaptive"): Case(
        V, model=GPT2, recompute="full", schedule="adaptive"
    ),
}
ZB_H1 = Case(Topology(pp=4), "packed", MAIN_JOB, schedule="zb-h1")
SCHEDULES = [  # that split backwards
    Case(TP2PP2, "packed", MAIN_JOB, sequence_parallel=True, schedule="adaptive-split"),
    Case(Topology(pp=2, dp=2), model=MAIN_JOB, schedule="zb-h2", distributed_optimizer=True),
]
SPLIT = [  # each with the same unsplit
    *((replace(case, weights_lag=lag), case) for case, lags in LAGS.items() for lag in lags),
    *((case, replace(case, is_joined=True)) for case in SCHEDULES),
    (ZB_H1, replace(ZB_H1, schedule="1f1b")),
]
ONE_CHUNK = [
    *dict.fromkeys(case for pair in SPLIT for case in pair),
    *(case for pair in HALVES.items() for case in pair if len(case.topology.stage_ranks) <= case.topology.pp),
    Case(Topology(), "packed", loss_norm="samples"),
    Case(Topology(pp=2), schedule="adaptive"),
    Case(TP2, sequence_parallel=True, weights_lag=0),
    Case(TP2, model=ONE_KEY, weights_lag=1),
    Case(TP2PP2, "packed", ONE_KEY, sequence_parallel=True, recompute="selective"),
    Case(Topology(dp=2), loss_norm="samples"),
    Case(Topology(dp=2), "packed", UNTIED, distributed_optimizer=True),
    Case(replace(TP2PP2, layers_per_stage=(1, 3)), "packed", LEARNED, recompute="stage"),
    Case(ALL, "packed", UNTIED, sequence_parallel=True, recompute="stage"),
    Case(Topology(pp=2), model=GPT2, recompute="head", weights_lag=1),
    Case(TP2PP2, "packed", sequence_parallel=True, recompute="head+full"),
    Case(TP2, "packed", recompute="head", weights_lag=2),
]
CHUNKS = [
    Case(INTERLEAVED, "packed", UNTIED, weights_lag=1, schedule="interleaved-1f1b"),
    Case(Topology(pp=2, placement=(0, 1, 0), layers_per_stage=(1, 2, 1)), model=LEARNED, schedule="adaptive"),
    Case(replace(V, dp=2), model=GPT2, recompute="full", schedule="adaptive", loss_norm="samples"),
    Case(V, "packed", recompute="head+stage", schedule="adaptive"),
    Case(
        replace(TP2V, layers_per_stage=(1.5, 0.5, 0.5, 1.5)),
        "packed",
        sequence_parallel=True,
        recompute="selective",
        schedule="zb-v",
    ),
    *(case for pair in HALVES.items() for case in pair if case.topology.placement),
]
SPREAD = [  # heads in parts on all pipeline ranks
    Case(split_vocabulary(Topology(pp=2), "head"), "packed", UNTIED, schedule="adaptive", weights_lag=1),
    Case(split_vocabulary(TP2PP2, "head"), model=GPT2, sequence_parallel=True, schedule="adaptive", weights_lag=1),
    Case(split_vocabulary(TP2V, "head"), "packed", UNTIED, recompute="head+full", schedule="adaptive"),
    Case(split_vocabulary(Topology(pp=4), "head"), model=UNTIED, recompute="stage", schedule="adaptive"),
    Case(
        split_vocabulary(replace(V, dp=2), "head"),
        "packed",
        UNTIED,
        distributed_optimizer=True,
        recompute="head",
        schedule="adaptive",
        weights_lag=2,
    ),
]
SPREAD += [  # and embeddings
    Case(split_vocabulary(Topology(pp=2), "both"), "packed", TIED, schedule="adaptive", weights_lag=1),
    Case(split_vocabulary(TP2PP2, "both"), model=GPT2, sequence_parallel=True, recompute="full", schedule="adaptive"),
    Case(
        split_vocabulary(TP2V, "both"),
        "packed",
        TIED,
        sequence_parallel=True,
        distributed_optimizer=True,
        recompute="head+stage",
        schedule="adaptive",
    ),
]
CHUNKS += SPREAD
CASES = [*ONE_CHUNK, *CHUNKS]
NUM_STEPS = {case: 1 if case.topology.world_size == 4 and not case.distributed_optimizer else 2 for case in CASES}
DROPPED = Case(TP2PP2, "packed", GPT2, dropout=0.2)
ALIKE = [  # whose dropout is the same
    replace(DROPPED, schedule="adaptive", recompute="selective"),
    replace(DROPPED, topology=Topology(tp=2, dp=2)),
    replace(DROPPED, topology=TP2V, schedule="zb-v"),
    replace(DROPPED, topology=TP2V, schedule="zb-v", recompute="full"),
    replace(DROPPED, topology=replace(TP2PP2, layers_per_stage=(1.5, 2.5))),
]
CALLED = Case(INTERLEAVED, schedule="interleaved-1f1b")

# What a planner is told, and the letters of its actions; all of a topology run on one model, one after the other.
PLANNED: dict[Topology, list[tuple[dict[str, Any], str]]] = {
    INTERLEAVED: [({"schedule": "interleaved-1f1b"}, "FB"), ({"split_backward": True, "layout": "packed"}, "FIW")],
    V: [({"schedule": "zb-v", "layout": "packed"}, "FIW"), ({"schedule": "v-half"}, "FIW"), ({}, "FB")],
    Topology(pp=2): [({"schedule": "cyclic", "split_policy": "dynapipe"}, "FB")],
}


@dataclass(frozen=True)
class Step:
    """What a step came to: on one rank by its plan, or in one process that runs one sample at a time."""

    loss: float
    norm: float
    gradients: dict[str, np.ndarray]
    error: float = 0.0  # of the worst gradient
    labels: tuple[str, ...] = ()  # of the actions, in the order in which they ran
    held_bytes: tuple[int, ...] = ()  # after each
    forwards_loss: float | None = None  # of the plan's forwards alone, before the step


def oracle(case: Case):
    """Steps of one process, one sample at a time."""

    def main(env) -> list[Step]:
        join(env)
        _, ddp, optimizer = build(Case(Topology(), model=case.model), Topology(), 0)
        steps = []
        for step in range(len(SAMPLES_OF)):
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
            gradients = copied(main_grads(ddp))
            steps.append(Step(loss_sum, optimizer.update(), gradients))
        dist.destroy_process_group()
        return steps

    return main


def copied(gradients: Any) -> dict[str, np.ndarray]:
    return {name: gradient.numpy().copy() for name, gradient in gradients.items()}


@contextmanager
def executor_of(case: Case, env, stage: MegatronStage, recorder=None) -> Iterator[PipelineExecutor]:
    """This rank's executor over the strict transport; leaves the job afterwards."""
    groups = make_pipeline_groups(case.topology, env.rank, timeout_s=LIMIT_S)
    transport = StrictTransport(case.topology, env.rank, groups, timeout_s=LIMIT_S)
    yield PipelineExecutor(stage, transport, recorder=recorder)
    transport.close()
    dist.barrier()
    dist.destroy_process_group()


def plan_of(case: Case, env, step: int) -> tuple[ExecutionPlan, list[Any]]:
    """This rank's plan of a step, proven, and its batches."""
    me = case.topology.coordinates(env.rank)
    plans = lower(step_plan_of(case, step, SAMPLES_OF[step]), format_of(case))
    for replica in plans:
        verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
    plan = plans[me.dp_rank][me.pp_rank]
    return plan, [tensors_of(m, samples_of(step), case.loss_norm) for m in plan.micro_batches]


def planned(case: Case, expected: list[Step]):
    """A rank's steps by plans: one where nothing is expected."""

    def main(env) -> list[Step]:
        chunk_runner.HEAD_SLICE = 7  # of rows that are longer, and that it does not divide
        join(env)
        ddps, optimizer = build_trained(case, case.topology, env.rank)
        spans, found = Spans(), []
        with executor_of(case, env, MegatronStage(ddps, dropout=case.dropout > 0), spans) as executor:
            for step in range(len(expected) or 1):
                plan, batches = plan_of(case, env, step)
                forwards = executor.execute(forwards_of(plan), batches) if case in CHUNKS and step == 0 else None
                spans.clear()
                loss = executor.execute(plan, batches)
                gradients = copied({f"{i}.{n}": g for i, ddp in enumerate(ddps) for n, g in gradients_of(ddp)})
                # Under a distributed optimizer sums are reduce-scattered: the buffer holds only this rank's shard.
                whole = expected and not case.distributed_optimizer
                error = error_on(case, env, ddps, expected[step]) if whole else 0.0
                labels, held = zip(*((span.label, span.num_bytes) for span in spans), strict=True)
                norm = optimizer.step(ExecutedStep(plan, loss))
                found.append(Step(loss, norm, gradients, error, labels, held, forwards))
        return found

    return main


def gradients_of(ddp: Any) -> Iterator[tuple[str, Any]]:
    """By their names in the whole model."""
    return global_names(ddp.module, main_grads(ddp).items())


def error_on(case: Case, env, ddps: list[Any], expected: Step) -> float:
    models = [ddp.module for ddp in ddps]
    return worst_error(case.model.shape, case.topology, env.rank, models, expected.gradients)


def by_planner(topology: Topology, expected: Step):
    """Of each of PLANNED what was asked, the letters that ran, how many micro-batches, the loss, the worst gradient's
    error."""

    def main(env) -> list[tuple[Any, ...]]:
        join(env)
        case, samples, form = Case(topology), samples_of(0), ActivationFormat(TIED.shape.hidden_size)
        ddps, spans, found = build_ddps(case, topology, env.rank), Spans(), []
        with executor_of(case, env, MegatronStage(ddps), spans) as executor:
            for options, _ in PLANNED[topology]:
                costs = TokenCosts(topology.num_stages, overhead_ns=0, transfer_ns_per_token=10)
                planner = Planner(topology, costs, 1e12, effort=50, max_tokens=96, format=form, **options)
                proven = prove_step(planner, [length_of(sample) for sample in samples], step=0)
                plan = proven.plans[0][env.rank]
                spans.clear()
                loss = executor.execute(plan, [tensors_of(m, samples, "tokens") for m in plan.micro_batches])
                letters = {letter for span in spans for letter in span.label if letter.isalpha()}
                error = error_on(case, env, ddps, expected)
                found.append((options, letters, len(plan.micro_batches), loss, error))
        return found

    return main


def forward_step(iterator, model):
    """As in Megatron-LM's pretrain_gpt.py: (output, what makes (loss sum, number of tokens, log) of it)."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_func(losses):
        weights = batch["loss_weights"]
        loss = (losses.float() * weights).sum()
        return loss, weights.sum(), {"lm loss": loss.detach()}

    return output, loss_func


def called(expected: Step):
    """The loss of a step whose calls are a `forward_step`'s, and the worst gradient's error before and after its
    gradients are finalised."""

    def call(chunk, batch, *inputs):
        unwrapped(chunk).set_input_tensor(inputs[0] if inputs else None)
        output, loss_func = forward_step(iter([batch]), chunk)
        return loss_func(output)[0] if unwrapped(chunk).post_process else output

    def main(env) -> tuple[float, float, float]:
        join(env)
        ddps = build_ddps(CALLED, CALLED.topology, env.rank)
        stage = MegatronStage(ddps, call=call, gradients=MegatronGradients(ddps, finalize=None))
        with executor_of(CALLED, env, stage) as executor:
            loss = executor.execute(*plan_of(CALLED, env, 0))
            unfinished = error_on(CALLED, env, ddps, expected)
            finalize_grads(ddps)
            return loss, unfinished, error_on(CALLED, env, ddps, expected)

    return main


@pytest.fixture(scope="module")
def alone() -> dict[tuple[Any, ...], list[Step]]:
    """The oracle's steps, by model and norm."""
    jobs = {(case.model, case.loss_norm): (1, oracle(case)) for case in (*CASES, DROPPED)}
    return {key: steps for key, (steps,) in in_turn(jobs).items()}


def expected_of(case: Case, alone: dict[tuple[Any, ...], list[Step]]) -> list[Step]:
    """Of as many steps as the case does."""
    return alone[case.model, case.loss_norm][: NUM_STEPS[case]]


@pytest.fixture(scope="module")
def ran(alone) -> dict[Any, list[Any]]:
    """What every rank found, by case, by topology of PLANNED, and of the user's call."""
    of_tied, jobs = alone[TIED, "tokens"][0], {}
    for case in CASES:
        jobs[case] = case.topology.world_size, planned(case, expected_of(case, alone))
    for case in (DROPPED, *ALIKE):
        jobs[case] = case.topology.world_size, planned(case, [])
    for topology in PLANNED:
        jobs[topology] = 2, by_planner(topology, of_tied)
    return in_turn(jobs | {"called": (2, called(of_tied))})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_losses_equal_one_process_one_sample_at_a_time(case, ran, alone):
    """Those of several chunks a rank run their forwards alone first: they find the loss and change nothing."""
    for rank, steps in enumerate(ran[case]):
        for step, (found, expected) in enumerate(zip(steps, expected_of(case, alone), strict=True)):
            # After an update, entries whose gradient is rounding noise have moved by Adam's full step: allow more.
            limit = 1e-5 if step == 0 else 1e-3
            assert found.loss == pytest.approx(expected.loss, rel=limit), f"rank {rank} step {step}"
            assert found.norm == pytest.approx(expected.norm, rel=limit), f"rank {rank} step {step}"
            assert found.error <= limit, f"rank {rank} step {step}"
            if case in CHUNKS and step == 0:
                assert found.forwards_loss == pytest.approx(expected.loss, rel=limit), f"rank {rank} step {step}"


@pytest.mark.parametrize(("case", "unsplit"), SPLIT, ids=str)
def test_split_backwards_train_to_the_bits_of_whole_ones_and_hold_memory_until_w(case, unsplit, ran):
    for rank, (split, whole) in enumerate(zip(ran[case], ran[unsplit], strict=True)):
        assert any("W" in label for label in split[0].labels)
        assert not any("W" in label or "I" in label for label in whole[0].labels)
        for one, other in zip(split, whole, strict=True):
            assert (one.loss, one.norm) == (other.loss, other.norm), f"rank {rank}"
            assert one.gradients.keys() == other.gradients.keys()
            for name, gradient in other.gradients.items():
                assert np.array_equal(one.gradients[name], gradient), f"rank {rank}: {name}"
            assert one.held_bytes[-1] == other.held_bytes[-1] == 0
            if case.recompute == "full":  # I does the work of W
                assert max(one.held_bytes) == max(other.held_bytes)
            elif case.weights_lag:
                assert max(one.held_bytes) > max(other.held_bytes)


@pytest.mark.parametrize("case", HALVES, ids=str)
def test_cuts_between_attention_and_mlp_train_to_the_bits_of_whole_layers(case, ran):
    """One process and a pipeline, and two pipelines: the same losses and gradients, under the names of whole layers."""

    def whole(steps: list[Step]) -> dict[str, np.ndarray]:
        return {name.partition(".")[2]: g for step in steps for name, g in step.gradients.items()}

    cut, uncut = ([steps[0] for steps in ran[one]] for one in (case, HALVES[case]))  # norms sum ranks in other orders
    assert {step.loss for step in cut} == {step.loss for step in uncut}
    gradients, expected = whole(cut), whole(uncut)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.array_equal(gradients[name], gradient), name


def test_zb_h1_puts_weight_gradients_off(ran):
    """Rank r runs its first W behind its I number r, on real ranks as in the table."""
    for rank, (step,) in enumerate(ran[ZB_H1]):
        before = step.labels[: step.labels.index(f"{rank}W0")]
        assert sum("I" in label for label in before) == rank + 1


def test_steps_that_a_planner_puts_on_any_placement_have_loss_and_gradients_of_one_process(ran, alone):
    """Published schedules of several stages a rank, the search's own, and DynaPipe's; proven, and then run strictly."""
    for topology, asked in PLANNED.items():
        for found in ran[topology]:
            assert [letters for _, letters, *_ in found] == [set(letters) for _, letters in asked]
            for options, _, num_micro_batches, loss, error in found:
                assert num_micro_batches > 3, options
                assert loss == pytest.approx(alone[TIED, "tokens"][0].loss, rel=1e-5), options
                assert error <= 1e-5, options


def test_the_call_of_the_model_and_the_end_of_its_gradients_are_the_users(ran, alone):
    """Behind the call stands a `forward_step` of Megatron-LM; its caller finalises the gradients."""
    for loss, unfinished, finished in ran["called"]:
        assert loss == pytest.approx(alone[TIED, "tokens"][0].loss, rel=1e-5)
        assert unfinished > 1e-3  # the two copies of the tied embedding had a part of its gradient each
        assert finished <= 1e-5


def test_dropout_depends_neither_on_schedule_ranks_and_chunks_nor_on_recomputation(ran, alone):
    """Random numbers are keyed by step, micro-batch and stage, and replayed when activations are computed again."""
    loss = ran[DROPPED][0][0].loss
    assert abs(loss - alone[GPT2, "tokens"][0].loss) > 1e-5  # it does drop
    for case in ALIKE:
        (first, *_), as_spread = ran[case], [one for one in (DROPPED, *ALIKE) if one.topology == case.topology]
        assert first[0].loss == pytest.approx(loss, rel=1e-6)
        for (wanted,), (found,) in zip(ran[as_spread[0]], ran[case], strict=True):
            for name, gradient in wanted.gradients.items():
                scale = max(1e-12, float(np.abs(gradient).max()))
                assert float(np.abs(found.gradients[name] - gradient).max()) <= 1e-5 * scale, name
