"""Megatron's `.bin/.idx`: tokens end to end, and an index of sequences and documents; text only.

The index: "MMIDIDX", version 1, a code for the dtype, the counts, then lengths (int32), byte offsets (int64) and the
first sequence of each document (int64, one more than documents), all little-endian
(megatron.core.datasets.indexed_dataset, 0.16). `import_indexed` copies such data into a dataset folder.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.data.dataset import (
    TOKENS_FILE,
    TokenDataset,
    TokenSample,
    appearing_whole,
    is_prepared,
    new_array,
    refuse_other_content,
    seal,
)
from dynapipe_ext.errors import ConfigError, DataError, short

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_FLOATS = {6: "float64", 7: "float32"}
_UINT16_VOCABULARY = 65_500  # Megatron's own bound, below 2^16
_MOST_TOKENS = (1 << 31) - 1  # of a sequence: its length is an int32
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class SequenceIndex:
    """The content of an `.idx`: `lengths` in tokens, `offsets` in bytes, and `documents`, the first sequence of
    each."""

    prefix: Path
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron chooses for ids of such a vocabulary.

    >>> token_dtype(50257), token_dtype(65500)
    (dtype('uint16'), dtype('int32'))
    """
    return np.dtype("<u2" if vocab_size < _UINT16_VOCABULARY else "<i4")


def bin_path(prefix: str | Path) -> Path:
    return _stem(prefix).with_name(_stem(prefix).name + ".bin")


def idx_path(prefix: str | Path) -> Path:
    return _stem(prefix).with_name(_stem(prefix).name + ".idx")


def lengths_path(prefix: str | Path) -> Path:
    return _stem(prefix).with_name(_stem(prefix).name + ".lengths.npy")


def is_indexed(path: str | Path) -> bool:
    """Whether a path is an `.idx` or `.bin`, or the prefix of both."""
    return Path(path).suffix in (".idx", ".bin") or (idx_path(path).exists() and bin_path(path).exists())


def read_index(prefix: str | Path) -> SequenceIndex:
    """The index of a data set, memory-mapped; `prefix` with or without suffix.

    Errors: DataError for a file that is missing, of another format, cut short or multimodal, and for impossible
    numbers.
    """
    path = idx_path(prefix)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give the path of a Megatron data set") from None
    if not header.startswith(_MAGIC):
        raise DataError(f"{path} is not an index of Megatron's format (it begins with {short(header[:9])})")
    if len(header) < _HEADER.size:
        raise DataError(f"{path} ends inside its header: copy it again")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"{path} has version {version} but only version {_VERSION} is known")
    if code not in _DTYPES:
        kind = _FLOATS.get(code, f"code {code}")
        raise DataError(f"{path} says that tokens are of {kind}, which cannot be ids: give a data set of text")
    expected_size = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if size == expected_size + num_sequences and num_sequences:
        raise DataError(
            f"{path} is multimodal ({num_sequences} sequence modes): only text can be read; take the text's data set"
        )
    if size != expected_size:
        raise DataError(f"{path} holds {size} bytes but its header says {expected_size}: copy it again")
    if num_sequences == 0 or num_documents == 0:
        raise DataError(f"{path} has {num_sequences} sequences: give a data set with at least one")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    after_lengths = _HEADER.size + 4 * num_sequences
    after_offsets = after_lengths + 8 * num_sequences
    index = SequenceIndex(
        prefix=_stem(prefix),
        dtype=np.dtype(_DTYPES[code]),
        lengths=raw[_HEADER.size : after_lengths].view("<i4"),
        offsets=raw[after_lengths:after_offsets].view("<i8"),
        documents=raw[after_offsets:].view("<i8"),
    )
    _check(index, path)
    return index


def write_index(
    path: str | Path,
    dtype: np.dtype[Any],
    lengths: npt.NDArray[np.integer[Any]],
    documents: npt.NDArray[np.integer[Any]] | None = None,
) -> None:
    """Write the `.idx` of sequences that lie end to end; without `documents` each sequence is a document.

    Reads `lengths` in pieces, so a memory map is never loaded whole. Errors: DataError for a sequence of 2^31 tokens.
    """
    num_sequences = len(lengths)
    if documents is None:
        documents = np.arange(num_sequences + 1, dtype=np.int64)
    pieces = range(0, num_sequences, _CHUNK)
    with Path(path).open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], num_sequences, len(documents)))
        for start in pieces:
            piece = np.asarray(lengths[start : start + _CHUNK])
            if piece.max(initial=0) > _MOST_TOKENS:
                place = start + int(piece.argmax())
                raise DataError(f"sequence {place} has {piece.max()} tokens but an index counts to {_MOST_TOKENS}")
            file.write(piece.astype("<i4").tobytes())
        offset = 0
        for start in pieces:
            ends = offset + np.cumsum(np.asarray(lengths[start : start + _CHUNK], np.int64)) * dtype.itemsize
            file.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes())
            offset = int(ends[-1])
        file.write(np.asarray(documents).astype("<i8").tobytes())


