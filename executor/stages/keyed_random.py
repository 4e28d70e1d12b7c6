"""Random numbers that follow from what is computed, never from the order of calls."""

from __future__ import annotations

import hashlib

from dynapipe_ext.executor.instructions import ExecutionPlan


def random_key(plan: ExecutionPlan, micro_batch: int) -> str:
    """Seed, step and samples of a micro-batch: its dropout depends neither on schedule, placement nor replica."""
    samples = [(sample.index, sample.start) for sample in plan.micro_batches[micro_batch].samples]
    return f"{plan.seed}/{plan.step}/{samples}"


def seed_of(key: str, layer: str) -> int:
    """31 bits for the random numbers of one layer."""
    digest = hashlib.sha256(f"{key}/{layer}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
