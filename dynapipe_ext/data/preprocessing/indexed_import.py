"""Megatron's `.bin/.idx` as a dataset folder: its tokens copied, its lengths taken from the index."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.dataset import (
    TOKENS_FILE,
    TokenDataset,
    is_prepared,
    move_into_place,
    refuse_other_content,
    seal,
)
from dynapipe_ext.data.indexed_dataset import IndexedTokens, bin_path
from dynapipe_ext.errors import ConfigError, DataError

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
    """Write the folder `output`: a Megatron data set with its sequences as samples, every token but the first a target.

    `progress` gets tokens done and in all. The folder appears whole or not at all.

    Errors: DataError for a data set that is damaged or has ids of `vocab_size` or above, or sequences of fewer than 2
    tokens without `skip_empty`; ConfigError for an output that exists, without `overwrite`.
    """
    data, place = IndexedTokens(prefix, skip_empty=skip_empty), Path(output)
    refuse_other_content(place)
    if is_prepared(place) and not overwrite:
        raise ConfigError(f"{place} exists: pass --overwrite or name another folder")
    sizes = data.index.lengths[data.sequences].astype(np.int64)
    total = int(sizes.sum())
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    try:
        partial.chmod(0o755)
        done = 0
        with (partial / TOKENS_FILE).open("wb") as file:
            for start, stop in _runs(data, sizes):
                for begin in range(start, stop, _CHUNK_TOKENS):
                    piece = data.tokens[begin : min(stop, begin + _CHUNK_TOKENS)]
                    low, high = int(piece.min()), int(piece.max())
                    if low < 0 or high >= vocab_size:
                        raise DataError(
                            f"{bin_path(prefix)} has the id {low if low < 0 else high} but the vocabulary has"
                            f" {vocab_size}: give --vocab-size, or the tokenizer, that the data was made with"
                        )
                    file.write(piece.astype(dtype).tobytes())
                    done += len(piece)
                    if progress is not None:
                        progress(done, total)
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
        move_into_place(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TokenDataset.open(place)


def _runs(data: IndexedTokens, sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first token, end) of the longest runs of samples that lie end to end in the `.bin`."""
    starts = data.index.offsets[data.sequences] // data.index.dtype.itemsize
    ends = starts + sizes
    borders = np.flatnonzero(ends[:-1] != starts[1:]) + 1
    firsts, lasts = [0, *borders.tolist()], [*(borders - 1).tolist(), len(sizes) - 1]
    for first, last in zip(firsts, lasts, strict=True):
        yield int(starts[first]), int(ends[last])
