"""The peers' ways to make micro-batches, for comparison: each returns the micro-batches of every replica."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch, Recompute
from dynapipe_ext.planning.balance import assign_replicas
from dynapipe_ext.planning.packing import MicroBatchEvaluate, RowRule, document_costs, pack
from dynapipe_ext.planning.padded import ShapeEvaluate, split_padded

Replicas = list[list[MicroBatch]]

DYNAPIPE_THINNING_NS = 5_000_000  # DynaPipe tries one bound on the micro-batch time in every 5 ms
_RECOMPUTE_ORDER: tuple[Recompute, ...] = ("none", "selective", "full")


def _check(samples: Sequence[SampleLength], dp: int, *, decoder_only: bool = False) -> None:
    if dp < 1:
        raise PlanError(f"dp is {dp} but must be at least 1")
    if len(samples) < dp:
        raise PlanError(f"{len(samples)} samples cannot feed {dp} replicas: enlarge the global batch or lower dp")
    if decoder_only and any(s.decoder for s in samples):
        sample = next(s for s in samples if s.decoder)
        raise PlanError(
            f"sample {sample.index} has a decoder side of {sample.decoder} positions, but this rule is for decoder-only"
            " models: use split_padded or dynapipe_rule"
        )


def pad_to_batch_max(
    samples: Sequence[SampleLength],
    *,
    dp: int,
    rows_per_micro_batch: int | None = None,
    max_tokens: int | None = None,
    pad_multiple: int = 1,
    recompute: Recompute = "none",
) -> Replicas:
    """Every row padded to the longest sample of the global batch; equal row counts, in order, dealt to the replicas.

    Give `rows_per_micro_batch`, or `max_tokens` for as many rows as fit. Rows are fewer where the batch would not reach
    all replicas. Decoder-only. Raises PlanError for fewer samples than replicas or a longest sample above `max_tokens`.
    """
    _check(samples, dp, decoder_only=True)
    if (rows_per_micro_batch is None) == (max_tokens is None):
        raise PlanError(f"give one of rows_per_micro_batch {rows_per_micro_batch} and max_tokens {max_tokens}")
    longest = max(samples, key=lambda s: s.encoder)
    row_len = MicroBatch((longest,), pad_multiple=pad_multiple).encoder_len
    rows = rows_per_micro_batch if rows_per_micro_batch is not None else (max_tokens or 0) // row_len
    if rows < 1:
        raise PlanError(
            f"a micro-batch of {rows} rows: sample {longest.index} makes rows of {row_len} positions, max_tokens is"
            f" {max_tokens} and rows_per_micro_batch {rows_per_micro_batch}: raise them or truncate the sample"
        )
    rows = min(rows, len(samples) // dp)
    micro_batches = [
        MicroBatch(tuple(samples[i : i + rows]), "padded", recompute, pad_multiple=pad_multiple, min_len=row_len)
        for i in range(0, len(samples), rows)
    ]
    return [micro_batches[rank::dp] for rank in range(dp)]


def fixed_rows(
    samples: Sequence[SampleLength], *, row_len: int, dp: int, recompute: Recompute = "none", pad_multiple: int = 1
) -> Replicas:
    """Megatron's GPT dataset rule: samples end to end in order, cut at every `row_len` positions, attention over rows.

    The last row is padded. A cut sample becomes pieces (`SampleLength.start`) whose targets are those of its positions:
    a sample's targets are its last ones. Decoder-only. Raises PlanError if the batch has fewer rows than replicas.
    """
    if row_len < 1:
        raise PlanError(f"row_len is {row_len} but must be at least 1")
    if row_len % pad_multiple:
        raise PlanError(f"row_len {row_len} is not a multiple of pad_multiple {pad_multiple}: round it")
    _check(samples, 1, decoder_only=True)
    rows: list[list[SampleLength]] = [[]]
    room = row_len
    for sample in samples:
        done = 0
        while done < sample.encoder:
            if room == 0:
                rows.append([])
                room = row_len
            length = min(room, sample.encoder - done)
            rows[-1].append(piece(sample, done, length))
            done, room = done + length, room - length
    if len(rows) < dp:
        raise PlanError(
            f"{sum(s.encoder for s in samples)} positions make {len(rows)} rows of {row_len}, fewer than {dp} replicas:"
            " lower row_len or enlarge the global batch"
        )
    micro_batches = [
        MicroBatch(tuple(row), "packed", recompute, "row", pad_multiple=pad_multiple, min_len=row_len) for row in rows
    ]
    return [micro_batches[rank::dp] for rank in range(dp)]


def piece(sample: SampleLength, offset: int, length: int) -> SampleLength:
    """Positions offset .. offset + length of a decoder-only sample, with the targets that lie in them.

    >>> [piece(SampleLength(7, 10, target=4), at, 5).target for at in (0, 3, 5)]
    [0, 2, 4]
    """
    first_target = sample.encoder - sample.target
    target = max(0, offset + length - max(offset, first_target))
    return SampleLength(sample.index, length, 0, target, sample.start + offset)


def packed_documents(
    samples: Sequence[SampleLength],
    evaluate: MicroBatchEvaluate,
    *,
    max_tokens: int,
    dp: int,
    pad_multiple: int = 1,
    recompute: Recompute = "none",
    equal_counts: bool = False,
) -> Replicas:
    """Greedy packing with document attention, rows balanced over the replicas by cost.

    Documents, longest first, go to the first row with room (first-fit decreasing); if that leaves fewer rows than
    replicas (or, under `equal_counts`, a number that does not divide), the documents are spread over the next number
    that does. Raises PlanError for a sample longer than a row, by name, or fewer samples than replicas.
    """
    _check(samples, dp)
    rule = RowRule(max_tokens=max_tokens, pad_multiple=pad_multiple, recompute=recompute)
    rule.check(samples)
    rows = _first_fit(sorted(samples, key=lambda s: (-s.tokens, s.index, s.start)), rule.room)
    wanted = -(-len(rows) // dp) * dp
    if len(rows) < dp or (equal_counts and len(rows) != wanted):
        weights = document_costs(samples, evaluate, rule)
        spread = pack(samples, weights, wanted, rule.room)
        if spread is None:
            raise PlanError(
                f"{len(samples)} samples do not spread over {wanted} rows of {rule.room} positions, a multiple of"
                f" {dp} replicas: enlarge the global batch"
            )
        rows = spread
    micro_batches = [rule.row(row) for row in rows]
    time_ns, _ = evaluate(micro_batches)
    shares = assign_replicas([int(t) for t in time_ns], dp, equal_counts=equal_counts)
    return [[micro_batches[i] for i in share] for share in shares]


def _first_fit(samples: Sequence[SampleLength], room: int) -> list[list[SampleLength]]:
    rows: list[list[SampleLength]] = []
    free: list[tuple[int, int]] = []
    for sample in samples:
        for index, (encoder, decoder) in enumerate(free):
            if sample.encoder <= encoder and sample.decoder <= decoder:
                rows[index].append(sample)
                free[index] = (encoder - sample.encoder, decoder - sample.decoder)
                break
        else:
            rows.append([sample])
            free.append((room - sample.encoder, room - sample.decoder))
    return rows


def dynapipe_rule(
    samples: Sequence[SampleLength],
    evaluate: ShapeEvaluate | Mapping[Recompute, ShapeEvaluate],
    *,
    pp: int,
    dp: int,
    max_bytes: int | None = None,
    pad_multiple: int = 1,
    recompute: Recompute = "none",
    thinning_ns: int = DYNAPIPE_THINNING_NS,
) -> Replicas:
    """DynaPipe's micro-batches (arXiv 2311.10418, sec. 4): sorted samples, contiguous cuts, balanced replicas.

    The cuts minimise (pp - 1) max(t) + sum(t) / dp for bounds on t thinned to one in `thinning_ns`; its one recompute
    type per plan is the first of none, selective, full (of those given an `evaluate`) that has a feasible split.
    Replicas are balanced by t with the largest differencing method (Karmarkar and Karp 1982). Three changes, in its
    favour: the bound kept of each interval is its largest, so that small models stay feasible; a split of fewer micro-
    batches than replicas is cut again; encoder-decoder samples take the better of two orders, for its tours of a
    travelling salesman. To charge the LM head to every stage as it does, give an `evaluate` whose cost table has
    lm_head "every".
    """
    _check(samples, dp)
    choices = evaluate if isinstance(evaluate, Mapping) else {recompute: evaluate}
    micro_batches: list[MicroBatch] = []
    kinds = [kind for kind in _RECOMPUTE_ORDER if kind in choices]
    if not kinds:
        raise PlanError("dynapipe_rule was given no recomputation type to choose from: give at least one evaluate")
    for kind in kinds:
        try:
            micro_batches = split_padded(
                samples,
                {kind: choices[kind]},
                pp=pp,
                dp=dp,
                max_bytes=max_bytes,
                pad_multiple=pad_multiple,
                thinning_ns=thinning_ns,
            )
            break
        except PlanError:
            if kind == kinds[-1]:
                raise
    times = [_time_ns(choices[m.recompute], m) for m in micro_batches]
    return [[micro_batches[i] for i in share] for share in karmarkar_karp(times, dp)]


def _time_ns(evaluate: ShapeEvaluate, m: MicroBatch) -> int:
    time_ns, _ = evaluate(np.array([m.rows]), np.array([m.encoder_len]), np.array([m.decoder_len]))
    return int(time_ns[0])


def karmarkar_karp(costs: Sequence[int], num_groups: int) -> list[list[int]]:
    """Indices in `num_groups` groups by the largest differencing method; none is empty given enough items.

    Partial partitions are merged, the two of largest spread first, the heaviest group of one with the lightest of the
    other.

    >>> karmarkar_karp([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    # Entries: (-spread, tie-break, [(load, items), …] heaviest first).
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-cost, index, [(cost, [index])] + [(0, [])] * (num_groups - 1)) for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    number = len(costs)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = sorted(
            ((x + y, xs + ys) for (x, xs), (y, ys) in zip(a, reversed(b), strict=True)),
            key=lambda group: (-group[0], group[1]),
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_groups)]
