"""`dynapipe train` as people start it: real processes, a real store, a tiny model, and the files it leaves."""

from __future__ import annotations

import json
import lzma
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dynapipe_ext.launch.processes.network import free_port
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from dynapipe_ext.tools.account.run_events import read_events, read_history
from tests.support.given_costs import write_costs
from tests.support.limits import LIMIT_S
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES
from tests.support.trace_files import read_trace_file

TINY = f"""
[run]
steps = 2
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 3
{TINY_SIZES}max_seq_len = 256
[data]
num_samples = 60
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
[job]
timeout_s = 480
"""
BYTES_VOCABULARY = 258

# Point 8 of the report's contract: what every report has, at the least.
REPORT_FIELDS = {
    "topology",
    "layout",
    "losses",
    "real_tokens",
    "real_tokens_per_s",
    "cpu_s_per_token",
    "oversubscribed",
    "padding_efficiency",
    "num_micro_batches",
    "predicted_makespan_s",
    "measured_makespan_s",
    "bubble_ratio",
    "exposed_planning_s",
    "peak_bytes",
    "store",
    "compare",
}

Train = Callable[..., dict[str, Any]]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that is executed and must succeed; all it said is shown where it does not."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def report_of(run_dir: Path) -> dict[str, Any]:
    """The report of a run; our own reader must accept it."""
    RunReport.read(run_dir / "report.json")
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a tiny run, planned in line, with given costs: measured ones would make two runs plan differently."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "measured.toml").write_text(TINY)
    config = TrainConfig.read(folder / "measured.toml")
    write_costs(config, BYTES_VOCABULARY, folder / "costs.json")
    in_line = TINY.replace("[job]", "num_workers = 0\n[job]")
    (folder / "tiny.toml").write_text(f'{in_line}[plan]\ncosts = "{folder / "costs.json"}"\n')
    return folder / "tiny.toml"


@pytest.fixture
def train(preloaded: Preloaded, tiny: Path, tmp_path: Path) -> Train:
    """`train("--flag", …)` runs the tiny job with flags on top, in tmp_path / "run", and returns its report.

    Gloo forgives sends and receives that NCCL would not: every run is held to NCCL's rules.
    """

    def start(*arguments: str, config: Path = tiny) -> dict[str, Any]:
        words = ["--config", str(config), "--run-dir", str(tmp_path / "run"), "--overwrite", "--strict"]
        preloaded.train(*words, *arguments)
        return report_of(tmp_path / "run")

    return start


