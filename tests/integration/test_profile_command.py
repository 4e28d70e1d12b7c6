"""`dynapipe profile` on a real megatron-core model, interrupted, resumed, and used by a plan."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.costs.surface import Measured
from dynapipe_ext.executor.measuring import profiling
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.commands import profile_model
from dynapipe_ext.launch.job.configured import architecture_of
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.listeners import listeners_seen, refuse_open
from tests.support.preloaded import Preloaded

_CONFIG = """
[model]
num_layers = 3
hidden_size = 32
num_heads = 2
num_query_groups = 2
ffn_hidden_size = 64
gated_mlp = true
norm = "rmsnorm"
bias = false
max_seq_len = 64
[topology]
tp = 1
[data]
vocab_size = 200
"""
_PAIRS = """
[run]
steps = 2
[model]
num_layers = 3
num_decoder_layers = 2
hidden_size = 32
num_heads = 2
ffn_hidden_size = 64
max_seq_len = 64
tied_embeddings = false
[data]
vocab_size = 300
num_samples = 60
truncate = true
tokens_per_batch = 0
batch_size = 12
num_workers = 0
[topology]
tp = 1
[job]
timeout_s = 480
"""
_FEW = ("--min-len", "8", "--max-tokens", "256", "--max-shapes", "6", "--held-out", "1", "--recompute", "none,full")


@pytest.fixture(scope="module", autouse=True)
def few_repeats() -> Iterator[None]:
    """Of each action as many as any has: what is held here are bytes, and times that are far apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "_MOST_REPEATS", profiling._LEAST_REPEATS)
        yield


