"""A head in parts, beside one whole head: the same losses and gradients, whatever is in which part."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator
from dynapipe_ext.executor.stages.chunk_runner import PlainAccumulator
from dynapipe_ext.executor.stages.sliced_head import Head
from dynapipe_ext.executor.stages.spread_head import VocabularyPart, head_part, spread_loss_sum, spread_losses
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.transport.inline import InlineHub, InlineReductions
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S

HIDDEN = 5


def whole_losses(x: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    """By torch's own operators, of ids alone."""
    logits = (x @ head.weight.t() + (0 if head.bias is None else head.bias)) * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits[..., : head.num_ids]
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)


def losses_in_parts(
    x: torch.Tensor, labels: torch.Tensor, whole: Head, order: list[int], slice_len: int | None
) -> torch.Tensor:
    """Parts in `order`; each message is made of leaves, as stages make theirs, so that backwards cross by hand."""
    assert whole.num_ids is not None
    size, links, received = len(whole.weight) // len(order), [], (x,)
    for number in order:
        rows = slice(number * size, (number + 1) * size)
        head = Head(
            weight=whole.weight[rows],
            bias=None if whole.bias is None else whole.bias[rows],
            scale=whole.scale,
            softcap=whole.softcap,
            first_id=number * size,
            num_ids=whole.num_ids - number * size,
            is_part=True,
        )
        inputs = tuple(one.detach().requires_grad_() for one in received) if links else received
        sent = head_part(inputs[0], inputs[1:], labels, head, slice_len=slice_len)
        links.append((inputs, sent))
        received = sent
    return _BackThrough.apply(spread_losses(received, labels), links, x)  # type: ignore[no-untyped-call]


class _BackThrough(torch.autograd.Function):
    """Losses of a chain of messages, whose backward goes from message to message."""

    @staticmethod
    def forward(ctx, losses, links, x):
        ctx.links, ctx.losses = links, losses
        return losses.detach().clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def backwards(losses: torch.Tensor, weights: torch.Tensor) -> None:
    """The last part's by autograd, those before by the gradients of their messages."""
    node = losses.grad_fn
    (losses * weights).sum().backward()
    for (inputs, _), (_, sent) in zip(node.links[:0:-1], node.links[-2::-1], strict=True):
        torch.autograd.backward(sent, [one.grad for one in inputs])


