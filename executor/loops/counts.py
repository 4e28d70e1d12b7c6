"""Micro-batches of one replica in as many as a loop needs: where replicas, or virtual stages, ask for a count."""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.errors import PlanError

MicroBatchSamples = list[list[int]]  # the samples of each micro-batch


def in_count(groups: MicroBatchSamples, lengths: Sequence[int], count: int) -> MicroBatchSamples:
    """So many micro-batches, `count` of them, by halving those of most tokens in their place.

    >>> in_count([[0, 1, 2], [3]], [5, 4, 4, 9], 3)
    [[0], [1, 2], [3]]

    Errors: PlanError for fewer samples than that.
    """
    if count > sum(map(len, groups)):
        raise PlanError(
            f"{count} micro-batches are needed of {sum(map(len, groups))} samples, as many as on another replica or as"
            " virtual stages take: give each replica more samples, or a higher token cap"
        )
    groups = [*groups]
    while len(groups) < count:
        tokens = [sum(lengths[i] for i in group) if len(group) > 1 else 0 for group in groups]
        widest = tokens.index(max(tokens))
        groups[widest : widest + 1] = halves(groups[widest], lengths)
    return groups


def halves(group: Sequence[int], lengths: Sequence[int]) -> MicroBatchSamples:
    """Two micro-batches of about as many tokens, each of its samples in their order."""
    parts: MicroBatchSamples = [[], []]
    for i in sorted(group, key=lambda i: -lengths[i]):
        min(parts, key=lambda part: sum(lengths[j] for j in part)).append(i)
    return [sorted(part) for part in parts]
