"""`dynapipe estimate` from its arguments to its text, its JSON and its settings file."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.command_parser import CommandParser
from dynapipe_ext.launch.commands import estimate as estimate_command
from dynapipe_ext.launch.job.configured import architecture_of, topology_of
from dynapipe_ext.models.named_models import read_model
from dynapipe_ext.settings.train_config import TrainConfig

SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 320,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
QUICK = ["--plans", "6", "--effort", "0", "--tokens-per-batch", "4096:16384"]


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def run(*words: str) -> int:
    parser = CommandParser()
    estimate_command.add_arguments(parser)
    return estimate_command.run(parser.parse_args(list(words)))


def test_everything_is_in_the_json_and_nothing_else_on_standard_output(small, capsys):
    status = run(
        "--model", small, "--gpus-per-node", "2", "--tokens", "1e9", "--price-per-gpu-hour", "2", *QUICK, "--json"
    )
    raw = json.loads(capsys.readouterr().out)
    assert status == 0
    assert raw["format"] == "dynapipe-estimate/1"
    assert raw["model"]["parameters"] == 2 * 1000 * 128 + 4 * (128 * (256 + 128) + 3 * 128 * 320 + 2 * 128) + 128
    rates = [option["tokens_per_s"] for option in raw["options"]]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[0] >= 0.95 * max(rates)
    for option in raw["options"]:
        parts = ("weights", "gradients", "optimizer", "activations", "logits", "working", "buffers", "reserved")
        for stage in option["stages"]:
            assert stage["total"] == sum(stage[part] for part in parts) <= 80e9
        assert option["days"] == pytest.approx(1e9 / option["tokens_per_s"] / 86_400)
        assert option["cost"] == pytest.approx(option["days"] * 24 * 2 * 2)
        seconds = sum(option[name] for name in ("pipeline_s", "exchange_s", "optimizer_s", "offload_s"))
        assert option["step_s"] == pytest.approx(seconds)
        assert 0 < option["evaluation"]["alone_bytes"] <= option["evaluation"]["beside_training_bytes"]
    assert {"reason", "count", "least_excess_bytes"} == set(raw["dropped"][0])


def test_the_table_names_the_assumptions_the_options_and_why_others_were_dropped(small, capsys):
    assert run("--model", small, "--gpus-per-node", "3", "--device", "a100", *QUICK) == 0
    text = capsys.readouterr().out
    for said in (
        "model: ",
        "1 x 3 a100 of 80 GB",
        "312 TFLOP/s bf16 x efficiency 0.6",
        "data sheet",
        "tp x pp x dp",
        "memory of option 1, GB a rank",
        "gradients",
        "evaluation of one such batch",
        "1 x tp does not divide num_heads 4",
    ):
        assert said in text


def test_the_status_is_1_where_nothing_fits_and_the_text_says_by_how_much(capsys):
    assert run("--model", "llama-2-70b", "--gpus-per-node", "1", "--offload", "none", *QUICK[:4]) == 1
    text = capsys.readouterr().out
    assert "no option fits" in text
    assert "weights and states alone do not fit (closest: tp 1 x pp 1 x dp 1, by 1,163.6 GB)" in text


def test_json_goes_to_a_file_beside_the_table(small, tmp_path, capsys):
    path = tmp_path / "estimate.json"
    assert run("--model", small, "--gpus-per-node", "1", *QUICK, "--json", str(path)) == 0
    assert json.loads(path.read_text())["options"]
    assert "as JSON in" in capsys.readouterr().out


def test_the_settings_are_those_of_the_option_and_train_takes_them(small, tmp_path, capsys):
    path, found = tmp_path / "best.toml", tmp_path / "estimate.json"
    words = ["--model", small, "--gpus-per-node", "4", "--length-distribution", "lognormal:100,1,512"]
    assert run(*words, *QUICK, "--tokens", "1e6", "--offload", "none", "--write", str(path), "--json", str(found)) == 0
    config = TrainConfig.read(path)
    options = json.loads(found.read_text())["options"]
    place, option = next((i, o) for i, o in enumerate(options, 1) if not o["why_not_trained_here"])
    assert f"option {place} is in" in capsys.readouterr().out
    topology = topology_of(config)
    assert (topology.tp, topology.pp, topology.dp) == (option["tp"], option["pp"], option["dp"])
    assert list(topology.layers_per_stage) == option["layers_per_stage"]
    assert config.plan.recompute == option["recompute"]
    assert config.plan.layout == option["layout"]
    assert config.data.tokens_per_batch == option["tokens_per_batch"]
    assert config.optimizer.distributed == (option["zero_stage"] == 1)
    assert config.plan.memory_limit_gb == 78.0
    assert config.run.steps == -(-1_000_000 // option["real_tokens"])
    shape = architecture_of(config, config.data.vocab_size)
    assert shape == read_model(small)[0]


def test_samples_longer_than_the_model_are_estimated_and_said_not_to_train(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("5000\n5\n4\n")
    words = ["--model", "llama-2-7b", "--gpus-per-node", "8", "--lengths", str(lengths), *QUICK[:4]]
    with pytest.raises(ConfigError, match="a sample has 5,000 positions and the model takes 4,096: --truncate cuts"):
        run(*words, "--write", str(tmp_path / "b.toml"))
    assert "1 longer than the 4,096 positions that the model was made for" in capsys.readouterr().out
    assert run(*words, "--write", str(tmp_path / "b.toml"), "--truncate") == 0
    assert TrainConfig.read(tmp_path / "b.toml").model.max_seq_len == 4096


def test_an_encoder_decoder_is_written_with_room_for_input_and_target_together(tmp_path):
    path = tmp_path / "t5.toml"
    words = ["--model", "t5-small", "--gpus-per-node", "2", *QUICK[:4], "--tokens-per-batch", "4096:8192"]
    assert run(*words, "--write", str(path)) == 0
    config = TrainConfig.read(path)
    assert config.model.described == read_model("t5-small")[0]
    assert config.model.max_seq_len > config.model.described.max_seq_len


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gpt2", "--precision", "fp16"], r"can run none .* options \(precision fp16 needs loss scaling"),
        (["--model", "gpt2", "--zero", "2"], r"can run none of the .* options \(ZeRO stage 2 with offload"),
        (["--model", "llama-2-70b", "--offload", "none"], "nothing fits, so there is nothing to write"),
    ],
)
def test_what_train_cannot_run_is_not_written(words, said, tmp_path):
    path = tmp_path / "best.toml"
    with pytest.raises(ConfigError, match=said):
        run(*words, "--gpus-per-node", "2", *QUICK[:4], "--tokens-per-batch", "4096:8192", "--write", str(path))
    assert not path.exists()


def test_lengths_of_a_file_are_planned(small, tmp_path, capsys):
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, np.random.default_rng(0).integers(10, 700, 300))
    words = ["--model", small, "--gpus-per-node", "2", *QUICK, "--lengths", str(lengths), "--truncate", "512", "--json"]
    assert run(*words) == 0
    raw = json.loads(capsys.readouterr().out)
    assert "300 samples of" in raw["data"]["description"]
    assert "cut at 512" in raw["data"]["description"]
    assert raw["data"]["most_tokens"] == 512


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nope"], "is no preset"),
        (["--tp", "x"], "--tp is 'x' but must be numbers of 1 to"),
        (["--zero", "4"], "--zero is '4' but must be numbers of 0 to 3"),
        (["--offload", "disk"], "--offload is 'disk': choose from none, optimizer, all"),
        (["--layout", "ragged"], "--layout is 'ragged': choose from padded, packed"),
        (["--recompute", "some"], "--recompute is 'some': choose from none, selective, full, stage, head"),
        (["--plans", "0"], "--plans is 0 but must be at least 1"),
        (["--tokens", "-1"], "--tokens is -1 but must be at least 0"),
        (["--price-per-gpu-hour", "2"], "makes a cost of a whole run: give its --tokens too"),
        (["--tokens-per-batch", "9:"], "--tokens-per-batch is '9,' but must be numbers"),
        (["--tokens-per-batch", "9,99"], "--tokens-per-batch is '9,99' but must be one number, or two as LOW:HIGH"),
        (["--tokens-per-batch", "9:99,999"], "--tokens-per-batch is '9:99,999' but must be one number, or two as"),
        (["--tokens-per-batch", "1:2:3"], "but must be numbers"),
        (
            ["--tokens-per-batch", "8192", "--max-samples", "2"],
            "--max-samples is 2 but --tokens-per-batch '8192' alone",
        ),
        (["--max-samples", "0"], "--max-samples is 0 but must be at least 1"),
        (["--tokens-per-batch", "100"], "a sample has 1,024 tokens but a global batch has at most 100"),
        (["--precision", "fp32", "--states", "mixed"], "--states mixed is about 16-bit weights"),
        (["--truncate", "9"], "--truncate cuts at 9, but nothing is given to cut: give --lengths"),
        (["--data", "a.jsonl"], "--data a.jsonl is what --write names as training data, and nothing is read from it"),
        (["--seed", "-1"], "--seed is -1 but must be at least 0"),
        (["--pieces", "auto", "--model", "t5-small"], "--pieces is auto but t5 is an encoder-decoder"),
        (["--pieces", "4096", "--layout", "padded"], "--pieces is 4096 but pieces share packed rows: add packed to"),
        (["--nodes", "0"], "nodes is 0 but must be 1 to 65,536"),
        (["--gpu-memory-gb", "1"], "reserved_gb is 2 of 1 GB of a device"),
        (["--length-distribution", "normal:1"], "length distribution 'normal:1' is not known"),
    ],
)
def test_bad_arguments_are_refused_by_name(words, said):
    model = [] if "--model" in words else ["--model", "gpt2"]
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        run(*model, *words)


def test_a_lengths_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read as lengths"):
        run("--model", "gpt2", "--lengths", str(tmp_path / "none.npy"))


def test_the_guide_names_every_key_of_a_cluster_s_file(root):
    page = (root / ".github/docs/tools.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == estimate_command._CLUSTER_FIGURES


def test_figures_of_a_cluster_are_those_of_its_file(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("efficiency = 0.25\nintra_gb_per_s = 150\nhost_memory_gb = 512\n")
    parser = CommandParser()
    estimate_command.add_arguments(parser)
    cluster = estimate_command.question_of(parser.parse_args(["--model", "gpt2", "--cluster", str(file)])).cluster
    assert (cluster.efficiency, cluster.intra_bytes_per_s, cluster.host_memory_gb) == (0.25, 150e9, 512)
    for text, said in (
        ("intra = 9", r"unknown .'intra'."),
        ("efficiency = true", "efficiency is True but must be a number"),
        ("efficiency =", "cannot be read as TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            run("--model", "gpt2", "--cluster", str(file))
