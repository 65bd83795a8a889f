"""Several machines: network namespaces, each with a name that leads to 127.0.1.1 on itself, as Debian and Ubuntu set it up.

Each process gets a rank, the number of all and an address, and neither a launcher nor the name of an interface.
"""

import ctypes
import json
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Command, run
from gossamer.cli import main
from gossamer.run.config.run_file import dump
from tiny import tiny

NEW_MOUNTS, NEW_NAMES, NEW_NET = 0x20000, 0x4000000, 0x40000000  # of sched.h
RECURSIVE_AND_PRIVATE = 0x44000
BIND = 0x1000
FORK = multiprocessing.get_context("fork")
SECRET = "known to the workers of this test only"
KINDS = {
    "in rounds": {},
    "elastic": {"run__elastic": True},
    "without waiting": {"run__wait": False},
    "in stages": {"workers": 3, "pipeline__stages": 2, "data__accumulate": 2, "model__layers": 2},
}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The namespaces of three machines on one bridge, without a route to anywhere else; removed at the end."""
    folder, made = tmp_path_factory.mktemp("machines"), []
    names = [f"gossamer-{os.getpid()}-m{place}" for place in (0, 1, 2, "hub")]
    *nodes, hub = names
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            made.append(name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        sh("ip", "-n", hub, "link", "set", "bridge0", "up")
        for i, name in enumerate(nodes):
            sh("ip", "-n", hub, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", hub, "link", "set", f"port{i}", "master", "bridge0", "up")
            sh("ip", "-n", name, "address", "add", f"10.78.0.{i + 1}/24", "dev", "eth0")
            sh("ip", "-n", name, "address", "add", f"fd78::{i + 1}/64", "dev", "eth0", "nodad")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            others = [f"10.78.0.{j + 1} m{j}\n" for j in range(3) if j != i]
            (folder / f"hosts-m{i}").write_text(f"127.0.0.1 localhost\n127.0.1.1 m{i}\n{''.join(others)}")
        yield [f"{name} {folder / f'hosts-m{i}'}" for i, name in enumerate(nodes)]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def enter(words: list[str]) -> int:
    """`gossamer WORDS` on a machine: the first word is its namespace, and the second its hosts file."""
    namespace, hosts, *rest = words
    libc = ctypes.CDLL(None, use_errno=True)
    name = namespace.rpartition("-")[2]
    with open(f"/run/netns/{namespace}") as network:
        assert libc.setns(network.fileno(), NEW_NET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(NEW_MOUNTS | NEW_NAMES) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(None, b"/", None, RECURSIVE_AND_PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(hosts.encode(), b"/etc/hosts", None, BIND, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.sethostname(name.encode(), len(name)) == 0, os.strerror(ctypes.get_errno())
    assert socket.gethostbyname(name) == "127.0.1.1"
    # What it starts is on its machine, too: the fork server, of which it is a fork itself, is not.
    multiprocessing.get_context = lambda method=None: FORK  # type: ignore[assignment, misc]
    return main(rest)


def start(machines: list[str], *words: object, of: int = 3, address: str = "m0") -> list[Command]:
    """One process on each machine, in turn."""
    return [
        Command(
            *machines[rank % 3].split(" "),
            *words,
            "--rank",
            rank,
            "--of",
            of,
            "--address",
            address,
            work=enter,
            GOSSAMER_SECRET=SECRET,
        )
        for rank in range(of)
    ]


@pytest.mark.sampled(1)
@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_three_machines_whose_names_lead_to_themselves_train_by_the_name_of_the_first(
    machines: list[str], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "run.toml").write_text(dump(tiny(**{"run__timeout_s": 60.0, **KINDS[kind]})))
    of = 6 if kind == "in stages" else 3
    ends = [one.finish() for one in start(machines, "train", tmp_path / "run.toml", "--out", tmp_path / "out", of=of)]
    assert [code for code, _ in ends] == [0] * of, ends
    assert "suspect" not in "".join(output for _, output in ends), ends
    if kind in ("elastic", "without waiting"):
        listens = [f"worker {i} listens on 10.78.0.{i + 1}:" in output for i, (_, output) in enumerate(ends)]
        assert listens == [True] * 3, ends
    code, output = run("evaluate", tmp_path / "out")
    assert code == 0, output


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.timeout(300)
def test_machines_with_keys_join_the_first_over_encrypted_connections(machines: list[str], tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    homes, peers = [tmp_path / f"home{i}" for i in range(3)], {}
    for i, home in enumerate(homes):
        code, output = run("keys", "new", f"m{i}", "--out", home / "gossamer" / "keys" / f"m{i}.pem", "--json")
        assert code == 0, output
        peers[f"m{i}"] = {"certificate": json.loads(output)["keys"][0]["certificate"]}
    config = tiny(run__elastic=True, run__timeout_s=30.0, run__steps=100, run__pace_s=0.1, peers=peers)
    (tmp_path / "run.toml").write_text(dump(config))

    def started(i: int, *words: str) -> Command:
        folder, home = tmp_path / f"out{i}", str(homes[i])
        given = (*machines[i].split(), "train", tmp_path / "run.toml", "--out", folder, *words)
        return Command(*given, work=enter, XDG_CONFIG_HOME=home)

    first = started(0, "--listen", "0.0.0.0:29500")  # announced at the only address of its machine
    line = next((line for line in first.lines() if "worker 0 listens on 10.78.0.1:29500" in line), None)
    assert line is not None, first.finish()
    words = line.partition("takes a free slot with ")[2].split()  # what it says, and nothing else
    assert words == ["--join", "10.78.0.1:29500"]
    ends = [one.finish() for one in (first, *(started(i, *words) for i in (2, 1)))]
    assert [code for code, _ in ends] == [0] * 3, ends
    for i, (_, printed) in zip((2, 1), ends[1:], strict=True):  # the slot of its key, in any order of arrival
        assert f"worker {i} listens on 10.78.0.{i + 1}:" in printed, printed
        assert f"worker {i} takes the state of worker" in printed, printed


@pytest.mark.sampled(1)
@pytest.mark.netns
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["in rounds", "elastic"])
def test_machines_meet_at_an_address_of_ipv6(machines: list[str], tmp_path: Path, kind: str) -> None:
    (tmp_path / "run.toml").write_text(dump(tiny(run__timeout_s=60.0, **KINDS[kind])))
    words = ("train", tmp_path / "run.toml", "--out", tmp_path / "out")
    ends = [one.finish() for one in start(machines, *words, address="[fd78::1]:29401")]
    assert [code for code, _ in ends] == [0] * 3, ends


@pytest.mark.sampled(1)
@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["in rounds", "elastic"])
def test_a_machine_may_have_several_of_the_workers(machines: list[str], tmp_path: Path, kind: str) -> None:
    (tmp_path / "run.toml").write_text(dump(tiny(run__timeout_s=60.0, **KINDS[kind])))
    words = ("train", tmp_path / "run.toml", "--out", tmp_path / "out", "--of", 3, "--address", "10.78.0.1")
    places = [("--rank", 0, "--local", 2), ("--rank", 2)]
    launchers = [
        Command(*machine.split(), *words, *place, work=enter, GOSSAMER_SECRET=SECRET)
        for machine, place in zip(machines, places, strict=False)
    ]
    ends = [one.finish() for one in launchers]
    assert [code for code, _ in ends] == [0, 0], ends


@pytest.mark.netns
@pytest.mark.timeout(100)
def test_a_machine_on_which_the_name_of_the_first_leads_to_itself_says_so(machines: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(tiny(workers=2, run__timeout_s=2.0)))
    words = ("train", tmp_path / "run.toml", "--rank", 1, "--of", 2, "--address", "m1")
    code, output = Command(*machines[1].split(), *words, work=enter).finish()
    assert code == 2
    *_, warned, ended = output.splitlines()
    assert "the name 'm1' leads to 127.0.1.1 on this machine, which is itself" in warned, output
    assert "could not reach the store at m1:29400" in ended and "give all workers the address" in ended, output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rank", 1], "--rank 1 was given without --of and --address"),
        (["--of", 3, "--address", "m0"], "--of 3 --address m0 was given without --rank"),
        (["--rank", 3, "--of", 3, "--address", "m0"], "--rank is 3; with --of 3 it must be between 0 and 2"),
        (["--rank", 0, "--of", 3, "--address", "m0:x"], "--address got 'm0:x'; give HOST or HOST:PORT"),
        (["--rank", 0, "--of", 2, "--address", "::1"], "WORLD_SIZE (--of) is 2 but the run file has workers = 3"),
        (["--rank", 0, "--of", 3, "--address", "m0", "--join", "m1:1"], "was given with --join m1:1"),
        (["--rank", 0, "--of", 3, "--address", "m0", "--worker", 1], "was given with --worker 1"),
        (["--rank", 2, "--of", 3, "--address", "m0", "--local", 2], "--rank 2 --of 3 with --local 2"),
        (
            ["--rank", 1, "--of", 3, "--address", "m0", "--set", "run.steps=1"],
            "run.steps is 1, which is not a multiple of",
        ),
    ],
)
def test_a_place_that_does_not_fit_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], sentence: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    (tmp_path / "run.toml").write_text(dump(tiny(run__timeout_s=2.0)))
    code, output = run("train", tmp_path / "run.toml", "--out", tmp_path / "out", *words)
    assert code == 2 and sentence in output and "Traceback" not in output, output
    assert len([line for line in output.splitlines() if sentence in line]) == 1, output
