"""Whose nodes meet at a place: the first node leaves the id of its job in torch's store there, and others look.

Nodes that people start one by one agree on place and id by themselves. At the place of another job a node would wait
for minutes and then say nothing of it. A process of its own looks, as torch takes long to load:
`python -m dynapipe_ext.launch.processes.meeting_place HOST PORT ID LAUNCHER NODE_RANK`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from dynapipe_ext.launch.processes.agent import NodePlace, Order
from dynapipe_ext.launch.processes.cluster import USER_ERROR_STATUS, JobError, Supervised, say_at_once

_KEY = "dynapipe/job"
_COME_S = 600.0  # for the first node to open the place
_LEAVE_S = 20.0  # and then to leave its id there


@contextmanager
def refusing_other_job(place: NodePlace) -> Iterator[Callable[[], Order]]:
    """Inside, the function returns no orders for the node. Once another job is known to meet at the place, it raises a
    JobError, whose message is already printed."""
    host, _, port = place.rdzv_endpoint.rpartition(":")
    words = [host.strip("[]"), port, place.rdzv_id, str(os.getpid()), str(place.node_rank or 0)]
    with Supervised.spawn("visitor", [sys.executable, "-m", __name__, *words]) as visitor:

        def order() -> Order:
            if visitor.poll() == USER_ERROR_STATUS:
                raise JobError("", USER_ERROR_STATUS)
            return ""

        yield order


def main(words: Sequence[str]) -> int:
    """2 where nodes of another job meet at the place; 0 else, also where nobody does, as torchrun tells."""
    from torch._C._distributed_c10d import TCPStore

    host, port, job, launcher, node_rank = words
    own = {"id": job, "launcher": launcher, "host": socket.gethostname()}
    try:
        limit = timedelta(seconds=_COME_S)
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        if int(node_rank):
            with suppress(RuntimeError):
                store.wait([_KEY], timedelta(seconds=_LEAVE_S))
        first = json.loads(store.compare_set(_KEY, "", json.dumps(own)))
    except RuntimeError:
        return 0
    if first["id"] == job:
        return 0
    say_at_once(
        f"dynapipe: error: at {host}:{port} the nodes of the job {first['id']} meet (process {first['launcher']} on"
        f" {first['host']}), not those of this one, {job}: give this one another port by --rdzv-endpoint on every node;"
        " if both are one job, give all its nodes the same --run-dir or --rdzv-id"
    )
    return USER_ERROR_STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
