"""Commands on a GPU as people run them: trained, resumed, profiled, and models of transformers beside the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.given_costs import write_costs
from tests.support.limits import LIMIT_S
from tests.support.model_folders import VOCABULARY, model_folder, write_chats

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="runs on a GPU alone")

BYTES_VOCABULARY = 258
STEPS, SAVED = 4, 2
WIDTH = 512 if DEVICE.type == "cuda" else 64  # of the profiled model: wide enough that bytes are its own
SETTINGS = """
[topology]
tp = 1
pp = 1
dp = 1
[model]
num_layers = 4
hidden_size = {width}
num_heads = 4
num_query_groups = 2
ffn_hidden_size = {width}
gated_mlp = true
norm = "rmsnorm"
bias = false
max_seq_len = 256
dtype = "bfloat16"
dropout = {dropout}
[data]
num_samples = 100
tokenizer = "bytes"
truncate = true
tokens_per_batch = 4096
[job]
timeout_s = 240
"""
TRAINED = ["--costs", "given.json", "--deterministic", "--save-every", str(SAVED), "--keep-last", "0"]
PROFILED = ["--min-len", "16", "--max-len", "256", "--max-tokens", "4096", "--max-shapes", "4", "--held-out", "1"]
PROFILED += ["--recompute", "none,full", "--max-seconds", "120"]
TUNED = ["--model", "model", "--data", "data.jsonl", "--costs", "model.json", "--backend", "transformers"]
TUNED += ["--steps", str(STEPS), "--batch-size", "8", "--lr", "1e-2", "--num-workers", "0", "--save-every", str(STEPS)]
LORA = ["--lora", "--lora-r", "4"]


class Commands:
    """Starts commands in a folder, each in a thread that waits for it."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.folder, self._threads = folder, threads

    def start(
        self, *words: str, after: Callable[[], object] | None = None, device: torch.device = DEVICE
    ) -> Future[str]:
        """What it says; its result fails where the command does. `after`: what must have returned before."""
        return self._threads.submit(self._run, words, after, device)

    def _run(self, words: tuple[str, ...], after: Callable[[], object] | None, device: torch.device) -> str:
        if after is not None:
            after()
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
        command = [sys.executable, "-m", "dynapipe_ext.launch.cli", *words]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **hidden},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"dynapipe {' '.join(words)}: {done.returncode}\n{said}"
        assert "Traceback" not in said, said
        return said

    def report(self, run: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / run / "report.json").read_text())
        return report


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with ThreadPoolExecutor(max_workers=8) as threads:
        folder = tmp_path_factory.mktemp("commands")
        for name, width, dropout in (("small", 64, 0.1), ("wide", WIDTH, 0.0)):
            (folder / f"{name}.toml").write_text(SETTINGS.format(width=width, dropout=dropout))
        write_costs(TrainConfig.read(folder / "small.toml"), BYTES_VOCABULARY, folder / "given.json")
        yield Commands(folder, threads)


Started = dict[str, Future[str]]


@pytest.fixture(scope="module", autouse=True)
def started(commands: Commands) -> Started:
    """All commands, which run beside one another: most of their time they import."""
    start, folder = commands.start, commands.folder
    model_folder("llama", folder / "model")
    write_chats(folder / "data.jsonl", 40)
    named = {"architecture": str(folder / "model"), "backend": "transformers"}
    config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
    write_costs(config, VOCABULARY, folder / "model.json")
    whole = start("train", "--config", "small.toml", "--steps", str(STEPS), "--run-dir", "whole", *TRAINED)
    profile = start("profile", "--config", "wide.toml", "--out", "table.json", *PROFILED)
    found: Started = {"whole": whole, "profile": profile}
    for kind, words in {"full": [], "lora": LORA}.items():
        for place in (DEVICE, torch.device("cpu")):
            name = f"{kind}-{place.type}{'' if place is DEVICE else '-alone'}"
            outputs = ["--run-dir", name, "--output", f"{name}-trained"]
            found[name] = start("train", *TUNED, *words, *outputs, device=place)

    def stopped() -> None:
        whole.result()
        interrupted(folder / "whole", folder / "again")

    found["again"] = start("train", "--resume", "again", after=stopped)
    costs = ["--costs", "table.json", "--plan-dir", "plans"]
    found["profiled"] = start(
        "train", "--config", "wide.toml", "--steps", "3", "--run-dir", "profiled", *costs, after=profile.result
    )
    return found