def index_lengths(index: SequenceIndex, *, skip_empty: bool = False) -> LengthArray:
    """(N, 3) lengths of the sequences, from the index alone: n tokens are n - 1 positions, all with a target.

    Errors: DataError for a sequence of fewer than 2 tokens, which has no label; `skip_empty` leaves it out.
    """
    positions = index.lengths[usable_sequences(index, skip_empty=skip_empty)].astype(np.int64) - 1
    return np.stack([positions, np.zeros_like(positions), positions], axis=1)


def write_lengths(path: str | Path, lengths: npt.NDArray[np.integer[Any]]) -> int:
    """Write the lengths of `index_lengths` with `skip_empty`, in pieces; returns how many sequences it left out.

    `path` appears whole or not at all.
    """
    starts = range(0, len(lengths), _CHUNK)
    num_usable = sum(int((lengths[start : start + _CHUNK] >= 2).sum()) for start in starts)
    part = Path(path).with_name(f".{Path(path).name}.part")
    try:
        array = new_array(part, np.int64, (num_usable, 3))
        end = 0
        for start in starts:
            piece = np.asarray(lengths[start : start + _CHUNK], np.int64)
            positions = piece[piece >= 2] - 1
            array[end : end + len(positions)] = np.stack([positions, np.zeros_like(positions), positions], axis=1)
            end += len(positions)
        array.flush()
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}): choose another place") from None
    finally:
        part.unlink(missing_ok=True)
    return len(lengths) - num_usable


def usable_sequences(index: SequenceIndex, *, skip_empty: bool) -> npt.NDArray[np.int64]:
    """The sequences of at least 2 tokens. Errors: as for `index_lengths`."""
    usable = np.flatnonzero(index.lengths >= 2)
    if not skip_empty and len(usable) < len(index.lengths):
        first = int(np.flatnonzero(index.lengths < 2)[0])
        raise DataError(
            f"{idx_path(index.prefix)}: sequence {first} has {index.lengths[first]} tokens;"
            f" {len(index.lengths) - len(usable)} sequences in all have fewer than the 2 that one label needs: leave"
            " them out with --skip-empty"
        )
    if not len(usable):
        raise DataError(f"{idx_path(index.prefix)} has no sequence of 2 tokens, and so no label: give other data")
    return usable


