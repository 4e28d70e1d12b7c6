"""What one pipeline rank does in one step: a flat list of instructions, and the plan that carries it.

The rank's order is the whole program. Send and Recv only start a transfer; Wait ends it. Forward and Backward take the
buffers named after them: a Forward of stage s takes the "activation" that stage s - 1 produced, a Backward of stage s
the "gradient" that stage s + 1 produced, and each leaves its own output in a buffer until it is sent or taken.
Printed, a computation is its action in a schedule ("2F0"), everything else says what it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.batch.micro_batches import LossNorm, MicroBatch
from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.schedules.step_plan import Prediction

Payload = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """The output of a stage for one micro-batch: an activation for stage + 1, or a gradient for stage - 1."""

    payload: Payload
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.payload} of micro-batch {self.micro_batch} from stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Load:
    """Give the stage the tensors of a micro-batch (tokens, labels, loss weights, document boundaries)."""

    micro_batch: int

    def __str__(self) -> str:
        return f"Load of micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Forward:
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}F{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """The whole backward: input gradient and weight gradient."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}B{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}I{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}W{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending a buffer to pipeline rank `peer` on communicator `channel` of that pair of ranks."""

    buffer: Buffer
    peer: int
    channel: int
    specs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return f"Send of the {self.buffer}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Start receiving a buffer from pipeline rank `peer` on communicator `channel` of that pair of ranks."""

    buffer: Buffer
    peer: int
    channel: int
    specs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return f"Recv of the {self.buffer}"


@dataclass(frozen=True, slots=True)
class WaitSend:
    """Block until the buffer has left, and give up its memory."""

    buffer: Buffer

    def __str__(self) -> str:
        return f"Wait for the send of the {self.buffer}"


@dataclass(frozen=True, slots=True)
class WaitRecv:
    """Block until the buffer has arrived."""

    buffer: Buffer

    def __str__(self) -> str:
        return f"Wait for the receipt of the {self.buffer}"


Computation = Forward | Backward | BackwardInput | BackwardWeight
Instruction = Load | Computation | Send | Recv | WaitSend | WaitRecv


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """All that pipeline rank `pp_rank` of replica `dp_rank` needs to run one step.

    `micro_batches` and `prediction` are those of the whole replica. The loss of a step is sum(weight x loss over
    positions) over all replicas divided by `loss_divisor` (the global number of target tokens, or of samples).
    `real_tokens` and `padded_tokens` count the whole global batch; `num_micro_batches` has one count a replica.
    `forward_only`: no backward follows (evaluation), so nothing is kept after a forward, and gradients stay as they
    are.
    """

    step: int
    dp_rank: int
    pp_rank: int
    stage_ranks: tuple[int, ...]
    micro_batches: tuple[MicroBatch, ...]
    instructions: tuple[Instruction, ...]
    prediction: Prediction
    loss_norm: LossNorm
    loss_divisor: int
    real_tokens: int
    padded_tokens: int
    num_micro_batches: tuple[int, ...]
    seed: int
    forward_only: bool = False

    @property
    def makespan_s(self) -> float:
        return self.prediction.makespan_ns / 1e9

    @property
    def lower_bound_s(self) -> float:
        return self.prediction.lower_bound_ns / 1e9

    @property
    def peak_bytes(self) -> int:
        """Largest predicted peak over the replica's ranks."""
        return max(self.prediction.peak_bytes)

    @property
    def padding_efficiency(self) -> float:
        return self.real_tokens / max(1, self.padded_tokens)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of this rank, in their order."""
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == self.pp_rank)
