"""`dynapipe compare`: what is said of two runs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynapipe_ext.launch.subcommands import run_subcommand
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.steps import a_step
from tests.unit.test_run_page import EVIL, Texts, a_run, steps_of_a_run

USER_ERROR = 2


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run_subcommand(["compare", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_runs_of_other_settings_and_lengths_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = a_run(tmp_path / "one", steps_of_a_run())
    settings = TrainConfig().with_values(run={"steps": 20}, plan={"schedule": "1f1b"}).to_json()
    slower = [replace(a_step(step, bubble_ratio=0.5, loss=3.0, real_tokens=500), step_s=2.0) for step in range(7)]
    other = a_run(tmp_path / "other", slower, settings=settings)
    page, report = tmp_path / "both.html", tmp_path / "both.json"
    said = compared(capsys, one, other, "--html", page, "--json", report)
    for sentence in (
        "1 setting differs: [plan] schedule (adaptive → 1f1b).",
        "one has 12 steps, other 7.",
        "At step 7, the last that both have, the loss of other is 2.714 higher (0.2857 → 3.0000).",
        "other has 72.2 % fewer tokens a second.",
        "10.0 % → 50.0 % of positions are padding.",
        "25.0 % → 50.0 % of a step are idle.",
        "The fullest rank holds 60 B → 60 B (the same).",
    ):
        assert sentence in said, said
        assert sentence in Texts(page.read_text()).text
    assert page.read_text().count("<svg") == 8
    assert not {*Texts(page.read_text()).links}
    told = json.loads(report.read_text())
    assert told["settings"] == {"[plan] schedule": ["adaptive", "1f1b"]}
    assert told["figures"]["tokens a second"] == ["900", "250"]


def test_a_run_beside_one_of_the_same_settings_is_said_to_be_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (a_run(tmp_path / place / "run", steps_of_a_run()) for place in ("x", "y"))
    said = compared(capsys, one, other)
    assert "x/run" in said
    assert "All settings are the same." in said
    assert "At step 12, the last that both have, the losses are equal (0.1667)." in said
    assert "Both have the same tokens a second." in said
    assert "run (1)" in compared(capsys, one, one)


def test_losses_on_other_data_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = a_run(tmp_path / "one", steps_of_a_run())
    settings = TrainConfig().with_values(run={"steps": 20}, data={"path": "b.jsonl"}).to_json()
    said = compared(capsys, one, a_run(tmp_path / "other", steps_of_a_run(), settings=settings))
    assert "The samples or their tokens differ, so losses do not compare." in said
    assert "the losses are" not in said


def test_a_run_without_a_step_and_a_killed_one_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = a_run(tmp_path / "one", steps_of_a_run()), a_run(tmp_path / "other", [])
    with (one / "events.jsonl").open("a") as file:
        file.write('{"variant": "ours", "st')
    said = compared(capsys, one, other, "--html", tmp_path / "both.html")
    assert "other has no finished step, so there is nothing to compare." in said


def test_no_text_of_two_runs_can_leave_its_element(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "<script>alert(1)<"
    one = a_run(tmp_path / name, steps_of_a_run())
    settings = TrainConfig().with_values(data={"fields": [EVIL]}).to_json()
    other = a_run(tmp_path / "other", steps_of_a_run(), settings=settings, device=EVIL)
    compared(capsys, one, other, "--html", tmp_path / "both.html")
    page = Texts((tmp_path / "both.html").read_text())
    assert not {"script", "img"} & {*page.tags}
    assert page.text.count("alert(1)") > 10


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ([], "is no run's directory: it has no events.jsonl"),
        (["events.jsonl"], "line 1 is not JSON"),
    ],
    ids=["nothing", "no header"],
)
def test_what_is_no_run_is_refused_by_name(
    left: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = a_run(tmp_path / "one", steps_of_a_run())
    (tmp_path / "empty").mkdir()
    for name in left:
        (tmp_path / "empty" / name).write_text("")
    assert run_subcommand(["compare", str(one), str(tmp_path / "empty")]) == USER_ERROR
    said = capsys.readouterr().err
    assert str(tmp_path / "empty") in said
    assert message in said