class IndexedTokens:
    """A Megatron data set as samples, memory-mapped: for DynaPipeDataLoader, without a copy of its tokens.

    Sample i is the i-th sequence, or with `skip_empty` the i-th of at least 2 tokens; every token but the first is a
    target. `lengths` comes from the index alone.
    """

    def __init__(self, prefix: str | Path, *, skip_empty: bool = False) -> None:
        self.index = read_index(prefix)
        self.skip_empty = skip_empty
        self.sequences = usable_sequences(self.index, skip_empty=skip_empty)
        self.lengths = index_lengths(self.index, skip_empty=skip_empty)
        self.tokens = _tokens(self.index)

    def __reduce__(self) -> tuple[Callable[[Path, bool], IndexedTokens], tuple[Path, bool]]:
        return _reopened, (self.index.prefix, self.skip_empty)  # a pickled memmap would carry its whole file

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside of the {len(self)} samples of {self.index.prefix}")
        sequence = int(self.sequences[index])
        start = int(self.index.offsets[sequence]) // self.index.dtype.itemsize
        tokens = self.tokens[start : start + int(self.index.lengths[sequence])]
        return TokenSample(int(index), tokens.astype(np.int64), 1)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the index and of the size of the tokens (not of the tokens: there may be terabytes)."""
        digest = hashlib.sha256(idx_path(self.index.prefix).read_bytes())
        digest.update(f"{self.tokens.nbytes}/{self.skip_empty}".encode())
        return digest.hexdigest()


def _reopened(prefix: Path, skip_empty: bool) -> IndexedTokens:
    return IndexedTokens(prefix, skip_empty=skip_empty)


def _tokens(index: SequenceIndex) -> npt.NDArray[Any]:
    path = bin_path(index.prefix)
    needed = int((index.offsets + index.lengths.astype(np.int64) * index.dtype.itemsize).max())
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): it belongs beside its .idx") from None
    if size < needed:
        raise DataError(f"{path} holds {size} bytes but its index needs {needed}: copy it again")
    return np.memmap(path, dtype=index.dtype, mode="r", shape=(size // index.dtype.itemsize,))


def _check(index: SequenceIndex, path: Path) -> None:
    for name, bad in (
        ("a negative length", index.lengths.min() < 0),
        ("a negative offset", index.offsets.min() < 0),
        ("an offset inside a token", bool((index.offsets % index.dtype.itemsize).any())),
        ("documents out of order", bool((np.diff(index.documents) < 0).any()) or index.documents[0] != 0),
        ("documents that do not end with the last sequence", index.documents[-1] != len(index.lengths)),
    ):
        if bad:
            raise DataError(f"{path} is damaged: it has {name}; copy it again")


def _stem(prefix: str | Path) -> Path:
    path = Path(prefix)
    if path.name in ("", "..", "."):
        raise ConfigError(f"{str(prefix)!r} names no data set: give the path without .bin and .idx")
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


_CHUNK_TOKENS = 1 << 22


def import_indexed(
    prefix: str | Path,
    output: str | Path,
    *,
    vocab_size: int,
    tokenizer_json: str | None = None,
    skip_empty: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> TokenDataset:
    """Copy a Megatron data set into the dataset folder `output`: a sample for each sequence, all but the first token
    targets.

    `progress` receives the tokens done and in all. The folder appears whole or not at all.

    Errors: DataError for a data set that is damaged or has ids of `vocab_size` or above, and without `skip_empty` for
    sequences of fewer than 2 tokens; ConfigError for an existing output without `overwrite`.
    """
    data, place = IndexedTokens(prefix, skip_empty=skip_empty), Path(output)
    refuse_other_content(place)
    if is_prepared(place) and not overwrite:
        raise ConfigError(f"{place} exists: pass --overwrite or name another folder")
    sizes = data.index.lengths[data.sequences].astype(np.int64)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    with appearing_whole(place) as partial:
        pieces = _checked_pieces(data, sizes, vocab_size)
        _write_tokens(partial / TOKENS_FILE, pieces, dtype, int(sizes.sum()), progress)
        seal(
            partial,
            dtype=dtype,
            sizes=sizes,
            first_target=np.ones(len(sizes), np.int32),
            task_ids=np.zeros(len(sizes), np.int32),
            tasks=["unnamed"],
            tokenizer_json=tokenizer_json,
            vocab_size=vocab_size,
            facts={
                "num_truncated": 0,
                "num_skipped": len(data.index.lengths) - len(data),
                "source": data.fingerprint,
                "settings": {"imported": str(prefix)},
            },
        )
    return TokenDataset.open(place)


def _write_tokens(
    file: Path,
    pieces: Iterator[npt.NDArray[Any]],
    dtype: np.dtype[Any],
    num_tokens: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    num_done = 0
    with file.open("wb") as out:
        for piece in pieces:
            out.write(piece.astype(dtype).tobytes())
            num_done += len(piece)
            if progress is not None:
                progress(num_done, num_tokens)


def _checked_pieces(data: IndexedTokens, sizes: npt.NDArray[np.int64], vocab_size: int) -> Iterator[npt.NDArray[Any]]:
    """All tokens of the samples in pieces of bounded size. Errors: DataError for an id outside the vocabulary."""
    for start, stop in _runs(data, sizes):
        for begin in range(start, stop, _CHUNK_TOKENS):
            piece = data.tokens[begin : min(stop, begin + _CHUNK_TOKENS)]
            low, high = int(piece.min()), int(piece.max())
            if low < 0 or high >= vocab_size:
                raise DataError(
                    f"{bin_path(data.index.prefix)} has the id {low if low < 0 else high} but the vocabulary has"
                    f" {vocab_size}: give --vocab-size, or the tokenizer, that the data was made with"
                )
            yield piece


def _runs(data: IndexedTokens, sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first token, end) of the longest runs of samples that lie end to end in the `.bin`."""
    starts = data.index.offsets[data.sequences] // data.index.dtype.itemsize
    ends = starts + sizes
    borders = np.flatnonzero(ends[:-1] != starts[1:]) + 1
    firsts, lasts = [0, *borders.tolist()], [*(borders - 1).tolist(), len(sizes) - 1]
    for first, last in zip(firsts, lasts, strict=True):
        yield int(starts[first]), int(ends[last])
