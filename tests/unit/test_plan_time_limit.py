"""`dynapipe plan --time-limit`: the best of as many searches as fit, marked as what nobody can compute again."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import SampleLength, as_length_array, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.executor.proven_step import ProvenStep, prove_step
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.commands.plan import best_in_time
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.show.plan import list_orders

LENGTHS = [40, 300, 17, 90, 120, 64, 33, 250]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of a small plan."""
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS, np.int64))
    return ["plan", "--lengths", str(tmp_path / "lengths.npy"), "--tp", "1", "--pp", "2", "--dp", "2"]


def planned(path: Path) -> dict[str, Any]:
    """The plan in a file, which must be one that the reader proves to run."""
    assert list_orders(read_plan_file(path))
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


@dataclass(frozen=True)
class Scripted:
    """A planner whose plans are all alike but for the makespan that each seed has."""

    makespans_s: tuple[float, ...]
    seed: int = 0
    schedule: str = "adaptive"
    effort: int = 8

    memory_limit_bytes = 1e9
    activation_format, replica_collectives = ActivationFormat(8), ReplicaCollectives()

    def plan(self, samples: Sequence[SampleLength], *, step: int) -> StepPlan:
        plan = Planner(Topology(pp=2), TokenCosts(2), 1e9, self.seed, effort=1).plan(samples, step=step)
        makespan_ns = round(self.makespans_s[self.seed] * 1e9)
        return replace(plan, predictions=tuple(replace(p, makespan_ns=makespan_ns) for p in plan.predictions))


def searched(limit_s: float, makespans_s: tuple[float, ...], seed: int = 0) -> tuple[ProvenStep, int]:
    """What is kept and how many were tried where each search takes a second."""
    now = itertools.count()
    samples = sample_lengths(as_length_array(LENGTHS))
    planner: Any = Scripted(makespans_s, seed)
    return best_in_time(planner, samples, 2, limit_s, clock=lambda: next(now))


def test_a_time_limit_keeps_the_best_of_consecutive_seeds() -> None:
    best, num_tried = searched(4.5, (1.0, 9.0, 7.0, 5.0, 8.0, 6.0, 1.0), seed=1)
    assert (best.step_plan.makespan_s, num_tried) == (5.0, 5)


def test_of_equally_good_plans_the_first_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, made = Scripted.plan, []

    def noted(self: Scripted, *arguments: Any, **named: Any) -> StepPlan:
        made.append(inner(self, *arguments, **named))
        return made[-1]

    monkeypatch.setattr(Scripted, "plan", noted)
    best, num_tried = searched(2.5, (5.0, 5.0, 5.0))
    assert num_tried == len(made) == 3
    assert best.step_plan is made[0]


def test_a_time_limit_that_is_over_at_once_gives_the_plan_without_one() -> None:
    samples = sample_lengths(as_length_array(LENGTHS))
    found, num_tried = searched(0.5, (5.0, 1.0))
    assert (found.step_plan, num_tried) == (Scripted((5.0, 1.0)).plan(samples, step=2), 1)


def test_a_seed_that_finds_no_plan_costs_its_time_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Planner.plan

    def only_the_first(self: Planner, *arguments: Any, **named: Any) -> StepPlan:
        if self.seed != 4:
            raise PlanError("nothing fits")
        return inner(self, *arguments, **named)

    samples = sample_lengths(as_length_array(LENGTHS))
    planner = Planner(Topology(pp=3), TokenCosts(3), 1e9, 4, effort=10, format=ActivationFormat(8))
    plain, now = prove_step(planner, samples, step=0), itertools.count()
    monkeypatch.setattr(Planner, "plan", only_the_first)
    assert best_in_time(planner, samples, 0, 2.5, clock=lambda: next(now)) == (plain, 3)


def test_a_plan_with_a_time_limit_is_valid_never_worse_and_marked_as_not_reproducible(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, again, limited = tmp_path / "plain.json", tmp_path / "again.json", tmp_path / "limited.json"
    assert cli.main([*arguments, "--effort", "20", "--json", str(plain)]) == 0
    assert "tried:" not in capsys.readouterr().out
    assert cli.main([*arguments, "--effort", "20", "--time-limit", "0.3", "--json", str(limited)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"tried: [\d,]+ search(es)? from seed 0 on in 0\.3 s; .* not reproducible", said)
    one, other = planned(plain), planned(limited)
    assert (other["reproducible"], other["time_limit_s"]) == (False, 0.3)
    assert not {"reproducible", "time_limit_s"} & one.keys()
    ends = [max(replica["predicted"]["makespan_s"] for replica in raw["replicas"]) for raw in (one, other)]
    assert ends[1] <= ends[0]
    assert cli.main(["plan", "--show", str(limited)]) == 0
    assert cli.main(["check-plan", str(limited), "--lengths", str(tmp_path / "lengths.npy")]) == 0
    assert cli.main([*arguments, "--effort", "20", "--json", str(again)]) == 0
    assert again.read_bytes() == plain.read_bytes()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command leaves."""
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize("limit", ["0", "-3", "nan", "inf", "1e+99"])
def test_a_time_limit_must_be_above_0(arguments: list[str], capsys: pytest.CaptureFixture[str], limit: str) -> None:
    said = refused(capsys, *arguments, "--time-limit", limit)
    assert f"--time-limit is {limit} s but must be above 0, and at most 1e+06" in said


@pytest.mark.parametrize("settings", [["--schedule", "1f1b"], ["--effort", "0"]], ids=" ".join)
def test_a_time_limit_is_refused_where_seeds_change_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    said = refused(capsys, *arguments, "--time-limit", "5", *settings)
    assert "--time-limit searches again with other seeds, but schedule" in said
