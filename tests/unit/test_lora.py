"""What adapters adapt, and what training them costs, known before torch is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology, place_stages
from dynapipe_ext.costs.adapters import find_adapter_share
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.parts import parts_of_config, parts_of_folder
from dynapipe_ext.executor.stages.transformers.saving import save_parts
from dynapipe_ext.launch.job.configured import check_fits, configured_costs, make_planner, topology_of, trained_costs
from dynapipe_ext.launch.job.model_folder import refuse_unsupported, widened_line
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.models.flops import step_flops, work_of
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.tiny_models import CONFIGS, tiny_model

peft: Any = pytest.importorskip("peft")
from dynapipe_ext.executor.stages.transformers.adapters import add_adapters  # noqa: E402

ALL = ("all-linear",)


def settings(family: str, folder: Path, *, topology: dict[str, Any] | None = None, **lora: Any) -> TrainConfig:
    """Of a run with adapters of a tiny model, whose folder is given for its weights, too."""
    config: Any = CONFIGS[family]()
    config.save_pretrained(folder)
    named = {"architecture": str(folder), "init_from": str(folder)}
    ranks = {"tp": 1, "pp": 1, "dp": 1} | (topology or {})
    return TrainConfig().with_values(model=named, lora={"enabled": True} | lora, topology=ranks)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_layers_of_a_block_are_those_of_its_module(family: str, tmp_path: Path) -> None:
    (part,) = parts_of_config(CONFIGS[family](), seed=0)
    assert part.pattern
    block = part.model.get_submodule(f"{part.pattern.layers}.0")
    found = {}
    for name, layer in block.named_modules():
        if isinstance(layer, torch.nn.Linear):
            found[name] = (layer.in_features, layer.out_features)
        elif isinstance(layer, transformers.pytorch_utils.Conv1D):
            found[name] = tuple(layer.weight.shape)
    described = settings(family, tmp_path, target_modules=ALL).lora.described
    assert {layer.name: (layer.num_inputs, layer.num_outputs) for layer in described} == found


def test_peft_adapts_what_the_settings_say_in_every_family(tmp_path: Path) -> None:
    known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    families = {CONFIGS[family]().model_type: family for family in CONFIGS}
    for kind, family in families.items():
        if kind not in known:
            with pytest.raises(ConfigError, match=f"peft has no usual target_modules of {kind}: choose from down_proj"):
                settings(family, tmp_path / family)
        for targets in ((), ALL, ("mlp.c_proj",) if family == "gpt2" else ("self_attn.v_proj",)):
            if kind not in known and targets != ALL:
                continue
            config = settings(family, tmp_path / family, target_modules=targets, r=3)
            (part,) = parts_of_config(CONFIGS[family](), seed=0)
            add_adapters([part], config.lora, seed=0)
            trained = sum(weight.numel() for weight in part.parameters() if weight.requires_grad)
            assert trained == config.model.num_layers * config.lora.num_weights_a_block


def adapted_parts(family: str, folder: Path, topology: Topology, targets: Any) -> list[TransformersPart]:
    """All stages of all ranks, adapters with an effect in them; `targets` as settings have them, or a peft pattern."""
    parts = [part for rank in range(topology.pp) for part in parts_of_folder(folder, topology, rank)]
    if isinstance(targets, str):
        for part in parts:
            part.model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=family == "gpt2"))
    else:
        add_adapters(parts, settings(family, folder, target_modules=targets).lora, seed=0)
    with torch.no_grad():
        for name, weight in (named for part in parts for named in part.model.named_parameters()):
            if ".lora_B." in name:
                weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight))
    return sorted(parts, key=lambda part: part.place.stage)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ()),
        ("llama", ("q_proj", "mlp.down_proj")),
        ("llama", ALL),
        ("llama", r".*\.mlp\.(up|down)_proj"),
        ("llama", "all-linear"),
        ("qwen2", ALL),  # tied ends: the last stage holds an embedding, too
        ("gpt2", ALL),
    ],
)
def test_peft_scores_with_saved_adapters_what_the_stages_scored(family: str, targets: Any, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    tokens = torch.arange(1, 25)[None]
    v = place_stages("v", 2)
    for name, topology in {"pp1": Topology(), "pp2": Topology(pp=2), "v": Topology(pp=2, placement=v)}.items():
        parts = adapted_parts(family, tmp_path / "model", topology, targets)
        scores = tokens
        with torch.no_grad():
            for part in parts:
                scores = part.eval()(scores, batch={"model_inputs": {"position_ids": torch.arange(24)[None]}})
        save_parts(parts, tmp_path / name)
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        unadapted = base(tokens).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / name)
        torch.testing.assert_close(loaded(tokens).logits, scores, rtol=1e-4, atol=1e-4)
        assert (unadapted - scores).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "phi"])  # what megatron-core has a twin of, and what it has not
def test_sixteen_bit_weights_that_train_in_float32_are_told(family: str, tmp_path: Path) -> None:
    model: Any = CONFIGS[family]()
    model.dtype = torch.bfloat16
    model.save_pretrained(tmp_path)
    named = {"architecture": str(tmp_path), "init_from": str(tmp_path)}
    config = TrainConfig().with_values(model=named)
    assert widened_line(config) == (
        f"note: the bfloat16 weights of {tmp_path} train and are saved as float32, in twice the bytes: --dtype bf16"
        " keeps them in 16 bits, beside float32 masters"
    )
    adapts = config.with_values(lora={"enabled": True, "target_modules": ALL})
    assert f"weights of {tmp_path} train as float32, in twice" in widened_line(adapts)
    assert widened_line(config.with_values(model={"dtype": "bfloat16"})) == ""
    model.dtype = torch.float32
    model.save_pretrained(tmp_path)
    assert widened_line(TrainConfig().with_values(model=named)) == ""


def test_plans_know_what_adapters_do_not_compute_and_hold(tmp_path: Path) -> None:
    """On each of two stages: of W the adapters' share, and states of their weights alone."""
    config = settings("llama", tmp_path, topology={"pp": 2}, r=2)
    topology, described = topology_of(config), config.model.described
    assert described is not None
    base = AnalyticCosts(described.padded(), topology, param_bytes=4, activation_bytes_per_value=4, flops_per_s=1e9)
    samples = MicroBatch((SampleLength(0, 24),)), MicroBatch((SampleLength(1, 24),), recompute="full")
    whole, adapted = base.evaluate(samples), trained_costs(config, base, topology).evaluate(samples)
    assert (adapted.forward_ns == whole.forward_ns).all()
    saved = whole.weight_ns[:, 0] - adapted.weight_ns[:, 0]
    of_adapters = 2 * 24 * 2 * 2 * (32 + 24)  # rank 2 beside q (16 -> 16) and v (16 -> 8), two layers a stage
    assert adapted.weight_ns[:, 0].tolist() == pytest.approx([of_adapters] * 2, abs=2)
    assert (whole.backward_ns - adapted.backward_ns == saved[:, None]).all()
    parts = [parts_of_config(CONFIGS["llama"](), topology, pp_rank, seed=0)[0] for pp_rank in range(2)]
    frozen = [sum(weight.numel() for weight in part.parameters()) for part in parts]
    padding = described.padded().vocab_size - described.vocab_size
    held = [4 * (number + 16 * padding) + 16 * 2 * 2 * (32 + 24) for number in frozen]
    assert adapted.static_bytes.tolist() == held
    exact = trained_costs(config.with_values(optimizer={"deterministic": True}), base, topology).evaluate(samples)
    assert (exact.static_bytes - adapted.static_bytes).tolist() == [8 * 2 * 2 * (32 + 24)] * 2
    kept = adapted.stored_bytes - whole.stored_bytes
    assert kept.tolist() == [[24 * 2 * 4 * 2 * 2, 0]] * 2  # inner values of two adapters in each of two layers
    assert make_planner(config, base).costs.fingerprint() != base.fingerprint()


