"""`gossamer doctor`: what would keep this machine from taking part in a run over machines, each with its remedy."""

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from cyclopts import Parameter

from gossamer.cli.machines import PORT
from gossamer.cli.output import Json, print_json
from gossamer.errors import ConfigError, GossamerError, first_line
from gossamer.record.progress import echo

if TYPE_CHECKING:
    from gossamer.run.config.run_file import RunConfig
    from gossamer.transport.keys import Keys

_CLOCK_S = 5.0
"""Clocks that are further apart make the times in the logs of two machines useless to compare."""
_DISK_CHECKPOINTS = 3
"""Checkpoints on disk: two that are kept, and one that is being written."""


class _Finding(NamedTuple):
    """A fact, and what to do where it is a fault or may become one."""

    what: str
    state: Literal["ok", "warning", "fault"]
    fact: str
    remedy: str = ""


def command(
    file: Annotated[
        Path | None, Parameter(help="run file (TOML): its [peers], memory and disk are looked at too")
    ] = None,
    /,
    *,
    join: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None,
    listen: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None,
    key: Path | None = None,
    json: Json = False,
) -> int:
    """Finds what would keep this machine from taking part in a run over machines; each line is a fact, with a remedy for a fault.

    Start it with --listen on the machine that others shall reach, and with --join on each of them: then they try the way in both
    directions, compare clocks and measure the link.

    Args:
        join: try the way to this machine, where gossamer doctor --listen or a run answers
        listen: answer the others at this address until Ctrl-C
        key: this machine's key, for a run file with [peers] (default: the one in ~/.config/gossamer/keys that it lists)
    """
    from gossamer.transport.keys import KEY

    if join is not None and listen is not None:
        raise ConfigError(
            f"--join {join} and --listen {listen} were both given; start one doctor with --listen, and the others with --join"
        )
    if key is not None:
        os.environ[KEY] = str(key)
    findings: list[_Finding] = []
    for finding in _findings(file, join, listen):
        findings.append(finding)
        if not json:
            mark = {"ok": "ok     ", "warning": "warning", "fault": "FAULT  "}[finding.state]
            echo(
                f"{mark}  {finding.what:<10} {finding.fact}{f'; {finding.remedy}' if finding.remedy else ''}",
                flush=True,
            )
    if json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    return 1 if any(finding.state == "fault" for finding in findings) else 0


def _findings(file: Path | None, join: str | None, listen: str | None) -> Iterator[_Finding]:
    from gossamer.transport.sockets.addresses import is_loopback, own_address, split

    try:
        peer = None if join is None else split(join)
        here = None if listen is None else split(listen)
    except ValueError as error:
        raise ConfigError(f"{error}; write HOST:PORT, such as 10.0.0.1:{PORT}") from None
    far, towards_peer = (_or_none(own_address, *towards) for towards in ([], [] if peer is None else [peer[0]]))
    yield _name(far if towards_peer is None or is_loopback(towards_peer) else towards_peer)
    yield _address(towards_peer, None if peer is None else peer[0])
    yield _clock()
    yield from _other_packages()
    config, keys = None, None
    if file is not None:
        from gossamer.run.config.document import load_document
        from gossamer.run.config.run_file import parse

        try:
            config = parse(load_document(file, {}))
        except GossamerError as error:
            more = f"gossamer check {file} lists everything that is wrong with it" if file.is_file() else ""
            yield _Finding("run file", "fault", str(error), more)
    if config is not None:
        from gossamer.transport.keys import keys_for

        try:
            keys = keys_for(config.peers, config.workers)
        except GossamerError as error:
            yield _Finding("key", "fault", str(error))
            yield from _room(config, 1)
            return
        yield _key(config, keys)
        workers = 1 if keys is None else sum(number < config.workers for number in keys.numbers(keys.certificate))
        yield from _room(config, workers)
    if peer is not None:
        yield from _way(*peer, towards_peer, keys)
    else:
        yield from _port(here, towards_peer, keys)


def _or_none(ask: Callable[..., str], *words: str) -> str | None:
    try:
        return ask(*words)
    except OSError:
        return None


