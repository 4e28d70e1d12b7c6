"""Samples and micro-batches of an encoder-decoder: the encoder reads the inputs, the decoder predicts the targets.

As in T5 the decoder's position p reads label p - 1, and its first position reads the start token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray, LossNorm, MicroBatch
from dynapipe_ext.data.batches import PAD_TOKEN
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.sample_selection import SampleSubset
from dynapipe_ext.errors import DataError

START_TOKEN = 0  # every published T5 starts with its padding token


@dataclass(frozen=True, slots=True, eq=False)
class PairSample:
    """One sample: the encoder reads the int64 `source`; all `labels` carry loss."""

    index: int
    source: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PairDataset:
    """Prepared samples as an encoder-decoder reads them: an input that ends with the separator, and a target.

    `lengths` are (encoder positions, decoder positions, target tokens).
    """

    data: TokenDataset | SampleSubset
    lengths: LengthArray

    @classmethod
    def of(cls, data: TokenDataset | SampleSubset) -> PairDataset:
        """The pairs of prepared data. Errors: DataError for data without separators, since only they mark an input's
        end, and for plain text, which has no inputs."""
        whole = data.whole
        if whole.tokenizer().separator is None:
            raise DataError(
                f"{whole.directory} was prepared without a separator, so an encoder cannot know where inputs end:"
                " prepare it again with --separator, naming the end of text (</s>) for a published T5"
            )
        lengths = pair_lengths(data.lengths)
        if not (lengths[:, 0] > 1).any():
            raise DataError(
                f"{whole.directory} holds plain text, without inputs, but an encoder-decoder trains on pairs: give"
                ' {"input", "target"} a line'
            )
        return cls(data, lengths)

    @property
    def whole(self) -> TokenDataset:
        return self.data.whole

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        return self.data.indices

    @property
    def samples_fingerprint(self) -> str | None:
        return self.data.samples_fingerprint

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> PairSample:
        sample = self.data[index]
        return PairSample(sample.index, sample.tokens[: sample.first_target], sample.tokens[sample.first_target :])


def pair_lengths(lengths: LengthArray) -> LengthArray:
    """Lengths of both sides, from the lengths of samples prepared as one sequence.

    >>> pair_lengths(np.array([[7, 0, 3]]))  # five of input and separator, three of target and end
    array([[5, 3, 3]])
    """
    labels = lengths[:, 2]
    return np.stack([lengths[:, 0] + 1 - labels, labels, labels], axis=1)


def collate_pairs(
    micro_batch: MicroBatch, samples: Sequence[PairSample], *, loss_norm: LossNorm = "tokens"
) -> dict[str, Any]:
    """`encoder_tokens` (rows, E); `decoder_tokens`, `labels` (int64) and `loss_weights` (float32), each (rows, D); and
    the entries of `pair_borders`.

    loss_weights: 1 on labels, or 1 / labels of the sample under loss_norm "samples"; 0 on padding.
    Errors: DataError where samples and micro-batch do not match.
    """
    if other_types := [type(sample).__name__ for sample in samples if not isinstance(sample, PairSample)]:
        raise DataError(
            f"the plan has samples with a decoder side, but the dataset gives {other_types[0]}: give PairSamples, or"
            " lengths with 0 decoder positions for a decoder-only model"
        )
    if [s.index for s in micro_batch.samples] != [s.index for s in samples]:
        raise DataError(
            f"the plan has samples {[s.index for s in micro_batch.samples][:9]} where {[s.index for s in samples][:9]}"
            " were given: keep the plan's order"
        )
    packed, rows = micro_batch.layout == "packed", micro_batch.rows
    encoder_tokens = np.full((rows, micro_batch.encoder_len), PAD_TOKEN, np.int64)
    decoder_tokens, labels = (np.full((rows, micro_batch.decoder_len), PAD_TOKEN, np.int64) for _ in range(2))
    weights = np.zeros(labels.shape, np.float32)
    source_end = labels_end = 0
    for row, (planned, sample) in enumerate(zip(micro_batch.samples, samples, strict=True)):
        held = (len(sample.source), len(sample.labels), len(sample.labels))
        if held != (planned.encoder, planned.decoder, planned.target) or planned.start:
            raise DataError(
                f"sample {sample.index} has (encoder, decoder, target) {held} but its plan has"
                f" {(planned.encoder, planned.decoder, planned.target)}, from {planned.start} on: the plan was made for"
                " other data"
            )
        first, begin = (source_end, labels_end) if packed else (0, 0)
        source_end, labels_end = first + planned.encoder, begin + planned.decoder
        place = 0 if packed else row
        encoder_tokens[place, first:source_end] = sample.source
        labels[place, begin:labels_end] = sample.labels
        decoder_tokens[place, begin] = START_TOKEN
        decoder_tokens[place, begin + 1 : labels_end] = sample.labels[:-1]
        weights[place, begin:labels_end] = 1.0 if loss_norm == "tokens" else 1.0 / len(sample.labels)
    arrays: dict[str, Any] = {"encoder_tokens": encoder_tokens, "decoder_tokens": decoder_tokens}
    return arrays | {"labels": labels, "loss_weights": weights, **pair_borders(micro_batch)}


def pair_borders(micro_batch: MicroBatch) -> dict[str, Any]:
    """The borders that keep attention within samples, from the plan alone, for every stage.

    padded: `encoder_padding` (rows, E), True after a row's input; absent where no row has padding. packed: `documents`,
    the encoder and the decoder lengths of all samples, with the padding of a side as one more document.

    >>> from dynapipe_ext.batch.micro_batches import SampleLength
    >>> samples = SampleLength(0, 5, 2, 2), SampleLength(1, 9, 4, 4)
    >>> pair_borders(MicroBatch(samples, "packed", pad_multiple=8))["documents"]
    ((5, 9, 2), (2, 4, 2))

    Errors: DataError for a sample without a decoder side, a piece of one, or packed rows that attend as a whole.
    """
    for sample in micro_batch.samples:
        if not sample.decoder or sample.start:
            raise DataError(
                f"sample {sample.index} is planned with {sample.decoder} decoder positions, from {sample.start} on: an"
                " encoder-decoder needs whole pairs of input and target"
            )
    lengths = np.array([(s.encoder, s.decoder) for s in micro_batch.samples], np.int64)
    sides = micro_batch.encoder_len, micro_batch.decoder_len
    if micro_batch.layout == "padded":
        padding = np.arange(sides[0]) >= lengths[:, :1]
        return {"encoder_padding": padding} if padding.any() else {}
    if micro_batch.attention != "document":
        raise DataError(
            "attention over a whole packed row of pairs would mix their inputs: plan with document attention, or with"
            " the padded layout"
        )
    rest = np.array(sides) - lengths.sum(axis=0)
    documents = np.concatenate([lengths, rest[None]]) if rest.any() else lengths
    return {"documents": tuple(map(tuple, documents.T.tolist()))}
