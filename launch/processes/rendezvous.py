"""The rendezvous of torchrun's agents, in place of torch's own, which unpickles what others can write.

a node ─► asks the first one for its place, with an HMAC which shows that it knows the job's secret
the first node ─► refuses a node that does not belong here, and only that one; once every place is asked for, it opens
                  a store for this start and tells all nodes where it is
agents and ranks ─► meet in that store

On one machine nothing listens: the ranks meet in a private file. What nodes tell one another is JSON.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from dynapipe_ext.errors import ConfigError, ExecutionError, short
from dynapipe_ext.launch.processes.agent import RENDEZVOUS
from dynapipe_ext.launch.processes.cluster import say_at_once
from dynapipe_ext.launch.processes.env import offer_meeting_file, shared_secret
from dynapipe_ext.launch.processes.network import is_own_host
from dynapipe_ext.launch.processes.scratch import is_guessable

_COME_S = 600.0  # for the first node to open its store, and for all others to come there
_CONNECT_S = 60.0
_POLL_S, _LOOK_S = 0.1, 1.0
_MOST_OPEN, _MOST_REFUSALS_SAID = 1000, 20
_ASKS, _CHALLENGE, _CLOSED = "asks", "challenge", "closed"


def register_rendezvous(folder: Path) -> None:
    """Give torchrun of this process the backend `RENDEZVOUS`. `folder` is private and outlives the ranks."""

    def make(parameters: RendezvousParameters) -> RendezvousHandler:
        if parameters.max_nodes == 1:
            offer_meeting_file(folder / "rendezvous")
            return OneNode(parameters.run_id)
        host, _, port = parameters.endpoint.rpartition(":")
        node_rank = parameters.get_as_int("node_rank")
        place = NodesPlace(
            host=host.strip("[]"),
            port=int(port),
            local_addr=parameters.local_addr or "",
            job=parameters.run_id,
            num_nodes=parameters.max_nodes,
            node_rank=node_rank,
            is_first=is_own_host(host.strip("[]")) if node_rank is None else node_rank == 0,
        )
        return SeveralNodes(place, shared_secret())

    rendezvous_handler_registry.register(RENDEZVOUS, make)


class _Agreed(RendezvousHandler):
    """What torchrun asks of every rendezvous."""

    def __init__(self, job: str) -> None:
        self._job = job

    def get_backend(self) -> str:
        return RENDEZVOUS

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self.shutdown()

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._job

    def shutdown(self) -> bool:
        return True


class OneNode(_Agreed):
    """The only node of a job. The agent's store is memory of its process; the address is one that nobody listens at."""

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPlace:
    """A node of `num_nodes`, which meet at `host` and `port`. `node_rank` None: any. `is_first`: it opens the store
    there. `local_addr` is the address at which the other nodes reach this one, if known."""

    host: str
    port: int
    job: str
    num_nodes: int
    node_rank: int | None
    is_first: bool
    local_addr: str = ""


