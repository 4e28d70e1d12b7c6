"""Samplers with the constructors of multipack_sampler: a user changes the import and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batching.sampling.epoch_plan import Objective
from dynapipe_ext.batching.sampling.samplers import DistributedTokenBatchSampler
from dynapipe_ext.costs.model import IntArray


class MultipackDistributedBatchSampler(DistributedTokenBatchSampler):
    """Packed batches of at most `batch_max_length` tokens, balanced by the squares of lengths (softmax attention).

    Nothing is dropped: the last step's samples are spread over all steps. Unlike its namesake it has a `len()`, works
    on one rank, refuses an over-long sample by name and can be resumed.

    `eff_total_used` and `eff_total_slots` are tokens and room of the steps iterated so far, over all ranks and epochs.

    >>> sampler = MultipackDistributedBatchSampler(8, [3, 5, 2, 4], num_replicas=1, rank=0)
    >>> sampler.num_batches(), len(list(sampler)), sampler.eff_total_used, sampler.eff_total_slots
    (2, 2, 14, 16)
    """

    _OBJECTIVE: Objective = "quadratic"

    def __init__(
        self,
        batch_max_length: int,
        lengths: npt.ArrayLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            lengths,
            max_tokens=batch_max_length,
            num_replicas=num_replicas,
            rank=rank,
            objective=self._OBJECTIVE,
            seed=seed,
        )
        self.batch_max_length, self.lengths = batch_max_length, np.asarray(lengths)
        self.num_replicas = self.plan.num_replicas
        self.eff_total_used = self.eff_total_slots = 0

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            self._count(self._next - 1, self._next)
            yield batch

    def generate_batches(self, set_stats: bool = False) -> list[IntArray]:
        """This rank's batches of the whole epoch; with `set_stats` counted as if they had been iterated."""
        if set_stats:
            self._count(0, self.plan.num_steps)
        return [np.array(self.plan.batch(step, self.rank), np.int64) for step in range(self.plan.num_steps)]

    def num_batches(self) -> int:
        """Batches of this epoch on each rank."""
        return self.plan.num_steps

    def efficiency(self) -> float:
        """Tokens over steps x ranks x capacity, of the steps iterated so far; before any, of this epoch."""
        return self.eff_total_used / self.eff_total_slots if self.eff_total_slots else self.metrics().efficiency

    def _count(self, begin: int, end: int) -> None:
        first, last = (self.plan.starts[step * self.num_replicas] for step in (begin, end))
        self.eff_total_used += int(self._tokens[self.plan.samples[first:last]].sum())
        self.eff_total_slots += (end - begin) * self.num_replicas * self.batch_max_length


class MultipackDistributedBatchSampler_LinearAttention(MultipackDistributedBatchSampler):  # noqa: N801  the seed's name
    """The same, balanced by tokens alone (linear attention)."""

    _OBJECTIVE: Objective = "tokens"
