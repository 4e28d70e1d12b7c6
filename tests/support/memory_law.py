"""Records of a made-up device whose peaks follow a law, for tests of learned memory models."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dynapipe_ext.batching.inference.batches import (
    FirstBatch,
)
from dynapipe_ext.batching.inference.memory_model import LearnedMemory
from dynapipe_ext.batching.inference.memory_records import MeasuredOn, MemoryRecord

ON = MeasuredOn(
    model="llama, 1000 parameters",
    fingerprint="ab" * 32,
    dtype="float32",
    attention="sdpa",
    device="cpu",
    device_name="x86_64",
    max_new_tokens=16,
    num_beams=1,
    torch="2.13.0",
    transformers="5.1.0",
    date="2026-01-01T00:00:00+00:00",
)
LONGEST, MOST_TOKENS = 512, 16384


def law(rows: int, longest: int, padded: bool) -> float:
    """Bytes of two phases, one of them dearer with padding."""
    return max(1e5 + rows * (4e4 + 900 * longest), rows * longest * (1100 + (0.8 if padded else 0.2) * longest))


def record(rows: int, longest: int, tokens: int, noise: float = 1.0, limit: float = math.inf) -> MemoryRecord:
    peak = int(law(rows, longest, tokens < rows * longest) * noise)
    if peak > limit:
        return MemoryRecord(rows=rows, longest=longest, tokens=tokens, peak_bytes=None, limit_bytes=int(limit))
    return MemoryRecord(rows=rows, longest=longest, tokens=tokens, peak_bytes=peak)


def records(count: int, seed: int = 0, spread: float = 0.0, limit: float = math.inf) -> list[MemoryRecord]:
    generator = np.random.default_rng(seed)
    shapes = [(MOST_TOKENS // LONGEST, LONGEST), (1, LONGEST), (2048, 1)]
    while len(shapes) < count:
        longest = int(np.exp(generator.uniform(0, np.log(LONGEST))))
        shapes.append((int(np.exp(generator.uniform(0, np.log(min(2048, MOST_TOKENS // longest))))), longest))
    found = []
    for rows, longest in shapes:
        tokens = (
            rows * longest
            if generator.random() < 0.3
            else int(generator.integers(rows + longest - 1, rows * longest + 1))
        )
        found.append(record(rows, longest, tokens, float(np.exp(generator.normal(0, spread))), limit))
    return found


def sizes_of(
    model: LearnedMemory, first: FirstBatch, threshold: float = 0.025, fraction: float = 0.9
) -> Callable[[int], int]:
    return model.sizes(first, peak_fraction=fraction, threshold=threshold, most_texts=math.inf)
