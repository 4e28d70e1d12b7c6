"""Ranks that share cores: what a step takes at least, and how its timeline runs there.

An idle rank lends its core, so no order of the same work is faster than the work over the cores: a bubble costs
nothing, and every overhead of a micro-batch costs all of itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.judge.simulate import SpanNs, TimedAction, deadlock, num_slots, timed_actions


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Fewer cores than ranks; each pipeline rank of each replica is `tp` processes, which all run its actions.

    Errors: ConfigError for less than one of either.
    """

    num_cores: int
    tp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_cores", self.num_cores), ("tp", self.tp)):
            if value < 1:
                raise ConfigError(f"{name} is {value} but must be at least 1, or None for a core per rank")

    def floor_ns(self, work_ns: int) -> int:
        """No order of actions that take so long in sum, over all replicas, ends earlier."""
        return work_ns * self.tp // self.num_cores


def simulate_shared_ns(
    replicas: Sequence[tuple[PipelineSchedule, MicroBatchCosts]], cores: SharedCores
) -> tuple[list[list[SpanNs]], ...]:
    """The replicas' spans as `simulate_ns` gives them, all running at once on shared cores.

    While more processes are busy than there are cores, each goes on at the rate cores / busy (ends are rounded up to
    whole nanoseconds). Errors: PlanError as `simulate_ns`.
    """
    ranks = [(d, steps) for d, replica in enumerate(replicas) for steps in timed_actions(*replica)]
    ran = _run_shared(ranks, [num_slots(costs.num_stages, costs.num_micro_batches) for _, costs in replicas], cores)
    found = []
    for d, (schedule, _) in enumerate(replicas):
        spans = [own for own, (replica, _) in zip(ran, ranks, strict=True) if replica == d]
        stuck = [(r, len(own)) for r, own in enumerate(spans) if len(own) < len(schedule.ranks[r])]
        if stuck:
            raise deadlock(schedule, stuck)
        found.append(spans)
    return tuple(found)


def _run_shared(
    ranks: Sequence[tuple[int, Sequence[TimedAction]]], slots: Sequence[int], cores: SharedCores
) -> list[list[SpanNs]]:
    """Spans of the ranks (replica, its actions); fewer than it has actions where one can never go on.

    `slots` has the size of each replica's table of arrivals. Work is counted in 1 / unit ns, in which every rate is
    whole.
    """
    unit = math.lcm(*range(1, len(ranks) * cores.tp + 1))
    arrivals = [[0] + [-1] * (count - 1) for count in slots]  # the first slot: what needs nothing
    spans: list[list[SpanNs]] = [[] for _ in ranks]
    work_left: dict[int, int] = {}
    started: dict[int, int] = {}
    ahead: list[int] = []  # heap of times at which some idle rank may be able to start
    now = 0
    while True:
        for rank, (replica, steps) in enumerate(ranks):
            if rank not in work_left and len(spans[rank]) < len(steps):
                need, duration, _, _ = steps[len(spans[rank])]
                if 0 <= arrivals[replica][need] <= now:
                    work_left[rank], started[rank] = duration * unit, now
        while ahead and ahead[0] <= now:
            heapq.heappop(ahead)
        busy = len(work_left) * cores.tp
        rate = unit * cores.num_cores // busy if busy > cores.num_cores else unit
        waits = [-(-work // rate) for work in work_left.values()]
        if ahead:
            waits.append(ahead[0] - now)
        if not waits:
            break
        elapsed = min(waits)
        now += elapsed
        for rank in sorted(work_left):
            work_left[rank] -= elapsed * rate
            if work_left[rank] <= 0:
                replica, steps = ranks[rank]
                _, _, out, delay = steps[len(spans[rank])]
                arrivals[replica][out] = now + delay
                heapq.heappush(ahead, now + delay)
                spans[rank].append((started.pop(rank), now))
                del work_left[rank]
    return spans
