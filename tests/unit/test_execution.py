"""The engine, the torch stage and the accumulators on one process: against autograd over the whole batch."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    ExecutionPlan,
    Recv,
    WaitSend,
)
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator, ExactSums, Float32Accumulator, gradient_fault
from dynapipe_ext.executor.stages.chunk_runner import PlainAccumulator
from dynapipe_ext.executor.stages.emulated import EmulatedStage
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.transport.inline import InlineHub, InlineReductions
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S

HIDDEN, VOCAB = 8, 17
LENGTHS = (3, 11, 4, 5, 9, 2, 7)
SAMPLES = [SampleLength(i, n, target=n) for i, n in enumerate(LENGTHS)]


def make_parts(num_stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    middle = [torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()) for _ in range(num_stages - 2)]
    return [torch.nn.Embedding(VOCAB, HIDDEN), *middle, torch.nn.Linear(HIDDEN, VOCAB)]


def tokens_of(sample: SampleLength) -> torch.Tensor:
    return (torch.arange(sample.encoder) * 5 + sample.index * 3) % VOCAB


def batch_of(micro_batch) -> dict[str, torch.Tensor]:
    shape = (micro_batch.rows, micro_batch.encoder_len)
    tokens, weights = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for row, sample in enumerate(micro_batch.samples):
        tokens[row, : sample.encoder] = tokens_of(sample)
        weights[row, : sample.encoder] = 1.0
    return {"tokens": tokens, "labels": (tokens + 1) % VOCAB, "loss_weights": weights}


def loss_sum(logits: torch.Tensor, batch) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["loss_weights"].flatten()).sum()


def planner_for(num_stages: int, **settings) -> Planner:
    form = ActivationFormat(HIDDEN, order="bsh")
    return Planner(Topology(pp=num_stages), TokenCosts(num_stages), 10**9, pad_multiple=1, format=form, **settings)


def run_step(num_stages: int, parts, make_accumulator=PlainAccumulator, recorders=None, **settings):
    """Every pipeline rank as a thread; returns the last stage's loss and the plans."""
    plans = prove_step(planner_for(num_stages, **settings), SAMPLES, step=0).plans[0]
    hub, losses, parallel = (
        InlineHub(timeout_s=LIMIT_S),
        {},
        InlineReductions(Topology(pp=num_stages), timeout_s=LIMIT_S),
    )

    def rank(pp_rank: int) -> None:
        stage = TorchStage(parts[pp_rank], loss_sum, accumulator=make_accumulator, parallel=parallel)
        recorder = recorders[pp_rank] if recorders else None
        executor = PipelineExecutor(stage, hub.transport(pp_rank), recorder=recorder)
        losses[pp_rank] = executor.execute(plans[pp_rank], [batch_of(m) for m in plans[pp_rank].micro_batches])

    threads = [threading.Thread(target=rank, args=(p,)) for p in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert losses == dict.fromkeys(range(num_stages), losses[0])
    return losses[0], plans


def whole_batch(parts) -> tuple[float, list[torch.Tensor]]:
    """The oracle: one sample at a time through all parts."""
    model = torch.nn.Sequential(*parts)
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for sample in SAMPLES:
        tokens = tokens_of(sample)[None]
        total = total + loss_sum(
            model(tokens), {"labels": (tokens + 1) % VOCAB, "loss_weights": torch.ones_like(tokens)}
        )
    loss = total / sum(LENGTHS)
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("make_accumulator", [PlainAccumulator, ExactAccumulator])
def test_split_backwards_of_torch_linears_give_the_bits_of_whole_ones(make_accumulator):
    inner = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
    parts = [*make_parts(1)[:1], inner, torch.nn.Tanh(), torch.nn.Linear(HIDDEN, VOCAB)]
    model, (_, of_samples) = torch.nn.Sequential(*parts), whole_batch(parts)
    plan = prove_step(planner_for(1), SAMPLES, step=0).plans[0][0]
    batches = [batch_of(m) for m in plan.micro_batches]
    stage = TorchStage(model, loss_sum, accumulator=make_accumulator)
    whole_loss = PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches)
    whole = [p.grad.clone() for p in model.parameters()]
    torch.testing.assert_close(whole, of_samples, rtol=1e-5, atol=1e-7)
    instructions, late = [], []
    for instruction in plan.instructions:
        if isinstance(instruction, Backward):
            instructions.append(BackwardInput(0, instruction.micro_batch))
            late.append(BackwardWeight(0, instruction.micro_batch))
        else:
            instructions.append(instruction)
    split_plan = replace(plan, instructions=(*instructions, *late))
    spans = Spans()
    loss = PipelineExecutor(stage, InlineHub().transport(0), recorder=spans).execute(split_plan, batches)
    assert loss == whole_loss
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        assert torch.equal(parameter.grad, expected)
    held = {span.label: span.num_bytes for span in spans}
    assert held[f"0I{len(batches) - 1}"] > held[f"0W{len(batches) - 1}"] == 0


