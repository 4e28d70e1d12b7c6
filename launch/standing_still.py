"""Which processes have stood still: stopped by a signal or a debugger, so that they say nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


class StandingStill:
    """Since when processes have been stopped (SIGSTOP, a debugger)."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since_s: dict[int, float] = {}

    def seen(self, processes: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        """Of (process id, name), those that have been stopped for as long as the limit at every look."""
        now_s, stopped = time.monotonic(), [one for one in processes if _is_stopped(one[0])]
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid, _ in stopped}
        return [(pid, name) for pid, name in stopped if now_s - self._since_s[pid] >= self.limit_s]


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