def _first_address(name: str) -> str:
    """Where a name leads, in either family. Raises OSError for one that is unknown."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def _name(address: str | None) -> _Finding:
    from gossamer.transport.sockets.addresses import is_loopback

    name = socket.gethostname()
    try:
        leads_to = _first_address(name)
    except OSError:
        return _Finding(
            "name", "warning", f"'{name}' leads nowhere on this machine", f"give the others {address or 'an address'}"
        )
    if is_loopback(leads_to):
        return _Finding(
            "name",
            "warning",
            f"'{name}' leads to {leads_to}, where no other machine reaches this one",
            f"give {address or 'an address'} instead of the name in --listen, --address and --server",
        )
    return _Finding("name", "ok", f"'{name}' leads to {leads_to}")


def _address(address: str | None, peer: str | None) -> _Finding:
    from gossamer.transport.sockets.addresses import is_loopback

    towards = "any other machine" if peer is None else peer
    if address is None:
        return _Finding(
            "address",
            "fault",
            f"no interface leads to {towards}",
            "connect this machine to a network, or correct the name",
        )
    if is_loopback(address) and not (peer and is_loopback(peer)):
        return _Finding(
            "address",
            "fault",
            f"'{peer}' leads to {_first_address(peer or '')}, which is this machine itself",
            "give the address of the other machine, as a name in /etc/hosts may lead everybody to himself",
        )
    return _Finding("address", "ok", f"{address}{_interface(address)} leads to {towards}")


def _interface(address: str) -> str:
    """The interface that has an address, in words; empty where none has it."""
    from gossamer.transport.processes.interfaces import interfaces

    return next((f" on {one.name}" for one in interfaces() if one.address == address), "")


def _clock() -> _Finding:
    now_s, installed_s = time.time(), Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < installed_s - 3600:
        return _Finding(
            "clock", "fault", f"it is {now} here, which is before gossamer was installed", "set the clock, by NTP"
        )
    return _Finding("clock", "ok", f"it is {now} here")


def _other_packages() -> Iterator[_Finding]:
    """Those of the index that install a Python package `gossamer` too, such as gossamer-web (ADR 101)."""
    for other in sorted({*metadata.packages_distributions().get("gossamer", ())} - {"gossamer"}):
        fact = (
            f"{other} has files in the Python package 'gossamer' of this environment, where each overwrites the other's"
        )
        yield _Finding("package", "fault", fact, "uninstall both, and install gossamer in an environment without it")


def _key(config: "RunConfig", keys: "Keys | None") -> _Finding:
    from gossamer.transport.secret import environment_secret

    if keys is None:
        known = "GOSSAMER_SECRET is set" if environment_secret() else "GOSSAMER_SECRET is not set"
        return _Finding(
            "key",
            "warning",
            f"the run file has no [peers], so what the machines send is not encrypted; {known}",
            "make keys with gossamer keys new NAME, unless all machines are in one network that you trust",
        )
    numbers_held = sorted(keys.numbers(keys.certificate))
    numbers = (
        ", ".join("the server" if number == config.workers else f"worker {number}" for number in numbers_held)
        or "no worker"
    )
    return _Finding(
        "key", "ok", f"'{keys.path}' is {keys.name(keys.certificate)} of the run file, which may be {numbers}"
    )


def _room(config: "RunConfig", workers: int) -> Iterator[_Finding]:
    """Whether memory and disk hold so many workers."""
    from gossamer.run.planning.check import examine_run

    try:
        each = examine_run(config).worker_bytes
    except GossamerError as error:
        yield _Finding("run file", "fault", str(error))
        return
    if not each or not workers:
        return
    needed, free = each * workers, _free_memory_bytes()
    words = f"{_gigabytes(needed)} for {workers} worker{'s' * (workers > 1)}, without activations"
    if free is not None:
        remedy = "" if needed <= free else "give this machine fewer workers, or a smaller model"
        state = "fault" if remedy else "ok"
        yield _Finding("memory", state, f"{_gigabytes(free)} are free, and the run needs {words}", remedy)
    place = next(path for path in (Path("runs"), Path.cwd()) if path.is_dir())
    disk, kept = shutil.disk_usage(place).free, _DISK_CHECKPOINTS * needed
    state, remedy = ("ok", "") if kept <= disk else ("fault", "make room, or name a folder on another disk with --out")
    yield _Finding(
        "disk",
        state,
        f"{_gigabytes(disk)} are free at '{place}', and checkpoints need up to {_gigabytes(kept)}",
        remedy,
    )


def _free_memory_bytes() -> int | None:
    """Memory that programs may still take; None on a system that does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _port(here: tuple[str, int] | None, address: str | None, keys: "Keys | None") -> Iterator[_Finding]:
    """Whether this machine can listen; with an address, it answers the others there until Ctrl-C."""
    from gossamer.errors import TransportError
    from gossamer.transport.secret import environment_secret
    from gossamer.transport.sockets.addresses import listen, loopback_warning, shown

    host, port = here or ("0.0.0.0", PORT)
    try:
        sock = listen(host, port)
    except TransportError as error:
        state = "warning" if here is None else "fault"
        yield _Finding("port", state, first_line(error), "give another port, as --listen HOST:PORT, to all machines")
        return
    secret, numeric = environment_secret(), str(sock.getsockname()[0])
    if here is None:
        sock.close()
        yield _Finding(
            "port", "ok", f"port {port} is free; a firewall must let TCP through to it on the machine that others join"
        )
        return
    if (warning := loopback_warning(host, numeric)) is not None:
        yield _Finding("port", "warning", warning)
    if keys is None and not secret:
        sock.close()
        raise ConfigError(
            f"--listen {shown(host, port)} answers only who proves that he takes part; give a run file with [peers], or set "
            "GOSSAMER_SECRET on all machines"
        )
    from gossamer.transport.processes.interfaces import announced_address
    from gossamer.transport.sockets.examination import ExaminationServer

    def report(who: str, reached: bool) -> None:
        echo(
            f"{who} came; {'it can be reached from here' if reached else 'it cannot be reached from here'}",
            file=sys.stderr,
        )

    server, at = ExaminationServer(sock, secret, keys, report), shown(announced_address(numeric), port)
    yield _Finding(
        "port",
        "ok",
        f"answers at {at} until Ctrl-C; start gossamer doctor --join there on the others",
    )
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return
    finally:
        server.close()


