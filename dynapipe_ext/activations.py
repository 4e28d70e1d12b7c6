"""Shapes and dtypes of the hidden states that cross stage boundaries: known from the plan, never exchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.plan import MicroBatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (torch's name) of one tensor.

    >>> TensorSpec((2, 8, 4), "bfloat16").num_bytes
    128
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """How hidden states of a micro-batch cross stage boundaries.

    order "sbh" is Megatron's (sequence, rows, hidden), "bsh" that of plain torch models. Under sequence parallelism
    each tensor parallel rank holds 1 / `sequence_shards` of the sequence.
    """

    hidden_size: int
    dtype: str = "float32"
    order: Literal["sbh", "bsh"] = "sbh"
    sequence_shards: int = 1

    def specs(self, micro_batch: MicroBatch) -> tuple[TensorSpec, ...]:
        seq_len, rows = micro_batch.encoder_len // self.sequence_shards, micro_batch.rows
        shape = (seq_len, rows) if self.order == "sbh" else (rows, seq_len)
        return (TensorSpec((*shape, self.hidden_size), self.dtype),)
