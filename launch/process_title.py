"""What `ps` and `top` show of this process."""

from __future__ import annotations

import ctypes
from pathlib import Path

_PR_SET_NAME = 15
_MOST_NAME_BYTES = 15
_ARG_START, _ARG_END = 47, 48  # of /proc/self/stat (proc_pid_stat(5) counts from 1)


def set_process_title(title: str) -> None:
    """Show `title` as the name (top; its first 15 bytes) and as the command line (ps) of this process, as far as the
    room of the one it was started with goes. Does nothing where the kernel does not say where that lies."""
    text = title.encode()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, text[:_MOST_NAME_BYTES] + b"\0", 0, 0, 0)
    try:
        # The name of the program, in brackets, may hold anything: fields are counted behind it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[place - 2]) for place in (_ARG_START, _ARG_END))
        shown = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError, IndexError):
        return
    room = end - start
    if room < 2 or len(shown) != room:  # not as the kernel laid it out: leave it alone
        return
    # The last byte stays zero: another one there would have the kernel go on into the environment.
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
