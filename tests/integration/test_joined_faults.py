"""Joined ranks that lose one of them, or begin other collectives, end with an error that names who waits for what."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.stages.joined_ranks import JoinedRanks, join_ranks
from dynapipe_ext.executor.transport.strict import StrictTransport
from tests.support.limits import LIMIT_S

PLANE, CPU = Topology(dp=4), torch.device("cpu")
KILLED, LATE = 2, 1
MANY = 1 << 20  # rows of 2 floats: more than a socket holds


def meet(env: Any, *, limit_s: float = LIMIT_S) -> JoinedRanks:
    """All four ranks, joined."""
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=4, timeout=timedelta(seconds=LIMIT_S))
    return join_ranks(PLANE, env.rank, (4,), CPU, timeout_s=limit_s)[4]


def exchanged(joined: JoinedRanks, rows: int = 4) -> str:
    """What comes of an exchange."""
    try:
        with joined.acting("step 3, 1F2"):
            joined.exchange(torch.full((rows, 2), float(joined.number)), [rows // 4] * 4, [rows // 4] * 4)
    except ExecutionError as error:
        return str(error)
    return "no error"


def waited(rank: int) -> str:
    others = ", ".join(str(other) for other in range(4) if other != rank)
    return f"slice {rank} of 4 waited for ranks {others} in the exchange of positions for heads (step 3, 1F2)"


def killed_in_mid_exchange(env: Any, gone: Path) -> str:
    """A process in the place of a rank, killed while it exchanges: the last rank has yet to come."""
    child = os.fork()
    if not child:
        joined = meet(env)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        exchanged(joined, MANY)
        os._exit(1)  # it was to be killed before
    _, status = os.waitpid(child, 0)
    gone.write_text(str(os.WTERMSIG(status)))
    return ""


def test_a_rank_that_is_killed_in_mid_exchange_ends_the_others_with_an_error_that_names_it(run_ranks, tmp_path):
    gone = tmp_path / "gone"

    def main(env):
        if env.rank == KILLED:
            return killed_in_mid_exchange(env, gone)
        joined = meet(env)
        while env.rank == LATE and not gone.exists():
            time.sleep(0.05)
        return exchanged(joined, MANY)

    found = run_ranks(4, main)
    assert gone.read_text() == str(int(signal.SIGKILL))
    for rank in {0, 1, 2, 3} - {KILLED}:
        assert waited(rank) in found[rank]
        assert "another rank that takes part in it is late or gone" in found[rank]


def test_a_rank_that_does_not_come_ends_the_others_within_the_limit(run_ranks):
    def main(env):
        joined = meet(env, limit_s=3)
        if env.rank == LATE:
            dist.barrier()  # alive, but not where the others are
            return ""
        began_s = time.monotonic()
        said = exchanged(joined)
        took_s = time.monotonic() - began_s
        dist.barrier()
        return f"{said}|{took_s}"

    for rank, of_rank in enumerate(run_ranks(4, main)):
        if rank != LATE:
            said, took_s = of_rank.split("|")
            assert waited(rank) in said
            assert float(took_s) < LIMIT_S / 2


def test_a_strict_rank_that_begins_another_exchange_than_those_it_is_joined_with_is_refused(run_ranks):
    """One of four has its micro-batches in another order: gloo would give it the wrong rows."""

    def main(env):
        joined = meet(env)
        transport = StrictTransport(PLANE, env.rank, {}, timeout_s=LIMIT_S)
        strict = joined.taking_turns(transport.in_turn)
        found = []
        for action in ("0F0", "0F1") if env.rank != LATE else ("0F0", "0F2"):
            try:
                with strict.acting(f"step 3, {action}"):
                    strict.exchange(torch.zeros(4, 2), [1] * 4, [1] * 4)
                found.append("no error")
            except ExecutionError as error:
                found.append(str(error))
        transport.close()
        return found

    for rank, (first, second) in enumerate(run_ranks(4, main)):
        assert first == "no error"
        own, others = ("0F2", "0F1") if rank == LATE else ("0F1", "0F2")
        assert f"rank {rank} begins the exchange of positions for heads (step 3, {own}) where rank" in second
        assert f"begins the exchange of positions for heads (step 3, {others}): under NCCL this corrupts" in second


def test_an_exchange_waits_for_the_transfers_that_its_rank_has_posted_before(run_ranks):
    """On strict ranks, as on a device that runs what is posted one at a time."""

    def main(env):
        joined = meet(env)
        transport = StrictTransport(PLANE, env.rank, {}, timeout_s=LIMIT_S)
        order: list[str] = []
        started, release = threading.Event(), threading.Event()

        def first() -> None:
            started.set()
            release.wait(LIMIT_S)
            order.append("first")

        one = threading.Thread(target=transport.in_turn, args=("first", joined.group, first))
        one.start()
        started.wait(LIMIT_S)
        other = threading.Thread(
            target=transport.in_turn, args=("second", joined.group, lambda: order.append("second"))
        )
        other.start()
        order.append("posted")
        release.set()
        one.join(LIMIT_S)
        other.join(LIMIT_S)
        transport.close()
        return order

    assert run_ranks(4, main) == [["posted", "first", "second"]] * 4
