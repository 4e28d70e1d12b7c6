"""How the peers split a global batch, for comparisons beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, MicroBatch, Recompute, SampleLength, round_up
from dynapipe_ext.costs.model import PricesShapes
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.balance import assign_replicas, karmarkar_karp
from dynapipe_ext.partitioning.packing import MicroBatchEvaluate, RowRule, best_fit, document_costs, pack
from dynapipe_ext.partitioning.padded import Caps, SortOrder, ordered, price_cuts


def check_enough(num_samples: int, dp: int) -> None:
    """Refuse a batch of fewer samples than replicas: under equal counts no replica may be empty."""
    if num_samples < dp:
        raise PlanError(
            f"{num_samples} samples cannot feed {dp} replicas of equal counts: leave a short last batch out"
            ' (drop_last), enlarge the global batch or let counts differ (replica_counts = "free")'
        )


Replicas = list[list[MicroBatch]]

DYNAPIPE_THINNING_NS = 5_000_000  # DynaPipe tries one bound on the micro-batch time in every 5 ms


def _check(samples: Sequence[SampleLength], dp: int, *, equal_counts: bool, decoder_only: bool = False) -> None:
    """A batch of fewer samples than replicas leaves some of them empty, unless their counts must be equal."""
    if dp < 1:
        raise PlanError(f"dp is {dp} but must be at least 1")
    if not samples:
        raise PlanError("the batch has no samples: give at least one")
    if equal_counts:
        check_enough(len(samples), dp)
    if decoder_only and any(s.decoder for s in samples):
        sample = next(s for s in samples if s.decoder)
        raise PlanError(
            f"sample {sample.index} has a decoder side of {sample.decoder} positions, but this rule is for decoder-only"
            " models: use the rule dynapipe"
        )


def pad_to_batch_max(
    samples: Sequence[SampleLength],
    *,
    dp: int,
    rows_per_micro_batch: int | None = None,
    max_tokens: int | None = None,
    pad_multiple: int = 1,
    recompute: Recompute = "none",
    equal_counts: bool = False,
) -> Replicas:
    """Every row padded to the longest sample of the global batch; equal row counts, in order, dealt to the replicas.

    Give `rows_per_micro_batch`, of which fewer are taken where the batch would not reach all replicas; or `max_tokens`
    for as many rows as fit: unless counts are equal, the micro-batches are then a function of the samples alone,
    whatever `dp` is. With fewer micro-batches than replicas the last replicas are empty. Under `equal_counts` row
    counts differ by one where the batch does not divide. Decoder-only.

    Errors: PlanError for a longest sample above `max_tokens`, and under `equal_counts` for too few samples.
    """
    _check(samples, dp, equal_counts=equal_counts, decoder_only=True)
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
    if equal_counts:
        count = round_up(-(-len(samples) // rows), dp)
        if count > len(samples):
            raise PlanError(
                f"{len(samples)} samples cannot make {count} micro-batches of at most {rows} rows, the next multiple of"
                f" {dp} replicas of equal counts: allow more rows, enlarge the global batch or let counts differ"
            )
        bounds = _even_bounds(len(samples), count)
    else:
        if rows_per_micro_batch is not None:
            rows = max(1, min(rows, len(samples) // dp))
        bounds = [*range(0, len(samples), rows), len(samples)]
    micro_batches = [
        MicroBatch(tuple(samples[a:b]), "padded", recompute, pad_multiple=pad_multiple, min_len=row_len)
        for a, b in pairwise(bounds)
    ]
    return [micro_batches[rank::dp] for rank in range(dp)]


def _even_bounds(num_items: int, num_parts: int) -> list[int]:
    """Ends of contiguous parts whose sizes differ by one at most, from 0.

    >>> _even_bounds(7, 3)
    [0, 2, 4, 7]
    """
    return [num_items * part // num_parts for part in range(num_parts + 1)]


def fixed_rows(
    samples: Sequence[SampleLength],
    *,
    row_len: int,
    dp: int,
    recompute: Recompute = "none",
    pad_multiple: int = 1,
    equal_counts: bool = False,
) -> Replicas:
    """Megatron's GPT dataset rule: samples end to end in order, cut at every `row_len` positions, attention over rows.

    The last row is padded. A sample that a row's end cuts becomes pieces (`SampleLength.start`), each with the targets
    among its positions: a sample's targets are its last positions. A batch of fewer rows than replicas leaves the last
    replicas empty. Under `equal_counts` rows are filled less, all alike, so that their number is the next multiple of
    `dp`. Decoder-only.

    Errors: PlanError under `equal_counts` for fewer samples than replicas or too few positions.
    """
    if row_len < 1:
        raise PlanError(f"row_len is {row_len} but must be at least 1")
    if row_len % pad_multiple:
        raise PlanError(f"row_len {row_len} is not a multiple of pad_multiple {pad_multiple}: round it")
    _check(samples, dp, equal_counts=equal_counts, decoder_only=True)
    positions = sum(s.encoder for s in samples)
    bounds = [*range(0, positions, row_len), positions]
    if equal_counts:
        count = round_up(len(bounds) - 1, dp)
        if count > positions:
            raise PlanError(
                f"{positions} positions cannot fill {count} rows, the next multiple of {dp} replicas of equal counts:"
                " raise row_len, enlarge the global batch or let counts differ"
            )
        bounds = _even_bounds(positions, count)
    micro_batches = [
        MicroBatch(tuple(row), "packed", recompute, "row", pad_multiple=pad_multiple, min_len=row_len)
        for row in _cut(samples, [b - a for a, b in pairwise(bounds)])
    ]
    return [micro_batches[rank::dp] for rank in range(dp)]


def _cut(samples: Sequence[SampleLength], row_lens: Sequence[int]) -> list[list[SampleLength]]:
    """Samples end to end as rows of these numbers of positions, cut where a row ends."""
    rows: list[list[SampleLength]] = [[]]
    room = row_lens[0]
    for sample in samples:
        done = 0
        while done < sample.encoder:
            if room == 0:
                room = row_lens[len(rows)]
                rows.append([])
            length = min(room, sample.encoder - done)
            rows[-1].append(piece(sample, done, length))
            done, room = done + length, room - length
    return rows


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
    """Pack documents, which attend within themselves, into rows by best fit, and balance the rows over the replicas.

    Documents go longest first into the fullest row with room (best-fit decreasing). If that leaves fewer rows than
    replicas (or, under `equal_counts`, a number that does not divide), the documents are spread over the next number
    that does, or else packed into the one before. With fewer samples than replicas, each has a row and the last
    replicas are empty. A replica's rows come in the order in which they were opened.

    Errors: PlanError for a sample longer than a row, by name; under `equal_counts` for fewer samples than replicas, and
    where no such number of rows holds the batch.
    """
    _check(samples, dp, equal_counts=equal_counts)
    rule = RowRule(max_tokens=max_tokens, pad_multiple=pad_multiple, recompute=recompute)
    rule.check(samples)
    rows = best_fit(samples, rule.room)
    next_count = round_up(len(rows), dp)
    if equal_counts and len(rows) != next_count:
        counts = [next_count, next_count - dp] if next_count > dp else [next_count]
        rows = _spread(samples, evaluate, rule, counts, dp)
    elif len(rows) < dp:
        rows = _spread(samples, evaluate, rule, [min(dp, len(samples))], dp)
    micro_batches = [rule.row(row) for row in rows]
    time_ns, _ = evaluate(micro_batches)
    busy = min(dp, len(rows))
    shares = assign_replicas([int(t) for t in time_ns], busy, equal_counts=equal_counts)
    return [[micro_batches[i] for i in share] for share in shares] + [[] for _ in range(dp - busy)]


def list_row_lengths(longest: int, tokens: int, *, num_rows: int, pad_multiple: int = 1) -> list[int]:
    """List the row lengths among which packing is at its best: from the longest sample's to twice that, where any two
    samples share a row, and on while `tokens` still fill `num_rows` rows, one for each rank of each replica.

    >>> list_row_lengths(2048, 65_536, num_rows=8)
    [2048, 2560, 3072, 4096, 6144, 8192]
    >>> list_row_lengths(100, 270, num_rows=8, pad_multiple=8)
    [104, 136, 160, 208]
    """
    shortest = round_up(longest, pad_multiple)
    lengths = [shortest]
    for quarters in chain((5,), *((6 << i, 8 << i) for i in range(40))):
        length = round_up(shortest * quarters // 4, pad_multiple)
        if quarters > 8 and length * num_rows > tokens:
            break
        lengths.append(length)
    return list(dict.fromkeys(lengths))


def with_short_ends(replicas: Replicas, evaluate: MicroBatchEvaluate) -> Replicas:
    """Order each replica's micro-batches so that the cheapest come first and last: a pipeline then fills and drains in
    the least time, as verl orders them."""
    ordered: Replicas = []
    for micro_batches in replicas:
        time_ns = evaluate(micro_batches)[0].tolist() if micro_batches else []
        falling = sorted(range(len(micro_batches)), key=lambda m: (-time_ns[m], m))
        ordered.append([micro_batches[m] for m in (*falling[::2][::-1], *falling[1::2])])
    return ordered


def _spread(
    samples: Sequence[SampleLength], evaluate: MicroBatchEvaluate, rule: RowRule, counts: Sequence[int], dp: int
) -> list[list[SampleLength]]:
    """Balanced rows, of the first of `counts` that holds the samples."""
    weights = document_costs(samples, evaluate, rule)
    for count in counts:
        rows = pack(samples, weights, count, rule.room)
        if rows is not None:
            return rows
    raise PlanError(
        f"{len(samples)} samples do not spread over {' or '.join(map(str, counts))} rows of {rule.room} positions for"
        f" {dp} replicas: enlarge the global batch, raise max_tokens or let counts differ"
    )


def dynapipe_rule(
    samples: Sequence[SampleLength],
    costs: PricesShapes,
    kinds: Sequence[Recompute],
    *,
    pp: int,
    dp: int,
    max_bytes: int | None = None,
    pad_multiple: int = 1,
    thinning_ns: int = DYNAPIPE_THINNING_NS,
    equal_counts: bool = False,
) -> Replicas:
    """Split as DynaPipe does (arXiv 2311.10418, sec. 4): sorted samples, contiguous cuts, balanced replicas.

    The cuts minimise (pp - 1) max(t) + sum(t) / dp for bounds on t thinned to one in `thinning_ns`. DynaPipe uses one
    recomputation mode per plan: the first of none, selective, full (of `kinds`) that has a feasible split. Replicas are
    balanced by t with the largest differencing method (Karmarkar and Karp 1982). To charge the LM head to every stage
    as DynaPipe does, give costs whose table has lm_head "every".
    Three changes are in DynaPipe's favour. Of the bounds in an interval the largest stays, so that small models remain
    feasible. A split of fewer micro-batches than replicas is cut again. Encoder-decoder samples take the better of two
    orders, in place of tours of a travelling salesman.
    With fewer samples than replicas some replicas are empty. Under `equal_counts` that is an error, the split has a
    multiple of `dp` micro-batches, and the replicas are balanced at equal counts.
    """
    _check(samples, dp, equal_counts=equal_counts)
    orders: tuple[SortOrder, ...] = ("sorted", "classes") if any(s.decoder for s in samples) else ("sorted",)
    caps, busy = Caps(max_bytes=max_bytes, pad_multiple=pad_multiple), min(dp, len(samples))
    refusal = PlanError(f"no recomputation mode of {kinds} is one of DynaPipe's: give one of {LAYER_RECOMPUTES}")
    for kind in LAYER_RECOMPUTES:
        if kind not in kinds:
            continue
        try:
            splits = [
                _optimal_ranges(
                    ordered(samples, order), costs, kind, caps, pp=pp, dp=busy, equal_counts=equal_counts,
                    thinning_ns=thinning_ns,
                )
                for order in orders
            ]  # fmt: skip
        except PlanError as error:
            refusal = error
            continue
        micro_batches, times = min(splits, key=lambda split: sum(split[1]) + busy * (pp - 1) * max(split[1]))
        shares = assign_replicas(times, dp, equal_counts=True) if equal_counts else karmarkar_karp(times, dp)
        return [[micro_batches[i] for i in share] for share in shares]
    raise refusal


def _optimal_ranges(
    order: Sequence[SampleLength],
    costs: PricesShapes,
    kind: Recompute,
    caps: Caps,
    *,
    pp: int,
    dp: int,
    equal_counts: bool,
    thinning_ns: int,
) -> tuple[list[MicroBatch], list[int]]:
    """Return DynaPipe's cuts of ordered samples as micro-batches, with their bottleneck times."""
    priced = price_cuts(
        order, costs, [kind], caps, weight=dp * (pp - 1), equal_counts=equal_counts, min_in_flight=pp, is_exact=True
    )
    cuts = priced.first_cuts(pp=pp, dp=dp, min_in_flight=pp, equal_counts=equal_counts, thinning_ns=thinning_ns)
    return [priced.micro_batch(cut) for cut in cuts], priced.times(cuts)
