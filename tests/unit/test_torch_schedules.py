"""Where torch.distributed.pipelining has a published schedule, ours is the same."""

from __future__ import annotations

from typing import Any

import pytest

from dynapipe_ext.schedules.published import published_schedule


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
    """The actions that torch's schedule lays out for each rank, without the steps in which it waits."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind, num_stages = getattr(schedules, class_name), num_ranks * stages_per_rank
    if issubclass(kind, schedules.PipelineScheduleSingle):
        built = kind.__new__(kind)  # its constructor looks at models; its order is a function of two numbers
        built._num_stages, built._n_microbatches = num_stages, num_micro_batches
        rows = built._get_pipeline_order()
    else:
        stages = [Stage(local * num_ranks, num_stages, num_ranks) for local in range(stages_per_rank)]
        rows = kind(stages, n_microbatches=num_micro_batches).pipeline_order
    return {rank: [str(action) for action in row if action is not None] for rank, row in rows.items()}


@pytest.mark.parametrize(
    ("name", "class_name", "stages_per_rank"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
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
    """Equal: what every rank runs, its order, and the placement. Torch writes steps without work down, we do not."""
    ours = published_schedule(name, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)
    assert torch_order(class_name, num_ranks, num_micro_batches, stages_per_rank) == dict(enumerate(ours.lines()))
