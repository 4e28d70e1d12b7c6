"""Where nodes meet: a job's own id and port, and one line at once where another job or program is there."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from dynapipe_ext.launch.processes.agent import NodePlace, Order
from dynapipe_ext.launch.processes.cluster import JobError
from dynapipe_ext.launch.processes.meeting_place import main, refusing_other_job
from dynapipe_ext.launch.processes.network import holder_of_port
from tests.support.limits import LIMIT_S, SOON_S


def test_who_has_a_port_is_named_and_a_free_one_is_nobodys() -> None:
    for host in ("127.0.0.1", ""):
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            assert holder_of_port(port).startswith(f"process {os.getpid()} ('python")
        assert holder_of_port(port) == ""


def test_a_node_at_the_place_of_another_job_says_whose_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever comes first; a later node of the same job, and one started again, find theirs."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S), wait_for_workers=False)
    visits = (("mine", "0", 0), ("mine", "1", 0), ("mine", "1", 0), ("other", "1", 2), ("other", "0", 2))
    for job, node_rank, status in visits:
        assert main(["127.0.0.1", str(store.port), job, "77", node_rank]) == status
    host = socket.gethostname()
    says = f"dynapipe: error: at 127.0.0.1:{store.port} the nodes of the job mine meet (process 77 on {host}), not"
    lines = capfd.readouterr().err.splitlines()
    assert [line.startswith(f"{says} those of this one, other: give this one another port") for line in lines] == [
        True,
        True,
    ]


def test_a_node_ends_once_its_visitor_has_met_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = NodePlace(num_ranks=1, num_nodes=2, node_rank=1, rdzv_endpoint="[::1]:29400", rdzv_id="mine")
    visitor = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(visitor))
    for status in (1, 2):  # 1: nobody is there, which torchrun says
        visitor.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nexit {status}\n')
        visitor.chmod(0o700)
        with refusing_other_job(place) as order:
            if status == 1:
                time.sleep(0.5)
                assert order() == ""
            else:
                with pytest.raises(JobError) as caught:
                    ask_until_told(order)
                assert (caught.value.exit_status, caught.value.cause) == (2, "")
    words = (tmp_path / "words").read_text().split()
    assert words == ["-m", main.__module__, "::1", "29400", "mine", str(os.getpid()), "1"]


def ask_until_told(order: Callable[[], Order]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        order()
