"""The length of a sample: all that planning ever sees of the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from dynapipe_ext.errors import DataError, short

LengthArray = npt.NDArray[np.int64]  # shape (num_samples, 3): encoder positions, decoder positions, target tokens
MOST_POSITIONS = 1 << 31  # of a sample's side
_INTEGERS = (int, np.integer)


@dataclass(frozen=True, slots=True)
class SampleLength:
    """One sample, or one piece of it: `encoder` (and `decoder`) are model input positions, without padding.

    `target` counts the positions that carry loss. `start` is the first position of a piece of a sample that was cut
    (Megatron's GPT dataset rule cuts documents at row ends); 0 for whole samples.
    """

    index: int
    encoder: int
    decoder: int = 0
    target: int = 0
    start: int = 0

    @property
    def tokens(self) -> int:
        """Real tokens: encoder plus decoder positions."""
        return self.encoder + self.decoder


def sample_lengths(lengths: LengthArray | Sequence[int], indices: Iterable[int] | None = None) -> list[SampleLength]:
    """Rows of a lengths array as values; a flat sequence of integers means decoder-only, every position a target.

    >>> sample_lengths([5, 9])[1]
    SampleLength(index=1, encoder=9, decoder=0, target=9, start=0)
    """
    table = as_length_array(lengths)
    chosen = range(len(table)) if indices is None else indices
    return [SampleLength(int(i), int(table[i, 0]), int(table[i, 1]), int(table[i, 2])) for i in chosen]


def as_length_array(lengths: npt.ArrayLike) -> LengthArray:
    """Any of the accepted shapes as (num_samples, 3) int64: (N,), (N, 2) = encoder and decoder, or (N, 3).

    Errors: DataError for what is no array of integers, negative lengths, an empty encoder side, or more targets than
    positions.
    """
    try:
        raw = np.asarray(lengths)
    except ValueError:
        raise DataError("lengths differ in their number of columns: give one, two or three for every sample") from None
    if raw.size and not np.issubdtype(raw.dtype, np.integer):
        raise DataError(f"lengths have dtype {raw.dtype} but must be integers")
    if raw.ndim == 1:
        raw = np.stack([raw, np.zeros_like(raw), raw], axis=1) if raw.size else np.zeros((0, 3), np.int64)
    elif raw.ndim == 2 and raw.shape[1] == 2:
        raw = np.concatenate([raw, np.where(raw[:, 1:] > 0, raw[:, 1:], raw[:, :1])], axis=1)
    if raw.ndim != 2 or raw.shape[1] != 3:
        raise DataError(f"lengths have shape {raw.shape}: expected (N,), (N, 2) or (N, 3)")
    if raw.size and int(raw.max()) > np.iinfo(np.int64).max:
        raise DataError(f"lengths go up to {raw.max()} but are at most 2^63 - 1: give tokens of a sample")
    table = raw.astype(np.int64)
    bad = (table < 0).any(axis=1) | (table[:, 0] < 1) | (table[:, 2] > table[:, 0] + table[:, 1])
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise DataError(f"sample {i} has lengths {table[i].tolist()} (encoder, decoder, targets): not usable")
    return table


def as_samples(lengths: Sequence[SampleLength] | Sequence[int] | LengthArray) -> list[SampleLength]:
    """Samples of anybody's making, or of their lengths. Errors: DataError for the first that cannot be planned."""
    is_list = isinstance(lengths, Sequence) and not isinstance(lengths, str | bytes)
    if not is_list and not (isinstance(lengths, np.ndarray) and lengths.ndim):
        raise DataError(f"lengths are {short(lengths)} but must be a list of SampleLength or of integers, or an array")
    given = len(lengths) and isinstance(lengths[0], SampleLength)
    samples = list(cast("Sequence[SampleLength]", lengths)) if given else sample_lengths(cast(LengthArray, lengths))
    if not _are_plain(samples):
        _check_one_by_one(samples)
    return samples


def _are_plain(samples: Sequence[SampleLength]) -> bool:
    """Whether all can be planned, and no number is of a type but int: told without a look at each sample by itself."""
    if {*map(type, samples)} != {SampleLength}:
        return False
    index, encoder, decoder, target, start = columns = (
        [s.index for s in samples],
        [s.encoder for s in samples],
        [s.decoder for s in samples],
        [s.target for s in samples],
        [s.start for s in samples],
    )
    if any({*map(type, column)} != {int} for column in columns) or min(encoder) < 1:
        return False
    if min(map(min, (index, decoder, target, start))) < 0 or max(max(encoder), max(decoder)) > MOST_POSITIONS:
        return False
    return all(t <= e + d for t, e, d in zip(target, encoder, decoder, strict=True))


def _check_one_by_one(samples: Sequence[SampleLength]) -> None:
    for s in samples:
        if not isinstance(s, SampleLength):
            raise DataError(f"{short(s)} stands among samples but is no SampleLength: give those alone")
        counts = (s.index, s.encoder, s.decoder, s.target, s.start)
        integers = {*map(type, counts)} == {int} or all(isinstance(count, _INTEGERS) for count in counts)
        if not (integers and min(counts) >= 0) or not (
            1 <= s.encoder <= MOST_POSITIONS and s.decoder <= MOST_POSITIONS and s.target <= s.tokens
        ):
            shown = ", ".join(map(short, counts))
            raise DataError(
                f"a sample of (index, encoder, decoder, target, start) = ({shown}) cannot be planned: give integers"
                " from 0 on, an encoder side of 1 to 2^31 positions, a decoder side of at most as many, and no"
                " more targets than positions"
            )
