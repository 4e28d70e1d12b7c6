"""Stages whose plan has the head in slices of positions learn what whole logits learn."""

from __future__ import annotations

import copy
import json
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dynapipe_ext.batch.micro_batches import slices_head
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator
from dynapipe_ext.executor.stages.deepspeed.stage import refuse_plan
from dynapipe_ext.executor.stages.sliced_head import head_loss_sum
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage, token_loss_sum
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.job.configured import architecture_of, can_slice_head, configured_costs, planned_kinds
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.given_costs import write_costs
from tests.support.preloaded import Preloaded
from tests.support.tiny_models import CONFIGS, one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, assert_same, batches_of, learned, plans_of

SLICE = 5


@pytest.fixture(autouse=True)
def few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_runner, "HEAD_SLICE", SLICE)


@pytest.mark.parametrize(
    ("family", "recompute", "split"),
    [(family, ("head", "head+full", "head+stage")[n % 3], bool(n % 2)) for n, family in enumerate(CONFIGS)],
)
def test_every_family_of_transformers_learns_the_same(family, recompute, split):
    model, place = tiny_model(family).train(), Topology(pp=2)
    loss, gradients = one_by_one(model, SAMPLES)
    losses, found = learned(model, place, plans_of(place, "padded", split=split, recompute=recompute))
    assert losses == pytest.approx([loss] * 2, rel=1e-6)
    assert_same(found, gradients)


def test_exact_sums_have_the_same_bits_whether_a_plan_slices_the_head_or_not():
    model, found = tiny_model("gemma2").train(), []
    for recompute, place in (("none", Topology()), ("head", Topology(pp=2)), ("head+full", Topology())):
        plans = plans_of(place, "packed", split=False, split_policy="packed-balanced", recompute=recompute)
        found.append(learned(model, place, plans, accumulator=ExactAccumulator))
    for losses, gradients in found[1:]:
        assert set(losses) == set(found[0][0])
        assert [name for name, gradient in found[0][1].items() if not torch.equal(gradient, gradients[name])] == []


class Logits:
    """The sizes of what a linear layer of `columns` outputs makes, in forwards and backwards."""

    def __init__(self, columns: int) -> None:
        self.columns, self.most = columns, 0

    def __enter__(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        outer = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                output = function(*args, **(kwargs or {}))
                if isinstance(output, torch.Tensor) and output.dim() and output.shape[-1] == outer.columns:
                    outer.most = max(outer.most, output.numel() // outer.columns)
                return output

        self._mode = Watch()
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)


def step_of(stage, recompute: str):
    (plan,) = plans_of(Topology(), "padded", split=False, recompute=recompute)
    return PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches_of(plan))


@pytest.mark.parametrize("recompute", ["none", "head"])
def test_no_more_logits_than_a_slice_of_them_exist_at_once(recompute):
    model = tiny_model("llama").train()
    vocab = model.config.vocab_size
    model_rows = {weight.shape[-1] for weight in model.parameters()}
    assert vocab not in model_rows
    with Logits(vocab) as logits:
        step_of(TransformersStage(parts_of_model(model)), recompute)
    if recompute == "head":
        # The first forward also makes the logits of one position of each row, which proves what follows the head.
        assert 0 < logits.most <= max(SLICE, len(SAMPLES), model.config.hidden_size)
    else:
        assert logits.most > 4 * SLICE


