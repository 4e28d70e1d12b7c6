"""Between a step's execution and its update: what it came to, and the refusal of one that must not change weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynapipe_ext.executor.instructions import ExecutionPlan


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
