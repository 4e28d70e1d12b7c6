"""What the ranks of a job do together while they save: all of them go on, or none does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.stages.collectives import gather_json, named_collectives

_T = TypeVar("_T")


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
        if self.most(bool(fault)):
            first = next(found for found in gather_json(fault, self._device) if found)
            raise ExecutionError(f"the checkpoint was not saved: {first}: make room there, then resume")
        return cast(_T, result)

    @named_collectives("agreement of all ranks on a checkpoint")
    def most(self, number: int) -> int:
        """The largest of every rank's number: what one of them asks for, all do."""
        numbers = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return int(numbers.item())
