"""Published rules that split a global batch, for comparisons with our own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import attrgetter

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, MicroBatch, Recompute, SampleLength, round_up
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.balance import assign_replicas, karmarkar_karp
from dynapipe_ext.partitioning.packing import (
    MicroBatchEvaluate,
    RowPackingPolicy,
    compute_document_costs,
    pack,
    pack_best_fit,
    sort_by_weight,
)
from dynapipe_ext.partitioning.padded import MicroBatchLimits, SortOrder, price_cuts, sort_samples
from dynapipe_ext.partitioning.pieces import cut_piece


def check_enough(num_samples: int, dp: int) -> None:
    """Raise PlanError for fewer samples than replicas: under equal counts no replica may be empty."""
    if num_samples < dp:
        raise PlanError(
            f"{num_samples} samples cannot feed {dp} replicas of equal counts: leave a short last batch out"
            ' (drop_last), enlarge the global batch or let counts differ (replica_counts = "free")'
        )


Replicas = list[list[MicroBatch]]

DYNAPIPE_THINNING_NS = 5_000_000  # DynaPipe tries one bound on the micro-batch time in every 5 ms


def _check_decoder_only(samples: Sequence[SampleLength]) -> None:
    for sample in samples:
        if sample.decoder:
            raise PlanError(
                f"sample {sample.index} has a decoder side of {sample.decoder} positions, but this rule is for"
                " decoder-only models: use the rule dynapipe"
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
    """Return micro-batches with every row padded to the longest sample of the global batch, dealt to replicas in turn.

    All have `rows_per_micro_batch` rows, or fewer for the batch to reach all replicas; or as many as fit into
    `max_tokens`. Unless counts are equal, the micro-batches are then a function of the samples only, whatever `dp` is.
    Fewer micro-batches than replicas leave the last replicas empty. Under `equal_counts` numbers of rows differ by one
    if the batch does not divide. Decoder-only.

    Raises PlanError for a longest sample above `max_tokens`, and under `equal_counts` for too few samples.
    """
    _check_decoder_only(samples)
    longest = max(samples, key=attrgetter("encoder"))
    row_len = round_up(longest.encoder, pad_multiple)
    rows = rows_per_micro_batch or (max_tokens or 0) // row_len
    if rows < 1:
        raise PlanError(
            f"sample {longest.index} makes rows of {row_len} positions but a micro-batch has {max_tokens} (max_tokens):"
            " raise max_tokens or truncate the sample"
        )
    if rows_per_micro_batch and not equal_counts:
        rows = max(1, min(rows, len(samples) // dp))
    bounds = _list_bounds("samples", len(samples), rows, dp if equal_counts else 0)
    micro_batches = [
        MicroBatch(tuple(samples[a:b]), "padded", recompute, pad_multiple=pad_multiple, min_len=row_len)
        for a, b in pairwise(bounds)
    ]
    return [micro_batches[rank::dp] for rank in range(dp)]


def _list_bounds(items: str, num_items: int, size: int, multiple: int) -> list[int]:
    """Return the bounds of contiguous parts of `size` items, the last of fewer; or of parts alike, whose number is a
    multiple. Raises PlanError if there are too few items.

    >>> _list_bounds("samples", 7, 3, 0), _list_bounds("samples", 7, 3, 2)
    ([0, 3, 6, 7], [0, 1, 3, 5, 7])
    """
    if not multiple:
        return [*range(0, num_items, size), num_items]
    count = round_up(-(-num_items // size), multiple)
    if count > num_items:
        raise PlanError(
            f"{num_items} {items} cannot fill {count} micro-batches of at most {size}, equally many on {multiple}"
            " replicas: allow more in each, enlarge the global batch or let counts differ"
        )
    return [num_items * part // count for part in range(count + 1)]


def cut_fixed_rows(
    samples: Sequence[SampleLength],
    *,
    row_len: int,
    dp: int,
    recompute: Recompute = "none",
    pad_multiple: int = 1,
    equal_counts: bool = False,
) -> Replicas:
    """Cut rows as Megatron's GPT dataset does: samples end to end in order, cut at every `row_len` positions; positions
    attend to the whole row before them.

    The last row is padded. A sample that a row's end cuts becomes pieces (`SampleLength.start`), each with the targets
    among its positions: a sample's targets are its last positions. Fewer rows than replicas leave the last replicas
    empty. Under `equal_counts` rows are filled less, all alike, for the next multiple of `dp`. Decoder-only.

    Raises PlanError under `equal_counts` for too few positions.
    """
    _check_decoder_only(samples)
    bounds = _list_bounds("positions", sum(s.encoder for s in samples), row_len, dp if equal_counts else 0)
    rows: list[list[SampleLength]] = [[] for _ in bounds[1:]]
    start = 0
    for sample in samples:
        done = 0
        while done < sample.encoder:
            row = bisect_right(bounds, start + done)  # the one that ends there
            length = min(sample.encoder - done, bounds[row] - start - done)
            rows[row - 1].append(cut_piece(sample, done, length))
            done += length
        start += sample.encoder
    micro_batches = [
        MicroBatch(tuple(row), "packed", recompute, "row", pad_multiple=pad_multiple, min_len=row_len) for row in rows
    ]
    return [micro_batches[rank::dp] for rank in range(dp)]


def pack_documents(
    samples: Sequence[SampleLength],
    evaluate: MicroBatchEvaluate,
    *,
    max_tokens: int,
    dp: int,
    pad_multiple: int = 1,
    recompute: Recompute = "none",
    equal_counts: bool = False,
) -> Replicas:
    """Pack samples into rows by best fit, with attention within each sample, and balance the rows over the replicas.

    Samples go longest first into the fullest row that holds them (best-fit decreasing). Rows may be fewer than replicas
    or, under `equal_counts`, not a multiple of them. Then the samples are spread over the next number that is possible,
    or else packed into the one before. With fewer samples than replicas, each has a row and the last replicas are
    empty. A replica's rows come in the order in which they were opened.

    Raises PlanError, naming the sample, if one is longer than a row; and if no such number of rows holds the batch.
    """
    rule = RowPackingPolicy(max_tokens=max_tokens, pad_multiple=pad_multiple, recompute=recompute)
    rule.check(samples)
    rows, busy = pack_best_fit(samples, rule.room), min(dp, len(samples))
    count = round_up(len(rows), dp) if equal_counts else busy
    if len(rows) < (count if equal_counts else dp):
        weights = compute_document_costs(samples, evaluate, rule)
        order = sort_by_weight(samples, weights)
        counts = [count, count - dp] if equal_counts and count > dp else [count]
        spread = (pack(samples, weights, one, rule.room, order) for one in counts)
        rows = next((packed for packed in spread if packed is not None), [])
    if not rows:
        raise PlanError(
            f"{len(samples)} samples do not spread over {' or '.join(map(str, counts))} rows of {rule.room} positions"
            f" for {dp} replicas: enlarge the global batch, raise max_tokens or let counts differ"
        )
    micro_batches = [rule.make_row(row) for row in rows]
    shares = assign_replicas(evaluate(micro_batches)[0].tolist(), busy, equal_counts=equal_counts)
    return [[micro_batches[i] for i in share] for share in shares] + [[] for _ in range(dp - busy)]


def list_row_lengths(longest: int, tokens: int, *, num_rows: int, pad_multiple: int = 1) -> list[int]:
    """List the row lengths, in positions, to try for packing.

    They begin at the longest sample's and go to twice that, at which any two samples share a row. Longer ones follow
    while `tokens` fill `num_rows` rows, one for each rank of each replica.

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
    """Return each replica's micro-batches with the cheapest ones first and last: a pipeline then fills and drains in
    the least time, as verl orders them."""
    ordered: Replicas = []
    for micro_batches in replicas:
        time_ns = evaluate(micro_batches)[0].tolist() if micro_batches else []
        falling = sorted(range(len(micro_batches)), key=lambda m: (-time_ns[m], m))
        ordered.append([micro_batches[m] for m in (*falling[::2][::-1], *falling[1::2])])
    return ordered


