"""T5 of transformers, cut over pipeline stages, learns what the whole model learns one pair at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batch.topology import ActivationFormat, Topology, place_stages
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.layers import lay_out
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.pairs import PairDataset
from dynapipe_ext.data.sample_selection import hold_out
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.transformers.parts import parts_of_config, parts_of_folder, parts_of_model
from dynapipe_ext.executor.stages.transformers.saving import save_parts
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.models.named_models import read_model, read_trainable
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from tests.integration.test_fine_tuning import (
    BATCH,
    DECAY,
    LEAST,
    LR,
    STEPS,
    global_batches,
    pair_loss,
    pair_targets,
    plain_losses,
)
from tests.integration.test_train_command import report_of
from tests.integration.test_train_pairs import VOCABULARY, write_pairs
from tests.integration.test_transformers_command import SAVED, interrupted
from tests.support.checkpoints import HIDDEN, saved, tiny, tiny_variant
from tests.support.preloaded import Preloaded
from tests.support.t5_ranks import NUM_PAIRS, PairCase, length_of_pair, oracle_of, pair_step_plan, pair_tensors, pairs
from tests.support.tiny_steps import assert_same, learned

VARIANTS = ("t5", "t5-v1.1")  # tied and rectified, untied and gated
TOPOLOGIES = {
    "pp1": Topology(),
    "pp2 within the encoder": Topology(pp=2, layers_per_stage=(1, 4)),
    "pp2 between": Topology(pp=2, layers_per_stage=(3, 2)),
    "pp2 within the decoder": Topology(pp=2, layers_per_stage=(4, 1)),
    "pp4": Topology(pp=4),
    "v": Topology(pp=2, placement=place_stages("v", 2)),
    "interleaved": Topology(pp=2, placement=place_stages("interleaved", 2)),
}


def t5(variant: str, **changes: Any) -> Any:
    """Three layers that encode and two that decode."""
    return tiny_variant(variant, **{"num_layers": 3, "num_decoder_layers": 2} | changes)


def format_of(topology: Topology) -> ActivationFormat:
    return ActivationFormat(HIDDEN, order="bsh", first_decoder_stage=lay_out(3, 5, topology).first_decoder_stage)


def plans_of(topology: Topology, *, split: bool = False, **options: Any) -> Any:
    form = format_of(topology)
    options = {
        "layout": "padded",
        "max_tokens": 150,
        "split_backward": split,
        "pad_multiple": 4,
        "recompute": "none",
    } | options
    planner = Planner(topology, TokenCosts(topology.num_stages, overhead_ns=10**5), 10**9, format=form, **options)
    return prove_step(planner, [length_of_pair(pair) for pair in pairs()], step=0).plans[0]


def batches_of(plan: Any) -> list[Any]:
    return [pair_tensors(m, "tokens") for m in plan.micro_batches]


CASES = [(v, place, bool((n + t) % 2)) for n, v in enumerate(VARIANTS) for t, place in enumerate(TOPOLOGIES)]


@pytest.mark.parametrize(("variant", "topology", "split"), CASES)
def test_losses_and_gradients_are_those_of_the_whole_model(variant, topology, split):
    model, place = t5(variant), TOPOLOGIES[topology]
    loss, gradients = oracle_of(model, "tokens")
    plans = plans_of(place, split=split)
    assert 1 < len(plans[0].micro_batches) < NUM_PAIRS
    losses, found = learned(model, place, plans, batches=batches_of)
    assert losses == pytest.approx([loss] * place.pp, rel=1e-5)
    assert_same(found, gradients)


@pytest.mark.parametrize(("variant", "recompute"), [("t5", "head"), ("t5-v1.1", "head+full")])
def test_heads_in_slices_learn_the_same(variant, recompute, monkeypatch):
    monkeypatch.setattr(chunk_runner, "HEAD_SLICE", 5)
    model, place = t5(variant).train(), TOPOLOGIES["v"]
    loss, gradients = oracle_of(model, "tokens")
    losses, found = learned(model, place, plans_of(place, recompute=recompute), batches=batches_of)
    assert losses == pytest.approx([loss] * place.pp, rel=1e-6)
    assert_same(found, gradients)


def test_dropout_goes_by_sample_and_layer_and_comes_again_where_layers_or_stages_are_recomputed():
    """Of the same micro-batches: what one stage draws, four draw, recomputed or not; all on one rank, for torch's
    generator is that of a process."""
    model, found = t5("t5", dropout_rate=0.2).train(), []
    model.set_attn_implementation("sdpa")
    four = Topology(placement=(0, 0, 0, 0))
    for place, recompute in ((Topology(), "none"), (four, "none"), (four, "full"), (four, "stage")):
        (plans,) = lower(pair_step_plan(PairCase(place, schedule="adaptive", recompute=recompute)), format_of(place))
        found.append(learned(model, place, plans, batches=batches_of))
    (alone, *_), gradients = found[0]
    assert alone != pytest.approx(oracle_of(t5("t5"), "tokens")[0], rel=1e-3)
    for losses, others in found[1:]:
        assert losses == pytest.approx([alone] * len(losses), rel=1e-6)
        assert_same(others, gradients)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_folder_are_its_weights_and_are_saved_as_what_transformers_loads(variant, tmp_path):
    """Each rank has memory for its own alone; of several copies one is saved. Whether a head is tied, files tell."""
    saved(t5(variant), tmp_path / "model")
    whole = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    expected = dict(whole.named_parameters())
    assert ("lm_head.weight" in expected) == (variant == "t5-v1.1")
    copies = {name for name in expected if "relative" in name} | {"shared.weight"}
    for place in (TOPOLOGIES["pp4"], TOPOLOGIES["v"]):
        ranks = [parts_of_folder(tmp_path / "model", place, rank) for rank in range(place.pp)]
        held = [{weight: name for part in rank for name, weight in part.model.named_parameters()} for rank in ranks]
        names = [name for rank in held for name in rank.values()]
        assert {name for name in names if names.count(name) > 1} == copies
        assert all(torch.equal(weight, expected[name]) for rank in held for weight, name in rank.items())
        parts = sorted((part for rank in ranks for part in rank), key=lambda part: part.place.stage)
        save_parts(parts, tmp_path / place.placement_name)
        again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / place.placement_name)
        assert all(torch.equal(weight, expected[name]) for name, weight in again.named_parameters())
        given = {"input_ids": torch.arange(1, 9)[None], "labels": torch.arange(2, 7)[None]}
        assert torch.equal(again(**given).logits, whole(**given).logits)
        assert read_model(str(tmp_path / place.placement_name))[0] == read_model(str(tmp_path / "model"))[0]


def started(model: Any, **options: Any) -> None:
    place = Topology()
    (plan,) = plans_of(place, **options)
    PipelineExecutor(TransformersStage(parts_of_model(model)), InlineHub().transport(0)).execute(plan, batches_of(plan))


def loaded(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    (plan,) = plans_of(Topology())
    stage = TransformersStage(parts_of_model(model))
    stage.start_step(plan)
    stage.load(0, change(batches_of(plan)[0]))


def padded_left(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"encoder_padding": batch["encoder_padding"].flip(1)}


def without_targets(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in batch.items() if name != "decoder_tokens"}


def shorter(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"decoder_tokens": batch["decoder_tokens"][:, 1:]}


def attending_by_document(model: Any) -> None:
    model.set_attn_implementation(register_document_attention())
    started(model)


@pytest.mark.parametrize(
    ("error", "make", "says"),
    [
        (ConfigError, lambda model: started(model, layout="packed", max_tokens=64), "no borders of packed pairs: plan"),
        (ConfigError, attending_by_document, "not known to add its relative biases under dynapipe_documents: build"),
        (ConfigError, lambda model: parts_of_config(model.config, seed=0), "that transformers computes begins with"),
        (ConfigError, lambda model: parts_of_model(model.encoder), "T5Stack cannot be cut as a T5 with its head"),
        (ConfigError, lambda _: parts_of_config(transformers.BartConfig(), seed=0), "'bart' has an encoder and a d"),
        (DataError, lambda model: loaded(model, padded_left), "encoder_padding of micro-batch 0 is not that of"),
        (DataError, lambda model: loaded(model, without_targets), "stage 0 reads decoder_tokens of micro-batch 0, but"),
        (DataError, lambda model: loaded(model, shorter), r"decoder_tokens of micro-batch 0 has shape .* as planned"),
    ],
)  # fmt: skip
def test_what_would_train_wrongly_is_refused_by_name(error, make, says):
    with pytest.raises(error, match=says):
        make(t5("t5"))


def norms_of(run: Path) -> list[float]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["grad_norm"] for event in events if "grad_norm" in event]


def test_a_run_over_stages_and_replicas_is_a_plain_loop_and_goes_on_elsewhere(
    preloaded_transformers: Preloaded, tmp_path: Path
) -> None:
    """Tied ends and biases lie on both ranks of a V: their gradients are summed, and count once in the norm."""
    # Of another seed one unit of a ReLU is so near 0 that rounding turns its gradient on or off.
    saved(tiny("t5", seed=1, vocab_size=VOCABULARY, num_layers=2, num_decoder_layers=2), tmp_path / "model")
    write_pairs(tmp_path, tmp_path / "model")
    library = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "model")
    named = {"architecture": str(tmp_path / "model"), "backend": "transformers"}
    config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1}, plan={"layout": "padded"})
    costs = analytic_costs(config, architecture_of(config, VOCABULARY), flops_per_s=50e9, overhead_ns=1_000_000)
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(costs)))
    given = ["--model", "model", "--data", "pairs.jsonl", "--output", "trained", "--backend", "transformers"]
    given += ["--pp", "2", "--dp", "2", "--placement", "v", "--split-backward", "--layout", "padded", "--strict"]
    given += ["--run-dir", "run", "--costs", "costs.json", "--memory-limit-gb", "1", "--num-workers", "0"]
    given += ["--steps", str(STEPS), "--batch-size", str(BATCH), "--weight-decay", str(DECAY), "--betas", "0.9,0.95"]
    given += ["--lr", str(LR), "--min-lr", str(LEAST), "--lr-schedule", "cosine", "--warmup", "0.3", "--truncate"]
    given += ["--eval-fraction", "0.2", "--eval-every", str(STEPS), "--save-every", str(SAVED)]
    preloaded_transformers.train(*given, cwd=tmp_path)
    interrupted(tmp_path / "run", tmp_path / "moved")
    elsewhere = ["--output", "trained-moved", "--pp", "1", "--dp", "1", "--placement", "linear"]
    preloaded_transformers.train("--resume", "moved", *elsewhere, cwd=tmp_path)

    train, held_out = (
        PairDataset.of(part) for part in hold_out(TokenDataset.open(tmp_path / "run" / "data"), 0.2, seed=0)
    )
    report = report_of(tmp_path / "run")
    model, trained, moved = (
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder)
        for folder in ("model", "trained", "trained-moved")
    )
    expected = plain_losses(
        model,
        [train[i] for i in range(len(train))],
        global_batches(len(train)),
        "cosine",
        loss_of=pair_loss,
        targets_of=pair_targets,
    )
    assert report["losses"] == pytest.approx(expected, rel=1e-5)
    assert report["losses"][-1] < report["losses"][0]
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), rtol=1e-3, atol=1e-5, msg=name)
        torch.testing.assert_close(weight, moved.get_parameter(name), rtol=1e-3, atol=1e-5, msg=name)
    with torch.no_grad():
        total = sum(float(pair_loss(trained, held_out[i])) for i in range(len(held_out)))
    targets = int(held_out.lengths[:, 2].sum())
    assert report["evaluations"][-1]["loss"] == pytest.approx(total / targets, rel=1e-5)
    whole, on_one_rank = norms_of(tmp_path / "run"), norms_of(tmp_path / "moved")
    assert len(whole) == STEPS
    assert on_one_rank[SAVED:] == pytest.approx(whole[SAVED:], rel=1e-4)
    again = report_of(tmp_path / "moved")["losses"]
    assert again[:SAVED] == report["losses"][:SAVED]
    assert again[SAVED:] == pytest.approx(report["losses"][SAVED:], rel=1e-5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "relative positions know no borders of packed pairs: give --layout padded, or leave --backend out"),
        (["--layout", "padded", "--deterministic"], "encoder-decoders of transformers have no such mode"),
        (["--layout", "padded", "--tp", "2"], "transformers computes layers on one rank: give --tp 1"),
        (["--layout", "padded", "--lora", "--lora-target-modules", "q"], "has an encoder too: train all of"),
        (["--layout", "padded", "--pieces", "16"], "of an encoder-decoder attend to later positions: plan whole"),
    ],
)  # fmt: skip
def test_what_runs_of_pairs_do_not_have_is_refused_before_anything_is_prepared(asked, says, tmp_path, capsys):
    assert says in refusal(saved(tiny("t5"), tmp_path), asked, capsys)


def test_a_run_of_pairs_without_weights_is_refused(tmp_path, capsys):
    tiny("t5").config.save_pretrained(tmp_path)
    said = refusal(tmp_path, ["--layout", "padded", "--from-scratch"], capsys)
    assert "init_from is '' but transformers trains encoder-decoders from weights on: name a folder" in said


def refusal(model: Path, asked: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    (model / "tokenizer.json").touch()
    assert main(["train", "--model", str(model), "--data", "pairs.jsonl", "--backend", "transformers", *asked]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_encoder_decoders_that_nobody_can_cut_are_refused_with_those_that_are_known(tmp_path):
    transformers.BartConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'bart' has an encoder and a decoder: of such models only t5 is supported"):
        read_trainable(str(tmp_path), "transformers")
