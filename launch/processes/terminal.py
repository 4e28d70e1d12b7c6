"""Standard streams of processes that outlive whoever reads them, or were started without them."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)  # a terminal that was closed, a reader that has ended


def complete_streams() -> None:
    """Open what this process lacks of its three standard descriptors: the next files would get their numbers, and what
    is meant for a stream would be written into them. Call before anything is opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def outlive_readers() -> None:
    """From now on what is written to a standard stream that nobody reads any more is lost: an error would end a run
    that has not saved. Forks of this process inherit that."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Unread(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return memoryview(data).nbytes


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return stream
    try:
        raw = _Unread(stream.fileno(), "w", closefd=False)
    except OSError:  # of a test
        return stream
    stream.flush()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
