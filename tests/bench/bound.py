"""A lower bound of a step's makespan over every plan of a global batch: split, layout, recomputation, order, replicas.

Weak duality. On stage s a micro-batch of r rows of length l costs T(r, l) = F + B; it holds at least the tokens P and
the squared lengths S of its samples (a packed row is priced as such a shape, see CostTable). For any a, b >= 0 with
a l + b l^2 <= T(r, l) / r at every shape, a micro-batch costs at least a P + b S, and so all of them cost at least
a sum(l) + b sum(l^2) over the samples, whatever the split. The largest such value is a linear programme
of two unknowns.

    bound = max over stages of (that value / dp + least forward before the stage + least backward after it)

The constraint is needed at grid points only: with u = 1 / r, T / r is linear in u for fixed l, and at fixed r linear in
l while a l + b l^2 is convex, so the difference is smallest at a corner of its cell. Below the grid costs are those of
the smallest point; above it nothing is feasible. Samples are whole (no cut ones) and backwards are not split; memory
and transfers are ignored. The chain of the longest sample is a bound as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, IntArray
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.splits.balance import best_partition

FloatArray = npt.NDArray[np.float64]
_ROUNDING_NS = 2  # cost models round F and B to whole ns, each up or down by at most half


@dataclass(frozen=True, slots=True)
class _Floor:
    """Least costs in ns: work (S,) of all samples together, head and tail (S,), chain of the longest sample."""

    work_ns: FloatArray
    head_ns: FloatArray
    tail_ns: FloatArray
    chain_ns: float


def batch_bound_s(costs: CostModel, lengths: Sequence[int], *, dp: int) -> float:
    """Seconds that no plan of these decoder-only samples on `dp` replicas can beat under `costs`.

    Raises PlanError for an empty batch, ConfigError for a cost model whose rule this bound does not know.
    """
    if not lengths or min(lengths) < 1 or dp < 1:
        raise PlanError(f"{len(lengths)} samples on {dp} replicas: the bound needs at least one sample of length >= 1")
    if isinstance(costs, CostTable):
        floor = _table_floor(costs, lengths)
    elif isinstance(costs, TokenCosts):
        floor = _token_floor(costs, lengths)
    else:
        raise ConfigError(f"no bound is known for {type(costs).__name__}: use a CostTable or TokenCosts")
    whole_ns = (floor.work_ns / dp + floor.head_ns + floor.tail_ns).max()
    slack_ns = _ROUNDING_NS * len(lengths) * costs.num_stages
    return max(0.0, float(max(whole_ns, floor.chain_ns)) - slack_ns) / 1e9


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
    shaped, _ = costs.over(replace(costs.topology, placement=(), layers_per_stage=uneven))
    order = np.sort(np.array(lengths, np.int64))
    rows = np.arange(1, len(order) + 1)
    works = []
    for stage in (1, costs.topology.pp - 1):
        table = np.full((len(order), len(order)), INFEASIBLE, np.int64)
        for length in np.unique(order):
            ends = np.flatnonzero(order == length)
            table[ends] = _least_work(shaped, stage, rows, int(length), limit_bytes)
        width = int(np.flatnonzero((table < INFEASIBLE).any(axis=0))[-1]) + 1
        works.append(best_partition(np.ascontiguousarray(table[:, :width]), 0).sum_ns)
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


def _table_floor(costs: CostTable, lengths: Sequence[int]) -> _Floor:
    if costs.facts.has_decoder:
        raise ConfigError("the bound is for decoder-only models, but this cost table has decoder layers")
    axes: list[set[float]] = [set(), set()]
    for grid in costs.grids.values():
        for known, axis in zip(axes, grid.axes, strict=True):
            known.update(axis.tolist())
    rows, row_len = (np.array(x) for x in zip(*itertools.product(*map(sorted, axes)), strict=True))
    found = []
    for recompute in costs.recomputes:
        priced = costs.evaluate_shapes(rows, row_len, 0, recompute)
        forward, backward = priced.forward_ns.astype(np.float64), priced.backward_ns.astype(np.float64)
        forward[priced.forward_ns == INFEASIBLE] = backward[priced.forward_ns == INFEASIBLE] = np.inf
        found.append((forward, backward))
    forward, backward = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))  # (S, shapes)
    feasible = np.isfinite(forward).all(axis=0)
    forward, backward = forward[:, feasible], backward[:, feasible]
    rows, row_len = np.tile(rows, len(found))[feasible], np.tile(row_len, len(found))[feasible]
    tokens, squares, longest = sum(lengths), sum(n * n for n in lengths), max(lengths)
    per_row = (forward + backward) / rows
    return _Floor(
        work_ns=np.array([_least(stage, row_len, tokens, squares) for stage in per_row]),
        head_ns=_before(forward),
        tail_ns=_before(backward),
        chain_ns=_least(per_row.sum(axis=0), row_len, longest, longest**2),
    )


def _token_floor(costs: TokenCosts, lengths: Sequence[int]) -> _Floor:
    """TokenCosts are a l + b l^2 already, but for the overhead, which many rows share."""
    scale = np.array(costs.stage_scale or (1.0,) * costs.num_stages)
    both = 1 + costs.backward_ratio

    def forward_ns(tokens: int, squares: int) -> FloatArray:
        return np.asarray(scale * (costs.ns_per_token * tokens + costs.ns_per_token_squared * squares))

    shortest, longest = min(lengths), max(lengths)
    first = (costs.overhead_ns + forward_ns(shortest, shortest**2))[:, None]
    return _Floor(
        work_ns=both * forward_ns(sum(lengths), sum(n * n for n in lengths)),
        head_ns=_before(first),
        tail_ns=_before(costs.backward_ratio * first),
        chain_ns=float((both * (costs.overhead_ns + forward_ns(longest, longest**2))).sum()),
    )


def _before(cost: FloatArray) -> FloatArray:
    """Least sum over the earlier stages, of any shape: (S, shapes) -> (S,)."""
    earlier = np.cumsum(cost, axis=0) - cost
    return np.asarray(earlier.min(axis=1))


def _least(per_row: FloatArray, row_len: FloatArray, tokens: int, squares: int) -> float:
    """max a tokens + b squares over a, b >= 0 with a l + b l^2 <= cost for every (cost, l).

    >>> _least(np.array([10.0, 40.0]), np.array([10.0, 20.0]), 100, 1000)
    100.0
    """
    lengths = np.unique(row_len)
    cost = np.array([per_row[row_len == n].min() for n in lengths])
    candidates = [(1.0, 0.0), (0.0, 1.0)]
    for (n, x), (m, y) in itertools.combinations(zip(lengths, cost, strict=True), 2):
        b = (y / m - x / n) / (m - n)
        candidates.append((x / n - b * n, b))
    values = [0.0]
    for a, b in candidates:
        if a >= 0 and b >= 0:
            needed = a * lengths + b * lengths**2
            values.append((a * tokens + b * squares) * float((cost / needed).min()))  # scaled until all hold
    return max(values)
