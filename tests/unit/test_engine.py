"""The engine: stages of one rank hand over locally, forwards alone evaluate, an error says where it happened."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import Buffer, Recv, Send
from dynapipe_ext.executor.measuring.profiler_ranges import profiler_ranges
from dynapipe_ext.executor.protocols import Pending
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.transport.inline import InlineHub, InlineReductions, InlineTransport
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S
from tests.support.lowered import forwards_of

HIDDEN, VOCAB = 8, 17
SAMPLES = [SampleLength(i, n, target=n) for i, n in enumerate((3, 11, 4, 5, 9, 2, 7))]
V, INTERLEAVED = Topology(pp=2, placement=(0, 1, 1, 0)), Topology(pp=2, placement=(0, 1, 0, 1))


def plans_of(topology: Topology, **settings):
    costs, form = TokenCosts(topology.num_stages), ActivationFormat(HIDDEN, order="bsh")
    planner = Planner(topology, costs, 10**9, pad_multiple=1, format=form, effort=200, **settings)
    return prove_step(planner, SAMPLES, step=0).plans[0]


def parts_of(num_stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    middle = [torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()) for _ in range(num_stages - 2)]
    return [torch.nn.Embedding(VOCAB, HIDDEN), *middle, torch.nn.Linear(HIDDEN, VOCAB)]


def batch_of(micro_batch) -> dict[str, torch.Tensor]:
    shape = (micro_batch.rows, micro_batch.encoder_len)
    tokens, weights = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for row, sample in enumerate(micro_batch.samples):
        tokens[row, : sample.encoder] = (torch.arange(sample.encoder) * 5 + sample.index * 3) % VOCAB
        weights[row, : sample.encoder] = 1.0
    return {"tokens": tokens, "labels": (tokens + 1) % VOCAB, "loss_weights": weights}


def loss_sum(logits: torch.Tensor, batch) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["loss_weights"].flatten()).sum()


def run(topology: Topology, plans, parts, **options) -> tuple[list[float], list[TorchStage]]:
    """Every pipeline rank as a thread; what each returned, and its stage."""
    hub, parallel, losses = InlineHub(timeout_s=LIMIT_S), InlineReductions(topology, timeout_s=LIMIT_S), {}
    stages = [
        TorchStage([parts[s] for s in topology.stages_of(rank)], loss_sum, parallel=parallel)
        for rank in range(topology.pp)
    ]

    def rank(pp_rank: int) -> None:
        executor = PipelineExecutor(stages[pp_rank], hub.transport(pp_rank), **options)
        plan = plans[pp_rank]
        losses[pp_rank] = executor.execute(plan, [batch_of(m) for m in plan.micro_batches])

    threads = [threading.Thread(target=rank, args=(p,)) for p in range(topology.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [losses[p] for p in range(topology.pp)], stages


def whole(parts) -> tuple[float, list[torch.Tensor]]:
    """The oracle: one sample at a time through all parts."""
    model = torch.nn.Sequential(*parts)
    model.zero_grad(set_to_none=True)
    loss = torch.zeros(())
    for sample in SAMPLES:
        tokens = (torch.arange(sample.encoder) * 5 + sample.index * 3)[None] % VOCAB
        batch = {"labels": (tokens + 1) % VOCAB, "loss_weights": torch.ones_like(tokens)}
        loss = loss + loss_sum(model(tokens), batch) / sum(s.target for s in SAMPLES)
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("topology", [V, INTERLEAVED], ids=["V", "interleaved"])
def test_stages_of_one_rank_hand_over_without_a_message_and_sum_right_gradients(topology, split):
    plans, parts = plans_of(topology, split_backward=split), parts_of(4)
    ranks = topology.stage_ranks
    sent = {i.buffer for plan in plans for i in plan.instructions if isinstance(i, Send)}
    crossing = {
        buffer
        for m in range(len(plans[0].micro_batches))
        for s in range(3)
        if ranks[s] != ranks[s + 1]
        for buffer in (Buffer("activation", s, m), Buffer("gradient", s + 1, m))
    }
    assert sent == crossing
    loss, gradients = whole(parts)
    losses, stages = run(topology, plans, parts)
    assert losses == [pytest.approx(loss, rel=1e-6)] * 2
    for parameter, expected in zip(torch.nn.Sequential(*parts).parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)
    assert [stage.held_bytes() for stage in stages] == [0, 0]


@pytest.mark.parametrize("topology", [Topology(), Topology(pp=2), V], ids=["one rank", "linear", "V"])
def test_forwards_alone_give_the_loss_hold_nothing_and_leave_gradients_as_they_were(topology):
    parts = parts_of(max(2, topology.num_stages))
    if topology.num_stages == 1:
        parts = [torch.nn.Sequential(*parts)]
    loss, _ = whole(parts)
    before = [p.grad.clone() for part in parts for p in part.parameters()]
    plans, held = [forwards_of(plan) for plan in plans_of(topology)], []

    class Spans:
        def record(self, span) -> None:
            held.append((span.label, span.num_bytes))

    losses, _ = run(topology, plans, parts, recorder=Spans())
    assert losses == [pytest.approx(loss, rel=1e-6)] * topology.pp
    assert len(held) == topology.num_stages * len(plans[0].micro_batches)
    assert all("F" in label and num_bytes == 0 for label, num_bytes in held)
    for parameter, gradient in zip((p for part in parts for p in part.parameters()), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_rank_with_another_number_of_chunks_than_the_plan_has_stages_is_refused(num_chunks):
    stage = TorchStage([torch.nn.Linear(HIDDEN, HIDDEN)] * num_chunks, loss_sum, parallel=InlineReductions(V))
    with pytest.raises(ConfigError, match=rf"stages \(0, 3\) of the plan but was given {num_chunks} model chunks"):
        stage.start_step(plans_of(V)[0])


class Failing:
    """A Stage or Transport of which one call fails."""

    def __init__(self, inner, method: str) -> None:
        self._inner, self._method = inner, method

    def __getattr__(self, name: str):
        if name == self._method:
            return self._fail
        return getattr(self._inner, name)

    def _fail(self, *_) -> None:
        raise RuntimeError("no room")


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("load", "Load of micro-batch 0"),
        ("forward", "0F0"),
        ("backward_input", "0I0"),
        ("backward_weight", "0W0"),
        ("recv", "Recv of the gradient of micro-batch 0 from stage 1"),
        ("send", "Send of the activation of micro-batch 0 from stage 0"),
    ],
)
def test_an_error_out_of_any_instruction_says_where_on_what_and_with_how_many_bytes(method, says):
    plan = plans_of(Topology(pp=2), split_backward=True)[0]
    stage = TorchStage(parts_of(2)[0], loss_sum, parallel=InlineReductions(Topology(pp=2)))
    hub = InlineHub(timeout_s=5)
    executor = PipelineExecutor(Failing(stage, method), Failing(hub.transport(0), method), rank=6)
    peer = Peer(hub.transport(1), plan)
    with pytest.raises(RuntimeError, match="no room") as caught:
        executor.execute(plan, [batch_of(m) for m in plan.micro_batches])
    peer.join()
    (note,) = caught.value.__notes__
    first = plan.micro_batches[0]
    assert note.startswith(f"on rank 6 (pipeline rank 0 of replica 0), step 0, {says}:")
    assert f"micro-batch 0 of {first.rows} rows x {first.encoder_len} tokens, padded, recomputation none" in note
    assert note.endswith(f"predicted peak of this rank {plan.prediction.peak_bytes[0]} bytes")


class Peer(threading.Thread):
    """Takes what pipeline rank 0 sends and sends zeros for what it receives, as long as it comes."""

    def __init__(self, transport, plan) -> None:
        super().__init__(daemon=True)
        self._transport, self._plan = transport, plan
        self.start()

    def run(self) -> None:
        for i in self._plan.instructions:
            if isinstance(i, Send):
                self._transport.recv(Recv(i.buffer, 0, i.channel, i.specs))
            elif isinstance(i, Recv):
                zeros = tuple(torch.zeros(spec.shape) for spec in i.specs)
                self._transport.send(Send(i.buffer, 0, i.channel, i.specs), zeros)


@pytest.mark.parametrize("method", ["start_step", "forward", "recv", "finish_step"])
def test_after_a_step_that_failed_no_executor_goes_on_with_what_was_posted(method):
    plan = plans_of(Topology(pp=2))[0]
    hub, batches = InlineHub(timeout_s=5), [batch_of(m) for m in plan.micro_batches]
    stage = TorchStage(parts_of(2)[0], loss_sum, parallel=InlineReductions(Topology(pp=2)))
    executor = PipelineExecutor(Failing(stage, method), hub.transport(0))
    if method == "recv":
        executor = PipelineExecutor(stage, FailingTransport(hub))
    Peer(hub.transport(1), plan)
    with pytest.raises(RuntimeError, match="no room"):
        executor.execute(plan, batches)
    for again in (executor, PipelineExecutor(stage, hub.transport(0)), PipelineExecutor(stage, hub.transport(1))):
        with pytest.raises(ExecutionError, match=r"^step 0 \(RuntimeError\) failed, .*: make a new ParallelContext"):
            again.execute(plan, batches)


class FailingTransport(InlineTransport):
    def __init__(self, hub: InlineHub) -> None:
        super().__init__(hub, 0)

    def recv(self, instruction: Recv) -> Pending:
        raise RuntimeError("no room")


def test_ranges_surround_every_action_and_no_clock_is_read_where_nobody_records():
    (plan,), entered = plans_of(Topology(placement=(0, 0)), split_backward=True), []

    @contextmanager
    def ranges(label: str):
        entered.append(label)
        with profiler_ranges(label):
            yield

    def clock() -> float:
        raise AssertionError("the clock was read")

    executor = PipelineExecutor(TorchStage(parts_of(2), loss_sum), InlineHub().transport(0), ranges=ranges, clock=clock)
    with torch.profiler.profile() as profile:
        executor.execute(plan, [batch_of(m) for m in plan.micro_batches])
    actions = [str(i) for i in plan.instructions if str(i)[0] in "01"]
    assert entered == actions
    assert set(actions) <= {event.key for event in profile.key_averages()}