class SeveralNodes(_Agreed):
    """One of several nodes. A short `secret` is not compared, since whoever listens could guess it by the comparison.

    Errors of `next_rendezvous`: ConfigError if the first node refuses this one; ExecutionError if nodes do not come
    within ten minutes, or the first one is lost.
    """

    def __init__(self, place: NodesPlace, secret: str) -> None:
        super().__init__(place.job)
        self._place, self._key = place, b"" if is_guessable(secret) else secret.encode()
        self._store: Any = None
        self._challenge = ""  # of this opening of the store: what was asked or said in another one does not count
        self._is_first = place.is_first
        self._num_starts, self._looked_s = 0, 0.0
        self._start_store: Any = None  # of the last start; on the first node it goes with this object
        self._unread: set[int] = set()  # numbers of asks that the first node has not seen
        self._last_ask, self._num_refusals = 0, 0
        self._nonces: set[str] = set()
        self._waiting: dict[int, dict[str, Any]] = {}  # asks by number, of the next start

    def next_rendezvous(self) -> RendezvousInfo:
        deadline_s = time.monotonic() + _COME_S
        try:
            if self._store is None:
                self._store = self._opened()
            number, nonce = self._ask()
            answer = self._answer(number, nonce, deadline_s)
            self._num_starts = int(answer["start"])
            address, port = str(answer["address"]), int(answer["port"])
            if not self._is_first:
                self._start_store = _store(address, port, is_first=False, limit_s=_CONNECT_S)
        except RuntimeError as error:
            raise ExecutionError(
                f"the first node, at {self._at}, does not answer ({str(error).splitlines()[0]}): look there, then start"
                " again"
            ) from error
        agents = PrefixStore("agents", self._start_store)
        return RendezvousInfo(agents, int(answer["rank"]), self._place.num_nodes, RendezvousStoreInfo(address, port))

    def num_nodes_waiting(self) -> int:
        """How many nodes ask to start again, such as one that has lost ranks."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return 0
        self._looked_s = time.monotonic()
        try:
            if self._is_first:
                self._serve()
                return len(self._waiting)
            return int(self._store.check([self._again]))
        except RuntimeError:  # the first node is lost, which the ranks notice
            return 0

    def shutdown(self) -> bool:
        """Have no node of the job wait for this one any more, if it is one of them."""
        if self._store is not None and (self._num_starts or self._is_first):
            with suppress(RuntimeError):  # the first node is gone
                self._store.set(_CLOSED, self._closed)
        return True

    @property
    def _at(self) -> str:
        return f"{self._place.host}:{self._place.port}"

    @property
    def _closed(self) -> bytes:
        return self._tag("closed", self._challenge).encode()

    @property
    def _again(self) -> str:
        return f"again/{self._num_starts}"

    def _opened(self) -> Any:
        place = self._place
        try:
            store = _store(place.host, place.port, is_first=self._is_first, limit_s=_COME_S)
        except RuntimeError:
            if not self._is_first or place.node_rank == 0:
                raise
            self._is_first = False  # another node of this machine has come first
            store = _store(place.host, place.port, is_first=False, limit_s=_COME_S)
        if self._is_first:
            own = secrets.token_hex(16)  # torch opens a store here, but asks the one at the endpoint
            if store.compare_set(_CHALLENGE, "", own) != own.encode():
                raise ConfigError(
                    f"this node has --node-rank 0, but another node has opened {self._at} on another machine: give this"
                    " one its own --node-rank"
                )
        self._challenge = store.get(_CHALLENGE).decode()
        return store

    def _tag(self, *words: str) -> str:
        """The HMAC of words under the secret; empty without a secret that can be compared."""
        return hmac.digest(self._key, json.dumps(words).encode(), "sha256").hex() if self._key else ""

    def _ask(self) -> tuple[int, str]:
        """Ask for a place; return the number of the ask and its nonce."""
        nonce, number = secrets.token_hex(16), int(self._store.add(_ASKS, 1))
        ask = {"job": self._place.job, "num_nodes": self._place.num_nodes, "nonce": nonce}
        ask |= {"node_rank": 0 if self._is_first else self._place.node_rank, "is_first": self._is_first}
        text = json.dumps(ask | {"who": _who()})
        tag = self._tag("ask", self._challenge, text)
        self._store.set(f"ask/{number}", json.dumps([text, tag]))
        return number, nonce

    def _answer(self, number: int, nonce: str, deadline_s: float) -> dict[str, Any]:
        while True:
            if self._is_first:
                self._serve()
            if self._store.check([f"answer/{number}"]):
                text, tag = json.loads(self._store.get(f"answer/{number}"))
                answer: dict[str, Any] = json.loads(text)
                if "fault" in answer:  # anybody may refuse: a node without the secret could not tell who did
                    raise ConfigError(str(answer["fault"]))
                if not hmac.compare_digest(tag, self._tag("answer", nonce, text)):
                    raise ConfigError(
                        f"whoever answers at {self._at} does not know the secret of this node: give every node the same"
                        " --secret-file, and another job another --rdzv-endpoint"
                    )
                return answer
            if self._store.check([_CLOSED]) and self._store.get(_CLOSED) == self._closed:
                raise ExecutionError(f"a node has given up the job that meets at {self._at}: look at its message")
            if time.monotonic() > deadline_s:
                raise ExecutionError(
                    f"not all {self._place.num_nodes} nodes have come to {self._at} within {_COME_S:g} s: start the"
                    " missing ones, or look at what they said"
                )
            time.sleep(_POLL_S)

    def _serve(self) -> None:
        """On the first node: look at new asks, and answer all once every place is asked for."""
        last = int(self._store.add(_ASKS, 0))
        while self._last_ask < last and len(self._unread) < _MOST_OPEN:
            self._last_ask += 1
            self._unread.add(self._last_ask)
        for number in sorted(self._unread):
            if self._store.check([f"ask/{number}"]):
                self._unread.discard(number)
                self._consider(number, self._store.get(f"ask/{number}"))
        if len(self._waiting) == self._place.num_nodes and any(ask["is_first"] for ask in self._waiting.values()):
            self._start()

    def _consider(self, number: int, raw: bytes) -> None:
        ask, fault = self._read_ask(raw)
        if fault:
            self._refuse(number, fault, ask)
            return
        self._nonces.add(ask["nonce"])
        if ask["node_rank"] is not None:
            for older in [one for one, other in self._waiting.items() if other["node_rank"] == ask["node_rank"]]:
                fault = f"{ask['who']} has taken --node-rank {ask['node_rank']} since"
                self._refuse(older, fault, self._waiting.pop(older))
        if self._num_starts:
            self._store.set(self._again, "")
        self._waiting[number] = ask

    def _read_ask(self, raw: bytes) -> tuple[dict[str, Any], str]:
        """An ask, and why it is refused (empty: it is not)."""
        unread: dict[str, Any] = {"who": "a stranger", "nonce": ""}
        try:
            text, tag = json.loads(raw)
            ask = unread | json.loads(text)
            wanted = self._tag("ask", self._challenge, text)
            is_known = hmac.compare_digest(tag.encode(), wanted.encode()) and ask["nonce"] not in self._nonces
            job, num_nodes, node_rank = str(ask["job"]), int(ask["num_nodes"]), ask["node_rank"]
            ranks = range(0 if ask["is_first"] else 1, self._place.num_nodes)
            is_taken = ask["is_first"] and any(other["is_first"] for other in self._waiting.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return unread, "this is no node of a job"
        place = self._place
        if job != place.job:
            return ask, (
                f"at {self._at} the nodes of the job {place.job} meet ({_who()}), not those of {short(job)}: give this"
                " job another --rdzv-endpoint; if both are one job, give all its nodes the same --run-dir or --rdzv-id"
            )
        if not is_known:
            return ask, (
                f"the secret of this node differs from that of the first node, at {self._at}, or one of both has none:"
                " give every node a file with the same line by --secret-file"
            )
        if num_nodes != place.num_nodes:
            return ask, f"--nnodes is {num_nodes} here but {place.num_nodes} at {self._at}: give all nodes the same"
        if is_taken or not (node_rank is None or (type(node_rank) is int and node_rank in ranks)):
            return ask, f"--node-rank is {short(node_rank)} here, which is no place that {self._at} has for this node"
        return ask, ""

    def _refuse(self, number: int, fault: str, ask: dict[str, Any]) -> None:
        self._store.set(f"answer/{number}", json.dumps([json.dumps({"fault": fault}), ""]))
        self._num_refusals += 1
        if self._num_refusals <= _MOST_REFUSALS_SAID:
            say_at_once(f"dynapipe launch: a node is refused ({short(ask['who'])}): {fault}")

    def _start(self) -> None:
        """Give every node that waits its place: the one that it named, else the next free one in the order of asks."""
        named = {ask["node_rank"] for ask in self._waiting.values()}
        free = iter(rank for rank in range(self._place.num_nodes) if rank not in named)
        address = self._place.local_addr or self._place.host
        self._start_store = _store(address, 0, is_first=True, limit_s=_CONNECT_S)
        self._num_starts += 1
        for number, ask in self._waiting.items():
            rank = next(free) if ask["node_rank"] is None else ask["node_rank"]
            answer = {"rank": rank, "address": address, "port": self._start_store.port, "start": self._num_starts}
            text = json.dumps(answer)
            self._store.set(f"answer/{number}", json.dumps([text, self._tag("answer", ask["nonce"], text)]))
        self._waiting = {}


def _who() -> str:
    return f"process {os.getppid()} on {socket.gethostname()}"


def _store(host: str, port: int, *, is_first: bool, limit_s: float) -> Any:
    limit = timedelta(seconds=limit_s)
    return TCPStore(host, port, is_master=is_first, timeout=limit, wait_for_workers=False)
