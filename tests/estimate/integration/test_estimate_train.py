"""The best option of an estimate, written as settings, trains."""

from __future__ import annotations

import argparse
import json

from dynapipe_ext.launch.commands import estimate as estimate_command
from tests.support.preloaded import Preloaded

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def test_the_best_option_for_this_model_and_cluster_is_trained_within_its_memory(preloaded: Preloaded, tmp_path):
    """Two ranks of 0.1 GB, two steps; the measured peaks stay under the limit that the estimate was made for."""
    model, best = tmp_path / "config.json", tmp_path / "best.toml"
    model.write_text(json.dumps(MODEL))
    parser = argparse.ArgumentParser()
    estimate_command.add_arguments(parser)
    words = ["--model", str(model), "--gpus-per-node", "2", "--device", "cpu", "--gpu-memory-gb", "0.1"]
    words += ["--precision", "fp32", "--length-distribution", "lognormal:100,0.8,256", "--tokens-per-batch", "2048"]
    words += ["--pp", "2", "--plans", "4", "--write", str(best)]
    assert estimate_command.run(parser.parse_args(words)) == 0

    preloaded.train("--config", str(best), "--from-scratch", "--steps", "2", "--run-dir", str(tmp_path / "run"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [report["topology"][name] for name in ("tp", "pp", "dp")] == [1, 2, 1]
    assert len(report["losses"]) == 2
    assert all(0 < peak <= 0.1e9 for peak in report["peak_bytes"]["measured"])
    assert report["model"]["num_query_groups"] == 2
