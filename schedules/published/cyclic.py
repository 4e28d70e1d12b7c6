"""DynaPipe's memory-aware adaptive schedule, wait-free cyclic, for uneven micro-batches under a limit in bytes.

Jiang et al. 2024, "DynaPipe" (arXiv 2311.10418), sec. 5. One stage per rank, full backwards.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, make_linear_schedule
from dynapipe_ext.schedules.evaluation.simulate import StageMemory, compute_makespan_ns

_CLUSTERS = 3


def cyclic(costs: MicroBatchCosts, *, memory_limit_bytes: int, order: Sequence[int] | None = None) -> PipelineSchedule:
    """Run one backward and one forward per stage and cycle, of those that were ready when the cycle began.

    Micro-batches enter in `order`, a permutation (default 0..M-1); a forward that does not fit the limit waits for a
    later cycle. Times play no part. There is no deadlock: no stage holds anything older than the oldest micro-batch in
    the pipeline, and a stage that this one has not reached holds nothing at all, so it fits there.

    Raises PlanError for a micro-batch that does not fit by itself.
    """
    stages, last = costs.num_stages, costs.num_stages - 1
    memory = [StageMemory(costs, stage, memory_limit_bytes) for stage in range(stages)]
    entering = range(costs.num_micro_batches) if order is None else order
    forwards = [deque(entering), *(deque[int]() for _ in range(last))]
    backwards = [deque[int]() for _ in range(stages)]
    actions: list[list[Action]] = [[] for _ in range(stages)]
    left = len(entering)
    while left:
        sent: list[tuple[deque[int], int]] = []
        for s in range(stages):
            if backwards[s]:
                m = backwards[s].popleft()
                memory[s].release(m)
                actions[s].append(Action(s, Kind.BACKWARD, m))
                if s:
                    sent.append((backwards[s - 1], m))
                else:
                    left -= 1
            if forwards[s] and memory[s].admit(forwards[s][0]):
                m = forwards[s].popleft()
                actions[s].append(Action(s, Kind.FORWARD, m))
                sent.append((backwards[s] if s == last else forwards[s + 1], m))
        for queue, m in sent:
            queue.append(m)
    return make_linear_schedule("cyclic", actions)


def clustered_cyclic(costs: MicroBatchCosts, *, memory_limit_bytes: int) -> PipelineSchedule:
    """Return the fastest `cyclic` schedule of the six orders of short, medium and long micro-batches.

    Raises PlanError for a micro-batch that does not fit by itself.
    """
    time_ns = (costs.forward_ns + costs.backward_ns).max(axis=0)
    clusters = [part.tolist() for part in np.array_split(np.argsort(time_ns, kind="stable"), _CLUSTERS)]
    orders = dict.fromkeys(tuple(itertools.chain(*chosen)) for chosen in itertools.permutations(clusters))
    schedules = [cyclic(costs, memory_limit_bytes=memory_limit_bytes, order=order) for order in orders]
    return min(schedules, key=lambda schedule: compute_makespan_ns(schedule, costs))
