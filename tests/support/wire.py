"""What passes over the networks of hosts, every byte of every TCP connection, and secrets that must not be in it."""

from __future__ import annotations

import ctypes
import os
import re
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.hosts import STORE_PORT
from tests.support.limits import SOON_S

SECRETS_VARIABLE = "DYNAPIPE_TEST_SECRETS"  # a folder into which the ranks of a preloaded command write theirs
_ALL_PROTOCOLS, _PACKET_STATISTICS, _RCVBUFFORCE, _NEWNET = 3, 6, 33, 0x40000000
_BUFFER_BYTES, _LOOK_S = 128 << 20, 0.1

Connection = tuple[bytes, bytes]


class Wire:
    """The bytes of each direction of each connection, and the `arguments` that processes have had meanwhile."""

    def __init__(self) -> None:
        self.arguments: set[bytes] = set()
        self._pieces: dict[Connection, dict[int, bytes]] = {}

    def add(self, frame: bytes) -> None:
        """A frame of Ethernet that holds TCP over IPv4; others are left out. A loopback device shows each twice."""
        if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
            return
        ip = frame[14 : 14 + struct.unpack("!H", frame[16:18])[0] or None]
        segment = ip[(ip[0] & 15) * 4 :]
        payload = segment[(segment[12] >> 4) * 4 :]
        if payload:
            key = (ip[12:16] + segment[0:2], ip[16:20] + segment[2:4])
            self._pieces.setdefault(key, {})[int.from_bytes(segment[4:8], "big")] = payload

    def without(self, *ports: int) -> bytes:
        """All streams in a row but those from or to `ports`."""
        left_out = {struct.pack("!H", port) for port in ports}
        chosen = [key for key in self._pieces if left_out.isdisjoint((key[0][4:], key[1][4:]))]
        return b"".join(b"".join(piece for _, piece in sorted(self._pieces[key].items())) for key in chosen)


@contextmanager
def captured(namespaces: list[str]) -> Iterator[Wire]:
    """Of all devices of these network namespaces, while the context lasts. Needs root."""
    wire, stop = Wire(), os.pipe()
    taps = [_tap(name) for name in namespaces]

    def read() -> None:
        while (ready := select.select([*taps, stop[0]], [], [], _LOOK_S)[0]) != [stop[0]]:
            for tap in set(ready) - {stop[0]}:
                wire.add(tap.recv(1 << 18))
            if not ready:
                wire.arguments |= set(_arguments())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield wire
    finally:
        os.close(stop[1])
        reader.join(SOON_S)
        lost = [struct.unpack("II", tap.getsockopt(263, _PACKET_STATISTICS, 8))[1] for tap in taps]
        for tap in taps:
            tap.close()
        os.close(stop[0])
        assert lost == [0] * len(taps), "the capture has lost frames"


def _arguments() -> Iterator[bytes]:
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield place.read_bytes()


def _tap(namespace: str) -> socket.socket:
    """A socket that hears all devices of a namespace, which it is made in by a thread that enters it."""
    made: list[socket.socket] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{namespace}") as place:
            assert libc.setns(place.fileno(), _NEWNET) == 0, os.strerror(ctypes.get_errno())
        made.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)))
        made[0].setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _BUFFER_BYTES)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def keep_secrets(folder: Path) -> None:
    """Have the ranks of this process and of its forks write their secrets into `folder`."""
    from dynapipe_ext.executor.plans.channel import PlanDelivery
    from dynapipe_ext.executor.store.redis import RedisStore
    from dynapipe_ext.launch.job.job_keys import JobKeys

    own_delivery, own_store, own_key = PlanDelivery.__post_init__, RedisStore.__init__, JobKeys._key

    def write(kind: str, secret: str) -> None:
        (folder / f"{kind}-{os.getpid()}").write_text(secret)

    def delivery(self: PlanDelivery) -> None:
        own_delivery(self)
        write("plan-key", (self.plan_key or b"").hex())

    def store(self: RedisStore, address: object, *arguments: object, **named: object) -> None:
        write("password", address.password)  # type: ignore[attr-defined]
        own_store(self, address, *arguments, **named)  # type: ignore[arg-type]

    def key(self: JobKeys, purpose: str) -> bytes:
        write("secret", self.secret)
        return own_key(self, purpose)

    JobKeys._key = key  # type: ignore[method-assign]
    PlanDelivery.__post_init__ = delivery  # type: ignore[method-assign]
    RedisStore.__init__ = store  # type: ignore[method-assign, assignment]


def refuse_secrets(wire: Wire, folder: Path, said: str, *, num_starts: int = 1) -> None:
    """All ranks of a start have the same three secrets, kept in `folder`/secrets; none is in a frame, an argument, in
    what the job said or in a file that it leaves. A user's own store without TLS, at `STORE_PORT`, is left out."""
    files, kinds = folder / "secrets", ("secret", "password", "plan-key")
    kept = {kind: {file.read_text() for file in files.glob(f"{kind}-*")} for kind in kinds}
    assert all(1 <= len(secrets) <= num_starts for secrets in kept.values()), said
    left = [path.read_bytes() for path in folder.rglob("*") if path.is_file() and "secret" not in str(path)]
    frames = wire.without(STORE_PORT)
    assert re.search(rb'"salt": ?"[0-9a-f]{64}"', frames)  # what travels has been seen
    for form in (form for secrets in kept.values() for secret in secrets for form in _forms(secret)):
        assert form not in frames
        assert not [1 for text in (*left, *wire.arguments, said.encode()) if form in text]


def _forms(secret: str) -> list[bytes]:
    """How a secret could be written: its characters, and the bytes that they stand for in hexadecimal."""
    try:
        return [secret.encode(), bytes.fromhex(secret)]
    except ValueError:
        return [secret.encode()]
