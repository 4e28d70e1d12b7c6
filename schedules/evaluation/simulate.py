"""Times and memory of a schedule: validation, simulation (also on shared CPU cores), and peaks of memory."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynapipe_ext.batch.micro_batches import PieceNeighbours, SamplePieces
from dynapipe_ext.core import native
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.timeline import Span, Trace

_KINDS = tuple(Kind)  # in the order of the native core
_LETTERS = {id(kind): kind.value for kind in Kind}  # an Enum's own lookups take most of a validation's time
_MOST_IN_64_BITS = 2.0**61  # of times or bytes that are added up

# Slot that must be filled, duration_ns, slot that is filled, delay_ns until it is.
TimedAction = tuple[int, int, int, int]
SpanNs = tuple[int, int]


def validate(
    schedule: PipelineSchedule,
    num_micro_batches: int,
    sample_pieces: Sequence[SamplePieces] = (),
    *,
    progress: bool = True,
) -> None:
    """Raise PlanError unless every micro-batch runs F then B, or F then I then W, on each stage, without a cycle.

    In a forward-only schedule it runs F and nothing else. On each stage the forwards of a sample's pieces
    (`sample_pieces`) must run from the first to the last, and their B or I from the last to the first. `progress=False`
    leaves out the check for cycles, for callers that simulate the order next. The error names what is at fault.
    """
    num_stages, stage_ranks = schedule.num_stages, schedule.stage_ranks
    if not stage_ranks or set(stage_ranks) != set(range(len(schedule.ranks))):
        raise PlanError(
            f"stage_ranks {stage_ranks} must place at least one stage on each of the {len(schedule.ranks)} ranks and on"
            " no other"
        )
    done = _list_kinds(schedule, num_micro_batches, PieceNeighbours.from_pieces(sample_pieces))
    allowed = ("F",) if schedule.forward_only else ("FB", "FIW")
    for stage, of_stage in enumerate(done):
        for micro_batch in range(num_micro_batches):
            kinds = of_stage[micro_batch]
            if kinds not in allowed:
                hint = ": only a forward-only schedule may lack backwards" if kinds == "F" else ""
                raise PlanError(
                    f"micro-batch {micro_batch} on stage {stage} runs {kinds or 'nothing'} but must run"
                    f" {' or '.join(allowed)}{hint}"
                )
    if progress:
        no_times = np.zeros((num_stages, num_micro_batches), np.int64)
        _run(schedule, no_times, no_times, no_times, no_times, no_times[1:])


def _list_kinds(
    schedule: PipelineSchedule, num_micro_batches: int, pieces: PieceNeighbours
) -> list[defaultdict[int, str]]:
    """Return the kinds of actions of each stage and micro-batch, in order. Raises PlanError for a misplaced action."""
    num_stages, stage_ranks = schedule.num_stages, schedule.stage_ranks
    done = [defaultdict[int, str](str) for _ in stage_ranks]  # only of named micro-batches: a file may name the 10^9th
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, micro_batch = action.stage, action.micro_batch
            if not 0 <= stage < num_stages:
                raise PlanError(f"action {action} names a stage outside 0..{num_stages - 1}")
            if not 0 <= micro_batch < num_micro_batches:
                raise PlanError(f"action {action} names a micro-batch outside 0..{num_micro_batches - 1}")
            if stage_ranks[stage] != rank:
                raise PlanError(
                    f"action {action} is on rank {rank} but stage {stage} is placed on rank {stage_ranks[stage]}"
                )
            letter = _LETTERS[id(action.kind)]
            if pieces.before and letter != "W":
                neighbours, needed = (pieces.before, "F") if letter == "F" else (pieces.behind, "BI")
                other = neighbours.get(micro_batch)
                if other is not None and not any(kind in done[stage][other] for kind in needed):
                    raise PlanError(
                        f"action {action} runs before {Action(stage, Kind(needed[0]), other)}: pieces of one sample run"
                        " forwards from the first to the last on every stage, and backwards from the last to the first"
                    )
            done[stage][micro_batch] += letter
    return done


def simulate_ns(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[list[SpanNs]]:
    """Return (start_ns, end_ns) of each action, in a list per pipeline rank.

    Raises PlanError if the costs do not match the schedule, or if ranks wait for each other for ever; it names the
    action at which each of them is blocked.
    """
    _check_costs(schedule, costs)
    return _run(schedule, *_list_times(costs))


def _list_times(costs: MicroBatchCosts) -> tuple[IntArray, ...]:
    check_range(costs.forward_ns, costs.backward_ns, costs.transfer_ns)
    return costs.forward_ns, costs.backward_ns, costs.input_ns, costs.weight_ns, costs.transfer_ns


def _run(schedule: PipelineSchedule, *times_ns: IntArray) -> list[list[SpanNs]]:
    spans: list[list[SpanNs]]
    spans, stuck = _call_core(native.simulated, schedule, schedule.stage_ranks, times_ns)
    if stuck:
        raise _make_deadlock_error(schedule, stuck)
    return spans


def check_range(*tables: IntArray) -> None:
    """Raise PlanError if these times or bytes add up to 2^61 or more."""
    total = sum(float(table.sum(dtype=np.float64)) for table in tables)
    if total >= _MOST_IN_64_BITS:
        raise PlanError(
            f"times or bytes add up to {total:.3g} but must stay below {_MOST_IN_64_BITS:.3g}: check the units of the"
            " cost model (ns and bytes)"
        )


def _call_core(function: Callable[..., Any], schedule: PipelineSchedule, *arguments: object) -> Any:
    """Call a function of the native core with a schedule. Raises PlanError for an action outside the costs."""
    try:
        return function(schedule.ranks, _KINDS, *arguments)
    except ValueError as error:
        raise PlanError(str(error)) from error


def _make_deadlock_error(schedule: PipelineSchedule, stuck: Sequence[tuple[int, int]]) -> PlanError:
    """Name the action at which each rank (rank, position) is blocked."""
    blocked = ", ".join(f"rank {rank} at {schedule.ranks[rank][index]}" for rank, index in stuck)
    return PlanError(f"schedule {schedule.name!r} deadlocks: {blocked} waits for an input that is never produced")


def _check_costs(schedule: PipelineSchedule, costs: MicroBatchCosts) -> None:
    if schedule.num_stages != costs.num_stages:
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages but the costs have {costs.num_stages}:"
            " price the micro-batches for the same topology"
        )
    if schedule.forward_only and costs.stored_bytes.any():
        raise PlanError(
            f"schedule {schedule.name!r} is forward-only but its costs store activations for backwards: price the"
            " micro-batches as forward-only (Planner.for_forwards)"
        )


def compute_makespan_ns(schedule: PipelineSchedule, costs: MicroBatchCosts) -> int:
    """Return the time from the first start to the last end; 0 without actions. Raises PlanError as `simulate_ns`."""
    return find_last_end_ns(simulate_ns(schedule, costs))


_SHARES = 1024  # shares of times are counted in parts of one in this many
_PAIRS = 8


def count_spread(noise: float) -> int:
    """Return the largest change of an action's time under `noise`, in 1024ths of that time.

    >>> count_spread(0.25)
    256
    """
    return round(noise * _SHARES)


def compute_mean_makespan_ns(schedule: PipelineSchedule, costs: MicroBatchCosts, noise: float) -> int:
    """Return the mean makespan over perturbed times of actions; `noise` 0: the predicted makespan.

    Ranks run their actions in the planned order, whatever the times turn out to be. The mean is over a few fixed draws
    (those of the search, `_native/disturbed.hpp`), the same for all orders. An action's time changes by a share of it,
    drawn evenly from -`noise` to `noise` for its micro-batch (by place in the injection order), stage and kind; bytes
    and transfers stay. Draws come in pairs of opposite changes. A makespan is convex in its times, so the mean of a
    pair is never below the makespan of the predicted times, nor below a bound on it. Raises PlanError as `simulate_ns`.
    """
    if not (spread := count_spread(noise)):
        return compute_makespan_ns(schedule, costs)
    weight_ns = costs.weight_ns if schedule.is_split else np.zeros_like(costs.weight_ns)
    predicted = np.stack([costs.forward_ns, costs.backward_ns - weight_ns, weight_ns])
    num_kinds, num_stages, count = predicted.shape
    z = np.arange(predicted.size * _PAIRS, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64 of each number
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    shares = (z % np.uint64(2 * spread + 1)).astype(np.int64) - spread
    total_ns = 0
    for drawn in shares.reshape(count, num_stages, num_kinds, _PAIRS).transpose(3, 2, 1, 0):
        more = predicted * drawn // _SHARES
        for forward, gradient, weight in (predicted + more, predicted - more):
            spans = _run(schedule, forward, gradient + weight, gradient, weight, costs.transfer_ns)
            total_ns += find_last_end_ns(spans)
    return total_ns // (2 * _PAIRS)


def find_last_end_ns(spans: Sequence[Sequence[SpanNs]]) -> int:
    """Return the end of the last action, which is the makespan if the first starts at 0; 0 without actions."""
    return max((rank[-1][1] for rank in spans if rank), default=0)


def compute_bubble_ratio(spans: Sequence[Sequence[SpanNs]]) -> float:
    """Return idle time divided by (ranks with actions x makespan); 0 if nothing takes time."""
    whole_ns = find_last_end_ns(spans) * sum(1 for rank in spans if rank)
    return 1.0 - sum(end - start for rank in spans for start, end in rank) / whole_ns if whole_ns else 0.0


def simulate(
    schedule: PipelineSchedule, costs: MicroBatchCosts, spans: Sequence[Sequence[SpanNs]] | None = None
) -> Trace:
    """Return the step as a Trace: one track per pipeline rank, spans in order of time, `shape` left empty.

    `cpu_s` is the action's own cost; `num_bytes` is static plus stored bytes right after it. `spans` are the actions'
    times if they are known, as on shared cores; otherwise every rank has a core or device of its own. Raises PlanError
    as `simulate_ns`.
    """
    spans = simulate_ns(schedule, costs) if spans is None else spans
    times = dict(zip(_KINDS, _list_times(costs), strict=False))
    rows = []
    for rank, held in enumerate(sum_static_bytes(schedule, costs)):
        for index, (action, (start, end)) in enumerate(zip(schedule.ranks[rank], spans[rank], strict=True)):
            place = action.stage, action.micro_batch
            stored = int(costs.stored_bytes[place])
            held += {"F": stored, "I": 0}.get(action.kind.value, -stored)
            span = Span(
                rank=rank,
                label=str(action),
                start_s=start / 1e9,
                end_s=end / 1e9,
                cpu_s=int(times[action.kind][place]) / 1e9,
                num_bytes=held,
            )
            rows.append((start, end, rank, index, span))
    return Trace(tuple(row[-1] for row in sorted(rows)), schedule.name)


def sum_static_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[int, ...]:
    """Return for each pipeline rank the static bytes (weights, gradients, optimizer states) of all its stages."""
    totals = [0] * len(schedule.ranks)
    for rank, num_bytes in zip(schedule.stage_ranks, costs.static_bytes.tolist(), strict=True):
        totals[rank] += num_bytes
    return tuple(totals)


def compute_peak_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[int, ...]:
    """Return the largest memory of each pipeline rank at any time, static bytes included.

    Stored bytes count from F to the end of B, or of W. During an action of a kind in `costs.working_in`, the working
    bytes of its micro-batch are added.

    Raises PlanError if the costs do not match the schedule.
    """
    _check_costs(schedule, costs)
    check_range(costs.stored_bytes, costs.working_bytes, costs.static_bytes)
    counted = [kind.value in costs.working_in for kind in _KINDS]
    held = (costs.stored_bytes, costs.working_bytes, list(sum_static_bytes(schedule, costs)))
    return tuple(_call_core(native.peak_bytes, schedule, *held, counted))


class StageMemory:
    """Memory of one stage while its order is made: a micro-batch enters with its F and leaves with its B or W.

    Raises PlanError for a micro-batch that does not fit into `limit_bytes` by itself.
    """

    def __init__(self, costs: MicroBatchCosts, stage: int, limit_bytes: int) -> None:
        self._stored, self._working = costs.stored_bytes[stage].tolist(), costs.working_bytes[stage].tolist()
        self._works_later = costs.working_in != "F"
        static = int(costs.static_bytes[stage])
        self._free = limit_bytes - static
        self._inside: set[int] = set()
        for m, num_bytes in enumerate((costs.stored_bytes + costs.working_bytes)[stage].tolist()):
            if num_bytes > self._free:
                raise PlanError(
                    f"micro-batch {m} alone needs {static + num_bytes} B on stage {stage} but the limit is"
                    f" {limit_bytes} B: make the micro-batch smaller, recompute more of it, or raise tp or pp"
                )

    def admit(self, micro_batch: int) -> bool:
        """Let a micro-batch enter if its F fits and the backward of each one inside will; return whether it entered."""
        inside = {*self._inside, micro_batch}
        working = max(self._working[m] for m in (inside if self._works_later else (micro_batch,)))
        if sum(self._stored[m] for m in inside) + working > self._free:
            return False
        self._inside = inside
        return True

    def release(self, micro_batch: int) -> None:
        self._inside.remove(micro_batch)


@dataclass(frozen=True, slots=True)
class SharedCores:
    """CPU cores that ranks share; each pipeline rank of each replica is `tp` processes, which all run its actions."""

    num_cores: int
    tp: int = 1

    def floor_ns(self, work_ns: int) -> int:
        """Return the least time in which the cores do `work_ns`: the sum of actions over all ranks and replicas."""
        return work_ns * self.tp // self.num_cores


def simulate_shared_ns(
    replicas: Sequence[tuple[PipelineSchedule, MicroBatchCosts]], cores: SharedCores
) -> tuple[list[list[SpanNs]], ...]:
    """Return the spans of each replica (`simulate_ns`) if all replicas run at once on shared cores.

    While more processes are busy than there are cores, each runs at the rate cores / busy (ends are rounded up to whole
    nanoseconds). Raises PlanError as `simulate_ns`.
    """
    ranks: list[tuple[int, Sequence[TimedAction]]] = []
    for d, (schedule, costs) in enumerate(replicas):
        _check_costs(schedule, costs)
        steps = _call_core(native.timed_steps, schedule, schedule.stage_ranks, _list_times(costs))
        ranks += [(d, own) for own in steps]
    ran = _run_shared(ranks, cores)
    replica_spans = []
    for d, (schedule, _) in enumerate(replicas):
        spans = [own for own, (replica, _) in zip(ran, ranks, strict=True) if replica == d]
        stuck = [(r, len(own)) for r, own in enumerate(spans) if len(own) < len(schedule.ranks[r])]
        if stuck:
            raise _make_deadlock_error(schedule, stuck)
        replica_spans.append(spans)
    return tuple(replica_spans)


def _run_shared(ranks: Sequence[tuple[int, Sequence[TimedAction]]], cores: SharedCores) -> list[list[SpanNs]]:
    """Return the spans of the ranks (replica, its actions); fewer than the actions if a rank can never continue.

    Progress is counted in 1 / unit ns, in which every rate is an integer.
    """
    unit = math.lcm(*range(1, len(ranks) * cores.tp + 1))
    arrivals = {(replica, 0): 0 for replica, _ in ranks}  # by replica and slot; the first is what needs nothing
    spans: list[list[SpanNs]] = [[] for _ in ranks]
    running: dict[int, tuple[int, int]] = {}  # by rank: the progress at which its action ends, and its start
    ahead: list[int] = []  # heap of times at which some idle rank may be able to start
    now = progress = 0  # what an action would have done that runs from the beginning on
    while True:
        for rank, (replica, steps) in enumerate(ranks):
            if rank not in running and len(spans[rank]) < len(steps):
                need, duration, _, _ = steps[len(spans[rank])]
                if arrivals.get((replica, need), math.inf) <= now:
                    running[rank] = progress + duration * unit, now
        while ahead and ahead[0] <= now:
            heapq.heappop(ahead)
        rate = unit * cores.num_cores // max(cores.num_cores, len(running) * cores.tp)
        waits = [-((progress - end) // rate) for end, _ in running.values()]
        waits += [arrival - now for arrival in ahead[:1]]
        if not waits:
            return spans
        now += min(waits)
        progress += min(waits) * rate
        for rank in [rank for rank, (end, _) in sorted(running.items()) if end <= progress]:
            replica, steps = ranks[rank]
            _, _, out, delay = steps[len(spans[rank])]
            arrivals[replica, out] = now + delay
            heapq.heappush(ahead, now + delay)
            spans[rank].append((running.pop(rank)[1], now))
