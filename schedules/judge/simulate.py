"""Exact event simulation of a schedule in integer nanoseconds.

Each rank runs its list strictly in order. An action starts once the one before it has ended and its input has
arrived: F of stage s needs F of stage s - 1; B and I need B or I of stage s + 1 (on the last stage, F of the same
stage); W needs I of the same stage. Inputs from another rank take the boundary's `transfer_ns`, from the same rank
none. Transfers neither queue nor block. A gradient can only come back to a stage whose forward ran, so one input an
action is all that has to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.judge.memory import check_sizes, held_bytes
from dynapipe_ext.timeline import Span, Trace

# Slot that must be filled, duration_ns, slot that is filled, delay_ns until it is.
TimedAction = tuple[int, int, int, int]
SpanNs = tuple[int, int]

# Slots hold arrival times. The first three are fixed; then come S x M forward inputs and S x M gradient inputs.
_NOW, _NEVER, _NOWHERE, _FIRST = range(4)


def simulate_ns(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[list[SpanNs]]:
    """Per pipeline rank, (start_ns, end_ns) of each of its actions.

    Errors: PlanError if the costs do not match the schedule, or if ranks wait for each other for ever; it names the
    action at which each of them is blocked.
    """
    steps = timed_actions(schedule, costs)
    spans, stuck = run_steps(steps, num_slots(costs.num_stages, costs.num_micro_batches))
    if stuck:
        raise deadlock(schedule, stuck)
    return spans


def makespan_ns(schedule: PipelineSchedule, costs: MicroBatchCosts) -> int:
    """First start to last end; 0 for an empty schedule. Errors: as simulate_ns."""
    return last_end_ns(simulate_ns(schedule, costs))


def last_end_ns(spans: Sequence[Sequence[SpanNs]]) -> int:
    """Makespan of a step whose first action starts at 0; 0 without actions."""
    return max((rank[-1][1] for rank in spans if rank), default=0)


def bubble_ratio(spans: Sequence[Sequence[SpanNs]]) -> float:
    """Idle time over (ranks with actions x makespan); 0 where nothing takes time."""
    whole_ns = last_end_ns(spans) * sum(1 for rank in spans if rank)
    return 1.0 - sum(end - start for rank in spans for start, end in rank) / whole_ns if whole_ns else 0.0


def simulate(schedule: PipelineSchedule, costs: MicroBatchCosts) -> Trace:
    """The step as a Trace: one track a pipeline rank, spans in order of time, `shape` left empty.

    Every rank has a core or device of its own (else: `simulate_shared`). Errors: PlanError as simulate_ns.
    """
    return trace_of(schedule, costs, simulate_ns(schedule, costs))


def trace_of(schedule: PipelineSchedule, costs: MicroBatchCosts, spans: Sequence[Sequence[SpanNs]]) -> Trace:
    """Spans of every rank's actions as a Trace: `cpu_s` is the action's own cost, `num_bytes` static plus stored bytes
    right after it."""
    steps, held = timed_actions(schedule, costs), held_bytes(schedule, costs)
    rows = sorted(
        (start, end, rank, index) for rank, pairs in enumerate(spans) for index, (start, end) in enumerate(pairs)
    )
    return Trace(
        tuple(
            Span(
                rank=rank,
                label=str(schedule.ranks[rank][index]),
                start_s=start / 1e9,
                end_s=end / 1e9,
                cpu_s=steps[rank][index][1] / 1e9,
                num_bytes=held[rank][index],
            )
            for start, end, rank, index in rows
        ),
        schedule.name,
    )


def num_slots(num_stages: int, num_micro_batches: int) -> int:
    """Length of the table of arrival times that run_steps needs."""
    return _FIRST + 2 * num_stages * num_micro_batches


def forward_steps(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> list[list[TimedAction]]:
    """Step of F for each stage and micro-batch: table of shape (S, M)."""
    last, num = costs.num_stages - 1, costs.num_micro_batches
    gradients = _FIRST + costs.num_stages * num
    forward, transfer = costs.forward_ns.tolist(), _transfers(costs, stage_ranks)
    return [
        [
            (
                _FIRST + s * num + m if s else _NOW,
                forward[s][m],
                _FIRST + (s + 1) * num + m if s < last else gradients + s * num + m,
                transfer[s][m] if s < last else 0,
            )
            for m in range(num)
        ]
        for s in range(last + 1)
    ]


def backward_steps(
    costs: MicroBatchCosts, stage_ranks: Sequence[int], *, split: bool = False
) -> list[list[TimedAction]]:
    """Step of B (of I, if `split`) for each stage and micro-batch: table of shape (S, M)."""
    num = costs.num_micro_batches
    gradients = _FIRST + costs.num_stages * num
    duration = (costs.input_ns if split else costs.backward_ns).tolist()
    transfer = _transfers(costs, stage_ranks)
    return [
        [
            (
                gradients + s * num + m,
                duration[s][m],
                gradients + (s - 1) * num + m if s else _NOWHERE,
                transfer[s - 1][m] if s else 0,
            )
            for m in range(num)
        ]
        for s in range(costs.num_stages)
    ]


def run_steps(ranks: Sequence[Sequence[TimedAction]], slots: int) -> tuple[list[list[SpanNs]], list[tuple[int, int]]]:
    """Spans of every rank, and (rank, position) of each rank that can never go on (none: the order is sound).

    A rank runs until its next input is not there, and is looked at again when that slot is filled: every step is
    visited once, whatever the order.
    """
    arrival = [-1] * slots
    arrival[_NOW] = 0
    waiter = [-1] * slots
    position = [0] * len(ranks)
    clock = [0] * len(ranks)
    spans: list[list[SpanNs]] = [[] for _ in ranks]
    runnable = list(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        steps, now, done = ranks[rank], clock[rank], spans[rank]
        index = position[rank]
        for index in range(position[rank], len(steps)):
            need, duration, out, delay = steps[index]
            start = arrival[need]
            if start < now:
                if start < 0:
                    waiter[need] = rank
                    break
                start = now
            now = start + duration
            done.append((start, now))
            arrival[out] = now + delay
            if waiter[out] >= 0:
                runnable.append(waiter[out])
                waiter[out] = -1
        else:
            index = len(steps)
        position[rank], clock[rank] = index, now
    return spans, [(rank, index) for rank, index in enumerate(position) if index < len(ranks[rank])]


def timed_actions(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[list[TimedAction]]:
    """Every rank's list, for `run_steps`. Errors: PlanError if the costs do not match the schedule."""
    check_sizes(schedule, costs)
    forward = forward_steps(costs, schedule.stage_ranks)
    backward = backward_steps(costs, schedule.stage_ranks)
    gradient: list[list[TimedAction]] = []
    weight: list[list[int]] = []
    if any(
        action.kind is Kind.BACKWARD_INPUT or action.kind is Kind.BACKWARD_WEIGHT
        for r in schedule.ranks
        for action in r
    ):
        gradient = backward_steps(costs, schedule.stage_ranks, split=True)
        weight = costs.weight_ns.tolist()
    ranks = []
    for actions in schedule.ranks:
        steps: list[TimedAction] = []
        split: set[tuple[int, int]] = set()  # W waits for nothing but an I that stands before it in the same list
        for action in actions:
            stage, kind, m = action.stage, action.kind, action.micro_batch
            if kind is Kind.FORWARD:
                steps.append(forward[stage][m])
            elif kind is Kind.BACKWARD:
                steps.append(backward[stage][m])
            elif kind is Kind.BACKWARD_INPUT:
                split.add((stage, m))
                steps.append(gradient[stage][m])
            else:
                steps.append((_NOW if (stage, m) in split else _NEVER, weight[stage][m], _NOWHERE, 0))
        ranks.append(steps)
    return ranks


def _transfers(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> list[list[int]]:
    """Transfer times over each boundary; none within a rank."""
    none = [0] * costs.num_micro_batches
    return [none if stage_ranks[s] == stage_ranks[s + 1] else row for s, row in enumerate(costs.transfer_ns.tolist())]


def deadlock(schedule: PipelineSchedule, stuck: Sequence[tuple[int, int]]) -> PlanError:
    """The error that names the action at which each rank (rank, position) is blocked."""
    where = ", ".join(f"rank {rank} at {schedule.ranks[rank][index]}" for rank, index in stuck)
    return PlanError(f"schedule {schedule.name!r} deadlocks: {where} waits for an input that is never produced")
