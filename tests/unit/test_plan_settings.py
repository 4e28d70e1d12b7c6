"""`dynapipe plan --config` and `check-plan --config`: plans of what a run of these settings trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.checkpoints import saved, tiny


@pytest.mark.parametrize("placement", ["linear", "auto"])
def test_plans_of_settings_hold_what_these_train(
    placement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deterministic mode's sums of gradients, and no states of weights that adapters freeze: as the trainer's plans."""
    lengths = str(tmp_path / "lengths.txt")
    Path(lengths).write_text("64\n")  # one micro-batch, whatever the settings
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    saved(tiny("llama", **sizes, vocab_size=1024, max_position_embeddings=1024), tmp_path)
    model, peaks = f'[model]\narchitecture = "{tmp_path}"\ninit_from = "{tmp_path}"\n', {}
    settings = {"whole": "", "exact": "[optimizer]\ndeterministic = true\n"}
    settings |= {"parts": 'backend = "transformers"\n', "adapters": "[lora]\nenabled = true\n"}
    for name, text in settings.items():
        config, path = tmp_path / f"{name}.toml", tmp_path / f"{name}.json"
        config.write_text(model + text)
        asked = ["--config", str(config), "--lengths", lengths, "--pp", "2", "--tp", "1", "--dp", "1", "--effort", "50"]
        assert cli.main(["plan", *asked, "--placement", placement, "--json", str(path)]) == 0
        peaks[name] = json.loads(path.read_text())["replicas"][0]["predicted"]["peak_bytes"]
        assert cli.main(["check-plan", str(path), "--config", str(config), "--lengths", lengths]) == 0
    assert cli.main(["check-plan", str(path), "--config", str(tmp_path / "whole.toml"), "--lengths", lengths]) == 1
    capsys.readouterr()
    layers = 4 * (4 * 64 * 64 + 3 * 64 * 128)  # and 1024 x 64 of the embedding, as many of the head
    assert sum(peaks["exact"]) - sum(peaks["whole"]) == pytest.approx(8 * (layers + 2 * 1024 * 64), rel=0.05)
    assert sum(peaks["adapters"]) < sum(peaks["parts"])


def test_samples_that_a_run_by_the_settings_refuses_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, lengths = tmp_path / "run.toml", tmp_path / "lengths.txt"
    config.write_text("[model]\nmax_seq_len = 200\n")
    asked = ["plan", "--config", str(config), "--lengths", str(lengths), "--effort", "0"]
    lengths.write_text("40\n201\n200\n")
    assert cli.main(asked) == 2
    assert "sample 1 has 201 positions but max_seq_len is 200 in " in capsys.readouterr().err
    assert cli.main([*asked, "--truncate"]) == 0
    lengths.write_text("40\n200\n")
    assert cli.main(asked) == 0


def planned(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", "--lengths", str(folder / "lengths.txt"), *arguments, "--json"]) == 0
    raw: dict[str, Any] = json.loads(capsys.readouterr().out)
    return raw


def test_a_plan_whose_replicas_an_engine_would_keep_waiting_is_not_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO stage 2 scatters gradients with each backward, so replicas of different counts meet each other's."""
    (tmp_path / "lengths.txt").write_text("300 200 150".replace(" ", "\n"))
    (tmp_path / "tokens.json").write_text(json.dumps(cost_model_to_json(TokenCosts(1))))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    plan, engine, config = (tmp_path / name for name in ("plan.json", "engine.toml", "whole.toml"))
    saved(tiny("llama", max_position_embeddings=1024), tmp_path)
    config.write_text(
        f'[model]\narchitecture = "{tmp_path}"\ninit_from = "{tmp_path}"\nbackend = "transformers"\n'
        "[topology]\ntp = 1\npp = 1\ndp = 2\n[data]\nbatch_size = 3\ntokens_per_batch = 0\n[plan]\nmax_tokens = 304\n"
    )
    engine.write_text(config.read_text() + f'[deepspeed]\nconfig = "{tmp_path / "ds.json"}"\n')
    flags = ["--costs", str(tmp_path / "tokens.json"), "--lengths", str(tmp_path / "lengths.txt")]
    raw = planned(capsys, tmp_path, "--config", str(config), *flags[:2])
    plan.write_text(json.dumps(raw))
    assert sorted(len(replica["micro_batches"]) for replica in raw["replicas"]) == [1, 2]
    assert cli.main(["check-plan", str(plan), "--config", str(config), *flags]) == 0
    capsys.readouterr()
    assert cli.main(["check-plan", str(plan), "--config", str(engine), *flags]) == 1
    assert "gradient reduction meets gradient scatter" in capsys.readouterr().out


def test_a_file_of_rules_alone_leaves_the_model_to_the_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another model than the default one of four layers: 8 stages, one layer each."""
    (tmp_path / "lengths.txt").write_text("40 300 17 90".replace(" ", "\n"))
    (tmp_path / "rules.toml").write_text("[plan]\neffort = 0\n")
    deep = TrainConfig().with_values(model={"num_layers": 8}, topology={"tp": 1, "pp": 8, "dp": 1})
    costs = analytic_costs(deep, architecture_of(deep, 256), flops_per_s=1e12, overhead_ns=0)
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(costs)))
    flags = ["--config", str(tmp_path / "rules.toml"), "--costs", str(tmp_path / "costs.json")]
    for degrees in ([], ["--pp", "8"]):
        raw = planned(capsys, tmp_path, *flags, *degrees)
        assert raw["topology"]["layers_per_stage"] == [1] * 8
