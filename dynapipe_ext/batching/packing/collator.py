"""Documents end to end in few rows, as inputs of a transformers model that treats each as if it were alone.

What keeps documents apart is the model's attention, and not every setting of it does:

    attention=      emits                               exact with (transformers 5)
    "positions"     position_ids, use_cache=False       sdpa, eager
    "block-mask"    those and a 4D mask, rows x S x S   sdpa without sliding windows or chunks, with a cache too
    "cu_seqlens"    those and cu_seq_lens_q/k           sdpa, eager, `register_document_attention()`, flash-attn varlen

Three traps that give no error: transformers finds documents in position_ids only where there is no cache (use_cache is
on by default) and no 2D attention mask, and eager attention adds a boolean mask to its scores. So each batch carries
use_cache=False, none carries a 2D mask, and `check_packing` proves a model with its settings in a few small forwards,
with its windows, chunks and rotary frequencies.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.errors import ConfigError, DataError, check_integer

Packing = Literal["best-fit", "in-order"]
PackedAttention = Literal["positions", "block-mask", "cu_seqlens"]

_READ = frozenset({"input_ids", "labels", "loss_mask", "position_ids", "attention_mask"})
# Tokenizers write these beside the tokens, and sort documents by them; no model or loss reads them.
_BESIDE = frozenset({"special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length"})
IGNORED = -100  # the label that transformers' losses leave out


def pack_rows(
    lengths: Sequence[int], max_tokens: int | None = None, *, packing: Packing = "best-fit"
) -> list[list[int]]:
    """Indices of documents in rows of at most `max_tokens` positions (None: one row of everything).

    "best-fit": longest first, each into the fullest row that takes it; documents of a row by index.
    "in-order": as they come, a new row where the next does not fit: reading the rows gives the order back.

    >>> pack_rows([6, 4, 3, 5, 2], 10)
    [[0, 1], [2, 3, 4]]
    >>> pack_rows([6, 4, 3, 5, 2], 10, packing="in-order")
    [[0, 1], [2, 3, 4]]
    >>> pack_rows([6, 7, 3, 4], 10), pack_rows([6, 7, 3, 4], 10, packing="in-order")
    ([[1, 2], [0, 3]], [[0], [1, 2], [3]])

    Errors: DataError for an empty document or one longer than a row, by index.
    """
    if packing not in get_args(Packing):
        raise ConfigError(f"packing is {packing!r}: choose from {', '.join(map(repr, get_args(Packing)))}")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens} but a row needs 1 position or more")
    for index, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"document {index} has {length} tokens: leave empty documents out")
        if max_tokens is not None and length > max_tokens:
            raise DataError(
                f"document {index} has {length} tokens but a row has {max_tokens}: raise max_tokens, truncate or cut it"
            )
    if not lengths:
        return []
    if max_tokens is None:
        return [list(range(len(lengths)))]
    return _best_fit(lengths, max_tokens) if packing == "best-fit" else _in_order(lengths, max_tokens)


def _in_order(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free = -1
    for index, length in enumerate(lengths):
        if length > free:
            rows.append([])
            free = max_tokens
        rows[-1].append(index)
        free -= length
    return rows


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    rooms: list[int] = []  # distinct free positions of open rows, ascending
    open_rows: dict[int, list[int]] = {}  # free positions -> rows, the earliest last
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(rooms, lengths[index])
        if place < len(rooms):
            free = rooms[place]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del open_rows[free], rooms[place]
        else:
            free, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(index)
        left = free - lengths[index]
        if left:
            if left not in open_rows:
                bisect.insort(rooms, left)
                open_rows[left] = []
            open_rows[left].append(row)
    return [sorted(row) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Packed documents as arrays of shape (rows, S); S is the longest row, rounded up to the collator's multiple.

    labels are aligned with input_ids, as transformers expects (its loss shifts them): `IGNORED` at the first token of
    each document, which nothing predicts, where there is no loss, and in padding. position_ids restart at 0 in each
    document and in a row's trailing padding. document_ids count the documents of the whole batch; -1 in padding.
    cu_seqlens: borders in the flattened rows, the padding of a row being one more document. spans: for each document,
    in the order given, its row, start and end.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    spans: tuple[tuple[int, int, int], ...]

    @property
    def efficiency(self) -> float:
        """Real tokens over positions."""
        return sum(end - start for _, start, end in self.spans) / self.input_ids.size

    @property
    def num_targets(self) -> int:
        """Labels that carry loss: what a sum of losses is divided by."""
        return int((self.labels != IGNORED).sum())

    def unpack(self, values: Any) -> list[Any]:
        """Parts of an array or tensor of shape (rows, S, ...), such as logits, document by document as given."""
        return [values[row, start:end] for row, start, end in self.spans]

    def block_mask(self) -> npt.NDArray[np.bool_]:
        """(rows, 1, S, S): True where a position may look: back, and inside its own document (or the padding)."""
        same = self.document_ids[:, None, :, None] == self.document_ids[:, None, None, :]
        mask: npt.NDArray[np.bool_] = np.tril(same)
        return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingCollator:
    """A `collate_fn` for a DataLoader or Trainer: features in, inputs of a causal transformers model out.

    A feature maps input_ids and, if they are to differ from them, labels (aligned; -100 carries no loss) and loss_mask
    (true where a token is to be predicted) to flat sequences. Trainer drops loss_mask unless remove_unused_columns is
    False; labels it keeps. Texts, single numbers, mappings, what tokenizers write beside tokens, and token_type_ids
    that are all 0 are left aside. Weights and other arrays of numbers are refused, since a row has no place for them.
    Rows hold at most `max_tokens` positions, None for one row; `pad_multiple` rounds S up.
    """

    max_tokens: int | None = None
    packing: Packing = "best-fit"
    attention: PackedAttention = "positions"
    pad_multiple: int = 1
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        if self.attention not in get_args(PackedAttention):
            choices = ", ".join(map(repr, get_args(PackedAttention)))
            raise ConfigError(f"attention is {self.attention!r}: choose from {choices}")
        if self.packing not in get_args(Packing):
            raise ConfigError(f"packing is {self.packing!r}: choose from {', '.join(map(repr, get_args(Packing)))}")
        check_integer("pad_multiple", self.pad_multiple, least=1)
        check_integer("pad_token_id", self.pad_token_id, least=0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, least=1)
            if self.max_tokens < self.pad_multiple:
                raise ConfigError(
                    f"pad_multiple is {self.pad_multiple} but rows have {self.max_tokens} tokens: it must be no more"
                    " than a row"
                )

    def pack(self, features: Sequence[Mapping[str, Any]]) -> PackedRows:
        """The arrays of a batch. Errors: DataError for a feature that cannot be packed, by its place."""
        if not features:
            raise DataError("no features to pack: a batch needs at least one document")
        documents = [_document(place, feature) for place, feature in enumerate(features)]
        lengths = [len(tokens) for tokens, _ in documents]
        room = None if self.max_tokens is None else self.max_tokens // self.pad_multiple * self.pad_multiple
        rows = pack_rows(lengths, room, packing=self.packing)
        longest = max(sum(lengths[i] for i in row) for row in rows)
        row_len = math.ceil(longest / self.pad_multiple) * self.pad_multiple

        shape = (len(rows), row_len)
        input_ids = np.full(shape, self.pad_token_id, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        position_ids = np.zeros(shape, np.int64)
        document_ids = np.full(shape, -1, np.int32)
        spans = [(0, 0, 0)] * len(documents)
        borders = [0]
        for row, members in enumerate(rows):
            start = 0
            for index in members:
                tokens, targets = documents[index]
                end = start + len(tokens)
                input_ids[row, start:end] = tokens
                labels[row, start + 1 : end] = targets[1:]
                position_ids[row, start:end] = np.arange(len(tokens))
                document_ids[row, start:end] = index
                spans[index] = (row, start, end)
                borders.append(row * row_len + end)
                start = end
            if start < row_len:
                position_ids[row, start:] = np.arange(row_len - start)
                borders.append((row + 1) * row_len)
        return PackedRows(
            input_ids=input_ids,
            labels=labels,
            position_ids=position_ids,
            document_ids=document_ids,
            cu_seqlens=np.array(borders, np.int32),
            spans=tuple(spans),
        )

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Keyword arguments of `model(...)`: tensors, use_cache=False, and what `attention` asks for."""
        return self.model_inputs(self.pack(features))

    def model_inputs(self, packed: PackedRows) -> dict[str, Any]:
        """`packed` as tensors; take `packed.unpack(logits)` to get the documents back."""
        import torch

        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(packed.input_ids),
            "labels": torch.from_numpy(packed.labels),
            "position_ids": torch.from_numpy(packed.position_ids),
            "use_cache": False,
        }
        if self.attention == "block-mask":
            inputs["attention_mask"] = torch.from_numpy(packed.block_mask())
        elif self.attention == "cu_seqlens":
            borders = torch.from_numpy(packed.cu_seqlens)
            longest = int(np.diff(packed.cu_seqlens).max())
            inputs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        return inputs


