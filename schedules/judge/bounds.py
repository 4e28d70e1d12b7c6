"""Lower bounds of the makespan over all orders on a given placement: the certificate of a schedule.

One machine at a time (the heads-and-tails bound of Carlier 1982, in Jackson's preemptive form): on a rank, each action
is a job that cannot start before its micro-batch's earlier work is done (head) and must be followed by its later work
(tail). With preemption the best order is known, largest tail first, so its value bounds every order. It includes the
rank's whole work plus the least head and tail, and each micro-batch's longest chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import PipelineSchedule

Job = tuple[int, int, int]  # head_ns, duration_ns, tail_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    """Lower bounds in ns of one replica's makespan, over all orders of its micro-batches; 0 for an idle replica.

    stage: the busiest rank's whole work, after the least that comes before and before the least that comes after it.
    chain: the longest dependency chain of one micro-batch. heads_tails: the preemptive one-machine bound, at least
    both. byte_time: byte-seconds that cannot be avoided over the bytes that the limit leaves free; None where no limit
    was given, and for forwards alone, which hold nothing from one to the next.
    """

    stage_ns: int
    chain_ns: int
    heads_tails_ns: int
    byte_time_ns: int | None = None

    @property
    def best_ns(self) -> int:
        """
        >>> ReplicaBounds(stage_ns=3, chain_ns=2, heads_tails_ns=4, byte_time_ns=5).best_ns
        5
        """
        return max(self.stage_ns, self.chain_ns, self.heads_tails_ns, self.byte_time_ns or 0)


def lower_bound_ns(
    placement: PipelineSchedule | Sequence[int],
    costs: MicroBatchCosts,
    *,
    split: bool,
    memory_limit_bytes: int | None = None,
) -> int:
    """No order on this placement (a schedule, or stage -> rank) ends earlier; `split` allows I and W in place of B.

    The bound for `split` holds for schedules that split nothing, or only some backwards, as well. With
    `memory_limit_bytes` it holds for orders whose `peak_bytes` stay within the limit on every rank.

    Errors: PlanError if the placement does not match the costs, or nothing at all fits within the limit.
    """
    bounds = replica_bounds(placement, costs, split=split, memory_limit_bytes=memory_limit_bytes)
    return max(bounds.heads_tails_ns, bounds.byte_time_ns or 0)


def replica_bounds(
    placement: PipelineSchedule | Sequence[int],
    costs: MicroBatchCosts,
    *,
    split: bool,
    memory_limit_bytes: int | None = None,
) -> ReplicaBounds:
    """All bounds of `lower_bound_ns` one by one, under the same assumptions and errors."""
    stage_ranks = tuple(placement.stage_ranks if isinstance(placement, PipelineSchedule) else placement)
    forward_only = isinstance(placement, PipelineSchedule) and placement.forward_only
    if forward_only:
        memory_limit_bytes = None
    if len(stage_ranks) != costs.num_stages:
        raise PlanError(f"the placement has {len(stage_ranks)} stages but the costs have {costs.num_stages}")
    if costs.num_micro_batches == 0:
        return ReplicaBounds(
            stage_ns=0, chain_ns=0, heads_tails_ns=0, byte_time_ns=None if memory_limit_bytes is None else 0
        )
    chains = _Chains(costs, stage_ranks, split=split, forward_only=forward_only)
    ranks = sorted(set(stage_ranks))
    stage_ns = chain_ns = heads_tails_ns = 0
    for rank in ranks:
        jobs = chains.jobs(rank)
        heads, durations, tails = zip(*jobs, strict=True)
        stage_ns = max(stage_ns, min(heads) + sum(durations) + min(tails))
        chain_ns = max(chain_ns, max(map(sum, jobs)))
        heads_tails_ns = max(heads_tails_ns, _preemptive_ns(jobs))
    byte_time_ns = None
    if memory_limit_bytes is not None:
        byte_time_ns = max(chains.byte_time_ns(rank, memory_limit_bytes) for rank in ranks)
    return ReplicaBounds(stage_ns=stage_ns, chain_ns=chain_ns, heads_tails_ns=heads_tails_ns, byte_time_ns=byte_time_ns)


class _Chains:
    """Each micro-batch's dependency chain: F down the stages, B (or I) back up, each W after its I. Tables (S, M).

    Under `forward_only` the chain ends with the last F: nothing travels back.
    """

    def __init__(self, costs: MicroBatchCosts, stage_ranks: Sequence[int], *, split: bool, forward_only: bool) -> None:
        self.costs, self.stage_ranks, self.split, self.forward_only = costs, stage_ranks, split, forward_only
        self.forward: list[list[int]] = costs.forward_ns.tolist()
        self.weight: list[list[int]] = costs.weight_ns.tolist()
        self.gradient: list[list[int]] = (costs.input_ns if split else costs.backward_ns).tolist()
        self.stored: list[list[int]] = costs.stored_bytes.tolist()
        self.working: list[list[int]] = costs.working_bytes.tolist()
        micro_batches = range(costs.num_micro_batches)
        moves = [
            [0] * len(micro_batches) if stage_ranks[s] == stage_ranks[s + 1] else row
            for s, row in enumerate(costs.transfer_ns.tolist())
        ]
        back = [[0] * len(micro_batches) for _ in moves] if forward_only else moves
        self.head = [[0] * len(micro_batches)]  # before F
        last_w = self.weight if split else [[0] * len(micro_batches) for _ in stage_ranks]
        self.tail = [last_w[0]]  # after B or I: the gradient goes on up while W, if split, runs where it is
        for s in range(costs.num_stages - 1):
            self.head.append([self.head[s][m] + self.forward[s][m] + moves[s][m] for m in micro_batches])
            self.tail.append(
                [max(last_w[s + 1][m], back[s][m] + self.gradient[s][m] + self.tail[s][m]) for m in micro_batches]
            )
        self.between = [[0] * len(micro_batches) for _ in stage_ranks]  # from the end of F to the start of B or I
        for s in reversed(range(costs.num_stages - 1)):
            self.between[s] = [
                moves[s][m] + self.forward[s + 1][m] + self.between[s + 1][m] + self.gradient[s + 1][m] + back[s][m]
                for m in micro_batches
            ]

    def jobs(self, rank: int) -> list[Job]:
        jobs = []
        for s in self._stages(rank):
            for m, forward_ns in enumerate(self.forward[s]):
                head, tail, gradient_ns = self.head[s][m], self.tail[s][m], self.gradient[s][m]
                ready = head + forward_ns + self.between[s][m]
                jobs.append((head, forward_ns, self.between[s][m] + gradient_ns + tail))
                if self.forward_only:
                    continue
                jobs.append((ready, gradient_ns, tail))
                if self.split:
                    jobs.append((ready + gradient_ns, self.weight[s][m], 0))
        return jobs

    def byte_time_ns(self, rank: int, limit_bytes: int) -> int:
        """The rank's bytes x nanoseconds that cannot be avoided, spread over all that the limit leaves free."""
        stages = self._stages(rank)
        free = limit_bytes - sum(int(self.costs.static_bytes[s]) for s in stages)
        byte_ns = 0
        for s in stages:
            for m, forward_ns in enumerate(self.forward[s]):
                busy_ns = forward_ns + self.gradient[s][m]
                held_ns = busy_ns + self.between[s][m] + (self.weight[s][m] if self.split else 0)
                byte_ns += self.stored[s][m] * held_ns
                byte_ns += self.working[s][m] * (forward_ns if self.costs.working_in == "F" else busy_ns)
        if free < 0 or (byte_ns and not free):
            raise PlanError(
                f"rank {rank} holds {limit_bytes - free} B of weights and states, which leaves nothing of the"
                f" {limit_bytes} B limit: raise the limit, tp or pp"
            )
        spread_ns = -(-byte_ns // free) if byte_ns else 0
        first = stages[0]
        return min(self.head[first]) + spread_ns + (0 if self.split else min(self.tail[first]))

    def _stages(self, rank: int) -> list[int]:
        return [s for s, r in enumerate(self.stage_ranks) if r == rank]


def _preemptive_ns(jobs: Sequence[Job]) -> int:
    """Least possible max(end + tail) over preemptive orders of the jobs on one machine: always run the largest tail.

    >>> _preemptive_ns([(0, 2, 5), (1, 3, 9), (0, 1, 0)])
    13
    """
    pending = sorted(jobs)
    ready: list[tuple[int, int]] = []  # (-tail, time left)
    now, index, best = 0, 0, 0
    while ready or index < len(pending):
        if not ready:
            now = max(now, pending[index][0])
        while index < len(pending) and pending[index][0] <= now:
            heapq.heappush(ready, (-pending[index][2], pending[index][1]))
            index += 1
        minus_tail, left = heapq.heappop(ready)
        until = pending[index][0] if index < len(pending) else now + left
        if until < now + left:
            heapq.heappush(ready, (minus_tail, left - (until - now)))
            now = until
        else:
            now += left
            best = max(best, now - minus_tail)
    return best