def split_as_dynapipe(
    samples: Sequence[SampleLength],
    costs: CostModel,
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

    The cuts minimise (pp - 1) max(t) + sum(t) / dp, t being their bottleneck times in ns, for bounds on t that are
    `thinning_ns` apart. DynaPipe uses one recomputation mode per plan: the first of `LAYER_RECOMPUTES` (of `kinds`)
    that has a feasible split. Replicas are balanced by t with the largest differencing method (Karmarkar, Karp 1982).

    Three changes are in DynaPipe's favour. Of the bounds in an interval the largest stays, so that small models remain
    feasible. A split of fewer micro-batches than replicas is cut again. Encoder-decoder samples take the better of two
    orders, in place of tours of a travelling salesman. With fewer samples than replicas some replicas are empty. Under
    `equal_counts` that is an error, the micro-batches are a multiple of `dp`, and all replicas have equally many.
    """
    orders: tuple[SortOrder, ...] = ("sorted", "classes") if any(s.decoder for s in samples) else ("sorted",)
    caps, busy = MicroBatchLimits(max_bytes=max_bytes, pad_multiple=pad_multiple), min(dp, len(samples))
    refusal = PlanError(f"no recomputation mode of {kinds} is one of DynaPipe's: give one of {LAYER_RECOMPUTES}")
    for kind in LAYER_RECOMPUTES:
        if kind not in kinds:
            continue
        try:
            splits = [
                _cut_optimal_ranges(
                    sort_samples(samples, order), costs, kind, caps, pp=pp, dp=busy, equal_counts=equal_counts,
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


def _cut_optimal_ranges(
    order: Sequence[SampleLength],
    costs: CostModel,
    kind: Recompute,
    caps: MicroBatchLimits,
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
    cuts = priced.make_first_cuts(pp=pp, dp=dp, min_in_flight=pp, equal_counts=equal_counts, thinning_ns=thinning_ns)
    return [priced.make_micro_batch(cut) for cut in cuts], priced.compute_times(cuts)
