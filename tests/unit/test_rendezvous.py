"""How nodes find each other: their places, and who is refused without harm to the job."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo

from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.launch.processes import rendezvous
from dynapipe_ext.launch.processes.network import free_port, holder_of_port, is_own_host
from dynapipe_ext.launch.processes.rendezvous import NodesPlace, SeveralNodes
from tests.support.limits import LIMIT_S

SECRET = "a secret of this job, long enough"
NextStart = Callable[[SeveralNodes], Future[RendezvousInfo]]


@pytest.fixture
def begin() -> NextStart:
    """Begins a node's next start. It returns once the first node listens: torch looks again seconds later."""
    pool = ThreadPoolExecutor(8)

    def begin(node: SeveralNodes) -> Future[RendezvousInfo]:
        start = pool.submit(node.next_rendezvous)
        while not start.done():
            with suppress(ConnectionRefusedError):
                socket.create_connection((node._place.host, node._place.port)).close()
                break
        return start

    return begin


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> NodesPlace:
    """The place of the first of three nodes, which look for news often."""
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.005)
    monkeypatch.setattr(rendezvous, "_LOOK_S", 0.0)
    return NodesPlace(host="127.0.0.1", port=free_port(), job="mine", num_nodes=3, node_rank=0, is_first=True)


def node(place: NodesPlace, rank: int | None, secret: str = SECRET, **changed: object) -> SeveralNodes:
    return SeveralNodes(replace(place, node_rank=rank, is_first=rank == 0, **changed), secret)  # type: ignore[arg-type]


def ranks(*starts: Future[RendezvousInfo]) -> list[int]:
    """The nodes' ranks; all share a store."""
    infos = [start.result(LIMIT_S) for start in starts]
    for info in infos:
        info.store.set(f"came/{info.rank}", "")
    infos[0].store.wait([f"came/{rank}" for rank in range(len(infos))], timedelta(seconds=LIMIT_S))
    assert {info.world_size for info in infos} == {len(infos)}
    return [info.rank for info in infos]


def test_who_has_a_port_is_named_and_a_free_one_is_nobodys() -> None:
    for host in ("127.0.0.1", ""):
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            assert holder_of_port(port).startswith(f"process {os.getpid()} ('python")
        assert holder_of_port(port) == ""
    assert is_own_host("localhost")
    assert not is_own_host("192.0.2.7")


def visitor(place: NodesPlace) -> dist.TCPStore:
    """Somebody at the store where nodes ask."""
    return dist.TCPStore("127.0.0.1", place.port, is_master=False, wait_for_workers=False)


def wait_for(store: dist.TCPStore, key: str) -> None:
    store.wait([key], timedelta(seconds=LIMIT_S))


