"""A password in a file of its owner's: it stands in no argument, and in no shell's history."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dynapipe_ext.errors import ConfigError

_MOST_BYTES = 4096


def read_secret(path: Path, given: str | None) -> str:
    """The only line of a file that nobody else can read; `given` is what the environment says, which must agree.

    Errors: ConfigError, which never shows what the file holds.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the secret file {path} cannot be read ({error.strerror}): put it on every node") from error
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"the secret file {path} is open to others: chown it to yourself and chmod 600 it")
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError:
        lines = []
    if len(lines) != 1 or not lines[0] or len(text) > _MOST_BYTES:
        raise ConfigError(f"the secret file {path} must be one line of text of at most {_MOST_BYTES} B, the password")
    if given is not None and given != lines[0]:
        raise ConfigError(f"the secret file {path} and DYNAPIPE_STORE_PASSWORD differ: leave out one of them")
    return lines[0]
