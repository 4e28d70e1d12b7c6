"""A store over TLS: the server's certificate is checked, and a server that cannot show it is refused."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynapipe_ext.errors import StoreError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.launch.redis_server import RedisServer

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with the openssl program"),
]


def certificate(folder: Path) -> tuple[Path, Path]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *subject], check=True, capture_output=True, timeout=30)
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


def test_a_server_whose_certificate_is_not_trusted_is_refused(tls_server: tuple[StoreAddress, Path]) -> None:
    address, _ = tls_server
    with pytest.raises(StoreError, match=r"(?i)certificate verify failed"):
        RedisStore(address, namespace="tls", connect_timeout_s=0.5)
