"""A store over TLS: the server's certificate is checked, and a server that cannot show it is refused.

Both ways to have one: a TLS end of the user's own, here in front of a server without it, and a server of the job's that
has TLS itself (Debian's redis-server, where it is installed) with a certificate made for the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from dynapipe_ext.errors import StoreError, StoreRefusedError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.launch.store import RedisServer, make_certificate
from tests.support.limits import LIMIT_S

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with the openssl program"),
]


def certificate(folder: Path) -> tuple[Path, Path]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *subject], check=True, capture_output=True, timeout=LIMIT_S)
    return key, cert


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreAddress, Path]]:
    """A TLS end in front of the embedded server, which has none of its own."""
    key, cert = certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with RedisServer() as server, socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=forward, args=(plain,), daemon=True).start()

        def forward(plain: socket.socket) -> None:
            try:
                secure = context.wrap_socket(plain, server_side=True)
            except OSError:  # the client did not like the certificate
                plain.close()
                return
            inner = socket.socket(socket.AF_UNIX)
            inner.connect(server.address.path)
            threading.Thread(target=pump, args=(inner, secure), daemon=True).start()
            pump(secure, inner)

        threading.Thread(target=serve, daemon=True).start()
        yield StoreAddress(f"rediss://127.0.0.1:{listener.getsockname()[1]}/0", server.address.password), cert


def test_a_store_works_over_tls_with_the_servers_certificate(tls_server: tuple[StoreAddress, Path]) -> None:
    address, cert = tls_server
    trusted = StoreAddress(f"{address.url}?ssl_ca_certs={cert}", address.password)
    with RedisStore(trusted, namespace="tls") as store:
        store.put("a", b"1" * 100_000)
        assert store.get("a", 10.0) == b"1" * 100_000


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("rediss://127.0.0.1:{port}/0", r"is not trusted \(self-signed certificate\): give its authority's as"),
        ("rediss://127.0.0.1:{port}/0?ssl_ca_certs={key}", "NO_CERTIFICATE_OR_CRL_FOUND: check the files of"),
        ("rediss://127.0.0.1:{other}/0", "it speaks no TLS there"),
    ],
)
def test_what_tls_refuses_is_refused_at_once_however_long_a_server_may_take_to_start(
    url: str, says: str, tls_server: tuple[StoreAddress, Path]
) -> None:
    address, cert = tls_server
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"-ERR no TLS\r\n"), daemon=True).start()
        names = {"port": urlsplit(address.url).port, "other": other.getsockname()[1]}
        url = url.format(**names, cert=cert, key=cert.with_name("key.pem"))
        with pytest.raises(StoreRefusedError, match=says):
            RedisStore(StoreAddress(url, address.password), namespace="tls", connect_timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def own() -> Iterator[RedisServer]:
    try:
        server = RedisServer(tls_host="127.0.0.1")
    except StoreError as error:
        pytest.skip(f"no server with TLS here: {error}")
    with server:
        yield server


def test_a_server_of_the_job_serves_over_tls_with_a_certificate_of_its_own(own: RedisServer) -> None:
    with RedisStore(own.address, namespace="own") as store:
        store.put("a", b"1" * 100_000)
        assert store.get("a", 10.0) == b"1" * 100_000
    travelled = StoreAddress.from_json(json.loads(json.dumps(own.address.to_json())))
    with RedisStore(travelled, namespace="own") as store:
        assert store.get("a", 10.0) == b"1" * 100_000
    for secret in (own.address.password, "CERTIFICATE"):
        assert secret not in f"{own.address!r} {own.address}"


def test_its_private_key_is_this_users_alone_and_goes_with_it() -> None:
    with RedisServer() as plain:
        made = make_certificate(Path(plain.address.path).parent, "127.0.0.1")
        assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
        assert stat.S_IMODE(made.key.parent.stat().st_mode) == 0o700
    assert not made.key.exists()


def test_nobody_else_is_taken_for_it_and_nothing_is_served_in_the_clear(own: RedisServer, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "127.0.0.1")
    url, password = own.address.url, own.address.password
    for address in (StoreAddress(url, password, ca_pem=other.pem), StoreAddress(url, password)):
        with pytest.raises(StoreError, match=r"(?i)certificate verify failed"):
            RedisStore(address, namespace="n", connect_timeout_s=0.2)
    elsewhere = StoreAddress(url.replace("127.0.0.1", "localhost"), password, ca_pem=own.address.ca_pem)
    with pytest.raises(StoreError, match=r"(?i)hostname mismatch|certificate is not valid"):
        RedisStore(elsewhere, namespace="n", connect_timeout_s=0.2)
    with pytest.raises(StoreError, match="did not answer"):
        RedisStore(StoreAddress(url.replace("rediss", "redis"), password), namespace="n", connect_timeout_s=0.2)


def test_an_acl_user_has_its_own_password_and_its_own_keys_over_tls(own: RedisServer) -> None:
    rights = ["~dynapipe/*", "+@read", "+@write", "+@blocking", "+@transaction", "+@connection", "-@dangerous"]
    with RedisStore(own.address, namespace="acl") as admin:
        admin._client.execute_command("ACL", "SETUSER", "alice", "on", ">hers", *rights)
    named = own.address.url.replace("://", "://alice@", 1)
    with RedisStore(StoreAddress(named, "hers", own.address.ca_pem), namespace="acl") as store:
        store.put("a", b"1")
        assert store.get("a", 1.0) == b"1"
        with pytest.raises(redis.exceptions.NoPermissionError):
            store._client.flushall()
        with pytest.raises(redis.exceptions.NoPermissionError):
            store._client.get("somebody's")
    with pytest.raises(StoreError, match="refuses the password"):
        RedisStore(StoreAddress(named, own.address.password, own.address.ca_pem), namespace="acl")


def test_it_is_started_again_with_the_same_certificate(own: RedisServer) -> None:
    with RedisStore(own.address, namespace="again", reconnect_timeout_s=20.0) as store:
        store.put("a", b"1")
        os.kill(own.pid, signal.SIGKILL)
        store.put("a", b"2")
        assert store.get("a", 1.0) == b"2"


def test_a_program_without_tls_is_refused_by_name(tmp_path: Path) -> None:
    stub = tmp_path / "redis-server"
    stub.write_text("#!/bin/sh\necho Failed finding TLS support. >&2\nexit 1\n")
    stub.chmod(0o700)
    with pytest.raises(StoreError, match=r"no server serves over TLS on 127\.0\.0\.1: install.*rediss://.*finding TLS"):
        RedisServer(binary=str(stub), tls_host="127.0.0.1")