@pytest.fixture
def one_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time is looked at."""
    for name in ("_MOST_REPEATS", "_LEAST_REPEATS"):
        monkeypatch.setattr(profiling, name, 1)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "model.toml"
    path.write_text(_CONFIG)
    return str(path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a table of the model on one rank."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "model.toml").write_text(_CONFIG)
    assert main(["profile", "--config", str(folder / "model.toml"), "--out", str(folder / "costs.json"), *_FEW]) == 0
    return folder


def test_a_model_is_measured_and_its_table_plans(measured: Path) -> None:
    out = measured / "costs.json"
    table = read_cost_file(out)
    assert {kind for kind, _ in table.grids} == {"none", "full"}
    assert set(table.provenance) >= {"device", "date", "versions", "dtype", "measured", "held_out_error", "model"}
    # Bytes are counted, so they must be right even on a busy machine.
    assert table.provenance["held_out_error"]["padded"]["stored_bytes"] < 0.03
    assert table.provenance["held_out_error"]["padded"]["peak_bytes"] < 0.10
    assert table.provenance["held_out_error"]["packed"]["stored_bytes"] < 0.01
    assert table.provenance["held_out_error"]["packed"]["peak_bytes"] < 0.05
    none, full = (
        table.evaluate([MicroBatch((SampleLength(0, 40), SampleLength(1, 40)), recompute=kind)])  # type: ignore[arg-type]
        for kind in ("none", "full")
    )
    assert full.stored_bytes[0, 0] < none.stored_bytes[0, 0]
    assert full.backward_ns[0, 0] > none.backward_ns[0, 0]
    assert 0 < none.weight_ns[0, 0] < none.backward_ns[0, 0]
    assert not list(measured.glob("*.part"))
    np.save(measured / "lengths.npy", np.array([9, 60, 33, 12, 17, 40]))
    arguments = ["--costs", str(out), "--pp", "3", "--dp", "1", "--memory-limit-gb", "1", "--split-backward"]
    assert main(["plan", *arguments, "--lengths", str(measured / "lengths.npy")]) == 0


def test_a_measured_table_plans_samples_in_pieces_that_are_longer_than_any_row(measured: Path) -> None:
    out, lengths, plan = (str(measured / name) for name in ("costs.json", "long.npy", "plan.json"))
    table = read_cost_file(out)
    assert table.pieces is not None
    assert table.pieces.kept_values == 2 * 32
    assert table.provenance["held_out_error"]["pieces"]["stored_bytes"] < 0.02
    pieces = [MicroBatch((SampleLength(0, 32, start=n),), "packed", attention="carried") for n in range(0, 320, 32)]
    times = table.evaluate(pieces)
    for ns in (times.forward_ns[0], times.backward_ns[0]):
        assert (np.diff(ns) >= 0).all()
    np.save(lengths, np.array([9, 320, 33, 12, 17, 40]))
    arguments = ["--costs", out, "--pp", "3", "--dp", "1", "--memory-limit-gb", "1", "--layout", "packed"]
    assert main(["plan", *arguments, "--lengths", lengths, "--pieces", "32", "--json", plan]) == 0
    carried = [one for one in json.loads(Path(plan).read_text())["replicas"][0]["micro_batches"] if "carried" in one]
    assert len(carried) >= 10
    assert main(["check-plan", plan, "--lengths", lengths, *arguments[:2], "--memory-limit-gb", "1"]) == 0
    assert main(["plan", *arguments, "--lengths", lengths, "--pieces", "off"]) == 2


@pytest.mark.usefixtures("one_repeat")
def test_tensor_parallel_layers_are_measured_on_as_many_ranks(
    measured: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, together = tmp_path / "model.toml", tmp_path / "costs.json"
    config.write_text(_CONFIG.replace("tp = 1", "tp = 2\nsequence_parallel = true"))
    arguments = ["--config", str(config), *_FEW, "--max-tokens", "128", "--max-shapes", "4", "--recompute", "none"]
    assert main(["profile", *arguments, "--out", str(together)]) == 0
    shown = capfd.readouterr().out
    assert shown.count("held-out error") == 1  # the first rank alone shows
    assert "shapes measured" in shown
    one, two = read_cost_file(measured / "costs.json"), read_cost_file(together)
    assert (two.topology.tp, two.provenance["sequence_parallel"]) == (2, True)
    m = MicroBatch((SampleLength(0, 64), SampleLength(1, 64)))
    stored = [table.evaluate([m]).stored_bytes[0, 0] for table in (one, two)]
    assert 0.4 < stored[1] / stored[0] < 0.75  # the sequence, heads and widths are divided; gathered inputs are not
    assert (one.pieces.kept_values, two.pieces.kept_values) == (64, 32)  # type: ignore[union-attr]
    assert two.provenance["held_out_error"]["pieces"]["stored_bytes"] < 0.02
    assert 0.5 < two.parameter_bytes["encoder"] / one.parameter_bytes["encoder"] < 0.6


@pytest.mark.usefixtures("one_repeat")
def test_widths_are_measured_by_real_ranks_and_priced_by_what_these_took(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four ranks over gloo; two heads, so that four of them gather keys and values. Steps choose between these widths,
    though the plane has eight ranks."""
    config, out, lengths = tmp_path / "model.toml", tmp_path / "costs.json", str(tmp_path / "lengths.npy")
    config.write_text(_CONFIG.replace("tp = 1", 'tp = 1\ndp = 4\ncontext_parallel = "auto"'))
    few = [*_FEW, "--max-tokens", "128", "--max-shapes", "4", "--recompute", "none"]
    with listeners_seen() as listeners:
        assert main(["profile", "--config", str(config), *few, "--out", str(out)]) == 0
    refuse_open(listeners)
    assert "width 4: exchange" in capfd.readouterr().out
    table = read_cost_file(out)
    assert set(table.blocks) == {2, 4}
    sizes = {len(times["even_s"]) for times in table.provenance["exchanges"].values()}
    assert min(sizes) >= 3
    m = MicroBatch((SampleLength(0, 64),), "packed", pad_multiple=4)
    laid_out = table.with_topology(Topology(dp=4))[0]
    one, two = (laid_out.at_width(width).evaluate([m]) for width in (1, 2))
    block = table.blocks[2]
    exchange_ns = 3 * (2 * block.even.latency_ns + 64 / 2 * (64 / 2 + 32) * 4 / block.even.bytes_per_s * 1e9)
    assert two.forward_ns[0, 0] == pytest.approx(one.forward_ns[0, 0] * (1 + block.tax) / 2 + exchange_ns, rel=1e-3)
    np.save(lengths, np.array([64, *[9] * 20]))
    arguments = ["--costs", str(out), "--pp", "3", "--dp", "8", "--memory-limit-gb", "1", "--lengths", lengths]
    assert main(["plan", *arguments, "--layout", "packed", "--context-parallel", "auto"]) == 0
    assert "of 1, 2, 4" in capfd.readouterr().out
    assert main(["plan", *arguments, "--layout", "packed", "--context-parallel", "8"]) == 2
    assert "measure (dynapipe profile --widths 8)" in capfd.readouterr().err


