"""`dynapipe plan --forward-only` and what reads its file: shown, drawn, and checked by code that did not make it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.launch import cli

Raw = dict[str, Any]
SIZE = ("--tp", "1", "--pp", "4", "--dp", "2", "--layout", "padded")


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(5, 400, 60))
    return str(path)


@pytest.fixture
def raw(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Raw:
    """A plan's file, whose command's output is left to be read."""
    target = tmp_path / "plan.json"
    assert cli.main(["plan", "--lengths", lengths, *SIZE, "--forward-only", "--json", str(target)]) == 0
    found: Raw = json.loads(target.read_text())
    return found


def checked(raw: Raw, lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Raw]:
    (tmp_path / "again.json").write_text(json.dumps(raw))
    capsys.readouterr()
    status = cli.main(["check-plan", str(tmp_path / "again.json"), "--lengths", lengths, "--json"])
    verdict: Raw = json.loads(capsys.readouterr().out)
    return status, verdict


def test_a_plan_of_forwards_says_so_is_what_it_claims_and_can_be_shown_and_drawn(
    raw: Raw, lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Plan of forwards alone for TP1 × PP4 × DP2" in capsys.readouterr().out
    assert raw["forward_only"] is True
    assert {action[1] for r in raw["replicas"] for rank in r["schedule"]["stages"] for action in rank} == {"F"}
    status, verdict = checked(raw, lengths, tmp_path, capsys)
    assert (status, verdict["faults"]) == (0, [])
    assert 0 < verdict["bound_s"] <= verdict["makespan_s"]
    claimed = {f["what"]: f for f in verdict["figures"] if f["claimed"] is not None}
    assert claimed.keys() >= {"makespan", "stage bound", "chain bound", "heads_tails bound", "lower bound"}
    for figure in claimed.values():
        assert figure["claimed"] == pytest.approx(figure["found"], rel=1e-6, abs=1e-7)
    assert cli.main(["plan", "--show", str(tmp_path / "plan.json")]) == 0
    assert "Plan of forwards alone" in capsys.readouterr().out
    assert cli.main(["show-schedule", str(tmp_path / "plan.json")]) == 0
    assert "peak in flight  1 micro-batch" in capsys.readouterr().out


def _training(raw: Raw) -> None:
    del raw["forward_only"]


def _with_backward(raw: Raw) -> None:
    raw["replicas"][0]["schedule"]["stages"][3].append("3B0")


def _recomputed(raw: Raw) -> None:
    raw["replicas"][0]["micro_batches"][0]["recompute"] = "full"


def _faster(raw: Raw) -> None:
    raw["replicas"][0]["predicted"]["makespan_s"] *= 0.99


def _smaller(raw: Raw) -> None:
    raw["replicas"][0]["predicted"]["peak_bytes"][1] -= 1


def _other_order(raw: Raw) -> None:
    raw["replicas"][0]["schedule"]["stages"][2].reverse()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_training, "must run F and B, or F, I and W"),
        (_with_backward, "must run F alone"),
        (_recomputed, "recomputes nothing"),
        (_faster, "makespan is claimed"),
        (_smaller, "at its peak but needs"),
        (_other_order, "the makespan is claimed"),
    ],
)
def test_a_damaged_plan_of_forwards_is_refused_for_its_reason(
    damage: Callable[[Raw], None],
    says: str,
    raw: Raw,
    lengths: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(raw)
    status, verdict = checked(raw, lengths, tmp_path, capsys)
    assert status == 1
    assert any(says in fault for fault in verdict["faults"]), verdict["faults"]


@pytest.mark.parametrize("flag", [("--schedule", "1f1b"), ("--split-backward",)])
def test_flags_that_say_how_backwards_run_are_refused(
    flag: tuple[str, ...], lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--lengths", lengths, *SIZE, "--forward-only", *flag]) == 2
    assert f"{flag[0]} has nothing to change in forwards alone" in capsys.readouterr().err
