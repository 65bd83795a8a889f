"""The address at which the other processes of a run reach this machine, and the interface that has it.

A machine's name does not suffice: Debian and Ubuntu map it to 127.0.1.1 there. The routes of the kernel decide. Needs no torch.
"""

import functools
import ipaddress
import logging
import os
import socket
from collections.abc import Collection
from typing import NamedTuple

import psutil

from gossamer.errors import ConfigError
from gossamer.transport.sockets.addresses import is_loopback, is_wildcard, own_address

GLOO = "GLOO_SOCKET_IFNAME"
"""The environment variable with the interface of gloo, which otherwise takes the address of this machine's name."""

log = logging.getLogger("gossamer")


class Interface(NamedTuple):
    """An interface of this machine, and one of its addresses."""

    name: str
    address: str


def address_towards(host: str) -> str:
    """The numeric address at which this machine is reached from `host`, the machine of worker 0, and by the others.

    Where `host` is a name that means loopback here, it is this machine's only address in a network, or the one towards far away.

    Raises: ConfigError where that leaves a choice, OSError when no route leads to `host` or the name is unknown.
    """
    if (numeric := leads_to_itself(host)) is None:
        return own_address(host)
    version = ipaddress.ip_address(numeric).version
    reached = _in_networks([version])
    if len(reached) == 1:
        return reached[0]
    chosen = _towards_far_away() if version == 4 else ""
    if chosen in reached:
        _tell(
            f"the name '{host}' leads to {numeric} on this machine, where processes of other machines cannot reach it; {chosen} "
            f"is used in its place, and if they reach it at {_either(reached, but=chosen)}, give that instead of the name"
        )
        return chosen
    raise ConfigError(
        f"the name '{host}' leads to {numeric} on this machine, where processes of other machines cannot reach it; give all "
        f"workers the address of worker 0's machine instead{f', such as {_either(reached)}' if reached else ''}"
    )


def announced_address(host: str, towards: str = "localhost") -> str:
    """The address at which other machines reach a listener at `host` here: `host` itself, unless it means all interfaces.

    Then it is the one from which this machine reaches `towards`, another machine of the run. Where none is known, it is this
    machine's only address in a network, or the one towards far away, and a warning says which others it has.

    Raises: ConfigError where that leaves a choice.
    """
    if not is_wildcard(host):
        return host
    versions = (4,) if ipaddress.ip_address(host).version == 4 else (4, 6)
    if towards != "localhost" and not is_loopback(towards):
        near = address_towards(towards).partition("%")[0]
        if ipaddress.ip_address(near).version in versions and _in_network(near):
            return near
    reached = _in_networks(versions)
    if len(reached) == 1:
        return reached[0]
    if not reached:
        _tell(
            f"this machine has no address in a network, so who listens on {host} is announced at 127.0.0.1, for itself alone"
        )
        return "127.0.0.1"
    if (chosen := _towards_far_away()) not in reached:
        raise ConfigError(
            f"{host} means all interfaces of this machine, and others reach it at {_either(reached)}: give the right one of "
            "these instead"
        )
    _tell(
        f"{host} means all interfaces of this machine, which is announced at {chosen}; if others reach it at "
        f"{_either(reached, but=chosen)}, give that instead"
    )
    return chosen


def leads_to_itself(host: str) -> str | None:
    """The loopback address to which a machine's name leads here; None where it leads elsewhere, or is meant as loopback.

    >>> leads_to_itself("127.0.0.1"), leads_to_itself("localhost"), leads_to_itself("192.0.2.7")
    (None, None, None)
    """
    if host == "localhost" or is_loopback(host):
        return None
    try:
        numeric = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:  # a name that is not known yet
        return None
    return numeric if is_loopback(numeric) else None


def advised(host: str) -> str:
    """Advice for a name that should lead to another machine and leads to this one; empty where the name is not to blame."""
    if (numeric := leads_to_itself(host)) is None:
        return ""
    return (
        f"the name '{host}' leads to {numeric} on this machine, which is itself: if worker 0 is on another one, give all workers "
        "the address of that instead of its name"
    )


def use_interface_towards(host: str) -> None:
    """Makes gloo connect over the interface that leads to this machine, unless the user has chosen one."""
    if GLOO in os.environ:
        return
    try:
        address = address_towards(host)
    except OSError:  # gloo may know better, or reports the fault
        return
    name = next((one.name for one in interfaces() if one.address == address), None)
    if name is not None:
        os.environ[GLOO] = name


def interfaces() -> list[Interface]:
    """All interfaces of this machine that are up, once for each of their addresses of either family."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        Interface(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if name in up and one.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _in_networks(versions: Collection[int]) -> list[str]:
    """The addresses of this machine that other machines may reach, of these versions of IP."""
    own = [one.address.partition("%")[0] for one in interfaces()]
    return [one for one in own if ipaddress.ip_address(one).version in versions and _in_network(one)]


def _towards_far_away() -> str:
    """The address from which this machine reaches a machine that is far away; empty where no route leads there."""
    try:
        return own_address()
    except OSError:
        return ""


def _in_network(address: str) -> bool:
    """Whether other machines may reach an address, whatever link they are on."""
    numeric = ipaddress.ip_address(address)
    return not (numeric.is_loopback or numeric.is_link_local or numeric.is_unspecified)


def _either(addresses: list[str], but: str = "") -> str:
    return " or ".join(address for address in addresses if address != but)


@functools.cache
def _tell(sentence: str) -> None:
    """Warns once, however often it is called."""
    log.warning("%s", sentence)