class Tiny(torch.nn.Module):
    """An embedding, a layer, a head that is left to the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.layer = torch.nn.Embedding(259, 6), torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 259)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens)).tanh()


@pytest.mark.parametrize("recompute", ["none", "head"])
def test_a_loss_of_hidden_states_in_plain_torch_learns_the_same(recompute):
    model, whole = Tiny(), Tiny()

    def loss(x, batch):
        return head_loss_sum(x, model.head.weight, batch, bias=model.head.bias)

    def whole_loss(x, batch):
        losses = torch.nn.functional.cross_entropy(
            whole.head(x).flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return (losses * batch["loss_weights"].flatten()).sum()

    found, expected = step_of(TorchStage(model, loss), recompute), step_of(TorchStage(whole, whole_loss), "none")
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same(*({name: p.grad for name, p in one.named_parameters()} for one in (model, whole)))


def test_a_loss_that_makes_whole_logits_under_a_plan_of_slices_is_refused():
    model = Tiny()

    def loss(x, batch):
        return token_loss_sum(model.head(x), batch)

    with pytest.raises(ConfigError, match=r"recompute 'head'\) but the last stage made whole logits .* head_loss_sum"):
        step_of(TorchStage(model, loss), "head")
    own = tiny_model("llama").train()
    with pytest.raises(ConfigError, match="made whole logits"):
        step_of(TransformersStage(parts_of_model(own), loss=lambda x, batch: token_loss_sum(x, batch)), "head+full")


def test_what_a_model_does_to_its_logits_in_a_way_of_its_own_is_refused():
    model = tiny_model("llama").train()
    forward = model.forward

    def shifted(*arguments, **options):
        output = forward(*arguments, **options)
        return replace(output, logits=output.logits + 1.0)

    model = copy.copy(model)
    model.forward = shifted
    with pytest.raises(ConfigError, match="changes its logits in a way that slices of its head do not know"):
        step_of(TransformersStage(parts_of_model(model)), "head")
    adapted = tiny_model("llama").train()
    adapted.lm_head = torch.nn.Sequential(adapted.lm_head)
    with pytest.raises(ConfigError, match="is a Sequential, which slices do not know"):
        step_of(TransformersStage(parts_of_model(adapted)), "head")
    for unknown in (model, adapted):  # exact sums have a head that no plan can slice whole
        exact = TransformersStage(parts_of_model(unknown), accumulator=ExactAccumulator)
        expected = step_of(TransformersStage(parts_of_model(unknown)), "none")
        assert step_of(exact, "none") == pytest.approx(expected, rel=1e-6)


SETTINGS = """
[run]
steps = 1
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
num_query_groups = 2
ffn_hidden_size = 32
max_seq_len = 4096
[data]
tokenizer = "bytes"
tokens_per_batch = 9000
num_workers = 0
truncate = true
[plan]
layout = "packed"
[job]
timeout_s = 480
"""


CONFIG = TrainConfig().with_values(**tomllib.loads(SETTINGS))
PLANNED = architecture_of(CONFIG, 258).padded()


def test_a_run_of_little_memory_chooses_slices_and_trains_what_one_of_ample_memory_does(
    preloaded: Preloaded, tmp_path: Path
):
    (tmp_path / "settings.toml").write_text(SETTINGS)
    texts = [{"text": "all logits at once " * (200 if i % 3 else 15)} for i in range(9)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    write_costs(CONFIG, 258, tmp_path / "costs.json")
    losses, kinds = [], []
    for name, gigabytes in (("ample", "1"), ("little", "0.005")):
        common = ["--config", "settings.toml", "--data", "data.jsonl", "--costs", "costs.json", "--run-dir", name]
        preloaded.train(*common, "--memory-limit-gb", gigabytes, cwd=tmp_path)
        steps = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        losses += [step["loss"] for step in steps if "grad_norm" in step]
        kinds.append(json.loads((tmp_path / name / "report.json").read_text())["work"]["executed"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert not any(slices_head(kind) for kind in kinds[0])
    assert sum(work["encoder"] for kind, work in kinds[1].items() if slices_head(kind)) > 3000


@pytest.mark.parametrize(("zero_stage", "slices"), [(2, True), (3, False)])
def test_engines_that_gather_weights_for_forwards_alone_are_planned_with_whole_logits(zero_stage, slices):
    described = {"zero_optimization": {"stage": zero_stage}}
    config = replace(CONFIG, deepspeed=replace(CONFIG.deepspeed, described=described))
    assert can_slice_head(config) is slices
    kinds = planned_kinds(config, configured_costs(config, AnalyticCosts(PLANNED, Topology(), head_slice=1024)))
    assert any(map(slices_head, kinds)) is slices
    (plan,) = plans_of(Topology(), "padded", split=False, recompute="head")
    with nullcontext() if slices else pytest.raises(ConfigError, match=r"heads in slices .* take recompute 'none'"):
        refuse_plan(plan, zero_stage)
