"""The workers of an elastic run as processes that `chaos.py` starts, kills and stops, and what they note of themselves.

Every process is `gossamer train ...` in a fork of one process that has imported what it needs. It notes in a file of its own when
it is ready, when it trains, and the hash of the parameters that it trains on and keeps for newcomers. Nothing else differs.
"""

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import multiprocessing
import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.cli import main as main_of_gossamer
from gossamer.cli.train import import_early
from gossamer.transport.processes.store import hosted_store
from gossamer.transport.secret import SECRET


class Place(NamedTuple):
    """Where a worker runs."""

    namespace: str | None = None
    """Of its network; None for that of this process."""
    folder: Path | None = None
    """Its run folder, where it has one of its own."""
    most_bytes: int | None = None
    """The largest file that it may write: what does not fit fails like a write to a full disk."""


class Mark(NamedTuple):
    """Something that a worker has noted."""

    time_s: float
    what: str
    """ready, train, trained or kept."""
    slot: int
    round: int
    """Of `kept`, rounds behind it."""
    x: str = ""
    """Hash of the parameters."""
    sha256: str = ""
    """Of the state that it keeps for newcomers."""


class Process:
    """One process of a run."""

    def __init__(self, number: int, folder: Path, place: Place) -> None:
        self.log, self.file = folder / f"{number:03}.log", folder / f"{number:03}.jsonl"
        self.place = place
        self.process: BaseProcess
        self.started_s = time.time()
        self.killed_s: float | None = None
        self.ended_s: float | None = None
        self.resumes = False
        """Whether it was started with all others after a stop."""
        self.quiet_until_s = 0.0
        """Until when nobody expects anything of it: it was stopped, or cut off from most others."""
        self._marks: list[Mark] = []
        self._read = 0

    @property
    def marks(self) -> list[Mark]:
        """What it has noted so far."""
        with contextlib.suppress(FileNotFoundError), self.file.open("rb") as file:
            file.seek(self._read)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._read += len(raw)
                self._marks.append(Mark(*json.loads(raw)))
        return self._marks

    @property
    def slot(self) -> int | None:
        """The slot that it fills, once it is ready."""
        return self.marks[0].slot if self.marks else None

    @property
    def runs(self) -> bool:
        """Whether it has not ended; notes when it has."""
        if self.process.exitcode is None:
            return True
        self.ended_s = self.ended_s or time.time()
        return False

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def signal(self, number: int) -> None:
        """Sends it a signal, if it has not ended."""
        if self.runs:
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.killed_s = time.time()
        self.signal(signal.SIGKILL)

    def last_mark(self, what: str) -> Mark | None:
        """The newest of its notes of a kind."""
        return next((mark for mark in reversed(self.marks) if mark.what == what), None)


class Fleet:
    """All processes that a run has had.

    Args: `address` is where the store is, in the network of the workers.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        self.folder, self._address = folder, address
        self._store: Any = None
        self._secret = secrets.token_hex(32)
        self.processes: list[Process] = []
        import_early()

    def start(self, words: list[str], places: list[Place]) -> list[Process]:
        """Starts all workers of a run."""
        self._store = hosted_store(self._address, 0)
        here = {
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_WORLD_SIZE": str(len(places)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return [self._one(words, place, {**here, "RANK": str(i), "LOCAL_RANK": "0"}) for i, place in enumerate(places)]

    def join(self, words: list[str], place: Place) -> Process:
        """Starts a process that joins the run; nothing tells it a number."""
        return self._one([*words, "--join", "auto"], place, {})

    def _one(self, words: list[str], place: Place, environment: dict[str, str]) -> Process:
        process = Process(len(self.processes), self.folder, place)
        out = [] if "--resume" in words else ["--out", str(place.folder or self.folder / "run")]
        common = {SECRET: self._secret, "OMP_NUM_THREADS": "1"}
        process.process = multiprocessing.get_context("forkserver").Process(
            target=enter,
            args=([*words, *out], place._replace(folder=None), {**common, **environment}, process.log, process.file),
        )
        process.process.start()
        self.processes.append(process)
        return process

    @property
    def living(self) -> list[Process]:
        return [one for one in self.processes if one.runs]

    def end(self) -> None:
        """Ends whatever still runs; each first writes where its threads are into its log."""
        for one in self.living:
            one.signal(signal.SIGCONT)
            one.signal(signal.SIGUSR1)
        if self.living:
            time.sleep(0.5)
        for one in self.living:
            one.signal(signal.SIGKILL)
        for one in self.processes:
            one.process.join(10)


def enter(words: list[str], place: Place, environment: Mapping[str, str], log: Path, notes: Path) -> None:
    """What a new process does first; then it is `gossamer WORDS`."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if place.namespace is not None:
        with open(f"/run/netns/{place.namespace}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), f"the network namespace {place.namespace} cannot be entered")
    os.environ.update(environment)
    file = log.open("ab")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    _take_notes(notes)
    if place.most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (place.most_bytes, place.most_bytes))
    sys.exit(main_of_gossamer(words))