def _way(host: str, port: int, address: str | None, keys: "Keys | None") -> Iterator[_Finding]:
    """Findings about the connection to another machine."""
    from gossamer.errors import PeerError, TransportError
    from gossamer.transport.secret import environment_secret
    from gossamer.transport.sockets.addresses import listen, shown
    from gossamer.transport.sockets.examination import PATIENCE_S, examine

    at, secret = shown(host, port), environment_secret()
    try:
        if keys is None and not secret:
            socket.create_connection((host, port), timeout=PATIENCE_S).close()
            yield _Finding(
                "peer",
                "ok",
                f"somebody listens at {at}",
                "give the run file with [peers], or set GOSSAMER_SECRET, to try more than that",
            )
            return
        with contextlib.ExitStack() as until:
            back = None if address is None else until.enter_context(listen(address, 0))
            way = examine(at, secret, keys, back)
    except (OSError, PeerError, TransportError) as error:
        fact, remedy = _out_of_reach(error, host, port)
        yield _Finding("peer", "fault", fact, remedy)
        return
    who = "the secret" if keys is None else "the key of a peer"
    if way is None:
        yield _Finding(
            "peer",
            "ok",
            f"a run at {at} has {who} and speaks this version",
            "the way back and the speed are tried where gossamer doctor --listen answers",
        )
        return
    yield _Finding("peer", "ok", f"{at} answers in {1e3 * way.round_trip_s:.3g} ms, and has {who}")
    yield _way_back(way.seen_as, address, way.reached_back)
    yield _Finding("link", "ok", f"{way.up_bps / 1e6:.3g} Mbit/s there and {way.down_bps / 1e6:.3g} Mbit/s back")
    words = f"that of {at} is {abs(way.clock_ahead_s):.3g} s {'ahead' if way.clock_ahead_s > 0 else 'behind'}"
    if abs(way.clock_ahead_s) > _CLOCK_S + way.round_trip_s:
        remedy = "set both clocks by NTP: the logs of both are compared by their times"
        yield _Finding("clock", "warning", words, remedy)
    else:
        yield _Finding("clock", "ok", words)


def _out_of_reach(error: Exception, host: str, port: int) -> tuple[str, str]:
    """Why another machine is out of reach, and the remedy."""
    from gossamer.errors import PeerError, TransportError
    from gossamer.transport.sockets.addresses import shown
    from gossamer.transport.sockets.examination import PATIENCE_S

    at = shown(host, port)
    match error:
        case socket.gaierror():
            return f"the name '{host}' is not known here ({error.strerror})", "give its address"
        case ConnectionRefusedError():
            how = f"start gossamer doctor FILE --listen {at} there, or gossamer train FILE --listen {at}"
            return f"{host} answers, but nothing listens at port {port}", how
        case TimeoutError():
            how = f"let TCP through to port {port} in the firewall there, or correct the address"
            return f"nothing came back from {at} within {PATIENCE_S:g} s", how
        case PeerError() | TransportError():
            how = "who has another secret or key is hung up on without a word: compare those of both machines"
            return f"{at} answers, but {first_line(error)}", how
        case ConnectionError(errno=None):  # of the handshake, and not of the system
            return str(error), "look what listens there: another program, or a process that hangs"
        case OSError(strerror=words):
            return f"{at} cannot be reached ({words or error})", "correct the address or the route"
    raise AssertionError(error)


def _way_back(seen_as: str, address: str | None, reached: bool) -> _Finding:
    if reached:
        return _Finding("way back", "ok", f"this machine can be reached at {seen_as}")
    nat = "" if seen_as == address else f" that is seen as {seen_as}"
    return _Finding(
        "way back",
        "warning",
        f"this machine ({address}{nat}) cannot be reached from there, as behind NAT or a firewall",
        "it can take part, as it dials and others use its connection; it cannot be the one that others join",
    )
