"""Equal numbers of micro-batches on all replicas: what a batch needs for it, and padded splits that have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch, Recompute
from dynapipe_ext.splits.padded import ShapeEvaluate, split_padded


def check_enough(num_samples: int, dp: int) -> None:
    """Refuse a batch of fewer samples than replicas: under equal counts no replica may be empty."""
    if num_samples < dp:
        raise PlanError(
            f"{num_samples} samples cannot feed {dp} replicas of equal counts: leave a short last batch out"
            ' (drop_last), enlarge the global batch or let counts differ (replica_counts = "free")'
        )


def split_padded_equal(
    samples: Sequence[SampleLength],
    choices: Mapping[Recompute, ShapeEvaluate],
    *,
    pp: int,
    dp: int,
    max_bytes: int | None = None,
    max_tokens: int | None = None,
    pad_multiple: int = 1,
    thinning_ns: int = 0,
) -> list[MicroBatch]:
    """`split_padded` in a multiple of `dp` micro-batches: cut up to the next one or, for want of samples, merged down.

    Merged are the neighbours that take least time as one, within the caps. Raises
    PlanError for fewer samples than replicas, and where neither way stays within the caps.
    """
    check_enough(len(samples), dp)

    def split(*, equal_counts: bool) -> list[MicroBatch]:
        return split_padded(
            samples,
            choices,
            pp=pp,
            dp=dp,
            max_bytes=max_bytes,
            max_tokens=max_tokens,
            pad_multiple=pad_multiple,
            equal_counts=equal_counts,
            thinning_ns=thinning_ns,
        )

    try:
        return split(equal_counts=True)
    except PlanError:
        parts = split(equal_counts=False)  # refuses by name a sample that does not fit
    while len(parts) % dp:
        merged = [_fastest(a, b, choices, max_bytes, max_tokens) for a, b in pairwise(parts)]
        time_ns, at = min(((found[0], k) for k, found in enumerate(merged)), default=(INFEASIBLE, 0))
        if time_ns >= INFEASIBLE:
            raise PlanError(
                f"{len(samples)} samples make {len(parts)} micro-batches, which do not divide over {dp} replicas of"
                f" equal counts, and no two of them fit into one (max_bytes {max_bytes}, max_tokens {max_tokens}):"
                " enlarge the global batch, raise the caps or let counts differ"
            )
        parts[at : at + 2] = [merged[at][1]]
    return parts


def _fastest(
    a: MicroBatch,
    b: MicroBatch,
    choices: Mapping[Recompute, ShapeEvaluate],
    max_bytes: int | None,
    max_tokens: int | None,
) -> tuple[int, MicroBatch]:
    """Two micro-batches as one under its fastest recomputation, and its time (INFEASIBLE if it breaks a cap)."""
    both = replace(a, samples=a.samples + b.samples)
    best = (INFEASIBLE, both)
    if max_tokens is not None and both.padded_tokens > max_tokens:
        return best
    for kind, evaluate in choices.items():
        shape = (np.array([length]) for length in (both.rows, both.encoder_len, both.decoder_len))
        time_ns, num_bytes = evaluate(*shape)
        within = int(num_bytes[0]) < INFEASIBLE and (max_bytes is None or int(num_bytes[0]) <= max_bytes)
        if within and int(time_ns[0]) < best[0]:
            best = (int(time_ns[0]), replace(both, recompute=kind))
    return best
