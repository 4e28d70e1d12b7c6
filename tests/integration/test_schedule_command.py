"""`dynapipe show-schedule` from the command line to the files it writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynapipe_ext.launch.cli import main
from dynapipe_ext.schedules.notation import from_csv
from dynapipe_ext.schedules.published.by_name import PUBLISHED, make_published_schedule
from dynapipe_ext.tools.show.schedule import FOR_COSTS


@pytest.mark.parametrize("name", [*PUBLISHED, *FOR_COSTS])
def test_every_schedule_is_drawn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-schedule", name, "--pp", "3", "--micro-batches", "5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: ")
    assert "3 ranks, 5 micro-batches" in text
    assert all(
        figure in text for figure in ("makespan", "lower bound", "bubble ratio", "peak in flight", "peak memory")
    )


@pytest.mark.parametrize(
    "shape", ["--pp 1", "--micro-batches 1", "--pp 6 --micro-batches 2", "--pp 1 --micro-batches 1"]
)
@pytest.mark.parametrize("name", [*PUBLISHED, *FOR_COSTS])
def test_every_schedule_is_drawn_for_one_rank_one_micro_batch_and_fewer_micro_batches_than_ranks(
    name: str, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show-schedule", name, *shape.split()]) == 0
    assert "above" in capsys.readouterr().out


def test_schedules_made_for_costs_say_their_limit_and_keep_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --memory-limit-gb it is what 1F1B holds of these micro-batches."""
    uneven = ["--micro-batches", "12", "--costs-cv", "0.6", "--seed", "1"]
    figures = {}
    for arguments in (["1f1b"], ["cyclic"], ["adaptive"], ["adaptive", "--split-backward"]):
        assert main(["show-schedule", *arguments, *uneven]) == 0
        text = capsys.readouterr().out
        figures[" ".join(arguments)] = tuple(
            float(re.search(pattern, text)[1]) for pattern in (r"makespan +([\d.]+) ms", r"peak memory +([\d.]+) MB")
        )
        assert arguments == ["1f1b"] or f"at most {figures['1f1b'][1]:g} MB a rank" in " ".join(text.split())
    makespans, peaks = zip(*figures.values(), strict=True)
    assert list(makespans) == sorted(set(makespans), reverse=True)
    assert max(peaks) == peaks[0]
    assert main(["show-schedule", "adaptive", *uneven, "--memory-limit-gb", "0.003"]) == 0
    assert "at most 3 MB a rank" in " ".join(capsys.readouterr().out.split())


def test_the_command_of_the_readme_draws_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "dynapipe show-schedule zb-v --pp 4 --micro-batches 8 --html zb-v.html"
    assert main(command.split()[1:]) == 0
    assert "8 stages on 4 ranks" in capsys.readouterr().out
    assert "<html" in (tmp_path / "zb-v.html").read_text()


def test_a_written_csv_is_drawn_as_the_schedule_it_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "zb-v.csv"
    uneven = ["--costs-cv", "0.4", "--seed", "3", "--times", "1,1,0.5"]
    assert main(["show-schedule", "zb-v", "--csv", str(file), *uneven]) == 0
    first = capsys.readouterr().out
    assert from_csv(file.read_text(), "zb-v") == make_published_schedule("zb-v", 4, 8)
    assert main(["show-schedule", str(file), *uneven]) == 0
    assert first.startswith(capsys.readouterr().out)


def test_a_plan_is_drawn_by_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, plan = tmp_path / "lengths.txt", tmp_path / "plan.json"
    lengths.write_text("\n".join(str(5 + i * 37 % 400) for i in range(60)))
    made = ["plan", "--lengths", str(lengths), "--batch-size", "60", "--tp", "1", "--pp", "2", "--dp", "2"]
    assert main([*made, "--json", str(plan)]) == 0
    capsys.readouterr()
    assert main(["show-schedule", str(plan), "--replica", "1"]) == 0
    assert "2 ranks" in capsys.readouterr().out
    assert main(["show-schedule", str(plan), "--replica", "2"]) == 2
    assert "--replica is 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["zbh1"],
            "is not known: choose one of gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, v-half, cyclic, adaptive",
        ),
        (["1f1b", "--stages-per-rank", "2"], "1f1b has 1 stage per rank, not 2"),
        (["1f1b", "--pp", "0"], "0 ranks"),
        (["1f1b", "--micro-batches", "0"], "a schedule with 0 micro-batches: give at least 1"),
        (["cyclic", "--micro-batches", "0"], "cyclic with 4 ranks, 0 micro-batches"),
        (["adaptive", "--stages-per-rank", "0"], "0 stages a rank: give at least 1"),
        (["cyclic", "--stages-per-rank", "2"], "cyclic has 1 stage a rank, not 2"),
        (
            ["cyclic", "--memory-limit-gb", "0.0009"],
            "micro-batch 0 alone needs 1000000 B on stage 0 but the limit is 9",
        ),
        (["cyclic", "--memory-limit-gb", "nan"], "--memory-limit-gb is nan but must lie above 0"),
        (
            ["zb-h2", "--memory-limit-gb", "0.006"],
            "zb-h2 holds 7000000 B on rank 0 but --memory-limit-gb allows 6000000 B",
        ),
        (["adaptive", "--effort", "-1"], "effort is -1"),
        (["adaptive", "--effort", "999999999"], "lower --effort to"),
        (["zb-h1", "--split-backward"], "--split-backward is for the search: zb-h1 is not searched"),
        (["cyclic", "--effort", "3"], "--effort is for the search: cyclic is not searched"),
        (["1f1b", "--pp", "1000", "--micro-batches", "100000"], "a picture takes at most 40000 of both multiplied"),
        (["zb-v", "--pp", "200", "--micro-batches", "101"], "a picture takes at most 40000 of both multiplied"),
        (["1f1b", "--pp", "20000"], "20000 stages cannot be drawn: a picture takes at most 2048"),
        (["cyclic", "--pp", "10000"], "10000 stages cannot be drawn: a picture takes at most 2048"),
        (["interleaved-1f1b", "--pp", "1025"], "2050 stages cannot be drawn: a picture takes at most 2048"),
        (["adaptive", "--pp", "1024", "--micro-batches", "10", "--effort", "900"], "lower --effort to 287 or less"),
        (["1f1b", "--seed", "3"], "--seed makes uneven micro-batches"),
        (["1f1b", "--replica", "0"], "--replica picks a replica of a plan"),
        (["1f1b", "--times", "0,0,0"], "must be F,I,W"),
        (["1f1b", "--times", "1,x"], "must be three numbers"),
        (["1f1b", "--times", "1,1"], "--times is '1,1' but must be three numbers"),
        (["1f1b", "--costs-cv", "-1"], "between 0 and 10"),
        (["here.txt", "--pp", "4"], "--pp is what here.txt says itself"),
        (["here.txt", "--replica", "0"], "here.txt holds one schedule"),
        (["broken.csv"], "broken.csv: row 1, cell 2"),
        (["broken.txt"], "broken.txt: line 2: action '1Q0' is not of the form 2F0"),
        (["absent.csv"], "absent.csv cannot be read"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("0: 0F0 0B0\n")
    (tmp_path / "broken.csv").write_text("0F0,0Q0\n")
    (tmp_path / "broken.txt").write_text("0: 0F0 0B0\n1: 1F0 1Q0\n")
    assert main(["show-schedule", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
