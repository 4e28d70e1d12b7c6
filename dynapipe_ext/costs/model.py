"""Costs of micro-batches as integer arrays: the seam between cost models and everything that plans with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCosts:
    """Costs of M micro-batches on S stages. Integers only, so that plans are the same on every machine.

    Arrays of shape (S, M): `forward_ns`, `backward_ns` (the full backward, recomputation included),
    `weight_ns` (the share of `backward_ns` that a split backward can put off: B = I + W),
    `stored_bytes` (held from F to B, or to W if split), `working_bytes` (the extra while one layer runs).
    Shape (S - 1, M): `transfer_ns` and `transfer_bytes` over the boundary between stages s and s + 1, either direction.
    Shape (S,): `static_bytes` (weights, gradients, optimizer states). `working_in`: the actions that need the working
    bytes, "FBI", or "F" where the measurement knows forwards alone.
    """

    forward_ns: IntArray
    backward_ns: IntArray
    weight_ns: IntArray
    stored_bytes: IntArray
    working_bytes: IntArray
    transfer_ns: IntArray
    transfer_bytes: IntArray
    static_bytes: IntArray
    working_in: Literal["FBI", "F"] = "FBI"

    @property
    def num_stages(self) -> int:
        return int(self.forward_ns.shape[0])

    @property
    def num_micro_batches(self) -> int:
        return int(self.forward_ns.shape[1])

    @property
    def input_ns(self) -> IntArray:
        """The input-gradient share I of a split backward."""
        return self.backward_ns - self.weight_ns

    def digest(self) -> tuple[object, ...]:
        """Equal for equal costs."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple((v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values)

    def take(self, micro_batches: Sequence[int] | IntArray) -> MicroBatchCosts:
        """The columns of some micro-batches, in the order given."""
        order = np.asarray(micro_batches, dtype=np.int64)
        return MicroBatchCosts(
            forward_ns=np.take(self.forward_ns, order, axis=1),
            backward_ns=np.take(self.backward_ns, order, axis=1),
            weight_ns=np.take(self.weight_ns, order, axis=1),
            stored_bytes=np.take(self.stored_bytes, order, axis=1),
            working_bytes=np.take(self.working_bytes, order, axis=1),
            transfer_ns=np.take(self.transfer_ns, order, axis=1),
            transfer_bytes=np.take(self.transfer_bytes, order, axis=1),
            static_bytes=self.static_bytes,
            working_in=self.working_in,
        )

    def holding(self, factor: npt.NDArray[np.float64]) -> MicroBatchCosts:
        """The same with stored and working bytes times `factor`, shape (M,), rounded up."""
        stored, working = (np.ceil(factor * b).astype(np.int64) for b in (self.stored_bytes, self.working_bytes))
        return replace(self, stored_bytes=stored, working_bytes=working)

    def keeping_inputs(self, chosen: npt.NDArray[np.bool_]) -> MicroBatchCosts:
        """The same where the micro-batches `chosen`, shape (M,), are recomputed stage by stage.

        A stage stores the message that it received, the first one nothing. B runs F again before it does all of W's
        work, and needs meanwhile what F stores otherwise.
        """
        if not chosen.any():
            return self
        stored, working = bytes_keeping_inputs(chosen, self.stored_bytes, self.working_bytes, self.transfer_bytes)
        return replace(
            self,
            backward_ns=self.backward_ns + chosen * self.forward_ns,
            weight_ns=np.where(chosen, 0, self.weight_ns),
            stored_bytes=stored,
            working_bytes=working,
        )

    def forwards(self) -> MicroBatchCosts:
        """The costs of forwards alone: no backward follows, and what F stores it needs while it runs."""
        zeros = np.zeros_like(self.forward_ns)
        return replace(
            self,
            backward_ns=zeros,
            weight_ns=zeros,
            stored_bytes=zeros,
            working_bytes=self.stored_bytes + self.working_bytes,
            working_in="F",
        )

    @classmethod
    def choose(cls, kinds: Sequence[MicroBatchCosts], kind: IntArray, columns: IntArray) -> MicroBatchCosts:
        """Column `columns[m]` of `kinds[kind[m]]` for every m; all kinds have the stages of the first."""
        first = kinds[0]
        tables = {name: np.empty((len(getattr(first, name)), len(columns)), np.int64) for name in _TABLES}
        for index, costs in enumerate(kinds):
            if len(mine := np.flatnonzero(kind == index)):
                for name, table in tables.items():
                    table[:, mine] = getattr(costs, name)[:, columns[mine]]
        return cls(**tables, static_bytes=first.static_bytes, working_in=first.working_in)

    @classmethod
    def join(cls, parts: Sequence[MicroBatchCosts], *, like: MicroBatchCosts) -> MicroBatchCosts:
        """The columns of several costs side by side; of none of them, no columns, with the stages of `like`."""
        tables = [
            np.concatenate([getattr(like, name)[:, :0], *(getattr(part, name) for part in parts)], axis=1)
            for name in _TABLES
        ]
        return cls(
            **dict(zip(_TABLES, tables, strict=True)), static_bytes=like.static_bytes, working_in=like.working_in
        )


def bytes_keeping_inputs(
    chosen: npt.NDArray[np.bool_], stored: IntArray, working: IntArray, transferred: IntArray
) -> tuple[IntArray, IntArray]:
    """Stored and working bytes as `MicroBatchCosts.keeping_inputs` has them."""
    received = np.zeros_like(stored)
    received[1:] = transferred
    return np.where(chosen, received, stored), working + chosen * np.maximum(stored - received, 0)


def within_layers(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Recomputed as their layers are: not at all where the stage is as a whole."""
    return [replace(m, recompute="none") if m.recompute == "stage" else m for m in micro_batches]


_TABLES = (
    "forward_ns",
    "backward_ns",
    "weight_ns",
    "stored_bytes",
    "working_bytes",
    "transfer_ns",
    "transfer_bytes",
)


class CostModel(Protocol):
    """Seconds and bytes of micro-batches on every stage of one topology. What else a model may offer: `abilities`.

    Raises PlanError for a shape that the model cannot price (outside a measured grid, say), naming the shape and bound.
    """

    @property
    def num_stages(self) -> int: ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts: ...

    def fingerprint(self) -> str:
        """Hash of everything that changes an answer; equal on all ranks and planners of a job."""
        ...


class PricesShapes(Protocol):
    """A cost model that prices padded shapes as arrays; a shape that it refuses costs INFEASIBLE."""

    @property
    def num_stages(self) -> int: ...

    def evaluate_shapes(
        self, rows: npt.ArrayLike, encoder_len: npt.ArrayLike, decoder_len: npt.ArrayLike, recompute: Recompute = "none"
    ) -> MicroBatchCosts: ...
