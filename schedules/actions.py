"""Actions of a pipeline schedule and the schedule itself: pure order, no times, no tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dynapipe_ext.errors import PlanError, short

_PATTERN = re.compile(r"(\d{1,18})([FBIW])(\d{1,18})", re.ASCII)


class Kind(Enum):
    """Kinds of actions, named as in torch.distributed.pipelining. A B is a full backward; I and W are its two parts."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """Work of one micro-batch on one (virtual) stage.

    >>> str(Action(2, Kind.FORWARD, 0)), Action.parse("3I11")
    ('2F0', Action(stage=3, kind=<Kind.BACKWARD_INPUT: 'I'>, micro_batch=11))
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action of a text such as "2F0", which `str` writes. Raises PlanError for any other text."""
        match = _PATTERN.fullmatch(text)
        if not match:
            raise PlanError(f"action {short(text)} is not of the form 2F0 (stage, one of F B I W, micro-batch)")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The actions of each pipeline rank in order, and `stage_ranks[stage]`, the rank that holds a stage.

    `forward_only`: no backward is to follow (evaluation). Otherwise validation and lowering require backwards.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    forward_only: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_micro_batches(self) -> int:
        return 1 + max((a.micro_batch for rank in self.ranks for a in rank), default=-1)

    @property
    def is_split(self) -> bool:
        """Whether some backward runs as I and W."""
        return any(action.kind is Kind.BACKWARD_INPUT for rank in self.ranks for action in rank)

    def to_lines(self) -> list[list[str]]:
        """Return the actions as text, one list per rank, such as ["0F0", "0B0"]."""
        return [[str(action) for action in rank] for rank in self.ranks]


def make_linear_schedule(name: str, stages: Sequence[Sequence[Action]]) -> PipelineSchedule:
    """Return a schedule of the actions of each stage, with stage s on rank s."""
    return PipelineSchedule(name, tuple(tuple(stage) for stage in stages), tuple(range(len(stages))))