@settings(deadline=None, max_examples=60)
@given(
    num_positions=st.integers(0, 13),
    num_parts=st.sampled_from([1, 2, 4]),
    is_reversed=st.booleans(),
    slice_len=st.sampled_from([None, 1, 5, 99]),
    softcap=st.sampled_from([0.0, 2.0]),
    has_bias=st.booleans(),
    num_ids=st.sampled_from([12, 11, 3, 1]),  # of 12 rows: with 3 of 4 parts all are padding
    label_range=st.sampled_from([(0, 12), (0, 1), (10, 12)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_losses_and_gradients_are_those_of_one_whole_head(
    num_positions, num_parts, is_reversed, slice_len, softcap, has_bias, num_ids, label_range, dtype
):
    torch.manual_seed(num_positions)
    sizes = (num_positions, HIDDEN), (12, HIDDEN), (12,)
    given_values = [torch.randn(size, dtype=torch.float64) for size in sizes]
    labels = torch.randint(*label_range, (num_positions,)).clamp(max=num_ids - 1)
    if num_positions > 2:
        labels[1] = -100
    weights = torch.rand(num_positions, dtype=torch.float64)
    results = []
    for kind in (torch.float64, dtype):
        leaves = [one.clone().to(kind).requires_grad_() for one in given_values]
        bias = leaves[2] if has_bias else None
        head = Head(weight=leaves[1], bias=bias, scale=0.5, softcap=softcap, num_ids=num_ids)
        if results:
            order = list(range(num_parts))[:: -1 if is_reversed else 1]
            losses = losses_in_parts(leaves[0], labels, head, order, slice_len)
            backwards(losses, weights.to(kind))
        else:
            losses = whole_losses(leaves[0], labels, head)
            (losses * weights).sum().backward()
        results.append([losses.detach(), *(leaf.grad for leaf in leaves[: 2 + has_bias])])
    near = 1e-12 if dtype == torch.float64 else 1e-6
    for expected, found in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)


def test_hidden_states_go_on_as_they_came_and_a_message_has_the_forms_that_plans_say():
    x, labels = torch.randn(2, 3, HIDDEN).bfloat16(), torch.randint(0, 8, (2, 3))
    sent, *numbers = head_part(x, (), labels, Head(weight=torch.randn(4, HIDDEN).bfloat16(), is_part=True))
    assert sent is x
    assert [(one.shape, one.dtype) for one in numbers] == [(labels.shape, torch.float32)] * 2


VOCAB = 37  # three parts of 13 rows, the last two of which are padding
SAMPLES = [SampleLength(i, n, target=n) for i, n in enumerate((3, 9, 14, 6, 11, 2))]


class Body(torch.nn.Module):
    """A stage of layers; the first embeds, the last ends in its part of the head."""

    def __init__(self, number: int, part: VocabularyPart | None) -> None:
        super().__init__()
        torch.manual_seed(100 + number)
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN) if number == 0 else torch.nn.Identity()
        self.layer, self.part = torch.nn.Linear(HIDDEN, HIDDEN), part

    def forward(self, x, *, batch):
        x = self.layer(self.embedding(x)).tanh()
        return x if self.part is None else self.part(x, batch=batch)


def part_of(number: int, pp: int) -> VocabularyPart:
    torch.manual_seed(7)
    whole, rows = torch.randn(39, HIDDEN), -(-VOCAB // pp)
    part = VocabularyPart(HIDDEN, VOCAB, part=number, num_parts=pp)
    with torch.no_grad():
        part.linear.weight.copy_(torch.cat([whole, torch.zeros(pp * rows, HIDDEN)])[number * rows :][:rows])
    return part


def batches_of(plan) -> list[dict[str, torch.Tensor]]:
    made = []
    for m in plan.micro_batches:
        generator = torch.Generator().manual_seed(m.samples[0].index)
        tokens = torch.randint(0, VOCAB, (m.rows, m.encoder_len), generator=generator)
        labels = torch.randint(0, VOCAB, (m.rows, m.encoder_len), generator=generator)
        made.append({"tokens": tokens, "labels": labels, "loss_weights": torch.rand(labels.shape, generator=generator)})
    return made


def modules_of(topology: Topology) -> dict[int, torch.nn.Module]:
    """A new module for each stage."""
    modules: dict[int, torch.nn.Module] = {}
    heads = topology.head_stages
    for stage in range(topology.num_stages):
        part = part_of(topology.vocabulary_part(stage), topology.pp) if stage in heads else None
        modules[stage] = part if part is not None and stage > heads.start else Body(stage, part)
    return modules


def learned(topology: Topology, plans, accumulator=PlainAccumulator):
    """The step's loss on every rank, and all gradients by stage and name; ranks are threads."""
    hub, parallel, results = InlineHub(), InlineReductions(topology), {}
    modules = modules_of(topology)

    def rank(number: int) -> None:
        own = {stage: modules[stage] for stage in topology.stages_of(number)}
        stage = TorchStage(own, spread_loss_sum, accumulator=accumulator, parallel=parallel)
        plan = plans[number]
        results[number] = PipelineExecutor(stage, hub.transport(number)).execute(plan, batches_of(plan))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(topology.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    named = ((stage, *named) for stage, module in modules.items() for named in module.named_parameters())
    return [results[n] for n in range(topology.pp)], {(stage, name): weight.grad for stage, name, weight in named}


def expected_of(plan, num_layers: int, pp: int):
    """One process with one whole head: the step's loss, and gradients; the head's are of whole rows."""
    bodies, whole = [Body(number, None) for number in range(num_layers)], torch.nn.Linear(HIDDEN, 39, bias=False)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([part_of(number, pp).linear.weight for number in range(pp)])[:39])
    total = torch.zeros(())
    for batch in batches_of(plan):
        x = batch["tokens"]
        for body in bodies:
            x = body(x, batch=batch)
        losses = whole_losses(x, batch["labels"], Head(weight=whole.weight, num_ids=VOCAB))
        total = total + (losses * batch["loss_weights"]).sum() / plan.loss_divisor
    total.backward()
    return float(total.detach()), bodies, whole.weight.grad


def plans_of(topology: Topology, **options):
    form = ActivationFormat(HIDDEN, order="bsh", first_head_stage=topology.head_stages.start)
    costs = TokenCosts(topology.num_stages, overhead_ns=10**5)
    options |= {"layout": "padded", "max_tokens": 24}
    planner = Planner(topology, costs, 10**9, format=form, **options)
    return prove_step(planner, SAMPLES, step=0).plans[0]


@pytest.mark.parametrize(
    ("placement", "split", "recompute"),
    [((), False, "none"), ((), True, "none"), ((), True, "head"), ((0, 1, 2, 2, 1, 0), True, "stage")],
)
def test_modules_of_plain_torch_learn_in_parts_what_one_process_learns(placement, split, recompute, monkeypatch):
    monkeypatch.setattr(chunk_runner, "HEAD_SLICE", 4)
    topology = split_vocabulary(Topology(pp=3, placement=placement), "head")
    plans = plans_of(topology, split_backward=split, recompute=recompute)
    losses, gradients = learned(topology, plans)
    loss, bodies, head_grad = expected_of(plans[0], len(topology.layer_stages), 3)
    assert losses == pytest.approx([loss] * 3, rel=1e-6)
    for number, body in enumerate(bodies):
        for name, weight in body.named_parameters():
            torch.testing.assert_close(gradients[number, name], weight.grad, rtol=1e-5, atol=1e-6)
    rows = {topology.vocabulary_part(s): s for s in topology.head_stages}
    names = [
        "part.linear.weight" if s == topology.head_stages.start else "linear.weight" for _, s in sorted(rows.items())
    ]
    found = torch.cat([gradients[rows[number], name] for number, name in enumerate(names)])
    torch.testing.assert_close(found, head_grad, rtol=1e-5, atol=1e-6)
    assert not found[VOCAB:].any()


def test_exact_sums_of_parts_have_the_same_bits_in_slices_or_not_whole_or_split(monkeypatch):
    monkeypatch.setattr(chunk_runner, "HEAD_SLICE", 4)
    topology = split_vocabulary(Topology(pp=2), "head")
    results = []
    for split, recompute in ((False, "none"), (True, "none"), (True, "head")):
        results.append(
            learned(topology, plans_of(topology, split_backward=split, recompute=recompute), ExactAccumulator)
        )
    for losses, gradients in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(gradients[name], gradient) for name, gradient in results[0][1].items())


def test_a_part_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"part 3 of a vocabulary in 3 parts: give one of 0\.\.2"):
        VocabularyPart(HIDDEN, VOCAB, part=3, num_parts=3)
