"""The order of forwards alone: a permutation flow shop.

Every stage runs the micro-batches in the order in which they enter, so a schedule is one permutation. Two stages: the
rule of Johnson (1954) with time lags for transfers (Mitten 1959) is exact. Few micro-batches: all orders are tried.
Else the search starts from the best of the S - 1 orders of Campbell, Dudek and Smith (1970), whose two machines are the
first and the last k stages. It takes one micro-batch at a time out and puts it in where the step then ends first
(Nawaz, Enscore and Ham 1983, in the form of Taillard 1990). It stops where nothing helps, where a lower bound over all
permutations is met, or where the effort is spent. Ranks with several stages are treated as one rank a stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.step_plan import replica_costs

_FEW = 6  # micro-batches whose orders are all tried
_NEVER = 1 << 62

Table = list[list[int]]  # [micro-batch][stage]


class _FlowShop:
    """Forwards and transfers of one replica; [micro-batch][stage], of transfers the one that leaves the stage."""

    def __init__(self, costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> None:
        apart = [a != b for a, b in itertools.pairwise(stage_ranks)]
        self.num_stages = costs.num_stages
        self.forward: Table = costs.forward_ns.T.tolist()
        self.hop: Table = [
            [*(ns * far for ns, far in zip(row, apart, strict=True)), 0] for row in costs.transfer_ns.T.tolist()
        ]

    def ends(self, order: Sequence[int]) -> Table:
        """When each forward ends, [place in the order][stage]."""
        free, ends = [0] * self.num_stages, []
        for m in order:
            free = self.after(free, m)
            ends.append(free)
        return ends

    def after(self, free: Sequence[int], m: int) -> list[int]:
        """When a micro-batch's forwards end on stages that are free from these times on."""
        now, ends = 0, []
        for ready, duration, hop in zip(free, self.forward[m], self.hop[m], strict=True):
            now = (ready if ready > now else now) + duration
            ends.append(now)
            now += hop
        return ends

    def makespan_ns(self, order: Sequence[int]) -> int:
        return self.ends(order)[-1][-1]

    def insertions_ns(self, rest: Sequence[int], m: int) -> list[int]:
        """The makespan of `rest` with m at each place."""
        before = [[0] * self.num_stages, *self.ends(rest)]
        left = [0] * self.num_stages  # from the start on each stage to the end of all
        lefts = [left]
        for other in reversed(rest):
            now, row = 0, []
            for later, duration, hop in zip(
                reversed(left), reversed(self.forward[other]), reversed(self.hop[other]), strict=True
            ):
                now += hop
                now = (later if later > now else now) + duration
                row.append(now)
            left = row[::-1]
            lefts.append(left)
        return [
            max(map(sum, zip(self.after(free, m), left, strict=True)))
            for free, left in zip(before, reversed(lefts), strict=True)
        ]

    def bound_ns(self) -> int:
        """No permutation ends earlier: around a micro-batch on its way from stage u to v, every other one runs on u
        before it or on v after it."""
        rows = list(zip(self.forward, self.hop, strict=True))
        start = [list(itertools.accumulate(map(sum, zip(f, h, strict=True)), initial=0)) for f, h in rows]
        stages = range(self.num_stages)
        heads = [min(at[s] for at in start) for s in stages]
        tails = [min(at[-1] - at[s] - f[s] for at, f in zip(start, self.forward, strict=True)) for s in stages]
        best = 0
        for u, v in itertools.combinations_with_replacement(stages, 2):
            beside = [min(f[u], f[v]) for f in self.forward]
            way = max(at[v] + f[v] - at[u] - b for at, f, b in zip(start, self.forward, beside, strict=True))
            best = max(best, heads[u] + way + sum(beside) + tails[v])
        return best

    def two_machine_orders(self) -> list[list[int]]:
        """Johnson's order of the first and the last k stages, for every k."""
        orders = []
        for k in range(1, self.num_stages):
            first = [sum(f[:k]) + sum(h[:k]) for f, h in zip(self.forward, self.hop, strict=True)]
            last = [sum(f[-k:]) + sum(h[-k - 1 :]) for f, h in zip(self.forward, self.hop, strict=True)]
            orders.append(johnson_order(first, last))
        return orders


def johnson_order(first: Sequence[int], last: Sequence[int]) -> list[int]:
    """The best order on two machines: what is shorter on the first ascends there, then the rest descends on the last.

    >>> johnson_order([3, 5, 1, 6], [6, 2, 2, 6])
    [2, 0, 3, 1]
    """
    rising = sorted((a, m) for m, (a, b) in enumerate(zip(first, last, strict=True)) if a < b)
    falling = sorted((-b, m) for m, (a, b) in enumerate(zip(first, last, strict=True)) if a >= b)
    return [m for _, m in rising + falling]


def injection_order(costs: MicroBatchCosts, stage_ranks: Sequence[int], *, effort: int) -> list[int]:
    """The best order after at most `effort` insertions; a function of its arguments, of equals the first."""
    count = costs.num_micro_batches
    shop = _FlowShop(costs, stage_ranks)
    orders = [list(range(count)), *shop.two_machine_orders()]
    if count <= 1 or costs.num_stages <= 2:
        return orders[-1]
    if count <= _FEW:
        every = (list(order) for order in itertools.permutations(range(count)))
        return min(every, key=shop.makespan_ns)
    best = min(orders, key=shop.makespan_ns)
    best_ns, bound_ns = shop.makespan_ns(best), shop.bound_ns()
    since = 0  # micro-batches in a row that stand where they should
    for m in itertools.islice(itertools.cycle(range(count)), effort):
        if best_ns <= bound_ns or since == count:
            break
        rest = [other for other in best if other != m]
        makespans_ns = shop.insertions_ns(rest, m)
        since += 1
        if min(makespans_ns) < best_ns:
            best_ns, since = min(makespans_ns), 0
            place = makespans_ns.index(best_ns)
            best = [*rest[:place], m, *rest[place:]]
    return best


def forward_schedule(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> PipelineSchedule:
    """Forwards alone, in the order of the costs' columns on every stage; a free rank takes the oldest micro-batch that
    is there, or waits for the next. On ranks with several stages that keeps few messages waiting.
    """
    stages, count = len(stage_ranks), costs.num_micro_batches
    forward: Table = costs.forward_ns.tolist()
    transfer: Table = costs.transfer_ns.tolist()
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


def forwards_in_order(
    replicas: Sequence[Sequence[MicroBatch]], model: CostModel, stage_ranks: Sequence[int], *, effort: int
) -> tuple[list[list[MicroBatch]], tuple[PipelineSchedule, ...], tuple[MicroBatchCosts, ...]]:
    """A split for forwards alone, each replica in a good order, with that order's schedules and costs."""
    ordered, schedules, priced = [], [], []
    for replica, costs in zip(replicas, replica_costs(model, replicas), strict=True):
        order = injection_order(costs, stage_ranks, effort=effort)
        ordered.append([replica[m] for m in order])
        priced.append(costs.take(order))
        schedules.append(forward_schedule(priced[-1], stage_ranks))
    return ordered, tuple(schedules), tuple(priced)