def test_flops_of_a_run_leave_out_the_gradients_of_frozen_weights(tmp_path: Path) -> None:
    config = settings("llama", tmp_path, r=2)
    described = config.model.described
    assert described is not None
    share = find_adapter_share(config.lora, described)
    weights = 4 * (described.attention_parameters + described.mlp_parameters) + 61 * 16
    assert share == pytest.approx(4 * config.lora.num_weights_a_block / weights)
    work = work_of([MicroBatch((SampleLength(0, 24),), recompute="full")])
    whole, adapted = step_flops(described, work), step_flops(described, work, trained_share=share)
    products = 2 * 24 * weights  # of one forward
    assert whole.model - adapted.model == pytest.approx((1 - share) * products, abs=2)
    assert (whole.attention, whole.recompute) == (adapted.attention, adapted.recompute)


def test_what_does_not_fit_is_told_of_ranks_that_transformers_has(tmp_path: Path) -> None:
    """Without tensor parallelism, with which it would have fitted on as many ranks."""
    config = settings("llama", tmp_path, r=2).with_values(plan={"memory_limit_gb": 6e-5})
    assert config.model.described is not None
    costs = AnalyticCosts(
        config.model.described.padded(), Topology(), param_bytes=4, activation_bytes_per_value=4, flops_per_s=1e9
    )
    with pytest.raises(PlanError, match=r"needs .* take tp 1 x pp 4, where it needs 5\.\d+e-05 GB a rank"):
        check_fits(config, costs, np.array([[24, 0, 5]]))
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    divided = config.with_values(deepspeed={"config": str(tmp_path / "zero.json")}, plan={"memory_limit_gb": 8e-5})
    with pytest.raises(PlanError, match=r"needs .* take dp 4, where it needs 7\.4.*e-05 GB a rank"):
        check_fits(divided, configured_costs(divided, costs), np.array([[24, 0, 5]]))


