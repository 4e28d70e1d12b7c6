"""A plan's file proven or refused by code that shares nothing with what made it but the cost model's numbers.

plan.json ─► plan_file.read_plan_file ─► check ─► Verdict ─► verdict_view

Checked: every sample in one row that holds it; on every stage F before B (or I before W) of each micro-batch, or F
alone where the plan says that it is forwards alone; no deadlock; a simulation in the order of the lists; peak bytes
under the limit; every bound. What the plan claims of these must be what comes out. Packed rows are priced with
attention that restarts at each document; where the first is a piece of a longer sample, with what it attends to before.

A valid plan promises: the step trains on every sample once, cut and padded as the file says, ends within the limit, and
takes what the file claims. It does not promise one order: whole micro-batches may change places, within a replica or
between two, if the claims hold. A step's gradient is the sum over all its micro-batches, and random numbers go by
samples, so only the rounding of that sum changes, and under deterministic sums nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from dynapipe_ext.batch.micro_batches import ALL_RECOMPUTES, Attention, MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError, short
from dynapipe_ext.tools.check.pieces import PlainAction, piece_faults, used_samples
from dynapipe_ext.tools.check.plan_file import BOUNDS, PlanFile, ReplicaFile, ShapeFile
from dynapipe_ext.tools.check.recomputed_bounds import ByteNeed, batch_bound_ns, replica_bounds_ns

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_TOLERANCE = 1e-6  # of claimed seconds: those in the file were rounded, and floors were summed in another order

Lengths = Mapping[int, ByteNeed]  # of samples, by index


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure, in seconds or bytes: as the plan claims it and as this check found it; None where there is none."""

    where: str
    what: str
    claimed: float | None
    found: float | None
    unit: str = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Every reason against a plan (none: it is valid), and the figures. Bounds, gaps and peaks are worked out here.

    `peak_bytes` [dp_rank][pp_rank] are empty, and the seconds None, unless every replica runs to its end.
    """

    faults: tuple[str, ...]
    figures: tuple[Compared, ...]
    peak_bytes: tuple[tuple[int, ...], ...] = ()
    makespan_s: float | None = None
    bound_s: float | None = None
    batch_bound_s: float | None = None
    free_batch_bound_s: float | None = None

    @property
    def gap(self) -> float | None:
        """Makespan over the largest bound of any replica, less 1."""
        return self.makespan_s / self.bound_s - 1 if self.makespan_s and self.bound_s else None

    @property
    def batch_gap(self) -> float | None:
        """Makespan over the bound of every plan of the batch, less 1."""
        return self.makespan_s / self.batch_bound_s - 1 if self.makespan_s and self.batch_bound_s else None


def check(
    plan: PlanFile,
    costs: CostModel,
    *,
    memory_limit_bytes: int,
    lengths: Lengths | None = None,
    whole_batch: bool = True,
) -> Verdict:
    """The verdict on a plan under `costs`, those of training, made for the plan's own topology.

    `lengths` are those of the samples that the plan must hold, each once (or may hold, unless `whole_batch`); without
    them neither rows nor the batch bound can be checked, and packed rows cannot be priced. Errors: ConfigError for
    packed rows without lengths, for pairs, and for costs of another number of stages.
    """
    num_stages = plan.topology.num_stages
    if costs.num_stages != num_stages:
        raise ConfigError(f"costs have {costs.num_stages} stages but the plan has {num_stages}: give those of its run")
    micro_batches = [m for replica in plan.replicas for m in replica.micro_batches]
    if any(m.documents for m in micro_batches):
        raise ConfigError("the plan holds pairs of documents, which this check cannot price: look at it by plan --show")
    if lengths is None and any(m.layout == "packed" for m in micro_batches):
        raise ConfigError("packed rows of a plan cannot be priced without their documents' lengths: give them")
    if plan.forward_only:
        costs = adjust(costs, forward_only=True)
    replicas = [
        _checked_replica(replica, f"replica {number}", plan, costs, lengths, memory_limit_bytes)
        for number, replica in enumerate(plan.replicas)
    ]
    faults = _cover_faults(plan, lengths, whole_batch=whole_batch)
    faults += [f"{one.where}: {reason}" for one in replicas for reason in one.faults]
    figures = [figure for one in replicas for figure in one.figures]
    timed = [one.timed for one in replicas if one.timed]
    if len(timed) < len(replicas):
        return Verdict(faults=tuple(faults), figures=tuple(figures))
    is_split = any(one.is_split for one in timed)
    batch, free = _batch_bounds_ns(plan, costs, lengths, is_split=is_split, limit_bytes=memory_limit_bytes)
    batch_figures, batch_faults = _compared_batch(plan, batch, free)
    figures += batch_figures
    faults += batch_faults
    return Verdict(
        faults=tuple(faults),
        figures=tuple(figures),
        peak_bytes=tuple(one.peak_bytes for one in timed),
        makespan_s=max(one.makespan_ns for one in timed) / 1e9,
        bound_s=max(one.bound_ns for one in timed) / 1e9,
        batch_bound_s=None if batch is None else batch / 1e9,
        free_batch_bound_s=None if free is None else free / 1e9,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedReplica:
    """What a replica that runs to its end comes to."""

    makespan_ns: int
    bound_ns: int
    peak_bytes: tuple[int, ...]
    is_split: bool


@dataclass(frozen=True, slots=True)
class _CheckedReplica:
    """A replica's faults and figures; `timed` is None unless it runs to its end."""

    where: str
    faults: Sequence[str]
    figures: Sequence[Compared] = ()
    timed: _TimedReplica | None = None


