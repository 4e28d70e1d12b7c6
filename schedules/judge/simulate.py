"""A schedule in time and memory: validated, simulated, its peaks, and the same on shared cores."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import PieceNeighbours, SamplePieces
from dynapipe_ext.core import native
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.timeline import Span, Trace

_MOST_IN_64_BITS = 2.0**61  # of numbers that are added up


@dataclass(frozen=True, slots=True, eq=False)
class _Actions:
    """All actions of a schedule, rank after rank, as arrays; those of rank r stand from `ends[r]` to `ends[r + 1]`."""

    stage: IntArray
    micro_batch: IntArray
    kind: IntArray  # the identity of a `Kind`, as an Enum's own lookups take most of the time
    ends: list[int]

    @classmethod
    def of(cls, schedule: PipelineSchedule) -> _Actions:
        actions, ends = [*chain.from_iterable(schedule.ranks)], [0, *accumulate(map(len, schedule.ranks))]
        stage, micro_batch, kind = (map(attrgetter(name), actions) for name in ("stage", "micro_batch", "kind"))
        count = len(actions)
        return cls(
            np.fromiter(stage, np.int64, count),
            np.fromiter(micro_batch, np.int64, count),
            np.fromiter(map(id, kind), np.int64, count),
            ends,
        )

    def are(self, kind: Kind) -> npt.NDArray[np.bool_]:
        return np.asarray(self.kind == id(kind))

    def are_within(self, num_stages: int, num_micro_batches: int) -> bool:
        if not len(self.stage):
            return True
        low, high = min(self.stage.min(), self.micro_batch.min()), (self.stage.max(), self.micro_batch.max())
        return bool(low >= 0 and high[0] < num_stages and high[1] < num_micro_batches)

    def by_rank(self, table: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """A table of one row an action, by rank."""
        return [table[first:end] for first, end in pairwise(self.ends)]


def validate(
    schedule: PipelineSchedule,
    num_micro_batches: int,
    sample_pieces: Sequence[SamplePieces] = (),
    *,
    progress: bool = True,
) -> None:
    """Nothing if every micro-batch runs F then B, or F then I then W, on each stage, and the order has no cycle.

    In a schedule of forwards alone (`forward_only`) it runs F, and nothing else. On each stage the forwards of a
    sample's pieces must run from the first to the last, and their B or I from the last to the first. Who simulates the
    order next, which finds a cycle, too, leaves that out by `progress`.

    Errors: PlanError naming the action, stage or micro-batch at fault.
    """
    _check_placement(schedule)
    if not _is_whole(schedule, num_micro_batches):
        _refuse_broken(schedule, num_micro_batches)
    _check_pieces(schedule, PieceNeighbours.of(sample_pieces))
    if progress:
        _check_progress(schedule, num_micro_batches)


def _is_whole(schedule: PipelineSchedule, num_micro_batches: int) -> bool:
    """Whether every micro-batch runs F then B, or F then I then W, on each stage, and on its rank: by arrays."""
    actions, each = _Actions.of(schedule), schedule.num_stages * num_micro_batches
    stage = actions.stage
    if len(stage) < each or not actions.are_within(schedule.num_stages, num_micro_batches):
        return False
    ranks = np.repeat(np.arange(len(schedule.ranks)), np.diff(actions.ends))
    if (np.array(schedule.stage_ranks)[stage] != ranks).any():
        return False
    pair, times = stage * num_micro_batches + actions.micro_batch, np.full((len(Kind), each), -1)
    for kind, row in zip(Kind, times, strict=True):
        places = np.flatnonzero(actions.are(kind))
        row[pair[places]] = places
    forward, whole, gradient, weight = times
    if (times >= 0).sum() != len(stage) or (forward < 0).any():  # twice, or not at all
        return False
    if schedule.forward_only:
        return len(stage) == each
    is_whole = (whole > forward) & (gradient < 0) & (weight < 0)
    return bool((is_whole | (whole < 0) & (gradient > forward) & (weight > gradient)).all())


def _refuse_broken(schedule: PipelineSchedule, num_micro_batches: int) -> None:
    """The error of `validate` that names what is wrong."""
    num_stages, stage_ranks = schedule.num_stages, schedule.stage_ranks
    letters = {id(kind): kind.value for kind in Kind}  # an Enum's own lookups take most of the time here
    done = [defaultdict[int, str](str) for _ in stage_ranks]  # of those named alone: a file may name the 10^9th
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, micro_batch = action.stage, action.micro_batch
            if not 0 <= stage < num_stages:
                raise PlanError(f"action {action} names a stage outside 0..{num_stages - 1}")
            if stage_ranks[stage] != rank:
                raise PlanError(
                    f"action {action} is on rank {rank} but stage {stage} is placed on rank {stage_ranks[stage]}"
                )
            if not 0 <= micro_batch < num_micro_batches:
                raise PlanError(f"action {action} names a micro-batch outside 0..{num_micro_batches - 1}")
            done[stage][micro_batch] += letters[id(action.kind)]
    allowed = ("F",) if schedule.forward_only else ("FB", "FIW")
    for stage, of_stage in enumerate(done):
        for micro_batch in range(num_micro_batches):
            kinds = of_stage[micro_batch]
            if kinds not in allowed:
                raise PlanError(
                    f"micro-batch {micro_batch} on stage {stage} runs {kinds or 'nothing'} but must run"
                    f" {' or '.join(allowed)}"
                    + (": only a schedule of forwards alone may lack backwards" if kinds == "F" else "")
                )


def _check_pieces(schedule: PipelineSchedule, order: PieceNeighbours) -> None:
    if not order.before:
        return
    for actions in schedule.ranks:
        done: set[tuple[bool, int, int]] = set()  # whether it is a forward, stage, micro-batch
        for action in actions:
            stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
            if kind is Kind.BACKWARD_WEIGHT:
                continue
            forward = kind is Kind.FORWARD
            first = (order.before if forward else order.behind).get(micro_batch)
            if first is not None and (forward, stage, first) not in done:
                raise PlanError(
                    f"action {action} runs before {Action(stage, kind if forward else Kind.BACKWARD, first)}: pieces of"
                    " one sample run forwards from the first to the last on every stage, and backwards from the last to"
                    " the first"
                )
            done.add((forward, stage, micro_batch))


def _check_placement(schedule: PipelineSchedule) -> None:
    if not schedule.stage_ranks or set(schedule.stage_ranks) != set(range(len(schedule.ranks))):
        raise PlanError(
            f"stage_ranks {schedule.stage_ranks} must place at least one stage on each of the"
            f" {len(schedule.ranks)} ranks and on no other"
        )


def _check_progress(schedule: PipelineSchedule, num_micro_batches: int) -> None:
    """Run the order without times; a rank that can never go on is part of, or behind, a circular wait."""
    last, count = schedule.num_stages - 1, num_micro_batches
    gradients, always = schedule.num_stages * count, 2 * schedule.num_stages * count
    done = bytearray(always + 1)  # forwards of every stage and micro-batch, gradients, and what nothing waits for
    done[always] = True

    moves: list[list[tuple[int, int]]] = []  # of each action: what it needs and what it brings
    for actions in schedule.ranks:
        steps = []
        for action in actions:
            stage, kind = action.stage, action.kind
            place = stage * count + action.micro_batch
            if kind is Kind.FORWARD:
                steps.append((place - count if stage else always, place))
            elif kind is Kind.BACKWARD_WEIGHT:
                steps.append((gradients + place, always))
            else:  # its F stands before it in the same list
                steps.append((gradients + place + count if stage < last else always, gradients + place))
        moves.append(steps)
    position = [0] * len(moves)
    ready, waiting = list(range(len(moves))), dict[int, list[int]]()  # ranks that may go on; those that wait, by slot
    while ready:
        rank = ready.pop()
        steps, at = moves[rank], position[rank]
        while at < len(steps):
            need, brought = steps[at]
            if not done[need]:
                waiting.setdefault(need, []).append(rank)
                break
            done[brought] = True
            ready += waiting.pop(brought, ())
            at += 1
        position[rank] = at
    stuck = [
        f"rank {rank} at {actions[position[rank]]}"
        for rank, actions in enumerate(schedule.ranks)
        if position[rank] < len(actions)
    ]
    if stuck:
        raise PlanError(f"schedule {schedule.name!r} has a circular wait: {', '.join(stuck)} can never start")


# Slot that must be filled, duration_ns, slot that is filled, delay_ns until it is.
TimedAction = tuple[int, int, int, int]
SpanNs = tuple[int, int]

# Slots hold arrival times. The first three are fixed; then come S x M forward inputs and S x M gradient inputs.
_NOW, _NEVER, _NOWHERE, _FIRST = range(4)


def simulate_ns(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[list[SpanNs]]:
    """Per pipeline rank, (start_ns, end_ns) of each of its actions.

    Errors: PlanError if the costs do not match the schedule, or if ranks wait for each other for ever; it names the
    action at which each of them is blocked.
    """
    steps = timed_actions(schedule, costs)
    slots = num_slots(costs.num_stages, costs.num_micro_batches)
    run = run_steps if native is None or not _is_small(costs) else native.run_steps
    spans: list[list[SpanNs]]
    spans, stuck = run(steps, slots)
    if stuck:
        raise deadlock(schedule, stuck)
    return spans


def _is_small(costs: MicroBatchCosts) -> bool:
    """Whether times of any order are within 64 bits."""
    tables = costs.forward_ns, costs.backward_ns, costs.transfer_ns
    return sum(float(table.sum()) for table in tables) < _MOST_IN_64_BITS


def makespan_ns(schedule: PipelineSchedule, costs: MicroBatchCosts) -> int:
    """First start to last end; 0 for an empty schedule. Errors: as simulate_ns."""
    return last_end_ns(simulate_ns(schedule, costs))


def last_end_ns(spans: Sequence[Sequence[SpanNs]]) -> int:
    """Makespan of a step whose first action starts at 0; 0 without actions."""
    return max((rank[-1][1] for rank in spans if rank), default=0)


def bubble_ratio(spans: Sequence[Sequence[SpanNs]]) -> float:
    """Idle time over (ranks with actions x makespan); 0 where nothing takes time."""
    whole_ns = last_end_ns(spans) * sum(1 for rank in spans if rank)
    return 1.0 - sum(end - start for rank in spans for start, end in rank) / whole_ns if whole_ns else 0.0


def simulate(schedule: PipelineSchedule, costs: MicroBatchCosts) -> Trace:
    """The step as a Trace: one track a pipeline rank, spans in order of time, `shape` left empty.

    Every rank has a core or device of its own (else: `simulate_shared`). Errors: PlanError as simulate_ns.
    """
    return trace_of(schedule, costs, simulate_ns(schedule, costs))


def trace_of(schedule: PipelineSchedule, costs: MicroBatchCosts, spans: Sequence[Sequence[SpanNs]]) -> Trace:
    """Spans of every rank's actions as a Trace: `cpu_s` is the action's own cost, `num_bytes` static plus stored bytes
    right after it."""
    steps, held = timed_actions(schedule, costs), held_bytes(schedule, costs)
    rows = sorted(
        (start, end, rank, index) for rank, pairs in enumerate(spans) for index, (start, end) in enumerate(pairs)
    )
    return Trace(
        tuple(
            Span(
                rank=rank,
                label=str(schedule.ranks[rank][index]),
                start_s=start / 1e9,
                end_s=end / 1e9,
                cpu_s=steps[rank][index][1] / 1e9,
                num_bytes=held[rank][index],
            )
            for start, end, rank, index in rows
        ),
        schedule.name,
    )


def num_slots(num_stages: int, num_micro_batches: int) -> int:
    """Length of the table of arrival times that run_steps needs."""
    return _FIRST + 2 * num_stages * num_micro_batches


def run_steps(ranks: Sequence[Sequence[TimedAction]], slots: int) -> tuple[list[list[SpanNs]], list[tuple[int, int]]]:
    """Spans of every rank, and (rank, position) of each rank that can never go on (none: the order is sound).

    A rank runs until its next input is not there, and is looked at again when that slot is filled: every step is
    visited once, whatever the order.
    """
    arrival = [-1] * slots
    arrival[_NOW] = 0
    waiter = [-1] * slots
    position = [0] * len(ranks)
    clock = [0] * len(ranks)
    spans: list[list[SpanNs]] = [[] for _ in ranks]
    runnable = list(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        steps, now, done = ranks[rank], clock[rank], spans[rank]
        index = position[rank]
        for index in range(position[rank], len(steps)):
            need, duration, out, delay = steps[index]
            start = arrival[need]
            if start < now:
                if start < 0:
                    waiter[need] = rank
                    break
                start = now
            now = start + duration
            done.append((start, now))
            arrival[out] = now + delay
            if waiter[out] >= 0:
                runnable.append(waiter[out])
                waiter[out] = -1
        else:
            index = len(steps)
        position[rank], clock[rank] = index, now
    return spans, [(rank, index) for rank, index in enumerate(position) if index < len(ranks[rank])]


def timed_actions(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[list[TimedAction]]:
    """Every rank's list, for `run_steps`. Errors: PlanError if the costs do not match the schedule."""
    actions, num, last = _actions_of_costs(schedule, costs), costs.num_micro_batches, costs.num_stages - 1
    is_forward, is_input, is_weight = map(actions.are, (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
    stage, place = actions.stage, actions.stage * num + actions.micro_batch
    gradients = _FIRST + (last + 1) * num  # slots of gradient inputs; those of forward inputs stand before
    steps = np.empty((len(stage), 4), np.int64)
    need, duration, out, delay = steps.T
    need[:] = np.where(is_forward, np.where(stage > 0, _FIRST + place, _NOW), gradients + place)
    above = np.where(stage < last, _FIRST + num + place, gradients + place)
    out[:] = np.where(is_forward, above, np.where(stage > 0, gradients - num + place, _NOWHERE))
    # The boundary that is crossed: after the stage by F, before it by gradients; the last row of `transfer` is none.
    transfer = np.append(_transfers(costs, schedule.stage_ranks).ravel(), np.zeros(num, np.int64))
    delay[:] = transfer[np.where(is_forward, place, place - num)]
    duration[:] = np.where(is_forward, costs.forward_ns.ravel()[place], costs.backward_ns.ravel()[place])
    if is_input.any():
        duration[is_input] = costs.input_ns.ravel()[place[is_input]]
    if is_weight.any():  # W waits for nothing but an I that stands before it in the same list
        at, out[is_weight], delay[is_weight] = np.flatnonzero(is_weight), _NOWHERE, 0
        duration[is_weight] = costs.weight_ns.ravel()[place[is_weight]]
        first_input, inputs = np.flatnonzero(is_input), np.full((last + 1) * num, len(stage))
        inputs[place[first_input[::-1]]] = first_input[::-1]
        need[is_weight] = np.where(inputs[place[is_weight]] < at, _NOW, _NEVER)
    return [[*map(tuple, rank.tolist())] for rank in actions.by_rank(steps)]


def _transfers(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> IntArray:
    """Transfer times over each boundary; none within a rank."""
    ranks = np.array(stage_ranks)
    return np.asarray(costs.transfer_ns * (ranks[1:] != ranks[:-1])[:, None])


def deadlock(schedule: PipelineSchedule, stuck: Sequence[tuple[int, int]]) -> PlanError:
    """The error that names the action at which each rank (rank, position) is blocked."""
    where = ", ".join(f"rank {rank} at {schedule.ranks[rank][index]}" for rank, index in stuck)
    return PlanError(f"schedule {schedule.name!r} deadlocks: {where} waits for an input that is never produced")


def _actions_of_costs(schedule: PipelineSchedule, costs: MicroBatchCosts) -> _Actions:
    """The actions. Errors: PlanError for costs that are not theirs: other stages, too few micro-batches, backwards or
    none."""
    if schedule.num_stages != costs.num_stages:
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages but the costs have {costs.num_stages}:"
            " price the micro-batches for the same topology"
        )
    if schedule.forward_only and costs.stored_bytes.any():
        raise PlanError(
            f"schedule {schedule.name!r} runs forwards alone but its costs store activations for backwards: price the"
            " micro-batches as forwards alone (Planner.for_forwards)"
        )
    actions, stages, micro_batches = _Actions.of(schedule), costs.num_stages, costs.num_micro_batches
    if not actions.are_within(stages, micro_batches):
        every = chain.from_iterable(schedule.ranks)
        outside = (a for a in every if not (0 <= a.stage < stages and 0 <= a.micro_batch < micro_batches))
        raise PlanError(
            f"action {next(outside)} is outside the costs, which have {stages} stages and {micro_batches}"
            " micro-batches: price every micro-batch of the schedule"
        )
    return actions


def static_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[int, ...]:
    """Static bytes of all stages of each pipeline rank."""
    totals = [0] * len(schedule.ranks)
    for rank, num_bytes in zip(schedule.stage_ranks, costs.static_bytes.tolist(), strict=True):
        totals[rank] += num_bytes
    return tuple(totals)


def held_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[tuple[int, ...], ...]:
    """Per pipeline rank, static plus stored bytes right after each action.

    Errors: PlanError if the costs do not match the schedule.
    """
    held = _held(_actions_of_costs(schedule, costs), costs, static_bytes(schedule, costs))
    return tuple(tuple(after.tolist()) for after in held)


def _held(actions: _Actions, costs: MicroBatchCosts, static: Sequence[int]) -> list[IntArray]:
    stored = _exact(costs.stored_bytes)[actions.stage, actions.micro_batch]
    change = np.where(actions.are(Kind.FORWARD), stored, np.where(actions.are(Kind.BACKWARD_INPUT), 0, -stored))
    return [first + np.cumsum(own) for first, own in zip(static, actions.by_rank(change), strict=True)]


def _exact(num_bytes: IntArray) -> IntArray:
    """The same numbers, in Python's integers where sums of them may be beyond 64 bits."""
    return num_bytes if float(num_bytes.sum(dtype=np.float64)) < _MOST_IN_64_BITS else num_bytes.astype(object)


def peak_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[int, ...]:
    """Largest memory of each pipeline rank at any time, working bytes among it in the actions of `costs.working_in`.

    During F: held before + stored + working of the micro-batch. During B and I: held (its own stored bytes are part of
    that) + working. W runs on what is held.

    Errors: PlanError if the costs do not match the schedule.
    """
    actions, static = _actions_of_costs(schedule, costs), static_bytes(schedule, costs)
    counted = np.any([actions.are(kind) for kind in Kind if kind.value in costs.working_in], axis=0)
    working = np.where(counted, _exact(costs.working_bytes)[actions.stage, actions.micro_batch], 0)
    peaks = []
    for first, after, own in zip(static, _held(actions, costs, static), actions.by_rank(working), strict=True):
        before = np.append(first, after[:-1])
        peaks.append(int((np.maximum(before, after) + own).max()) if len(after) else first)
    return tuple(max(peak, first) for peak, first in zip(peaks, static, strict=True))


class StageMemory:
    """What one stage holds while an order is made for it: a micro-batch enters with its F and leaves with its B or W.

    Errors: PlanError for a micro-batch of the costs that does not fit alone.
    """

    __slots__ = ("_free", "_held", "_inside", "_stored", "_working", "_working_later")

    def __init__(self, costs: MicroBatchCosts, stage: int, limit_bytes: int) -> None:
        static = int(costs.static_bytes[stage])
        self._stored, self._working = costs.stored_bytes[stage].tolist(), costs.working_bytes[stage].tolist()
        self._working_later = costs.working_in != "F"
        self._free, self._held = limit_bytes - static, 0
        self._inside: set[int] = set()
        for m, (stored, working) in enumerate(zip(self._stored, self._working, strict=True)):
            if stored + working > self._free:
                raise PlanError(
                    f"micro-batch {m} alone needs {static + stored + working} B on stage {stage} but the limit is"
                    f" {limit_bytes} B: make the micro-batch smaller, recompute more of it, or raise tp or pp"
                )

    def admit(self, micro_batch: int) -> bool:
        """Whether it entered: its F fits, and so will the backward of everything that is then inside."""
        held = self._held + self._stored[micro_batch]
        needing = (*self._inside, micro_batch) if self._working_later else (micro_batch,)
        if held + max(self._working[m] for m in needing) > self._free:
            return False
        self._held = held
        self._inside.add(micro_batch)
        return True

    def release(self, micro_batch: int) -> None:
        self._held -= self._stored[micro_batch]
        self._inside.remove(micro_batch)


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Fewer cores than ranks; each pipeline rank of each replica is `tp` processes, which all run its actions.

    Errors: ConfigError for less than one of either.
    """

    num_cores: int
    tp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_cores", self.num_cores), ("tp", self.tp)):
            if value < 1:
                raise ConfigError(f"{name} is {value} but must be at least 1, or None for a core per rank")

    def floor_ns(self, work_ns: int) -> int:
        """No order of actions that take so long in sum, over all replicas, ends earlier."""
        return work_ns * self.tp // self.num_cores


def simulate_shared_ns(
    replicas: Sequence[tuple[PipelineSchedule, MicroBatchCosts]], cores: SharedCores
) -> tuple[list[list[SpanNs]], ...]:
    """The replicas' spans as `simulate_ns` gives them, all running at once on shared cores.

    While more processes are busy than there are cores, each goes on at the rate cores / busy (ends are rounded up to
    whole nanoseconds). Errors: PlanError as `simulate_ns`.
    """
    ranks = [(d, steps) for d, replica in enumerate(replicas) for steps in timed_actions(*replica)]
    ran = _run_shared(ranks, [num_slots(costs.num_stages, costs.num_micro_batches) for _, costs in replicas], cores)
    replica_spans = []
    for d, (schedule, _) in enumerate(replicas):
        spans = [own for own, (replica, _) in zip(ran, ranks, strict=True) if replica == d]
        stuck = [(r, len(own)) for r, own in enumerate(spans) if len(own) < len(schedule.ranks[r])]
        if stuck:
            raise deadlock(schedule, stuck)
        replica_spans.append(spans)
    return tuple(replica_spans)


def _run_shared(
    ranks: Sequence[tuple[int, Sequence[TimedAction]]], slots: Sequence[int], cores: SharedCores
) -> list[list[SpanNs]]:
    """Spans of the ranks (replica, its actions); fewer than it has actions where one can never go on.

    `slots` has the size of each replica's table of arrivals. Work is counted in 1 / unit ns, in which every rate is
    whole.
    """
    unit = math.lcm(*range(1, len(ranks) * cores.tp + 1))
    arrivals = [[0] + [-1] * (count - 1) for count in slots]  # the first slot: what needs nothing
    spans: list[list[SpanNs]] = [[] for _ in ranks]
    work_left: dict[int, int] = {}
    started: dict[int, int] = {}
    ahead: list[int] = []  # heap of times at which some idle rank may be able to start
    now = 0
    while True:
        for rank, (replica, steps) in enumerate(ranks):
            if rank not in work_left and len(spans[rank]) < len(steps):
                need, duration, _, _ = steps[len(spans[rank])]
                if 0 <= arrivals[replica][need] <= now:
                    work_left[rank], started[rank] = duration * unit, now
        while ahead and ahead[0] <= now:
            heapq.heappop(ahead)
        busy = len(work_left) * cores.tp
        rate = unit * cores.num_cores // busy if busy > cores.num_cores else unit
        waits = [-(-work // rate) for work in work_left.values()]
        if ahead:
            waits.append(ahead[0] - now)
        if not waits:
            break
        elapsed = min(waits)
        now += elapsed
        for rank in sorted(work_left):
            work_left[rank] -= elapsed * rate
            if work_left[rank] <= 0:
                replica, steps = ranks[rank]
                _, _, out, delay = steps[len(spans[rank])]
                arrivals[replica][out] = now + delay
                heapq.heappush(ahead, now + delay)
                spans[rank].append((started.pop(rank), now))
                del work_left[rank]
    return spans
