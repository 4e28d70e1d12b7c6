"""`dynapipe plan --config` and `check-plan --config`: plans of what a run of these settings trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynapipe_ext.launch import cli


@pytest.mark.parametrize("placement", ["linear", "auto"])
def test_plans_of_settings_hold_what_these_train(
    placement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deterministic mode's sums of gradients, and no states of weights that adapters freeze: as the trainer's plans."""
    lengths = str(tmp_path / "lengths.txt")
    Path(lengths).write_text("40 300 17 90 120 64 33 250".replace(" ", "\n"))
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    llama |= {"num_attention_heads": 4, "vocab_size": 1024, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    model, peaks = f'[model]\narchitecture = "{tmp_path}"\n', {}
    settings = {"whole": "", "exact": "[optimizer]\ndeterministic = true\n", "adapters": "[lora]\nenabled = true\n"}
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
    assert sum(peaks["adapters"]) < sum(peaks["whole"])


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
