"""Lower bounds of the time of a replica in any order, and of all plans of a batch; the certificate of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from operator import mul

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.core import native
from dynapipe_ext.costs.floor import NEVER_NS, GrowingTimes, PointTable, TablePoints
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import check_range

IntArray = npt.NDArray[np.int64]


_BOUNDS = ("stage_ns", "chain_ns", "heads_tails_ns", "byte_time_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    """Lower bounds in ns of one replica's makespan, over all orders of its micro-batches; 0 for an idle replica.

    `stage_ns`: the busiest rank's work, plus the shortest time before its first action and after its last. `chain_ns`:
    the longest dependency chain of one micro-batch. `heads_tails_ns`: the preemptive one-machine bound, at least both.
    `byte_time_ns`: as `stage_ns`, but the work is the bytes x time that cannot be avoided / the free bytes under the
    limit. None without a limit, and for forward-only schedules, which hold nothing from one action to the next.
    """

    stage_ns: int
    chain_ns: int
    heads_tails_ns: int
    byte_time_ns: int | None = None

    @property
    def best_ns(self) -> int:
        """The largest of the four bounds.

        >>> ReplicaBounds(stage_ns=3, chain_ns=2, heads_tails_ns=4, byte_time_ns=5).best_ns
        5
        """
        return max(self.stage_ns, self.chain_ns, self.heads_tails_ns, self.byte_time_ns or 0)


def bound_replica(
    placement: PipelineSchedule | Sequence[int],
    costs: MicroBatchCosts,
    *,
    split: bool,
    memory_limit_bytes: int | None = None,
) -> ReplicaBounds:
    """Return the bounds of all orders on a placement (a schedule, or each stage's rank), with I and W for B if `split`.

    The bounds for `split` hold for schedules that split nothing, or only some backwards, as well. With
    `memory_limit_bytes` they hold for orders whose `compute_peak_bytes` stay within the limit on every rank.

    Raises PlanError if the placement does not match the costs, or nothing at all fits within the limit.
    """
    forward_only = False
    if isinstance(placement, PipelineSchedule):
        forward_only, placement = placement.forward_only, placement.stage_ranks
    limit_bytes = None if forward_only else memory_limit_bytes
    if len(placement) != costs.num_stages:
        raise PlanError(f"the placement has {len(placement)} stages but the costs have {costs.num_stages}")
    if costs.num_micro_batches == 0:
        return ReplicaBounds(stage_ns=0, chain_ns=0, heads_tails_ns=0, byte_time_ns=None if limit_bytes is None else 0)
    check_range(costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.transfer_ns)
    forward = costs.forward_ns
    weight = costs.weight_ns if split else np.zeros_like(forward)
    gradient = costs.backward_ns - weight
    head, between, tail = _measure_chains(placement, costs, gradient, weight, forward_only=forward_only)
    ready = head + forward + between
    jobs = [(head, forward, between + gradient + tail)]
    if not forward_only:
        jobs += [(ready, gradient, tail)]
        jobs += [(ready + gradient, weight, np.zeros_like(tail))] * split
    heads, durations, tails = (np.stack(tables) for tables in zip(*jobs, strict=True))  # (kind, stage, micro-batch)
    bounds: list[list[int]] = []
    ranks = np.array(placement)
    for rank in sorted(set(placement)):
        own = np.flatnonzero(ranks == rank).tolist()
        before, taken, after = (table[:, own].ravel() for table in (heads, durations, tails))
        stage_ns, chain_ns = before.min() + taken.sum() + after.min(), (before + taken + after).max()
        bounds.append([int(stage_ns), int(chain_ns), native.preemptive_ns(before, taken, after)])
        if limit_bytes is not None:
            busy_ns = (forward + gradient)[own]
            held_ns = busy_ns + (between + weight)[own]
            working_ns = forward[own] if costs.working_in == "F" else busy_ns
            spread_ns = _spread_bytes(costs, own, held_ns, working_ns, limit_bytes, rank)
            last_ns = 0 if split else tail[own[0]].min()
            bounds[-1].append(int(head[own[0]].min() + last_ns) + spread_ns)
    return ReplicaBounds(**dict(zip(_BOUNDS, map(max, zip(*bounds, strict=True)), strict=False)))


def _measure_chains(
    stage_ranks: Sequence[int], costs: MicroBatchCosts, gradient: IntArray, weight: IntArray, *, forward_only: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """Return each micro-batch's times before its F on a stage, from the end of F to the start of B (or I), and after B.

    A chain goes down the stages with F, back up with B or I, and ends with the last W; if `forward_only`, it ends with
    the last F. Tables are (stage, micro-batch). After I the gradient travels up while W runs.
    """
    forward, last = costs.forward_ns, costs.num_stages - 1
    moves = costs.transfer_ns * np.array([[one != other] for one, other in pairwise(stage_ranks)]).reshape(last, 1)
    back = 0 * moves if forward_only else moves
    head, between, tail = np.zeros_like(forward), np.zeros_like(forward), weight.copy()
    for s in range(last):
        head[s + 1] = head[s] + forward[s] + moves[s]
        tail[s + 1] = np.maximum(weight[s + 1], back[s] + gradient[s] + tail[s])
    for s in reversed(range(last)):
        between[s] = moves[s] + forward[s + 1] + between[s + 1] + gradient[s + 1] + back[s]
    return head, between, tail


def _spread_bytes(
    costs: MicroBatchCosts, own: list[int], held_ns: IntArray, working_ns: IntArray, limit_bytes: int, rank: int
) -> int:
    """Return the bytes x nanoseconds of a rank's stages that cannot be avoided, spread over all that the limit leaves
    free. Raises PlanError if that is nothing."""
    free_bytes = limit_bytes - int(costs.static_bytes[own].sum())
    pairs = ((costs.stored_bytes[own], held_ns), (costs.working_bytes[own], working_ns))
    byte_ns = sum(sum(map(mul, size.ravel().tolist(), ns.ravel().tolist())) for size, ns in pairs)  # beyond 64 bits
    if free_bytes < 0 or (byte_ns and not free_bytes):
        raise PlanError(
            f"rank {rank} holds {limit_bytes - free_bytes} B of weights and states, which leaves nothing of the"
            f" {limit_bytes} B limit: raise the limit, tp or pp"
        )
    return -(-byte_ns // free_bytes) if byte_ns else 0


FloatArray = npt.NDArray[np.float64]

_NEXT_TO_NOTHING_NS = 1e-12  # of a square, if attention took no measurable time


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFloor:
    """Least ns of all plans of a batch. By pipeline rank: `work_ns`, its F and B of all samples; `head_ns`, F of
    earlier stages before it starts; `tail_ns`, their B after it ends (0 if split, as W may come last). `chain_ns`: the
    longest of the samples' least dependency chains; with pieces, the longest sample's work on its busiest rank."""

    work_ns: FloatArray
    head_ns: FloatArray
    tail_ns: FloatArray
    chain_ns: float

    def bound_ns(self, dp: int) -> int:
        """Return the least time in ns of a step on `dp` replicas."""
        whole_ns = float((np.maximum(0, self.work_ns) / dp + self.head_ns + self.tail_ns).max())
        return max(0, int(max(whole_ns, self.chain_ns)))


def find_batch_floor(
    costs: CostModel,
    samples: Sequence[SampleLength],
    stage_ranks: Sequence[int],
    *,
    split: bool,
    packed: bool,
    pieces: bool = False,
    memory_limit_bytes: int | None = None,
) -> BatchFloor | None:
    """Return the least times of all plans of whole samples. The documents of a pair are bounded as if they could part.

    With `packed` they hold for packed and padded micro-batches, otherwise only for padded ones (and are higher on
    measured tables). `split` allows I and W in place of B. With `pieces` they hold for plans that cut long samples as
    well. None without samples, for samples that are cut already, and for costs without lower bounds (`get_floor`). Also
    None if a sample has no shape with a price (within the limit), and with `pieces` if a measured table has no prices
    of them.
    """
    if not samples or any(sample.start for sample in samples):
        return None
    floor = costs.get_floor(tuple(stage_ranks), split=split)
    if floor is None or (pieces and isinstance(floor, TablePoints) and floor.attended_ns is None):
        return None
    lengths = [(length, sample.decoder) for sample in samples for length in sample.documents]
    needs, counts = np.unique(np.array(lengths, np.int64), axis=0, return_counts=True)
    ranks = [[s for s, r in enumerate(stage_ranks) if r == rank] for rank in sorted(set(stage_ranks))]
    if isinstance(floor, GrowingTimes):
        times = _measure_growing(floor, needs, counts, ranks, split=split, pieces=pieces)
    elif packed or pieces:
        times = _measure_packed(floor, needs.astype(np.float64), counts, floor.attended_ns if pieces else None)
    else:
        times = _measure_padded(floor, needs.astype(np.float64), counts, memory_limit_bytes)
    work_ns, head_ns, tail_ns, chain_ns = times
    if max(work_ns.max(), head_ns.max(), tail_ns.max(), chain_ns) >= INFEASIBLE:
        return None
    before = np.array([own[0] for own in ranks])
    num_parts = int((counts * needs[:, 0]).sum() if pieces else counts.sum())
    longest = int(needs[:, 0].max()) if pieces else 2
    return BatchFloor(
        work_ns=work_ns - floor.error_ns * num_parts * np.array([len(own) for own in ranks]),
        head_ns=head_ns - floor.error_ns * before,
        tail_ns=tail_ns - (0 if split else floor.error_ns) * before,
        chain_ns=chain_ns - longest * floor.error_ns * len(stage_ranks),
    )


_Times = tuple[FloatArray, FloatArray, FloatArray, float]  # as in BatchFloor, before rounding


def _measure_padded(points: TablePoints, needs: FloatArray, counts: IntArray, memory_limit_bytes: int | None) -> _Times:
    def find_least(tables: Sequence[PointTable], some: FloatArray) -> list[FloatArray]:
        place = points.place(some)
        fits = None if memory_limit_bytes is None else points.fits(place, memory_limit_bytes)
        return [table.find_min(place, fits) for table in tables]

    first, last = _find_extremes(needs, least=True), _find_extremes(needs, least=False)
    work = [math.fsum(counts * values) for values in find_least(points.work, needs)]
    heads, tails = (np.array([t.min() for t in find_least(tables, first)]) for tables in (points.head, points.tail))
    return np.array(work)[list(points.work_of)], heads, tails, float(find_least([points.chain], last)[0].max())


def _find_extremes(needs: FloatArray, *, least: bool) -> FloatArray:
    """Return the smallest (largest) pairs of lengths: no other pair is at most (at least) as long on both sides.

    >>> _find_extremes(np.array([[1.0, 3.0], [2.0, 1.0], [2.0, 4.0]]), least=True).tolist()
    [[2.0, 1.0], [1.0, 3.0]]
    """
    sign = 1 if least else -1
    ordered = needs[np.lexsort((sign * needs[:, 0], sign * needs[:, 1]))]
    best = np.minimum.accumulate([np.inf, *(sign * ordered[:-1, 0])])
    return ordered[sign * ordered[:, 0] < best]


def _measure_packed(
    points: TablePoints, needs: FloatArray, counts: IntArray, attended_ns: Sequence[float] | None
) -> _Times:
    """Measure whole samples; with `attended_ns` of ranks, samples in pieces as well."""
    lengths = np.stack(np.meshgrid(*points.axes, indexing="ij"), axis=-1).reshape(-1, 2)
    totals = (counts[:, None] * _list_features(needs)).sum(axis=0)  # whole numbers: exact in any order

    def find_largest(table: PointTable, held: FloatArray, max_square_ns: float = math.inf) -> float:
        return _find_largest_price(lengths, table.values.min(axis=0).ravel(), held, points.has_decoder, max_square_ns)

    longest = [_list_features(need[None])[0] for need in _find_extremes(needs, least=False)]
    if attended_ns is None:
        work = [find_largest(table, totals) for table in points.work]
        work = [work[j] for j in points.work_of]
        chain = max(find_largest(points.chain_of_row, held) for held in longest)
    else:
        ranks = [(points.work[j], attended / 2) for j, attended in zip(points.work_of, attended_ns, strict=True)]
        work = [find_largest(table, totals, square) for table, square in ranks]
        chain = max(find_largest(table, held, square) for (table, square), held in product(ranks, longest))
    heads, tails = (np.array([table.values.min() for table in tables]) for tables in (points.head, points.tail))
    return np.array(work), heads, tails, chain


def _list_features(lengths: FloatArray) -> FloatArray:
    """Return encoder, decoder, both and both squared of (encoder, decoder) lengths (n, 2): shape (n, 4)."""
    both = lengths.sum(axis=1)
    return np.stack([lengths[:, 0], lengths[:, 1], both, both**2], axis=1)


def _find_largest_price(
    points: FloatArray, cost: FloatArray, totals: FloatArray, has_decoder: bool, max_square_ns: float
) -> float:
    """Return the largest sum of `totals` times prices of features under which no point costs more than measured, and a
    square at most `max_square_ns`."""
    run = cost < INFEASIBLE
    features, cost = _list_features(points[run]), cost[run]
    if not has_decoder:
        if (cost <= 0).any():  # a row of some length is free: so is each of its tokens and squares
            return 0.0
        use = features[:, 2:] / cost[:, None]
        if max_square_ns < math.inf:
            use = np.vstack([use, [0.0, 1 / max(max_square_ns, _NEXT_TO_NOTHING_NS)]])
        return _maximize_two_prices(use, totals[2:])
    with np.errstate(divide="ignore"):
        return float((totals * (cost[:, None] / features).min(axis=0)).max())


def _maximize_two_prices(use: FloatArray, totals: FloatArray) -> float:
    """Return max p . totals over p >= 0 with use p <= 1, which bounds both: at a corner of two constraints, or on an
    axis.

    >>> _maximize_two_prices(np.array([[0.25, 0.5], [0.5, 0.25]]), np.array([3.0, 3.0]))
    8.0
    """
    i, j = np.triu_indices(len(use), 1)
    determinant = use[i, 0] * use[j, 1] - use[j, 0] * use[i, 1]
    crossing = np.abs(determinant) > 1e-12 * use[i, 0] * use[j, 1]
    i, j, determinant = i[crossing], j[crossing], determinant[crossing]
    corners = np.stack([use[j, 1] - use[i, 1], use[i, 0] - use[j, 0]], axis=1) / determinant[:, None]
    prices = np.concatenate([corners[(corners >= 0).all(axis=1)], np.eye(2)])
    # Each is scaled onto its tightest constraint: what breaks none keeps its value. No matrix products: their last bits
    # differ between machines.
    used = prices[:, :1] * use[:, 0] + prices[:, 1:] * use[:, 1]
    return float(((prices[:, 0] * totals[0] + prices[:, 1] * totals[1]) / used.max(axis=1)).max())


def _measure_growing(
    growing: GrowingTimes, needs: IntArray, counts: IntArray, ranks: Sequence[list[int]], *, split: bool, pieces: bool
) -> _Times:
    num_samples = int(counts.sum())
    together, alone = (growing.padded(rows, needs) for rows in (num_samples, 1))
    if max(together.forward.max(), alone.forward.max()) >= INFEASIBLE:
        never = np.full(len(ranks), NEVER_NS)
        return never, never, never, NEVER_NS
    whole = together.forward + together.backward
    work = [
        math.fsum(whole[own].sum(axis=0) * counts) / num_samples - float(growing.rounding_ns[own].sum())
        for own in ranks
    ]
    least = growing.padded(1, np.array([[1, 0]])) if pieces else alone
    firsts = [own[0] for own in ranks]
    head, tail = (
        np.cumsum(np.vstack([0 * x[:1], x]), axis=0).min(axis=1)[firsts] for x in (least.forward, least.backward)
    )
    chain = (
        max((alone.forward + alone.backward)[own].sum(axis=0).max() for own in ranks) if pieces else alone.chain.max()
    )
    return np.array(work), head, 0 * tail if split else tail, float(chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Bounds of a step in ns; entry d of `replicas` belongs to replica d.

    `batch_ns`: no plan of these samples on as many replicas ends earlier under the same memory limit, whatever its
    micro-batches, order, recomputation and replicas. It bounds padded plans (packed ones as well if this plan packs),
    with full backwards (split ones as well if it splits), of whole samples (of pieces as well if it has pieces). None
    if no such bound is known: for a cost model without a floor, or samples cut at the ends of fixed rows.
    `free_batch_ns`: the same bound for any memory and with layers anywhere on as many ranks: the least work divided by
    the ranks. `certify` leaves it None; the function `free_batch_ns` computes it.
    """

    makespan_ns: int
    replicas: tuple[ReplicaBounds, ...]
    batch_ns: int | None
    free_batch_ns: int | None = None

    @property
    def bound_ns(self) -> int:
        """The largest bound of any replica: no order of these micro-batches can be faster."""
        return max((replica.best_ns for replica in self.replicas), default=0)

    @property
    def gap(self) -> float | None:
        """`makespan_ns` / `bound_ns` - 1; None for an empty step."""
        return _compute_gap(self.makespan_ns, self.bound_ns)

    @property
    def batch_gap(self) -> float | None:
        """`makespan_ns` / `batch_ns` - 1; None without that bound."""
        return _compute_gap(self.makespan_ns, self.batch_ns)


def _compute_gap(makespan_ns: int, bound_ns: int | None) -> float | None:
    return makespan_ns / bound_ns - 1 if bound_ns else None
