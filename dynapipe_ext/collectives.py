"""What the ranks of all replicas issue together in a training step: part of a run, which no plan decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCollectives:
    """Names of the collectives that each rank issues with those of the other replicas that hold the same stages.

    `inside` are issued by each Forward, Backward and BackwardInput (gathers of sharded weights, expert parallelism over
    data ranks), `with_gradients` by each Backward and BackwardWeight (gradients that are scattered as they come),
    `at_end` once a step by each rank. The default is gradients that are reduced once: DDP, and ZeRO stage 1.
    """

    inside: tuple[str, ...] = ()
    with_gradients: tuple[str, ...] = ()
    at_end: tuple[str, ...] = ("gradient reduction",)

    @classmethod
    def of_zero(cls, zero_stage: int, *, ep: int = 1) -> ReplicaCollectives:
        """ZeRO from stage 2 on scatters gradients as they come, stage 3 gathers weights besides (Rajbhandari et al.
        2020, sec. 5); `ep` replicas that share experts exchange tokens.

        >>> ReplicaCollectives.of_zero(3).inside, ReplicaCollectives.of_zero(1) == ReplicaCollectives()
        (('weight gather',), True)
        """
        return cls(
            inside=("weight gather",) * (zero_stage == 3) + ("expert all-to-all",) * (ep > 1),
            with_gradients=("gradient scatter",) * (zero_stage >= 2),
        )

    @property
    def of_micro_batches(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those that follow the order of micro-batches, so that replicas must agree on it."""
        return self.inside, self.with_gradients

    def __str__(self) -> str:
        """
        >>> str(ReplicaCollectives.of_zero(2))
        'gradient scatter with each backward, gradient reduction at the end'
        """
        told = [f"{name} inside micro-batches" for name in self.inside]
        told += [f"{name} with each backward" for name in self.with_gradients]
        told += [f"{name} at the end" for name in self.at_end]
        return ", ".join(told) or "nothing"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ReplicaCollectives:
        return cls(**{name: tuple(names) for name, names in raw.items()})