@pytest.mark.parametrize("first", [PlainAccumulator, Float32Accumulator, ExactAccumulator])
@pytest.mark.parametrize("second", [PlainAccumulator, Float32Accumulator, ExactAccumulator])
def test_two_stages_over_one_model_and_a_plain_loop_take_turns(first, second):
    parts = make_parts(3)
    model, (_, expected) = torch.nn.Sequential(*parts), whole_batch(parts)
    plan = prove_step(planner_for(1), SAMPLES, step=0).plans[0][0]
    batches = [batch_of(m) for m in plan.micro_batches]
    stages = [TorchStage(model, loss_sum, accumulator=accumulator) for accumulator in (first, second)]
    for number in (0, 1, 0, 1):
        PipelineExecutor(stages[number], InlineHub().transport(0)).execute(plan, batches)
        is_wide = (first, second)[number] is Float32Accumulator
        found = [p.main_grad if is_wide else p.grad for p in model.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(whole_batch(parts)[1], expected)


def test_a_backward_of_the_users_own_after_a_step_that_failed_goes_by_autograd():
    parts = make_parts(3)
    model, (_, expected) = torch.nn.Sequential(*parts), whole_batch(parts)
    plan = prove_step(planner_for(1), SAMPLES, step=0).plans[0][0]
    batches = [batch_of(m) for m in plan.micro_batches]
    stage = TorchStage(model, loss_sum, accumulator=ExactAccumulator)
    del batches[1]["loss_weights"]
    with pytest.raises(KeyError, match="loss_weights"):
        PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches)
    torch.testing.assert_close(whole_batch(parts)[1], expected, rtol=1e-5, atol=1e-7)


def test_a_stage_without_weights_that_train_is_none_that_was_detached():
    """Beside another stage of the same rank, which trains."""
    first, last = make_parts(2)
    _, (_, expected, _) = whole_batch([first, last])
    first.requires_grad_(False)
    topology = Topology(placement=(0, 0))
    planner = Planner(topology, TokenCosts(2), 10**9, pad_multiple=1, format=ActivationFormat(HIDDEN, order="bsh"))
    plan = prove_step(planner, SAMPLES, step=0).plans[0][0]
    executor = PipelineExecutor(TorchStage([first, last], loss_sum), InlineHub().transport(0))
    executor.execute(plan, [batch_of(m) for m in plan.micro_batches])
    torch.testing.assert_close(last.weight.grad, expected, rtol=1e-5, atol=1e-7)
    first.requires_grad_(True)  # what trains, and is detached, is told
    own = [*first.parameters(), *last.parameters()]
    stage = TorchStage([lambda tokens, batch: first(tokens).detach(), last], loss_sum, parameters=own)
    with pytest.raises(ConfigError, match="stage 0 returns has no gradient"):
        PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, [batch_of(m) for m in plan.micro_batches])


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "adaptive"])
def test_a_pipeline_of_threads_gives_the_gradients_of_one_sample_at_a_time(num_stages, schedule):
    parts = make_parts(num_stages)
    loss, gradients = whole_batch(parts)
    got, _ = run_step(num_stages, parts, schedule=schedule)
    assert got == pytest.approx(loss, rel=1e-6)
    for parameter, expected in zip(torch.nn.Sequential(*parts).parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make_accumulator", [PlainAccumulator, ExactAccumulator])
def test_gradients_of_16_bits_add_up_in_float32_and_unused_weights_have_none(make_accumulator, monkeypatch):
    """Two replicas: this one's sums are doubled, and the other one alone has used the third weight."""
    monkeypatch.setattr(chunk_runner, "_MAX_BUCKET", 3)
    used, linear, elsewhere, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(4))
    largest, plan = 0, prove_step(planner_for(1), SAMPLES, step=0).plans[0][0]

    def sum_over_replicas(tensor: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, tensor.numel())
        is_counts = tensor.tolist() == [1.0, 1.0, 0.0, 0.0]
        tensor += torch.tensor([1.0, 1.0, 1.0, 0.0]) if is_counts else tensor.clone()

    accumulator = make_accumulator([used, linear, elsewhere, unused], sum_over_replicas)
    accumulator.begin(plan)
    for _ in range(1000):
        used.grad = torch.full_like(used, 2**-9)
        accumulator.add_weight(linear, torch.full_like(linear, 2**-9))
        accumulator.add()
    accumulator.reduce()
    assert used.grad.dtype == linear.grad.dtype == torch.bfloat16
    assert used.grad.tolist() == linear.grad.tolist() == [3.90625] * 2  # in bfloat16 they stay at .5
    assert elsewhere.grad.tolist() == [0.0, 0.0]
    assert unused.grad is None
    if make_accumulator is PlainAccumulator:
        assert largest == 4  # the counts: a bucket has one weight here
    # What is None takes no step: AdamW neither decays it nor moves it.
    torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5).step()
    assert unused.tolist() == [1.0, 1.0] != used.tolist()


