"""Sources made of other sources: several by their weights, one over and over, long samples cut into runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray, as_length_array
from dynapipe_ext.data.batches import permutation
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.drop_in.samples import LabelledSample, SampleSource

LongSamples = Literal["refuse", "truncate", "chunk"]


@dataclass(frozen=True, slots=True, eq=False)
class SampleStream:
    """`sources` as one: place i is sample `indices[i]` of source `which[i]`. A sample may have several places, which
    count as samples of their own."""

    sources: tuple[SampleSource, ...]
    which: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int64]
    lengths: LengthArray

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, place: int) -> LabelledSample:
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} is outside of {len(self)}")
        return LabelledSample.of(self.sources[self.which[place]][int(self.indices[place])])


def mixture(sources: Sequence[SampleSource], weights: Sequence[float], *, seed: int, count: int) -> SampleStream:
    """The first `count` samples of an endless mixture, in which sources take turns by their weights (Webster's rule).
    Each source comes in the order of `permutation`, epoch after epoch.

    A longer stream begins with a shorter one. One source alone: that source over and over.
    """
    shares = [weight / math.fsum(weights) for weight in weights]
    needed = [math.ceil(share * (count + len(shares))) + 1 for share in shares]
    turns = np.concatenate([(np.arange(n) + 0.5) / share for n, share in zip(needed, shares, strict=True)])
    which = np.repeat(np.arange(len(needed), dtype=np.int32), needed)
    which = which[np.argsort(turns, kind="stable")][:count]
    indices = np.empty(count, np.int64)
    for number, source in enumerate(sources):
        places = np.flatnonzero(which == number)
        indices[places] = _epochs(len(source), len(places), seed)
    return _stream(sources, which, indices)


def end_to_end(sources: Sequence[SampleSource]) -> SampleStream:
    """Every sample once, in the order of the sources."""
    sizes = [len(source) for source in sources]
    which = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return _stream(sources, which, np.concatenate([np.arange(size, dtype=np.int64) for size in sizes]))


def _stream(
    sources: Sequence[SampleSource], which: npt.NDArray[np.int32], indices: npt.NDArray[np.int64]
) -> SampleStream:
    lengths = np.empty((len(which), 3), np.int64)
    for number, source in enumerate(sources):
        places = which == number
        lengths[places] = as_length_array(source.lengths)[indices[places], :3]
    return SampleStream(tuple(sources), which, indices, lengths)


def _epochs(num_samples: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """`count` indices of a source, each epoch in an order of its own."""
    epochs = [permutation(num_samples, seed=seed, epoch=epoch) for epoch in range(-(-count // num_samples))]
    return np.concatenate([*epochs, np.empty(0, np.int64)])[:count]


def growing(
    make: Callable[[int], SampleStream], num_batches: Callable[[SampleStream], int], *, first: int, least: int
) -> SampleStream:
    """A stream of at least `least` batches, however many samples these take; `first` is how many to try first."""
    count = first
    while num_batches(stream := make(count)) < least:
        count *= 2
    return stream


@dataclass(frozen=True, slots=True, eq=False)
class SampleRuns:
    """Runs of the positions of another source's samples: run i is of sample `indices[i]`, from position `starts[i]`."""

    whole: SampleSource
    indices: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: LengthArray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, run: int) -> LabelledSample:
        if not 0 <= run < len(self):
            raise IndexError(f"sample {run} is outside of {len(self)} samples")
        sample, start = LabelledSample.of(self.whole[int(self.indices[run])]), int(self.starts[run])
        part = slice(start, start + int(self.lengths[run, 0]))
        return LabelledSample(sample.tokens[part], sample.labels[part], sample.loss_mask[part])


def of_bounded_length(
    source: SampleSource, most: int, *, long_samples: LongSamples, what: str
) -> tuple[SampleSource, str]:
    """The source with no sample of more than `most` positions, and a line about the longer ones (empty: there are
    none).

    truncate: their first positions alone. chunk: runs of `most` positions and the rest, each a sample of its own. Runs
    without a target are left out. Errors: DataError where longer samples are refused, and where nothing is left.
    """
    lengths = as_length_array(source.lengths)
    positions = lengths[:, 0]
    num_long = int((positions > most).sum())
    if not num_long:
        return source, ""
    if long_samples == "refuse":
        longest = int(positions.argmax())
        raise DataError(
            f"{what}: sample {longest} has {positions[longest]} positions but --seq-length is {most}: raise it (and"
            " --max-position-embeddings), or give --dynapipe-long-samples truncate, or chunk"
        )
    counts = -(-positions // most) if long_samples == "chunk" else np.ones(len(positions), np.int64)
    indices = np.repeat(np.arange(len(positions)), counts)
    starts = (np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    sizes = np.minimum(positions[indices] - starts, most)
    targets = _targets(source, lengths, indices, starts, sizes)
    is_kept = (targets > 0) | (positions[indices] <= most)
    if not is_kept.any():
        raise DataError(f"{what}: no sample has a target within {most} positions: raise --seq-length")
    table = np.stack([sizes, np.zeros_like(sizes), targets], axis=1)[is_kept]
    runs = SampleRuns(source, indices[is_kept], starts[is_kept], table)
    change = "truncated" if long_samples == "truncate" else f"cut into {int(counts[positions > most].sum()):,} samples"
    left_out = f", of which {int((~is_kept).sum()):,} without a target are left out" if not is_kept.all() else ""
    return runs, f"{what}: {num_long:,} samples of more than {most:,} positions are {change}{left_out}"


def _targets(
    source: SampleSource,
    lengths: LengthArray,
    indices: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Labels that count of every run. Samples are read whose runs are not all of one kind."""
    targets = np.where(lengths[indices, 2] == lengths[indices, 0], sizes, 0)
    is_part = (sizes < lengths[indices, 0]) & (lengths[indices, 2] < lengths[indices, 0])
    targets[sizes == lengths[indices, 0]] = lengths[indices, 2][sizes == lengths[indices, 0]]
    last, mask = -1, np.empty(0, np.float32)
    for run in np.flatnonzero(is_part):
        if indices[run] != last:
            last, mask = int(indices[run]), LabelledSample.of(source[int(indices[run])]).loss_mask
        targets[run] = int(np.count_nonzero(mask[starts[run] : starts[run] + sizes[run]]))
    return targets


def parse_mixture(words: Sequence[str]) -> tuple[tuple[float | None, str], ...]:
    """Weights and paths, as Megatron-LM's --data-path has them: paths, or a weight before each. Errors: ConfigError.

    >>> parse_mixture(["0.3", "a", "0.7", "b"]), parse_mixture(["a", "b"])
    (((0.3, 'a'), (0.7, 'b')), ((None, 'a'), (None, 'b')))
    """
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or None in weights:
        if any(weight is not None for weight in weights) and len(words) > 1:
            raise ConfigError(f"{' '.join(words)} has no weight before each path: give 0.5 A 0.5 B, or paths alone")
        return tuple((None, word) for word in words)
    for weight in weights:
        if weight is not None and not 0 < weight < math.inf:
            raise ConfigError(f"the weight {weight} of {' '.join(words)} must be above 0: leave its data out")
    return tuple(zip(weights, words[1::2], strict=True))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
