"""The network interface through which the other machines of a job reach this one, and free ports."""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dynapipe_ext.errors import ConfigError, short

# Addresses reserved for documentation (RFC 5737, RFC 3849). They stand for the default route; nothing is sent there.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_KNOWN_S = 10.0  # the names of machines that start together may appear a little late
_LOOK_S = 0.5


def refuse_unknown_host(host: str) -> None:
    """Errors: ConfigError, within seconds, for a name without an address; torchrun would wait for many minutes."""
    deadline_s = time.monotonic() + _KNOWN_S
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise ConfigError(
                    f"nodes would meet at {short(host)}, which this machine has not found for {_KNOWN_S:g} s"
                    f" ({error.strerror}): give --rdzv-endpoint HOST:PORT by a name that all nodes know, or by address"
                ) from error
            time.sleep(_LOOK_S)


def interface_towards(hosts: Iterable[str], named: str = "") -> tuple[str, str]:
    """An interface and this machine's address on it. Nothing is sent.

    It is the first of these: the interface `named`, if it has an address; that of the route to one of `hosts`, unless
    it is loopback; that of the default route; the only one besides loopback. A machine's own name often resolves to
    loopback (Debian: 127.0.1.1), where no other machine reaches it.

    Errors: ConfigError where several interfaces are possible, or none is.
    """
    addresses, hosts = _addresses(), tuple(hosts)
    if on_named := sorted((address for address, name in addresses.items() if name == named), key=lambda a: ":" in a):
        return named, on_named[0]
    for host in (*hosts, *_ELSEWHERE):
        for address in _addresses_towards(host):
            if address in addresses:
                return addresses[address], address
    if len(names := sorted(set(addresses.values()))) == 1:
        return names[0], next(iter(addresses))
    fault = f"several interfaces ({', '.join(names)}) lead elsewhere" if names else "no interface leads elsewhere"
    raise ConfigError(
        f"{fault}, and the route to {' or '.join(hosts)} does not decide: name the one that the other machines reach in"
        " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def _addresses_towards(host: str) -> Iterable[str]:
    """This machine's addresses on the routes to `host`; none where the name or the route is missing."""
    try:
        resolved = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # looks up the route; a datagram socket sends nothing
            except OSError:
                continue
            yield str(probe.getsockname()[0])


def _addresses() -> dict[str, str]:
    """The interface of each address of this machine, without loopback."""
    import psutil

    return {
        address.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(name, address.address)
    }


def is_own_host(host: str) -> bool:
    """Whether a name or address is of this machine."""
    try:
        resolved = {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(_is_loopback("", address) for address in resolved) or not resolved.isdisjoint(_addresses())


def _is_loopback(name: str, address: str) -> bool:
    return name == "lo" or address.startswith("127.") or address in ("::1",)


def holder_of_port(port: int) -> str:
    """Who listens at a port of this machine, as far as this user may know; empty where nobody does."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=has_both).close()
    except PermissionError:
        return "the system"
    except OSError:
        return _listener(port) or "another process"
    return ""


def _listener(port: int) -> str:
    import psutil

    with suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port and one.pid:
                program, *words = psutil.Process(one.pid).cmdline()
                return f"process {one.pid} ({short(shlex.join([Path(program).name, *words]))})"
    return ""


def free_port(host: str = "127.0.0.1") -> int:
    """A port on an address of this machine that is free now, for a program that needs its port in advance."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        port: int = probe.getsockname()[1]
        return port
