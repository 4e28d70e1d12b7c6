"""Standard streams of processes that outlive whoever reads them, or were started without them."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)  # a terminal that was closed, a reader that has ended
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, or what the user may have, that a log lies on


def complete_streams() -> None:
    """Open what this process lacks of its three standard descriptors: the next files would get their numbers, and what
    is meant for a stream would be written into them. Call before anything is opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def outlive_readers() -> None:
    """From now on what is written to a standard stream that nobody reads any more is lost, and while the disk of a log
    is full: an error would end a run that has not saved. Forks of this process inherit that. A reader that only
    rests is waited for, also by a stream that does not block."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Outliving(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            while (written := super().write(data)) is None:  # the pipe is full and was told not to block
                select.select([], [self], [])
        except OSError as error:
            if error.errno not in (*_GONE, *_FULL):
                raise
            return memoryview(data).nbytes
        return written


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return stream
    try:
        raw = _Outliving(stream.fileno(), "w", closefd=False)
    except OSError:  # of a test
        return stream
    stream.flush()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