def _checked_replica(
    replica: ReplicaFile, where: str, plan: PlanFile, costs: CostModel, lengths: Lengths | None, limit_bytes: int
) -> _CheckedReplica:
    """One replica by itself: its actions, shapes, pieces, prices, times, bounds and bytes."""
    stage_ranks, forward_only = plan.topology.stage_ranks, plan.forward_only
    actions, faults = _ordered_actions(replica, plan.topology, forward_only=forward_only)
    faults += (
        _slice_faults(replica, plan.topology.width)
        + _shape_faults(replica, lengths)
        + piece_faults(replica, actions, lengths)
    )
    if faults:
        return _CheckedReplica(where, faults)
    try:
        priced = costs.evaluate([micro_batch_of(m, lengths) for m in replica.micro_batches])
    except PlanError as error:
        return _CheckedReplica(where, [str(error)])
    makespan_ns, stuck = _simulated_ns(actions, priced, stage_ranks)
    if makespan_ns is None:
        waiting = ", ".join(stuck)
        return _CheckedReplica(where, [f"deadlock, waiting for ever at {waiting}: the lists have a circular wait"])
    is_split = any(kind == "I" for rank in actions for _, kind, _ in rank)
    bounds_ns = replica_bounds_ns(
        priced, stage_ranks, split=is_split, limit_bytes=limit_bytes, forward_only=forward_only
    )
    peaks = _peak_bytes(actions, priced, stage_ranks)
    figures, faults = _compared(replica, where, makespan_ns, bounds_ns, peaks, limit_bytes)
    timed = _TimedReplica(
        makespan_ns=makespan_ns, bound_ns=max(bounds_ns.values()), peak_bytes=peaks, is_split=is_split
    )
    return _CheckedReplica(where, faults, figures, timed)


def _compared_batch(
    plan: PlanFile, batch_ns: float | None, free_batch_ns: float | None
) -> tuple[list[Compared], list[str]]:
    """The figures of the whole batch, and the reasons for which they refuse the plan."""
    figures, faults = [], []
    for what, name, claimed, bound_ns in (
        ("bound of every plan", "batch", plan.batch_bound_s, batch_ns),
        ("bound of every plan, wherever layers live", "free batch", plan.free_batch_bound_s, free_batch_ns),
    ):
        figures.append(Compared("batch", what, claimed, None if bound_ns is None else bound_ns / 1e9))
        if bound_ns is not None and not (claimed or 0.0) <= bound_ns / 1e9 * (1 + _TOLERANCE):
            faults.append(
                f"the {name} bound is claimed to be {claimed:.6f} s but no more than {bound_ns / 1e9:.6f} s can be"
                " proven: a better plan may exist"
            )
    return figures, faults


