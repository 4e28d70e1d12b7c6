"""Global batches of an epoch, the position of a step in them, and the tensors of a micro-batch."""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from types import UnionType
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray, LossNorm, MicroBatch, SampleLength, as_length_array
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import ConfigError, DataError, check_integer, short

_WEYL = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd
_MASK = (1 << 64) - 1


def plain_numbers(values: Iterable[Any]) -> tuple[Any, ...]:
    """Numpy's numbers as Python's, which states hold."""
    return tuple(value.item() if hasattr(value, "item") else value for value in values)


def permutation(num_samples: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The indices 0 to num_samples - 1, sorted by a pseudo-random key of each; the same on every machine.

    key(i) = mix(base + (i + 1) * WEYL) with base = mix(mix(seed + WEYL) + (epoch + 1) * WEYL), where mix is the output
    function of SplitMix64 (Steele, Lea and Flood 2014, fig. 17) and all sums are modulo 2**64; equal keys keep the
    order of the indices. The order uses no library's generator, so no library's version can change it.

    >>> permutation(8, seed=0, epoch=0).tolist()
    [0, 7, 2, 5, 4, 6, 3, 1]
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        check_integer(name, value, least=0, most=_MASK)
    base = _mix(_array(int(seed) + _WEYL))
    base = _mix(_array(int(base[0]) + (int(epoch) + 1) * _WEYL))
    counters = np.arange(1, num_samples + 1, dtype=np.uint64) * np.uint64(_WEYL)
    return _ascending(_mix(counters + base))


def _ascending(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """`np.argsort(keys, kind="stable")`, quicker: sorts the keys' upper bits with the index below them."""
    bits = np.uint64(max(1, (len(keys) - 1).bit_length()))
    packed = np.sort((keys >> bits << bits) | np.arange(len(keys), dtype=np.uint64))
    order = (packed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    same = packed[1:] >> bits == packed[:-1] >> bits
    if same.any():  # sort runs of equal upper bits by the whole key
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
    that would take it over `tokens_per_batch` real tokens (encoder plus decoder). The first batches are of
    `first_sizes` samples instead. `drop_last` leaves out the last batch where the data end before it is full.

    lengths: (N,), (N, 2) or (N, 3) as in `lengths.py`. Errors: ConfigError unless exactly one of the two sizes is given
    and positive; DataError for a sample over `tokens_per_batch`, and for an `order` that names an unknown sample, or
    one sample twice in a batch.

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
        first_sizes: Sequence[int] = (),
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
        if first_sizes and (batch_size is None or min(first_sizes) < 1):
            raise ConfigError(f"first_sizes {short(first_sizes)} must be positive, and go with batch_size alone")

        self.seed, self.epoch = seed, epoch
        if order is not None:
            self._order = _checked_order(order, len(table))
        elif shuffle:
            self._order = permutation(len(table), seed=seed, epoch=epoch)
        else:
            self._order = np.arange(len(table), dtype=np.int64)
        tokens = (table[:, 0] + table[:, 1])[self._order]
        self._starts = _borders(tokens, self._order, batch_size, tokens_per_batch, first_sizes, drop_last=drop_last)
        self.num_samples = int(self._starts[-1])
        if order is not None:
            self._refuse_repeats(len(table))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, step: int) -> tuple[int, ...]:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} is outside of the {len(self)} global batches of epoch {self.epoch}")
        return tuple(self._order[self._starts[step] : self._starts[step + 1]].tolist())

    @property
    def least_samples(self) -> int:
        """Samples of the smallest batch."""
        return int(np.diff(self._starts).min())

    def _refuse_repeats(self, num_indices: int) -> None:
        steps = np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self._starts))
        keys = np.sort(steps * num_indices + self._order[: self.num_samples])
        repeats = np.flatnonzero(keys[1:] == keys[:-1])
        if repeats.size:
            step, sample = divmod(int(keys[repeats[0]]), num_indices)
            raise DataError(
                f"order puts sample {sample} twice into global batch {step}: a sampler must not repeat within one"
            )


