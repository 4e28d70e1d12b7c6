"""The lengths that an estimate plans: those of a file, or evenly spaced quantiles of a named distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray, SampleLength, as_length_array, sample_lengths
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.data.batches import GlobalBatches, permutation
from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.reproducible import exp

MOST_POSITIONS = 1 << 20  # of a sample's side: all counts of them stay within 64 bits
_DRAWS = 4096
_TYPICAL = 512  # samples that represent all when options are screened
_DEFAULT_POSITIONS = 8192  # for models that could take more
_T5_PAIR = "uniform:512/uniform:114"  # the spans that T5 was trained on (Raffel et al. 2020, sec. 3.1.4)


@dataclass(frozen=True, slots=True, eq=False)
class LengthData:
    """Samples to plan, (N, 3), with a description of their source. A file has only these samples; a distribution always
    has more.
    """

    table: LengthArray
    description: str
    is_file: bool = False

    @property
    def longest(self) -> SampleLength:
        """A sample with the largest length of each side."""
        return SampleLength(0, *_totals(self)[:2])

    @property
    def most_tokens(self) -> int:
        """Most tokens of one sample."""
        return _totals(self)[2]

    @property
    def total_tokens(self) -> int:
        return _totals(self)[3]

    @property
    def mean_tokens(self) -> float:
        return self.total_tokens / len(self.table)

    @property
    def is_uniform(self) -> bool:
        longest = self.longest
        return longest.tokens * len(self.table) == self.total_tokens

    def batch(self, tokens_per_batch: int, seed: int, index: int = 0) -> list[SampleLength]:
        """The samples of one global batch of up to so many real tokens, cut by `GlobalBatches` from shuffled samples.
        Samples of a distribution repeat where there are too few.
        """
        order, count = _shuffled(self, seed), 1024
        enough = (index + 1) * tokens_per_batch + self.most_tokens
        while True:
            places = order[:count] if self.is_file else np.resize(order, count)
            lengths = self.table[places]
            if int(lengths[:, :2].sum()) >= enough or (self.is_file and count >= len(order)):
                break
            count *= 2
        batches = GlobalBatches(lengths, tokens_per_batch=tokens_per_batch, seed=seed, shuffle=False)
        return sample_lengths(lengths, batches[index % len(batches)])


@lru_cache(maxsize=32)
def _totals(data: LengthData) -> tuple[int, int, int, int]:
    """(most encoder positions, most decoder positions, most tokens of one sample, tokens of all samples)."""
    encoder, decoder, _ = data.table.max(axis=0).tolist()
    tokens = data.table[:, 0] + data.table[:, 1]
    return encoder, decoder, int(tokens.max()), int(tokens.sum())


@lru_cache(maxsize=32)
def _shuffled(data: LengthData, seed: int) -> IntArray:
    return permutation(len(data.table), seed=seed, epoch=0)


@lru_cache(maxsize=32)
def typical_shapes(data: LengthData, multiple: int) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Rounded lengths (K, 2) of evenly spaced samples in order of tokens, and their shares (K,). The last entry has the
    largest length of each side, and share 0.
    """
    sides = data.table[:, :2]
    order = np.argsort(sides.sum(axis=1), kind="stable")
    places = (np.arange(_TYPICAL) * len(order) + len(order) // 2) // _TYPICAL
    longest = sides.max(axis=0)
    shapes, counts = np.unique(-(-sides[order[places]] // multiple) * multiple, axis=0, return_counts=True)
    rounded = np.concatenate([shapes, [-(-longest // multiple) * multiple]])
    return rounded.astype(np.int64), np.append(counts / counts.sum(), 0.0)


def file_data(table: LengthArray, path: str, architecture: Architecture, truncate: int = 0) -> LengthData:
    """The lengths of a file for this model, cut at `truncate`. A decoder-only model gets both sides as one row.

    Errors: DataError for samples without a decoder length where the model has a decoder, and for samples that are too
    long for the model.
    """
    if not len(table):
        raise DataError(f"{path} has no lengths: give one sample or more")
    encoder, decoder, _ = table.T.copy()
    notes = [f"{len(table):,} samples of {path}"]
    if architecture.num_decoder_layers and not decoder.all():
        i = int(np.flatnonzero(decoder == 0)[0])
        raise DataError(f"{path}: sample {i} has no decoder length but the model has a decoder: give (N, 2) lengths")
    if not architecture.num_decoder_layers and decoder.any():
        encoder, decoder = encoder + decoder, np.zeros_like(decoder)
        notes.append("both sides joined to one row")
    if truncate:
        cut = int(((encoder > truncate) | (decoder > truncate)).sum())
        encoder, decoder = np.minimum(encoder, truncate), np.minimum(decoder, truncate)
        notes.append(f"{cut:,} cut at {truncate:,}")
    if beyond := int((encoder > architecture.max_seq_len).sum()):
        notes.append(f"{beyond:,} longer than the {architecture.max_seq_len:,} positions that the model was made for")
    data = _data(encoder, decoder, ", ".join(notes), is_file=True)
    return _checked(data, architecture, "--truncate")


def distribution_data(text: str, architecture: Architecture, seed: int) -> LengthData:
    """Lengths of "uniform:N" (all N) or "lognormal:mean,sigma,max" (mean before the cut at max, sigma of the
    logarithm).

    Encoder-decoders take two, "ENCODER/DECODER", paired at random. Errors: ConfigError.
    """
    text = text or default_distribution(architecture)
    sides = text.split("/")
    if len(sides) != (2 if architecture.num_decoder_layers else 1):
        sides_needed = "two sides, like uniform:512/uniform:114" if architecture.num_decoder_layers else "one side"
        raise ConfigError(
            f"length distribution {short(text)} has {len(sides)} sides but the model takes {sides_needed}"
        )
    encoder = _quantiles(sides[0])
    decoder = np.zeros_like(encoder)
    if len(sides) == 2:
        decoder = _quantiles(sides[1])[permutation(_DRAWS, seed=seed, epoch=1)]
    return _checked(_data(encoder, decoder, text), architecture, "a smaller one")


def default_distribution(architecture: Architecture) -> str:
    """Rows as long as the model allows, up to 8,192 positions; for T5 the spans of its own training."""
    if architecture.num_decoder_layers:
        return _T5_PAIR
    return f"uniform:{min(architecture.max_seq_len, _DEFAULT_POSITIONS)}"


def _data(encoder: IntArray, decoder: IntArray, description: str, *, is_file: bool = False) -> LengthData:
    return LengthData(as_length_array(np.stack([encoder, decoder, encoder * 0], axis=1)), description, is_file)


def _checked(data: LengthData, architecture: Architecture, next_move: str) -> LengthData:
    longest = data.longest
    if (most := max(longest.encoder, longest.decoder)) > MOST_POSITIONS:
        raise DataError(f"a sample has {most:,} positions but {MOST_POSITIONS:,} are the most: give {next_move}")
    if architecture.position == "learned" and longest.encoder > architecture.max_seq_len:
        raise DataError(
            f"a sample has {longest.encoder:,} positions but the model has {architecture.max_seq_len:,} learned ones:"
            f" give {next_move}"
        )
    return data


def _quantiles(text: str) -> IntArray:
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(word) for word in rest.split(",")]
    except ValueError:
        numbers = []
    if kind == "uniform" and len(numbers) == 1 and numbers[0].is_integer() and 1 <= numbers[0] <= MOST_POSITIONS:
        return np.full(_DRAWS, int(numbers[0]), np.int64)
    if kind == "lognormal" and len(numbers) == 3:
        mean, sigma, most = numbers
        if mean >= 1 and 0 <= sigma <= 10 and most.is_integer() and 1 <= most <= MOST_POSITIONS:
            normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma) if sigma else None
            logs = [normal.inv_cdf((i + 0.5) / _DRAWS) if normal else math.log(mean) for i in range(_DRAWS)]
            return np.clip(np.rint(exp(np.minimum(logs, 40.0))), 1, most).astype(np.int64)
    raise ConfigError(
        f"length distribution {short(text)} is not known: give uniform:N, or lognormal:mean,sigma,max with a mean from"
        " 1, a sigma of 0 to 10 and a whole number as max"
    )
