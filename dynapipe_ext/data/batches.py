"""Which samples form each global batch: a pure function of lengths, seed and epoch, with random access by step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynapipe_ext.errors import ConfigError, DataError, check_integer
from dynapipe_ext.lengths import LengthArray, as_length_array

_WEYL = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd
_MASK = (1 << 64) - 1


def permutation(num_samples: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The indices 0 to num_samples - 1 in the order of a key that each draws alone; the same on every machine.

    key(i) = mix(base + (i + 1) * WEYL) with base = mix(mix(seed + WEYL) + (epoch + 1) * WEYL), where mix is the output
    function of SplitMix64 (Steele, Lea and Flood 2014, fig. 17) and all sums are modulo 2**64; equal keys keep the
    order of the indices. No library's generator is involved, so no library's version can change it.

    >>> permutation(8, seed=0, epoch=0).tolist()
    [0, 7, 2, 5, 4, 6, 3, 1]
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        check_integer(name, value, least=0, most=_MASK)
    base = _mix(_array(seed + _WEYL))
    base = _mix(_array(int(base[0]) + (epoch + 1) * _WEYL))
    counters = np.arange(1, num_samples + 1, dtype=np.uint64) * np.uint64(_WEYL)
    return _ascending(_mix(counters + base))


def _ascending(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """`np.argsort(keys, kind="stable")`, quicker: sorts the keys' upper bits with the index below them."""
    bits = np.uint64(max(1, (len(keys) - 1).bit_length()))
    packed = np.sort((keys >> bits << bits) | np.arange(len(keys), dtype=np.uint64))
    order = (packed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    same = packed[1:] >> bits == packed[:-1] >> bits
    if same.any():  # order those runs by the whole key
        at = np.flatnonzero(np.append(same, False) | np.append(False, same))
        order[at] = order[at][np.argsort(keys[order[at]], kind="stable")]
    return order


def _array(value: int) -> npt.NDArray[np.uint64]:
    """One element, not a scalar: numpy warns when scalars wrap and not when arrays do."""
    return np.array([value & _MASK], dtype=np.uint64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class GlobalBatches:
    """The global batches of one epoch: `batches[step]` is a tuple of sample indices, `len(batches)` the steps.

    Samples are taken in shuffled order (`permutation`), in index order without `shuffle`, or in a given `order` (a
    sampler's; then `shuffle` and `seed` have no effect). A batch ends after `batch_size` samples, or before the sample
    that would take it over `tokens_per_batch` real tokens (encoder plus decoder). The batch that the end of the data
    cut short is the last one; `drop_last` leaves it out.

    lengths: (N,), (N, 2) or (N, 3) as in `lengths.py`. Errors: ConfigError unless exactly one of the two sizes is given
    and positive; DataError for a sample over `tokens_per_batch`, or an `order` that names a sample which does not exist
    or one sample twice in a batch.

    >>> list(GlobalBatches(np.array([5, 9, 4, 7]), tokens_per_batch=14, seed=0, shuffle=False))
    [(0, 1), (2, 3)]
    """

    __slots__ = ("_order", "_starts", "epoch", "num_samples", "seed")

    def __init__(
        self,
        lengths: LengthArray,
        *,
        batch_size: int | None = None,
        tokens_per_batch: int | None = None,
        seed: int,
        epoch: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
        order: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> None:
        table = as_length_array(lengths)
        if len(table) == 0:
            raise DataError("there are no samples to form global batches from: lengths is empty")
        if (batch_size is None) == (tokens_per_batch is None):
            raise ConfigError(
                f"batch_size is {batch_size} and tokens_per_batch is {tokens_per_batch}: give exactly one of the two"
            )
        for name, value in (("batch_size", batch_size), ("tokens_per_batch", tokens_per_batch)):
            if value is not None:
                check_integer(name, value, least=1)

        self.seed, self.epoch = seed, epoch
        if order is not None:
            self._order = _checked_order(order, len(table))
        elif shuffle:
            self._order = permutation(len(table), seed=seed, epoch=epoch)
        else:
            self._order = np.arange(len(table), dtype=np.int64)

        tokens = (table[:, 0] + table[:, 1])[self._order]
        if tokens_per_batch is None:
            assert batch_size is not None
            starts = list(range(0, len(self._order), batch_size))
            last_is_full = len(self._order) % batch_size == 0
        else:
            _refuse_too_long(tokens, self._order, tokens_per_batch)
            starts = _budget_starts(tokens, tokens_per_batch)
            last_is_full = int(tokens[starts[-1] :].sum()) == tokens_per_batch
        bounds = [*starts, len(self._order)]
        if drop_last and not last_is_full:
            bounds.pop()
        if len(bounds) < 2:
            size = f"batch_size {batch_size}" if tokens_per_batch is None else f"tokens_per_batch {tokens_per_batch}"
            raise ConfigError(
                f"drop_last leaves no global batch: {len(self._order)} samples of {int(tokens.sum())} tokens do not "
                f"fill {size}: lower it or keep the last batch"
            )
        self._starts = np.array(bounds, dtype=np.int64)
        self.num_samples = int(self._starts[-1])
        if order is not None:
            self._refuse_repeats(len(table))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, step: int) -> tuple[int, ...]:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} is outside of the {len(self)} global batches of epoch {self.epoch}")
        return tuple(self._order[self._starts[step] : self._starts[step + 1]].tolist())

    def _refuse_repeats(self, num_indices: int) -> None:
        steps = np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self._starts))
        keys = np.sort(steps * num_indices + self._order[: self.num_samples])
        repeats = np.flatnonzero(keys[1:] == keys[:-1])
        if repeats.size:
            step, sample = divmod(int(keys[repeats[0]]), num_indices)
            raise DataError(
                f"order puts sample {sample} twice into global batch {step}: a sampler must not repeat within one"
            )


def _checked_order(order: Sequence[int] | npt.NDArray[np.int64], num_indices: int) -> npt.NDArray[np.int64]:
    indices = np.asarray(order)
    if indices.ndim != 1 or indices.size == 0 or not np.issubdtype(indices.dtype, np.integer):
        raise DataError(f"order has shape {indices.shape} and dtype {indices.dtype}: expected a list of sample indices")
    outside = np.flatnonzero((indices < 0) | (indices >= num_indices))
    if outside.size:
        place = int(outside[0])
        raise DataError(
            f"order names sample {int(indices[place])} at place {place} but there are {num_indices} samples"
        )
    return indices.astype(np.int64)


def _refuse_too_long(tokens: npt.NDArray[np.int64], order: npt.NDArray[np.int64], tokens_per_batch: int) -> None:
    place = int(tokens.argmax())
    if (longest := int(tokens[place])) > tokens_per_batch:
        raise DataError(
            f"sample {int(order[place])} has {longest} tokens but tokens_per_batch is {tokens_per_batch}: raise it to "
            f"at least {longest}, or prepare the data with a smaller max_seq_len and --truncate"
        )


def _budget_starts(tokens: npt.NDArray[np.int64], tokens_per_batch: int) -> list[int]:
    """First places of the batches; each takes samples until the next one would exceed the budget."""
    ends: list[int] = np.cumsum(
        tokens
    ).tolist()  # a list: bisect on it is ten times faster than searchsorted by scalars
    starts, start, before = [], 0, 0
    while start < len(ends):
        starts.append(start)
        start = bisect_right(ends, before + tokens_per_batch, lo=start)
        before = ends[start - 1]
    return starts
