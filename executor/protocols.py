"""The seams of execution: a Stage holds layers, a Transport moves buffers, a Store holds bytes, a Recorder listens.

No tensor library is imported here: tensors are opaque, so the same engine runs torch, Megatron and sleeping stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.instructions import ExecutionPlan, Recv, Send
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.timeline import Span

Tensors = tuple[Any, ...]
Batch = Mapping[str, Any]  # tensors of one micro-batch by name, as the collate function made them


class Stage(Protocol):
    """The layers of one pipeline rank (of one or more stages) and their autograd state.

    The engine calls `start_step`, then the methods below in the plan's order, then `finish_step`. Under a plan that is
    `forward_only` a stage keeps nothing from forwards, and leaves gradients alone.
    """

    def start_step(self, plan: ExecutionPlan) -> None: ...

    def load(self, micro_batch: int, batch: Batch) -> None:
        """Take the tensors of a micro-batch; they may be dropped after its last backward (or only forward)."""

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        """Outputs for stage + 1; `inputs` is empty on the first stage, the outputs are empty on the last."""
        ...

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        """Gradients for stage - 1; accumulates weight gradients. Empty in and out at the two ends."""
        ...

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        """As backward, but puts the weight gradients off until backward_weight."""
        ...

    def backward_weight(self, stage: int, micro_batch: int) -> None: ...

    def finish_step(self) -> float:
        """Reduce gradients over replicas (once a step) and return the loss of the global batch."""
        ...

    def held_bytes(self) -> int:
        """Bytes of activations and gradients-to-be held right now, for the trace (0 where unknown)."""
        ...


class Reductions(Protocol):
    """Sums over the ranks of a job, in place. All ranks of a sum call it, in one order."""

    @property
    def topology(self) -> Topology: ...

    def sum_over_replicas(self, tensor: Any) -> None:
        """Over the ranks that hold the same stages, one of each replica."""

    def sum_over_job(self, tensor: Any) -> None: ...

    def sum_over_pipeline(self, pp_ranks: tuple[int, ...]) -> Callable[[Any], None]:
        """The sum over these pipeline ranks of one replica, which no others call; all ranks ask for it at one point."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> Tensors:
        """The received tensors (empty for a send). Raises ExecutionError, naming both ends, at the time limit."""
        ...


class Transport(Protocol):
    """Moves buffers between the pipeline ranks of one replica; never blocks before `Pending.wait`.

    `failed_step` says of a step that did not end on this rank what it was; empty while there is none. What was posted
    in it may still arrive, and pairs with whatever is posted next, so the engine runs no step over this one again.
    """

    failed_step: str

    def send(self, instruction: Send, tensors: Tensors) -> Pending: ...

    def recv(self, instruction: Recv) -> Pending: ...

    def close(self) -> None: ...


class Recorder(Protocol):
    def record(self, span: Span) -> None: ...


class Store(Protocol):
    """Named bytes that many processes share: written once, read by any number of readers, waited for with a limit."""

    @property
    def address(self) -> StoreAddress | None:
        """Where `open_store` opens the same store in another process; None for one that only this process has."""
        ...

    @property
    def namespace(self) -> str:
        """What keeps this store's keys apart from those of others at the same address."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Set a key and wake everybody who waits for it. Putting the same bytes again changes nothing."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value, waiting for it up to `timeout_s`. Raises StoreError naming key and limit."""
        ...

    def try_get(self, key: str) -> bytes | None: ...

    def delete(self, *keys: str) -> None: ...

    def info(self) -> dict[str, str]:
        """The "server" and its "version"; "unknown" or empty where they cannot be said."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """Updates that the optimizer has made (refused steps make none), and its learning-rate schedule's own state."""

    num_updates: int
    schedule: Mapping[str, Any]
