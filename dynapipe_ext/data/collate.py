"""The arrays of one micro-batch, padded or packed, as its plan says.

A sample of n + 1 tokens fills n positions: position p reads token p and has token p + 1 as its label. Labels of the
prompt and of padding are valid ids with weight 0, so that no cross-entropy needs an ignore index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import LossNorm, MicroBatch

PAD_TOKEN = 0


def collate(
    micro_batch: MicroBatch, samples: Sequence[TokenSample], *, loss_norm: LossNorm = "tokens"
) -> dict[str, npt.NDArray[np.generic]]:
    """tokens, labels, position_ids (int64) and loss_weights (float32), each (rows, S), S = `micro_batch.encoder_len`.

    `samples` are those of `micro_batch.samples`, in the same order; a piece takes positions start to start + encoder.
    loss_weights: 1 on target labels, or 1 / (target labels of the whole sample) under loss_norm "samples"; 0 elsewhere.
    position_ids: those of `document_positions`.
    Packed layout only: cu_seqlens, int32, the borders of `document_lengths`.

    Errors: DataError where samples and micro-batch do not belong together, or a sample has a decoder side.
    """
    if loss_norm not in get_args(LossNorm):
        raise ConfigError(f"loss_norm is {loss_norm!r}: choose from {', '.join(map(repr, get_args(LossNorm)))}")
    if len(samples) != len(micro_batch.samples):
        raise DataError(f"the micro-batch has {len(micro_batch.samples)} samples but {len(samples)} were given")
    documents, positions = document_lengths(micro_batch), document_positions(micro_batch)
    shape = (micro_batch.rows, micro_batch.encoder_len)
    tokens = np.full(shape, PAD_TOKEN, np.int64)
    labels = np.full(shape, PAD_TOKEN, np.int64)
    weights = np.zeros(shape, np.float32)

    packed = micro_batch.layout == "packed"
    first = 0
    for row, (planned, sample) in enumerate(zip(micro_batch.samples, samples, strict=True)):
        _check_sample(planned, sample)
        place = (0, slice(first, first + planned.encoder)) if packed else (row, slice(0, planned.encoder))
        end = planned.start + planned.encoder
        tokens[place] = sample.tokens[planned.start : end]
        labels[place] = sample.tokens[planned.start + 1 : end + 1]
        weight = 1.0 if loss_norm == "tokens" else 1.0 / max(1, sample.target)
        weights[place] = np.where(sample.is_target[planned.start + 1 : end + 1], weight, 0.0)
        first += planned.encoder

    arrays: dict[str, npt.NDArray[np.generic]] = {"tokens": tokens, "labels": labels, "loss_weights": weights}
    arrays["position_ids"] = positions
    if packed:
        arrays["cu_seqlens"] = np.cumsum((0, *documents)).astype(np.int32)
    return arrays


def document_lengths(micro_batch: MicroBatch) -> tuple[int, ...]:
    """Positions of each document that attention is confined to, row by row, from the plan alone.

    padded: every row is one document of S positions (its padding lies behind it, out of sight of causal attention).
    packed: the samples, then the trailing padding as one more document if there is any; attention "row": the row.
    They sum to rows x S.

    >>> document_lengths(MicroBatch((SampleLength(0, 5), SampleLength(1, 9)), layout="packed", pad_multiple=8))
    (5, 9, 2)
    """
    if not micro_batch.samples:
        raise DataError("a micro-batch without samples cannot be collated: its plan is not valid")
    for sample in micro_batch.samples:
        if sample.decoder:
            raise DataError(
                f"sample {sample.index} has {sample.decoder} decoder positions but these arrays are for decoder-only "
                "models: give lengths with 0 decoder positions"
            )
        if sample.encoder < 1 or sample.start < 0:
            raise DataError(f"sample {sample.index} is planned with no positions or a negative start ({sample})")
    row_len = micro_batch.encoder_len
    if micro_batch.layout == "padded":
        return (row_len,) * micro_batch.rows
    if micro_batch.attention == "row":
        return (row_len,)
    documents = tuple(sample.encoder for sample in micro_batch.samples)
    padding = row_len - sum(documents)
    return (*documents, padding) if padding else documents


def document_positions(micro_batch: MicroBatch) -> npt.NDArray[np.int64]:
    """The place of every position in its document, int64, (rows, S), from the plan alone.

    0 to S - 1 in every padded row and in a packed row with attention "row" (padding counts on); else they restart at 0
    in each document and in the trailing padding. A piece starts at 0 too, but with attention "carried", where it
    attends to the earlier ones, at its place in the sample.

    >>> piece, whole = SampleLength(0, 3, start=5), SampleLength(1, 2)
    >>> document_positions(MicroBatch((piece, whole), "packed", attention="carried")).tolist()
    [[5, 6, 7, 0, 1]]
    """
    positions = [np.arange(length, dtype=np.int64) for length in document_lengths(micro_batch)]
    if micro_batch.attention == "carried":
        positions[0] += micro_batch.samples[0].start
    return np.concatenate(positions).reshape(micro_batch.rows, micro_batch.encoder_len)


def _check_sample(planned: SampleLength, sample: TokenSample) -> None:
    if sample.index != planned.index:
        raise DataError(
            f"the plan has sample {planned.index} where sample {sample.index} was given: keep the plan's order"
        )
    tokens = np.asarray(sample.tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or (tokens < 0).any():
        raise DataError(
            f"sample {sample.index} has tokens of shape {tokens.shape} and type {tokens.dtype}, the least of them"
            f" {tokens.min() if tokens.size else None}: give a row of integers from 0 on"
        )
    if planned.start + planned.encoder > sample.positions:
        raise DataError(
            f"sample {sample.index} has {sample.positions} positions but its plan takes {planned.start} to "
            f"{planned.start + planned.encoder}: the plan was made for other data"
        )
    end = planned.start + planned.encoder
    target = int(np.count_nonzero(sample.is_target[planned.start + 1 : end + 1]))
    if target != planned.target:
        raise DataError(
            f"sample {sample.index} has {target} target tokens in positions {planned.start} to {end} but its plan has "
            f"{planned.target}: the plan was made for other data"
        )
