"""Memory-bounded adaptive schedules: uneven micro-batches enter as early as bytes allow, judged by exact simulation.

A list scheduler over all stages at once (linear placement, whole backwards). On each stage forwards run in injection
order, and of the gradients that have arrived the earliest in that order goes first. A forward is admitted only if

    static + stored bytes of all micro-batches then held + the largest working bytes among them <= limit,

so each backward of a held micro-batch fits at any later time. No deadlock: take the earliest micro-batch m in
injection order that has not left stage 0. All earlier ones have, hence hold nothing anywhere. On a stage where F of m
has not run no later forward ran either, so the stage holds nothing and m, which fits alone, is admitted; where F of m
has run, its B fits. So m goes on, whatever the rule (a rule adds a cap of at least 1 on the micro-batches a stage
holds, and says which of the two ready actions comes first).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, linear_schedule
from dynapipe_ext.schedules.bounds import lower_bound_ns
from dynapipe_ext.schedules.memory import peak_bytes
from dynapipe_ext.schedules.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.order import moved_order, start_orders
from dynapipe_ext.schedules.simulate import Step, backward_steps, forward_steps, num_slots, run_steps
from dynapipe_ext.schedules.validate import validate

Order = list[list[int]]  # per stage: position + 1 in the injection order for F, its negative for B
Dispatch = Callable[["_Inputs"], "Order | None"]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Costs in injection order as plain lists: column p belongs to the p-th micro-batch that enters."""

    num_stages: int
    num_micro_batches: int
    forward: list[list[Step]]
    backward: list[list[Step]]
    stored: list[list[int]]
    working: list[list[int]]
    free: list[int]  # bytes of each stage beyond its static ones
    max_in_flight: int

    def makespan_ns(self, order: Order) -> int:
        steps = [
            [self.forward[s][a - 1] if a > 0 else self.backward[s][-a - 1] for a in actions]
            for s, actions in enumerate(order)
        ]
        spans, stuck = run_steps(steps, num_slots(self.num_stages, self.num_micro_batches))
        assert not stuck, "a dispatch rule made an order that waits for itself"
        return max((rank[-1][1] for rank in spans if rank), default=0)

    def fits(self, order: Order) -> bool:
        for s, actions in enumerate(order):
            held = in_flight = 0
            for a in actions:
                p = abs(a) - 1
                held, in_flight = (held + self.stored[s][p], in_flight + 1) if a > 0 else (held, in_flight)
                if held + self.working[s][p] > self.free[s] or in_flight > self.max_in_flight:
                    return False
                held, in_flight = (held, in_flight) if a > 0 else (held - self.stored[s][p], in_flight - 1)
        return True


def adaptive(
    costs: MicroBatchCosts,
    *,
    memory_limit_bytes: int,
    order: Sequence[int] | None = None,
    max_in_flight: int | None = None,
) -> PipelineSchedule:
    """The best of several dispatch rules, micro-batches entering in `order` (default 0..M-1), none above the limit.

    Actions carry the numbers of `costs`; `order` lists these. `max_in_flight` caps the micro-batches that any stage
    holds at once. Never slower than 1F1B in the same order if that fits. `peak_bytes` stay within the limit on every
    rank, working bytes counted in F and B. Ties go to the earlier rule: the result is a function of the arguments.

    Errors: ConfigError for an order that is no permutation or a cap below 1; PlanError for a micro-batch that does not
    fit alone on a stage.
    """
    chosen = _check_order(costs, order)
    inputs = _inputs(costs, chosen, memory_limit_bytes, max_in_flight)
    _, _, best = _best_of(inputs, range(len(_RULES)))
    return _proven(best, chosen, costs, memory_limit_bytes)


def best_order(
    costs: MicroBatchCosts, *, memory_limit_bytes: int, effort: int, seed: int
) -> tuple[list[int], PipelineSchedule]:
    """The best injection order found, and its adaptive schedule: never worse than the natural order's.

    Tries natural, ascending, descending, alternating and hill-shaped cost, then `effort` random swaps and insertions,
    each kept where the simulated makespan does not grow. Stops early at the lower bound. A function of its arguments:
    the random numbers are its own (splitmix64), and ties go to what was found first.

    Errors: ConfigError for a negative effort; PlanError as adaptive.
    """
    if effort < 0:
        raise ConfigError(f"effort is {effort} but must be a count of at least 0")
    num = costs.num_micro_batches
    table = _inputs(costs, list(range(num)), memory_limit_bytes, None)
    bound = lower_bound_ns(range(costs.num_stages), costs, split=False, memory_limit_bytes=memory_limit_bytes)
    best: tuple[int, int, Order] | None = None
    best_chosen: list[int] = []
    for start in start_orders(costs):
        found = _best_of(_reordered(table, start), range(len(_RULES)))
        if best is None or found[0] < best[0]:
            best, best_chosen = found, start
    assert best is not None
    current, current_ns, rule, state = best_chosen, best[0], best[1], seed
    for _ in range(effort if num > 1 else 0):
        if best[0] <= bound:
            break
        state, moved = moved_order(current, state)
        found = _best_of(_reordered(table, moved), (rule,))
        if found[0] <= current_ns:
            current, current_ns = moved, found[0]
            if found[0] < best[0]:
                best, best_chosen = found, moved
    found = _best_of(_reordered(table, best_chosen), range(len(_RULES)))
    best = min(found, best, key=lambda result: result[0])
    return best_chosen, _proven(best[2], best_chosen, costs, memory_limit_bytes)


