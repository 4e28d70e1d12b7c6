"""Schedules as torch's CSV: exact there and back, taken by torch's own loader, faults named by row and cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import validate
from dynapipe_ext.schedules.notation import from_csv, to_csv
from dynapipe_ext.schedules.published.by_name import PUBLISHED
from dynapipe_ext.schedules.published.by_name import make_published_schedule as published

LINEAR, INTERLEAVED, V_SHAPED = (0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)


@st.composite
def valid_schedules(draw: st.DrawFn) -> PipelineSchedule:
    """A random order of a random choice of B or I and W for each stage and micro-batch, on some placement."""
    placement = draw(st.sampled_from([(0,), LINEAR, INTERLEAVED, V_SHAPED, (1, 0, 1, 2)]))
    last, num = len(placement) - 1, draw(st.integers(1, 4))
    split = draw(st.lists(st.booleans(), min_size=num * (last + 1), max_size=num * (last + 1)))
    ranks: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    ready = [Action(0, Kind.FORWARD, m) for m in range(num)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        stage, m = action.stage, action.micro_batch
        ranks[placement[stage]].append(action)
        if action.kind is Kind.FORWARD and stage < last:
            ready.append(Action(stage + 1, Kind.FORWARD, m))
        elif action.kind is not Kind.BACKWARD_WEIGHT:
            before = stage if action.kind is Kind.FORWARD else stage - 1
            if before >= 0:
                kind = Kind.BACKWARD_INPUT if split[before * num + m] else Kind.BACKWARD
                ready.append(Action(before, kind, m))
            if action.kind is Kind.BACKWARD_INPUT:
                ready.append(Action(stage, Kind.BACKWARD_WEIGHT, m))
    return PipelineSchedule("drawn", tuple(map(tuple, ranks)), placement)


@settings(max_examples=150)
@given(valid_schedules())
def test_every_schedule_comes_back_with_its_placement(schedule: PipelineSchedule) -> None:
    validate(schedule, schedule.num_micro_batches)
    assert from_csv(to_csv(schedule), "drawn") == schedule


@pytest.mark.parametrize("name", PUBLISHED)
def test_torch_loads_and_validates_the_published_schedules(name: str, tmp_path: Path) -> None:
    """Torch's loader reads the rows, its validator counts the actions and finds the placement, and it can place every
    send and receive so that its own simulation of the ranks ends. We read them back as they were."""
    ours = published(name, 4, 8)
    assert from_csv(to_csv(ours), name) == ours
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(ours))
    runtime = schedules.PipelineScheduleMulti.__new__(schedules.PipelineScheduleMulti)
    runtime.pipeline_order, runtime._stages = {}, []
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 4, ours.num_stages, 8
    runtime._load_csv(str(file))
    assert runtime.stage_index_to_group_rank == dict(enumerate(ours.stage_ranks))
    assert {rank: [str(a) for a in row] for rank, row in runtime.pipeline_order.items()} == dict(
        enumerate(ours.to_lines())
    )
    lowered = schedules._add_send_recv(
        {rank: list(row) for rank, row in runtime.pipeline_order.items()},
        stage_to_rank=lambda stage: ours.stage_ranks[stage],
        num_stages=ours.num_stages,
    )
    computed = {rank: [str(a) for a in row if a.is_compute_op] for rank, row in lowered.items()}
    assert computed == dict(enumerate(ours.to_lines()))


def test_what_torch_dumps_is_read_with_its_empty_cells(tmp_path: Path) -> None:
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    runtime = schedules.PipelineScheduleMulti.__new__(schedules.PipelineScheduleMulti)
    ours = published("zb-v", 2, 3)
    parse = schedules._Action.from_str
    runtime.pipeline_order = {r: [None] * r + [parse(text) for text in row] for r, row in enumerate(ours.to_lines())}
    file = tmp_path / "dumped.csv"
    runtime._dump_csv(str(file))
    text = file.read_text()
    assert "\n,1F0" in text
    assert from_csv(text, "zb-v") == ours


def test_spaces_quotes_and_line_ends_of_other_systems_do_not_matter() -> None:
    assert from_csv('\ufeff 0F0 ,"0B0",\r\n,1F0,,1B0\r\n').to_lines() == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2, cell 2: action '1X0' is not of the form 2F0"),
        ("0F0,0SEND_F0,0B0\n", "row 1, cell 2: action '0SEND_F0'"),
        ("0F0,0B0\n1F0,,0B1\n", "row 2, cell 3: 0B1 puts stage 0 on a second rank, after that of row 1, cell 1"),
        ("0F0,0B0\n2F0,2B0\n", "row 2, cell 1 names stage 2 but there is no action of stage 1"),
        ("0F0\n99999999999F0\n", "row 2, cell 1 names stage 99999999999 but there is no action of stage 1:"),
        ("0F" + "9" * 5000, "row 1, cell 1: action '0F999"),
        ('0F0\n"1F0', "row 2: unexpected end of data"),
    ],
)
def test_a_fault_is_named_by_row_and_cell(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_csv(text)
    assert says in str(caught.value)
