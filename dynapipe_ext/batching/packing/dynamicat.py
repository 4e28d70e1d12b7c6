"""Batches of padded records by simple rules, as plain functions of lengths; records from fields; padding and weights.

    batches = limited(lengths, 12_000)                       # records x longest <= 12,000 tokens, fewest batches
    batches = arranged(batches, lengths, by="random", seed=1)
    rows = padded([tokens[i] for i in batches[0]], side="left")

Records are made of fields by `make_record`, and by `tokenize_records` in several processes. Each planner returns lists
of record indices and puts every record into one batch. Sorting by length ("smart batching") is what makes dynamic
padding cheap; `smart=False` keeps the records' own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.errors import ConfigError, DataError

RecordBatches = list[list[int]]
PaddingSide = Literal["left", "right"]
Arrangement = Literal["records", "padding", "random"]
Scaling = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True, slots=True)
class RecordPiece:
    """Tokens `start` to `end` of a record."""

    record: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def fixed_size(lengths: Sequence[int], batch_size: int, *, smart: bool = True) -> RecordBatches:
    """`batch_size` records a batch, fewer in the last.

    >>> fixed_size([5, 3, 1, 5, 2, 1, 2, 1], 3)
    [[0, 3, 1], [4, 6, 2], [5, 7]]
    """
    _positive("batch_size", batch_size)
    order = _order(lengths, smart=smart)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def limited(
    lengths: Sequence[int],
    limit: int,
    *,
    per_token: int = 1,
    per_record: int = 0,
    max_records: int | None = None,
    smart: bool = True,
) -> RecordBatches:
    """records x (per_record + per_token x longest) <= limit in each batch: tokens by default, or bytes.

    With `smart` these are the fewest batches that keep the limit (longest first, each as full as it goes).

    >>> limited([1, 1, 1, 2, 2, 3, 5, 5], 10)
    [[6, 7], [5, 3, 4], [0, 1, 2]]

    Errors: DataError naming a record that is above the limit alone.
    """
    _positive("limit", limit)
    if max_records is not None:
        _positive("max_records", max_records)
    if per_token < 0 or per_record < 0 or per_token + per_record < 1:
        raise ConfigError(f"a record of {per_record} and {per_token} a token costs nothing: give positive costs")
    lengths = _whole(lengths)
    order = _order(lengths, smart=smart)
    batches: RecordBatches = []
    longest = 0
    for index in order:
        cost = per_record + per_token * lengths[index]
        if cost > limit:
            raise DataError(
                f"record {index} of {lengths[index]} tokens costs {cost} but the limit of a batch is {limit}: raise the"
                " limit, or cut the record (see pieces)"
            )
        wider = max(longest, lengths[index])
        count = len(batches[-1]) + 1 if batches else 1
        full = max_records is not None and count > max_records
        if not batches or full or count * (per_record + per_token * wider) > limit:
            batches.append([])
            wider = lengths[index]
        batches[-1].append(index)
        longest = wider
    return batches


def length_difference(
    lengths: Sequence[int], max_difference: int, batch_size: int, *, max_tokens: int | None = None
) -> RecordBatches:
    """At most `batch_size` records a batch, whose lengths differ by at most `max_difference`: the fewest such batches.

    With `max_tokens`, records x longest stays within it too.

    >>> length_difference([10, 3, 9, 4, 1, 8], 2, 3)
    [[0, 2, 5], [3, 1], [4]]
    >>> length_difference([10, 3, 9, 4, 1, 8], 2, 3, max_tokens=20)
    [[0, 2], [5], [3, 1], [4]]

    Errors: DataError naming a record that is above `max_tokens` alone.
    """
    _positive("batch_size", batch_size)
    if max_difference < 0:
        raise ConfigError(f"max_difference is {max_difference}: 0 or more tokens are needed")
    if max_tokens is not None:
        _positive("max_tokens", max_tokens)
    lengths = _whole(lengths)
    batches: RecordBatches = []
    most = 0  # records of the last batch, by its longest
    for index in _order(lengths, smart=True):
        if batches and len(batches[-1]) < most and lengths[batches[-1][0]] - lengths[index] <= max_difference:
            batches[-1].append(index)
            continue
        batches.append([index])
        most = batch_size if max_tokens is None else min(batch_size, max_tokens // lengths[index])
        if not most:
            raise DataError(
                f"record {index} has {lengths[index]} tokens but a batch at most {max_tokens}: raise max_tokens, or cut"
                " the record (see pieces)"
            )
    return batches


def pieces(lengths: Sequence[int], max_length: int) -> list[RecordPiece]:
    """Records cut into pieces of at most `max_length` tokens, in order; none is lost.

    Batches are planned of their lengths.

    >>> [(p.record, p.start, p.end) for p in pieces([5, 2], 2)]
    [(0, 0, 2), (0, 2, 4), (0, 4, 5), (1, 0, 2)]
    """
    _positive("max_length", max_length)
    _check(lengths)
    return [
        RecordPiece(record, start, min(start + max_length, length))
        for record, length in enumerate(lengths)
        for start in range(0, length, max_length)
    ]


def _whole(lengths: Sequence[int]) -> list[int]:
    """As Python's integers: products of an array's own types overflow."""
    _check(lengths)
    return [int(length) for length in lengths]


def padding_tokens(batch: Sequence[int], lengths: Sequence[int]) -> int:
    """Padding of a batch that is padded to its longest record."""
    own = [int(lengths[i]) for i in batch]
    return len(own) * max(own) - sum(own)


def arranged(
    batches: RecordBatches, lengths: Sequence[int], *, by: Arrangement, descending: bool = False, seed: int = 0
) -> RecordBatches:
    """The same batches ordered by number of records, by padding, or at random."""
    match by:
        case "records":
            return sorted(batches, key=len, reverse=descending)
        case "padding":
            return sorted(batches, key=lambda batch: padding_tokens(batch, lengths), reverse=descending)
        case "random":
            return [batches[int(i)] for i in np.random.default_rng(seed).permutation(len(batches))]
        case _:
            raise ConfigError(f"by is {by!r}: choose from {', '.join(map(repr, get_args(Arrangement)))}")


def padded(
    rows: Sequence[Sequence[int]], *, side: PaddingSide = "right", value: int = 0, pad_multiple: int = 1
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows padded to the longest one (rounded up), and their mask: 1 where a token is real.

    >>> array, mask = padded([[1, 2, 3], [4]], side="left")
    >>> array.tolist(), mask.tolist()
    ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])
    """
    if side not in get_args(PaddingSide):
        raise ConfigError(f"side is {side!r}: choose 'left' or 'right'")
    _positive("pad_multiple", pad_multiple)
    if not rows:
        raise DataError("no rows to pad: a batch needs at least one record")
    width = -(-max(map(len, rows)) // pad_multiple) * pad_multiple
    array = np.full((len(rows), width), value, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for place, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        array[place, columns] = row
        mask[place, columns] = 1
    return array, mask


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record: at most `max_length` tokens, what is too long cut at side `cut`; whether it carries loss."""

    name: str
    loss: bool = True
    max_length: int | None = None
    cut: PaddingSide = "right"

    def __post_init__(self) -> None:
        if self.cut not in get_args(PaddingSide):
            raise ConfigError(f"field {self.name!r} is cut at {self.cut!r}: choose 'left' or 'right'")
        if self.max_length is not None:
            _positive(f"max_length of field {self.name!r}", self.max_length)


SUPERVISED = (Field("prompt", loss=False, cut="left"), Field("response"))
PRETRAINING = (Field("content"),)
INFERENCE = (Field("prompt", loss=False, cut="left"),)


def make_record(
    tokens: Mapping[str, Sequence[int]], fields: Sequence[Field], *, start: Sequence[int] = (), end: Sequence[int] = ()
) -> dict[str, list[int]]:
    """input_ids and loss_mask of a record, its fields in order: a feature for `PackingCollator`.

    `start` (no loss) and `end` (with the loss of the last field) are special tokens around it, not counted in any
    field's maximum.

    >>> fields = (Field("prompt", loss=False, max_length=2, cut="left"), Field("response"))
    >>> make_record({"prompt": [5, 6, 7], "response": [8, 9]}, fields, end=[2])
    {'input_ids': [6, 7, 8, 9, 2], 'loss_mask': [0, 0, 1, 1, 1]}
    """
    if not fields:
        raise ConfigError("a record without fields is empty: give SUPERVISED, PRETRAINING, INFERENCE or your own")
    input_ids, loss_mask = list(start), [0] * len(start)
    for field in fields:
        if field.name not in tokens:
            raise DataError(f"a record has {', '.join(sorted(tokens)) or 'no fields'} but no {field.name!r}: add it")
        ids = list(tokens[field.name])
        if field.max_length is not None and len(ids) > field.max_length:
            ids = ids[-field.max_length :] if field.cut == "left" else ids[: field.max_length]
        input_ids += ids
        loss_mask += [int(field.loss)] * len(ids)
    return {"input_ids": [*input_ids, *end], "loss_mask": [*loss_mask, *[int(fields[-1].loss)] * len(end)]}


def loss_weight(targets_in_batch: int, targets_in_step: int, *, num_ranks: int = 1) -> float:
    """Factor on a batch's mean loss, so that the gradients of a step are those of the mean over all its target tokens.

    A step's gradients are summed over its batches and, under DDP, averaged over `num_ranks`. A batch without targets
    has no mean (torch gives nan): count its loss as 0.
    """
    if targets_in_step < 1 or not 0 <= targets_in_batch <= targets_in_step or num_ranks < 1:
        raise ConfigError(
            f"a batch of {targets_in_batch} targets in a step of {targets_in_step} over {num_ranks} ranks is not"
            " possible: count the labels that carry loss over all batches and ranks of the step"
        )
    return int(targets_in_batch) * num_ranks / int(targets_in_step)


def scaled_learning_rate(
    base: float, targets_in_step: int, usual_targets: int, *, scaling: Scaling = "linear"
) -> float:
    """The learning rate of a step of more or fewer target tokens than `usual_targets`, for which `base` was chosen."""
    if targets_in_step < 0 or usual_targets < 1:
        raise ConfigError(f"{targets_in_step} targets in a step beside {usual_targets} usual ones cannot scale a rate")
    match scaling:
        case "linear":
            return base * targets_in_step / usual_targets
        case "sqrt":
            return float(base * (targets_in_step / usual_targets) ** 0.5)
        case "none":
            return base
        case _:
            raise ConfigError(f"scaling is {scaling!r}: choose from {', '.join(map(repr, get_args(Scaling)))}")


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}: 1 or more is needed")


def _check(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"record {index} has {length} tokens: leave empty records out")


def _order(lengths: Sequence[int], *, smart: bool) -> list[int]:
    _check(lengths)
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)) if smart else list(range(len(lengths)))
