"""One pass of a dispatch rule over a replica: which action each rank starts when, within its memory.

The Python twin of the native core's `pipeline.hpp`, `admission.hpp` and `pieces.hpp`. Every stage runs its forwards in
the injection order, and its gradients in that of `GradientOrder`. A position is a place in the injection order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dynapipe_ext.batch.micro_batches import SamplePieces
from dynapipe_ext.schedules.search.problem import NEVER, Chosen, CostField, DispatchRule

Table = list[list[int]]  # [stage][position]


@dataclass(frozen=True, slots=True)
class GradientOrder:
    """The order in which the gradients of positions run on every stage, and each position's place in it.

    `first_of` and `last_of`: the first and the last piece of each position's sample; the position itself where it is no
    piece. `most_pieces`: of one sample; 1 without pieces.
    """

    order: tuple[int, ...]
    place: tuple[int, ...]
    first_of: tuple[int, ...]
    last_of: tuple[int, ...]
    most_pieces: int

    @classmethod
    def of(cls, count: int, sample_pieces: Sequence[SamplePieces]) -> GradientOrder:
        """The gradients of a sample's pieces run last piece first, all when the last piece's turn comes.

        >>> GradientOrder.of(5, [(0, 2, 3)]).order
        (1, 3, 2, 0, 4)
        """
        first_of, last_of = list(range(count)), list(range(count))
        for pieces in sample_pieces:
            for position in pieces:
                first_of[position], last_of[position] = pieces[0], pieces[-1]
        order = sorted(range(count), key=lambda m: (last_of[m], -m))
        place = [0] * count
        for k, m in enumerate(order):
            place[m] = k
        most_pieces = max(map(len, sample_pieces), default=1)
        return cls(tuple(order), tuple(place), tuple(first_of), tuple(last_of), most_pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One replica's costs in injection order. With `split`, `gradient` is I alone, else the whole B."""

    stage_ranks: tuple[int, ...]
    free_bytes: tuple[int, ...]  # of each rank: limit - static
    split: bool
    working_in_backward: bool
    forward: Table
    gradient: Table
    weight: Table
    stored: Table
    working: Table
    transfer: Table  # [boundary][position]
    sample_pieces: tuple[SamplePieces, ...] = ()  # as positions
    short_stages: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.forward[0])


@dataclass(frozen=True, slots=True)
class _ForwardChoice:
    """The forward that a rank may start now, if any. Else whether one fits once pending W's have run, whether the rank
    waits for one to arrive, and when the next one arrives."""

    ready: Chosen | None
    fits_after_weights: bool
    is_awaited: bool
    next_arrival: int


