"""Lower bounds of a step's makespan: over all plans of a global batch, and over padded ones of whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, IntArray
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.partitioning.padded import find_best_partition
from dynapipe_ext.schedules.evaluation.bounds import find_batch_floor


def free_bound_s(
    costs: CostModel, samples: Sequence[SampleLength], topology: Topology, *, pieces: bool = False
) -> float:
    """Return seconds that no step of these samples on this many ranks can beat, whatever its layout, order, placement,
    recomputation and splitting of backwards, and with `pieces` however it cuts samples: the least work of the whole
    model, divided by the ranks."""
    stages, split = (0,) * costs.num_stages, topology.pp * topology.dp
    floor = find_batch_floor(costs, samples, stages, split=True, packed=True, pieces=pieces)
    assert floor is not None  # of counted and measured costs
    return float(floor.work_ns[0]) / split / 1e9


def whole_layers_bound_s(
    costs: CostTable, lengths: Sequence[int], *, num_layers: int, dp: int, limit_bytes: float
) -> float:
    """Seconds that no plan beats whose micro-batches are padded, of whole samples, and whose layers are whole, whatever
    its placement of stages on ranks, its recomputation and its order.

    The rank with the head holds as many layers as an even share or more, or another rank holds one more than that: so
    the busiest takes at least the work of the lighter of the two, under the cheapest micro-batches that either could
    hold one of. A partition of least work is made of runs of the samples by length, so that dynamic programming finds
    it. Nothing waits, and memory is for one micro-batch alone. The layers must divide over the ranks.
    """
    share, rest = divmod(num_layers, costs.topology.pp)
    if rest or share < 2 or costs.topology.pp < 3:
        raise ConfigError(
            f"{num_layers} layers on {costs.topology.pp} ranks: the bound is for even shares on 3 or more"
        )
    uneven = (share - 1, share + 1, *[share] * (costs.topology.pp - 2))  # one more without the head; a share with it
    shaped, _ = costs.with_topology(replace(costs.topology, placement=(), layers_per_stage=uneven))
    order = np.sort(np.array(lengths, np.int64))
    rows = np.arange(1, len(order) + 1)
    works = []
    for stage in (1, costs.topology.pp - 1):
        table = np.full((len(order), len(order)), INFEASIBLE, np.int64)
        for length in np.unique(order):
            ends = np.flatnonzero(order == length)
            table[ends] = _least_work(shaped, stage, rows, int(length), limit_bytes)
        width = int(np.flatnonzero((table < INFEASIBLE).any(axis=0))[-1]) + 1
        ends = np.array(find_best_partition(table[:, :width], 0, 1))
        works.append(int(table[ends - 1, np.diff(ends, prepend=0) - 1].sum()))
    return min(works) / dp / 1e9


def _least_work(costs: CostModel, stage: int, rows: IntArray, length: int, limit_bytes: float) -> IntArray:
    """F + B of so many rows of a length on a stage, by the fastest kind of recomputation that fits alone."""
    kinds = []
    for recompute in LAYER_RECOMPUTES:
        priced = costs.evaluate_shapes(rows, np.full_like(rows, length), np.zeros_like(rows), recompute)
        needed = priced.static_bytes[stage] + priced.stored_bytes[stage] + priced.working_bytes[stage]
        work = priced.forward_ns[stage] + priced.backward_ns[stage]
        runs = (priced.forward_ns.max(axis=0) < INFEASIBLE) & (needed <= limit_bytes)
        kinds.append(np.where(runs, work, INFEASIBLE))
    return np.asarray(np.minimum.reduce(kinds))
