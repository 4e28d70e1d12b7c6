"""`estimate` and `flops` of any config.json: counts of modules on the meta device, equal to those of known families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.transformers.counting import count_model
from dynapipe_ext.launch import cli
from dynapipe_ext.models.flops import Positions, Sight, Work, step_flops
from dynapipe_ext.models.named_models import PRESETS, preset
from dynapipe_ext.models.tensors import num_parameters, tensor_groups

KNOWN = ("llama-3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-2b", "gpt2", "deepseek-v2-lite", "qwen1.5-moe-a2.7b")
LENGTHS = (100, 700, 900)
_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_familys_counts_are_those_of_its_description(name: str) -> None:
    a, counted = preset(name), count_model(dict(PRESETS[name]), name)
    positions = Positions.of_samples(((length, 0) for length in LENGTHS), sight=Sight.of(a))
    for causal in (False, True):
        known = step_flops(a, Work(positions, {"none": positions}), causal=causal)
        assert counted.step_flops(LENGTHS, causal=causal) == known
    groups = tensor_groups(a)
    of_experts = sum(group.size for group in groups if group.expert >= 0)
    assert counted.parameters == num_parameters(a)
    assert counted.active == counted.parameters - of_experts * (a.num_experts - a.top_k) // max(1, a.num_experts)
    assert counted.embedding == groups[0].size
    assert counted.layers[1] == sum(g.size for g in groups if g.layer == 1 and not g.is_buffer)
    assert counted.uncounted == ()


def written(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_linear_attention_and_its_convolution_are_said_not_to_be_counted(tmp_path: Path) -> None:
    raw = {**_SMALL, "model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2}
    raw |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    counted = count_model(raw, "config.json")
    (attention,) = counted.attention
    assert (attention.layers, attention.query_size, attention.value_size) == (1, 64, 64)  # one layer in four
    assert any("the recurrence of Qwen3NextGatedDeltaNet of 3 layers" in what for what in counted.uncounted)
    experts = 4 * 8 * 3 * 64 * 16
    assert counted.parameters - counted.active == experts * 6 // 8


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    config = transformers.Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=2, vocab_size=64, n_groups=1, state_size=8
    )
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["time_step_limit"][1] == {"__float__": "Infinity"}
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert count_model(raw, "config.json").parameters == sum(p.numel() for p in model.parameters())


def test_flops_and_estimate_count_a_family_that_no_plan_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, model_type="cohere", **_SMALL)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    assert cli.main(["estimate", "--model", folder, "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert estimated["counted"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert estimated["training_bytes"] == 18 * estimated["counted"]["parameters"]
    assert "dynapipe train" in estimated["notes"][-1]
    step = ["flops", "--model", folder, "--seq-len", "32", "--batch-size", "2"]
    assert cli.main([*step, "--seconds-per-step", "2", "--gpus", "1", "--device", "h100", "--json"]) == 0
    (account,) = json.loads(capsys.readouterr().out)["accounts"]
    a_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    products = 2 * 64 * (4 * a_layer + 131 * 64) + 4 * 2 * (64 + 64) * 2 * 32**2
    assert account["model_flops"] == 3 * products
    assert account["mfu"] == 3 * products / 2 / (account["peak_tflops"] * 1e12)
    assert cli.main([*step, "--recompute", "full"]) == 2
    assert "--recompute is for families that are known here, not cohere" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["estimate", "--model", folder, "--write", str(tmp_path / "best.toml")]) == 2
    assert "names a way to train, but none is known" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "--nodes", "-4"], "--nodes plans ways to train, and none is known for"),
        (["estimate", "--lengths", "nope.npy"], "--lengths plans ways to train"),
        (["estimate", "--tp", "banana"], "--tp plans ways to train"),
        (["estimate", "--states", "mixed", "--top", "3"], "--top plans ways to train"),
        (["flops", "--seq-len", "-100", "--batch-size", "1"], "--seq-len is -100 but must lie in 1 to"),
        (["flops", "--lengths", "PAIRS", "--batch-size", "2"], "--lengths has all samples"),
        (["flops", "--lengths", "PAIRS"], "samples of a cohere model have one length each"),
        (["flops", "--seq-len", "8"], "--seq-len 8 and --batch-size 0: give both"),
        (["flops", "--seq-len", "8", "--batch-size", "1", "--device", "h100"], "peak is for MFU and HFU"),
        (["flops", "--seq-len", "8", "--batch-size", "1", "--gpus", "1"], "give --seconds-per-step too"),
    ],
)
def test_flags_that_counts_do_not_heed_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.npy"
    np.save(pairs, np.array([[5, 3], [6, 2]]))
    words = [str(pairs) if word == "PAIRS" else word for word in words]
    assert cli.main([*words, "--model", written(tmp_path, model_type="cohere", **_SMALL)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_as_many_samples_of_one_length_as_a_step_may_have_are_counted_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, model_type="cohere", **_SMALL)
    step = ["flops", "--model", model, "--seq-len", "32", "--causal", "--json"]
    counts = []
    for batch_size in (1, 10**12):
        assert cli.main([*step, "--batch-size", str(batch_size)]) == 0
        counts.append(json.loads(capsys.readouterr().out)["accounts"][0]["model_flops"])
    assert counts[1] == 10**12 * counts[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "nothing_like_it"}, "transformers cannot read it"),
        ({**_SMALL, "model_type": "cohere", "num_attention_heads": 0}, "transformers cannot build it|cannot read it"),
    ],
)
def test_what_transformers_cannot_build_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        count_model(config, "config.json")


def test_widths_of_heads_that_differ_by_layer_are_counted_of_each() -> None:
    config = transformers.AutoConfig.for_model("gemma4_unified_text", **_SMALL)
    counted = count_model(json.loads(json.dumps(config.to_dict(), default=str)), "config.json")
    assert [(own.layers, own.query_size) for own in counted.attention] == [(3, 64), (1, 2048)]
    assert counted.parameters == sum(
        p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters()
    )
