"""Samples that an epoch has twice, since the last one left them: never both in one step."""

from __future__ import annotations

import numpy as np

from dynapipe_ext.costs.model import IntArray


def twins_parted(
    samples: IntArray, starts: IntArray, rest: IntArray, tokens: IntArray, *, num_ranks: int, cap: int, padded: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """(samples, starts, rest) as in `EpochPlan`, no step with the same sample twice.

    The second one changes places with the sample of nearest length, of another step or of the rest, that makes no other
    twins, where both batches keep within the cap; `padded`: within their longest. Where there is none it joins the
    rest, with its whole step if its rank has nothing else. tokens are by sample.

    >>> samples, starts, rest = np.array([1, 1, 2, 3]), np.array([0, 2, 4]), np.array([], np.int64)
    >>> found = twins_parted(samples, starts, rest, np.full(4, 5), num_ranks=1, cap=10, padded=False)
    >>> found[0].tolist(), found[1].tolist(), found[2].tolist()
    ([1, 2, 1, 3], [0, 2, 4], [])
    """
    num_steps = (len(starts) - 1) // num_ranks
    bins = np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))
    twins = _second_ones(samples * max(1, num_steps) + bins // num_ranks)
    if not len(twins):
        return samples, starts, rest
    pool = np.concatenate([samples, rest]).astype(np.int64)
    step = np.concatenate([bins // num_ranks, np.full(len(rest), num_steps)])  # the rest is like a step more
    owner = np.concatenate([bins, np.full(len(rest), len(starts) - 1)])
    room, longest = (np.append(f.reduceat(tokens[samples], starts[:-1]), 0) for f in (np.add, np.maximum))
    room, longest[-1] = cap - room, cap
    keep = np.ones(len(samples), np.bool_)
    for twin in twins.tolist():
        of_step = pool[step == step[twin]]
        if np.count_nonzero(of_step == pool[twin]) < 2:  # parted already
            continue
        lengths = tokens[pool]
        has_it = np.bincount(step[pool == pool[twin]], minlength=num_steps + 1) > 0
        has_it[num_steps] = False
        if padded:  # as many rows, and none longer
            mine, theirs = longest[bins[twin]], longest[owner]
        else:
            mine, theirs = room[bins[twin]] + lengths[twin], room[owner] + lengths
        fits = ~has_it[step] & ~np.isin(pool, of_step) & (lengths <= mine) & (lengths[twin] <= theirs)
        if fits.any():
            other = int(np.where(fits, np.abs(lengths - lengths[twin]), np.iinfo(np.int64).max).argmin())
            pool[twin], pool[other] = pool[other], pool[twin]
            change = lengths[other] - lengths[twin]
            room[bins[twin]] -= change
            room[owner[other]] += change
        else:
            keep[twin] = False
    fed = np.bincount(bins[keep], minlength=len(starts) - 1).reshape(-1, num_ranks).min(axis=1) > 0
    keep &= fed[step[: len(samples)]]
    counts = np.bincount(bins[keep], minlength=len(starts) - 1)[np.repeat(fed, num_ranks)]
    new_rest = np.concatenate([pool[len(samples) :], pool[: len(samples)][~keep]])
    return pool[: len(samples)][keep], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), new_rest


def _second_ones(keys: IntArray) -> IntArray:
    """Places of keys that stand at an earlier place, too."""
    order = np.argsort(keys, kind="stable")
    return np.sort(order[1:][keys[order][1:] == keys[order][:-1]])
