"""The order of forward-only steps: every stage runs the micro-batches in one order, that in which they enter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.costs.model import CostModel, IntArray, MicroBatchCosts
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns
from dynapipe_ext.schedules.search.optimizer import list_start_orders
from dynapipe_ext.schedules.step_plan import price_replicas

_NEVER = 1 << 62


def forward_schedule(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> PipelineSchedule:
    """Return the forward-only schedule that runs the micro-batches of `costs` in their order on every stage. A free
    rank takes the oldest micro-batch that has arrived, or waits. So few messages wait for ranks of several stages."""
    stages, count = len(stage_ranks), costs.num_micro_batches
    forward: list[list[int]] = costs.forward_ns.tolist()
    transfer: list[list[int]] = costs.transfer_ns.tolist()
    arrival = [[0] * count, *([_NEVER] * count for _ in range(stages - 1))]
    entered, free = [0] * stages, [0] * (max(stage_ranks) + 1)
    ranks: list[list[Action]] = [[] for _ in free]
    for _ in range(stages * count):
        start_ns, m, stage = min(
            (max(free[rank], arrival[s][entered[s]]), entered[s], s)
            for s, rank in enumerate(stage_ranks)
            if entered[s] < count
        )
        rank = stage_ranks[stage]
        free[rank] = start_ns + forward[stage][m]
        entered[stage] += 1
        ranks[rank].append(Action(stage, Kind.FORWARD, m))
        if stage + 1 < stages:
            hop_ns = transfer[stage][m] if stage_ranks[stage + 1] != rank else 0
            arrival[stage + 1][m] = free[rank] + hop_ns
    return PipelineSchedule("forward-only", tuple(map(tuple, ranks)), tuple(stage_ranks), forward_only=True)


def find_johnson_order(first: IntArray, last: IntArray) -> list[int]:
    """Return the best order of jobs on two machines, from their times on each (Johnson 1954). First come those that are
    shorter on the first machine, ascending there; then the rest, descending on the second.

    >>> find_johnson_order(np.array([3, 5, 1, 6]), np.array([6, 2, 2, 6]))
    [2, 0, 3, 1]
    """
    falls = first >= last
    return [int(m) for m in np.lexsort((np.where(falls, -last, first), falls))]


def find_forward_order(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> tuple[list[int], PipelineSchedule]:
    """Return the order of the costs' columns (micro-batches) whose forwards end first, with its schedule. Tried:
    `list_start_orders`, and Johnson's for the two halves of the stages, with transfers as lags (Mitten 1959)."""
    forward, transfer, half = costs.forward_ns, costs.transfer_ns, costs.num_stages // 2
    orders = list_start_orders(range(costs.num_micro_batches), forward.sum(axis=0).tolist())
    first = forward[:half].sum(axis=0) + transfer[:half].sum(axis=0)
    last = forward[half:].sum(axis=0) + transfer[half - 1 :].sum(axis=0)
    passes = []
    for order in (*orders, find_johnson_order(first, last)):
        ordered = costs.take(order)
        schedule = forward_schedule(ordered, stage_ranks)
        passes.append((compute_makespan_ns(schedule, ordered), order, schedule))
    return min(passes, key=lambda one: one[0])[1:]


def order_forwards(
    replicas: Sequence[Sequence[MicroBatch]], model: CostModel, stage_ranks: Sequence[int]
) -> tuple[list[list[MicroBatch]], tuple[PipelineSchedule, ...], tuple[MicroBatchCosts, ...]]:
    """Return each replica's micro-batches in a good order for forward-only steps, with their schedules and costs."""
    ordered, schedules, priced = [], [], []
    for replica, costs in zip(replicas, price_replicas(model, replicas), strict=True):
        order, schedule = find_forward_order(costs, stage_ranks)
        ordered.append([replica[m] for m in order])
        schedules.append(schedule)
        priced.append(costs.take(order))
    return ordered, tuple(schedules), tuple(priced)
