"""From pipeline schedules to instructions: where each transfer starts and where it is waited for.

Rules (DESIGN: proven under NCCL's rules). Each direction between two ranks has a communicator of its own, and the
receiver posts its receives in the order in which the sender sends, whatever order it consumes them in: the sender
places its peer's receive. A receive is posted when the sender is predicted to send; a send is waited for only before
an action that is predicted to start strictly after its arrival. All waits then point backwards in predicted time, so
no schedule that simulates can deadlock; `verify` proves it again for every plan. Where a rank's peak of bytes in flight
stays the same, a send may also last until the second message after it on its communicator (`sends_in_flight`): a
receiver that is later than predicted then delays nobody who has other work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from dynapipe_ext.activations import ActivationFormat, TensorSpec
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    ExecutionPlan,
    Forward,
    Instruction,
    Load,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.plan import GlobalBatchPlan, MicroBatch
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.judge.filling import filling_makespan_ns, with_room_to_fill
from dynapipe_ext.schedules.judge.simulate import simulate_ns
from dynapipe_ext.schedules.step_plan import StepPlan

SENDS_IN_FLIGHT = 2

Times = Sequence[Sequence[tuple[int, int]]]  # per rank, per action: (start_ns, end_ns)


@dataclass(frozen=True, slots=True)
class _Message:
    """A buffer that changes ranks; positions are indices into the two ranks' action lists."""

    buffer: Buffer
    sender: int
    sent_after: int
    receiver: int
    used_by: int


@dataclass(slots=True)
class _Sent:
    """A send of a rank: waited for before action `wait`, which may be moved up to each of `ends` in turn."""

    buffer: Buffer
    num_bytes: int
    wait: int
    ends: tuple[int, ...]


def channel_of(sender: int, receiver: int) -> int:
    """Communicator of a direction within the pair of ranks: 0 upwards, 1 downwards."""
    return 0 if sender < receiver else 1


def lower_schedule(
    schedule: PipelineSchedule,
    times: Times,
    micro_batches: Sequence[MicroBatch],
    activation_format: ActivationFormat,
    transfer_ns: Sequence[Sequence[int]] | None = None,
    *,
    sends_in_flight: int = 0,
) -> tuple[tuple[Instruction, ...], ...]:
    """Instructions of each pipeline rank. `transfer_ns[boundary][micro_batch]` defaults to 0.

    A send is waited for once it is predicted to have arrived, but where memory allows not before `sends_in_flight`
    others followed it on its communicator.
    """
    starts = [[start for start, _ in rank] for rank in times]
    before: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in schedule.ranks]
    after: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in schedule.ranks]
    channels: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    sends: list[list[_Sent]] = [[] for _ in schedule.ranks]
    for message in _messages(schedule):
        channels[message.sender, message.receiver].append(message)
    for (sender, receiver), messages in channels.items():
        messages.sort(key=lambda message: message.sent_after)
        channel, posts = channel_of(sender, receiver), []
        for message in messages:
            sent_ns = times[sender][message.sent_after][1]
            posts.append(max(0, min(message.used_by, bisect_right(starts[receiver], sent_ns) - 1)))
        for i in reversed(range(len(posts) - 1)):
            posts[i] = min(posts[i], posts[i + 1])
        last = [len(schedule.ranks[sender])] * sends_in_flight
        after_it = [message.sent_after for message in messages[1:]] + last
        for i, (message, post) in enumerate(zip(messages, posts, strict=True)):
            boundary = message.buffer.stage - (message.buffer.payload == "gradient")
            specs = activation_format.specs(micro_batches[message.buffer.micro_batch], boundary)
            after[sender][message.sent_after].append(Send(message.buffer, receiver, channel, specs))
            before[receiver][post].append(Recv(message.buffer, sender, channel, specs))
            arrival_ns = times[sender][message.sent_after][1]
            if transfer_ns is not None:
                arrival_ns += transfer_ns[boundary][message.buffer.micro_batch]
            wait = max(bisect_right(starts[sender], arrival_ns), message.sent_after + 1)
            sends[sender].append(_Sent(message.buffer, _num_bytes(specs), wait, (*after_it[i : i + sends_in_flight],)))
            before[receiver][message.used_by].append(WaitRecv(message.buffer))
    for rank, actions in enumerate(schedule.ranks):
        _wait_later(len(actions), sends[rank], before[rank], after[rank])
        for sent in sends[rank]:
            before[rank][sent.wait].append(WaitSend(sent.buffer))
    return tuple(
        tuple(_rank_instructions(actions, before[rank], after[rank])) for rank, actions in enumerate(schedule.ranks)
    )


def _wait_later(
    num_actions: int, sends: list[_Sent], before: dict[int, list[Instruction]], after: dict[int, list[Instruction]]
) -> None:
    """Put off the waits for a rank's sends where that holds no more bytes at once than the rank needs anyway.

    All are granted their first end before any is granted its second. `posted[i]` are the bytes in flight once the
    receives before action i are posted, `started[i]` once the sends after it are.
    """
    sends.sort(key=lambda sent: sent.wait)
    change = [0] * (num_actions + 1)  # by waits before an action and by what the action takes
    sizes: dict[Buffer, int] = {}
    for row in before.values():
        sizes.update((x.buffer, _num_bytes(x.specs)) for x in row if isinstance(x, Recv))
    for i, row in before.items():
        change[i] -= sum(sizes[x.buffer] for x in row if isinstance(x, WaitRecv))
    for sent in sends:
        change[sent.wait] -= sent.num_bytes
    posted, started, held = [0] * (num_actions + 1), [0] * (num_actions + 1), 0
    for i in range(num_actions + 1):
        held += sum(sizes[x.buffer] for x in before.get(i, ()) if isinstance(x, Recv))
        posted[i] = held
        held += change[i] + sum(_num_bytes(x.specs) for x in after.get(i, ()) if isinstance(x, Send))
        started[i] = held
    most = max(*posted, *started)
    for place in range(max((len(sent.ends) for sent in sends), default=0)):
        for sent in sends:
            size = sent.num_bytes
            while sent.wait < sent.ends[place] and max(started[sent.wait], posted[sent.wait + 1]) + size <= most:
                started[sent.wait] += size
                sent.wait += 1
                posted[sent.wait] += size


