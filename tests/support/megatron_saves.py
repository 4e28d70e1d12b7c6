"""Megatron-core's own saves, without the server process that each rank starts for a queue of results.

That process imports torch anew and outlives its rank. A save that is awaited puts its results where it takes them: in
the rank itself.
"""

from __future__ import annotations

import queue
from importlib import import_module


def keep_results_in_rank() -> None:
    """Of saves that are awaited, in this process and its forks."""
    writer = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    results: queue.Queue[object] = queue.Queue()
    vars(writer)["_get_write_results_queue"] = lambda: results
