"""Megatron's and verl's ways to make micro-batches, for comparison: the micro-batches of every replica."""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, Recompute, SampleLength, round_up
from dynapipe_ext.errors import PlanError
from dynapipe_ext.splits.balance import karmarkar_karp

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
    shares = karmarkar_karp(work, busy, equal_counts=len(samples) % busy == 0)
    count = max(-(-sum(samples[i].tokens for i in share) // max_tokens) for share in shares)
    replicas: Replicas = []
    for share in shares:
        parts = karmarkar_karp([work[i] for i in share], min(count, len(share)))
        falling = sorted(parts, key=lambda part: (-sum(work[share[k]] for k in part), part))
        hill = falling[::2][::-1] + falling[1::2]
        groups = [tuple(samples[share[k]] for k in part) for part in hill]
        replicas.append([MicroBatch(group, layout, recompute, pad_multiple=pad_multiple) for group in groups])
    return replicas + [[] for _ in range(dp - busy)]