def _take_notes(path: Path) -> None:
    """From now on this process notes what it does."""
    import gossamer.run.elastic.elastic_rounds as driver
    from gossamer.run.worker.replica import LocalPhase, Replica

    participant, file = driver.ElasticRounds, path.open("ab", buffering=0)
    begin, keep, train = participant.begin, participant._keep, Replica.train

    def note(what: str, slot: int, round: int, x: Tensor | None = None, sha256: str = "") -> None:
        digest = "" if x is None else hashlib.sha256(x.numpy().tobytes()).hexdigest()
        file.write(json.dumps(Mark(time.time(), what, slot, round, digest, sha256)).encode() + b"\n")

    def beginning(self: Any) -> Any:
        note("ready", self.slot, 0)
        return begin(self)

    def keeping(self: Any, after: int) -> None:
        keep(self, after)
        note("kept", self.slot, after, self.replica.evaluated, self.kept.whole.sha256)

    def training(
        self: Replica, round: int, start: int, stop: int, after_step: Callable[[], None] = lambda: None
    ) -> LocalPhase:
        note("train", self.index, round, self.evaluated)
        try:
            return train(self, round, start, stop, after_step)
        finally:
            note("trained", self.index, round)

    participant.begin, participant._keep, Replica.train = beginning, keeping, training


class Network(NamedTuple):
    """Namespaces that are connected by two bridges."""

    names: list[str]
    hub: str

    def part(self) -> None:
        """Cuts the connection of the bridges: each half hears only itself."""
        sh("ip", "-n", self.hub, "link", "set", "between", "down")

    def heal(self) -> None:
        """Connects them again."""
        sh("ip", "-n", self.hub, "link", "set", "between", "up")


@contextlib.contextmanager
def network(first: int, second: int) -> Iterator[Network]:
    """Namespaces for so many workers at a bridge and so many at another; all are removed at the end.

    The store is at 10.78.0.250. Raises: PermissionError where this is not allowed.
    """
    names = [f"chaos-{os.getpid()}-{i}" for i in (*range(first + second), "hub")]
    *workers, hub = names
    made: list[str] = []
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            made.append(name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        for bridge in ("one", "two"):
            sh("ip", "-n", hub, "link", "add", bridge, "type", "bridge")
            sh("ip", "-n", hub, "link", "set", bridge, "up")
        sh("ip", "-n", hub, "link", "add", "between", "type", "veth", "peer", "name", "other")
        for device, bridge in (("between", "one"), ("other", "two")):
            sh("ip", "-n", hub, "link", "set", device, "master", bridge, "up")
        store = f"chaos{os.getpid()}"[:15]
        sh("ip", "-n", hub, "link", "add", "store", "type", "veth", "peer", "name", store, "netns", str(os.getpid()))
        sh("ip", "-n", hub, "link", "set", "store", "master", "one", "up")
        sh("ip", "address", "add", "10.78.0.250/24", "dev", store)
        sh("ip", "link", "set", store, "up")
        for i, name in enumerate(workers):
            sh("ip", "-n", hub, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", hub, "link", "set", f"port{i}", "master", "one" if i < first else "two", "up")
            sh("ip", "-n", name, "address", "add", f"10.78.0.{i + 1}/24", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
        yield Network(workers, hub)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def sh(*words: str) -> None:
    """Runs a command. Raises: PermissionError with what it said."""
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PermissionError(f"there is no {words[0]}") from error
    if done.returncode:
        raise PermissionError(f"'{' '.join(words)}' failed: {done.stderr.strip()}")
