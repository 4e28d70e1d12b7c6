"""Ways of other loops to make micro-batches, for comparison: Megatron's, verl's, slime's and NeMo-RL's."""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, Recompute, SampleLength, round_up
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.balance import karmarkar_karp

Replicas = list[list[MicroBatch]]
VERL_TOKEN_WORK = 24_576  # verl's workload of a sequence of L tokens is 24576 L + L^2


def _check(samples: Sequence[SampleLength]) -> None:
    if not samples:
        raise PlanError("the batch has no samples: give at least one")


def first_fit_in_order(
    samples: Sequence[SampleLength],
    *,
    max_tokens: int,
    dp: int,
    layout: Layout = "packed",
    pad_multiple: int = 1,
    recompute: Recompute = "none",
) -> Replicas:
    """Megatron's sequence packing: samples in the order of the data, each into the first micro-batch that has room.

    A micro-batch has room for `max_tokens` positions, padding included; micro-batches go to the replicas in turn, as
    they were opened. Packed rows are Megatron's own layout; "padded" makes the same micro-batches of rows instead.
    With fewer micro-batches than replicas the last replicas are empty. Raises PlanError for a sample that is longer
    than a micro-batch, by name.
    """
    _check(samples)
    groups: list[list[SampleLength]] = []
    sides: list[tuple[int, int]] = []  # of each micro-batch: the longest row so far (padded), or the sum (packed)
    for sample in samples:
        for index in range(len(groups) + 1):
            known, rows = (sides[index], len(groups[index]) + 1) if index < len(groups) else ((0, 0), 1)
            pair = zip(known, (sample.encoder, sample.decoder), strict=True)
            encoder, decoder = (max(a, b) if layout == "padded" else a + b for a, b in pair)
            positions = round_up(encoder, pad_multiple) + round_up(decoder, pad_multiple)
            if (rows if layout == "padded" else 1) * positions <= max_tokens:
                break
        else:
            raise PlanError(
                f"sample {sample.index} needs {positions} positions but a micro-batch has {max_tokens}: truncate the"
                " sample or raise max_tokens"
            )
        if index == len(groups):
            groups.append([])
            sides.append((0, 0))
        groups[index].append(sample)
        sides[index] = (encoder, decoder)
    micro_batches = [MicroBatch(tuple(group), layout, recompute, pad_multiple=pad_multiple) for group in groups]
    return [micro_batches[rank::dp] for rank in range(dp)]


def verl_rule(
    samples: Sequence[SampleLength],
    *,
    max_tokens: int,
    dp: int,
    layout: Layout = "packed",
    pad_multiple: int = 1,
    recompute: Recompute = "none",
) -> Replicas:
    """verl's balancing: Karmarkar-Karp by 24576 L + L^2 over the replicas, then over micro-batches in each.

    Replicas get equal numbers of samples where these divide. All have as many micro-batches as the one that needs most
    of `max_tokens` each (fewer where a replica has fewer samples); the cap guides that number and is not checked again,
    as there. The cheaper micro-batches come first and last, for a short fill and drain. With fewer samples than
    replicas the last replicas are empty. Raises PlanError for a sample longer than `max_tokens`, by name.
    """
    _check(samples)
    longest = max(samples, key=lambda s: s.tokens)
    if longest.tokens > max_tokens:
        raise PlanError(
            f"sample {longest.index} has {longest.tokens} tokens but a micro-batch has {max_tokens}: truncate the"
            " sample or raise max_tokens"
        )
    work = [VERL_TOKEN_WORK * s.tokens + s.tokens**2 for s in samples]
    busy = min(dp, len(samples))
    shares = karmarkar_karp(work, busy, _in_rows(work, busy) if len(samples) % busy == 0 else None)
    count = max(-(-sum(samples[i].tokens for i in share) // max_tokens) for share in shares)
    replicas: Replicas = []
    for share in shares:
        parts = karmarkar_karp([work[i] for i in share], min(count, len(share)))
        falling = sorted(parts, key=lambda part: (-sum(work[share[k]] for k in part), part))
        hill = falling[::2][::-1] + falling[1::2]
        groups = [tuple(samples[share[k]] for k in part) for part in hill]
        replicas.append([MicroBatch(group, layout, recompute, pad_multiple=pad_multiple) for group in groups])
    return replicas + [[] for _ in range(dp - busy)]


def slime_rule(
    samples: Sequence[SampleLength],
    *,
    max_tokens: int,
    dp: int,
    pad_multiple: int = 1,
    recompute: Recompute = "none",
    longest_first: bool = False,
) -> Replicas:
    """slime's schedule of a step: samples in turn, each into the first row with room (there are releases that take the
    longest first); the rows of most tokens are halved until the replicas can have equally many; then Karmarkar-Karp by
    tokens, with equal counts. A sample above `max_tokens` has a row to itself, as there.
    """
    _check(samples)
    rows = _first_fit(samples, max_tokens, longest_first)
    _make_divisible(rows, dp)
    tokens = [sum(s.tokens for s in row) for row in rows]
    shares = karmarkar_karp(tokens, dp, _in_rows(tokens, dp))
    micro_batches = [MicroBatch(tuple(row), "packed", recompute, pad_multiple=pad_multiple) for row in rows]
    return [[micro_batches[i] for i in share] for share in shares]


def nemo_rl_rule(
    samples: Sequence[SampleLength],
    *,
    max_tokens: int,
    dp: int,
    pad_multiple: int = 1,
    recompute: Recompute = "none",
    largest_first: bool = False,
) -> Replicas:
    """NeMo-RL's sequence packing: first fit decreasing into a multiple of `dp` rows, which go to the replicas in turn,
    as they were made or those of most tokens first. Its padding of all rows of a pipeline to one length is left out.
    """
    _check(samples)
    rows = _first_fit(samples, max_tokens, longest_first=True)
    _make_divisible(rows, dp)
    if largest_first:
        rows.sort(key=lambda row: -sum(s.tokens for s in row))
    micro_batches = [MicroBatch(tuple(row), "packed", recompute, pad_multiple=pad_multiple) for row in rows]
    return [micro_batches[rank::dp] for rank in range(dp)]


def _in_rows(costs: Sequence[int], num_groups: int) -> list[list[int]]:
    """Return neighbours in cost, one for each group: groups that start with them end with equal counts."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    return [order[at : at + num_groups] for at in range(0, len(order), num_groups)]


def _first_fit(samples: Sequence[SampleLength], room: int, longest_first: bool) -> list[list[SampleLength]]:
    rows: list[list[SampleLength]] = []
    filled: list[int] = []
    for sample in sorted(samples, key=lambda s: -s.tokens) if longest_first else samples:
        place = next((i for i, used in enumerate(filled) if used + sample.tokens <= room), len(rows))
        if place == len(rows):
            rows.append([])
            filled.append(0)
        rows[place].append(sample)
        filled[place] += sample.tokens
    return rows


def _make_divisible(rows: list[list[SampleLength]], dp: int) -> None:
    """Halve the row of most tokens, of those of several samples, until there is a multiple of `dp`."""
    while len(rows) % dp:
        several = [i for i, row in enumerate(rows) if len(row) > 1]
        if not several:
            raise PlanError(f"{len(rows)} rows of a sample each cannot be a multiple of {dp}: enlarge the batch")
        i = max(several, key=lambda k: sum(s.tokens for s in rows[k]))
        falling = sorted(rows[i], key=lambda s: -s.tokens)
        rows[i] = falling[::2]
        rows.append(falling[1::2])
