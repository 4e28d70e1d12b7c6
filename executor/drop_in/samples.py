"""Samples of uneven length for a Megatron training loop, and the batches that its data loaders would make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray, MicroBatch, as_length_array
from dynapipe_ext.data.batches import document_positions
from dynapipe_ext.data.dataset import TokenDataset, TokenSample, is_prepared
from dynapipe_ext.data.indexed_dataset import IndexedTokens, is_indexed
from dynapipe_ext.errors import ConfigError, DataError

_IGNORED = -100  # the label with which Megatron-LM's tokenizers mark what is not to be learnt


class SampleSource(Protocol):
    """Random access to samples, and the lengths of all of them (see `lengths.py`): a sample is a TokenSample, or a
    mapping with Megatron's "tokens" and "labels", and "loss_mask" where some labels do not count."""

    @property
    def lengths(self) -> npt.NDArray[np.integer[Any]]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class LabelledSample:
    """One sample's positions: tokens, the label of each, and whether it counts; three arrays of one length."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]

    @classmethod
    def of(cls, sample: Any) -> LabelledSample:
        """From what a source gives. Errors: DataError for anything else."""
        if isinstance(sample, LabelledSample):
            return sample
        if isinstance(sample, TokenSample):
            tokens = np.asarray(sample.tokens, np.int64)
            return cls(tokens[:-1], tokens[1:], sample.is_target[1:].astype(np.float32))
        if not isinstance(sample, Mapping) or not {"tokens", "labels"} <= set(sample):
            raise DataError(
                f"a sample is a {type(sample).__name__} but must be a TokenSample or a mapping with tokens and labels"
            )
        labels = np.asarray(sample["labels"], np.int64)
        mask = np.asarray(sample.get("loss_mask", np.ones(len(labels))), np.float32)
        return cls(np.asarray(sample["tokens"], np.int64), np.maximum(labels, 0), mask * (labels != _IGNORED))


@dataclass(frozen=True, slots=True, eq=False)
class SampleRange:
    """Samples `first` and after of another source, `count` of them, numbered from 0."""

    whole: SampleSource
    first: int
    count: int

    @property
    def lengths(self) -> LengthArray:
        return as_length_array(self.whole.lengths)[self.first : self.first + self.count]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} is outside of {self.count} samples")
        return LabelledSample.of(self.whole[self.first + index])


def open_samples(path: str | Path) -> SampleSource:
    """Samples at a path: a folder that `dynapipe preprocess` wrote, or Megatron's `.bin/.idx` (a sample a document).
    Errors: DataError."""
    if is_prepared(path):
        return TokenDataset.open(path)
    if is_indexed(path):
        return IndexedTokens(path, skip_empty=True)
    raise DataError(
        f"{path} holds neither prepared tokens nor .bin and .idx: write them with `dynapipe preprocess`, or give --sft"
        " for JSON lines of messages"
    )


def megatron_arrays(micro_batch: MicroBatch, samples: Sequence[Any]) -> dict[str, npt.NDArray[np.generic]]:
    """What Megatron's data loader would give for the micro-batch: tokens, labels and position_ids (int64) and
    loss_mask (float32), each (rows, length). Positions restart with each document and go on in a piece of a cut
    sample; padding has label and mask 0.

    Errors: DataError for a sample of another length than it was planned with.
    """
    shape = (micro_batch.rows, micro_batch.encoder_len)
    tokens, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.float32)
    first = 0
    for row, (planned, sample_of_row) in enumerate(zip(micro_batch.samples, samples, strict=True)):
        sample = LabelledSample.of(sample_of_row)
        length, end = len(sample.tokens), planned.start + planned.encoder
        is_piece = micro_batch.attention == "carried" and row == 0
        fits = end <= length if is_piece else (planned.start, end) == (0, length)
        if not (fits and length == len(sample.labels) == len(sample.loss_mask)):
            raise DataError(
                f"sample {planned.index} has {len(sample.tokens)} tokens and {len(sample.labels)} labels but `lengths`"
                f" say {planned.encoder} positions from {planned.start} on"
            )
        place = (
            (0, slice(first, first + planned.encoder))
            if micro_batch.layout == "packed"
            else (row, slice(0, planned.encoder))
        )
        part = slice(planned.start, end)
        tokens[place], labels[place], mask[place] = sample.tokens[part], sample.labels[part], sample.loss_mask[part]
        first += planned.encoder
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": document_positions(micro_batch)}


def split_source(source: SampleSource, split: str | None) -> tuple[SampleSource | None, ...]:
    """Train, validation and test parts by Megatron's `--split` (weights such as 969,30,1), each a run of samples in
    the order of the data; None for an empty part. Errors: ConfigError for what are no weights.

    >>> class Source(list): lengths = np.ones((10, 3), np.int64)
    >>> [part and len(part) for part in split_source(Source([None] * 10), "8,2,0")]
    [8, 2, None]
    """
    try:
        weights = [float(word) for word in (split or "1,0,0").replace("/", ",").split(",") if word.strip()]
    except ValueError:
        weights = []
    if not 0 < len(weights) <= 3 or min(weights) < 0 or not sum(weights) > 0:
        raise ConfigError(f"split is {split!r} but must be up to three weights, such as 969,30,1")
    weights += [0.0] * (3 - len(weights))
    ends = [round(len(source) * sum(weights[: i + 1]) / sum(weights)) for i in range(3)]
    starts = [0, *ends[:-1]]
    return tuple(
        SampleRange(source, first, end - first) if end > first else None
        for first, end in zip(starts, ends, strict=True)
    )
