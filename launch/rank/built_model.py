"""A rank's part of a run's model with what trains it, whichever framework it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynapipe_ext.executor.checkpoints.folder import RunState
from dynapipe_ext.executor.checkpoints.saving import Saver
from dynapipe_ext.executor.events import PreferenceFigures
from dynapipe_ext.executor.protocols import Stage


class TrainedStage(Stage, Protocol):
    """A stage that names what went wrong."""

    def losses(self) -> Mapping[int, float]:
        """Of the micro-batches of the last step, by index, where this rank computes them."""
        ...

    def preferences(self) -> PreferenceFigures | None:
        """Of the last step, over all ranks, where its loss is of pairs of answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """`stage` runs plans, `optimizer` updates its weights; `modules` are switched
    between training and evaluation. `saver(folder)` saves checkpoints below a folder, of the model that `description`
    tells by, where the second argument is how many bytes each takes; `restore(folder)` takes one on and says where its
    run stood. `num_trained` parameters are this rank's alone, but for its replicas. `held_bytes()`: of weights,
    gradients and optimizer states."""

    stage: TrainedStage
    optimizer: Any
    modules: Sequence[Any]
    description: dict[str, Any]
    saver: Callable[[Path, int], Saver]
    num_trained: int
    restore: Callable[[Path], RunState]
    held_bytes: Callable[[], int]
