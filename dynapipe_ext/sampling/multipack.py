"""Samplers with the constructors of multipack_sampler: a user changes the import and nothing else."""

from __future__ import annotations

import numpy.typing as npt

from dynapipe_ext.sampling.epoch_plan import Objective
from dynapipe_ext.sampling.samplers import DistributedTokenBatchSampler


class MultipackDistributedBatchSampler(DistributedTokenBatchSampler):
    """Packed batches of at most `batch_max_length` tokens, balanced by the squares of lengths (softmax attention).

    Nothing is dropped: the last step's samples are spread over all steps. Unlike its namesake it has a `len()`, works
    on one rank, refuses an over-long sample by name and can be resumed.

    >>> sampler = MultipackDistributedBatchSampler(8, [3, 5, 2, 4], num_replicas=1, rank=0)
    >>> sampler.num_batches(), sampler.efficiency()
    (2, 0.875)
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

    def num_batches(self) -> int:
        """Batches of this epoch on each rank."""
        return self.plan.num_steps

    def efficiency(self) -> float:
        """Tokens over steps x ranks x capacity, of this epoch."""
        return self.metrics().efficiency


class MultipackDistributedBatchSampler_LinearAttention(MultipackDistributedBatchSampler):  # noqa: N801  the seed's name
    """The same, balanced by tokens alone (linear attention)."""

    _OBJECTIVE: Objective = "tokens"