def _document(place: int, feature: Mapping[str, Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens and aligned labels of a feature."""
    if not isinstance(feature, Mapping):
        raise DataError(f"feature {place} is of type {type(feature).__name__}: give a mapping with input_ids")
    if "input_ids" not in feature:
        raise DataError(f"feature {place} has {', '.join(sorted(feature)) or 'nothing'} but no input_ids: tokenize it")
    tokens = _flat(place, "input_ids", feature["input_ids"], least=0)
    for name, value in feature.items():
        if name not in _READ and not _is_aside(place, name, value, tokens):
            raise DataError(
                f"feature {place} has {name}, for which packed rows have no place: remove the column (what says which"
                " tokens are to be predicted goes as loss_mask, and each document is a feature of its own)"
            )
    if "position_ids" in feature:
        positions = _flat(place, "position_ids", feature["position_ids"], tokens)
        if not np.array_equal(positions, np.arange(len(tokens))):
            raise DataError(
                f"feature {place} has position_ids of its own, but those of a document in a row are 0, 1, 2, …: remove"
                " the column"
            )
    if "attention_mask" in feature and not _flat(place, "attention_mask", feature["attention_mask"], tokens).all():
        raise DataError(f"feature {place} is padded already (its attention_mask has zeros): tokenize without padding")
    labels = tokens if feature.get("labels") is None else _flat(place, "labels", feature["labels"], tokens, least=0)
    if feature.get("loss_mask") is not None:
        labels = np.where(_flat(place, "loss_mask", feature["loss_mask"], tokens) != 0, labels, IGNORED)
    return tokens, labels


def _is_aside(place: int, name: str, value: Any, tokens: npt.NDArray[np.int64]) -> bool:
    """Whether a row of this feature is the same without the column."""
    if value is None or name in _BESIDE or isinstance(value, str | bytes | Mapping):
        return True
    if name == "token_type_ids":  # tokenizers write them unasked
        return not _flat(place, name, value, tokens).any()
    try:
        array = np.asarray(list(value) if isinstance(value, Set) else value)
    except (TypeError, ValueError, RuntimeError):  # of unequal lengths, or a tensor that numpy cannot hold
        return not hasattr(value, "shape") and not _holds_numbers(value)
    if array.ndim == 0:
        return "weight" not in name
    if array.dtype.kind == "O":
        return not _holds_numbers(array.tolist())
    return not array.size or array.dtype.kind not in "biufc"


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_numbers, value))
    return isinstance(value, Number) or hasattr(value, "shape")


def _flat(
    place: int, name: str, values: Any, like: npt.NDArray[np.int64] | None = None, *, least: int | None = None
) -> npt.NDArray[np.int64]:
    """`values`, none below `least` but `IGNORED`; as many as `like` has."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} of feature {place} is no array ({error}): give a flat sequence of integers") from error
    if least is None and array.dtype.kind == "f" and np.isin(array, (0, 1)).all():
        array = array.astype(np.int64)  # a mask
    if array.ndim != 1 or (array.size and array.dtype.kind not in ("iu" if least == 0 else "iub")):
        raise DataError(
            f"{name} of feature {place} has shape {array.shape} and type {array.dtype}: a flat sequence of integers is"
            " expected"
        )
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{name} of feature {place} has {array.max()}: integers here have at most 64 bits, with a sign")
    if least is not None and (wrong := array[(array < least) & ((array != IGNORED) | (name != "labels"))]).size:
        raise DataError(f"{name} of feature {place} has {wrong[0]}: give ids from 0, and {IGNORED} in labels alone")
    if like is not None and len(array) != len(like):
        raise DataError(f"{name} of feature {place} has {len(array)} entries but input_ids has {len(like)}: align them")
    return array.astype(np.int64)
