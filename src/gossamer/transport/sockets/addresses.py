"""Addresses of processes as `host:port`, or `[host]:port` where the host has colons: read, written, and listened at."""

import ipaddress
import socket

from gossamer.errors import TransportError

_ELSEWHERE = "192.0.2.1"
"""A documentation address (RFC 5737), routed like any remote one."""


def split(address: str) -> tuple[str, int]:
    """Host and port of an address. Raises ValueError for anything else.

    >>> split("10.0.0.1:29400"), split("[::1]:29400")
    (('10.0.0.1', 29400), ('::1', 29400))
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise ValueError(f"'{address}' is no HOST:PORT")
    try:
        host.encode("idna")  # as dialling does, where a name with two consecutive dots raises no OSError
    except UnicodeError:
        raise ValueError(f"'{address}' is no HOST:PORT") from None
    return host, int(port)


def shown(host: str, port: int) -> str:
    """The address, which `split` reads.

    >>> shown("10.0.0.1", 29400), shown("::1", 29400)
    ('10.0.0.1:29400', '[::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether this numeric address is loopback; False for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether this stands for all interfaces of a machine, such as 0.0.0.0: an address to listen on, not to dial.

    >>> is_wildcard("0.0.0.0"), is_wildcard("::"), is_wildcard("10.0.0.1"), is_wildcard("berlin")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def own_address(towards: str = _ELSEWHERE) -> str:
    """The numeric address of this machine from which it would reach `towards`, or any machine that is far away.

    Raises: OSError when no route leads there, or the name is unknown.
    """
    family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing: the kernel only looks up which interface leads there. The machine's
        # name is unsuitable, as many systems map it to loopback.
        probe.connect(address)
        return str(probe.getsockname()[0])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at a host of either family. Raises TransportError when it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # `::` stands for all interfaces, of both families.
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise TransportError(
            f"this process could not listen on {shown(host, port)} ({error}); choose another address or port"
        ) from None


def loopback_warning(named: str, numeric: str) -> str | None:
    """A warning where a name that others should reach resolves to loopback on every machine; None otherwise."""
    if named in ("localhost", numeric) or is_loopback(named) or not is_loopback(numeric):
        return None
    try:
        here = own_address()
    except OSError:  # a machine without a route to anywhere
        here = "its address in the network"
    return (
        f"the name '{named}' leads to {numeric} on this machine, where processes of other machines cannot reach it; if there "
        f"are any, give {here} instead of the name"
    )