def _borders(
    tokens: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    batch_size: int | None,
    tokens_per_batch: int | None,
    first_sizes: Sequence[int] = (),
    *,
    drop_last: bool,
) -> npt.NDArray[np.int64]:
    """The first place of every batch in `order`, and the end of the last batch."""
    if tokens_per_batch is None:
        assert batch_size is not None
        first = [0, *accumulate(first_sizes)]
        starts = [*first[:-1], *range(first[-1], len(order), batch_size)]
        starts = starts[: bisect_left(starts, len(order))]
        last_is_full = len(order) == (first[len(starts)] if len(starts) < len(first) else starts[-1] + batch_size)
    else:
        _refuse_too_long(tokens, order, tokens_per_batch)
        starts = _budget_starts(tokens, tokens_per_batch)
        last_is_full = int(tokens[starts[-1] :].sum()) == tokens_per_batch
    borders = [*starts, len(order)]
    if drop_last and not last_is_full:
        borders.pop()
    if len(borders) < 2:
        size = f"batch_size {batch_size}" if tokens_per_batch is None else f"tokens_per_batch {tokens_per_batch}"
        raise ConfigError(
            f"drop_last leaves no global batch: {len(order)} samples of {int(tokens.sum())} tokens do not fill {size}:"
            " lower it or keep the last batch"
        )
    return np.array(borders, dtype=np.int64)


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
    # A list, since bisect on it is ten times faster than searchsorted by scalars.
    ends: list[int] = np.cumsum(tokens).tolist()
    starts, start, before = [], 0, 0
    while start < len(ends):
        starts.append(start)
        start = bisect_right(ends, before + tokens_per_batch, lo=start)
        before = ends[start - 1]
    return starts


PAD_TOKEN = 0


def collate(
    micro_batch: MicroBatch, samples: Sequence[TokenSample], *, loss_norm: LossNorm = "tokens"
) -> dict[str, Any]:
    """tokens, labels, position_ids (int64) and loss_weights (float32), each (rows, S), S = `micro_batch.encoder_len`;
    of pairs of documents also what `_of_pairs` says.

    `samples` must have the order of `micro_batch.samples`. A piece takes the positions start to start + encoder.
    loss_weights: 1 on target labels, or 1 / (target labels of the whole sample) under loss_norm "samples", but 1 where
    it is a pair; 0 elsewhere.
    position_ids: `document_positions`. Packed layout only: cu_seqlens, int32, the borders of `document_lengths`.

    Errors: DataError where samples and micro-batch do not match, or a sample has a decoder side.
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
    first, row = 0, 0
    for planned, sample in zip(micro_batch.samples, samples, strict=True):
        _check_sample(planned, sample)
        counts = loss_norm == "tokens" or planned.first  # what a pair's positions come to is for its loss to say
        weight = 1.0 if counts else 1.0 / max(1, sample.target)
        for begin, length in _spans(planned):
            place = (0, slice(first, first + length)) if packed else (row, slice(0, length))
            tokens[place] = sample.tokens[begin : begin + length]
            labels[place] = sample.tokens[begin + 1 : begin + length + 1]
            weights[place] = np.where(sample.is_target[begin + 1 : begin + length + 1], weight, 0.0)
            first, row = first + length, row + 1

    arrays: dict[str, Any] = {"tokens": tokens, "labels": labels, "loss_weights": weights, "position_ids": positions}
    if packed:
        arrays["cu_seqlens"] = np.cumsum((0, *documents)).astype(np.int32)
    if any(planned.first for planned in micro_batch.samples):
        arrays |= _of_pairs(micro_batch, samples)
    return arrays


def _spans(planned: SampleLength) -> list[tuple[int, int]]:
    """Where each of a sample's documents begins among its tokens, and its positions."""
    if not planned.first:
        return [(planned.start, planned.encoder)]
    return [(0, planned.first), (planned.first + 1, planned.encoder - planned.first)]


def _of_pairs(micro_batch: MicroBatch, samples: Sequence[TokenSample]) -> dict[str, Any]:
    """`document_lengths` of rows end to end, those of pairs first, two each; `pairs`, their indices (n,); and where all
    have some, `references`, float64 (n, 2). Errors: DataError for pairs beside single documents, or in whole rows."""
    if not all(planned.first for planned in micro_batch.samples) or micro_batch.attention != "document":
        raise DataError(
            f"a micro-batch has pairs of documents beside single ones, or attends over whole rows"
            f" ({micro_batch.attention}): plan pairs alone, with attention within documents"
        )
    arrays: dict[str, Any] = {
        "document_lengths": document_lengths(micro_batch),
        "pairs": np.array([planned.index for planned in micro_batch.samples], np.int64),
    }
    references = [sample.references for sample in samples if sample.references is not None]
    if len(references) == len(samples):
        arrays["references"] = np.array(references, np.float64)
    return arrays


