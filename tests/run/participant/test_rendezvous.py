"""Workers that start without a launcher: each process gets its rank and the address of worker 0's store, and no more."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import Command, free_port
from gossamer.cli import main
from gossamer.errors import DiskError, PeerError
from gossamer.run.asynchronous import train_asynchronous
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import dump
from gossamer.run.elastic import elastic_rounds, train_elastic
from gossamer.run.participant import rendezvous
from gossamer.run.participant.rendezvous import join_run
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.elastic.newcomer import Offer
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.secret import folder_secret
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import Limits
from silent_relay import SilentRelay, silent_relay
from tiny import single as tiny

pytestmark = pytest.mark.usefixtures("forks")

KINDS = {"in rounds": {}, "elastic": {"run__elastic": True}, "without waiting": {"run__wait": False}}


def start(folder: Path, **overrides: object) -> list[Command]:
    """Three workers by the variables that srun and mpirun scripts set."""
    (folder / "run.toml").write_text(dump(tiny(run__timeout_s=60.0, **overrides)))
    port = str(free_port())
    return [
        Command(
            "train",
            folder / "run.toml",
            "--out",
            folder / "out",
            RANK=str(rank),
            WORLD_SIZE="3",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_three_workers_that_start_without_a_launcher_all_train_to_the_end(tmp_path: Path, kind: str) -> None:
    ends = [worker.finish() for worker in start(tmp_path, **KINDS[kind])]
    assert [code for code, _ in ends] == [0, 0, 0], ends


@pytest.mark.parametrize(("kind", "driver"), [("elastic", train_elastic), ("without waiting", train_asynchronous)])
def test_resume_auto_reaches_the_start_of_a_run_whose_workers_may_come_and_go(tmp_path, monkeypatch, kind, driver):
    (tmp_path / "run.toml").write_text(dump(tiny(**KINDS[kind])))
    asked = list[object]()
    monkeypatch.setattr(driver, "take_part", lambda *args, join, resume: asked.append(resume))
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--resume", "auto"]) == 0
    assert asked == ["auto"], "as True it would refuse to begin a run that has no checkpoint yet"


def start_behind_a_relay(folder: Path, relay: SilentRelay, port: int, kind: str, timeout_s: float) -> list[Command]:
    """Two workers, the second of which reaches the store of the first through the relay."""
    (folder / "run.toml").write_text(dump(tiny(workers=2, run__timeout_s=timeout_s, **KINDS[kind])))
    return [
        Command("train", folder / "run.toml", "--out", folder / "out", "--rank", rank, "--of", 2, "--address", where)
        for rank, where in enumerate((f"127.0.0.1:{port}", f"127.0.0.1:{relay.port}"))
    ]


@pytest.mark.parametrize(
    ("kind", "until"), [("in rounds", b"agree/1"), ("elastic", b"agree/1"), ("in rounds", b"group/")]
)
def test_a_store_that_falls_silent_while_a_run_starts_ends_it_in_a_sentence(tmp_path: Path, kind: str, until: bytes):
    port = free_port()
    with silent_relay(port, until) as relay:
        first, second = start_behind_a_relay(tmp_path, relay, port, kind, 4.0)
        code, output = second.finish()
        assert relay.silent.is_set(), output
        assert code == 2 and "Traceback" not in output, output
        assert f"the store at 127.0.0.1:{relay.port} did not answer for" in output, output
        code, output = first.finish()
        assert code == 2 and "gossamer: worker" in output and "Traceback" not in output, output


def test_a_worker_whose_store_has_fallen_silent_still_heeds_a_signal(tmp_path: Path) -> None:
    port = free_port()
    with silent_relay(port, b"agree/1") as relay:
        first, second = start_behind_a_relay(tmp_path, relay, port, "in rounds", 100.0)
        assert relay.silent.wait(60.0), second.finish(0.0)
        for worker in (second, first):
            os.kill(worker.pid, signal.SIGTERM)
        for worker in (second, first):
            code, output = worker.finish()
            assert code == 130 and "gossamer: stopped" in output, output


def test_a_newcomer_waits_for_the_first_machine_which_is_announced_at_an_address_and_warns_of_plain_text(
    tmp_path: Path,
) -> None:
    config = tiny(workers=2, rule={"name": "diloco"}, topology={"name": "complete"}, run__elastic=True)
    (tmp_path / "run.toml").write_text(dump(config))
    port, secret = free_port(), "known to the workers of this test only"
    given = ("train", tmp_path / "run.toml", "--out")
    second = Command(*given, tmp_path / "second", "--join", f"127.0.0.1:{port}", GOSSAMER_SECRET=secret)
    waits = next((line for line in second.lines() if f"waiting for 127.0.0.1:{port}, up to 300 s" in line), None)
    assert waits is not None and "Connection refused" in waits, second.finish()
    first = Command(*given, tmp_path / "first", "--listen", f"0.0.0.0:{port}", GOSSAMER_SECRET=secret)
    ends = [one.finish() for one in (second, first)]
    assert [code for code, _ in ends] == [0, 0], ends
    announced = (tmp_path / "first" / "address-000.json").read_text()
    assert "0.0.0.0" not in announced + ends[1][1].replace("0.0.0.0 means", ""), ends
    assert [output.count("not encrypted") for _, output in ends] == [0, 1], "once, by whom others reach"


def test_a_worker_that_cannot_start_stops_listening_and_leaves_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, closed = resolve(tiny(run__elastic=True), real=True), list[bool]()
    listener = socket.create_server(("127.0.0.1", 0))
    member = SimpleNamespace(worker=0, behind=SimpleNamespace(close=lambda: closed.append(True)))

    def disagree(*_: object, **__: object) -> list[object]:
        raise PeerError("worker 1 runs another configuration")

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "join", lambda *_, **__: member)
    monkeypatch.setattr(rendezvous, "listening_towards", lambda towards: (listener, "127.0.0.1:9"))
    monkeypatch.setattr(rendezvous, "agree", disagree)
    with pytest.raises(PeerError):
        train_elastic.train_elastic(run, tmp_path)
    assert closed and listener.fileno() == -1


def test_a_newcomer_that_gets_a_slot_and_cannot_write_its_address_stops_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, listeners = resolve(tiny(run__elastic=True), real=True), list[socket.socket]()
    folder_secret(tmp_path, make=True)

    def listening(towards: str) -> tuple[socket.socket, str]:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        return listeners[-1], "127.0.0.1:9"

    monkeypatch.setattr(rendezvous, "listening_towards", listening)
    monkeypatch.setattr(rendezvous, "ask", lambda *_, **__: Offer(1, [], 0, 0, "", None))
    (tmp_path / "address-001.json").mkdir()
    with pytest.raises(DiskError):
        join_run(run, tmp_path, 7, "127.0.0.1:9")
    assert [listener.fileno() for listener in listeners] == [-1]


def test_a_worker_without_memory_for_its_outer_state_ends_its_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would take it for alive."""
    run, closed = resolve(tiny(workers=1, run__elastic=True), real=True), list[bool]()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "1")

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    def close(transport: ElasticTransport, real: Callable[..., None] = ElasticTransport.close, **how: bool) -> None:
        closed.append(True)
        real(transport, **how)

    monkeypatch.setattr(elastic_rounds, "Worker", fails)
    monkeypatch.setattr(ElasticTransport, "close", close)
    with pytest.raises(MemoryError):
        train_elastic.train_elastic(run, tmp_path)
    assert closed


def test_a_newcomer_is_refused_at_once_where_waiting_would_not_help(tmp_path: Path) -> None:
    run, key = resolve(tiny(run__elastic=True), real=True), 7
    entry = SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0, "127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint(server, key + 1, folder_secret(tmp_path, make=True), 5.0)
        transport = ElasticTransport(Members(Limits(3, 6, 12), 0, [entry]), endpoint)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(PeerError, match=r"could be joined .*another configuration"):
            join_run(run, tmp_path, key, address)
        (tmp_path / "secret").write_text("another secret of as many characters")
        with pytest.raises(PeerError, match="no worker of the run could be joined"):
            join_run(run, tmp_path, key, address)
        transport.close()
    with pytest.raises(PeerError, match="no worker of the run could be joined") as refused:
        join_run(run, tmp_path, key, "no address")
    assert "gossamer status" not in str(refused.value), "this machine has no folder of the run"
    assert time.monotonic() - began_s < 60.0 < run.loop.timeout_s, "it does not wait"
