"""The memory of a planned step: bytes by part, of every pipeline rank at its fullest moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength, round_up
from dynapipe_ext.costs.estimated import EstimatedCosts
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.partitioning.packing import RowPackingPolicy, make_evaluate
from dynapipe_ext.partitioning.pieces import RowTime, pack_with_pieces
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedMemory:
    """Bytes of one rank. `activations`: those of layers, for all micro-batches in flight. `logits`: those of the head.
    `working`: the running action's, such as recomputed layers and gradients of activations. `buffers`: messages, and
    units that ZeRO has gathered. `reserved`: left to the framework.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    logits: int = 0
    working: int = 0
    buffers: int = 0
    reserved: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def bytes_in_pieces(costs: EstimatedCosts, length: int, tokens: int, multiple: int, recompute: Recompute) -> int:
    """Bytes on the fullest rank for one sample in pieces of so many tokens, with all pieces in memory, and states.

    Errors: PlanError for a model that cannot run pieces.
    """
    rule = RowPackingPolicy(max_tokens=round_up(tokens, multiple), pad_multiple=multiple, recompute=recompute)
    priced = costs.evaluate(pack_with_pieces([SampleLength(0, length)], RowTime(), make_evaluate(costs), rule))
    stored = costs.join_stages(priced.stored_bytes.sum(axis=1))
    working = costs.join_stages(priced.working_bytes, np.maximum).max(axis=1)
    return int((costs.join_stages(priced.static_bytes) + stored + working).max())


def planned_memory(plan: StepPlan, costs: EstimatedCosts, reserved_bytes: int) -> tuple[EstimatedMemory, ...]:
    """The memory of every pipeline rank at its fullest moment, on the replica where that is largest."""
    micro_batches = plan.batch.micro_batches
    priced = costs.evaluate(micro_batches)  # of all replicas at once
    head = costs.count_head_bytes(micro_batches)
    tables = tuple(
        table.tolist() for table in (priced.stored_bytes, priced.working_bytes, head, costs.count_message_bytes(priced))
    )
    largest: list[EstimatedMemory] = []
    seen = set()  # replicas with equal schedules and bytes
    for columns, schedule in zip(_columns(plan), plan.schedules, strict=True):
        of_replica = tuple(tuple(tuple(row[columns]) for row in table) for table in tables)
        if columns.start == columns.stop or (id(schedule), of_replica) in seen:
            continue
        seen.add((id(schedule), of_replica))
        peaks = [_at_peak(schedule, rank, of_replica, costs, reserved_bytes) for rank in range(costs.topology.pp)]
        largest = [max(pair, key=lambda m: m.total) for pair in zip(largest, peaks, strict=True)] if largest else peaks
    return tuple(largest)


def _columns(plan: StepPlan) -> list[slice]:
    """The columns of each replica's micro-batches among those of the batch."""
    ends = list(accumulate(len(replica.micro_batches) for replica in plan.batch.replicas))
    return [slice(begin, end) for begin, end in pairwise([0, *ends])]


def _at_peak(
    schedule: PipelineSchedule,
    rank: int,
    tables: Sequence[Sequence[Sequence[int]]],
    costs: EstimatedCosts,
    reserved_bytes: int,
) -> EstimatedMemory:
    stored, working, heads, messages = tables
    whole_units = costs.states.buffers.tolist()
    held = held_head = peak = 0
    # Stored, the head's, working, buffers.
    at_peak = (0, 0, 0, int(costs.join_stages(costs.states.buffers, np.maximum)[rank]))
    for action in schedule.ranks[rank]:
        stage, m = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            held, held_head = held + stored[stage][m], held_head + heads[stage][m]
        if action.kind is not Kind.BACKWARD_WEIGHT and held + working[stage][m] > peak:
            peak = held + working[stage][m]
            buffers = messages[stage][m] + whole_units[stage]
            at_peak = held, held_head, working[stage][m] - buffers, buffers
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held, held_head = held - stored[stage][m], held_head - heads[stage][m]
    stored_at_peak, logits, temporary, buffers = at_peak
    device = costs.states.device
    return EstimatedMemory(
        weights=int(costs.join_stages(device.weights)[rank]),
        gradients=int(costs.join_stages(device.gradients)[rank]),
        optimizer=int(costs.join_stages(device.optimizer)[rank]),
        activations=stored_at_peak - logits,
        logits=logits,
        working=temporary,
        buffers=buffers,
        reserved=reserved_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Forwards alone over one global batch, which keep no activations. `beside_bytes`: of the fullest rank with its
    training states; `alone_bytes`: with its weights only.
    """

    beside_bytes: int
    alone_bytes: int
    seconds: float


def evaluation(plan: StepPlan, costs: EstimatedCosts, reserved_bytes: int) -> Evaluation:
    """The evaluation of the plan's micro-batches, one after the other through the pipeline."""
    micro_batches = plan.batch.micro_batches
    priced = costs.evaluate(micro_batches)  # of all replicas at once
    seconds = 0.0
    for columns in _columns(plan):
        if columns.start == columns.stop:
            continue
        forward_ns, transfer_ns = costs.join_stages(priced.forward_ns[:, columns]), priced.transfer_ns[:, columns]
        fill = int(forward_ns[:, 0].sum() + transfer_ns[:, 0].sum()) - int(forward_ns[:, 0].max())
        seconds = max(seconds, (int(forward_ns.sum(axis=1).max()) + fill) / 1e9)
    running = _forward_bytes(micro_batches, costs)
    device = costs.states.device
    return Evaluation(
        beside_bytes=int((costs.join_stages(device.total) + running).max()) + reserved_bytes,
        alone_bytes=int((costs.join_stages(device.weights) + running).max()) + reserved_bytes,
        seconds=seconds,
    )


def _forward_bytes(micro_batches: Sequence[MicroBatch], costs: EstimatedCosts) -> IntArray:
    """Bytes of every pipeline rank during a forward that stores nothing: one layer at a time with its input, or the
    head.
    """
    checkpointed = [
        MicroBatch(m.samples, m.layout, "full", m.attention, m.pad_multiple, m.min_len) for m in micro_batches
    ]
    priced = costs.evaluate(checkpointed)
    layers = costs.layers_per_stage[:, None]
    head = costs.count_head_bytes(checkpointed)
    one_layer = (priced.stored_bytes - head) // np.maximum(1, layers) + head + priced.working_bytes
    return costs.join_stages(one_layer.max(axis=1), np.maximum)