def document_lengths(micro_batch: MicroBatch) -> tuple[int, ...]:
    """Lengths of the documents to which attention is confined, row by row, from the plan alone. They sum to rows x S.

    padded: every row is one document of S positions; causal attention does not see the padding at its end.
    packed: the samples, then any trailing padding as one more document. With attention "row" the row is one document.

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
    documents = tuple(micro_batch.documents)
    padding = row_len - sum(documents)
    return (*documents, padding) if padding else documents


def document_positions(micro_batch: MicroBatch) -> npt.NDArray[np.int64]:
    """The place of every position in its document, int64, (rows, S), from the plan alone.

    0 to S - 1 in every padded row, and in a packed row with attention "row". Otherwise positions restart at 0 in each
    document and in the trailing padding. With attention "carried" a piece attends to the earlier pieces, so its
    positions start at its place in the sample.

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
    if max(0, sample.num_first - 1) != planned.first:
        raise DataError(
            f"sample {sample.index} has {sample.num_first} tokens in its first document but its plan has"
            f" {planned.first} positions: the plan was made for other data"
        )
    end = planned.start + planned.encoder
    spans = (sample.is_target[begin + 1 : begin + length + 1] for begin, length in _spans(planned))
    target = sum(int(np.count_nonzero(is_target)) for is_target in spans)
    if target != planned.target:
        raise DataError(
            f"sample {sample.index} has {target} target tokens in positions {planned.start} to {end} but its plan has "
            f"{planned.target}: the plan was made for other data"
        )


SampleOrder = npt.NDArray[np.int64]  # shape (num_samples,): the sample indices of an epoch, in a sampler's order

STATE_FORMAT = "dynapipe-loader/1"
_STATE_TYPES: Mapping[str, type | UnionType] = {
    "epoch": int,
    "step": int,
    "global_step": int,
    "lengths": str,
    "rule": Mapping,
    "order": str | None,
}
_MISSING = object()


@dataclass(frozen=True, slots=True, order=True)
class StepPosition:
    """The place of a global batch: `step` counts within its epoch, `global_step` the run's optimizer steps before
    it."""

    epoch: int = 0
    step: int = 0
    global_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchRule:
    """How an epoch is cut into global batches; `batch_size` or `tokens_per_batch` is set. See `GlobalBatches`."""

    batch_size: int | None = None
    tokens_per_batch: int | None = None
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    first_sizes: tuple[int, ...] = ()

    def batches(self, lengths: LengthArray, epoch: int, order: SampleOrder | None = None) -> GlobalBatches:
        return GlobalBatches(
            lengths,
            batch_size=self.batch_size,
            tokens_per_batch=self.tokens_per_batch,
            first_sizes=self.first_sizes,
            seed=self.seed,
            epoch=epoch,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            order=order,
        )

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it; `first_sizes` only where there are some, as states of before have none."""
        return {name: value for name, value in asdict(self).items() if name != "first_sizes" or value}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> GlobalBatchRule:
        return cls(**{**raw, "first_sizes": tuple(raw.get("first_sizes", ()))})


def step_positions(
    rule: GlobalBatchRule, lengths: LengthArray, start: StepPosition, order: SampleOrder | None = None
) -> Iterator[tuple[StepPosition, tuple[int, ...]]]:
    """Every place from `start` on, with its sample indices: endless epochs, or the one epoch of `order`.

    >>> start = StepPosition(epoch=4, step=1, global_step=9)
    >>> steps = step_positions(GlobalBatchRule(batch_size=2), np.array([[5, 0, 5]] * 3), start)
    >>> [next(steps) for _ in range(2)]
    [(StepPosition(epoch=4, step=1, global_step=9), (2,)), (StepPosition(epoch=5, step=0, global_step=10), (0, 1))]
    """
    place = start
    while True:
        batches = rule.batches(lengths, place.epoch, order)
        for step in range(place.step, len(batches)):
            yield StepPosition(place.epoch, step, place.global_step + step - place.step), batches[step]
        place = following_epoch(place, len(batches))
        if order is not None:
            return


def following_epoch(place: StepPosition, num_steps: int) -> StepPosition:
    """The first place of the next epoch, where the epoch of `place` has `num_steps` steps."""
    return StepPosition(place.epoch + 1, 0, place.global_step + num_steps - place.step)


def order_of(sampler: Iterable[int], epoch: int) -> SampleOrder:
    """All indices that a sampler yields in an epoch. Its `set_epoch`, as torch's samplers have it, is called first."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    try:
        return np.fromiter((operator.index(index) for index in sampler), np.int64)
    except TypeError as error:
        raise DataError(f"the sampler must give single sample indices, not batches of them: {error}") from None


def array_digest(array: npt.NDArray[np.int64]) -> str:
    """Hash of the values and their shape, equal on all machines."""
    header = f"{array.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()


def check_state(state: Mapping[str, Any]) -> None:
    """Errors: DataError for anything but a loader's state, naming the key that is missing or of another type."""
    state_format = state.get("format") if isinstance(state, Mapping) else state
    if state_format != STATE_FORMAT:
        raise DataError(f"loader state has format {short(state_format)} but {STATE_FORMAT!r} is read here")
    for name, kind in _STATE_TYPES.items():
        value = state.get(name, _MISSING)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            shown = "missing" if value is _MISSING else short(value)
            raise DataError(
                f"{name} of the loader's state is {shown}: state_dict() never returns that, so load another"
                " checkpoint, or start the loader without a state"
            )
