"""The arrays and the description that make tokens.bin a dataset: the last step of everything that prepares one.

It works in pieces over what may be memory maps, so its memory does not grow with the data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.tokenizer import FILE_NAME
from dynapipe_ext.errors import DataError

FORMAT = "dynapipe-tokens/1"
TOKENS_FILE = "tokens.bin"
TARGETS_FILE = "targets.bin"
ARRAYS = ("offsets", "first_target", "task_ids", "lengths")
_CHUNK_SAMPLES = 1 << 18
_READ_BYTES = 4 << 20


def seal(
    folder: Path,
    *,
    dtype: np.dtype[Any],
    sizes: npt.NDArray[np.int64],
    first_target: npt.NDArray[np.int32],
    task_ids: npt.NDArray[np.int32],
    tasks: Sequence[str],
    tokenizer_json: str | None,
    vocab_size: int,
    facts: Mapping[str, object],
) -> None:
    """Write all files of a dataset beside its tokens.bin: arrays, tokenizer.json if given, and meta.json, with `facts`.

    `sizes` are tokens of each sample. Beside tokens.bin may lie targets.bin, a byte a token: 1 where it is a target;
    else all tokens from `first_target` on are. The fingerprint is the sha256 of tokens, arrays and
    tokenizer, that of samples without the tokenizer.

    Errors: DataError where the disk has no room.
    """
    digest = hashlib.sha256()
    has_mask = (folder / TARGETS_FILE).is_file()
    for name in (TOKENS_FILE, TARGETS_FILE) if has_mask else (TOKENS_FILE,):
        with (folder / name).open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    is_target = np.memmap(folder / TARGETS_FILE, np.uint8, "r") if has_mask else None
    num_samples = len(sizes)
    starts = range(0, num_samples, _CHUNK_SAMPLES)

    offsets = new_array(folder / "offsets.npy", np.int64, (num_samples + 1,))
    lengths = new_array(folder / "lengths.npy", np.int64, (num_samples, 3))
    copies = {"first_target": first_target, "task_ids": task_ids}
    copied = {name: new_array(folder / f"{name}.npy", np.int32, (num_samples,)) for name in copies}
    end = 0
    for start in starts:
        part = slice(start, min(start + _CHUNK_SAMPLES, num_samples))
        size = np.asarray(sizes[part], np.int64)
        ends = end + np.cumsum(size)
        offsets[part.start + 1 : part.stop + 1] = ends
        if is_target is None:
            num_targets = size - first_target[part]
        else:
            num_targets = np.add.reduceat(is_target[end : ends[-1]], ends - size - end, dtype=np.int64)
        end = int(ends[-1])
        lengths[part] = np.stack([size - 1, np.zeros_like(size), num_targets], axis=1)
        for name, source in copies.items():
            copied[name][part] = source[part]
    for name, array in {"offsets": offsets, **copied, "lengths": lengths}.items():
        for start in range(0, len(array), _CHUNK_SAMPLES):
            digest.update(array[start : start + _CHUNK_SAMPLES].tobytes())
        array.flush()
        assert name in ARRAYS
    samples = digest.hexdigest()
    if tokenizer_json is not None:
        (folder / FILE_NAME).write_text(tokenizer_json, encoding="utf-8")
        digest.update(tokenizer_json.encode())
    meta = {
        "format": FORMAT,
        "fingerprint": digest.hexdigest(),
        "samples_fingerprint": samples,
        "num_samples": num_samples,
        "num_tokens": end,
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "tasks": list(tasks),
        **facts,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def new_array(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new .npy file, mapped for writing, whose room on disk is taken. Errors: DataError where there is none.

    Without the room a full disk would end the process by SIGBUS at some later write.
    """
    try:
        array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}): make room, or choose another place") from None
    return array
