"""`plan` and `check-plan` of a model that transformers computes: cut, laid out and refused as `train` would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from dynapipe_ext.launch import cli

PADS = transformers.Qwen3NextConfig(  # linear attention, whose states documents of a row would share
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, max_position_embeddings=64,
)  # fmt: skip

MASKED = transformers.Gemma2Config(  # soft-capped scores, which masks of whole rows keep apart
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=4096,
)  # fmt: skip


def settings(folder: Path, model: Any, *, text: str = "") -> list[str]:
    model.save_pretrained(folder / "model")
    (folder / "lengths.txt").write_text("\n".join(["20", "33", "9", "14"]))
    (folder / "job.toml").write_text(
        f'[model]\narchitecture = "{folder / "model"}"\nbackend = "transformers"\nmax_seq_len = 64\n'
        f"from_scratch = true\n[topology]\ntp = 1\npp = 2\ndp = 1\n[plan]\neffort = 10\n{text}"
    )
    return ["--config", str(folder / "job.toml"), "--lengths", str(folder / "lengths.txt")]


def layouts(plan: Path) -> set[str]:
    (replica,) = json.loads(plan.read_text())["replicas"]
    return {micro_batch["layout"] for micro_batch in replica["micro_batches"]}


def test_a_plan_has_padded_rows_where_packing_is_not_exact_and_check_plan_refuses_packed_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, plan = settings(tmp_path, PADS), tmp_path / "plan.json"
    assert cli.main(["plan", *given, "--json", str(plan)]) == 0
    assert layouts(plan) == {"padded"}
    assert "rows are padded: packing is not exact in" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["check-plan", str(plan), *given]) == 0
    capsys.readouterr()
    assert cli.main(["plan", *given, "--layout", "packed"]) == 2
    refusal = capsys.readouterr().err
    assert "layout is packed, but packing is not exact in" in refusal
    plan.write_text(plan.read_text().replace('"layout": "padded"', '"layout": "packed"'))
    assert layouts(plan) == {"packed"}
    assert cli.main(["check-plan", str(plan), *given]) == 2
    assert capsys.readouterr().err == refusal


def test_what_a_run_refuses_no_plan_is_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    given = settings(tmp_path, model, text="[optimizer]\ndistributed = true\n")
    said = []
    for command in (["plan", *given], ["train", "--config", given[1], "--run-dir", str(tmp_path / "run")]):
        assert cli.main(command) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "distributed is True but only megatron-core's models have it" in said[0]


def test_a_plan_bounds_rows_that_masks_keep_apart_as_a_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, plan = settings(tmp_path, MASKED, text="memory_limit_gb = 8\n"), tmp_path / "plan.json"
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace("max_seq_len = 64", "max_seq_len = 4096"))
    for longest, bound in ((40, 2048), (3001, 3008)):
        (tmp_path / "lengths.txt").write_text("\n".join([str(longest), *["40"] * 150]))
        assert cli.main(["plan", *given, "--tokens-per-batch", "8192", "--step", "0", "--json", str(plan)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"rows have at most {bound} positions: " in said
        assert "([plan] max_tokens sets another bound)" in said
        (replica,) = json.loads(plan.read_text())["replicas"]
        assert max(micro_batch["encoder_len"] for micro_batch in replica["micro_batches"]) <= bound


def test_tp_that_nothing_names_is_said_to_be_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = settings(tmp_path, MASKED)
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace("tp = 1\n", ""))
    assert cli.main(["plan", *given]) == 2
    assert "tp is 2 but transformers computes layers on one rank" in (said := capsys.readouterr().err)
    assert "give --tp 1, also if nothing names tp" in said
    assert cli.main(["plan", *given, "--tp", "1"]) == 0


@pytest.mark.parametrize("backend", ["megatron", "transformers"])
def test_a_loss_of_routers_that_no_stage_adds_is_refused(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    given = settings(tmp_path, model)
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace('backend = "transformers"', f'backend = "{backend}"'))
    assert cli.main(["train", *given[:2], "--run-dir", str(tmp_path / "run")]) == 2
    assert "adds a loss of all routers together, which no stage sees: set it to" in capsys.readouterr().err
