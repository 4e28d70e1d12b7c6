"""A schedule in time and memory: validated, simulated, its peaks, and the same on shared cores."""

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
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.timeline import Span, Trace


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
    _check_pieces(schedule, PieceNeighbours.of(sample_pieces))
    if progress:
        _check_progress(schedule, num_micro_batches)


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


_KINDS = tuple(Kind)  # in the order of the native core
_MOST_IN_64_BITS = 2.0**61  # of times or bytes that are added up

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
    check_range(costs.forward_ns, costs.backward_ns, costs.transfer_ns)
    times_ns = (costs.forward_ns, costs.backward_ns, costs.input_ns, costs.weight_ns, costs.transfer_ns)
    spans: list[list[SpanNs]]
    spans, stuck = _by_core(native.simulated, schedule, costs, schedule.stage_ranks, *times_ns)
    if stuck:
        raise deadlock(schedule, stuck)
    return spans


def check_range(*tables: IntArray) -> None:
    """Check that sums over these times or bytes stay within 64 bits. Raises PlanError."""
    total = sum(float(table.sum(dtype=np.float64)) for table in tables)
    if total >= _MOST_IN_64_BITS:
        raise PlanError(
            f"times or bytes add up to {total:.3g} but must stay below {_MOST_IN_64_BITS:.3g}: check the units of the"
            " cost model (ns and bytes)"
        )


def _by_core(judge: Callable[..., Any], schedule: PipelineSchedule, costs: MicroBatchCosts, *arguments: object) -> Any:
    """What the native core says of the schedule. Errors: PlanError if the costs do not match it."""
    _check_costs(schedule, costs)
    try:
        return judge(schedule.ranks, _KINDS, *arguments)
    except ValueError:
        check_sizes(schedule, costs)  # which names the action
        raise


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

    Every rank has a core or device of its own (else: `simulate_shared_ns`). Errors: PlanError as simulate_ns.
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
    """Length of the table of arrival times."""
    return _FIRST + 2 * num_stages * num_micro_batches


def forward_steps(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> list[list[TimedAction]]:
    """Step of F for each stage and micro-batch: table of shape (S, M)."""
    last, num = costs.num_stages - 1, costs.num_micro_batches
    gradients = _FIRST + costs.num_stages * num
    forward, transfer = costs.forward_ns.tolist(), _transfers(costs, stage_ranks)
    return [
        [
            (
                _FIRST + s * num + m if s else _NOW,
                forward[s][m],
                _FIRST + (s + 1) * num + m if s < last else gradients + s * num + m,
                transfer[s][m] if s < last else 0,
            )
            for m in range(num)
        ]
        for s in range(last + 1)
    ]


def backward_steps(
    costs: MicroBatchCosts, stage_ranks: Sequence[int], *, split: bool = False
) -> list[list[TimedAction]]:
    """Step of B (of I, if `split`) for each stage and micro-batch: table of shape (S, M)."""
    num = costs.num_micro_batches
    gradients = _FIRST + costs.num_stages * num
    duration = (costs.input_ns if split else costs.backward_ns).tolist()
    transfer = _transfers(costs, stage_ranks)
    return [
        [
            (
                gradients + s * num + m,
                duration[s][m],
                gradients + (s - 1) * num + m if s else _NOWHERE,
                transfer[s - 1][m] if s else 0,
            )
            for m in range(num)
        ]
        for s in range(costs.num_stages)
    ]


def timed_actions(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[list[TimedAction]]:
    """Every rank's list of timed actions. Errors: PlanError if the costs do not match the schedule."""
    check_sizes(schedule, costs)
    forward = forward_steps(costs, schedule.stage_ranks)
    backward = backward_steps(costs, schedule.stage_ranks)
    gradient: list[list[TimedAction]] = []  # of I, where there is one
    weight: list[list[int]] = []
    ranks = []
    for actions in schedule.ranks:
        steps: list[TimedAction] = []
        split: set[tuple[int, int]] = set()  # W waits for nothing but an I that stands before it in the same list
        for action in actions:
            stage, kind, m = action.stage, action.kind, action.micro_batch
            if kind is Kind.FORWARD:
                steps.append(forward[stage][m])
            elif kind is Kind.BACKWARD:
                steps.append(backward[stage][m])
            elif kind is Kind.BACKWARD_INPUT:
                gradient = gradient or backward_steps(costs, schedule.stage_ranks, split=True)
                split.add((stage, m))
                steps.append(gradient[stage][m])
            else:
                weight = weight or costs.weight_ns.tolist()
                steps.append((_NOW if (stage, m) in split else _NEVER, weight[stage][m], _NOWHERE, 0))
        ranks.append(steps)
    return ranks


def _transfers(costs: MicroBatchCosts, stage_ranks: Sequence[int]) -> list[list[int]]:
    """Transfer times over each boundary; none within a rank."""
    none = [0] * costs.num_micro_batches
    return [none if stage_ranks[s] == stage_ranks[s + 1] else row for s, row in enumerate(costs.transfer_ns.tolist())]


def deadlock(schedule: PipelineSchedule, stuck: Sequence[tuple[int, int]]) -> PlanError:
    """The error that names the action at which each rank (rank, position) is blocked."""
    where = ", ".join(f"rank {rank} at {schedule.ranks[rank][index]}" for rank, index in stuck)
    return PlanError(f"schedule {schedule.name!r} deadlocks: {where} waits for an input that is never produced")


def check_sizes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> None:
    """Refuse costs that are not those of the schedule: other stages, too few micro-batches, backwards or none."""
    _check_costs(schedule, costs)
    stages, micro_batches = range(costs.num_stages), range(costs.num_micro_batches)
    for rank in schedule.ranks:
        for action in rank:
            if action.stage not in stages or action.micro_batch not in micro_batches:
                raise PlanError(
                    f"action {action} is outside the costs, which have {len(stages)} stages and"
                    f" {len(micro_batches)} micro-batches: price every micro-batch of the schedule"
                )


def _check_costs(schedule: PipelineSchedule, costs: MicroBatchCosts) -> None:
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
    check_sizes(schedule, costs)
    stored = costs.stored_bytes.tolist()
    ranks = []
    for rank, held in zip(schedule.ranks, static_bytes(schedule, costs), strict=True):
        after = []
        for action in rank:
            if action.kind is Kind.FORWARD:
                held += stored[action.stage][action.micro_batch]
            elif action.kind is not Kind.BACKWARD_INPUT:
                held -= stored[action.stage][action.micro_batch]
            after.append(held)
        ranks.append(tuple(after))
    return tuple(ranks)


def peak_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[int, ...]:
    """Largest memory of each pipeline rank at any time, working bytes among it in the actions of `costs.working_in`.

    During F: held before + stored + working of the micro-batch. During B and I: held (its own stored bytes are part of
    that) + working. W runs on what is held.

    Errors: PlanError if the costs do not match the schedule.
    """
    check_range(costs.stored_bytes, costs.working_bytes, costs.static_bytes)
    counted = [kind.value in costs.working_in for kind in _KINDS]
    held = (costs.stored_bytes, costs.working_bytes, list(static_bytes(schedule, costs)))
    return tuple(_by_core(native.peak_bytes, schedule, costs, *held, counted))


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
