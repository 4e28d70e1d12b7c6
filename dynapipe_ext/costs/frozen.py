"""What training costs where some weights are frozen, as under adapters: a view of any cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives
from dynapipe_ext.costs.abilities import activation_format_of, costs_as_json, prices_pieces, replica_collectives_of
from dynapipe_ext.costs.model import CostModel, IntArray, MicroBatchCosts
from dynapipe_ext.costs.tokens import fingerprint
from dynapipe_ext.errors import ConfigError, PlanError, short


@dataclass(frozen=True, slots=True)
class FrozenCosts:
    """The costs of `base`, which trains all weights, where stage s trains the share `trained_shares[s]` of W's work.

    A frozen weight has no gradient: W, and B by as much, are shorter by the share of the others, under full
    recomputation too. `static_bytes` of each stage, which has neither gradients nor optimizer states for frozen
    weights, are those of `base` if left out. `token_bytes` of each stage are what adapters keep of every token beside
    what `base` counts; where layers are recomputed they come back, counted as if all at once. Errors: ConfigError for
    shares that are none, or not one a stage.
    """

    base: CostModel
    trained_shares: tuple[float, ...]
    static_bytes: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, values, most in (
            ("trained_shares", self.trained_shares, 1),
            ("static_bytes", self.static_bytes, 1 << 60),
            ("token_bytes", self.token_bytes, 1 << 60),
        ):
            needed = name == "trained_shares" or values
            if needed and len(values) != self.base.num_stages:
                raise ConfigError(
                    f"{name} has {len(values)} entries for {self.base.num_stages} stages: give one a stage"
                )
            for value in values:
                if not isinstance(value, int | float) or not 0 <= value <= most:
                    raise ConfigError(f"{name} has {short(value)} but must be numbers of 0 to {most}")

    @property
    def num_stages(self) -> int:
        return self.base.num_stages

    @property
    def replica_collectives(self) -> ReplicaCollectives | None:
        return replica_collectives_of(self.base)

    @property
    def activation_format(self) -> ActivationFormat | None:
        return activation_format_of(self.base)

    @property
    def prices_pieces(self) -> bool:
        return prices_pieces(self.base)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        costs = self.base.evaluate(micro_batches)
        frozen = 1.0 - np.array(self.trained_shares)[:, None]
        static = np.array(self.static_bytes, np.int64) if self.static_bytes else costs.static_bytes
        tokens = np.array([m.padded_tokens for m in micro_batches], np.int64)
        kept = np.outer(self.token_bytes or (0,) * self.num_stages, tokens).astype(np.int64)
        is_stored = np.array([m.recompute == "none" for m in micro_batches])
        return replace(
            costs,
            stored_bytes=costs.stored_bytes + kept * is_stored,
            working_bytes=costs.working_bytes + kept * ~is_stored,
            backward_ns=costs.backward_ns - _part(frozen, self._weight_ns(micro_batches, costs)),
            weight_ns=costs.weight_ns - _part(frozen, costs.weight_ns),
            static_bytes=static,
        )

    def _weight_ns(self, micro_batches: Sequence[MicroBatch], costs: MicroBatchCosts) -> IntArray:
        """All work for weight gradients; where I does it, under full recomputation, what W does without."""
        try:
            plain = self.base.evaluate([replace(m, recompute="none") for m in micro_batches]).weight_ns
        except PlanError:  # a measured table may end earlier for it
            return costs.weight_ns
        return np.minimum(plain, costs.backward_ns)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "frozen",
            "base": costs_as_json(self.base),
            "trained_shares": list(self.trained_shares),
            **self._bytes(),
        }

    def _bytes(self) -> dict[str, Any]:
        """In the form of before there were bytes of tokens, where there are none."""
        tokens = {"token_bytes": list(self.token_bytes)} if self.token_bytes else {}
        return {"static_bytes": list(self.static_bytes), **tokens}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], base: CostModel) -> FrozenCosts:
        """What `to_json` wrote, its `base` read."""
        try:
            parts = (tuple(raw["trained_shares"]), tuple(raw["static_bytes"]), tuple(raw.get("token_bytes", ())))
            return cls(base, *parts)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"costs of frozen weights {sorted(raw)} cannot be read: {error}") from error

    def fingerprint(self) -> str:
        own = {"trained_shares": list(self.trained_shares), **self._bytes()}
        return fingerprint({"kind": "frozen", "base": self.base.fingerprint(), **own})


def _part(share: Any, times_ns: IntArray) -> IntArray:
    part: IntArray = np.floor(share * times_ns).astype(np.int64)
    return part