def interrupted(run: Path, copy: Path) -> None:
    """A run as it was when it had saved its first checkpoint alone."""
    shutil.copytree(run, copy)
    for later in sorted((copy / "checkpoints").glob("iter_*"))[1:]:
        shutil.rmtree(later)


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of the newest checkpoint of megatron-core."""
    reader = FileSystemReader(max((run / "checkpoints").glob("iter_*")))
    told = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(data.size, dtype=data.properties.dtype)
        for name, data in told.items()
        if isinstance(data, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def test_a_deterministic_run_that_was_resumed_has_the_bits_of_one_that_was_not(
    commands: Commands, started: Started
) -> None:
    said = [started[name].result() for name in ("whole", "again")]
    assert f"step {SAVED} (" in said[0]
    assert f"step {SAVED} (" not in said[1]
    assert f"step {SAVED + 1} (" in said[1]
    whole, again = (commands.report(name) for name in ("whole", "again"))
    assert ("cpu" in whole["device"]) == (DEVICE.type == "cpu")
    assert len(whole["losses"]) == STEPS
    assert whole["losses"] == again["losses"]
    expected, found = (last_tensors(commands.folder / name) for name in ("whole", "again"))
    assert any("exp_avg_sq" in name for name in expected)
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_a_run_plans_with_the_seconds_and_bytes_that_were_measured(commands: Commands, started: Started) -> None:
    for name in ("profile", "profiled"):
        started[name].result()
    table, report = read_cost_file(commands.folder / "table.json"), commands.report("profiled")
    assert ("cpu" in table.provenance["device"]) == (DEVICE.type == "cpu"), table.provenance
    for step, makespan_s in enumerate(report["predicted_makespan_s"]):
        ((replica),) = json.loads((commands.folder / "plans" / f"step-{step:06}.json").read_text())["replicas"]
        costs = table.evaluate([micro_batch_of(told) for told in replica["micro_batches"]])
        own_s = float((costs.forward_ns + costs.backward_ns).sum()) / 1e9
        assert makespan_s == pytest.approx(own_s, rel=0.05)
    ((predicted,), (measured,)) = (report["peak_bytes"][key] for key in ("predicted", "measured"))
    print(
        f"peak {measured / 1e6:.1f} MB of {predicted / 1e6:.1f} predicted; seconds"
        f" {report['measured_makespan_s']} of {report['predicted_makespan_s']}"
    )
    assert 0.5 * predicted < measured < 1.5 * predicted


def micro_batch_of(told: dict[str, Any]) -> MicroBatch:
    samples = tuple(
        SampleLength(index, encoder, decoder, target) for index, _, encoder, decoder, target in told["samples"]
    )
    return MicroBatch(samples, told["layout"], told["recompute"], pad_multiple=8)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_models_of_transformers_are_tuned_as_on_the_cpu(kind: str, commands: Commands, started: Started) -> None:
    here, there = f"{kind}-{DEVICE.type}", f"{kind}-cpu-alone"
    said = started[here].result()
    started[there].result()
    assert ("weights of adapters train" in said) == (kind == "lora")
    reports = [commands.report(name) for name in (here, there)]
    assert ("cpu" in reports[0]["device"]) == (DEVICE.type == "cpu")
    assert len(reports[0]["losses"]) == STEPS
    assert reports[0]["losses"] == pytest.approx(reports[1]["losses"], rel=1e-3)
    for file in ["trained/adapter_model"] if kind == "lora" else ["trained/model"]:
        own, wanted = (load_file(commands.folder / f"{name}-{file}.safetensors") for name in (here, there))
        assert own.keys() == wanted.keys()
        for name, weight in wanted.items():
            difference = float((own[name] - weight).norm() / weight.norm())
            assert difference < 1e-2, f"{file}, {name}: {difference:.1e}"
