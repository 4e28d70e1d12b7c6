"""What a TorchStage takes, and what it refuses by name instead of training wrongly."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.replaced_forward import replace_forward
from dynapipe_ext.executor.stages.split_linear import hand_over_each_use, make_linears_splittable, pass_hooks_by
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.transport.inline import InlineHub, InlineReductions
from dynapipe_ext.schedules.planner import Planner

HIDDEN, VOCAB = 4, 9
SAMPLES = [SampleLength(i, n, target=n) for i, n in enumerate((3, 6, 2))]


def plan_of(pp: int = 1, samples=SAMPLES, layout="padded", **options):
    topology = Topology(pp=pp)
    costs, form = TokenCosts(topology.num_stages, overhead_ns=10**6), ActivationFormat(HIDDEN, order="bsh")
    planner = Planner(topology, costs, 10**9, pad_multiple=1, format=form, layout=layout, **options)
    return prove_step(planner, samples, step=0).plans[0][0]


def batch_of(micro_batch) -> dict[str, torch.Tensor]:
    tokens = torch.arange(micro_batch.rows * micro_batch.encoder_len).reshape(micro_batch.rows, -1) % VOCAB
    return {"tokens": tokens, "labels": (tokens + 1) % VOCAB, "loss_weights": torch.ones(tokens.shape)}


def losses_of(logits: torch.Tensor, batch) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


def loss_sum(logits: torch.Tensor, batch) -> torch.Tensor:
    return (losses_of(logits, batch) * batch["loss_weights"]).sum()


def replaced(model: torch.nn.Sequential) -> TorchStage:
    stage = TorchStage(model, loss_sum)
    model[1].weight = torch.nn.Parameter(model[1].weight.detach().clone())
    return stage


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB))


def run(stage: TorchStage, plan=None, batches=None) -> float:
    plan = plan or plan_of()
    batches = batches or [batch_of(m) for m in plan.micro_batches]
    return PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches)


class TakesBatch(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, batch):
        assert "labels" in batch
        return self.inner(x)


class TakesBatchByName(TakesBatch):
    def forward(self, x, mask=None, *, batch):
        assert mask is None
        return super().forward(x, batch)


class TakesTwo(TakesBatch):
    def forward(self, hidden, rows):
        return super().forward(hidden, rows)


WAYS = {
    "a module": lambda model: (model, {}),
    "a list": lambda model: ([model], {}),
    "a mapping": lambda model: ({0: model}, {}),
    "a function": lambda model: ({0: lambda x, batch: model(x)}, {"parameters": model.parameters()}),
    "a module that takes the batch": lambda model: (TakesBatch(model), {}),
    "a module that takes the batch by name": lambda model: (TakesBatchByName(model), {}),
    "a module of two arguments": lambda model: (TakesTwo(model), {}),
}


def test_every_way_to_give_the_only_stage_trains_the_same():
    found = []
    for way in WAYS.values():
        model = model_of()
        modules, options = way(model)
        loss = run(TorchStage(modules, loss_sum, **options))
        found.append((loss, [p.grad for p in model.parameters()]))
    for loss, gradients in found[1:]:
        assert loss == found[0][0] > 0
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][1], strict=True))


class HeldBytes(list):
    def record(self, span) -> None:
        self.append(span.num_bytes)


@pytest.mark.parametrize("split", [False, True])
def test_a_stage_that_is_recomputed_draws_and_learns_the_same_and_holds_its_input_alone(split):
    samples, found = [SampleLength(i, 3, target=3) for i in range(8)], []
    for recompute in ("none", "stage"):
        model, held = torch.nn.Sequential(*model_of(), torch.nn.Dropout(0.5)), HeldBytes()
        plan = plan_of(samples=samples, recompute=recompute, split_backward=split, max_tokens=6)
        assert len(plan.micro_batches) > 3
        executor = PipelineExecutor(TorchStage(model, loss_sum), InlineHub().transport(0), recorder=held)
        loss = executor.execute(plan, [batch_of(m) for m in plan.micro_batches])
        found.append((loss, [p.grad for p in model.parameters()], max(held)))
    (loss, gradients, most), (again, same, none) = found
    assert loss == again
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert most > none == 0, "tokens, which the first stage reads, are no activations"


class Within(torch.nn.Sequential):
    def __init__(self, inner: torch.nn.Module, context) -> None:
        super().__init__(inner)
        self.context = context

    def forward(self, x):
        with self.context:
            return super().forward(x)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_under_autocast_losses_and_gradients_have_the_bits_of_a_plain_loop(split, outside):
    """Autocast within the module or around the step; W runs where it may be off."""
    plan, within = plan_of(split_backward=split), torch.autocast("cpu", torch.bfloat16)
    batches, model, plain = [batch_of(m) for m in plan.micro_batches], model_of(), model_of()
    module, run_as_asked, train = Within(model, within), run, Within(plain, within)
    if outside:
        module, run_as_asked, train = model, within(run), plain
    loss = run_as_asked(TorchStage(module, loss_sum), plan, batches)
    with within if outside else nullcontext():
        expected = sum(loss_sum(train(batch["tokens"]), batch) / plan.loss_divisor for batch in batches)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad.dtype == other.grad.dtype
        assert torch.equal(own.grad, other.grad)


def send(modules, model: torch.nn.Module) -> None:
    """The first of two stages runs a forward."""
    plan, reductions = plan_of(pp=2), InlineReductions(Topology(pp=2))
    stage = TorchStage(modules, loss_sum, parameters=model.parameters(), parallel=reductions)
    stage.start_step(plan)
    stage.load(0, batch_of(plan.micro_batches[0]))
    stage.forward(0, 0, ())


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    """By DistributedDataParallel, whose making needs ranks."""
    ddp = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    ddp.module = model
    return ddp


def unfrozen(model: torch.nn.Module) -> TorchStage:
    stage = TorchStage(model[1].requires_grad_(False) and model, loss_sum)
    model[1].requires_grad_(True)
    return stage


class Normalised(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def normalised(model: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(model[0], Normalised(HIDDEN), model[1])


def nothing(*_) -> None: ...


def mean_of_targets(logits: torch.Tensor, batch) -> torch.Tensor:
    return loss_sum(logits, batch) / batch["loss_weights"].sum()


PARTLY_TARGETS = [batch_of(m) for m in plan_of().micro_batches]
PARTLY_TARGETS[-1]["loss_weights"][0, 0] = 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda m: TorchStage({0: lambda x, batch: m(x)}, loss_sum), r"'<lambda>' is no torch module.*parameters="),
        (lambda m: TorchStage(m, {"lm": 1}), "the loss is a dict but must be a function"),
        (
            lambda m: TorchStage(m, lambda logits: logits.sum()),
            r"the loss takes \(logits\) but must be a",
        ),
        (
            lambda m: PipelineExecutor(None, None).execute([], plan_of()),
            r"plan is of type list: call execute",
        ),
        (lambda m: ActivationFormat(64, order="hsb"), "order is 'hsb': choose from sbh, bsh"),
        (lambda m: ActivationFormat(64, "float31"), "dtype is 'float31': choose from float32, bfloat16"),
        (lambda m: ActivationFormat(0), "hidden_size is 0 but must be an integer of at least 1"),
        (lambda m: TorchStage([], loss_sum), "list but takes a module, a list of this rank's modules"),
        (lambda m: TorchStage(3, loss_sum), "int but takes a module"),
        (lambda m: run(TorchStage(m, losses_of)), r"loss is a tensor of shape \(\d+, \d+\) but must be a scalar"),
        (lambda m: run(TorchStage(m, lambda logits, batch: 1.0)), "loss is float but must be a scalar tensor"),
        (lambda m: run(TorchStage(m, lambda x, batch: loss_sum(x.detach(), batch))), "stage 0 returns has no gradient"),
        (lambda m: run(TorchStage({1: m}, loss_sum)), r"stages \(0,\) of the plan but has modules for \(1,\)"),
        (
            lambda m: TorchStage(m, loss_sum).start_step(plan_of(pp=2)),
            r"pp 2 x dp 1 .*give TorchStage parallel=ParallelContext",
        ),
        (
            lambda m: run(TorchStage(m, loss_sum), replace(plan_of(), num_micro_batches=(3, 3))),
            r"pp 1 x dp 2 .*give TorchStage parallel=ParallelContext",
        ),
        (
            lambda m: TorchStage(m, loss_sum, parallel=InlineReductions(Topology(pp=3))).start_step(plan_of(pp=2)),
            "the plan is for pp 2 x dp 1 but parallel= is for pp 3 x dp 1",
        ),
        (lambda m: InlineReductions(Topology(pp=2, dp=2)), "dp 2 must be 1"),
        (
            lambda m: TorchStage(wrapped(m), loss_sum),
            "wrapped in DistributedDataParallel, whose collectives run",
        ),
        (lambda m: send({0: lambda x, batch: {"hidden": m(x)}}, m), "what stage 0 returns has dict in it"),
        (
            lambda m: send({0: lambda x, batch: (m(x), None)}, m),
            "returns has NoneType in it but goes to the next stage",
        ),
        (lambda m: run(replaced(m)), r"the weight 1\.weight trains in step 0, but the stage does not know it"),
        (lambda m: run(TorchStage(m, loss_sum, parameters=list(m[1].parameters()))), r"the weight 0\.weight trains in"),
        (lambda m: run(unfrozen(m)), "2 weights were frozen or thawed between the making of the stage and step 0"),
        (
            lambda m: run(
                TorchStage(m, loss_sum, parallel=SimpleNamespace(topology=Topology(tp=2), sum_over_replicas=nothing))
            ),
            r"tp is 2 but torch modules are not cut over tensor parallel ranks",
        ),
        (
            lambda m: torch.inference_mode()(run)(TorchStage(m, loss_sum)),
            r"step 0 has backwards, but torch\.inference_mode\(\) was on .*planner\.for_forwards\(\)",
        ),
        (
            lambda _: run(TorchStage(torch.inference_mode()(model_of)(), loss_sum)),
            r"inference_mode\(\) was on where weights were made",
        ),
        (lambda m: run(TorchStage(normalised(m), loss_sum)), "Normalised would take its mean and variance of each"),
    ],
)
def test_what_would_train_wrongly_is_refused_by_name(make, says):
    with pytest.raises(ConfigError, match=says):
        make(model_of())


def test_a_batch_norm_that_is_frozen_trains_the_others():
    model = normalised(model_of())
    model[1].eval()
    run(TorchStage(model, loss_sum))
    assert not model[1].num_batches_tracked


@pytest.mark.parametrize("pp", [1, 2])
def test_rows_of_several_documents_are_refused_unless_attention_is_said_to_restart(pp):
    plan, parallel = plan_of(pp, layout="packed"), InlineReductions(Topology(pp=pp))
    assert [len(m.samples) for m in plan.micro_batches] == [3]
    with pytest.raises(ConfigError, match=r"packs 3 documents into a row.*give TorchStage restarts_attention=True"):
        TorchStage(model_of(), loss_sum, parallel=parallel).start_step(plan)
    TorchStage(model_of(), loss_sum, parallel=parallel, restarts_attention=True).start_step(plan)


def test_rows_of_one_document_and_rows_attended_to_as_a_whole_need_no_word():
    alone = plan_of(samples=SAMPLES[:1], layout="packed")
    assert run(TorchStage(model_of(), loss_sum), alone) > 0
    plan = plan_of(layout="packed")
    whole = tuple(replace(m, attention="row") for m in plan.micro_batches)
    assert run(TorchStage(model_of(), loss_sum), replace(plan, micro_batches=whole)) > 0


def test_tokens_of_other_rows_than_planned_are_refused_with_both_shapes():
    plan = plan_of()
    batches = [batch | {"tokens": batch["tokens"][:, 1:]} for batch in map(batch_of, plan.micro_batches)]
    with pytest.raises(DataError, match=r"tokens of micro-batch 0 has shape \(\d, \d\), not \(\d, \d\) as planned"):
        run(TorchStage(model_of(), loss_sum), plan, batches)


def test_labels_of_any_shape_that_the_loss_understands_are_taken():
    def of_flat(logits: torch.Tensor, batch) -> torch.Tensor:
        return loss_sum(logits, {**batch, "labels": batch["labels"].view(logits.shape[:2])})

    plan = plan_of()
    batches = [batch | {"labels": batch["labels"].flatten()} for batch in map(batch_of, plan.micro_batches)]
    assert run(TorchStage(model_of(), of_flat), plan, batches) == run(TorchStage(model_of(), loss_sum), plan)


def test_a_batch_without_tokens_is_refused_with_the_keys_that_it_has():
    plan = plan_of()
    with pytest.raises(DataError, match=r'reads batch\["tokens"\].*\[\'input_ids\', \'labels\'\]'):
        run(TorchStage(model_of(), loss_sum), plan, [{"input_ids": 0, "labels": 0} for _ in plan.micro_batches])


def test_a_frozen_first_stage_sends_its_output_and_needs_no_backward():
    model = model_of().requires_grad_(False)
    stage = TorchStage(model, loss_sum, parallel=InlineReductions(Topology(pp=2)))
    stage.start_step(plan_of(pp=2))
    stage.load(0, batch_of(plan_of(pp=2).micro_batches[0]))
    (output,) = stage.forward(0, 0, ())
    assert stage.backward(0, 0, (torch.ones_like(output),)) == ()
    assert all(p.grad is None for p in model.parameters())


def split_step(model: torch.nn.Module, loss=loss_sum) -> float:
    return run(TorchStage(model, loss), plan_of(split_backward=True))


def test_copies_of_a_model_whose_backwards_were_split_have_weights_of_their_own():
    model, tokens = model_of(), torch.arange(5)[None]
    split_step(model)
    copied, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    before = model(tokens).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for other in (copied, average, torch.load(saved, weights_only=False)):
        assert torch.equal(other(tokens), before)
    assert not torch.equal(model(tokens), before)
    split_step(copied)  # one that is split again


def test_hooks_of_weights_are_called_under_split_backwards_too():
    found = {}
    for split in (False, True):
        model, seen = model_of(), []
        model[1].weight.register_hook(lambda gradient: gradient * 0.5)
        model[1].weight.register_post_accumulate_grad_hook(lambda weight, seen=seen: seen.append(weight.grad is None))
        run(TorchStage(model, loss_sum), plan_of(split_backward=split))
        assert seen
        assert not any(seen)
        found[split] = [parameter.grad for parameter in model.parameters()]
    for whole, split in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(split, whole)


def test_a_layer_whose_forward_someone_replaced_keeps_it():
    model = model_of()
    own = model[1].forward
    model[1].forward = lambda x: 2 * own(x)
    replaced = model[1].forward
    split_step(model)
    assert model[1].forward is replaced


def test_what_follows_a_split_layer_may_be_computed_in_its_place():
    found = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*model_of(), torch.nn.ReLU(inplace=in_place))
        split_step(model)
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_split_layers_compile_into_one_graph():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    x = torch.randn(2, 3, 4)
    expected = model(x)
    make_linears_splittable(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_layers_whose_pass_hooks_by_are_put_off():
    model, seen = model_of(), []
    model[1].weight.register_hook(lambda gradient: seen.append(gradient))
    pass_hooks_by(model[1].weight)
    split_step(model)
    assert seen
    assert all(gradient is None for gradient in seen)


def by_another(module: torch.nn.Module, function) -> None:
    module.forward = lambda ids: function(module, ids)


@pytest.mark.parametrize("put", [replace_forward, by_another])
def test_uses_are_handed_over_by_what_replaced_the_forward_before(put):
    table = torch.nn.Embedding(3, 2)
    put(table, lambda module, ids: 2 * torch.nn.functional.embedding(ids, module.weight))
    hand_over_each_use(table)
    assert torch.equal(table(torch.tensor([1])), 2 * table.weight[1:2])