def test_a_node_that_does_not_belong_here_is_refused_alone_and_the_invited_ones_meet(
    place: NodesPlace, begin: NextStart, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may take a rank, replay what an invited node has asked, or write what no node would."""
    invited = [node(place, rank) for rank in range(3)]
    starts = [begin(invited[0])]
    wait_for(store := visitor(place), "ask/1")
    starts.append(begin(invited[1]))
    wait_for(store, "ask/2")
    uninvited = {
        "secret of this node differs": node(place, 2, ""),
        "or one of both has none": node(place, 2, "another secret, as long as that"),
        "the nodes of the job mine meet (process": node(place, 2, job="other"),
        "--nnodes is 4 here but 3 at": node(place, 2, num_nodes=4),
        "--node-rank is 0 here, which is no place": SeveralNodes(replace(place, is_first=False), SECRET),
        "--node-rank is 3 here, which is no place": node(place, 3),
    }
    for says, one in uninvited.items():
        with pytest.raises(ConfigError) as caught:
            one.next_rendezvous()
        assert says in str(caught.value)
    strange = (store.get("ask/2"), b"\x80\x04.", b"[]", b"[1, 2]", b'["{}", ""]', b'["[]", ""]', b"[" * 5000)
    for text in strange:
        number = store.add("asks", 1)
        store.set(f"ask/{number}", text)
        wait_for(store, f"answer/{number}")
        assert "fault" in store.get(f"answer/{number}").decode()
    store.add("asks", 5)  # announced, and never asked
    for one in (*uninvited.values(), invited[2]):
        one.shutdown()  # as torchrun does in the end, which is nothing to the others
    store.set("closed", "")
    assert [start.done() for start in starts] == [False, False]
    assert ranks(*starts, begin(invited[2])) == [0, 1, 2]
    said = capfd.readouterr().err
    assert said.count("dynapipe launch: a node is refused (") == len(uninvited) + len(strange)


def test_a_second_node_with_rank_0_is_refused_alone(
    place: NodesPlace, begin: NextStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, where torch opens a store, too, but writes into the one at the endpoint."""
    nodes = [node(place, rank) for rank in range(3)]
    starts = [begin(nodes[0])]
    wait_for(visitor(place), "ask/1")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(rendezvous, "_store", lambda *_, **__: visitor(place))
        second = node(place, 0)
        with pytest.raises(ConfigError, match=r"this node has --node-rank 0, but another node has opened 127\.0\.0\.1"):
            second.next_rendezvous()
        second.shutdown()
    assert ranks(*starts, *map(begin, nodes[1:])) == [0, 1, 2]


def test_nodes_take_the_places_that_they_name_and_the_others_in_order(place: NodesPlace, begin: NextStart) -> None:
    """The first is the one at the endpoint. A node that a user has started again takes the place of its forerunner."""
    place = replace(place, num_nodes=4)
    first, any_place, before, again, last = (node(place, rank) for rank in (0, None, 1, 1, 3))
    starts = [begin(first)]
    wait_for(store := visitor(place), "ask/1")
    for number, one in enumerate((any_place, before, again, last), 2):
        starts.append(begin(one))
        wait_for(store, f"ask/{number}")
    with pytest.raises(ConfigError, match=r"has taken --node-rank 1 since"):
        starts.pop(2).result(LIMIT_S)
    assert ranks(*starts) == [0, 2, 1, 3]


def test_a_node_that_asks_again_has_the_others_start_again_in_a_new_store(place: NodesPlace, begin: NextStart) -> None:
    """As torchrun does where it has lost ranks and may restart them."""
    nodes = [node(place, rank) for rank in range(3)]
    assert ranks(*map(begin, nodes)) == [0, 1, 2]
    assert [one.num_nodes_waiting() for one in nodes] == [0, 0, 0]
    again = begin(nodes[2])
    wait_for(visitor(place), "ask/4")
    assert nodes[0].num_nodes_waiting() == nodes[1].num_nodes_waiting() == 1
    assert ranks(again, begin(nodes[0]), begin(nodes[1])) == [2, 0, 1]
    late = begin(nodes[1])
    nodes[0].shutdown()
    with pytest.raises(ExecutionError, match="a node has given up the job that meets at 127"):
        late.result(LIMIT_S)


def test_nothing_of_a_rendezvous_is_unpickled_and_a_forged_answer_is_refused(
    place: NodesPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("unpickled"))
    forger = dist.TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False)
    forger.set("challenge", secrets.token_hex(16))
    answer = json.dumps({"rank": 1, "address": "127.0.0.1", "port": forger.port, "start": 1})
    forger.set("answer/1", json.dumps([answer, ""]))
    with pytest.raises(ConfigError, match="does not know the secret of this node"):
        node(place, 1).next_rendezvous()


def test_ranks_of_one_machine_meet_in_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

    from dynapipe_ext.launch.processes.env import RankEnv, rank_env

    monkeypatch.setenv("DYNAPIPE_MEETING", "")
    monkeypatch.setattr(rendezvous_handler_registry, "_registry", {})
    rendezvous.register_rendezvous(tmp_path)
    parameters = RendezvousParameters("dynapipe", "", "mine", 1, 1)
    info = rendezvous_handler_registry.create_handler(parameters).next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    variables = RankEnv(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=0
    ).variables() | {"DYNAPIPE_MEETING": os.environ["DYNAPIPE_MEETING"]}
    assert rank_env(variables).init_method == f"file://{tmp_path / 'rendezvous'}"
    assert rank_env(variables | {"WORLD_SIZE": "4"}).init_method == "env://"  # a rank of several machines