class _Dispatch:
    """A rule at work on a pipeline; attributes are per stage or per rank."""

    def __init__(self, pipe: Pipeline, rule: DispatchRule) -> None:
        stages, count = len(pipe.stage_ranks), pipe.count
        ranks = range(len(pipe.free_bytes))
        self.pipe, self.rule, self.stages, self.count = pipe, rule, stages, count
        self.gradients = GradientOrder.of(count, pipe.sample_pieces)
        self.taken, self.working = pipe.stored, pipe.working  # by a forward: a first piece takes for all of its sample
        if pipe.sample_pieces:
            self.taken, self.working = _needs_of_pieces(pipe.stored, pipe.working, pipe.sample_pieces)
        self.own_stages = [[s for s, r in enumerate(pipe.stage_ranks) if r == rank] for rank in ranks]
        self.forward_arrival = [[0] * count, *([NEVER] * count for _ in range(stages - 1))]
        self.gradient_arrival = [[NEVER] * count for _ in range(stages)]
        self.forwards_started = [0] * stages  # in the injection order
        self.gradients_started = [0] * stages  # in the gradient order
        self.pending: list[list[tuple[int, int]]] = [[] for _ in ranks]  # W's, as (stage, position)
        self.pending_bytes = [0] * len(ranks)
        self.held = [0] * len(ranks)
        self.wants_forward = [False] * len(ranks)
        self.wake = [NEVER] * len(ranks)
        self.wake[pipe.stage_ranks[0]] = 0
        self.free_at = [0] * len(ranks)
        self.left_work = [0] * len(ranks)
        for s, rank in enumerate(pipe.stage_ranks):
            work = sum(pipe.forward[s]) + sum(pipe.gradient[s]) + (sum(pipe.weight[s]) if pipe.split else 0)
            self.left_work[rank] += work

    def run(self, give_up: int, orders: list[list[Chosen]] | None) -> int:
        left = self.stages * self.count * (3 if self.pipe.split else 2)
        makespan = 0
        while left:
            now = min(self.wake)
            if now >= NEVER:
                return NEVER
            rank = self.wake.index(now)
            chosen, following = self._choose(rank, now)
            if chosen is None:
                self.wake[rank] = following
                continue
            end = self._start(rank, now, chosen)
            if orders is not None:
                orders[rank].append(chosen)
            self.left_work[rank] -= end - now
            if end + self.left_work[rank] >= give_up:
                return NEVER
            makespan = max(makespan, end)
            self.wake[rank] = self.free_at[rank] = end
            left -= 1
        return makespan

    def _choose(self, rank: int, now: int) -> tuple[Chosen | None, int]:
        """The action to start now, or None and the next time to look."""
        rule, pending = self.rule, self.pending[rank]
        if rule.most_pending is not None and len(pending) > rule.most_pending:
            return Chosen(CostField.WEIGHT, *pending.pop(0)), NEVER
        if (short := self._ready_on_short(rank, now)) is not None:
            return short, NEVER
        gradient, next_gradient = self._ready_gradient(rank, now)
        forward = self._ready_forward(rank, now)
        following = min(next_gradient, forward.next_arrival)
        forward_first = self.wants_forward[rank] or rule.rhythm > 1
        has_forward = forward.ready is not None or forward.fits_after_weights or forward.is_awaited
        if gradient is not None and not (forward_first and has_forward):
            return gradient, NEVER
        if forward.ready is not None:
            return forward.ready, NEVER
        if pending:
            duration = self.pipe.weight[pending[0][0]][pending[0][1]]
            late = now + duration - following
            if forward.fits_after_weights or following >= NEVER or late * 4 <= duration * rule.patience:
                return Chosen(CostField.WEIGHT, *pending.pop(0)), NEVER
        return None, following

    def _ready_on_short(self, rank: int, now: int) -> Chosen | None:
        """What is ready on a short stage of the rank, gradients first: it is waited for elsewhere, and delays little
        here."""
        own = [s for s in reversed(self.own_stages[rank]) if s in self.pipe.short_stages]
        for s in own:
            if self._has_gradient(s):
                m = self.gradients.order[self.gradients_started[s]]
                if self.gradient_arrival[s][m] <= now:
                    return Chosen(CostField.GRADIENT, s, m)
        for s in own:
            m = self.forwards_started[s]
            if m < self.count and self.forward_arrival[s][m] <= now and self._admits(rank, s, m)[0]:
                return Chosen(CostField.FORWARD, s, m)
        return None

    def _ready_gradient(self, rank: int, now: int) -> tuple[Chosen | None, int]:
        """The gradient that comes first in the gradient order of those that the rank may start; when the next one
        arrives."""
        order = self.gradients.order
        ready: Chosen | None = None
        next_arrival, first_place = NEVER, self.count
        for s in reversed(self.own_stages[rank]):
            place = self.gradients_started[s]
            if not self._has_gradient(s):
                continue
            arrival = self.gradient_arrival[s][order[place]]
            if arrival > now:
                next_arrival = min(next_arrival, arrival)
            elif place < first_place:
                ready, first_place = Chosen(CostField.GRADIENT, s, order[place]), place
        return ready, next_arrival

    def _has_gradient(self, s: int) -> bool:
        """Whether the forward of the next gradient in turn has started on the stage."""
        entered, place = self.forwards_started[s], self.gradients_started[s]
        return place < entered and self.gradients.order[place] < entered

    def _ready_forward(self, rank: int, now: int) -> _ForwardChoice:
        """Of the rank's last stage that may start one."""
        fits_after_weights = is_awaited = False
        next_arrival = NEVER
        for s in reversed(self.own_stages[rank]):
            m = self.forwards_started[s]
            if m == self.count or self._is_full(s):
                continue
            arrival = self.forward_arrival[s][m]
            if arrival > now:
                is_awaited = self.rule.rhythm > 1
                next_arrival = min(next_arrival, arrival)
                continue
            fits, fits_after = self._admits(rank, s, m)
            if fits:
                return _ForwardChoice(Chosen(CostField.FORWARD, s, m), fits_after_weights, is_awaited, next_arrival)
            fits_after_weights = fits_after_weights or fits_after
        return _ForwardChoice(None, fits_after_weights, is_awaited, next_arrival)

    def _is_full(self, s: int) -> bool:
        """Whether the stage holds as many micro-batches as the rule allows."""
        if self.rule.extra is None or not self._has_gradient(s):
            return False
        most = max(1, self.stages - s + self.rule.extra) + self.gradients.most_pieces - 1
        return self.forwards_started[s] - self.gradients_started[s] >= most

    def _admits(self, rank: int, s: int, m: int) -> tuple[bool, bool]:
        """Whether the rank has memory for position m on stage s now, and once the pending W's have run."""
        pipe, is_only_stage = self.pipe, len(self.own_stages[rank]) == 1
        working = self.working[s][m]
        if pipe.working_in_backward:
            # Micro-batches on a single stage end oldest first: older ones have gone when a backward runs.
            oldest_first = not pipe.split and is_only_stage and not pipe.sample_pieces
            for t in self.own_stages[rank]:
                gone = 0
                for q in self._inside(t):
                    working = max(working, self.working[t][q] - gone)
                    gone += pipe.stored[t][q] if oldest_first else 0
        needed = self.held[rank] + self.taken[s][m] + working
        room = pipe.free_bytes[rank]
        if needed - self.pending_bytes[rank] > room:
            return False, False
        if not is_only_stage and not self._can_complete(rank, s, m):
            return False, False
        return needed <= room, True

    def _inside(self, s: int) -> Iterable[int]:
        """Positions whose forward has started on a stage and whose gradient has not."""
        if not self.pipe.sample_pieces:
            return range(self.gradients_started[s], self.forwards_started[s])
        return [m for m in self.gradients.order[self.gradients_started[s] :] if m < self.forwards_started[s]]

    def _can_complete(self, rank: int, s: int, m: int) -> bool:
        """Whether, with position m admitted on stage s, all micro-batches in flight can still complete on this rank,
        one after the other, oldest first."""
        pipe, gradients, first_stage = self.pipe, self.gradients, self.own_stages[rank][0]
        held = self.held[rank] - self.pending_bytes[rank] + self.taken[s][m]
        begin = min(self._inside(first_stage), default=m)
        end = max(self.forwards_started[first_stage], m + 1 if s == first_stage else 0)
        working_inside = self._working_inside(rank, s, m, range(begin, end))
        for q in range(begin, end):
            own = missing = coming = 0
            for t in self.own_stages[rank]:
                if q >= self.forwards_started[t] and (t, q) != (s, m):
                    missing += self.taken[t][q]
                    coming = max(coming, self.working[t][q])
            for t in self.own_stages[rank] if gradients.last_of[q] == q else ():
                own += sum(
                    pipe.stored[t][p]
                    for p in range(gradients.first_of[q], q + 1)
                    if gradients.last_of[p] == q and gradients.place[p] >= self.gradients_started[t]
                )
            if held + missing + max(working_inside[q - begin], coming) > pipe.free_bytes[rank]:
                return False
            held += missing - own
            if pipe.working_in_backward:  # pieces stay inside until their sample's last has run, others come and go
                for later in range(q + 1, min(gradients.last_of[q] + 1, end)):
                    working_inside[later - begin] = max(working_inside[later - begin], coming)
        return True

    def _working_inside(self, rank: int, s: int, m: int, walk: range) -> list[int]:
        """For each position of the walk: the most working bytes, while it completes, of the micro-batches that are
        inside and have not completed before it.

        A micro-batch that completes earlier in the walk does not count. If it did, its own next step could be refused
        for want of room for a younger one, and nothing would go on.
        """
        most = [0] * len(walk)
        if self.pipe.working_in_backward:
            for t in self.own_stages[rank]:
                for p in (*self._inside(t), m) if t == s else self._inside(t):
                    until = min(self.gradients.last_of[p], walk[-1]) - walk[0]
                    most[until] = max(most[until], self.working[t][p])
        return list(accumulate(reversed(most), max))[::-1]

    def _start(self, rank: int, now: int, chosen: Chosen) -> int:
        """Run an action. Returns its end."""
        pipe, (action, s, m) = self.pipe, chosen
        if action is CostField.FORWARD:
            end = now + pipe.forward[s][m]
            self.held[rank] += self.taken[s][m]
            self.forwards_started[s] += 1
            if s + 1 == self.stages:
                self.gradient_arrival[s][m] = end
            else:
                self._arrive(s + 1, m, end + self._transfer(s, m), self.forward_arrival)
            self.wants_forward[rank] &= s in pipe.short_stages
        elif action is CostField.GRADIENT:
            end = now + pipe.gradient[s][m]
            self.gradients_started[s] += 1
            if pipe.split:
                self.pending[rank].append((s, m))
                self.pending_bytes[rank] += pipe.stored[s][m]
            else:
                self.held[rank] -= pipe.stored[s][m]
            if s:
                self._arrive(s - 1, m, end + self._transfer(s - 1, m), self.gradient_arrival)
            if s not in pipe.short_stages:
                self.wants_forward[rank] = self.rule.rhythm > 0
        else:
            end = now + pipe.weight[s][m]
            self.held[rank] -= pipe.stored[s][m]
            self.pending_bytes[rank] -= pipe.stored[s][m]
        return end

    def _transfer(self, low: int, m: int) -> int:
        ranks = self.pipe.stage_ranks
        return 0 if ranks[low] == ranks[low + 1] else self.pipe.transfer[low][m]

    def _arrive(self, s: int, m: int, at: int, table: Table) -> None:
        table[s][m] = at
        rank = self.pipe.stage_ranks[s]
        self.wake[rank] = min(self.wake[rank], max(at, self.free_at[rank]))


def _needs_of_pieces(stored: Table, working: Table, sample_pieces: Sequence[SamplePieces]) -> tuple[Table, Table]:
    """What the forward of each position takes until its gradient, and the working bytes to keep ready while it is
    inside. The first piece of a sample takes the bytes of all its pieces; any of them may run while it is inside."""
    taken, ready = [list(row) for row in stored], [list(row) for row in working]
    for pieces in sample_pieces:
        for s, row in enumerate(stored):
            for m in pieces:
                taken[s][m], ready[s][m] = 0, max(working[s][q] for q in pieces)
            taken[s][pieces[0]] = sum(row[q] for q in pieces)
    return taken, ready


def dispatch(
    pipe: Pipeline, rule: DispatchRule, *, give_up: int = NEVER, orders: list[list[Chosen]] | None = None
) -> int:
    """Makespan of the rule in ns; NEVER as soon as it is known to reach `give_up`, or where memory blocks it.

    `orders`, one empty list a rank, receives the actions.
    """
    return _Dispatch(pipe, rule).run(give_up, orders)
