"""Between a step's execution and its update: what it came to, and the refusal of one that must not change weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dynapipe_ext.errors import NotFiniteError
from dynapipe_ext.executor.instructions import ExecutionPlan

NanPolicy = Literal["stop", "skip"]


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """What a step has come to on this rank: the loss of the global batch, and each micro-batch's share of it where the
    last stage runs."""

    plan: ExecutionPlan
    loss: float
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """A step that changed nothing, neither weights nor moments nor the learning rate, and why."""

    reason: str


class SkipPolicy:
    """What becomes of steps that are not finite. "stop": a NotFiniteError; "skip": up to `max_skips` of them in a row
    are left out, then the error."""

    def __init__(self, policy: NanPolicy = "stop", max_skips: int = 0) -> None:
        self._max_skips = max_skips if policy == "skip" else 0
        self._skips = 0

    def passed(self) -> None:
        """A step was finite."""
        self._skips = 0

    def refused(self, reason: str) -> Refused:
        """The step is left out. Errors: NotFiniteError where it may not be."""
        if self._skips == self._max_skips:
            before = f", after {self._skips} steps that were skipped in a row" if self._skips else ""
            raise NotFiniteError(
                f"{reason}{before}; no weight was changed: lower lr or look at these samples, or let single steps pass"
                ' with [optimizer] nan_policy = "skip"'
            )
        self._skips += 1
        return Refused(reason)
