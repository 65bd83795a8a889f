"""Which address of this machine the other processes of a run reach, and the interface that has it."""

import logging
import os
from pathlib import Path

import pytest

from gossamer.errors import ConfigError
from gossamer.transport.processes import interfaces
from gossamer.transport.processes.interfaces import (
    GLOO,
    Interface,
    address_towards,
    announced_address,
    use_interface_towards,
)
from gossamer.transport.processes.store import hosted_store, reached_store

LOOPBACK = Interface("lo", "127.0.0.1")
OWN_NAME = "127.1"
"""Like the name of a machine that leads to loopback on the machine itself."""


@pytest.fixture(autouse=True)
def choices_are_reported_again() -> None:
    interfaces._tell.cache_clear()


def test_the_interfaces_of_this_machine_are_listed_with_their_addresses() -> None:
    assert "127.0.0.1" in [one.address for one in interfaces.interfaces()]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_request_for_loopback_is_granted(host: str) -> None:
    assert address_towards(host) in ("127.0.0.1", "::1")


def test_a_name_that_leads_to_loopback_stands_for_the_only_address_in_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [LOOPBACK, Interface("eth0", "10.0.0.7"), Interface("eth0", "fd00::7"), Interface("eth1", "169.254.3.4")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: here)
    assert address_towards(OWN_NAME) == "10.0.0.7"


def test_of_several_addresses_the_one_with_the_default_route_is_taken_and_the_choice_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = [LOOPBACK, Interface("wg0", "10.8.0.1"), Interface("eth0", "10.0.0.7")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: here)
    monkeypatch.setattr(interfaces, "own_address", lambda: "10.0.0.7")
    with caplog.at_level(logging.WARNING, "gossamer"):
        assert address_towards(OWN_NAME) == "10.0.0.7"
    assert "leads to 127.0.0.1 on this machine" in caplog.text and "reach it at 10.8.0.1, give that" in caplog.text


@pytest.mark.parametrize("here", [[], [Interface("a", "10.0.0.7"), Interface("b", "10.1.0.7")]])
def test_a_name_that_leads_to_loopback_is_refused_where_no_address_is_known_to_do(
    monkeypatch: pytest.MonkeyPatch, here: list[Interface]
) -> None:
    def nowhere() -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK, *here])
    monkeypatch.setattr(interfaces, "own_address", nowhere)
    with pytest.raises(
        ConfigError, match=r"leads to 127\.0\.0\.1 on this machine.* give all workers the address of worker 0"
    ):
        address_towards(OWN_NAME)


@pytest.mark.parametrize(
    ("host", "here", "announced"),
    [
        ("10.0.0.9", ["10.0.0.7"], "10.0.0.9"),
        ("0.0.0.0", ["10.0.0.7", "fd00::7", "169.254.3.4"], "10.0.0.7"),
        ("::", ["fd00::7"], "fd00::7"),
        ("0.0.0.0", [], "127.0.0.1"),
    ],
)
def test_a_worker_that_listens_on_all_interfaces_is_announced_at_an_address_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, host: str, here: list[str], announced: str
) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK, *(Interface("eth", one) for one in here)])
    assert announced_address(host) == announced
    monkeypatch.setattr(interfaces, "own_address", lambda towards: "10.8.0.1")
    assert announced_address("0.0.0.0", "10.8.0.5") == "10.8.0.1", "the one from which it reaches whom it joins"


def test_of_several_addresses_the_announced_one_is_printed_or_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = [LOOPBACK, Interface("wg0", "10.8.0.1"), Interface("eth0", "10.0.0.7")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: here)
    monkeypatch.setattr(interfaces, "own_address", lambda: "10.0.0.7")
    assert announced_address("0.0.0.0") == "10.0.0.7"
    assert "announced at 10.0.0.7; if others reach it at 10.8.0.1, give that instead" in caplog.text
    monkeypatch.setattr(interfaces, "own_address", lambda: "10.9.9.9")
    with pytest.raises(ConfigError, match=r"others reach it at 10\.8\.0\.1 or 10\.0\.0\.7: give the right one"):
        announced_address("0.0.0.0")


def test_gloo_takes_the_interface_towards_the_others_unless_the_user_has_chosen_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GLOO, "")
    monkeypatch.delenv(GLOO)
    use_interface_towards("127.0.0.1")
    assert os.environ[GLOO] == next(one.name for one in interfaces.interfaces() if one.address == "127.0.0.1")
    monkeypatch.setenv(GLOO, "mine0")
    use_interface_towards("127.0.0.1")
    assert os.environ[GLOO] == "mine0"


def listening(port: int) -> list[str]:
    """The local addresses, in hex, of the sockets of this machine that listen on a port."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


def test_a_store_of_ours_listens_on_one_address_only_and_never_on_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = hosted_store("127.0.0.1", 0)
    assert listening(store.port) == ["0100007F"] and not caplog.records
    with pytest.raises(OSError, match="already in use"):
        hosted_store("127.0.0.1", store.port)
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK, Interface("eth0", "127.0.0.9")])
    monkeypatch.setattr(interfaces, "is_loopback", lambda host: host == "127.0.0.1")
    monkeypatch.setattr(interfaces, "_in_network", lambda address: address == "127.0.0.9")
    elsewhere = hosted_store(OWN_NAME, 0)
    assert listening(elsewhere.port) == ["0900007F"] and not caplog.records


def test_the_store_of_a_machine_behind_a_router_listens_on_the_address_towards_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.transport.processes.store.address_towards", lambda host: "127.0.0.1")
    store = hosted_store("198.51.100.7", 0)  # of documentation: of no machine
    assert listening(store.port) == ["0100007F"]
    assert "198.51.100.7 is no address of this machine, so the store of the run listens on 127.0.0.1" in caplog.text


def test_a_name_of_the_first_machine_that_leads_to_another_itself_is_warned_of_unless_all_are_here(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.transport.processes.store.address_towards", lambda host: "127.0.0.1")
    store = hosted_store("127.0.0.1", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for here, warned in (("2", False), ("1", True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        reached_store(OWN_NAME, store.port, 5.0)
        assert ("which is itself: if worker 0 is on another one" in caplog.text) == warned


def test_a_store_listens_on_an_address_of_ipv6() -> None:
    try:
        store = hosted_store("::1", 0)
    except OSError:
        pytest.skip("this machine has no ::1")
    assert listening(store.port) == ["00000000000000000000000001000000"]
    store.set("here", "yes")
