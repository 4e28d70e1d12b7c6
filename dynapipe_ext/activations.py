"""Shapes and dtypes of the hidden states that cross stage boundaries: known from the plan, never exchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.errors import ConfigError, check_integer, short
from dynapipe_ext.plan import MicroBatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8}
DTYPE_OF_WIDTH = {2: "bfloat16", 4: "float32"}  # where only the bytes of a value are known


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
    each tensor parallel rank holds 1 / `sequence_shards` of the sequence. An encoder-decoder's stages from
    `first_decoder_stage` on send the encoder's hidden states and the decoder's; those before it the encoder's alone.
    """

    hidden_size: int
    dtype: str = "float32"
    order: Literal["sbh", "bsh"] = "sbh"
    sequence_shards: int = 1
    first_decoder_stage: int | None = None

    def __post_init__(self) -> None:
        """Errors: ConfigError."""
        check_integer("hidden_size", self.hidden_size, least=1)
        check_integer("sequence_shards", self.sequence_shards, least=1)
        for name, value, known in ("dtype", self.dtype, tuple(DTYPE_BYTES)), ("order", self.order, ("sbh", "bsh")):
            if value not in known:
                raise ConfigError(f"{name} is {short(value)}: choose from {', '.join(known)}")

    def specs(self, micro_batch: MicroBatch, boundary: int = 0) -> tuple[TensorSpec, ...]:
        """The tensors of a message between stages `boundary` and `boundary` + 1, in either direction.

        Raises ConfigError for a micro-batch with a decoder side where no stage is known to send one.
        """
        if micro_batch.decoder_len and self.first_decoder_stage is None:
            raise ConfigError(
                f"a micro-batch has decoder length {micro_batch.decoder_len} but the activation format is that of a"
                " decoder-only model: give first_decoder_stage"
            )
        sides: tuple[int, ...] = (micro_batch.encoder_len,)
        if self.first_decoder_stage is not None and boundary >= self.first_decoder_stage:
            sides = (micro_batch.encoder_len, micro_batch.decoder_len)
        return tuple(self._spec(seq_len // self.sequence_shards, micro_batch.rows) for seq_len in sides)

    def _spec(self, seq_len: int, rows: int) -> TensorSpec:
        shape = (seq_len, rows) if self.order == "sbh" else (rows, seq_len)
        return TensorSpec((*shape, self.hidden_size), self.dtype)