def test_eight_ranks_leave_a_whole_report_and_a_page(preloaded: Preloaded, tiny: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["--tp", "2", "--pp", "2", "--dp", "2", "--layout", "packed", "--run-dir", str(run_dir), "--strict"]
    words = ["train", "--config", str(tiny.with_name("measured.toml")), *flags]
    done = preloaded.run(words, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(run_dir)
    assert report.keys() >= REPORT_FIELDS
    assert report["topology"] == {"tp": 2, "pp": 2, "dp": 2}
    assert (report["layout"], report["compare"]) == ("packed", None)
    assert len(report["losses"]) == 2
    assert all(math.isfinite(loss) for loss in report["losses"])
    assert [len(counts) for counts in report["num_micro_batches"]] == [2, 2]  # a count for each replica and step
    assert len(report["predicted_makespan_s"]) == len(report["measured_makespan_s"]) == 2
    assert {"predicted", "measured"} <= report["bubble_ratio"].keys()
    assert [len(peaks) for peaks in report["peak_bytes"].values()] == [8, 8]
    assert all(peak > 0 for peaks in report["peak_bytes"].values() for peak in peaks)
    assert 0 < report["padding_efficiency"] <= 1
    assert report["real_tokens"] == sum(report["real_tokens_per_step"]) > 0
    assert report["cpu_s_per_token"] > 0
    assert report["real_tokens_per_s"] > 0
    assert report["exposed_planning_s"] >= 0
    assert report["oversubscribed"] is (len(os.sched_getaffinity(0)) < 8)
    assert report["store"]["server"] in ("valkey", "redis")
    assert re.match(r"\d+\.\d+", report["store"]["version"])

    page = (run_dir / "index.html").read_text()
    assert "dp1 pp1 tp1" in page
    for words in (
        "did 2 of 2 steps, on 8 ranks (TP2 × PP2 × DP2)",
        "Gradient norm",
        "Slowest actions",
        "What to try next",
        ">events.jsonl<",
    ):
        assert words in page
    assert page.count("<svg") == 8
    assert [one.kind for one in read_history(run_dir)] == ["begun", "save", "ended"]
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.search(r"@import|url\(\s*[\"']?https?:|fetch\(", page)
    spans = [event for event in _chrome(run_dir) if event.get("ph") == "X"]
    assert {event["tid"] for event in spans} == set(range(8))

    assert "ranks: 8 (TP2 x PP2 x DP2)\n" in done.stderr
    assert "step 2 (2/2)  loss" in done.stderr
    for words in ("tok/s", "padding", "bubble"):
        assert words in done.stderr
    assert "exposed planning" in done.stdout
    assert str(run_dir) in done.stdout.replace("\n", "")

    # Where ranks share cores, a step's one prediction is that of its simulated timeline.
    simulated = [trace.makespan_s for trace in read_trace_file(run_dir / "trace.json").simulated]
    assert report["predicted_makespan_s"] == pytest.approx(simulated, rel=1e-6)


def _chrome(run_dir: Path) -> list[dict[str, Any]]:
    raw = json.loads((run_dir / "trace.chrome.json").read_text())
    events: list[dict[str, Any]] = raw["traceEvents"] if isinstance(raw, dict) else raw
    return events


def test_the_same_seed_gives_the_same_losses_and_figures_of_all_ranks_come_every_log_every_steps(
    train: Train, tiny: Path, tmp_path: Path
) -> None:
    """And what means are of is said."""
    (tmp_path / "seldom.toml").write_text(tiny.read_text().replace("steps = 2", "steps = 9\nlog_every = 3"))
    seldom = train(config=tmp_path / "seldom.toml")
    events = read_events(tmp_path / "run" / "events.jsonl")
    ((_, steps),) = events.variants
    assert [done.number for done in steps] == [*range(1, 10)]
    assert [done.loss for done in steps] == seldom["losses"]
    assert [done.number for done in steps if done.all_ranks] == seldom["averaged_steps"] == [3, 6, 7, 8, 9]
    assert [makespan_s is not None for makespan_s in seldom["measured_makespan_s"]] == [False, False, True] * 2 + [
        True
    ] * 3
    *_, simulated = read_trace_file(tmp_path / "run" / "trace.json").simulated
    assert seldom["predicted_makespan_s"][-1] == pytest.approx(simulated.makespan_s, rel=1e-6)  # a core for each rank
    often = train("--steps", "9")
    for name in ("losses", "work", "num_micro_batches", "real_tokens_per_step"):  # sums are those of every step
        assert seldom[name] == often[name]
    assert train("--steps", "2", "--seed", "1")["losses"][0] != seldom["losses"][0]
    assert often["averaged_steps"] == [*range(1, 10)]
    assert seldom["accounted_steps"] == often["accounted_steps"] is None


def test_the_costs_of_a_run_make_another_run_plan_alike(train: Train, tiny: Path, tmp_path: Path) -> None:
    first = train(config=tiny.with_name("measured.toml"))
    costs = (tmp_path / "run" / "costs.json").rename(tmp_path / "costs.json")
    again = train("--costs", str(costs), config=tiny.with_name("measured.toml"))
    for name in ("losses", "num_micro_batches", "predicted_makespan_s"):
        assert again[name] == first[name]


def test_pairs_in_xz_and_zst_train_in_bfloat16_with_unequal_stages_and_the_loss_by_samples(
    train: Train, tiny: Path, tmp_path: Path
) -> None:
    for name, opened in (("pairs.jsonl.xz", lzma.open), ("pairs.jsonl.zst", zstandard.open)):
        with opened(tmp_path / name, "wt") as file:
            for i in range(24):
                file.write(json.dumps({"input": f"add {i} and {i}" * (1 + i % 5), "target": str(2 * i)}) + "\n")
    (tmp_path / "by-samples.toml").write_text(tiny.read_text() + 'loss_norm = "samples"\n')
    flags = ["--data", str(tmp_path / "pairs.jsonl.xz"), str(tmp_path / "pairs.jsonl.zst"), "--batch-size", "8"]
    flags += ["--layout", "padded", "--dtype", "bfloat16", "--layers-per-stage", "1,2"]
    report = train(*flags, config=tmp_path / "by-samples.toml")
    assert (report["loss_norm"], report["layout"]) == ("samples", "padded")
    assert report["layers_per_stage"] == [1, 2]
    assert report["model"]["dtype"] == "bfloat16"
    assert all(math.isfinite(loss) for loss in report["losses"])
    assert report["losses"][1] < report["losses"][0]


def test_compare_runs_the_usual_ways_beside_a_v_on_the_same_tokens_over_epochs_that_end_small(
    train: Train, four_layers: str, tmp_path: Path
) -> None:
    path = tmp_path / "few.jsonl"
    examples = [{"input": f"add {i} and {i} " * (1 + i), "target": str(2 * i)} for i in range(7)]
    path.write_text("\n".join(map(json.dumps, examples)))
    # Epochs of 3, 3 and 1 samples: the last batch has fewer samples than there are replicas.
    (tmp_path / "four.toml").write_text(four_layers)
    flags = ["--schedule", "zb-v", "--data", str(path), "--dp", "2", "--steps", "4", "--batch-size", "3"]
    report = train("--compare", *flags, config=tmp_path / "four.toml")
    assert len(report["losses"]) == 4
    assert report["placement"] == [0, 1, 1, 0]
    baselines = report["compare"]
    assert [baseline["schedule"] for baseline in baselines] == ["1f1b", "1f1b", "1f1b", "interleaved-1f1b", "zb-v"]
    assert {baseline["layout"] for baseline in baselines} == {"padded", "packed"}
    assert {baseline["real_tokens"] for baseline in baselines} == {report["real_tokens"]}
    assert {len(baseline["losses"]) for baseline in baselines} == {4}
    # Fresh weights and the same samples: only whole-row attention sees other context.
    losses = {baseline["name"]: baseline["losses"][0] for baseline in baselines}
    whole_row = next(name for name in losses if "whole-row" in name)
    for name in losses.keys() - {whole_row}:
        assert losses[name] == pytest.approx(report["losses"][0], rel=1e-5)


def test_no_rank_holds_more_than_was_predicted_where_backwards_are_split(train: Train, tiny: Path) -> None:
    """Under sequence parallelism, where I keeps more until W than the forward stores."""
    flags = ["--tp", "2", "--sequence-parallel", "--layout", "packed", "--schedule", "zb-h1"]
    peaks = train(*flags, config=tiny.with_name("measured.toml"))["peak_bytes"]
    assert len(peaks["measured"]) == 4
    for measured, predicted in zip(peaks["measured"], peaks["predicted"], strict=True):
        assert 0.6 * predicted <= measured <= predicted


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Settings and costs of a tiny model that makes four stages; the learning rate is the same at every step."""
    folder = tmp_path_factory.mktemp("four_layers")
    text = (
        TINY.replace("num_layers = 3", "num_layers = 4").replace("[job]", "num_workers = 0\n[job]") + "strict = true\n"
    )
    text += "[optimizer]\nlr = 1e-2\nmin_lr = 1e-2\nwarmup_steps = 1\n"
    (folder / "four.toml").write_text(text)
    config = TrainConfig.read(folder / "four.toml")
    write_costs(config, BYTES_VOCABULARY, folder / "costs.json")
    return f'{text}[plan]\neffort = 200\ncosts = "{folder / "costs.json"}"\n'


def test_a_v_learns_what_a_line_learns_and_goes_on_as_one(
    preloaded: Preloaded, four_layers: str, tmp_path: Path
) -> None:
    """And the loss falls."""
    (tmp_path / "four.toml").write_text(four_layers)
    settings = ["--config", "four.toml"]
    preloaded.train(*settings, "--run-dir", "line", "--steps", "4", cwd=tmp_path)
    preloaded.train(*settings, "--run-dir", "v", "--steps", "2", "--placement", "v", cwd=tmp_path)
    assert report_of(tmp_path / "v")["placement"] == [0, 1, 1, 0]
    preloaded.train("--resume", "v", "--placement", "linear", "--steps", "4", cwd=tmp_path)
    assert TrainConfig.read(tmp_path / "v" / "config.toml").topology.placement == "linear"
    wanted = report_of(tmp_path / "line")["losses"]
    assert len(wanted) == 4
    assert wanted[-1] < 0.9 * wanted[0]
    assert report_of(tmp_path / "v")["losses"] == pytest.approx(wanted, rel=1e-5)


def test_torchrun_trains_as_the_launcher_does(
    preloaded: Preloaded, train: Train, four_layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks take the placement that the first has settled. With the embedded server; the losses are bit for bit
    those of `dynapipe train` through the user's own server over TCP. The first rank is executed, no fork of a process
    in which all is imported: it imports what it trains with."""
    text = four_layers.replace("steps = 2", f'steps = 2\nrun_dir = "{tmp_path / "embedded"}"')
    (tmp_path / "auto.toml").write_text(text.replace("[topology]", '[topology]\nplacement = "auto"'))
    python = tmp_path / "python"  # torchrun begins with -u
    first, other = (f'exec {words} "$@"' for words in (sys.executable, preloaded.interpreter))
    python.write_text(f'#!/bin/sh\nshift\n[ "$LOCAL_RANK" = 0 ] && touch "$0-ran" && {first}\n{other}\n')
    python.chmod(0o700)
    words = [*shlex.split(preloaded.interpreter), "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "2", "-m", "dynapipe_ext.launch.rank", "--config", str(tmp_path / "auto.toml")]
    monkeypatch.setenv("PYTHON_EXEC", str(python))
    done = run(words)
    assert (tmp_path / "python-ran").exists()
    said = "ranks: 2 (TP1 x PP2 x DP1)"
    assert [line for line in done.stderr.splitlines() if line.startswith("ranks: ")] == [said]  # rank 0's alone
    tried = [line.split()[0] for line in done.stderr.splitlines() if re.match(r"\W*(v|linear|interleaved)\b", line)]
    taken = TrainConfig.read(tmp_path / "embedded" / "config.toml").topology
    assert sorted(word.rstrip(",") for word in tried) == ["interleaved", "linear", "v"]
    assert tried[0].rstrip(",") == taken.placement
    assert sum(taken.layers_per_stage) == 4
    report = report_of(tmp_path / "embedded")
    assert report["layers_per_stage"] == list(taken.layers_per_stage)
    assert "What to try next" in (tmp_path / "embedded" / "index.html").read_text()
    port = free_port()
    with RedisServer(port=port) as server:
        monkeypatch.setenv("DYNAPIPE_STORE_PASSWORD", server.address.password or "")
        launched = train("--store", f"redis://127.0.0.1:{port}", config=tmp_path / "auto.toml")
    assert TrainConfig.read(tmp_path / "run" / "config.toml").topology == taken
    assert report["losses"] == launched["losses"]