def _batch_bounds_ns(
    plan: PlanFile, costs: CostModel, lengths: Lengths | None, *, is_split: bool, limit_bytes: int
) -> tuple[float | None, float | None]:
    """The bound of every plan of the samples, on the plan's placement and wherever layers live; None if not known."""
    samples = [s for replica in plan.replicas for s in used_samples(replica)]
    if lengths is None or not all(s in lengths for s in samples):
        return None, None
    micro_batches = [m for replica in plan.replicas for m in replica.micro_batches]
    packed = any(m.layout == "packed" for m in micro_batches)
    pieces = any(m.piece is not None for m in micro_batches)
    needs = [lengths[s] for s in samples]
    bound = partial(batch_bound_ns, costs, needs, split=is_split, packed=packed, pieces=pieces)
    stage_ranks, dp = plan.topology.stage_ranks, len(plan.replicas)
    batch = bound(stage_ranks, dp=dp, limit_bytes=limit_bytes)
    alone = bound((0,) * len(stage_ranks), dp=1)  # all stages on one rank: nothing but work
    return batch, None if alone is None else alone / (len(set(stage_ranks)) * dp)


def _cover_faults(plan: PlanFile, lengths: Lengths | None, *, whole_batch: bool) -> list[str]:
    used = Counter(s for replica in plan.replicas for s in used_samples(replica))
    faults = [f"sample {s} is used {count} times: it must train once" for s, count in sorted(used.items()) if count > 1]
    faults += [f"sample {s} is no index of a sample" for s in sorted(used) if s < 0]
    if lengths is not None:
        faults += [f"sample {s} is not in the batch" for s in sorted(used.keys() - lengths.keys())]
        missing = sorted(lengths.keys() - used.keys()) if whole_batch else []
        faults += [f"sample {s} is in no micro-batch" for s in missing]
    return faults


def _slice_faults(replica: ReplicaFile, width: int) -> list[str]:
    """Rows that the ranks of a block cannot share evenly."""
    return [
        f"micro-batch {i}: rows of {m.encoder_len} + {m.decoder_len} positions do not divide over a width of {width}"
        for i, m in enumerate(replica.micro_batches)
        if m.encoder_len % width or m.decoder_len % width
    ]


def _shape_faults(replica: ReplicaFile, lengths: Lengths | None) -> list[str]:
    faults = []
    for i, m in enumerate(replica.micro_batches):
        rows = {"padded": len(m.samples), "packed": 1}.get(m.layout)
        if (
            rows != m.rows
            or not m.samples
            or m.recompute not in ALL_RECOMPUTES
            or min(m.encoder_len, m.decoder_len + 1) < 1
        ):
            faults.append(
                f"micro-batch {i}: {m.rows} x ({m.encoder_len} + {m.decoder_len}), layout {short(m.layout)} and"
                f" recompute {short(m.recompute)} cannot be for {len(m.samples)} samples"
            )
            continue
        if m.piece is not None and (m.layout != "packed" or m.decoder_len):
            faults.append(f"micro-batch {i} carries a piece but is no packed row without a decoder side")
            continue
        needs = [(s, lengths[s]) for s in m.samples if lengths is not None and s in lengths]
        if m.piece is not None and len(needs) == len(m.samples):
            needs[0] = (m.samples[0], (m.piece[1] - m.piece[0], 0))
        if m.layout == "padded":
            faults += [
                f"micro-batch {i}: rows of {m.encoder_len} + {m.decoder_len} are too short for sample {s}, which needs"
                f" {encoder} + {decoder}"
                for s, (encoder, decoder) in needs
                if encoder > m.encoder_len or decoder > m.decoder_len
            ]
        elif lengths is not None and len(needs) == len(m.samples) and _packed(m, lengths) is None:
            sums = " + ".join(str(sum(need[side] for _, need in needs)) for side in (0, 1))
            faults.append(
                f"micro-batch {i}: a packed row of {m.encoder_len} + {m.decoder_len} does not follow from documents of"
                f" {sums} in all, by any rounding"
            )
        elif len(needs) < len(m.samples):
            faults.append(f"micro-batch {i} packs samples of unknown length: it has no price")
    return faults


