"""What one pipeline rank does in one step: a flat list of instructions, the plan that holds it, and how it is made.

schedules ─► lower ─► ExecutionPlan of each rank

The rank's order is the whole program. Send and Recv only start a transfer; Wait ends it. A Forward of stage s takes the
"activation" that stage s - 1 produced. A Backward of stage s takes the "gradient" that stage s + 1 produced. Each
leaves its own output in a buffer until it is sent or taken. Printed, a computation is its action in a schedule ("2F0"),
everything else says what it does.

All transfers of a replica have one order, that of their predicted sends. Each rank posts its own in that order, sends
and receives over all its communicators (one for each direction between two ranks), so that they end even on devices
that run posted transfers one at a time. A receive is posted before the first action whose predicted end is after the
send. A send is waited for before the first action whose predicted start is after its arrival. `verify_step` proves the
order again for every plan.

The native core lowers to a `Program`, a table of integers in place of a value an instruction: those who only prove and
encode a step of thousands of ranks never make the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, assert_never, overload

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, LossNorm, MicroBatch
from dynapipe_ext.batch.topology import ActivationFormat, TensorSpec
from dynapipe_ext.core import native
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import simulate_ns
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan

Payload = Literal["activation", "gradient"]


class Buffer(NamedTuple):
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
    """Start sending a buffer to pipeline rank `peer` on communicator `channel` of that pair (0: upwards)."""

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
IntTable = npt.NDArray[np.int32]
_COMPUTATIONS = (Forward, Backward, BackwardInput, BackwardWeight)
_LETTERS = (Load, *_COMPUTATIONS, Send, Recv, WaitSend, WaitRecv)  # as the native core counts them


class Program(Sequence[Instruction]):
    """A rank's instructions as the native core has them; each is made once somebody asks for one.

    `table` (instructions, 7): the place in `_LETTERS`, stage, micro-batch, whether the buffer is a gradient, peer,
    channel, and the place in `specs`, no two of which are equal. What an instruction does not have is 0.
    """

    __slots__ = ("_instructions", "specs", "table")

    def __init__(self, table: IntTable, specs: tuple[tuple[TensorSpec, ...], ...]) -> None:
        self.table, self.specs = table, specs
        self._instructions: tuple[Instruction, ...] | None = None

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Program:
        """Return the program of these instructions."""
        places: dict[tuple[TensorSpec, ...], int] = {}
        rows = [_row_of(instruction, places) for instruction in instructions]
        return cls(np.array(rows, np.int32).reshape(-1, 7), tuple(places))

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...

    def __getitem__(self, index: int | slice) -> Instruction | tuple[Instruction, ...]:
        if self._instructions is None:
            self._instructions = tuple(map(self._made, self.table.tolist()))
        return self._instructions[index]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return self[:] == (other[:] if isinstance(other, Program) else other)

    def __hash__(self) -> int:
        return hash(self[:])

    def __repr__(self) -> str:
        return repr(self[:])

    def _made(self, row: Sequence[int]) -> Instruction:
        letter, stage, micro_batch, is_gradient, peer, channel, specs = row
        kind: Any = _LETTERS[letter]
        if kind is Load:
            return Load(micro_batch)
        if kind in _COMPUTATIONS:
            made: Instruction = kind(stage, micro_batch)
            return made
        buffer = Buffer("gradient" if is_gradient else "activation", stage, micro_batch)
        transfer: Instruction = kind(buffer, peer, channel, self.specs[specs]) if kind in (Send, Recv) else kind(buffer)
        return transfer


def _row_of(instruction: Instruction, places: dict[tuple[TensorSpec, ...], int]) -> tuple[int, ...]:
    """Return the row of an instruction in `Program.table`; `places` of specs grow as new ones come."""
    letter = _LETTERS.index(type(instruction))
    match instruction:
        case Load(micro_batch):
            return letter, 0, micro_batch, 0, 0, 0, 0
        case Forward(stage, m) | Backward(stage, m) | BackwardInput(stage, m) | BackwardWeight(stage, m):
            return letter, stage, m, 0, 0, 0, 0
        case Send(buffer, peer, channel, specs) | Recv(buffer, peer, channel, specs):
            place = places.setdefault(specs, len(places))
            return letter, buffer.stage, buffer.micro_batch, buffer.payload == "gradient", peer, channel, place
        case WaitSend(buffer) | WaitRecv(buffer):
            return letter, buffer.stage, buffer.micro_batch, buffer.payload == "gradient", 0, 0, 0
        case _:
            assert_never(instruction)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """All that pipeline rank `pp_rank` of replica `dp_rank` needs to run one step.

    A replica is a block of `width` data parallel ranks, `width` x `dp_rank` and those behind it. All of them have this
    plan; each runs it on its slice of every row's positions, and `instructions` have the shapes of slices.
    `micro_batches` and `prediction` are those of the whole replica. The loss of a step is sum(weight x loss over
    positions) over all replicas divided by `loss_divisor`. Its weight among other steps is `loss_weight`: the global
    number of target tokens, or of samples.
    `real_tokens` and `padded_tokens` count the whole global batch; `num_micro_batches` has one count a replica.
    `forward_only`: no backward follows (evaluation), so nothing is kept after a forward, and gradients stay as they
    are.
    """

    step: int
    dp_rank: int
    pp_rank: int
    stage_ranks: tuple[int, ...]
    micro_batches: tuple[MicroBatch, ...]
    instructions: Sequence[Instruction]
    prediction: Prediction
    loss_norm: LossNorm
    loss_weight: int
    real_tokens: int
    padded_tokens: int
    num_micro_batches: tuple[int, ...]
    seed: int
    forward_only: bool = False
    width: int = 1

    @property
    def loss_divisor(self) -> int:
        """At least 1: a batch without targets has loss 0."""
        return max(1, self.loss_weight)

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


Times = Sequence[Sequence[tuple[int, int]]]  # per rank, per action: (start_ns, end_ns)
RankPrograms = tuple[Sequence[Instruction], ...]  # of each pipeline rank


def lower_schedule(
    schedule: PipelineSchedule,
    times: Times,
    micro_batches: Sequence[MicroBatch],
    activation_format: ActivationFormat,
    transfer_ns: Sequence[Sequence[int]] | None = None,
    *,
    order_times: Times | None = None,
) -> RankPrograms:
    """Instructions of each pipeline rank. `transfer_ns[boundary][micro_batch]` defaults to 0.

    `order_times` are those by which transfers are ordered (default: `times`).
    """
    specs, places = _specs_of(schedule, micro_batches, activation_format)
    transfers = np.zeros(places.shape, np.int64) if transfer_ns is None else np.array(transfer_ns, np.int64)
    tables = native.lowered(
        schedule.ranks,
        tuple(Kind),
        schedule.num_stages,
        len(micro_batches),
        times,
        order_times or times,
        transfers.reshape(places.shape),
        places,
    )
    return tuple(Program(table, specs) for table in tables)


def _specs_of(
    schedule: PipelineSchedule, micro_batches: Sequence[MicroBatch], activation_format: ActivationFormat
) -> tuple[tuple[tuple[TensorSpec, ...], ...], IntTable]:
    """The different specs of messages between ranks, and of each boundary and micro-batch the place among them."""
    places: dict[tuple[TensorSpec, ...], int] = {}
    table = np.zeros((max(0, schedule.num_stages - 1), len(micro_batches)), np.int32)
    rows: dict[int, list[int]] = {}
    changing = activation_format.changing_stages
    for boundary in range(len(table)):
        if schedule.stage_ranks[boundary] == schedule.stage_ranks[boundary + 1]:
            continue
        if (alike := _first_alike(boundary, changing)) not in rows:
            specs = (activation_format.specs(micro_batch, alike) for micro_batch in micro_batches)
            rows[alike] = [places.setdefault(one, len(places)) for one in specs]
        table[boundary] = rows[alike]
    return tuple(places), table


def _first_alike(boundary: int, changing: Sequence[int]) -> int:
    """The first boundary with the same specs: all are alike from one that changes them to the next."""
    return max((0, *(stage for stage in changing if stage <= boundary)))


def lower(
    step_plan: StepPlan,
    activation_format: ActivationFormat,
    *,
    replicas_meet: bool = False,
    unchanged: Mapping[int, RankPrograms] = MappingProxyType({}),
) -> tuple[tuple[ExecutionPlan, ...], ...]:
    """Execution plans indexed [replica][pp_rank]. Replicas whose instructions are `unchanged` keep them.

    Where `replicas_meet` in collectives inside micro-batches, the times of the first replica order the transfers of
    all, so that transfers and collectives have one order.
    """
    batch = step_plan.batch
    plan_of_batch = _plan_of_batch(batch)
    activation_format = activation_format.at_width(batch.width)
    plans = []
    for replica, schedule, prediction, replica_costs in zip(
        batch.replicas, step_plan.schedules, step_plan.predictions, step_plan.costs, strict=True
    ):
        # Where replicas have unequal numbers of micro-batches the proof says what is wrong.
        same_order = replicas_meet and len(batch.replicas[0].micro_batches) == len(replica.micro_batches)
        instructions = unchanged.get(replica.dp_rank) or lower_schedule(
            schedule,
            simulate_ns(schedule, replica_costs),
            replica.micro_batches,
            activation_format,
            replica_costs.transfer_ns.tolist(),
            order_times=simulate_ns(schedule, step_plan.costs[0]) if same_order else None,
        )
        plan_of_rank = partial(
            plan_of_batch,
            dp_rank=replica.dp_rank,
            stage_ranks=schedule.stage_ranks,
            micro_batches=replica.micro_batches,
            prediction=prediction,
            forward_only=schedule.forward_only,
        )
        plans.append(tuple(plan_of_rank(pp_rank=p, instructions=own) for p, own in enumerate(instructions)))
    return tuple(plans)


def _plan_of_batch(batch: GlobalBatchPlan) -> partial[ExecutionPlan]:
    """`ExecutionPlan` with all that ranks of a global batch have alike."""
    return partial(
        ExecutionPlan,
        step=batch.step,
        seed=batch.seed,
        loss_norm=batch.loss_norm,
        loss_weight=batch.target_tokens if batch.loss_norm == "tokens" else batch.num_samples,
        real_tokens=batch.real_tokens,
        padded_tokens=batch.padded_tokens,
        num_micro_batches=tuple(len(replica.micro_batches) for replica in batch.replicas),
        width=batch.width,
    )