def _best_of(inputs: _Inputs, rules: Sequence[int]) -> tuple[int, int, Order]:
    """Makespan, rule and order of the best of some rules; those that do not fit are passed over."""
    best: tuple[int, int, Order] | None = None
    for rule in rules:
        found = _RULES[rule](inputs)
        if found is None:
            continue
        makespan = inputs.makespan_ns(found)
        if best is None or makespan < best[0]:
            best = makespan, rule, found
    if best is None:  # only plain 1F1B can fail to fit; another rule stands in
        return _best_of(inputs, (1,))
    return best


def _one_f_one_b(inputs: _Inputs) -> Order | None:
    """Plain 1F1B, if it fits."""
    schedule = one_f_one_b(inputs.num_stages, inputs.num_micro_batches)
    found = [
        [a.micro_batch + 1 if a.kind is Kind.FORWARD else -a.micro_batch - 1 for a in rank] for rank in schedule.ranks
    ]
    return found if inputs.fits(found) else None


def _cyclic(extra: int | None) -> Dispatch:
    """Wait-free cyclic: in each cycle every stage runs one backward and one forward of what the last cycle left it.

    After DynaPipe's memory-aware adaptive schedule (Jiang et al. 2024), with admission as in the module text and the
    caps of _greedy.
    """

    def dispatch(inputs: _Inputs) -> Order:
        last, num = inputs.num_stages - 1, inputs.num_micro_batches
        found: Order = [[] for _ in range(last + 1)]
        arrived = [num] + [0] * last  # forwards whose input is there; they come in injection order
        gradients: list[list[int]] = [[] for _ in range(last + 1)]
        ranks = _memories(inputs, extra)
        left = num
        while left:
            sent: list[tuple[int, int]] = []
            for s, memory in enumerate(ranks):
                if gradients[s]:
                    p = gradients[s].pop(0)
                    memory.release(p)
                    found[s].append(-p - 1)
                    left -= s == 0
                    sent.append((s - 1, -p - 1))
                p = memory.entered
                if p < arrived[s] and memory.admit(p):
                    found[s].append(p + 1)
                    sent.append((s, -p - 1) if s == last else (s + 1, p + 1))
            for s, a in sent:
                if a > 0:
                    arrived[s] += 1
                elif s >= 0:
                    gradients[s].append(-a - 1)
        return found

    return dispatch


def _greedy(extra: int | None, *, alternate: bool) -> Dispatch:
    """Event-driven rule: stage s holds at most S - s + extra micro-batches (None: as many as memory allows).

    With `alternate`, a stage that has just run a backward takes a forward next if one is ready and fits: 1F1B's rhythm.
    """

    def dispatch(inputs: _Inputs) -> Order:
        stages, num = inputs.num_stages, inputs.num_micro_batches
        last = stages - 1
        ranks = _memories(inputs, extra)
        found: Order = [[] for _ in range(stages)]
        arrivals: list[list[int]] = [[0] * num] + [[] for _ in range(last)]
        gradients: list[list[tuple[int, int]]] = [[] for _ in range(stages)]  # (position, arrival)
        free_at = [0] * stages
        wants_forward = [False] * stages
        events = [0]  # time x stages + stage: look at that stage then
        while events:
            now, s = divmod(heapq.heappop(events), stages)
            if free_at[s] > now:
                continue
            memory, queue = ranks[s], gradients[s]
            chosen = min((item for item in queue if item[1] <= now), default=None)
            p = memory.entered
            forward_is_next = chosen is None or wants_forward[s]
            if forward_is_next and p < len(arrivals[s]) and arrivals[s][p] <= now and memory.admit(p):
                found[s].append(p + 1)
                _, duration, _, delay = inputs.forward[s][p]
                end = now + duration
                if s == last:
                    queue.append((p, end))
                else:
                    arrivals[s + 1].append(end + delay)
                    heapq.heappush(events, (end + delay) * stages + s + 1)
                wants_forward[s] = False
            elif chosen is not None:
                queue.remove(chosen)
                p = chosen[0]
                memory.release(p)
                found[s].append(-p - 1)
                _, duration, _, delay = inputs.backward[s][p]
                end = now + duration
                if s:
                    gradients[s - 1].append((p, end + delay))
                    heapq.heappush(events, (end + delay) * stages + s - 1)
                wants_forward[s] = alternate
            else:
                continue
            free_at[s] = end
            heapq.heappush(events, end * stages + s)
        return found

    return dispatch


