"""Through which network interface the other machines of a job are reached."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

from dynapipe_ext.errors import ConfigError, short

# Of the blocks kept for documentation (RFC 5737, RFC 3849): asks for the default route, and is never sent anything.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_KNOWN_S = 10.0  # names of machines that start together may come a little late
_LOOK_S = 0.5


def refuse_unknown_host(host: str) -> None:
    """Errors: ConfigError for a name that has no address here, soon: torchrun would wait for it for many minutes."""
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
    """The interface, and this machine's address on it: the one that is `named`, if it has an address; else that of the
    route to the first of `hosts` that is not this machine's loopback, else of the default route, else the only one that
    is no loopback. Nothing is sent.

    A machine's own name often resolves to loopback (Debian: 127.0.1.1), where no other machine reaches it.

    Errors: ConfigError where several are left to choose from, or none.
    """
    addresses, hosts = _addresses(), tuple(hosts)
    if on_named := sorted((address for address, name in addresses.items() if name == named), key=lambda a: ":" in a):
        return named, on_named[0]
    for host in (*hosts, *_ELSEWHERE):
        for own in _own_addresses(host):
            if own in addresses:
                return addresses[own], own
    if len(names := sorted(set(addresses.values()))) == 1:
        return names[0], next(iter(addresses))
    found = f"several interfaces ({', '.join(names)}) lead elsewhere" if names else "no interface leads elsewhere"
    raise ConfigError(
        f"{found}, and the route to {' or '.join(hosts)} says no more: name the one that the other machines reach in"
        " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def _own_addresses(host: str) -> Iterable[str]:
    """This machine's addresses on the routes to `host`; none where it has no name or no route."""
    try:
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # of a datagram socket: looks the route up
            except OSError:
                continue
            yield str(probe.getsockname()[0])


def _addresses() -> dict[str, str]:
    """The interface of each address of this machine, loopback left out."""
    import psutil

    return {
        address.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(name, address.address)
    }


def _is_loopback(name: str, address: str) -> bool:
    return name == "lo" or address.startswith("127.") or address in ("::1",)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of an address of this machine that nobody listens on now, for who must name one beforehand."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        port: int = probe.getsockname()[1]
        return port
