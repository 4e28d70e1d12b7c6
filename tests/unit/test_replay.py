"""A dumped step is planned again to the same bits, and what differs is shown by where it stands."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.plans.dump import DUMPED_PLANNER_FORMAT, DumpingPlanner, planner_file
from dynapipe_ext.executor.plans.planner_process import describe_planner, planner_of
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.configured import variants
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig

SAMPLES = [SampleLength(i, length, 0, length - 1) for i, length in enumerate((12, 7, 350, 41, 9, 1024, 88, 16))]
PLANNER = Planner(
    Topology(pp=2, dp=2),
    TokenCosts(2, ns_per_token=1_000, ns_per_token_squared=2, bytes_per_token=4_096),
    16e6,
    layout="packed",
    effort=50,
    format=ActivationFormat(64),
    collectives=ReplicaCollectives(),
)
# Ranks that share cores, rows of fixed length that cut samples, pieces of a long sample: no plan file holds these.
PLANNERS = {
    "packed": PLANNER,
    "shared cores": replace(PLANNER, num_cores=2),
    "cut rows": replace(PLANNER, split_policy="fixed-rows", max_tokens=512, schedule="1f1b"),
    "pieces": replace(PLANNER, pieces=256),
    "forwards": PLANNER.for_forwards(),
    "buffers that had no room": replace(PLANNER, memory_limit_bytes=14e6, format=ActivationFormat(4096)),
}
EVEN = [SampleLength(i, 128, 0, 127) for i in range(16)]


def dumped(planner: Planner, folder: Path) -> Path:
    samples = EVEN if planner is PLANNERS["buffers that had no room"] else SAMPLES
    dumping = DumpingPlanner(planner, folder)
    prove_step(dumping, samples, step=12)
    dumping.begins(12)
    return folder / "step-000012.json"


def replay(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["replay", str(path)])
    said = capsys.readouterr()
    return status, said.out + said.err


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", PLANNERS)
def test_the_same_planner_plans_the_same(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dumped(PLANNERS[name], tmp_path)
    assert (json.loads(path.read_text())["reserve_bytes"] > 0) == (name == "buffers that had no room")
    status, said = replay(path, capsys)
    assert said.endswith("plan 12 is the same, bit for bit\n")
    assert status == 0
    assert "makespan" in said


def test_a_dump_has_lengths_shapes_memory_and_trace(tmp_path: Path) -> None:
    dump = json.loads(dumped(PLANNER, tmp_path).read_text())
    plan = PLANNER.plan(SAMPLES, step=12)
    if dump["reserve_bytes"]:
        plan = PLANNER.replan(plan, SAMPLES, reserve_bytes=dump["reserve_bytes"])
    assert dump["samples"] == [[s.index, s.encoder, s.decoder, s.target] for s in SAMPLES]
    for replica, wanted, trace, predicted in zip(
        dump["replicas"], plan.batch.replicas, plan.traces, plan.predictions, strict=True
    ):
        shapes = [(m["rows"], m["encoder_len"], m["decoder_len"]) for m in replica["micro_batches"]]
        assert shapes == [(m.rows, m.encoder_len, m.decoder_len) for m in wanted.micro_batches]
        assert replica["predicted"]["peak_bytes"] == list(predicted.peak_bytes)
        assert [(s["label"], s["start_s"]) for s in replica["trace"]] == [(s.label, s.start_s) for s in trace.spans]


def test_dumping_changes_no_plan_here_or_in_a_planner_process(tmp_path: Path) -> None:
    planner = DumpingPlanner(PLANNER, tmp_path)
    there = planner_of(json.loads(json.dumps(describe_planner(planner))))
    wanted = prove_step(PLANNER, SAMPLES, step=3).plans
    assert prove_step(planner, SAMPLES, step=3).plans == prove_step(there, SAMPLES, step=3).plans == wanted


def test_what_differs_is_named_by_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dumped(PLANNER, tmp_path)
    raw = json.loads(path.read_text())
    now = raw["replicas"][1]["micro_batches"][0]["rows"]
    raw["replicas"][1]["micro_batches"][0]["rows"] = 77
    path.write_text(json.dumps(raw))
    status, said = replay(path, capsys)
    assert f"replicas[1].micro_batches[0].rows: dumped 77, now {now}\n" in said
    assert said.endswith("plan 12 is another one now\n")
    assert status == 1


def test_a_planner_of_other_costs_is_said_to_be_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dumped(PLANNER, tmp_path)
    slower = replace(PLANNER, costs=TokenCosts(2, ns_per_token=2_000, ns_per_token_squared=2, bytes_per_token=4_096))
    edit(tmp_path / json.loads(path.read_text())["planner"], planner=slower.to_json())
    status, said = replay(path, capsys)
    assert "settings or costs were changed since the run" in said
    assert "predicted.makespan_ns: dumped" in said
    assert status == 1


@pytest.mark.parametrize(
    ("rules", "older"),
    [({}, {"equal_counts": False, "recompute": None}),
     ({"replica_counts": "equal", "recompute": "full"}, {"equal_counts": True, "recompute": "full"})],
)  # fmt: skip
def test_a_dump_in_the_words_of_older_runs_is_planned_again(
    rules: dict[str, Any], older: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = replace(PLANNER, **rules)
    path = dumped(planner, tmp_path)
    newer = ("replica_counts", "noise")
    described = {name: value for name, value in planner.to_json().items() if name not in newer} | older
    name = planner_file(described)
    (tmp_path / name).write_text(json.dumps({"format": DUMPED_PLANNER_FORMAT, "planner": described}))
    edit(path, planner=name)
    status, said = replay(path, capsys)
    assert said.endswith("plan 12 is the same, bit for bit\n")
    assert "changed since the run" not in said
    assert status == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"format": "other"}, "has format 'other' but 'dynapipe-dump/1' is needed: give a step's dump"),
        ({"format": "dynapipe-plan/1"}, "'dynapipe-plan/1', which dynapipe plan --show reads, but 'dynapipe-dump/1'"),
        ({"planner": "../planner.json"}, "must be the name of a file beside it"),
        ({"planner": "planner-gone.json"}, "cannot be read"),
        ({"samples": [[0, 12, 0]]}, "samples[0] is [0, 12, 0]"),
        ({"samples": [[0, -12, 0, 0]]}, "-12"),
        ({"samples": []}, "sample"),
        ({"step": "12"}, "step"),
        ({"step": -1}, "step"),
        ({"reserve_bytes": -5}, "reserve_bytes"),
        ({"replicas": None}, "replicas"),
    ],
)
def test_a_dump_that_is_none_is_refused(
    values: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dumped(PLANNER, tmp_path)
    edit(path, **values)
    status, said = replay(path, capsys)
    assert says in said
    assert said.startswith("dynapipe: error: ")
    assert status == 2


def test_the_error_of_a_command_that_failed_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"error": "no memory", "status": 2}))
    status, said = replay(tmp_path / "plan.json", capsys)
    assert "plan.json says why a command failed, 'no memory': run that again, or give a step's dump" in said
    assert status == 2


@pytest.mark.parametrize("planner", [{}, {**PLANNER.to_json(), "costs": 5}, {**PLANNER.to_json(), "topology": []}])
def test_a_planner_that_is_none_is_refused(planner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dumped(PLANNER, tmp_path)
    edit(tmp_path / json.loads(path.read_text())["planner"], planner=planner)
    status, said = replay(path, capsys)
    assert said.startswith("dynapipe: error: ")
    assert status == 2


def test_plans_of_steps_that_have_not_begun_are_not_shown_and_go_with_the_loader(tmp_path: Path) -> None:
    class Lengths(list[None]):
        lengths = np.full(8, 20)

    planner = DumpingPlanner(PLANNER, tmp_path)
    me = PLANNER.topology.coordinates(0)
    with DynaPipeDataLoader(Lengths([None] * 8), planner, batch_size=2, coordinates=me, needs_data=False) as loader:
        for _, plan in loader:
            planner.plan(SAMPLES, step=plan.step + 1)  # as planners do that run ahead
            shown = {path.name for path in tmp_path.glob("step-*.json")}
            assert shown == {f"step-{step:06d}.json" for step in range(plan.step + 1)}
            if plan.step == 2:
                break
        assert (tmp_path / ".step-000003.json").exists()
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("planner-")} == shown


def test_the_plan_of_a_step_that_fails_before_it_begins_stays_to_be_looked_at(tmp_path: Path) -> None:
    class Unreadable(list[None]):
        lengths = np.full(8, 20)

        def __getitem__(self, index: Any) -> Any:
            if planner.planned > 2:
                raise OSError("a disk that fails")
            return TokenSample(index, np.ones(21, np.int64), first_target=1)

    class Planner(DumpingPlanner):
        planned = 0

        def plan(self, *args: Any, step: int, **options: Any) -> Any:
            self.planned += 1
            super().plan(SAMPLES, step=step + 1)  # as planners do that run ahead
            return super().plan(*args, step=step, **options)

    planner = Planner(replace(PLANNER, topology=Topology(pp=2)), tmp_path)
    me = planner.topology.coordinates(0)
    with (
        pytest.raises(OSError, match="a disk that fails"),
        DynaPipeDataLoader(Unreadable([None] * 8), planner, batch_size=2, coordinates=me) as loader,
    ):
        list(loader)
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("planner-")} == {
        f"step-{step:06d}.json" for step in range(3)
    }


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/planner.* cannot be written \(File exists\)"):
        DumpingPlanner(PLANNER, tmp_path / "file").plan(SAMPLES, step=0)


def test_a_directory_that_fills_is_named_once_and_planning_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = DumpingPlanner(PLANNER, tmp_path)
    planner.plan(SAMPLES, step=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        plans = [planner.plan(SAMPLES, step=step) for step in (1, 2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert plans == [PLANNER.plan(SAMPLES, step=step) for step in (1, 2)]
    (line,) = capsys.readouterr().err.splitlines()
    assert ".step-000001.json cannot be written (File too large): make room" in line
    assert line.endswith("; no plan is kept from step 2 on")
    assert {path.name for path in tmp_path.iterdir() if "planner" not in path.name} == {".step-000000.json"}


def test_of_compared_ways_the_configured_one_alone_dumps() -> None:
    config = TrainConfig().with_values(run={"plan_dir": "plans"})
    own, *others = (one.config.run.plan_dir for one in variants(config, compare=True))
    assert (own, {*others}) == ("plans", {""})