def _messages(schedule: PipelineSchedule) -> list[_Message]:
    position = {action: (rank, i) for rank, actions in enumerate(schedule.ranks) for i, action in enumerate(actions)}
    last, messages = schedule.num_stages - 1, []
    for action, (rank, i) in position.items():
        match action.kind:
            case Kind.FORWARD if action.stage < last:
                consumer = position[Action(action.stage + 1, Kind.FORWARD, action.micro_batch)]
                buffer = Buffer("activation", action.stage, action.micro_batch)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT if action.stage > 0:
                below = action.stage - 1
                whole = Action(below, Kind.BACKWARD, action.micro_batch)
                consumer = position[
                    whole if whole in position else Action(below, Kind.BACKWARD_INPUT, action.micro_batch)
                ]
                buffer = Buffer("gradient", action.stage, action.micro_batch)
            case _:
                continue
        if consumer[0] != rank:
            messages.append(_Message(buffer, rank, i, consumer[0], consumer[1]))
    return messages


def _rank_instructions(
    actions: Sequence[Action], before: dict[int, list[Instruction]], after: dict[int, list[Instruction]]
) -> list[Instruction]:
    """Receives are posted first, then finished sends give up their memory, then the action's input is awaited."""
    order = {Recv: 0, WaitSend: 1, WaitRecv: 2}
    loaded: set[int] = set()
    instructions: list[Instruction] = []
    for i, action in enumerate(actions):
        instructions += sorted(before[i], key=lambda instruction: order[type(instruction)])
        if action.micro_batch not in loaded:
            loaded.add(action.micro_batch)
            instructions.append(Load(action.micro_batch))
        instructions.append(_compute(action))
        instructions += after[i]
    for i in sorted(before):
        if i >= len(actions):
            instructions += before[i]
    return instructions


def _num_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)


def _compute(action: Action) -> Instruction:
    match action.kind:
        case Kind.FORWARD:
            return Forward(action.stage, action.micro_batch)
        case Kind.BACKWARD:
            return Backward(action.stage, action.micro_batch)
        case Kind.BACKWARD_INPUT:
            return BackwardInput(action.stage, action.micro_batch)
        case Kind.BACKWARD_WEIGHT:
            return BackwardWeight(action.stage, action.micro_batch)
        case _:
            assert_never(action.kind)


def lower(
    step_plan: StepPlan, activation_format: ActivationFormat, *, fill_waits: bool = False
) -> tuple[tuple[ExecutionPlan, ...], ...]:
    """Execution plans indexed [dp_rank][pp_rank].

    `fill_waits` makes plans for executors that run weight gradients while they wait (see `filling`): the makespan that
    they promise is that of filling ranks, the peaks are those of the schedule. Where ranks share cores, which a filled
    wait does not free, the makespan is the schedule's, too.
    """
    batch = step_plan.batch
    counts = tuple(len(replica.micro_batches) for replica in batch.replicas)
    plans = []
    for replica, schedule, prediction, replica_costs in zip(
        batch.replicas, step_plan.schedules, step_plan.predictions, step_plan.costs, strict=True
    ):
        if fill_waits and schedule.is_split:
            schedule = with_room_to_fill(schedule, replica_costs)
            if step_plan.cores is None:
                filling_ns = filling_makespan_ns(schedule, replica_costs)
                bubble_ratio = 1 - (1 - prediction.bubble_ratio) * prediction.makespan_ns / filling_ns
                prediction = replace(prediction, makespan_ns=filling_ns, bubble_ratio=bubble_ratio)
        instructions = lower_schedule(
            schedule,
            simulate_ns(schedule, replica_costs),
            replica.micro_batches,
            activation_format,
            replica_costs.transfer_ns.tolist(),
            sends_in_flight=SENDS_IN_FLIGHT,
        )
        plans.append(
            tuple(
                ExecutionPlan(
                    step=batch.step,
                    dp_rank=replica.dp_rank,
                    pp_rank=pp_rank,
                    stage_ranks=schedule.stage_ranks,
                    micro_batches=replica.micro_batches,
                    instructions=rank_instructions,
                    prediction=prediction,
                    loss_norm=batch.loss_norm,
                    loss_divisor=loss_divisor(batch),
                    real_tokens=batch.real_tokens,
                    padded_tokens=batch.padded_tokens,
                    num_micro_batches=counts,
                    seed=batch.seed,
                    forward_only=schedule.forward_only,
                )
                for pp_rank, rank_instructions in enumerate(instructions)
            )
        )
    return tuple(plans)


def loss_divisor(batch: GlobalBatchPlan) -> int:
    """What the weighted loss sum of a step is divided by (at least 1: a batch without targets has loss 0)."""
    return max(1, batch.target_tokens if batch.loss_norm == "tokens" else batch.num_samples)