def micro_batch_of(m: ShapeFile, lengths: Lengths | None) -> MicroBatch:
    """What the cost model prices; its rows are as long as the file says."""
    if m.layout == "packed":
        packed = None if lengths is None else _packed(m, lengths)
        assert packed is not None  # _shape_faults has seen to it
        return packed
    samples = tuple(SampleLength(s, m.encoder_len, m.decoder_len) for s in m.samples)
    return MicroBatch(samples, "padded", cast(Recompute, m.recompute))


def _packed(m: ShapeFile, lengths: Lengths) -> MicroBatch | None:
    """A packed row with these documents and the file's lengths; None if rounding up cannot lead to them."""
    samples = tuple(SampleLength(s, *lengths[s]) for s in m.samples)
    if m.piece is not None:
        start, end = m.piece
        samples = (SampleLength(m.samples[0], end - start, start=start), *samples[1:])
    sides = [sum(s.encoder for s in samples), sum(s.decoder for s in samples)]
    if m.encoder_len < sides[0] or m.decoder_len < sides[1]:
        return None
    if not m.decoder_len:
        attention: Attention = "document" if m.piece is None else "carried"
        return MicroBatch(samples, "packed", cast(Recompute, m.recompute), attention, min_len=m.encoder_len)
    for multiple in _divisors(math.gcd(m.encoder_len, m.decoder_len)):
        if [-(-side // multiple) * multiple for side in sides] == [m.encoder_len, m.decoder_len]:
            return MicroBatch(samples, "packed", cast(Recompute, m.recompute), pad_multiple=multiple)
    return None


def _divisors(number: int) -> list[int]:
    """Ascending.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _ordered_actions(
    replica: ReplicaFile, topology: Topology, *, forward_only: bool
) -> tuple[list[list[PlainAction]], list[str]]:
    """Each rank's actions, and what is wrong with them."""
    faults = []
    if len(replica.ranks) != topology.pp:
        return [], [f"there are lists of {len(replica.ranks)} pipeline ranks but pp is {topology.pp}"]
    ranks: list[list[PlainAction]] = []
    kinds: dict[tuple[int, int], str] = {}
    for rank, texts in enumerate(replica.ranks):
        ranks.append([])
        for text in texts:
            match = _ACTION.fullmatch(text)
            stage, m = (int(match[1]), int(match[3])) if match else (-1, -1)
            at_home = 0 <= stage < topology.num_stages and topology.stage_ranks[stage] == rank
            if not match or not at_home or m >= len(replica.micro_batches):
                faults.append(f"rank {rank}: {short(text)} is no action of this rank's stages and micro-batches")
                continue
            ranks[rank].append((stage, match[2], m))
            kinds[stage, m] = kinds.get((stage, m), "") + match[2]
    for stage in range(topology.num_stages):
        for m in range(len(replica.micro_batches)):
            if (runs := kinds.get((stage, m), "nothing")) not in (("F",) if forward_only else ("FB", "FIW")):
                must_run = "F alone" if forward_only else "F and B, or F, I and W"
                faults.append(f"micro-batch {m} runs {runs} on stage {stage}: it must run {must_run}")
    return ranks, faults


def _simulated_ns(
    ranks: Sequence[Sequence[PlainAction]], costs: MicroBatchCosts, stage_ranks: Sequence[int]
) -> tuple[int | None, list[str]]:
    """The makespan; or None, and where each rank that cannot go on stands."""
    last = costs.num_stages - 1
    done: dict[tuple[str, int, int], int] = {}  # ends of F ("F") and of B or I ("G")
    clock, position = [0] * len(ranks), [0] * len(ranks)

    def arrival(kind: str, stage: int, source: int, m: int) -> int | None:
        end = done.get((kind, source, m))
        if end is None or stage_ranks[stage] == stage_ranks[source]:
            return end
        return end + int(costs.transfer_ns[min(stage, source), m])

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while position[rank] < len(actions):
                stage, kind, m = actions[position[rank]]
                if kind == "F":
                    ready = arrival("F", stage, stage - 1, m) if stage else 0
                    duration = costs.forward_ns[stage, m]
                elif kind == "W":
                    ready, duration = done.get(("G", stage, m)), costs.weight_ns[stage, m]
                else:
                    ready = arrival("G", stage, stage + 1, m) if stage < last else done.get(("F", stage, m))
                    duration = costs.backward_ns[stage, m] - (costs.weight_ns[stage, m] if kind == "I" else 0)
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready) + int(duration)
                if kind != "W":
                    done["F" if kind == "F" else "G", stage, m] = clock[rank]
                position[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} {stage}{kind}{m}"
        for rank, actions in enumerate(ranks)
        for stage, kind, m in actions[position[rank] : position[rank] + 1]
    ]
    return (None if stuck else max(clock, default=0)), stuck


