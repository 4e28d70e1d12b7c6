"""Where torch.distributed.pipelining has a published schedule ours is the same; its validator accepts all of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynapipe_ext.launch.commands.show_schedule import schedule_for
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.published.by_name import PUBLISHED, make_published_schedule
from dynapipe_ext.tools.show.schedule import rank_costs, uneven_factors


class Stage:
    """As much of a stage of torch.distributed.pipelining as its schedules look at when they lay out their order."""

    has_backward = False
    device = "cpu"

    def __init__(self, stage_index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = stage_index, num_stages, num_ranks
        self.group_rank = stage_index % num_ranks
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.submod = None


def torch_order(class_name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> dict[int, list[Any]]:
    """What torch's schedule computes on each rank, without the steps in which it waits and the gradients' reduction."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind, num_stages = getattr(schedules, class_name), num_ranks * stages_per_rank
    if issubclass(kind, schedules.PipelineScheduleSingle):
        built = kind.__new__(kind)  # its constructor looks at models; its order is a function of two numbers
        built._num_stages, built._n_microbatches = num_stages, num_micro_batches
        rows = built._get_pipeline_order()
    else:
        stages = [Stage(local * num_ranks, num_stages, num_ranks) for local in range(stages_per_rank)]
        rows = kind(stages, n_microbatches=num_micro_batches).pipeline_order
    return {rank: [str(action) for action in row if action and action.is_compute_op] for rank, row in rows.items()}


@pytest.mark.parametrize(
    ("name", "class_name", "stages_per_rank"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 2),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),  # torch's, with one stage a rank
        ("zb-v", "ScheduleZBVZeroBubble", 2),
    ],
)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (4, 4), (4, 8), (4, 10), (8, 16)])
def test_torch_runs_the_same_actions_in_the_same_order(
    name: str, class_name: str, stages_per_rank: int, num_ranks: int, num_micro_batches: int
) -> None:
    """Equal: what every rank computes, in which order, and where stages lie. Torch's lists also have empty steps and
    the reduction of gradients."""
    ours = make_published_schedule(name, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)
    assert torch_order(class_name, num_ranks, num_micro_batches, stages_per_rank) == dict(enumerate(ours.to_lines()))


def test_torch_runs_1f1b_in_the_same_order_but_numbers_the_last_rank_s_forwards_from_1() -> None:
    """Torch's list for the last rank of 1F1B is 3F1 3B0 3F2 ..., which its own validator refuses."""
    for num_micro_batches in (4, 8, 10):
        ours = dict(enumerate(make_published_schedule("1f1b", 4, num_micro_batches).to_lines()))
        theirs = torch_order("Schedule1F1B", 4, num_micro_batches, 1)
        last = theirs.pop(3)
        assert [word[:2] for word in last] == [word[:2] for word in ours.pop(3)]
        assert theirs == ours


def placement_torch_finds(schedule: PipelineSchedule, num_micro_batches: int) -> dict[int, int]:
    """The rank of each stage; AssertionError where torch's validator refuses the schedule."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    actions = {rank: [torch._Action.from_str(word) for word in row] for rank, row in enumerate(schedule.to_lines())}
    found: dict[int, int] = torch._validate_schedule(
        actions, len(schedule.ranks), schedule.num_stages, num_micro_batches
    )
    return found


@pytest.mark.parametrize(
    ("name", "stages_per_rank"), [*((name, None) for name in PUBLISHED), *(("interleaved-1f1b", v) for v in (1, 3))]
)
def test_torch_s_validator_accepts_every_published_schedule_and_finds_its_placement(
    name: str, stages_per_rank: int | None
) -> None:
    for num_ranks, num_micro_batches in ((1, 1), (2, 3), (4, 8), (5, 7), (6, 2)):
        ours = make_published_schedule(name, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)
        assert placement_torch_finds(ours, num_micro_batches) == dict(enumerate(ours.stage_ranks))


@pytest.mark.parametrize("cv", [0, 0.6])
@pytest.mark.parametrize(
    ("name", "placement", "split"),
    [
        ("cyclic", (0, 1, 2), False),
        ("adaptive", (0, 1, 2), False),
        ("adaptive", (0, 1, 2), True),
        ("adaptive", (0, 1, 2, 0, 1, 2), True),
        ("adaptive", (0, 1, 2, 2, 1, 0), True),
    ],
)
def test_torch_s_validator_accepts_schedules_made_for_costs_and_a_limit(
    name: str, placement: tuple[int, ...], split: bool, cv: float
) -> None:
    costs = rank_costs(placement, 7, (1, 1, 1), uneven_factors(7, cv=cv, seed=0))
    ours = schedule_for(name, costs, placement, memory_limit_bytes=4_000_000, effort=40, split=split)
    assert placement_torch_finds(ours, 7) == dict(enumerate(placement))


def test_torch_s_validator_refuses_a_schedule_that_lacks_an_action() -> None:
    ours = make_published_schedule("zb-h1", 2, 3)
    with pytest.raises(AssertionError):
        placement_torch_finds(replace(ours, ranks=(ours.ranks[0][:-1], ours.ranks[1])), 3)


def test_megatron_goes_through_micro_batches_and_stages_in_the_same_turns() -> None:
    """Its table of turns serves forwards as it is and backwards with the stages reversed; its rounds are of p."""
    megatron = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for p, m, v in ((2, 4, 2), (4, 8, 2), (4, 12, 3)):
        table = megatron.get_schedule_table(m, v, p)
        for actions in make_published_schedule("interleaved-1f1b", p, m, stages_per_rank=v).ranks:
            forwards = [(a.micro_batch, a.stage // p) for a in actions if a.kind is Kind.FORWARD]
            backwards = [(a.micro_batch, v - 1 - a.stage // p) for a in actions if a.kind is Kind.BACKWARD]
            assert forwards == backwards == table
