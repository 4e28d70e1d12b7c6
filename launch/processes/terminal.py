"""Standard streams of a process that outlives its terminal."""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def outlive_terminal() -> None:
    """From now on what is written to a terminal that has been closed is lost: an error would end the process before it
    has saved. Forks of this process inherit that."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Terminal(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or stream.closed or not stream.isatty():
        return stream
    stream.flush()
    raw = _Terminal(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