@pytest.mark.parametrize("adapts", [False, True])
def test_what_an_engine_offloads_is_not_counted_on_accelerators_and_is_on_cpus(
    adapts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters beside them the frozen weights are offloaded, too."""
    config = settings("llama", tmp_path, enabled=adapts, topology={"dp": 2})
    config = config.with_values(model={"dtype": "bfloat16", "backend": "transformers"})
    described, rows = config.model.described, [MicroBatch((SampleLength(0, 24),))]
    assert described is not None
    counted = AnalyticCosts(described.padded(), Topology())
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(counted)))
    on_host = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    held, working = {}, {}
    for name, zero, device in (
        ("no offload", {"stage": 3}, "cuda"),
        ("cuda", on_host, "cuda"),
        ("cpu", on_host, "cpu"),
    ):
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
        monkeypatch.setattr("dynapipe_ext.executor.device.rank_device", lambda _, device=device: torch.device(device))
        divided = config.with_values(
            deepspeed={"config": str(tmp_path / "ds.json")}, plan={"costs": str(tmp_path / "costs.json")}
        )
        costs = make_planner(divided, settle_costs(divided, 61)).costs.evaluate(rows)
        held[name], working[name] = costs.static_bytes.tolist(), costs.working_bytes.tolist()
    assert held["cpu"] == held["no offload"] > held["cuda"] == [0]
    assert working["cpu"] == working["cuda"] == working["no offload"]  # what is gathered is there all the same


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": {"target_modules": ("q_prj",)}}, "'q_prj', which no block of .* has: choose from .* mean 'q_proj'"),
        ({"lora": {"target_modules": ("lm_head",)}}, "'lm_head', which no block of"),
        ({"lora": {"r": 0}}, "r is 0 but must be at least 1"),
        ({"lora": {"lora_dropout": 1.0}}, "lora_dropout is 1.0 but must be at least 0 and below 1"),
        ({"lora": {"enabled": False, "r": 4}}, "describes adapters but enabled is false"),
        (
            {"model": {"backend": "megatron"}},
            "peft adapts what transformers computes: name a decoder's folder by --model",
        ),
        ({"model": {"architecture": ""}}, "enabled is True but peft adapts what transformers computes"),
        ({"model": {"init_from": ""}}, "init_from is '' but adapters train next to weights that stay: name a folder"),
        (
            {"deepspeed": {"config": "zero.json"}, "topology": {"pp": 2}},
            "pp is 2 but ZeRO 2 and 3 train without pp: use --dp",
        ),
        ({"plan": {"adapt_costs": True}}, "adapt_costs is True but times are fitted to models that train whole"),
        ({"topology": {"tp": 2}}, "tp is 2 but transformers computes layers on one rank"),
    ],
)
def test_adapters_that_cannot_be_are_refused_with_what_to_do(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    config = settings("llama", tmp_path)
    with pytest.raises(ConfigError, match=says):
        refuse_unsupported(config.with_values(**changes))
