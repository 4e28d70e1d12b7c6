"""What the ranks of a job do together while they save: all of them go on, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints.manifest import Manifest, OptimizerPlace, RunState
from dynapipe_ext.executor.stages.collectives import gather_json, named_collectives
from dynapipe_ext.settings.tables import CheckpointSettings

_T = TypeVar("_T")
_PACKAGES = ("dynapipe-ext", "torch")


class SavingRanks:
    """This rank among all that save below `root`. `faults` are the errors of writing: where work fails by one of them
    on one rank, all ranks raise ExecutionError with its words, and none waits for one that is gone."""

    def __init__(
        self, root: Path, device: torch.device, *, faults: tuple[type[Exception], ...] = (OSError, RuntimeError)
    ) -> None:
        self._root, self._device, self._faults = root, device, faults

    def on_first(self, work: Callable[[], object]) -> None:
        self.on_every(work if dist.get_rank() == 0 else lambda: None)

    def on_every(self, work: Callable[[], _T]) -> _T:
        """What `work` gives."""
        result, fault = None, ""
        try:
            result = work()
        except self._faults as error:
            fault = f"rank {dist.get_rank()} could not write below {self._root}: {error}"
        if self._most(bool(fault)):
            first = next(found for found in gather_json(fault, self._device) if found)
            raise ExecutionError(f"the checkpoint was not saved: {first}: make room there, then resume")
        return cast(_T, result)

    def most(self, number: int, step: int) -> int:
        """The largest of every rank's number: what one of them asks for after so many steps, all do."""
        with named_collectives(f"agreement of all ranks on a checkpoint of step {step}"):
            return self._most(number)

    def _most(self, number: int) -> int:
        numbers = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return int(numbers.item())


class SavingTogether:
    """Saves a run below `root`, a folder that all ranks reach; each checkpoint appears there whole or not at all.

    Every rank takes each of `steps(folder, run)` once all have taken the one before: what ranks wait for each other in
    is a step of its own. Then rank 0 calls `join(folder)`, and `published(folder)` where the checkpoint has its name.
    `place` says where the optimizer stands, `framework` is the package whose version is kept.
    Errors: ExecutionError on all ranks where one of them cannot write (`faults`); what was saved before stays.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointSettings,
        device: torch.device,
        steps: Sequence[Callable[[Path, RunState], object]],
        *,
        place: Callable[[], OptimizerPlace],
        framework: str,
        join: Callable[[Path], object] = lambda folder: None,
        published: Callable[[Path], object] = lambda folder: None,
        faults: tuple[type[Exception], ...] = (OSError, RuntimeError),
    ) -> None:
        self._root, self._settings, self._framework = root, settings, framework
        self._steps, self._join, self._published, self._place = steps, join, published, place
        self._ranks = SavingRanks(root, device, faults=faults)
        self.most = self._ranks.most
        if dist.get_rank() == 0:
            folders.tidy(root)

    def save(self, run: RunState) -> None:
        part = folders.part_folder(self._root, run.step)
        with named_collectives(f"checkpoint of step {run.step}"):
            self._ranks.on_first(lambda: folders.begin(self._root, run.step))
            for step in self._steps:
                self._ranks.on_every(partial(step, part, run))
            self._ranks.on_first(lambda: self._publish(part, run))

    def _publish(self, part: Path, run: RunState) -> None:
        self._join(part)
        manifest = Manifest(
            run=run,
            optimizer=self._place(),
            versions={name: version(name) for name in (*_PACKAGES, self._framework)},
            files={file.name: file.stat().st_size for file in sorted(part.iterdir()) if file.is_file()},
            tensors={},
        )
        self._published(folders.publish(part, manifest))
        folders.retain(self._root, last=self._settings.keep_last, best=self._settings.keep_best)

    def advance(self, *, wait: bool = False) -> None:
        """Nothing goes on in the background."""

    def close(self) -> None: ...