@pytest.mark.usefixtures("one_repeat")
def test_a_model_of_a_family_is_measured_as_it_is_with_a_head_in_slices_that_keeps_no_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3 has norms of queries and keys and heads of their own size, which the settings of a run cannot say."""
    config, out = tmp_path / "config.json", tmp_path / "costs.json"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 32, "intermediate_size": 48, "vocab_size": 200, "max_position_embeddings": 64}
    config.write_text(json.dumps({"model_type": "qwen3", **sizes}))
    few = ["--min-len", "64", "--max-tokens", "2048", "--max-shapes", "1", "--held-out", "2", "--recompute", "full"]
    assert main(["profile", "--model", str(config), "--out", str(out), *few]) == 0
    assert "--max-shapes is 1 but a table needs 3 at least: as many are measured\n" in capsys.readouterr().err
    table = read_cost_file(out)
    attention = 32 * (64 + 2 * 32) + 64 * 32 + 2 * 32
    assert table.parameter_bytes["encoder"] == 4 * (attention + 3 * 32 * 48 + 2 * 32)
    assert table.facts.slices_head
    assert table.provenance["held_out_error"]["head in slices"]["stored_bytes"] < 0.03
    rows = tuple(SampleLength(i, 64) for i in range(32))
    whole, sliced = (table.evaluate([MicroBatch(rows, recompute=kind)]) for kind in ("full", "head+full"))  # type: ignore[arg-type]
    logits_bytes = 4 * 256 * 32 * 64  # of the padded vocabulary
    assert whole.stored_bytes[-1, 0] - sliced.stored_bytes[-1, 0] >= 7 / 8 * logits_bytes
    peaks = [(costs.stored_bytes + costs.working_bytes)[-1, 0] for costs in (sliced, whole)]
    assert peaks == sorted(peaks)
    assert sliced.weight_ns[-1, 0] <= whole.weight_ns[-1, 0]


@pytest.fixture(scope="module")
def measured_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a table of an encoder-decoder."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "model.toml").write_text(_PAIRS)
    few = ["--min-len", "16", "--max-len", "64", "--max-tokens", "256"]
    few += ["--max-shapes", "1", "--held-out", "2", "--recompute", "none,full"]
    assert main(["profile", "--config", str(folder / "model.toml"), "--out", str(folder / "costs.json"), *few]) == 0
    return folder


def test_an_encoder_decoder_is_measured_and_its_table_plans(measured_pairs: Path) -> None:
    table = read_cost_file(measured_pairs / "costs.json")
    assert set(table.grids) == {(r, k) for r in ("none", "full") for k in ("encoder", "decoder", "postprocess")}
    assert (table.num_layers, table.total_layers) == (3, 5)
    errors = table.provenance["held_out_error"]
    assert errors["padded"]["stored_bytes"] < 0.01
    assert errors["padded"]["peak_bytes"] < 0.05
    assert errors["packed"]["stored_bytes"] < 0.01
    assert errors["packed"]["peak_bytes"] < 0.05
    none, full = (
        table.evaluate([MicroBatch((SampleLength(0, 40, 12),) * 2, recompute=kind)])  # type: ignore[arg-type]
        for kind in ("none", "full")
    )
    assert full.stored_bytes[0, 0] < none.stored_bytes[0, 0] / 2
    assert full.backward_ns[0, 0] > none.backward_ns[0, 0]
    assert 0 < none.weight_ns[0, 0] < none.backward_ns[0, 0]
    np.save(measured_pairs / "lengths.npy", np.array([[9, 4], [60, 12], [33, 16], [12, 2], [17, 9], [40, 8]]))
    arguments = ["--costs", str(measured_pairs / "costs.json"), "--pp", "5", "--memory-limit-gb", "1"]
    assert main(["plan", *arguments, "--split-backward", "--lengths", str(measured_pairs / "lengths.npy")]) == 0


@pytest.mark.parametrize(("layout", "layers"), [("padded", "4,1"), ("packed", "3,2")])
def test_pairs_train_within_the_memory_that_a_measured_table_predicts(
    layout: str, layers: str, measured_pairs: Path, preloaded: Preloaded, tmp_path: Path
) -> None:
    """The encoder ends on a stage with decoder layers, or on one of its own: its norm and output are counted there."""
    config = tmp_path / "run.toml"
    config.write_text(f'{_PAIRS}\n[plan]\ncosts = "{measured_pairs / "costs.json"}"\nrecompute = "none"\n')
    arguments = ["--config", str(config), "--layout", layout, "--pp", "2", "--dp", "1", "--layers-per-stage", layers]
    preloaded.train(*arguments, "--run-dir", str(tmp_path / "run"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    peaks = report["peak_bytes"]
    for measured, predicted in zip(peaks["measured"], peaks["predicted"], strict=True):
        assert 0.75 * predicted <= measured <= predicted
    assert len(report["predicted_makespan_s"]) == len(report["measured_makespan_s"]) == 2


def test_one_rank_agrees_with_itself() -> None:
    shape = architecture_of(TrainConfig(), 200)
    alone = profiling.Ranks(rank=0, tp=1, init_method="", sequence_parallel=False)
    profiler = profiling.LayerProfiler(shape, dtype="float32", device=torch.device("cpu"), ranks=alone)
    assert (profiler.agree(True), profiler.agree(False)) == (True, False)


class _Stub:
    """Notes what it is asked; after `fuel` measurements somebody presses Ctrl-C."""

    notes, fuel = Path(), 10**9

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Stub:
        return self

    def __exit__(self, *_: object) -> None: ...

    def agree(self, answer: bool) -> bool:
        return answer

    def measure(self, part: str, *micro_batches: MicroBatch, bytes_only: bool = False) -> Measured:
        if len(_Stub.notes.read_text().split()) == _Stub.fuel:
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        with _Stub.notes.open("a") as notes:
            notes.write(f"{part}\n")
        tokens, count = micro_batches[0].padded_tokens, len(micro_batches)
        seconds = 1e-4 + 1e-6 * tokens
        if count == 1:
            return Measured(seconds, 2 * seconds, seconds, seconds, 100 * tokens, 150 * tokens)
        each_s = (seconds,) * count + (2 * seconds,) * count
        return Measured(
            count * seconds, 2 * count * seconds, 0.0, 0.0, 100 * tokens * count, 300 * tokens * count, each_s
        )


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], int], tuple[int, int]]:
    """Runs the command over the stub: its status, and how much it measured."""
    monkeypatch.setattr(profiling, "LayerProfiler", _Stub)
    monkeypatch.setattr(_Stub, "notes", tmp_path / "notes")

    def profile(arguments: list[str], fuel: int = 10**9) -> tuple[int, int]:
        _Stub.notes.write_text("")
        monkeypatch.setattr(_Stub, "fuel", fuel)
        return main(["profile", *arguments]), len(_Stub.notes.read_text().split())

    return profile


def test_an_interrupted_profile_goes_on_where_it_was(
    config: str, tmp_path: Path, stub: Callable[..., tuple[int, int]]
) -> None:
    out = tmp_path / "costs.json"
    arguments = ["--config", config, "--out", str(out), "--min-len", "8", "--held-out", "2"]
    assert stub(arguments, 10) == (130, 10)
    assert not out.exists()
    part = json.loads((tmp_path / "costs.json.part").read_text())
    assert len(part["points"]) == 8  # two shapes, each in four ways; the third was cut
    status, resumed = stub(arguments)
    first = json.loads(out.read_text())
    out.unlink()
    assert (status, stub(arguments)) == (0, (0, resumed + 8))
    assert json.loads(out.read_text())["grids"] == first["grids"]


@pytest.mark.parametrize(
    ("token_s", "longest", "status"), [(2e-3, "64", 0), (1e-2, "64", 0), (0.2, "64", 2), (0.02, "16", 0)]
)
def test_the_limit_in_seconds_holds_or_is_refused_within_it(
    token_s: float, longest: str, status: int, config: str, tmp_path: Path,
    stub: Callable[..., tuple[int, int]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On a machine that measures twelve runs and half as much again, on a clock of its own."""
    now, log = [0.0], tmp_path / "clock"
    measure = _Stub.measure

    def slow(self: _Stub, part: str, *micro_batches: MicroBatch, bytes_only: bool = False) -> Measured:
        run_s = token_s * micro_batches[0].rows * micro_batches[0].encoder_len
        now[0] += max(1.5, 18 * run_s) * (0.1 if bytes_only else 1.0)
        log.write_text(str(now[0]))
        measured, count = measure(self, part, *micro_batches, bytes_only=bytes_only), len(micro_batches)
        each_s = ((run_s / 3,) * count + (run_s / 1.5,) * count) if count > 1 else ()
        return replace(measured, forward_s=count * run_s / 3, backward_s=count * run_s / 1.5, each_s=each_s)

    monkeypatch.setattr(_Stub, "measure", slow)
    monkeypatch.setattr(profile_model, "time", SimpleNamespace(monotonic=lambda: now[0]))
    arguments = ["--config", config, "--out", str(tmp_path / "costs.json"), "--min-len", "8", "--recompute", "none"]
    assert stub([*arguments, "--max-seconds", "60", "--max-len", longest])[0] == status
    assert float(log.read_text()) <= 60
    if status:
        assert "there is no time to measure a row of 64 positions" in capfd.readouterr().err
    else:
        table = read_cost_file(tmp_path / "costs.json")
        table.evaluate([MicroBatch((SampleLength(0, int(longest)),))])
        assert any(table.provenance["held_out_error"].values()) or token_s > 2e-3


