"""`dynapipe profile` on a real megatron-core model, interrupted, resumed, and used by a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from dynapipe_ext.costs.surface import Measured
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.executor import profiling
from dynapipe_ext.launch.cli import main
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch

_CONFIG = """
[model]
num_layers = 3
hidden_size = 32
num_heads = 2
num_query_groups = 1
ffn_hidden_size = 64
gated_mlp = true
norm = "rmsnorm"
bias = false
max_seq_len = 64
[data]
vocab_size = 200
"""
_FEW = ("--min-len", "8", "--max-tokens", "256", "--max-shapes", "6", "--held-out", "1", "--recompute", "none", "full")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "model.toml"
    path.write_text(_CONFIG)
    return str(path)


@pytest.mark.timeout(120)
def test_a_model_is_measured_and_its_table_plans(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.json"
    assert main(["profile", "--config", config, "--out", str(out), *_FEW]) == 0
    shown = capsys.readouterr().out
    assert "held-out error" in shown
    assert "shapes measured" in shown
    table = CostTable.read(out)
    assert {kind for kind, _ in table.grids} == {"none", "full"}
    assert set(table.provenance) >= {"device", "date", "versions", "dtype", "measured", "held_out_error", "model"}
    # Bytes are counted, so they must be right even on a busy machine.
    assert table.provenance["held_out_error"]["padded"]["stored_bytes"] < 0.03
    assert table.provenance["held_out_error"]["padded"]["peak_bytes"] < 0.10
    none, full = (
        table.evaluate([MicroBatch((SampleLength(0, 40), SampleLength(1, 40)), recompute=kind)])  # type: ignore[arg-type]
        for kind in ("none", "full")
    )
    assert full.stored_bytes[0, 0] < none.stored_bytes[0, 0]
    assert full.backward_ns[0, 0] > none.backward_ns[0, 0]
    assert 0 < none.weight_ns[0, 0] < none.backward_ns[0, 0]
    assert not list(tmp_path.glob("*.part"))
    np.save(tmp_path / "lengths.npy", np.array([9, 60, 33, 12, 17, 40]))
    arguments = ["--costs", str(out), "--pp", "3", "--dp", "1", "--memory-limit-gb", "1", "--split-backward"]
    assert main(["plan", *arguments, "--lengths", str(tmp_path / "lengths.npy")]) == 0


class _Stub:
    """Counts what it is asked, and ends after `fuel` measurements as Ctrl-C does."""

    asked, fuel = 0, 10**9

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Stub:
        return self

    def __exit__(self, *_: object) -> None: ...

    def measure(self, part: str, m: MicroBatch) -> Measured:
        if _Stub.asked == _Stub.fuel:
            raise KeyboardInterrupt
        _Stub.asked += 1
        seconds = 1e-4 + 1e-6 * m.padded_tokens
        return Measured(
            forward_s=seconds, backward_s=2 * seconds, input_s=seconds, weight_s=seconds,
            stored_bytes=100 * m.padded_tokens, peak_bytes=150 * m.padded_tokens,
        )  # fmt: skip


def test_an_interrupted_profile_goes_on_where_it_was(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiling, "LayerProfiler", _Stub)
    out = tmp_path / "costs.json"
    arguments = ["profile", "--config", config, "--out", str(out), "--min-len", "8", "--held-out", "2"]
    monkeypatch.setattr(_Stub, "asked", 0)
    monkeypatch.setattr(_Stub, "fuel", 10)
    assert main(arguments) == 130
    assert not out.exists()
    part = json.loads((tmp_path / "costs.json.part").read_text())
    assert len(part["points"]) == 8  # two shapes, each in four ways; the third was cut
    monkeypatch.setattr(_Stub, "asked", 0)
    monkeypatch.setattr(_Stub, "fuel", 10**9)
    assert main(arguments) == 0
    resumed, table = _Stub.asked, out.read_text()
    out.unlink()
    monkeypatch.setattr(_Stub, "asked", 0)
    assert main(arguments) == 0
    assert _Stub.asked == resumed + 8
    again, first = json.loads(out.read_text()), json.loads(table)
    assert again["grids"] == first["grids"]
    capsys.readouterr()


def test_measurements_of_another_model_are_not_mixed_in(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiling, "LayerProfiler", _Stub)
    monkeypatch.setattr(_Stub, "asked", 0)
    monkeypatch.setattr(_Stub, "fuel", 10)
    arguments = ["--out", str(tmp_path / "costs.json"), "--min-len", "8"]
    assert main(["profile", "--config", config, *arguments]) == 130
    other = tmp_path / "other.toml"
    other.write_text(_CONFIG.replace("hidden_size = 32", "hidden_size = 48"))
    assert main(["profile", "--config", str(other), *arguments]) == 2
    assert "measurements of another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp", "2"], "--tp is 2"),
        (["--min-len", "100"], "must ascend"),
        (["--error-target", "0"], "--error-target is 0.0"),
        (["--max-shapes", "0"], "--max-shapes is 0"),
        (["--max-seconds", "nan"], "--max-seconds is nan"),
    ],
)
def test_bad_settings_are_refused(
    arguments: list[str], said: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status: Any = main(["profile", "--config", config, "--out", str(tmp_path / "costs.json"), *arguments])
    assert status == 2
    assert said in capsys.readouterr().err