def test_exact_accumulation_has_the_same_bits_in_every_order_and_plain_is_close():
    parts, plan = make_parts(2), prove_step(planner_for(1), SAMPLES, step=0).plans[0][0]
    sums = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        parameter = torch.nn.Parameter(torch.zeros(50))
        accumulator = ExactAccumulator([parameter])
        accumulator.begin(plan)
        for i in order:
            parameter.grad = torch.randn(50, generator=torch.Generator().manual_seed(i)) * 10.0 ** (i - 2)
            accumulator.add()
        accumulator.reduce()
        sums.append(parameter.grad.clone())
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    run_step(2, parts, make_accumulator=PlainAccumulator)
    plain = [p.grad.clone() for part in parts for p in part.parameters()]
    run_step(2, parts, make_accumulator=ExactAccumulator)
    for part_grad, expected in zip((p.grad for part in parts for p in part.parameters()), plain, strict=True):
        torch.testing.assert_close(part_grad, expected, rtol=1e-5, atol=1e-8)


def test_exact_accumulation_says_what_it_cannot_hold():
    parameter, plan = torch.nn.Parameter(torch.zeros(2)), prove_step(planner_for(1), SAMPLES, step=0).plans[0][0]
    accumulator = ExactAccumulator([parameter])
    accumulator.begin(plan)
    parameter.grad = torch.tensor([1.0, 1e9])
    accumulator.add()
    accumulator.reduce()
    assert parameter.grad.tolist() == [math.inf, math.inf]
    assert gradient_fault("w", parameter.grad, is_exact=True) == (
        "the gradient of w is above 2.62e+05, which exact sums do not hold (leave out --deterministic)"
    )
    assert gradient_fault("w", parameter.grad, is_exact=False) == "the gradient of w is not finite"
    assert gradient_fault("w", torch.tensor([math.inf, math.nan]), is_exact=True) == "the gradient of w is not finite"
    assert gradient_fault("w", torch.ones(2), is_exact=True) == ""


def test_exact_sums_that_fit_on_each_rank_and_not_together_are_infinite():
    parameter = torch.nn.Parameter(torch.zeros(2))
    sums = ExactSums([parameter])
    sums.add(parameter, torch.tensor([1.0, 2e5]))
    assert sums.value(parameter).tolist() == [1.0, 2e5]
    sums.sum_all(lambda of_two_ranks: of_two_ranks.mul_(2))
    assert sums.value(parameter).tolist() == [math.inf, math.inf]


def test_exact_accumulation_hands_on_what_is_not_finite_to_those_who_judge_it():
    healthy, broken = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    accumulator = ExactAccumulator([healthy, broken])
    accumulator.begin(prove_step(planner_for(1), SAMPLES, step=0).plans[0][0])
    for gradient in (torch.tensor([1.0, torch.inf]), torch.ones(2)):
        healthy.grad, broken.grad = torch.ones(2), gradient
        accumulator.add()
    accumulator.reduce()
    assert torch.equal(healthy.grad, torch.full((2,), 2.0))
    assert broken.grad.isnan().all()


class Spans(list):
    def record(self, span) -> None:
        self.append(span)


def test_recorded_spans_are_the_schedule_with_shapes_and_bytes():
    recorders = [Spans(), Spans()]
    _, plans = run_step(2, make_parts(2), recorders=recorders)
    for pp_rank, spans in enumerate(recorders):
        computed = [i for i in plans[pp_rank].instructions if type(i).__name__ in ("Forward", "Backward")]
        assert [s.label for s in spans] == [f"{i.stage}{type(i).__name__[0]}{i.micro_batch}" for i in computed]
        assert all(s.rank == pp_rank and s.start_s <= s.end_s for s in spans)
        assert spans[0].num_bytes > 0
        assert spans[-1].num_bytes == 0
        micro_batches = plans[pp_rank].micro_batches
        assert [s.shape for s in spans] == [
            (m.rows, m.encoder_len, 0) for m in (micro_batches[i.micro_batch] for i in computed)
        ]


