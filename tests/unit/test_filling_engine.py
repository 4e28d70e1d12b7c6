"""The executor that fills its waits: weight gradients move, nothing else does, and gradients keep their bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, TensorSpec, Topology, placement_of
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import BackwardWeight, Buffer, ExecutionPlan, Recv, Send, lower
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.protocols import Pending
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.transport.inline import InlineHub, InlineReductions
from dynapipe_ext.executor.transport.torch_p2p import WatchedTransport, _TorchPending, _Transfer
from dynapipe_ext.schedules.judge.filling import simulate_filling, with_room_to_fill
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.timeline import Span
from tests.support.limits import LIMIT_S

HIDDEN, VOCAB, NUM_STAGES = 8, 17, 3
SAMPLES = [SampleLength(i, n, target=n) for i, n in enumerate((3, 11, 4, 5, 9, 2, 7, 12, 6, 8, 10, 1))]
PLANNER = Planner(
    Topology(pp=NUM_STAGES),
    TokenCosts(NUM_STAGES, overhead_ns=2000, bytes_per_token=100),
    4000,
    pad_multiple=1,
    split_backward=True,
    format=ActivationFormat(HIDDEN, order="bsh"),
)


def plans_of(fill_waits: bool) -> tuple[ExecutionPlan, ...]:
    step_plan = PLANNER.plan(SAMPLES)
    return lower(step_plan, PLANNER.activation_format, fill_waits=fill_waits)[0]


class Part(torch.nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        last = torch.nn.Linear(HIDDEN, VOCAB if stage == NUM_STAGES - 1 else HIDDEN)
        first = torch.nn.Embedding(VOCAB, HIDDEN) if stage == 0 else torch.nn.Linear(HIDDEN, HIDDEN)
        self.part = torch.nn.Sequential(first, torch.nn.Tanh(), last)

    def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.part(x)


def batch_of(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    shape = (micro_batch.rows, micro_batch.encoder_len)
    tokens = torch.arange(shape[0] * shape[1]).reshape(shape) % VOCAB
    return {"tokens": tokens, "labels": (tokens + 1) % VOCAB, "loss_weights": torch.ones(shape)}


def loss_sum(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class Spans(list[Span]):
    def record(self, span: Span) -> None:
        self.append(span)


Arrived = Callable[[WatchedTransport], Callable[[Pending], bool]]


def train(plans: Sequence[ExecutionPlan], arrived: Arrived | None) -> tuple[float, list[torch.Tensor], list[list[str]]]:
    """Loss, gradients, and what each rank ran in order; ranks are threads."""
    torch.manual_seed(0)
    return run_ranks([[Part(stage)] for stage in range(NUM_STAGES)], plans, arrived)


def run_ranks(
    parts: Sequence[Sequence[torch.nn.Module]], plans: Sequence[ExecutionPlan], arrived: Arrived | None
) -> tuple[float, list[torch.Tensor], list[list[str]]]:
    hub, recorders = InlineHub(timeout_s=LIMIT_S), [Spans() for _ in parts]
    parallel = InlineReductions(Topology(pp=len(parts)), timeout_s=LIMIT_S)
    losses: dict[int, float] = {}

    def rank(pp_rank: int) -> None:
        transport = WatchedTransport(hub.transport(pp_rank))
        stage = TorchStage(parts[pp_rank], loss_sum, parallel=parallel)
        executor = PipelineExecutor(
            stage, transport, recorder=recorders[pp_rank], arrived=arrived(transport) if arrived else None
        )
        plan = plans[pp_rank]
        losses[pp_rank] = executor.execute(plan, [batch_of(m) for m in plan.micro_batches])
        transport.close()

    threads = [threading.Thread(target=rank, args=(p,)) for p in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    weights = [weight for own in parts for part in own for weight in part.parameters()]
    gradients = [weight.grad.clone() for weight in weights if weight.grad is not None]
    assert len(gradients) == len(weights)
    return losses[0], gradients, [[span.label for span in spans] for spans in recorders]


def in_plan_order(plans: Sequence[ExecutionPlan]) -> list[list[str]]:
    return train(plans, None)[2]


WAYS: dict[str, Arrived] = {
    "as transfers end": lambda transport: transport.arrived,
    "everything looks late": lambda transport: lambda pending: False,
    "everything looks there": lambda transport: lambda pending: True,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fill_waits", [True, False])
def test_filled_waits_give_the_bits_of_the_plan_s_own_order(fill_waits: bool, way: str) -> None:
    loss, gradients, planned = train(plans_of(False), None)
    filled_loss, filled, ran = train(plans_of(fill_waits), WAYS[way])
    assert filled_loss == loss
    assert all(torch.equal(a, b) for a, b in zip(filled, gradients, strict=True))
    for mine, theirs in zip(ran, planned, strict=True):
        assert [label for label in mine if "W" in label] == [label for label in theirs if "W" in label]
        assert [label for label in mine if "W" not in label] == [label for label in theirs if "W" not in label]


class TiedPart(torch.nn.Module):
    """A stage of a V whose first and last have one weight."""

    def __init__(self, stage: int, ends: torch.nn.Parameter) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN)
        if stage == 0:
            self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
            self.embedding.weight = ends
        elif stage == 3:
            self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
            self.head.weight = ends

    def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        x = torch.tanh(self.inner(self.embedding(x) if "embedding" in self._modules else x))
        return self.head(x) if "head" in self._modules else x


@pytest.mark.parametrize("tied", [True, False])
def test_sums_of_weights_that_backwards_add_to_do_not_depend_on_when_transfers_end(tied: bool) -> None:
    """A tied embedding takes I of the first stage beside W of the last; without ties every other micro-batch is
    recomputed, so that its I does the work of W."""
    topology = Topology(pp=2, placement=placement_of("v", 2))
    planner = replace(PLANNER, topology=topology, costs=TokenCosts(4, overhead_ns=2000, bytes_per_token=100))
    plans = lower(planner.plan(SAMPLES), planner.activation_format, fill_waits=True)[0]
    if not tied:
        mixed = tuple(replace(m, recompute="none" if i % 2 else "stage") for i, m in enumerate(plans[0].micro_batches))
        plans = tuple(replace(plan, micro_batches=mixed) for plan in plans)

    def gradients(way: Arrived | None) -> tuple[list[torch.Tensor], list[list[str]]]:
        torch.manual_seed(0)
        ends = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN))
        other = ends if tied else torch.nn.Parameter(ends.detach().clone())
        parts = [TiedPart(stage, (ends, ends, ends, other)[stage]) for stage in range(4)]
        _, _, ran = run_ranks([[parts[0], parts[3]], parts[1:3]], plans, way)
        return [weight.grad for part in parts for weight in part.parameters()], ran

    planned, order = gradients(None)
    for way in WAYS.values():
        found, ran = gradients(way)
        assert all(torch.equal(a, b) for a, b in zip(found, planned, strict=True))
        assert way is not WAYS["everything looks late"] or ran != order


def test_a_wait_runs_every_weight_gradient_that_may_run_and_none_where_nothing_is_late() -> None:
    plans = plans_of(True)
    _, _, late = train(plans, WAYS["everything looks late"])
    _, _, there = train(plans, WAYS["everything looks there"])
    assert there == in_plan_order(plans)
    assert any(mine != planned for mine, planned in zip(late, there, strict=True))
    for labels in late[:-1]:  # a W is left over until a wait comes, so between two waits each I is followed by its W
        places = {label: i for i, label in enumerate(labels)}
        gaps = [places[label] - places[label.replace("W", "I")] for label in labels if "W" in label]
        assert min(gaps) == 1


def test_plans_to_fill_are_proven_and_promise_the_peaks_of_the_schedule() -> None:
    plain, to_fill = plans_of(False), plans_of(True)
    assert [plan.prediction.peak_bytes for plan in to_fill] == [plan.prediction.peak_bytes for plan in plain]
    verify([plan.instructions for plan in to_fill], to_fill[0].stage_ranks, len(to_fill[0].micro_batches))
    kinds = [[type(i) for i in plan.instructions] for plan in to_fill]
    assert all(BackwardWeight in rank for rank in kinds)
    assert to_fill[0].instructions != plain[0].instructions


def test_the_promised_makespan_and_bubble_are_those_of_ranks_that_fill() -> None:
    step_plan = PLANNER.plan(SAMPLES)
    costs = PLANNER.costs.evaluate(step_plan.batch.replicas[0].micro_batches)
    ran = simulate_filling(with_room_to_fill(step_plan.schedules[0], costs), costs)
    promised = plans_of(True)[0].prediction
    assert promised.makespan_ns == max(end for rank in ran for _, _, end in rank)
    busy_ns = sum(end - start for rank in ran for _, start, end in rank)
    assert promised.bubble_ratio == pytest.approx(1 - busy_ns / (NUM_STAGES * promised.makespan_ns))
    assert plans_of(False)[0].prediction.makespan_ns == step_plan.predictions[0].makespan_ns


def operation(kind: type[Send] | type[Recv], micro_batch: int, peer: int) -> Any:
    return kind(Buffer("activation", 0, micro_batch), peer, 0, (TensorSpec((1,)),))


def test_a_watched_transfer_has_arrived_once_its_other_side_was_posted_and_not_before() -> None:
    hub = InlineHub(timeout_s=LIMIT_S)
    sender, receiver = WatchedTransport(hub.transport(0)), WatchedTransport(hub.transport(1))
    first, second = receiver.recv(operation(Recv, 0, 0)), receiver.recv(operation(Recv, 1, 0))
    assert not receiver.arrived(first)
    sent = sender.send(operation(Send, 0, 1), ("zero",))
    assert first.wait() == ("zero",)
    assert receiver.arrived(first)
    assert not receiver.arrived(second)
    assert sent.wait() == ()
    assert sender.arrived(sent)
    sender.send(operation(Send, 1, 1), ("one",))
    assert second.wait() == ("one",)
    sender.close()
    receiver.close()


def test_a_transfer_that_nobody_meets_ends_with_the_inner_transport_s_own_error_and_so_do_those_behind_it() -> None:
    receiver = WatchedTransport(InlineHub(timeout_s=0.1).transport(1))
    first, second = receiver.recv(operation(Recv, 0, 0)), receiver.recv(operation(Recv, 1, 0))
    for pending in (second, first):
        with pytest.raises(ExecutionError, match="waited for rank 0 to send the activation of micro-batch 0"):
            pending.wait()
        assert receiver.arrived(pending)
    receiver.close()


def test_only_its_own_transfers_can_be_asked_about() -> None:
    hub = InlineHub(timeout_s=0.1)
    watched = WatchedTransport(hub.transport(0))
    other = hub.transport(1).recv(operation(Recv, 0, 0))
    with pytest.raises(ExecutionError, match="give the executor the WatchedTransport"):
        watched.arrived(other)


class DeviceWork:
    """A transfer on a device: done once the work before it and `late` rounds of draining are."""

    def __init__(self, late: int) -> None:
        self.late = late

    def is_completed(self) -> bool:
        return self.late <= 0

    def wait(self, limit: object) -> None:
        pass


def pending_of(works: list[DeviceWork], instruction: Recv) -> _TorchPending:
    me = Coordinates(tp_rank=0, pp_rank=0, dp_rank=0)
    return _TorchPending(works, (), ("it",), _Transfer(me, "send", instruction, timedelta(seconds=1)))


class DeviceTransport:
    """Hands out transfers as TorchP2PTransport does over NCCL, where waiting is queued and blocks nobody."""

    def __init__(self, *late: int) -> None:
        self.works = [DeviceWork(n) for n in late]
        self.num_drained = 0

    def recv(self, instruction: Recv) -> Pending:
        return pending_of(self.works, instruction)

    def send(self, instruction: Send, tensors: Any) -> Pending:
        return self.recv(Recv(instruction.buffer, instruction.peer, instruction.channel, instruction.specs))

    def close(self) -> None: ...

    def drain(self) -> None:
        """All that this rank has queued is done, and with it one step of what it waits for."""
        self.num_drained += 1
        for work in self.works:
            work.late -= 1


@pytest.mark.parametrize(("late", "asks"), [((0, 0), 0), ((1, 0), 1), ((1, 1), 1)])
def test_on_a_device_a_transfer_is_late_only_if_it_has_not_ended_when_the_work_before_the_question_has(
    late: tuple[int, int], asks: int
) -> None:
    inner = DeviceTransport(*late)
    watched = WatchedTransport(inner, drain=inner.drain)
    pending = watched.recv(operation(Recv, 0, 0))
    assert watched.arrived(pending)
    assert inner.num_drained == asks
    assert pending.wait() == ("it",)


def test_on_a_device_a_transfer_of_which_a_part_is_missing_has_not_arrived_after_draining() -> None:
    inner = DeviceTransport(0, 2)
    watched = WatchedTransport(inner, drain=inner.drain)
    pending = watched.send(operation(Send, 0, 1), ())
    assert not watched.arrived(pending)
    assert watched.arrived(pending)
    assert inner.num_drained == 2


def test_a_device_s_transfers_are_asked_for_by_the_rank_s_own_thread() -> None:
    """A wait of NCCL's puts itself into the queue of the thread that calls it: no other thread may."""
    before = threading.active_count()
    watched = WatchedTransport(DeviceTransport(1, 1), drain=lambda: None)
    pending = watched.recv(operation(Recv, 0, 0))
    assert not watched.arrived(pending)
    assert threading.active_count() == before
    watched.close()


@pytest.mark.parametrize("late", [(0, 0), (0, 1), (1, 0)])
def test_a_transfer_over_torch_is_completed_when_all_its_parts_are(late: tuple[int, ...]) -> None:
    pending = pending_of([DeviceWork(n) for n in late], operation(Recv, 0, 0))
    assert pending.is_completed() == (not any(late))


def test_draining_goes_with_transfers_that_a_device_can_be_asked_about() -> None:
    watched = WatchedTransport(InlineHub(timeout_s=0.1).transport(1), drain=lambda: None)
    with pytest.raises(ExecutionError, match="give drain with a TorchP2PTransport only"):
        watched.recv(operation(Recv, 0, 0))