_RULES: tuple[Dispatch, ...] = (
    _one_f_one_b,
    _greedy(0, alternate=False),
    _greedy(0, alternate=True),
    _greedy(1, alternate=True),
    _greedy(2, alternate=True),
    _greedy(None, alternate=True),
    _cyclic(1),
    _cyclic(3),
)


class _Memory:
    """What one stage holds while an order is made, and whether the next micro-batch may enter."""

    __slots__ = ("entered", "free", "held", "inside", "most", "stored", "working")

    def __init__(self, inputs: _Inputs, stage: int, most: int) -> None:
        self.stored, self.working, self.free = inputs.stored[stage], inputs.working[stage], inputs.free[stage]
        self.most, self.entered, self.held = most, 0, 0
        self.inside: list[int] = []

    def admit(self, p: int) -> bool:
        if len(self.inside) >= self.most:
            return False
        held, room = self.held + self.stored[p], self.free
        if held + self.working[p] > room:
            return False
        for q in self.inside:
            if held + self.working[q] > room:
                return False
        self.held = held
        self.inside.append(p)
        self.entered += 1
        return True

    def release(self, p: int) -> None:
        self.held -= self.stored[p]
        self.inside.remove(p)


def _memories(inputs: _Inputs, extra: int | None) -> list[_Memory]:
    """Empty stages; stage s holds at most S - s + extra micro-batches, whose cap is at least 1 whatever `extra`."""
    stages = inputs.num_stages
    return [
        _Memory(inputs, s, inputs.max_in_flight if extra is None else min(inputs.max_in_flight, stages - s + extra))
        for s in range(stages)
    ]


def _inputs(costs: MicroBatchCosts, order: Sequence[int], limit_bytes: int, max_in_flight: int | None) -> _Inputs:
    """Costs in injection order. Errors: PlanError for a micro-batch that does not fit alone."""
    if max_in_flight is not None and max_in_flight < 1:
        raise ConfigError(f"max_in_flight is {max_in_flight} but a pipeline needs at least 1 micro-batch in it")
    taken = costs.take(order)
    ranks = range(costs.num_stages)
    stored, working = taken.stored_bytes.tolist(), taken.working_bytes.tolist()
    free = [limit_bytes - static for static in taken.static_bytes.tolist()]
    for s in ranks:
        for p, m in enumerate(order):
            if stored[s][p] + working[s][p] > free[s]:
                raise PlanError(
                    f"micro-batch {m} alone needs {stored[s][p] + working[s][p] + limit_bytes - free[s]} B on stage {s}"
                    f" but the limit is {limit_bytes} B: make the micro-batch smaller, recompute more of it, or raise"
                    " tp or pp"
                )
    return _Inputs(
        num_stages=costs.num_stages,
        num_micro_batches=taken.num_micro_batches,
        forward=forward_steps(taken, ranks),
        backward=backward_steps(taken, ranks),
        stored=stored,
        working=working,
        free=free,
        max_in_flight=taken.num_micro_batches if max_in_flight is None else max_in_flight,
    )


def _reordered(inputs: _Inputs, order: Sequence[int]) -> _Inputs:
    """The same inputs in another injection order: durations and bytes move, slots stay with the position."""

    def moved(table: list[list[Step]]) -> list[list[Step]]:
        return [[(at[0], row[m][1], at[2], row[m][3]) for at, m in zip(row, order, strict=True)] for row in table]

    return _Inputs(
        num_stages=inputs.num_stages,
        num_micro_batches=inputs.num_micro_batches,
        forward=moved(inputs.forward),
        backward=moved(inputs.backward),
        stored=[[row[m] for m in order] for row in inputs.stored],
        working=[[row[m] for m in order] for row in inputs.working],
        free=inputs.free,
        max_in_flight=inputs.max_in_flight,
    )


def _check_order(costs: MicroBatchCosts, order: Sequence[int] | None) -> list[int]:
    chosen = list(range(costs.num_micro_batches)) if order is None else [int(m) for m in order]
    if sorted(chosen) != list(range(costs.num_micro_batches)):
        raise ConfigError(
            f"order {chosen} must list each of the micro-batches 0..{costs.num_micro_batches - 1} exactly once"
        )
    return chosen


def _proven(found: Order, order: Sequence[int], costs: MicroBatchCosts, limit_bytes: int) -> PipelineSchedule:
    """The schedule, once its order and its peak have been checked apart from what made it."""
    schedule = linear_schedule(
        "adaptive",
        [
            [Action(s, Kind.FORWARD if a > 0 else Kind.BACKWARD, order[abs(a) - 1]) for a in actions]
            for s, actions in enumerate(found)
        ],
    )
    validate(schedule, costs.num_micro_batches)
    peaks = peak_bytes(schedule, costs)
    if max(peaks) > limit_bytes:
        raise PlanError(
            f"the adaptive schedule needs {max(peaks)} B on rank {peaks.index(max(peaks))} but the limit is"
            f" {limit_bytes} B: raise the limit, tp or pp"
        )
    return schedule
