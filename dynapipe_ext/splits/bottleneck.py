"""What micro-batches take on the busiest rank, and need on the fullest one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts


def bottleneck(
    costs: MicroBatchCosts,
    min_in_flight: int = 1,
    stage_ranks: Sequence[int] | None = None,
    *,
    use_native: bool = True,
) -> tuple[IntArray, IntArray]:
    """The busiest rank's F + B of each micro-batch, and the bytes that the fullest rank needs for it.

    `stage_ranks` says which rank each stage is on (default: a rank each). Bytes: states, and the working memory beside
    as many stored micro-batches of this shape as 1F1B holds on the rank (num_ranks - rank), but no more than
    `min_in_flight`; on every rank as many as that if it is above num_ranks.
    """
    num_ranks = costs.num_stages if stage_ranks is None else len(set(stage_ranks))
    held: IntArray = np.minimum(np.arange(num_ranks, 0, -1, dtype=np.int64), min_in_flight)
    if min_in_flight > num_ranks:
        held = np.full_like(held, min_in_flight)
    if native is not None and use_native:
        ranks = range(num_ranks) if stage_ranks is None or num_ranks == costs.num_stages else stage_ranks
        needs = np.empty((2, costs.num_micro_batches), np.int64)
        tables = (costs.forward_ns, costs.backward_ns, costs.stored_bytes, costs.working_bytes)
        fixed, whole = costs.static_bytes.tolist(), map(np.ascontiguousarray, tables)
        native.rank_needs(*whole, fixed, list(ranks), held.tolist(), needs)
        return needs[0], needs[1]
    times, stored, working, static = _on_ranks(costs, stage_ranks)
    slowest = _largest(times)
    bad = _largest(costs.stored_bytes) >= INFEASIBLE
    needed = _largest(static[:, None] + held[:, None] * stored + working)
    return np.where(bad, INFEASIBLE, np.minimum(slowest, INFEASIBLE)), np.where(bad, INFEASIBLE, needed)


def _on_ranks(
    costs: MicroBatchCosts, stage_ranks: Sequence[int] | None
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """F + B, stored and working bytes of each rank and micro-batch, and the ranks' static bytes."""
    times = costs.forward_ns + costs.backward_ns
    if stage_ranks is None or len(set(stage_ranks)) == costs.num_stages:
        return times, costs.stored_bytes, costs.working_bytes, costs.static_bytes
    ranks = np.array(stage_ranks)
    most = INFEASIBLE // costs.num_stages  # sums of stages that cannot run stay within 64 bits

    def summed(table: IntArray) -> IntArray:
        return np.stack([np.minimum(table[ranks == rank], most).sum(axis=0) for rank in range(max(stage_ranks) + 1)])

    working = np.stack([_largest(costs.working_bytes[ranks == rank]) for rank in range(max(stage_ranks) + 1)])
    never = _largest(times) >= INFEASIBLE
    return np.where(never, INFEASIBLE, summed(times)), summed(costs.stored_bytes), working, summed(costs.static_bytes)


def _largest(table: IntArray) -> IntArray:
    """The largest of each column; row by row, which is faster than `max(axis=0)` of a few long rows."""
    largest: IntArray = reduce(np.maximum, table)
    return largest
