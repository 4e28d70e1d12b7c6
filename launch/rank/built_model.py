"""A rank's part of a run's model with what trains it, whichever framework it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynapipe_ext.evaluating import ModuleWithModes
from dynapipe_ext.executor.checkpoints.folder import RunState
from dynapipe_ext.executor.checkpoints.saving import Saver
from dynapipe_ext.executor.events import PreferenceFigures
from dynapipe_ext.executor.protocols import Stage
from dynapipe_ext.executor.training_loop import Optimizer


class TrainedStage(Stage, Protocol):
    """A stage that also reports its losses, so that messages can name the micro-batch at fault."""

    def losses(self) -> Mapping[int, float]:
        """Of the micro-batches of the last step, by index, where this rank computes them."""
        ...

    def preferences(self) -> PreferenceFigures | None:
        """Of the last step, over all ranks, where its loss is of pairs of answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """`stage` runs plans, `optimizer` updates its weights; `modules` are switched between training and evaluation.
    `saver(folder, num_bytes)` makes a saver of checkpoints below a folder, each of about `num_bytes`; they record
    `description`, by which a model is compared with its checkpoint. `restore(folder)` loads a checkpoint and returns
    the state of its run. `num_trained`: parameters that train on this rank and, of other ranks, on its replicas alone.
    `held_bytes()`: of weights, gradients and optimizer states."""

    stage: TrainedStage
    optimizer: Optimizer
    modules: Sequence[ModuleWithModes]
    description: dict[str, Any]
    saver: Callable[[Path, int], Saver]
    num_trained: int
    restore: Callable[[Path], RunState]
    held_bytes: Callable[[], int]
