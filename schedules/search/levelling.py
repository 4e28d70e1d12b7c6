"""Cuts and replicas made even by what every rank has to do, before any order is simulated.

A step takes at least what its busiest rank has to do, after the first micro-batch's way to it and before the last one's
way back; and ranks wait the longer, the larger the largest micro-batch is. So cuts and replicas can be judged without
an order, at a fraction of what a simulation takes. Memory is not judged: the search that follows simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.core import native
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.reproducible import splitmix64
from dynapipe_ext.splits.padded import ShapeIndex

Range = tuple[int, int]  # items first .. end - 1; (-1, -1): merged away
CutGroups = list[list[int]]

_SHIFT, _DIVIDE, _GIVE, _EXCHANGE = range(4)
_MOVES = (_SHIFT,) * 4 + (_DIVIDE,) * 2 + (_GIVE, _EXCHANGE)  # without the last two where there is one replica
_MOST_WEIGHT = 4  # of the largest replica, for each replica; their sum has 1
_LARGEST = 3  # times of the largest micro-batch on a rank, in the mean, for which ranks wait
_ALLOWANCE = 4096  # a move may cost up to one part in so many at first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTimes:
    """Of every shape, ns (shapes, ranks): a rank's work, the least time before its first stage (head) and after it
    (tail; 0 where a W may come last). `total_ns` (shapes,): the work of all ranks."""

    work_ns: IntArray
    head_ns: IntArray
    tail_ns: IntArray
    total_ns: IntArray

    @classmethod
    def of(cls, costs: MicroBatchCosts, stage_ranks: Sequence[int], *, split: bool) -> RankTimes:
        work, head, tail = np.zeros((3, costs.num_micro_batches, max(stage_ranks) + 1), np.int64)
        gradient = costs.input_ns if split else costs.backward_ns
        down, up = np.zeros((2, costs.num_micro_batches), np.int64)
        for stage, rank in enumerate(stage_ranks):
            if rank not in stage_ranks[:stage]:
                head[:, rank], tail[:, rank] = down, 0 if split else up
            work[:, rank] += costs.forward_ns[stage] + costs.backward_ns[stage]
            crosses = stage + 1 < len(stage_ranks) and stage_ranks[stage + 1] != rank
            transfer = costs.transfer_ns[stage] if crosses else 0
            down = down + costs.forward_ns[stage] + transfer
            up = up + gradient[stage] + transfer
        return cls(work_ns=work, head_ns=head, tail_ns=tail, total_ns=work.sum(axis=1))


def levelled(
    times: RankTimes,
    shapes: ShapeIndex,
    cuts: Sequence[Range],
    groups: Sequence[Sequence[int]],
    *,
    moves: int,
    seed: int,
    equal_counts: bool = False,
    use_native: bool = True,
) -> tuple[list[Range], CutGroups]:
    """Cuts of the items in turn, and their indices of each replica, after so many random moves: the best of all.

    `shapes[j, r - 1]`: the shape of the r items that end at item j, or -1 where they may not be a micro-batch; `cuts`
    may all be. A function of its arguments; of equals the first stays.
    """
    if native is None or not use_native:
        ranges, new_groups = _Levelling(times, shapes, cuts, groups, equal_counts).improved(moves, seed)
    else:
        tables = (times.work_ns, times.head_ns, times.tail_ns, times.total_ns, shapes)
        ranges, new_groups = native.levelled(
            *map(np.ascontiguousarray, tables), list(cuts), [list(g) for g in groups], moves, seed, equal_counts
        )
    left = sorted((cut, m) for m, cut in enumerate(ranges) if cut[0] >= 0)
    place = {m: i for i, (_, m) in enumerate(left)}
    return [cut for cut, _ in left], [sorted(place[m] for m in group) for group in new_groups]


class _Levelling:
    """The twin of the native core's `levelling.hpp`. A method that makes a move returns whether the result may be."""

    def __init__(
        self,
        times: RankTimes,
        shapes: ShapeIndex,
        cuts: Sequence[Range],
        groups: Sequence[Sequence[int]],
        equal_counts: bool,
    ) -> None:
        self.times, self.shapes, self.equal_counts = times, shapes, equal_counts
        self.cuts, self.groups = list(cuts), [list(group) for group in groups]
        self.replica_ns = [self.time_of(group) for group in self.groups]
        self.state = 0  # of the random numbers
        self.touched: list[int] = []  # replicas that the move changes

    def improved(self, moves: int, seed: int) -> tuple[list[Range], CutGroups]:
        """The best cuts and groups of so many moves. Record-to-record travel (Dueck 1993)."""
        self.state = seed % (1 << 64)
        best, best_cuts, best_groups = self.value, list(self.cuts), [list(group) for group in self.groups]
        record = self.energy
        for step in range(moves):
            before = list(self.cuts), [list(group) for group in self.groups], list(self.replica_ns)
            self.touched = []
            taken = self._move()
            if taken:
                for d in self.touched:
                    self.replica_ns[d] = self.time_of(self.groups[d])
                taken = self.energy <= record + record // _ALLOWANCE * (moves - step) // moves
            if not taken:
                self.cuts[: len(before[0])], self.groups, self.replica_ns = before
                self.cuts[len(before[0]) :] = [(-1, -1)] * (len(self.cuts) - len(before[0]))
                continue
            record = min(record, self.energy)
            if self.value < best:
                best, best_cuts, best_groups = self.value, list(self.cuts), [list(group) for group in self.groups]
        return best_cuts, best_groups

    @property
    def value(self) -> tuple[int, int]:
        return max(self.replica_ns), sum(self.replica_ns)

    @property
    def energy(self) -> int:
        most, whole = self.value
        return _MOST_WEIGHT * len(self.groups) * most + whole

    def time_of(self, group: Sequence[int]) -> int:
        """About how long a good order of these cuts takes that has the cheapest first and the next one last."""
        if not group:
            return 0
        shapes = [self._shape(self.cuts[m]) for m in group]
        by_time = sorted((int(self.times.total_ns[shape]), shape) for shape in shapes)
        first, last = by_time[0][1], by_time[min(1, len(by_time) - 1)][1]
        busy = self.times.head_ns[first] + self.times.work_ns[shapes].sum(axis=0) + self.times.tail_ns[last]
        return int(busy.max()) + _LARGEST * by_time[-1][0] // len(busy)

    def _shape(self, cut: Range) -> int:
        rows = cut[1] - cut[0]
        return -1 if rows > self.shapes.shape[1] else int(self.shapes[cut[1] - 1, rows - 1])

    def _next(self) -> int:
        self.state, number = splitmix64(self.state)
        return number

    def _move(self) -> bool:
        replicas = len(self.groups)
        d = self._next() % replicas
        if self._next() % 2 and max(self.replica_ns) > self.replica_ns[d]:
            d = self.replica_ns.index(max(self.replica_ns))
        possible = _MOVES if replicas > 1 else _MOVES[:-2]
        move, a, b = possible[self._next() % len(possible)], self._next(), self._next()
        own = self.groups[d]
        if not own:
            return False
        i = a % len(own)
        if move == _SHIFT:
            return self._shift(own[i], b)
        if move == _DIVIDE:
            return self._divide(d, own[i], b)
        return self._hand_over(d, i, b, exchange=move == _EXCHANGE)

    def _hand_over(self, d: int, i: int, b: int, *, exchange: bool) -> bool:
        """Replica d gives a cut to another one, or exchanges it for one of the other's."""
        other = self._next() % (len(self.groups) - 1)
        other += other >= d
        own, theirs = self.groups[d], self.groups[other]
        if not theirs if exchange else self.equal_counts or len(own) == 1:
            return False
        self.touched = [d, other]
        if exchange:
            j = b % len(theirs)
            own[i], theirs[j] = theirs[j], own[i]
        else:
            theirs.append(own.pop(i))
        return True

    def _shift(self, m: int, b: int) -> bool:
        """The boundary between a cut and a neighbour moves by some items; a cut that loses all of them is gone."""
        at_end, grows, b = bool(b & 1), bool(b & 2), b >> 2
        boundary = self.cuts[m][1] if at_end else self.cuts[m][0]
        if boundary in (0, len(self.shapes)):
            return False
        low = next(k for k, cut in enumerate(self.cuts) if cut[1] == boundary)
        high = next(k for k, cut in enumerate(self.cuts) if cut[0] == boundary)
        giver, taker = (high, low) if grows == at_end else (low, high)
        items = self.cuts[giver][1] - self.cuts[giver][0]
        by = min(items, 1 + (b >> 3) % (1 << b % 6))
        owner = {k: d for d, group in enumerate(self.groups) for k in group}
        group = self.groups[owner[giver]]
        if by == items and (self.equal_counts or len(group) == 1):
            return False
        self.touched = list({owner[low], owner[high]})
        moved = boundary + by if giver == high else boundary - by
        self.cuts[low], self.cuts[high] = (self.cuts[low][0], moved), (moved, self.cuts[high][1])
        if by == items:
            group.remove(giver)
            self.cuts[giver] = (-1, -1)
            return self._shape(self.cuts[taker]) >= 0
        return self._shape(self.cuts[low]) >= 0 and self._shape(self.cuts[high]) >= 0

    def _divide(self, d: int, m: int, b: int) -> bool:
        """A cut becomes two."""
        first, end = self.cuts[m]
        if end - first < 2 or self.equal_counts:
            return False
        fresh = next((k for k, cut in enumerate(self.cuts) if cut[0] < 0), len(self.cuts))
        if fresh == len(self.cuts):
            self.cuts.append((-1, -1))
        self.touched = [d]
        at = first + 1 + b % (end - first - 1)
        self.cuts[m], self.cuts[fresh] = (first, at), (at, end)
        self.groups[d].append(fresh)
        return self._shape(self.cuts[m]) >= 0 and self._shape(self.cuts[fresh]) >= 0
