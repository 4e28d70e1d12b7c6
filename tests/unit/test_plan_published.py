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


def settings(folder: Path, model: Any, *, text: str = "") -> list[str]:
    model.save_pretrained(folder / "model")
    (folder / "lengths.txt").write_text("\n".join(["20", "33", "9", "14"]))
    (folder / "job.toml").write_text(
        f'[model]\narchitecture = "{folder / "model"}"\nbackend = "transformers"\nmax_seq_len = 64\n'
        f"[topology]\ntp = 1\npp = 2\ndp = 1\n[plan]\neffort = 10\n{text}"
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
    assert "computed by transformers, whose runs have no the distributed optimizer" in said[0]
