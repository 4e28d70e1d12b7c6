"""One pass that orders actions rank by rank: admission, dispatch rules, and pieces of one sample in a chain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dynapipe_ext.batch.micro_batches import Chain
from dynapipe_ext.costs.model import MicroBatchCosts


def start_orders(costs: MicroBatchCosts, chains: Sequence[Chain] = ()) -> list[list[int]]:
    """Natural, ascending, descending, alternating between the two halves, and cheap at both ends (a short fill and
    drain, and neighbours alike). Micro-batches of a chain stand one behind the other, and count as one."""
    times = (costs.forward_ns + costs.backward_ns).sum(axis=0).tolist()
    later = {m for chain in chains for m in chain[1:]}
    units = {m: (m,) for m in range(len(times)) if m not in later} | {chain[0]: chain for chain in chains}
    work = {m: sum(times[k] for k in unit) for m, unit in units.items()}
    ascending = sorted(units, key=lambda m: (work[m], m))
    half = len(ascending) // 2
    alternating = [m for pair in zip(ascending[half:], ascending[:half], strict=False) for m in pair]
    alternating += [ascending[-1]] if len(ascending) % 2 else []
    hill = ascending[::2] + ascending[1::2][::-1]
    orders = [sorted(units), ascending, ascending[::-1], alternating, hill]
    return [[k for m in order for k in units[m]] for i, order in enumerate(orders) if order not in orders[:i]]


def splitmix64(state: int) -> tuple[int, int]:
    """Next state and a random number of 64 bits (Steele, Lea and Flood 2014): the same on every machine.

    >>> splitmix64(0)[1], splitmix64(splitmix64(0)[0])[1]
    (16294208416658607535, 7960286522194355700)
    """
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class Returns:
    """The order in which the gradients of positions run on every stage, and each position's place in it.

    `first_of` and `last_of`: of each position's chain (of itself, where it is whole). `longest`: pieces of a chain.
    """

    order: tuple[int, ...]
    place: tuple[int, ...]
    first_of: tuple[int, ...]
    last_of: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, count: int, chains: Sequence[Chain]) -> Returns:
        """A piece returns before the pieces before it, and none before its sample's last: all have that one's place.

        >>> Returns.of(5, [(0, 2, 3)]).order
        (1, 3, 2, 0, 4)
        """
        first_of, last_of = list(range(count)), list(range(count))
        for chain in chains:
            for position in chain:
                first_of[position], last_of[position] = chain[0], chain[-1]
        order = sorted(range(count), key=lambda m: (last_of[m], -m))
        place = [0] * count
        for k, m in enumerate(order):
            place[m] = k
        return cls(tuple(order), tuple(place), tuple(first_of), tuple(last_of), max(map(len, chains), default=1))


def chain_positions(group: Sequence[int], chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """The chains of an order of runs, as positions in it."""
    place = {m: i for i, m in enumerate(group)}
    return tuple(tuple(place[m] for m in chain) for chain in chains if chain[0] in place)


def in_piece_order(group: list[int], chains: Sequence[Chain]) -> None:
    """Put the pieces of each chain, where they stand, in their order.

    >>> group = [3, 9, 1, 2]
    >>> in_piece_order(group, [(1, 2, 3)])
    >>> group
    [1, 9, 2, 3]
    """
    for positions, chain in zip(chain_positions(group, chains), (c for c in chains if c[0] in group), strict=True):
        for position, m in zip(sorted(positions), chain, strict=True):
            group[position] = m


def put_in_place(group: list[int], i: int, old: Sequence[int], new: Sequence[int]) -> None:
    """In place of the run at i and of all others of `old`, `new`, one behind the other.

    >>> group = [3, 9, 4, 8]
    >>> put_in_place(group, 2, (3, 4), (5, 6))
    >>> group
    [9, 5, 6, 8]
    """
    at = sum(m not in old for m in group[:i])
    group[:] = [m for m in group if m not in old]
    group[at:at] = new


def place_apart(group: list[int], chain: Chain, at: int, between: int) -> None:
    """Put a chain of the group at the `at`-th place among the others (counted round), with `between` of them after each
    piece.

    >>> group = [3, 9, 4, 8, 7]
    >>> place_apart(group, (3, 4), 1, 1)
    >>> group
    [9, 3, 8, 4, 7]
    """
    group[:] = [m for m in group if m not in chain]
    at %= len(group) + 1
    for k, m in enumerate(chain):
        group.insert(min(at + k * (1 + between), len(group)), m)


NEVER = 1 << 60
NO_CAP = 1 << 20
_UNKNOWN = -1
FORWARD, GRADIENT, WEIGHT = range(3)

Chosen = tuple[int, int, int]  # one of the three above, stage, position
Table = list[list[int]]  # [stage][position]; a position is a place in the injection order


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """How a free rank chooses.

    Stage s holds at most S - s + `extra` micro-batches, with chains as many more as the longest has pieces but one
    (Seq1F1B's warm-up; arXiv 2406.03488); NO_CAP: as many as memory allows. By `rhythm`, a forward goes
    first after a backward (1), or always and is even waited for (2: 1F1B's order where `extra` is 0); 0: gradients go
    first. A W may delay the next known arrival by up to `patience` quarters of its own time; W's beyond `most_pending`
    go first.
    """

    extra: int
    rhythm: int
    patience: int = 0
    most_pending: int = 0


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
    chains: tuple[Chain, ...] = ()  # of positions

    @property
    def count(self) -> int:
        return len(self.forward[0])


class _Dispatch:
    """A rule at work on a pipeline; attributes are per stage or per rank."""

    def __init__(self, pipe: Pipeline, rule: DispatchRule) -> None:
        stages, count = len(pipe.stage_ranks), pipe.count
        ranks = range(len(pipe.free_bytes))
        self.pipe, self.rule, self.stages, self.count = pipe, rule, stages, count
        self.returns = Returns.of(count, pipe.chains)
        self.taken, self.working = pipe.stored, pipe.working  # by a forward: of a first piece, those of its chain
        if pipe.chains:
            self.taken, self.working = _of_chains(pipe.stored, pipe.working, pipe.chains)
        self.mine = [[s for s, r in enumerate(pipe.stage_ranks) if r == rank] for rank in ranks]
        self.arrival = [[0] * count, *([_UNKNOWN] * count for _ in range(stages - 1))]
        self.gradient_arrival = [[_UNKNOWN] * count for _ in range(stages)]
        self.entered = [0] * stages  # forwards started, in injection order
        self.returned = [0] * stages  # gradients started, in the order of the returns
        self.pending: list[list[tuple[int, int]]] = [[] for _ in ranks]
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

    def go(self, give_up: int, orders: list[list[Chosen]] | None) -> int:
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
        """What to start now, or None and the next time to look."""
        rule, pending, order = self.rule, self.pending[rank], self.returns.order
        if len(pending) > rule.most_pending:
            return (WEIGHT, *pending.pop(0)), NEVER
        following = NEVER
        gradient: tuple[int, int] | None = None  # place in the returns, stage
        forward: int | None = None
        after_weights = awaited = False
        for s in reversed(self.mine[rank]):
            m, back = self.entered[s], self.returned[s]
            has_head = back < m and order[back] < m
            at = self.gradient_arrival[s][order[back]] if has_head else _UNKNOWN
            if at > now:
                following = min(following, at)
            elif at != _UNKNOWN and (gradient is None or back < gradient[0]):
                gradient = back, s
            if m == self.count or forward is not None:
                continue
            at = self.arrival[s][m]
            most = max(1, self.stages - s + rule.extra) + self.returns.longest - 1
            if rule.extra < NO_CAP and has_head and m - back >= most:
                continue
            if at == _UNKNOWN or at > now:
                awaited = rule.rhythm > 1
                following = min(following, at) if at != _UNKNOWN else following
            else:
                fits, fits_after = self._admits(rank, s, m)
                if fits:
                    forward = s
                after_weights = after_weights or (fits_after and not fits)
        first = forward is not None or after_weights or awaited
        if gradient is not None and not ((self.wants_forward[rank] or rule.rhythm > 1) and first):
            return (GRADIENT, gradient[1], order[gradient[0]]), NEVER
        if forward is not None:
            return (FORWARD, forward, self.entered[forward]), NEVER
        if pending:
            duration = self.pipe.weight[pending[0][0]][pending[0][1]]
            late = now + duration - following
            if after_weights or following >= NEVER or late * 4 <= duration * rule.patience:
                return (WEIGHT, *pending.pop(0)), NEVER
        return None, following

    def _admits(self, rank: int, s: int, m: int) -> tuple[bool, bool]:
        """Whether the rank's memory takes it now, and whether it would once the pending W's have run."""
        pipe, alone = self.pipe, len(self.mine[rank]) == 1
        working = self.working[s][m]
        if pipe.working_in_backward:
            in_turn = not pipe.split and alone and not pipe.chains  # then what is older has gone when a backward runs
            for t in self.mine[rank]:
                gone = 0
                for q in self._inside(t):
                    working = max(working, self.working[t][q] - gone)
                    gone += pipe.stored[t][q] if in_turn else 0
        needed = self.held[rank] + self.taken[s][m] + working
        room = pipe.free_bytes[rank]
        if needed - self.pending_bytes[rank] > room:
            return False, False
        if not alone and not self._safe(rank, s, m):
            return False, False
        return needed <= room, True

    def _inside(self, s: int) -> Iterable[int]:
        """Positions whose forward has started on a stage and whose gradient has not."""
        if not self.pipe.chains:
            return range(self.returned[s], self.entered[s])
        return [m for m in self.returns.order[self.returned[s] :] if m < self.entered[s]]

    def _safe(self, rank: int, s: int, m: int) -> bool:
        pipe, returns, first = self.pipe, self.returns, self.mine[rank][0]
        held = self.held[rank] - self.pending_bytes[rank] + self.taken[s][m]
        begin = min(self._inside(first), default=m)
        end = max(self.entered[first], m + 1 if s == first else 0)
        lasting = self._lasting(rank, s, m, range(begin, end))
        for q in range(begin, end):
            own = missing = coming = 0
            for t in self.mine[rank]:
                if q >= self.entered[t] and (t, q) != (s, m):
                    missing += self.taken[t][q]
                    coming = max(coming, self.working[t][q])
            for t in self.mine[rank] if returns.last_of[q] == q else ():
                own += sum(
                    pipe.stored[t][p]
                    for p in range(returns.first_of[q], q + 1)
                    if returns.last_of[p] == q and returns.place[p] >= self.returned[t]
                )
            if held + missing + max(lasting[q - begin], coming) > pipe.free_bytes[rank]:
                return False
            held += missing - own
            if pipe.working_in_backward:  # a chain is inside while others come and go
                for later in range(q + 1, min(returns.last_of[q] + 1, end)):
                    lasting[later - begin] = max(lasting[later - begin], coming)
        return True

    def _lasting(self, rank: int, s: int, m: int, walk: range) -> list[int]:
        """The most working bytes, while each position of the walk completes, of what is inside and has not gone before
        it: more would refuse the oldest a step for what younger ones took since the walk that let it in."""
        most = [0] * len(walk)
        if self.pipe.working_in_backward:
            for t in self.mine[rank]:
                for p in (*self._inside(t), m) if t == s else self._inside(t):
                    until = min(self.returns.last_of[p], walk[-1]) - walk[0]
                    most[until] = max(most[until], self.working[t][p])
        return list(accumulate(reversed(most), max))[::-1]

    def _start(self, rank: int, now: int, chosen: Chosen) -> int:
        pipe, (kind, s, m) = self.pipe, chosen
        if kind == FORWARD:
            end = now + pipe.forward[s][m]
            self.held[rank] += self.taken[s][m]
            self.entered[s] += 1
            if s + 1 == self.stages:
                self.gradient_arrival[s][m] = end
            else:
                self._arrive(s + 1, m, end + self._hop(s, m), self.arrival)
            self.wants_forward[rank] = False
        elif kind == GRADIENT:
            end = now + pipe.gradient[s][m]
            self.returned[s] += 1
            if pipe.split:
                self.pending[rank].append((s, m))
                self.pending_bytes[rank] += pipe.stored[s][m]
            else:
                self.held[rank] -= pipe.stored[s][m]
            if s:
                self._arrive(s - 1, m, end + self._hop(s - 1, m), self.gradient_arrival)
            self.wants_forward[rank] = self.rule.rhythm > 0
        else:
            end = now + pipe.weight[s][m]
            self.held[rank] -= pipe.stored[s][m]
            self.pending_bytes[rank] -= pipe.stored[s][m]
        return end

    def _hop(self, low: int, m: int) -> int:
        ranks = self.pipe.stage_ranks
        return 0 if ranks[low] == ranks[low + 1] else self.pipe.transfer[low][m]

    def _arrive(self, s: int, m: int, at: int, table: Table) -> None:
        table[s][m] = at
        rank = self.pipe.stage_ranks[s]
        self.wake[rank] = min(self.wake[rank], max(at, self.free_at[rank]))


def _of_chains(stored: Table, working: Table, chains: Sequence[Chain]) -> tuple[Table, Table]:
    """What the forward of each position takes for good, and the working bytes to be ready for while it is inside: a
    chain takes all at its first piece, and any of its pieces may run."""
    taken, ready = [list(row) for row in stored], [list(row) for row in working]
    for chain in chains:
        for s, row in enumerate(stored):
            for m in chain:
                taken[s][m], ready[s][m] = 0, max(working[s][q] for q in chain)
            taken[s][chain[0]] = sum(row[q] for q in chain)
    return taken, ready


def dispatch(
    pipe: Pipeline, rule: DispatchRule, *, give_up: int = NEVER, orders: list[list[Chosen]] | None = None
) -> int:
    """Makespan of the rule in ns, NEVER once it is known to reach `give_up` or where memory blocks it.

    `orders`, one empty list a rank, receives the actions.
    """
    return _Dispatch(pipe, rule).go(give_up, orders)


def rules(*, split: bool) -> Sequence[DispatchRule]:
    """The rules that a search chooses from."""
    extras = (0, 1, 2, 4, NO_CAP)
    if not split:
        return [DispatchRule(0, 2), *(DispatchRule(extra, rhythm) for extra in extras for rhythm in (1, 0))]
    return [
        DispatchRule(extra, rhythm, patience, most_pending)
        for extra in extras
        for rhythm in (1, 0)
        for patience, most_pending in ((0, NO_CAP), (2, NO_CAP), (4, NO_CAP), (0, 0))
    ]
