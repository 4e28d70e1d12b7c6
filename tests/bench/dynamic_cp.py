"""Megatron's dynamic context parallelism under 1F1B, for comparison: a long sample runs on several data parallel ranks.

Written from its description (Megatron-LM #2282, its balanced scheduler). A sample of L positions runs on the least
power of two of neighbouring ranks that leaves each at most `max_tokens`. Samples are grouped, those of most work first:
the first of a group sets the time of each rank; each further sample joins where its padded work fits beside what a
block of ranks already has, on the block of least work; what fits nowhere waits for the next group. All ranks run a
group before the next. A group is a micro-batch of the pipeline.

A model, not a proven step: its ranks exchange attention within a micro-batch as no plan of ours does.

Flattered: communication is free (unless taxed as ours is) and attention split perfectly. A rank's several samples take
one overhead. Ranks that a group leaves idle speed up its first sample where that helps. Rank and group sizes, three
orders of the groups and all kinds of recomputation are tried, and the best that fits in memory is taken. Experts, which
it refuses, are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, MicroBatch, Recompute, SampleLength
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.evaluation.simulate import compute_peak_bytes, find_last_end_ns, simulate_ns
from dynapipe_ext.schedules.published.full_backward import one_f_one_b

_SLACK = 1.0  # of the first sample's work, that a block of ranks may have
PAD = 8


@dataclass(frozen=True, slots=True)
class GroupedStep:
    makespan_s: float
    peak_bytes: int
    max_tokens: int
    num_groups: int


def best_grouped(
    samples: Sequence[SampleLength],
    costs: AnalyticCosts,
    sizes: Sequence[int],
    limit_bytes: int,
    *,
    taxed: bool = False,
) -> GroupedStep | None:
    """Return the best step over sizes of a rank's share, orders of groups and recomputation; None if nothing fits. It
    pays the costs' tax on what ranks share only if it is `taxed`."""
    best: GroupedStep | None = None
    for kind in LAYER_RECOMPUTES:
        prices = _Prices(samples, costs if taxed else replace(costs, width_tax=0.0), kind)
        for max_tokens in sizes:
            if not (groups := prices.groups(max_tokens)):
                continue
            priced = prices.micro_batches(groups)
            for order in _orders(priced):
                taken = priced.take(order)
                schedule = one_f_one_b(costs.num_stages, len(order))
                peak = max(compute_peak_bytes(schedule, taken))
                if peak > limit_bytes:
                    continue
                end_s = find_last_end_ns(simulate_ns(schedule, taken)) / 1e9
                if best is None or end_s < best.makespan_s:
                    best = GroupedStep(end_s, peak, max_tokens, len(order))
        if best is not None:
            return best  # recomputing more takes longer
    return best


def _orders(costs: MicroBatchCosts) -> Iterator[list[int]]:
    """Longest first, shortest first, and the shortest at both ends."""
    falling = np.argsort(-costs.forward_ns.sum(axis=0), kind="stable").tolist()
    yield falling
    yield falling[::-1]
    yield falling[::2][::-1] + falling[1::2]


Group = list[list[tuple[int, int]]]  # of each rank: (sample, ranks that share it)


class _Prices:
    """Every sample on 1, 2, 4 … ranks."""

    def __init__(self, samples: Sequence[SampleLength], costs: AnalyticCosts, kind: Recompute) -> None:
        self.samples, self.num_ranks = samples, costs.topology.dp
        widths = [1 << i for i in range(self.num_ranks.bit_length())]
        self.of_width = {}
        for width in widths:
            rows = [MicroBatch((s,), "packed", kind, pad_multiple=PAD * width) for s in samples]
            self.of_width[width] = replace(costs, links=None).at_width(width).evaluate(rows)
        empty = costs.evaluate_shapes([0], [0])
        self.overhead = empty.forward_ns[:, 0]
        self.work = {
            width: ((one.forward_ns + one.backward_ns).max(axis=0) - 2 * int(self.overhead.max())).tolist()
            for width, one in self.of_width.items()
        }

    def groups(self, max_tokens: int) -> list[Group]:
        """None where a sample would need more than all ranks."""
        needs = [_ranks_for(s.encoder, max_tokens) for s in self.samples]
        if max(needs) > self.num_ranks:
            return []
        left = sorted(range(len(self.samples)), key=lambda i: (-self.work[needs[i]][i], i))
        groups = []
        while left:
            group, left = self._next_group(left, needs, max_tokens)
            groups.append(group)
        return groups

    def _next_group(self, left: list[int], needs: Sequence[int], max_tokens: int) -> tuple[Group, list[int]]:
        ranks: Group = [[] for _ in range(self.num_ranks)]
        loads, tokens = [0] * self.num_ranks, [0.0] * self.num_ranks
        waiting, target = [], self.work[needs[left[0]]][left[0]]
        least, fewest = 0, 0.0  # that any rank has
        for i in left:
            width = needs[i]
            own, work = self.samples[i].encoder / width, self.work[width][i]
            if least + work > _SLACK * target or fewest + own > max_tokens:
                waiting.append(i)
                continue
            blocks = [range(first, first + width) for first in range(0, self.num_ranks, width)]
            fitting = [
                block
                for block in blocks
                if max(loads[d] for d in block) + work <= _SLACK * target
                and max(tokens[d] for d in block) + own <= max_tokens
            ]
            if not fitting:
                waiting.append(i)
                continue
            for d in min(fitting, key=lambda block: (max(loads[d] for d in block), block.start)):
                ranks[d].append((i, width))
                loads[d] += work
                tokens[d] += own
            least, fewest = min(loads), min(tokens)
        if not any(ranks[self.num_ranks // 2 :]) and sum(map(len, ranks)) == len(ranks[0]) * needs[left[0]]:
            ranks = [[(i, self.num_ranks) for i, _ in ranks[0]] for _ in ranks]  # nobody else: all ranks share it
        return ranks, waiting

    def micro_batches(self, groups: Sequence[Group]) -> MicroBatchCosts:
        """Each group as a micro-batch that takes what its slowest rank takes, and holds what its fullest holds."""
        columns = []
        for group in groups:
            of_ranks = [self._rank(rank) for rank in dict.fromkeys(map(tuple, group)) if rank]
            like = of_ranks[0]
            tables = {
                name: np.max([getattr(one, name) for one in of_ranks], axis=0)
                for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes")
            }
            sent = {name: 0 * getattr(like, name) for name in ("transfer_ns", "transfer_bytes")}
            columns.append(replace(like, **tables, **sent))
        return MicroBatchCosts.join(columns, like=columns[0])

    def _rank(self, parts: Sequence[tuple[int, int]]) -> MicroBatchCosts:
        taken = [self.of_width[width].take([i]) for i, width in parts]
        more = (len(taken) - 1) * self.overhead[:, None]
        summed = {
            name: sum(getattr(one, name) for one in taken)
            for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes")
        }
        summed["forward_ns"] = summed["forward_ns"] - more
        summed["backward_ns"] = summed["backward_ns"] - more
        return replace(taken[0], **summed)


def _ranks_for(length: int, max_tokens: int) -> int:
    """
    >>> [_ranks_for(length, 8) for length in (8, 9, 17)]
    [1, 2, 4]
    """
    return 1 << max(0, (-(-length // max_tokens) - 1)).bit_length()
