"""What no plan beats: bounds of a schedule, of a cut batch, of the whole batch, and the certificate of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    """Lower bounds in ns of one replica's makespan, over all orders of its micro-batches; 0 for an idle replica.

    stage: the busiest rank's work, plus the shortest time before its first action and after its last.
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
        heads, durations, tails = chains.jobs(rank)
        stage_ns = max(stage_ns, int(heads.min() + durations.sum() + tails.min()))
        chain_ns = max(chain_ns, int((heads + durations + tails).max()))
        heads_tails_ns = max(heads_tails_ns, _preemptive_ns(heads, durations, tails))
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
        self.stages: dict[int, list[int]] = {}
        for stage, rank in enumerate(stage_ranks):
            self.stages.setdefault(rank, []).append(stage)
        tables = costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.transfer_ns
        check_range(*tables)
        forward, backward, weight, transfer = tables
        self.forward, self.weight = forward, weight
        self.gradient: IntArray = backward - weight if split else backward
        last, none = costs.num_stages - 1, np.zeros_like(forward[0])
        moves: list[Any] = [none if stage_ranks[s] == stage_ranks[s + 1] else transfer[s] for s in range(last)]
        back = [none for _ in moves] if forward_only else moves
        last_w = self.weight if split else [none for _ in stage_ranks]
        self.head = [none]  # before F
        self.tail = [last_w[0]]  # after B or I: the gradient goes on up while W, if split, runs where it is
        for s in range(last):
            self.head.append(self.head[s] + self.forward[s] + moves[s])
            self.tail.append(np.maximum(last_w[s + 1], back[s] + self.gradient[s] + self.tail[s]))
        self.between = [none for _ in stage_ranks]  # from the end of F to the start of B or I
        for s in reversed(range(last)):
            ahead = self.forward[s + 1] + self.between[s + 1] + self.gradient[s + 1]
            self.between[s] = moves[s] + ahead + back[s]

    def jobs(self, rank: int) -> tuple[IntArray, IntArray, IntArray]:
        """Heads, durations and tails of all that the rank runs."""
        jobs = []
        for s in self.stages[rank]:
            head, forward_ns, gradient_ns, tail = self.head[s], self.forward[s], self.gradient[s], self.tail[s]
            ready = head + forward_ns + self.between[s]
            jobs.append((head, forward_ns, self.between[s] + gradient_ns + tail))
            if self.forward_only:
                continue
            jobs.append((ready, gradient_ns, tail))
            if self.split:
                jobs.append((ready + gradient_ns, self.weight[s], np.zeros_like(tail)))
        heads, durations, tails = map(np.concatenate, zip(*jobs, strict=True))
        return heads, durations, tails

    def byte_time_ns(self, rank: int, limit_bytes: int) -> int:
        """The rank's bytes x nanoseconds that cannot be avoided, spread over all that the limit leaves free."""
        stages = self.stages[rank]
        free = limit_bytes - sum(int(self.costs.static_bytes[s]) for s in stages)
        byte_ns = 0  # beyond 64 bits
        for s in stages:
            busy_ns = self.forward[s] + self.gradient[s]
            held_ns = busy_ns + self.between[s] + (self.weight[s] if self.split else 0)
            working_ns = self.forward[s] if self.costs.working_in == "F" else busy_ns
            byte_ns += sum(map(mul, self.costs.stored_bytes[s].tolist(), held_ns.tolist()))
            byte_ns += sum(map(mul, self.costs.working_bytes[s].tolist(), working_ns.tolist()))
        if free < 0 or (byte_ns and not free):
            raise PlanError(
                f"rank {rank} holds {limit_bytes - free} B of weights and states, which leaves nothing of the"
                f" {limit_bytes} B limit: raise the limit, tp or pp"
            )
        spread_ns = -(-byte_ns // free) if byte_ns else 0
        first = stages[0]
        return int(self.head[first].min()) + spread_ns + (0 if self.split else int(self.tail[first].min()))


def _preemptive_ns(heads: IntArray, durations: IntArray, tails: IntArray) -> int:
    """Least possible max(end + tail) over preemptive orders of the jobs on one machine: always run the largest tail.

    >>> _preemptive_ns(np.array([0, 1, 0]), np.array([2, 3, 1]), np.array([5, 9, 0]))
    13
    """
    return int(native.preemptive_ns(heads, durations, tails))


FloatArray = npt.NDArray[np.float64]

_NEXT_TO_NOTHING_NS = 1e-12  # of a square, where attention took no time that was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFloor:
    """Least times. One entry a pipeline rank: `work_ns` of all samples, `head_ns` before it, `tail_ns` after it (0 for
    split backwards, since W may come last). `chain_ns`: the longest of the samples' least dependency chains; with
    pieces, the longest sample's work on its busiest rank."""

    work_ns: FloatArray
    head_ns: FloatArray
    tail_ns: FloatArray
    chain_ns: float

    def bound_ns(self, dp: int) -> int:
        whole_ns = float((np.maximum(0, self.work_ns) / dp + self.head_ns + self.tail_ns).max())
        return max(0, int(max(whole_ns, self.chain_ns)))


def batch_floor(
    costs: CostModel,
    lengths: Sequence[tuple[int, int]],
    stage_ranks: Sequence[int],
    *,
    split: bool,
    packed: bool,
    pieces: bool = False,
    memory_limit_bytes: int | None = None,
) -> BatchFloor | None:
    """The floor of whole samples of these (encoder, decoder) lengths.

    With `packed` it holds for packed and padded micro-batches, else for padded ones alone (and is higher on measured
    tables). `split` allows I and W in place of B. With `pieces` it holds for plans that cut long samples as well.
    None for costs without a floor, for no samples, where a sample has no shape that can be priced (or fits the
    limit), and with `pieces` where a measured table has no prices of them.
    """
    if not len(lengths):
        return None
    encoder, decoder = np.array(lengths, np.int64).reshape(-1, 2).T
    width = int(decoder.max()) + 1
    pairs, counts = np.unique(encoder * width + decoder, return_counts=True)
    needs = np.stack(np.divmod(pairs, width), axis=1)
    ranks = [[s for s, r in enumerate(stage_ranks) if r == rank] for rank in sorted(set(stage_ranks))]
    if (floor := costs.floor(tuple(stage_ranks), split=split)) is None:
        return None
    match floor:
        case GrowingTimes() as growing:
            times = _growing(growing, needs, counts, ranks, split, pieces)
        case points if pieces and points.attended_ns is None:
            return None
        case points if packed or pieces:
            times = _packed(points, needs.astype(np.float64), counts, points.attended_ns if pieces else None)
        case points:
            times = _padded(points, needs.astype(np.float64), counts, memory_limit_bytes)
    work_ns, head_ns, tail_ns, chain_ns = times
    if max(work_ns.max(), head_ns.max(), tail_ns.max(), chain_ns) >= INFEASIBLE:
        return None
    num_stages, before = len(stage_ranks), np.array([own[0] for own in ranks])
    num_parts = int((counts * needs[:, 0]).sum() if pieces else counts.sum())
    longest = int(needs[:, 0].max()) if pieces else 2
    return BatchFloor(
        work_ns=work_ns - floor.error_ns * num_parts * np.array([len(own) for own in ranks]),
        head_ns=head_ns - floor.error_ns * before,
        tail_ns=tail_ns - (0 if split else floor.error_ns) * before,
        chain_ns=chain_ns - longest * floor.error_ns * num_stages,
    )


_Times = tuple[FloatArray, FloatArray, FloatArray, float]  # as in BatchFloor, before rounding


def _padded(points: TablePoints, needs: FloatArray, counts: IntArray, memory_limit_bytes: int | None) -> _Times:
    def least(tables: Sequence[PointTable], some: FloatArray) -> list[FloatArray]:
        place = points.place(some)
        fits = None if memory_limit_bytes is None else points.fits(place, memory_limit_bytes)
        return [table.least(place, fits) for table in tables]

    first, last = _extreme(needs, least=True), _extreme(needs, least=False)
    work = [math.fsum(counts * values) for values in least(points.work, needs)]
    return (
        np.array([work[j] for j in points.work_of]),
        np.array([values.min() for values in least(points.head, first)]),
        np.array([values.min() for values in least(points.tail, first)]),
        float(least([points.chain], last)[0].max()),
    )


def _extreme(needs: FloatArray, *, least: bool) -> FloatArray:
    """The smallest (largest) pairs of lengths: no other pair is at most (at least) as long on both sides.

    >>> _extreme(np.array([[1.0, 3.0], [2.0, 1.0], [2.0, 4.0]]), least=True).tolist()
    [[2.0, 1.0], [1.0, 3.0]]
    """
    sign = 1 if least else -1
    extremes, best = [], np.inf
    for pair in needs[np.lexsort((sign * needs[:, 0], sign * needs[:, 1]))]:
        if sign * pair[0] < best:
            extremes.append(pair)
            best = sign * pair[0]
    return np.array(extremes)


def _packed(points: TablePoints, needs: FloatArray, counts: IntArray, attended_ns: Sequence[float] | None) -> _Times:
    """Of whole samples; with `attended_ns` of ranks, of samples in pieces as well."""
    lengths = np.stack(np.meshgrid(*points.axes, indexing="ij"), axis=-1).reshape(-1, 2)
    totals = (counts[:, None] * _features(needs)).sum(axis=0)  # whole numbers: exact in any order

    def largest(table: PointTable, held: FloatArray, most_square_ns: float = math.inf) -> float:
        return _largest_price(lengths, table.values.min(axis=0).ravel(), held, points.has_decoder, most_square_ns)

    longest = [_features(need[None])[0] for need in _extreme(needs, least=False)]
    if attended_ns is None:
        works = [largest(table, totals) for table in points.work]
        work = [works[j] for j in points.work_of]
        chain = max(largest(points.chain_of_row, held) for held in longest)
    else:
        ranks = [(points.work[j], attended / 2) for j, attended in zip(points.work_of, attended_ns, strict=True)]
        work = [largest(table, totals, most) for table, most in ranks]
        chain = max(largest(table, held, most) for (table, most), held in product(ranks, longest))
    heads, tails = ([table.values.min() for table in tables] for tables in (points.head, points.tail))
    return np.array(work), np.array(heads), np.array(tails), chain


def _features(lengths: FloatArray) -> FloatArray:
    """Of (encoder, decoder) lengths (n, 2): encoder, decoder, both, both squared; shape (n, 4)."""
    both = lengths.sum(axis=1)
    return np.stack([lengths[:, 0], lengths[:, 1], both, both**2], axis=1)


def _largest_price(
    points: FloatArray, cost: FloatArray, totals: FloatArray, has_decoder: bool, most_square_ns: float
) -> float:
    """The largest sum of `totals` times prices of features under which no point costs more than its measured cost, and
    a square no more than `most_square_ns`."""
    run = cost < INFEASIBLE
    features, cost = _features(points[run]), cost[run]
    if not has_decoder:
        if (cost <= 0).any():  # a row of some length is free: so is each of its tokens and squares
            return 0.0
        use = features[:, 2:] / cost[:, None]
        if most_square_ns < math.inf:
            use = np.vstack([use, [0.0, 1 / max(most_square_ns, _NEXT_TO_NOTHING_NS)]])
        return _two_prices(use, totals[2:])
    with np.errstate(divide="ignore"):
        return float((totals * (cost[:, None] / features).min(axis=0)).max())


def _two_prices(use: FloatArray, totals: FloatArray) -> float:
    """max p . totals over p >= 0 with use p <= 1, which bounds both: at a corner of two constraints, or on an axis.

    >>> _two_prices(np.array([[0.25, 0.5], [0.5, 0.25]]), np.array([3.0, 3.0]))
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


def _growing(
    growing: GrowingTimes,
    needs: IntArray,
    counts: IntArray,
    ranks: Sequence[Sequence[int]],
    split: bool,
    pieces: bool,
) -> _Times:
    num_samples = int(counts.sum())
    together, alone = (growing.padded(rows, needs) for rows in (num_samples, 1))
    if max(together.forward.max(), alone.forward.max()) >= INFEASIBLE:
        never = np.full(len(ranks), NEVER_NS)
        return never, never, never, NEVER_NS
    whole = together.forward + together.backward
    work = np.array([math.fsum(whole[list(own)].sum(axis=0) * counts) / num_samples for own in ranks])
    work = work - [float(growing.rounding_ns[list(own)].sum()) for own in ranks]
    least = growing.padded(1, np.array([[1, 0]])) if pieces else alone
    upstream = [np.cumsum(np.vstack([0 * x[:1], x]), axis=0).min(axis=1) for x in (least.forward, least.backward)]
    firsts = [own[0] for own in ranks]
    tail = np.zeros(len(ranks)) if split else upstream[1][firsts]
    chain = alone.chain
    if pieces:
        chain = np.max([(alone.forward + alone.backward)[list(own)].sum(axis=0) for own in ranks], axis=0)
    return work, upstream[0][firsts], tail, float(chain.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Bounds of a step in ns; entry d of `replicas` belongs to data-parallel rank d.

    `batch_ns`: no plan of these samples on so many replicas ends earlier under the same memory limit, whatever its
    micro-batches, order, recomputation and replicas. The plans meant are those of the kind of this plan: padded ones
    (or packed ones as well, if this plan packs), with whole backwards (or split ones as well, if it splits), of whole
    samples (or of pieces as well, if it has pieces). None where no such bound is known: a cost model other than the
    four of this package, or samples cut at the ends of fixed rows.
    `free_batch_ns`: the same for layers anywhere on as many ranks and any memory, so the least work of the samples over
    the ranks. `certify` leaves it None; the function `free_batch_ns` computes it.
    """

    makespan_ns: int
    replicas: tuple[ReplicaBounds, ...]
    batch_ns: int | None
    free_batch_ns: int | None = None

    @property
    def bound_ns(self) -> int:
        """No order of these micro-batches can be faster: the largest bound of any replica."""
        return max((replica.best_ns for replica in self.replicas), default=0)

    @property
    def gap(self) -> float | None:
        """Makespan over `bound_ns`, less 1; None where nothing is to be done."""
        return _gap(self.makespan_ns, self.bound_ns)

    @property
    def batch_gap(self) -> float | None:
        """Makespan over `batch_ns`, less 1; None without that bound."""
        return _gap(self.makespan_ns, self.batch_ns)


def batch_floor_ns(
    costs: CostModel,
    samples: Sequence[SampleLength],
    stage_ranks: Sequence[int],
    *,
    dp: int,
    split: bool,
    packed: bool,
    pieces: bool = False,
    memory_limit_bytes: int | None = None,
) -> int | None:
    """No plan of these samples on `dp` replicas ends earlier: no plan of whole samples, nor with `pieces` one that cuts
    long ones; the documents of a pair are bounded as if they could part. None where no bound is known, as for samples
    that are cut already."""
    if any(sample.start for sample in samples):
        return None
    floor = batch_floor(
        costs,
        [(length, s.decoder) for s in samples for length in s.documents],
        stage_ranks,
        split=split,
        packed=packed,
        pieces=pieces,
        memory_limit_bytes=memory_limit_bytes,
    )
    return None if floor is None else floor.bound_ns(dp)


def with_bounds(plan: Mapping[str, Any], certificate: Certificate) -> dict[str, Any]:
    """A dynapipe-plan/1 object with the certificate in it: "bounds" of each replica's prediction, "batch_bound_s" and
    "free_batch_bound_s"."""
    replicas = []
    for raw, bounds in zip(plan["replicas"], certificate.replicas, strict=True):
        bounds_s = {
            "stage_s": bounds.stage_ns / 1e9,
            "chain_s": bounds.chain_ns / 1e9,
            "heads_tails_s": bounds.heads_tails_ns / 1e9,
        }
        if bounds.byte_time_ns is not None:
            bounds_s["byte_time_s"] = bounds.byte_time_ns / 1e9
        replicas.append({**raw, "predicted": {**raw["predicted"], "bounds": bounds_s}})
    whole = {"batch_bound_s": certificate.batch_ns, "free_batch_bound_s": certificate.free_batch_ns}
    return {**plan, "replicas": replicas, **{name: ns / 1e9 for name, ns in whole.items() if ns is not None}}


def _gap(makespan_ns: int, bound_ns: int | None) -> float | None:
    return makespan_ns / bound_ns - 1 if bound_ns else None
