"""Room for a checkpoint: what one takes beside what is free, and whether a write failed for want of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from dynapipe_ext.costs.states import MOMENT_BYTES
from dynapipe_ext.errors import FORBIDDEN, NO_ROOM, format_bytes

AUTO_SAVE_S = 600.0  # between saves that nobody asked for
_MASTER_BYTES = 4  # of a 16-bit weight
# Where nothing can be written, now or at another start.
_LASTING = (*NO_ROOM, *FORBIDDEN)
_RUSTS_NUMBER = re.compile(r"\(os error (\d+)\)")  # safetensors'
_PROBE_BYTES = 1 << 16


def bytes_of_checkpoint(num_trained: int, dtype: str, num_moments: int) -> int:
    """Of so many parameters with the moments that their optimizer keeps of each; `dtype` is torch's name of the
    weights'."""
    weight_bytes = 4 if dtype == "float32" else 2 + _MASTER_BYTES
    return num_trained * (weight_bytes + MOMENT_BYTES * num_moments)


def free_disk_bytes(place: Path) -> int:
    """What a user may write on the file system of a place, of which the last folders need not be there yet."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def lacks_room(root: Path, num_bytes: int) -> str:
    """What a checkpoint needs beside what is free, where that is less; else nothing."""
    return needed_and_free(root, num_bytes) if free_disk_bytes(root) < num_bytes else ""


def needed_and_free(root: Path, num_bytes: int) -> str:
    """
    >>> import unittest.mock as mock
    >>> with mock.patch("shutil.disk_usage", lambda _: mock.Mock(free=1_200_000)):
    ...     needed_and_free(Path("/"), 96_000_000_000)
    'takes about 96.0 GB below /, where 1.20 MB are free'
    """
    return f"takes about {format_bytes(num_bytes)} below {root}, where {format_bytes(free_disk_bytes(root))} are free"


def why_unwritable(error: BaseException, folder: Path) -> str:
    """The operating system's words for `unwritable_number`, or nothing."""
    number = unwritable_number(error, folder)
    return os.strerror(number) if number else ""


def unwritable_number(error: BaseException, folder: Path) -> int:
    """The operating system's number of a place that is full, read-only or not ours, where that is why a write failed;
    else 0. torch and safetensors have errors of their own, over the system's or in its place."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if named := _RUSTS_NUMBER.search(str(cause)):
            number = int(named[1])
        if number is not None:
            return number if number in _LASTING else 0
        cause = cause.__cause__ or cause.__context__
    return _refused_now(folder)


def _refused_now(folder: Path) -> int:
    probe = folder / ".probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return error.errno if error.errno in _LASTING else 0
    finally:
        with contextlib.suppress(OSError):  # of a place that is read-only
            probe.unlink()
    return 0