def test_two_profiles_of_one_file_do_not_run_at_once(
    config: str, tmp_path: Path, stub: Callable[..., tuple[int, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.json"
    with (tmp_path / ".costs.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert stub(["--config", config, "--out", str(out)]) == (2, 0)
    assert "is being measured by another process" in capfd.readouterr().err
    assert stub(["--config", config, "--out", str(out)])[0] == 0
    assert not list(tmp_path.glob(".*"))


def test_the_errors_are_json_on_request(
    config: str, tmp_path: Path, stub: Callable[..., tuple[int, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert stub(["--config", config, "--out", str(tmp_path / "costs.json"), "--json"])[0] == 0
    found = json.loads(capfd.readouterr().out)
    assert found["held_out_error"]["padded"]["mean"]["forward_s"] < 0.05
    assert found["shapes"] >= 6


@pytest.mark.parametrize("asked", ["by the settings", "by the flag", "nowhere"])
def test_states_are_divided_over_replicas_where_the_run_of_these_settings_divides_them(
    asked: str, config: str, tmp_path: Path, stub: Callable[..., tuple[int, int]]
) -> None:
    Path(config).write_text(_CONFIG + "[optimizer]\ndistributed = true\n" * (asked == "by the settings"))
    flag = ["--distributed-optimizer"] * (asked == "by the flag")
    assert stub(["--config", config, "--out", str(tmp_path / "costs.json"), *flag])[0] == 0
    facts = read_cost_file(tmp_path / "costs.json").facts
    assert bool(facts.sharded_state_bytes) == (asked != "nowhere")


def test_measurements_of_another_model_are_not_mixed_in(
    config: str, tmp_path: Path, stub: Callable[..., tuple[int, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path / "costs.json"), "--min-len", "8"]
    assert stub(["--config", config, *arguments], 10)[0] == 130
    other = tmp_path / "other.toml"
    other.write_text(_CONFIG.replace("hidden_size = 32", "hidden_size = 48"))
    assert stub(["--config", str(other), *arguments]) == (2, 0)
    assert "measurements of another model" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp", "3"], "tp is 3 but does not divide num_heads 2: choose another tp or size"),  # in train's words
        (["--out", "no/such/folder/costs.json"], "must name a file in a folder that exists"),
        (["--min-len", "100"], "must ascend"),
        (["--max-len", "0"], "--max-len is 0"),
        (["--max-decoder-len", "8"], "--max-decoder-len is 8 but the model has no decoder side"),
        (["--seed", "-1"], "--seed is -1"),
        (["--out", "."], "must name a file"),
        (["--error-target", "0"], "--error-target is 0.0"),
        (["--max-shapes", "0"], "--max-shapes is 0"),
        (["--max-seconds", "nan"], "--max-seconds is nan"),
        (["--error-target", "inf"], "--error-target is inf"),
        (["--max-tokens", "9" * 20], "--max-tokens is 9999"),
    ],
)
def test_bad_settings_are_refused(
    arguments: list[str], said: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status: Any = main(["profile", "--config", config, "--out", str(tmp_path / "costs.json"), *arguments])
    assert status == 2
    assert said in capsys.readouterr().err