def _peak_bytes(
    ranks: Sequence[Sequence[PlainAction]], costs: MicroBatchCosts, stage_ranks: Sequence[int]
) -> tuple[int, ...]:
    peaks = []
    for rank, actions in enumerate(ranks):
        held = sum(int(num_bytes) for s, num_bytes in enumerate(costs.static_bytes) if stage_ranks[s] == rank)
        peak = held
        for stage, kind, m in actions:
            held += int(costs.stored_bytes[stage, m]) if kind == "F" else 0
            working = int(costs.working_bytes[stage, m]) if kind in costs.working_in else 0
            peak = max(peak, held + working)
            held -= int(costs.stored_bytes[stage, m]) if kind in "BW" else 0
        peaks.append(peak)
    return tuple(peaks)


def _compared(
    replica: ReplicaFile, where: str, makespan_ns: int, bounds_ns: Mapping[str, int], peaks: tuple[int, ...], limit: int
) -> tuple[list[Compared], list[str]]:
    """A replica's figures, and the reasons for which they refuse the plan."""
    bounds = {name: ns / 1e9 for name, ns in bounds_ns.items()}
    figures = [Compared(where, "makespan", replica.makespan_s, makespan_ns / 1e9)]
    figures += [Compared(where, f"{name} bound", replica.bounds_s.get(name), bounds[name]) for name in BOUNDS]
    faults = [
        f"the {figure.what} is claimed to be {figure.claimed:.9f} s but is {figure.found:.9f} s: plan it again"
        + (" (or check it under the limit it was made for)" if figure.what == "byte_time bound" else "")
        for figure in figures
        if figure.claimed is not None and figure.found is not None and not _close(figure.claimed, figure.found)
    ]
    low, high = bounds["heads_tails"], max(bounds.values())
    figures.append(Compared(where, "lower bound", replica.lower_bound_s, high))
    if not (
        low <= replica.lower_bound_s <= high
        or _close(replica.lower_bound_s, low)
        or _close(replica.lower_bound_s, high)
    ):
        faults.append(
            f"the lower bound is claimed to be {replica.lower_bound_s:.9f} s but is {low:.9f} s by heads and tails and"
            f" {high:.9f} s at the most: plan it again"
        )
    if len(replica.peak_bytes) != len(peaks):
        faults.append(f"peaks of {len(replica.peak_bytes)} ranks are claimed but there are {len(peaks)}")
    for rank, peak in enumerate(peaks):
        claimed = replica.peak_bytes[rank] if rank < len(replica.peak_bytes) else None
        figures.append(Compared(where, f"peak bytes of pipeline rank {rank}", claimed, peak, "B"))
        if claimed is not None and claimed != peak:
            faults.append(f"pipeline rank {rank} is claimed to need {claimed} B at its peak but needs {peak} B")
        if peak > limit:
            faults.append(f"pipeline rank {rank} needs {peak} B at its peak but the limit is {limit} B: raise it")
    return figures, faults


def _close(claimed: float, recomputed: float) -> bool:
    return abs(claimed - recomputed) <= _TOLERANCE * recomputed
