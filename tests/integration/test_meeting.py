"""Ranks that meet: who prepares is waited for long, who should connect or answer is not; both limits say who waits."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError, ExecutionError, named_collectives
from dynapipe_ext.launch.job.terms import UnlikeRanksError
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.launch.processes.network import free_port
from dynapipe_ext.launch.rank.meeting import Meeting

CPU = torch.device("cpu")


def alone_on_its_machine(env: RankEnv) -> RankEnv:
    return replace(env, local_rank=0, local_world_size=1)


def test_a_rank_that_prepares_for_longer_than_a_connection_may_take_is_waited_for(run_ranks):
    def main(env):
        meeting = Meeting(alone_on_its_machine(env), limit_s=30.0, silent_s=3.0)
        for what in ("meeting", "preparation"):
            if env.rank == 1:
                time.sleep(4.0)  # the work that others wait for
            meeting.arrive(what)
            if what == "meeting":
                meeting.connect(CPU, timeout_s=3.0)
        total = torch.tensor([env.rank])
        dist.all_reduce(total)
        return int(total)

    assert run_ranks(3, main) == [3, 3, 3]


def test_ranks_that_never_arrive_are_named(run_ranks):
    def main(env):
        meeting = Meeting(env, limit_s=4.0, silent_s=60.0)
        if env.rank in (1, 2):
            return ""
        with pytest.raises(ExecutionError) as caught:
            meeting.arrive("preparation of the data")
        return str(caught.value)

    said = run_ranks(4, main)
    for rank in (0, 3):
        assert said[rank].startswith(f"preparation of the data: rank {rank} waited 4 s for ranks 1, 2: look at what")


def test_ranks_that_were_started_otherwise_are_told_by_all_in_the_same_words(run_ranks):
    """By all, so that every node knows that another start would end the same way."""

    def main(env):
        meeting = Meeting(env, limit_s=60.0, silent_s=60.0)
        least = meeting.agree("nodes", {"lr": "0.1", "seed": "0"}, {"limit_gb": 3.0 - env.rank, "own": 1.0})
        meeting.agree("data", {"samples": "9"})
        with pytest.raises(ConfigError) as caught:
            meeting.agree("more", {"lr": "0.1"} | ({"seed": "1"} if env.rank == 2 else {}))
        return least, str(caught.value)

    host = socket.gethostname()
    says = f"more: seed is nothing for rank 0 ({host}) and 1 for rank 2 ({host}): start every node by the same command"
    for least, said in run_ranks(3, main):
        assert least == {"limit_gb": 1.0, "own": 1.0}
        assert said.startswith(says)


def test_ranks_that_were_started_otherwise_leave_together(run_ranks):
    """The store goes with the first who leaves: until then the others have to say and record why they end."""

    def main(env):
        meeting = Meeting(env, limit_s=60.0, silent_s=60.0)
        with pytest.raises(UnlikeRanksError) as caught:
            meeting.agree("nodes", {"lr": str(env.rank)})
        store, leaving = meeting._store, "dynapipe/nodes/leaving"
        if env.rank:
            while not store.add(leaving, 0):  # until the other one waits
                pass
            store.set("recorded", "")
        caught.value.leave_together()
        return store.check(["recorded"])

    assert run_ranks(2, main) == [True, True]


def test_the_first_rank_of_a_machine_shows_its_files_for_the_others_of_it(run_ranks):
    """Four ranks of two machines: what the last one has otherwise, of its own or of its machine's files, is named."""

    def main(env):
        meeting = Meeting(env, limit_s=60.0, silent_s=60.0)
        faults = []
        for case, (own, files) in enumerate((("1", "a"), ("1", "b"), ("2", "a"))):
            first, second = env.rank % 2 == 0, env.rank // 2 == 1
            terms = {"lr": own if second and not first else "1"}
            terms |= {"the file of [data] path": files if second else "a"} if first else {}
            try:
                meeting.agree(f"case {case}", terms, is_part=not first)
                faults.append("")
            except ConfigError as error:
                faults.append(str(error))
        return faults

    for same, other_file, other_setting in run_ranks(4, main):
        assert same == ""
        assert other_file.startswith("case 1: the file of [data] path is a for rank 0")
        assert f"and b for rank 2 ({socket.gethostname()}): have the same files on every node" in other_file
        assert other_setting.startswith("case 2: lr is 1 for rank 0")
        assert "2 for rank 3" in other_setting


def test_a_rank_that_is_lost_while_it_prepares_is_named_by_all_long_before_the_limit(run_ranks):
    """On another machine, so that nobody here sees its end."""

    def main(env):
        meeting = Meeting(alone_on_its_machine(env), limit_s=3600.0, silent_s=3.0)
        if env.rank == 1:
            return ""
        with pytest.raises(ExecutionError) as caught:
            meeting.arrive("preparation of the data")
        return str(caught.value)

    said = run_ranks(4, main)
    assert said.pop(1) == ""
    for words in said:
        assert words.startswith("preparation of the data: rank 1 has given no sign for 3 s: its machine is lost")


def test_a_store_that_stands_still_is_not_waited_for(run_ranks, tmp_path):
    port = free_port()

    def main(env):
        env = replace(env, init_method=f"tcp://127.0.0.1:{port}")
        meeting, keeper = Meeting(env, limit_s=3600.0, silent_s=1.0), tmp_path / "keeper"
        arrived = tmp_path / "arrived"
        if env.rank == 0:
            keeper.write_text(str(os.getpid()))
            meeting.arrive("meeting")
            while not arrived.exists():  # no sooner, as rank 1 arrives by this store's answers
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        meeting.arrive("meeting")
        arrived.touch()
        with pytest.raises(ExecutionError) as caught:
            meeting.arrive("preparation of the data")
        os.kill(int(keeper.read_text()), signal.SIGCONT)
        return str(caught.value)

    said = run_ranks(2, main)[1]
    assert said.startswith("preparation of the data: the store in which all ranks meet has not answered rank 1 for 1 s")


@pytest.mark.parametrize("answers", ["nothing", "swallows"])
def test_a_connection_that_stands_still_ends_its_rank_within_the_limit(run_ranks, answers):
    """However long its ranks may prepare: the peer has arrived, and then gives no address, or one that is never read,
    to which this rank connects or from which it awaits a connection."""

    def main(env):
        meeting = Meeting(env, limit_s=3600.0, silent_s=60.0)
        meeting.arrive("meeting")
        if env.rank == 1:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                if answers == "swallows":
                    announce_like_rank_0(meeting._store, silent.getsockname()[1])
                meeting.arrive("end")
            return ""
        with pytest.raises(ExecutionError) as caught:
            connect_and_hear_rank_1(meeting)
        meeting.arrive("end")
        return str(caught.value)

    said = run_ranks(2, main)[0]
    assert said.startswith(("connection of all ranks: another rank", "what rank 1 says: another rank"))


@named_collectives("what rank 1 says")
def connect_and_hear_rank_1(meeting):
    meeting.connect(CPU, timeout_s=1.0)
    dist.broadcast(torch.zeros(1), src=1)


def announce_like_rank_0(store, port):
    """What gloo writes of a rank to connect: rank 0's as rank 1's, with another port right before the address."""
    store.wait(["0//cpu//0/0"], timedelta(seconds=20))
    said = bytearray(store.get("0//cpu//0/0"))
    place = said.index(socket.inet_aton("127.0.0.1")) - 2
    said[place : place + 2] = port.to_bytes(2, "big")
    store.set("0//cpu//0/1", bytes(said))