def test_a_wrong_number_of_batches_is_refused_before_anything_runs():
    parts = make_parts(2)
    plan = prove_step(planner_for(2), SAMPLES, step=3).plans[0][0]
    stage = TorchStage(parts[0], loss_sum)
    with pytest.raises(ExecutionError, match=r"step 3: 0 batches"):
        PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, [])


def test_a_plan_that_never_awaits_a_receive_is_an_error():
    plan = prove_step(planner_for(1), SAMPLES, step=0).plans[0][0]
    more = replace(plan, instructions=(*plan.instructions, Recv(Buffer("gradient", 1, 0), 1, 1, ())))
    executor = PipelineExecutor(TorchStage(torch.nn.Sequential(*make_parts(2)), loss_sum), InlineHub().transport(0))
    with pytest.raises(ExecutionError, match=r"left buffers behind.*'gradient of micro-batch 0 from stage 1'"):
        executor.execute(more, [batch_of(m) for m in more.micro_batches])


def test_a_plan_that_leaves_a_buffer_behind_is_an_error():
    parts, plans = make_parts(2), prove_step(planner_for(2), SAMPLES, step=0).plans[0]
    unawaited = tuple(i for i in plans[0].instructions if not isinstance(i, WaitSend))
    damaged = replace(plans[0], instructions=unawaited)
    hub, errors, parallel = InlineHub(timeout_s=5), {}, InlineReductions(Topology(pp=2), timeout_s=0.1)

    def rank(pp_rank, own):
        stage = TorchStage(parts[pp_rank], loss_sum, parallel=parallel)
        try:
            PipelineExecutor(stage, hub.transport(pp_rank)).execute(own, [batch_of(m) for m in own.micro_batches])
        except ExecutionError as error:
            errors[pp_rank] = str(error)

    threads = [threading.Thread(target=rank, args=(p, own)) for p, own in enumerate((damaged, plans[1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert "left buffers behind" in errors[0]
    assert "activation" in errors[0]
    assert "not all 2 ranks came" in errors[1]


def test_the_emulated_stage_holds_bytes_from_forward_to_backward_and_from_input_to_weight_gradient():
    ones = np.ones((1, 1), np.int64)
    costs = MicroBatchCosts(
        forward_ns=ones,
        backward_ns=2 * ones,
        weight_ns=ones,
        stored_bytes=64 * ones,
        working_bytes=0 * ones,
        transfer_ns=ones[:0],
        transfer_bytes=ones[:0],
        static_bytes=np.zeros(1, np.int64),
    )
    plan = prove_step(planner_for(1), SAMPLES[:1], step=0).plans[0][0]
    stage = EmulatedStage(lambda _: costs, ActivationFormat(1), lambda spec: spec)
    stage.start_step(plan)
    stage.forward(0, 0, ())
    assert stage.held_bytes() == 64
    stage.backward_input(0, 0, ())
    assert stage.held_bytes() == 64
    stage.backward_weight(0, 0)
    assert stage.held_bytes() == 0


@pytest.mark.parametrize("is_hooked", [False, True], ids=["plain", "saved-tensor hooks"])
def test_the_input_gradient_leaves_weight_gradients_to_w_also_under_saved_tensor_hooks(is_hooked):
    """Tensors may be counted or offloaded by hooks: a weight that comes back from them is another object."""
    plan = prove_step(planner_for(1), SAMPLES[:1], step=0).plans[0][0]
    part = torch.nn.Sequential(torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB))
    stage, weight = TorchStage(part, loss_sum), part[1].weight
    batch = batch_of(plan.micro_batches[0])
    split = replace(plan, instructions=(BackwardInput(0, 0), BackwardWeight(0, 0)))

    def gradient(plan: ExecutionPlan, *halves: str) -> list[torch.Tensor | None]:
        """The linear layer's, after each of these."""
        stage.start_step(plan)
        stage.load(0, batch)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if is_hooked else nullcontext()
        with hooks:
            stage.forward(0, 0, ())
        found = []
        for half in halves:
            getattr(stage, half)(0, 0, *([()] if half != "backward_weight" else []))
            found.append(weight.grad)
        return found

    (whole,) = gradient(plan, "backward")
    after_input, after_weight = gradient(split, "backward_input", "backward_weight")
    assert after_input is None
    assert torch.equal(after_weight, whole)
