"""What a disk that is full, or not ours, does to a user's command: an error that names the place."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynapipe_ext.errors import DataError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing_in(place: str | Path) -> Iterator[None]:
    """Inside, `place` is written. Errors: DataError for what the operating system refuses."""
    try:
        yield
    except OSError as error:  # those of shutil.copytree have no strerror
        why = error.strerror or error
        raise DataError(f"{place} cannot be written ({why}): make room there, or choose another directory") from error
