"""Text and JSON forms of schedules: what is written is read back, and each fault is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, MicroBatch, ReplicaPlan, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.notation import draw, parse_lines, plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.timeline import Span, Trace
from dynapipe_ext.tools.check.check_plan import check
from dynapipe_ext.tools.check.plan_file import PlanFile, read_plan_file
from dynapipe_ext.tools.show.plan import list_orders


def step_plan(schedules: list[PipelineSchedule]) -> StepPlan:
    """Two micro-batches a replica, padded and packed; numbers that are easy to recognise."""
    samples = [SampleLength(i, 5 + i, target=1) for i in range(4 * len(schedules))]
    replicas = []
    for d in range(len(schedules)):
        a, b, c, e = samples[4 * d : 4 * d + 4]
        replicas.append(
            ReplicaPlan(d, (MicroBatch((a, b), pad_multiple=8), MicroBatch((c, e), "packed", recompute="full")))
        )
    predictions = tuple(
        Prediction(makespan_ns=2_000_000_000, lower_bound_ns=1_500_000_000, peak_bytes=(7, 8), bubble_ratio=0.1)
        for _ in schedules
    )  # fmt: skip
    return StepPlan(GlobalBatchPlan(step=3, replicas=tuple(replicas)), tuple(schedules), predictions, costs=())


def plan_of_two_replicas() -> dict[str, Any]:
    return plan_json(step_plan([one_f_one_b(2, 2), one_f_one_b(2, 2)]), Topology(tp=2, pp=2, dp=2))


def test_a_plan_in_json_has_the_documented_fields() -> None:
    data = plan_json(step_plan([one_f_one_b(2, 2)]), Topology(pp=2, layers_per_stage=(3, 2)))
    assert json.loads(json.dumps(data)) == {
        "format": "dynapipe-plan/1",
        "topology": {"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [3, 2]},
        "replicas": [
            {
                "dp_rank": 0,
                "micro_batches": [
                    {"samples": [0, 1], "layout": "padded", "rows": 2, "encoder_len": 8, "decoder_len": 0,
                     "recompute": "none"},
                    {"samples": [2, 3], "layout": "packed", "rows": 1, "encoder_len": 15, "decoder_len": 0,
                     "recompute": "full"},
                ],
                "schedule": {
                    "name": "1f1b",
                    "stages": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
                },
                "predicted": {"makespan_s": 2.0, "lower_bound_s": 1.5, "peak_bytes": [7, 8]},
            }
        ],
    }  # fmt: skip


def read(data: dict[str, Any], folder: Path) -> PlanFile:
    (folder / "plan.json").write_text(json.dumps(data))
    return read_plan_file(folder / "plan.json")


def test_a_plan_in_json_reads_back_as_what_was_written_in_the_order_of_dp_ranks(tmp_path: Path) -> None:
    data = plan_of_two_replicas()
    data["replicas"].reverse()
    plan = read(data, tmp_path)
    assert plan.topology == Topology(tp=2, pp=2, dp=2)
    assert list_orders(plan) == [(one_f_one_b(2, 2), {})] * 2
    assert [replica.micro_batches[0].samples for replica in plan.replicas] == [(0, 1), (4, 5)]


def test_what_is_no_object_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(DataError, match=r"has format None but .dynapipe-plan/1. is needed"):
        read_plan_file(tmp_path / "plan.json")


def test_pairs_are_written_with_their_documents_and_shown_but_not_checked(tmp_path: Path) -> None:
    planner = Planner(Topology(pp=2), TokenCosts(2), 10**9)
    made = planner.plan([SampleLength(i, 9 + i, target=4, first=4) for i in range(2)])
    data = plan_json(made, planner.topology)
    assert data["replicas"][0]["micro_batches"][0]["documents"] == [4, 5, 4, 6]
    plan = read(data, tmp_path)
    assert list_orders(plan) == [(made.schedules[0], {})]
    with pytest.raises(ConfigError, match="holds pairs of documents, which this check cannot price: look at it"):
        check(plan, planner.costs, memory_limit_bytes=10**9)


def test_half_layers_are_written_as_halves_and_read_back(tmp_path: Path) -> None:
    topology = Topology(pp=2, layers_per_stage=(2.5, 1.5))
    data = plan_json(step_plan([one_f_one_b(2, 2)]), topology)
    assert data["topology"]["layers_per_stage"] == [2.5, 1.5]
    assert read(data, tmp_path).topology == topology


def test_a_placement_that_is_not_the_identity_is_written_and_read(tmp_path: Path) -> None:
    text = "0: 0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n1: 1F0 1F1 1B0 1B1"
    schedule = parse_lines(text, "v")
    data = plan_json(step_plan([schedule]), Topology(pp=2, placement=(0, 1, 0)))
    assert data["replicas"][0]["schedule"]["placement"] == [0, 1, 0]
    plan = read(data, tmp_path)
    assert (plan.topology.placement, list_orders(plan)) == ((0, 1, 0), [(schedule, {})])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"stages": [["F0", "0F1", "0B0", "0B1"], []]}, "replica 1: action 'F0' is not of the form"),
        ({"stages": [["0F1", "0F1", "0B0", "0B1"], []]}, "replica 1: micro-batch 0 on stage 0 runs B but must run"),
        ({"placement": [0, 7]}, "replica 1: stage_ranks .0, 7. must place"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_naming_the_replica_and_the_action(
    schedule: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plan = read(plan_of_two_replicas(), tmp_path)
    ranks = tuple(map(tuple, schedule.get("stages", plan.replicas[1].ranks)))
    broken = replace(plan.replicas[1], ranks=ranks, placement=tuple(schedule.get("placement", (0, 1))))
    with pytest.raises(PlanError, match=message):
        list_orders(replace(plan, replicas=(plan.replicas[0], broken)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: 0F0 0B0", r"line 1 '1: 0F0 0B0' must begin with '0:'"),
        ("0: 0F0 0B0\n0F1", "line 2 '0F1' must begin with '1:'"),
        ("0: 0F0 0X0", "action '0X0' is not of the form"),
        ("0: 0F0 0B0\n1: 0F1 0B1", "line 2: 0F1 puts stage 0 on a second rank, after that of line 1"),
        ("0: 1F0 1B0", "line 1 names stage 1 but there is no action of stage 0"),
    ],
)
def test_a_broken_line_is_refused_naming_it(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_lines(text)


def test_comments_and_empty_lines_are_passed_over() -> None:
    assert parse_lines("# one stage\n\n0: 0F0 0B0  # all of it\n").to_lines() == [["0F0", "0B0"]]


def test_actions_without_duration_leave_a_picture_whole() -> None:
    spans = [Span(rank=0, label=label, start_s=end, end_s=end) for label, end in (("0F0", 0.0), ("0B0", 1.0))]
    assert draw(one_f_one_b(1, 1), Trace(tuple(spans)), width=5) == "0 |.....|\n"
