"""Starts of the search: splits of a batch into micro-batches and replicas, by our own and by published policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count, islice, pairwise, product
from typing import Any, TypeVar

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength, round_up, sample_pieces
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, IntArray, MicroBatchCosts, find_bottleneck
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.balance import assign_replicas
from dynapipe_ext.partitioning.packing import (
    GRADES,
    MOST_TRIES,
    MicroBatchEvaluate,
    RowPackingPolicy,
    RowPackings,
    make_evaluate,
)
from dynapipe_ext.partitioning.padded import (
    Cut,
    MicroBatchLimits,
    RangeCosts,
    SortOrder,
    price_cuts,
    sort_samples,
)
from dynapipe_ext.partitioning.pieces import PieceChoice, list_piece_choices
from dynapipe_ext.partitioning.rules import (
    cut_fixed_rows,
    list_row_lengths,
    pack_documents,
    pad_to_batch_max,
    split_as_dynapipe,
    with_short_ends,
)
from dynapipe_ext.schedules.evaluation.simulate import SharedCores
from dynapipe_ext.schedules.search.levelling import balance_loads
from dynapipe_ext.schedules.search.optimizer import TRIAL, Start, has_long_replicas
from dynapipe_ext.schedules.search.regrouping import exchange_samples
from dynapipe_ext.settings.plan_rules import PlanRules

Replicas = list[list[MicroBatch]]
Made = TypeVar("Made")

_MOVES_A_TRY = 1000  # One number of packed rows near the best is tried per this many moves of the effort.
_LEVELLING = 50  # moves per cut, whatever the effort, so that searches begin with the same cuts
_MOST_ROWS = 100  # A short search begins with packings of at most this many rows per replica.


@dataclass(frozen=True, slots=True)
class Proposal:
    """A start of the search, and `micro_batch`, which makes the micro-batch of a cut in its result. `is_fixed`: the
    search keeps samples together, so cut i is micro-batch i."""

    start: Start
    micro_batch: Callable[[Cut], MicroBatch]
    is_fixed: bool = False  # cut i is micro-batch i, and priced as such

    def make_replicas(self, cuts: Sequence[Sequence[Cut]]) -> Replicas:
        return [[self.micro_batch(cut) for cut in replica] for replica in cuts]

    def pick_costs(self, cuts: Sequence[Sequence[Cut]]) -> tuple[MicroBatchCosts, ...] | None:
        """Return each replica's costs of `cuts`, taken from the start; None unless it `is_fixed` and has no pieces."""
        start = self.start
        if not self.is_fixed or start.sample_pieces:
            return None
        columns = (np.array(replica, np.int64).reshape(-1, 3).T for replica in cuts)
        return tuple(MicroBatchCosts.choose(start.kind_costs, kind, first) for first, _, kind in columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProblem:
    """The problem of planning a step at one context-parallel degree. Its methods make the starts of a search.

    `rules` are those for full rows, of which each rank of a context-parallel group has a slice. `limit_bytes`: of each
    rank. `kinds`: the recomputation modes that may be chosen. If ranks share `cores`, a bubble costs nothing, so cuts
    are judged by their work, as in a pipeline of one rank. If samples are fewer than replicas, the last replicas are
    empty, unless counts must be equal. Methods raise PlanError if all that they could propose breaks the limits.
    """

    topology: Topology
    costs: CostModel
    limit_bytes: int
    rules: PlanRules
    kinds: tuple[Recompute, ...]
    seed: int = 0
    cores: SharedCores | None = None
    _prices: dict[int, tuple[Sequence[MicroBatch], MicroBatchCosts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # of rows, by the identity of their list

    @property
    def forward_only(self) -> bool:
        return self.costs.facts.forwards_alone

    @property
    def depth(self) -> int:
        """Number of pipeline ranks that a cut must fill and drain: 1 if ranks share cores."""
        return self.topology.pp if self.cores is None else 1

    def _price(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        """Price micro-batches of whole samples, once for each list."""
        key = id(micro_batches)
        if key not in self._prices:
            self._prices[key] = micro_batches, self.costs.evaluate(micro_batches)
        return self._prices[key][1]

    def _price_again(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        """Price micro-batches, from the prices of the same rows in another order if these are known."""
        for rows, priced in self._prices.values():
            if len(rows) != len(micro_batches):
                continue
            places = dict(zip(map(id, rows), count(), strict=False))
            if places.keys() == {*map(id, micro_batches)}:
                return priced.take([places[id(m)] for m in micro_batches])
        return self.costs.evaluate(micro_batches)

    def propose_cuts(self, samples: list[SampleLength], step: int) -> list[Proposal]:
        """Return starts of padded micro-batches, made of sorted samples, which the search may cut anywhere."""
        proposed = []
        in_flight = self._list_in_flight(*self._list_held(pairs=any(s.decoder for s in samples)))
        priced, firsts = self._price_first_cuts(samples, in_flight)
        for cuts in firsts:
            start = Start(
                kind_costs=priced.kind_costs,
                shapes=priced.shapes,
                cuts=tuple(cuts),
                groups=tuple(map(tuple, self._assign(priced.compute_times(cuts), samples, step))),
            )
            proposed.append(Proposal(start, priced.make_micro_batch))
        if has_long_replicas(self.topology.dp, len(firsts[-1])) and self.cores is None:
            proposed += self._balance(priced, proposed[-1].start, in_flight[-1], step)
        if any(s.decoder for s in samples):
            with suppress(PlanError):  # shapes far from the known ones may be rejected
                made = make_possible(partial(exchange_samples, priced, cuts) for cuts in firsts)
                proposed += self.propose_fixed([self._assign_parts(parts, samples, step) for parts in made])
        return proposed

    def _balance(self, priced: RangeCosts, start: Start, min_in_flight: int, step: int) -> list[Proposal]:
        """Return the start with more even cuts and replicas, each cut under the fastest kind of which `min_in_flight`
        can be held; none if not all cuts can."""
        time_ns, kinds = priced.pick_fastest(min_in_flight)
        shapes = np.where(np.append(time_ns < INFEASIBLE, False)[priced.shapes], priced.shapes, -1).astype(np.int32)
        if any(shapes[cut.end - 1, cut.end - cut.first - 1] < 0 for cut in start.cuts):
            return []
        costs = MicroBatchCosts.choose(priced.kind_costs, kinds, np.arange(len(kinds)))
        cuts, groups = balance_loads(
            costs,
            self.topology.stage_ranks,
            shapes,
            [(cut.first, cut.end) for cut in start.cuts],
            start.groups,
            split=self.rules.split_backward,
            moves=_LEVELLING * len(start.cuts),
            seed=step,
            equal_counts=self.rules.equal_counts,
        )
        even = tuple(Cut(a, b, int(kinds[shapes[b - 1, b - a - 1]])) for a, b in cuts)
        return [Proposal(replace(start, cuts=even, groups=tuple(map(tuple, groups))), priced.make_micro_batch)]

    def list_splits(self, samples: list[SampleLength], step: int) -> list[Replicas]:
        """List splits into fixed micro-batches, for schedules that hold few of them in flight or many."""
        stages = self.topology.num_stages
        if self.rules.split_policy != "dynapipe-ext":
            return list(make_possible(self._follow_policy(samples)))
        if self.rules.layout == "padded":
            held = self._list_in_flight(stages, (stages + 1) // 2, 2 * stages, 8 * stages, 32 * stages)
            priced, firsts = self._price_first_cuts(samples, held)
            micro_batches = [tuple(map(priced.make_micro_batch, cuts)) for cuts in firsts]
        else:
            held = self._list_in_flight(1, (stages + 1) // 2, stages)
            dp = min(self.topology.num_replicas, len(samples))
            packings = cache(partial(self._make_packings, samples))  # what is held changes what fits, not what is tried
            shortest, *longer = self._list_row_limits(samples)
            tried = [partial(self._pack_rows, packings, in_flight, dp, [shortest]) for in_flight in held]
            tried += [partial(self._pack_rows, packings, 1, dp, longer)] if longer else []
            micro_batches = _drop_repeats(rows for finalists in make_possible(tried) for rows in finalists)
        return [self._assign_parts(parts, samples, step) for parts in micro_batches]

    def list_piece_choices(self, samples: list[SampleLength], sizes: Sequence[int]) -> list[PieceChoice]:
        """List the ways to cut long samples into pieces of about `sizes` positions."""
        price = make_evaluate(self.costs)
        return list_piece_choices(
            samples, price, sizes, dp=self.topology.num_replicas, depth=self.depth, recompute=self.kinds[0]
        )

    def list_piece_splits(
        self, samples: list[SampleLength], step: int, choices: Sequence[PieceChoice]
    ) -> list[Replicas]:
        """List a split for each of `choices`: long samples in pieces, short samples in packed rows of about the same
        size. All pieces of a sample are on one replica."""
        price = make_evaluate(self.costs)
        rule = RowPackingPolicy(max_tokens=0, pad_multiple=self.rules.pad_multiple, recompute=self.kinds[0])
        made = make_possible(
            partial(choice.make_rows, samples, price, replace(rule, max_tokens=choice.tokens)) for choice in choices
        )
        return [self._assign_units(one, step) for one in dict.fromkeys(map(tuple, made))]

    def _assign_units(self, rows: Sequence[MicroBatch], step: int) -> Replicas:
        units = list(sample_pieces(rows))
        units += [(m,) for m in sorted(set(range(len(rows))) - {m for unit in units for m in unit})]
        time_ns: list[int] = find_bottleneck(self.costs.evaluate(rows))[0].tolist()
        groups = self._assign([sum(time_ns[m] for m in unit) for unit in units], units, step)
        return [[rows[m] for i in group for m in units[i]] for group in groups]

    def _list_held(self, *, pairs: bool) -> tuple[int, ...]:
        """List numbers of micro-batches in flight for which cuts are made: as many as ranks, and half of that. Of pairs
        also twice as many, as attention across the sides fills memory: longer micro-batches with more recomputation
        often take less. Under vocabulary parallelism as many as stages, as short ones hold few, and half as many again
        as ranks, as hops to parts of the vocabulary hold some."""
        pp = self.topology.pp
        usual = pp, (pp + 1) // 2
        if pairs:
            return 2 * pp, *usual
        return usual if self.topology.vocabulary == "whole" else (self.topology.num_stages, pp * 3 // 2, *usual)

    def _list_in_flight(self, *counts: int) -> list[int]:
        """List numbers of micro-batches in flight to split for; forward-only steps hold nothing: all are equal."""
        return [1] if self.forward_only else list(dict.fromkeys(counts))

    def find_bottleneck(self, costs: MicroBatchCosts, min_in_flight: int = 1) -> tuple[IntArray, IntArray]:
        return find_bottleneck(costs, min_in_flight, self.topology.stage_ranks)

    def _assign_parts(self, parts: Sequence[MicroBatch], samples: Sequence[SampleLength], step: int) -> Replicas:
        parts = _split_until(parts, min(self.topology.num_replicas, len(samples)))
        time_ns, _ = self.find_bottleneck(self._price(parts))
        return [[parts[i] for i in group] for group in self._assign(time_ns.tolist(), samples, step)]

    def propose_fixed(self, splits: Sequence[Replicas]) -> list[Proposal]:
        """Return a start for each split, which keeps its micro-batches. The search may change their recomputation, but
        under a published policy only to modes that the split has."""
        proposed = []
        for replicas in splits:
            micro_batches = [m for replica in replicas for m in replica]
            ends = np.cumsum([0] + [len(replica) for replica in replicas]).tolist()
            kinds = (
                self.kinds
                if self.rules.split_policy == "dynapipe-ext"
                else tuple({m.recompute: None for m in micro_batches})
            )
            like = self._price_again(micro_batches)
            start = Start.from_micro_batches(
                [self._price_under(kind, micro_batches, like) for kind in kinds],
                [range(a, b) for a, b in pairwise(ends)],
                [kinds.index(m.recompute) for m in micro_batches],
                sample_pieces(micro_batches),
            )
            proposed.append(Proposal(start, partial(_with_kind, micro_batches, kinds), is_fixed=True))
        return proposed

    def _price_first_cuts(
        self, samples: list[SampleLength], in_flight: Iterable[int]
    ) -> tuple[RangeCosts, list[list[Cut]]]:
        """Price the cuts of ordered samples, and make first cuts for pipelines that hold `in_flight` micro-batches (or
        one)."""
        dp = min(self.topology.num_replicas, len(samples))
        order: SortOrder = "classes" if any(s.decoder for s in samples) else "sorted"
        caps = MicroBatchLimits(
            max_bytes=self.limit_bytes, max_tokens=self.rules.max_tokens or None, pad_multiple=self.rules.pad_multiple
        )
        priced = price_cuts(
            sort_samples(samples, order),
            self.costs,
            self.kinds,
            caps,
            weight=self.topology.num_replicas * (self.depth - 1),
            equal_counts=self.rules.equal_counts,
            least_work=self.cores is not None,
            stage_ranks=self.topology.stage_ranks,
        )

        def cut(min_in_flight: int) -> list[Cut]:
            return priced.make_first_cuts(
                pp=self.depth, dp=dp, min_in_flight=min_in_flight, equal_counts=self.rules.equal_counts
            )

        try:
            firsts = list(make_possible(partial(cut, held) for held in in_flight))
        except PlanError:  # only what fits by itself is left
            firsts = [cut(1)]
        return priced, [cuts for i, cuts in enumerate(firsts) if cuts not in firsts[:i]]

    def _assign(self, times_ns: list[int], parts: Sequence[object], step: int) -> list[list[int]]:
        """Assign micro-batches to replicas, by index; as many replicas as there are parts (samples) have some."""
        busy = min(self.topology.num_replicas, len(parts))
        idle: list[list[int]] = [[] for _ in range(self.topology.num_replicas - busy)]
        return assign_replicas(times_ns, busy, equal_counts=self.rules.equal_counts, seed=step) + idle

    def _price_under(self, kind: Recompute, micro_batches: list[MicroBatch], like: MicroBatchCosts) -> MicroBatchCosts:
        """Return the costs of all micro-batches under one kind of recomputation; INFEASIBLE for one without a price."""
        if all(m.recompute == kind for m in micro_batches):
            return like
        recomputing = [_recompute(m, kind) for m in micro_batches]
        with suppress(PlanError):
            return self.costs.evaluate(recomputing)
        pieces = [m for m in micro_batches if m.attention == "carried" and m.samples[0].start]
        columns = []
        for m in recomputing:
            is_first = m.attention == "carried" and not m.samples[0].start  # it holds keys and values of later pieces
            later = [one for one in pieces if is_first and one.samples[0].index == m.samples[0].index]
            try:
                columns.append(self.costs.evaluate([m, *later]).take([0]))
            except PlanError:
                column = like.take([0])
                never = np.full_like(column.forward_ns, INFEASIBLE)
                columns.append(replace(column, forward_ns=never, backward_ns=never))
        return MicroBatchCosts.join(columns, like=like)

    def _list_row_limits(self, samples: list[SampleLength]) -> list[int]:
        """List how many positions packed rows may have. Without a limit from the user, longer rows, up to one for the
        whole batch, are tried as well: they pay on devices whose actions have large overheads."""
        longest, tokens = max(max(s.encoder, s.decoder) for s in samples), sum(s.tokens for s in samples)
        limits = [self.rules.max_tokens or max(4096, round_up(longest, self.rules.pad_multiple))]
        while not self.rules.max_tokens and self.cores is None and limits[-1] < tokens:
            limits.append(2 * limits[-1])
        return limits

    def _make_packings(self, samples: list[SampleLength], kind: Recompute, limit: int) -> RowPackings:
        rule = RowPackingPolicy(max_tokens=limit, pad_multiple=self.rules.pad_multiple, recompute=kind)
        return RowPackings.from_samples(samples, lambda rows: self.find_bottleneck(self._price(rows)), rule)

    def _pack_rows(
        self,
        packings: Callable[[Recompute, int], RowPackings],
        min_in_flight: int,
        dp: int,
        limits: Sequence[int],
    ) -> list[tuple[MicroBatch, ...]]:
        """List packings under the first kind of recomputation of which `min_in_flight` rows can be held. Rows are
        within the first limit, or within a later one as long as each is faster than the one before."""

        def evaluate(micro_batches: Sequence[MicroBatch]) -> tuple[IntArray, IntArray]:
            return self.find_bottleneck(self._price(micro_batches), min_in_flight)

        def list_finalists(kind: Recompute, limit: int) -> tuple[int, list[tuple[MicroBatch, ...]]]:
            finalists = packings(kind, limit).list_finalists(
                evaluate,
                pp=self.depth,
                dp=dp,
                max_bytes=self.limit_bytes,
                equal_counts=self.rules.equal_counts,
                is_split=self.rules.is_split,
                tries=max(1, min(MOST_TRIES, self.rules.effort // _MOVES_A_TRY)),
            )
            time_ns, _ = evaluate(finalists[0])
            return int(time_ns.sum()) + dp * (self.depth - 1) * int(time_ns.max()), finalists

        def pack(kind: Recompute) -> list[tuple[MicroBatch, ...]]:
            best, best_limit = list_finalists(kind, limits[0]), limits[0]
            for limit in limits[1:]:
                with suppress(PlanError):
                    if (longer := list_finalists(kind, limit))[0] < best[0]:
                        best, best_limit = longer, limit
                        continue
                break
            return self._add_graded(best[1], packings(kind, best_limit), evaluate, dp)

        return next(make_possible(partial(pack, kind) for kind in self.kinds))

    def _add_graded(
        self, finalists: list[tuple[MicroBatch, ...]], packings: RowPackings, evaluate: MicroBatchEvaluate, dp: int
    ) -> list[tuple[MicroBatch, ...]]:
        """List the finalists and graded rows: the longest that fit, and half as long. If trials would take all the
        effort, list the first of both, and more while all are few."""

        def list_fitting(step: float) -> Iterator[tuple[MicroBatch, ...]]:
            graded = (packings.with_grades(step, dp, room) for room in packings.list_graded_rooms())
            return (rows for rows in graded if rows and self._has_room(rows, evaluate, dp))

        if self.rules.effort > TRIAL:
            return [*finalists, *(rows for step in GRADES for rows in islice(list_fitting(step), 2))]

        def list_in_turn() -> Iterator[tuple[MicroBatch, ...]]:
            first, second = GRADES
            yield from islice(list_fitting(first), 1)
            yield finalists[0]
            yield from islice(list_fitting(second), 1)
            yield from finalists[1:]

        starts: list[tuple[MicroBatch, ...]] = []
        for rows in list_in_turn():
            starts.append(rows)
            if len(starts) > 1 and sum(map(len, starts)) > _MOST_ROWS * dp:
                break
        return starts

    def _has_room(self, rows: tuple[MicroBatch, ...], evaluate: MicroBatchEvaluate, dp: int) -> bool:
        """Return whether rows are enough, keep to equal counts and fit."""
        if len(rows) < dp or (self.rules.equal_counts and len(rows) % dp):
            return False
        try:
            return int(evaluate(rows)[1].max()) <= self.limit_bytes
        except PlanError:  # a row outside a measured grid
            return False

    def _follow_policy(self, samples: list[SampleLength]) -> Iterator[Callable[[], Replicas]]:
        """Yield makers of the splits of a published policy, at its best: of each size that it leaves open."""
        dp, multiple, max_tokens = self.topology.num_replicas, self.rules.pad_multiple, self.rules.max_tokens
        options: dict[str, Any] = {"dp": dp, "pad_multiple": multiple, "equal_counts": self.rules.equal_counts}
        longest = round_up(max(s.encoder for s in samples), multiple)
        room = max(round_up(max_tokens, multiple), round_up(max(s.decoder for s in samples), multiple), longest)
        match self.rules.split_policy:
            case "batch-max":
                pad = partial(pad_to_batch_max, samples, max_tokens=max_tokens or None, **options)
                for rows in (None,) if max_tokens else (1, 2, 4, 8, 16, 32):
                    for kind in self.kinds if rows in (None, 1) or rows <= self.limit_bytes // longest else ():
                        yield partial(pad, rows_per_micro_batch=rows, recompute=kind)
            case "fixed-rows":
                yield from (
                    partial(cut_fixed_rows, samples, row_len=room, recompute=kind, **options) for kind in self.kinds
                )
            case "packed-balanced":
                evaluate = make_evaluate(self.costs)
                tokens, num_rows = sum(max(s.encoder, s.decoder) for s in samples), dp * self.topology.pp
                lengths = list_row_lengths(room, tokens, num_rows=num_rows, pad_multiple=multiple)
                for row_len, kind in product([room] if max_tokens else lengths, self.kinds):
                    pack = partial(pack_documents, samples, evaluate, max_tokens=row_len, recompute=kind, **options)
                    yield (packed := cache(pack))
                    if self.rules.schedule != "adaptive":
                        yield partial(lambda packed: with_short_ends(packed(), evaluate), packed)
            case _:
                stages, limit = self.topology.num_stages, self.limit_bytes
                yield partial(split_as_dynapipe, samples, self.costs, self.kinds, pp=stages, max_bytes=limit, **options)


def make_possible(makers: Iterable[Callable[[], Made]]) -> Iterator[Made]:
    """Yield what the makers return, without those that raise PlanError; if all do, raises the first error."""
    refusals = []
    num_made = 0
    for make in makers:
        try:
            made = make()
        except PlanError as error:
            refusals.append(error)
            continue
        num_made += 1
        yield made
    if refusals and not num_made:
        raise refusals[0]


def _drop_repeats(packings: Iterable[tuple[MicroBatch, ...]]) -> list[tuple[MicroBatch, ...]]:
    """Return each packing once, in the order of the first. They are compared, as hashes take longer."""
    distinct: list[tuple[MicroBatch, ...]] = []
    for packing in packings:
        if not any(packing is other or packing == other for other in distinct):
            distinct.append(packing)
    return distinct


def _split_until(micro_batches: Sequence[MicroBatch], count: int) -> Sequence[MicroBatch]:
    """Cut the largest micro-batch of several samples in two until there are `count`; there are as many samples."""
    if len(micro_batches) >= count:
        return micro_batches
    parts = list(micro_batches)
    while len(parts) < count:
        several = [k for k, part in enumerate(parts) if len(part.samples) > 1]
        i = max(several, key=lambda k: (parts[k].rows, parts[k].padded_tokens, -k))
        half = len(parts[i].samples) // 2
        parts[i : i + 1] = [
            replace(parts[i], samples=parts[i].samples[:half]),
            replace(parts[i], samples=parts[i].samples[half:]),
        ]
    return parts


def _with_kind(micro_batches: Sequence[MicroBatch], kinds: Sequence[Recompute], cut: Cut) -> MicroBatch:
    return _recompute(micro_batches[cut.first], kinds[cut.kind])


def _recompute(micro_batch: MicroBatch, kind: Recompute) -> MicroBatch:
    return micro_batch if micro_batch.recompute == kind else micro_batch.with_recompute(kind)
