"""A server and its workers over real sockets, and as real processes: as a user starts them, with deaths and forged frames."""

import base64
import json
import logging
import os
import shlex
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy as np
import pytest
import torch
from test_virtual import EVEN, evals, timed

from commands import Command, free_port, run, until
from gossamer.cli import main
from gossamer.clock import SERVER
from gossamer.errors import ConfigError, PeerError, TransportError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.arrivals import read_arrivals
from gossamer.record.logs.events import read_events
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.machines import Threads
from gossamer.run.bookkeeping.evaluate import Probe, evaluate
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import digest, dump
from gossamer.run.participant.agreement import limits_of, run_key
from gossamer.run.replay.served import replay_server
from gossamer.run.served.connections import listener_at
from gossamer.run.served.protocol import Terms
from gossamer.run.served.served_worker import work
from gossamer.run.served.server import serve
from gossamer.run.served.session import Pushed, open_session
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.task import task_of
from gossamer.transport import wire
from gossamer.transport.contract import WIRE_VERSION, Ticket
from gossamer.transport.keys import KEY, certificate_of, new_key
from gossamer.transport.processes.local import LISTENER
from gossamer.transport.secret import SECRET
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import prove_to_dialler
from gossamer.transport.sockets.header import HEADER_BYTES, LetterHead, LetterKind, encode
from gossamer.transport.sockets.letter import Letter, body_of, letters_up_to, receive_letter, send_letter
from gossamer.transport.sockets.server_client import connect
from tiny import OF_ONE_LAYER as PARAMETERS


def served(network=EVEN, **overrides):
    """A tiny run with a server that both drivers can take."""
    return timed(network, **{"run__timeout_s": 30.0, "run__threads": 1, **overrides})


def model(folder, config, round=None):
    return checkpoint.load(folder / "checkpoints", round or config.length.rounds, config.workers, digest(config))["x"]


def common(config):
    """What both ends of a connection must name."""
    run = settings_of(config)
    return run_key(run, task_of(run))


KNOWN = "the secret of these runs, which all sides of them know"


@pytest.fixture(autouse=True)
def a_secret(monkeypatch):
    monkeypatch.setenv(SECRET, KNOWN)


def joined(port, config, me=0):
    """A connection to a server whose both ends have proved that they know the secret."""
    where, key = f"127.0.0.1:{port}", common(config)
    return connect(where, secret=KNOWN.encode(), run=key, me=me, limits=limits_of(settings_of(config)), timeout_s=20)


def greet(client, me=0):
    """Says hello, as a worker without checkpoints."""
    client.send(Letter(LetterKind.HELLO, me, body=NO_CHECKPOINTS.view(torch.uint8)))


def start_of(client):
    """The terms of the next starting point."""
    body = client.receive(LetterKind.START, Ticket(0), 64 + 4 * PARAMETERS).body
    return Terms(*body[:64].view(torch.int64).tolist())


def events(folder, who=None):
    name = "events.jsonl" if who is None else f"events-{who:03}.jsonl"
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def had(folder, event):
    """The workers of which the record of a run has such an event, in its order, while the run continues."""
    record = folder / "arrivals.jsonl"
    lines = record.read_text().split("\n")[:-1] if record.exists() else []
    return [one["worker"] for one in map(json.loads, lines) if one["event"] == event]


class Process(threading.Thread):
    """Runs one side in a thread, and keeps what it raised."""

    def __init__(self, fn, *args, **options):
        super().__init__(daemon=True)
        self._call, self.error = (fn, args, options), None
        self.start()

    def run(self):
        fn, args, options = self._call
        try:
            fn(*args, **options)
        except Exception as error:
            self.error = error


@contextmanager
def a_server(config, folder, monkeypatch, **options):
    """A server on a free port: its thread, and the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv(LISTENER, str(os.dup(listener.fileno())))
        server = Process(serve, resolve(config, real=True), folder, "127.0.0.1", port, **options)
        while server.is_alive() and not (folder / f"events-{config.workers:03}.jsonl").exists():
            time.sleep(0.01)  # models draw from the one generator of this process: one after the other
        yield server, port
        server.join(60)
        assert not server.is_alive()


def together(config, folder, monkeypatch, workers=None):
    """A whole run with all sides in this process; raises what any of them raised."""
    with a_server(config, folder, monkeypatch) as (server, port):
        sides = [
            Process(work, resolve(config, real=True), folder, "127.0.0.1", port, i)
            for i in workers or range(config.workers)
        ]
        for side in sides:
            side.join(60)
    for side in [server, *sides]:
        if side.error is not None:
            raise side.error


ALONE = {
    "heloco": {"server": {"name": "heloco"}, "model__layers": 1},
    "cgad in fragments, int8": {"server": {"name": "cgad"}, "events": {"fragments": 3}, "codec": {"name": "int8"}},
    "delayed nesterov": {"server": {"name": "delayed_nesterov", "delay": 2}, "model__layers": 1},
    "a window": {"server": {"name": "decoupled_diloco"}, "codec": {"name": "randomk"}, "model__layers": 1},
    "fragments in tiles": {"server": {"name": "heloco"}, "events": {"fragments": 3}, "codec": {"name": "topk2bit"}},
}


@pytest.mark.parametrize("method", ALONE.values(), ids=ALONE.keys())
def test_one_worker_over_a_socket_computes_the_bits_of_virtual_time(method, tmp_path, monkeypatch):
    config = served(workers=1, inner__warmup_steps=2, **method)
    together(config, tmp_path / "real", monkeypatch)
    simulate(config, tmp_path / "virtual")
    assert torch.equal(model(tmp_path / "real", config), model(tmp_path / "virtual", config))
    figures = ("kind", "round", "step", "loss", "tokens")
    for kind in ("eval", "train"):
        ours, theirs = (
            [[line.get(f) for f in figures] for line in read_metrics(tmp_path / where) if line["kind"] == kind]
            for where in ("real", "virtual")
        )
        assert ours == theirs
    assert read_events(tmp_path / "real").ages == read_events(tmp_path / "virtual").ages
    sizes = [
        [e["bytes"] for e in log if e["event"] == "push"]
        for log in (events(tmp_path / "real", 1), events(tmp_path / "virtual"))
    ]
    assert sizes[0] == sizes[1]
    measured, known = (read_seconds(tmp_path / where) for where in ("real", "virtual"))
    assert [(one.round, one.worker) for one in measured] == [(one.round, one.worker) for one in known]
    assert all(one.compute_s > 0 and set(one.waiting_for) == {SERVER} for one in measured)
    assert np.cumsum([one.total_s for one in measured]) == pytest.approx([one.end_s for one in measured])


def test_a_server_with_keys_computes_the_same_bits_and_must_be_listed_as_server(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    keys = {name: new_key(name, tmp_path / f"{name}.pem") for name in ("hub", "berlin")}
    listed = {name: {"certificate": base64.b64encode(certificate_of(path)).decode()} for name, path in keys.items()}
    method = {"workers": 1, "inner__warmup_steps": 2, **ALONE["heloco"]}
    config = served(
        **method, peers={"hub": {**listed["hub"], "workers": 0, "server": True}, "berlin": listed["berlin"]}
    )
    plain = served(**method)
    assert digest(config) == digest(plain)
    simulate(plain, tmp_path / "virtual")
    # Server and worker are threads of this process here, so each would find the same key: of one that is both.
    both = served(**method, peers={"hub": {**listed["hub"], "server": True}})
    monkeypatch.setenv(KEY, str(keys["hub"]))
    together(both, tmp_path / "real", monkeypatch)
    assert torch.equal(model(tmp_path / "real", plain), model(tmp_path / "virtual", plain))
    with pytest.raises(
        ConfigError, match=r"is peer 'hub' in \[peers\], with the workers 1, and this process is worker 0"
    ):
        work(resolve(config, real=True), tmp_path / "other", "127.0.0.1", 9, 0)
    with pytest.raises(ConfigError, match=r"0 of \[peers\] have server = true, and a run with a \[server\] needs one"):
        served(**method, peers={"berlin": listed["berlin"]})


def test_a_server_takes_the_socket_of_its_launcher_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as made:
        monkeypatch.setenv(LISTENER, str(os.dup(made.fileno())))
        with listener_at("127.0.0.1", 1) as mine, listener_at("127.0.0.1", 0) as another:
            assert mine.getsockname() == made.getsockname() != another.getsockname()


def test_a_run_that_has_ended_is_not_served_again(tmp_path, monkeypatch, capsys):
    config = served(workers=1, server__name="heloco")
    together(config, tmp_path / "real", monkeypatch)
    before = {path: path.read_bytes() for path in (tmp_path / "real").glob("*.jsonl")}
    sentence = (
        f"the run has ended after {config.length.rounds} rounds; gossamer evaluate {tmp_path / 'real'} scores it\n"
    )
    for words in (["--local", "1"], ["--server", "127.0.0.1:1"]):
        capsys.readouterr()
        assert main(["train", "--resume", str(tmp_path / "real"), *words]) == 0
        assert capsys.readouterr().err == sentence
    assert {path: path.read_bytes() for path in (tmp_path / "real").glob("*.jsonl")} == before
    (tmp_path / "real" / "run.toml").write_text(dump(served(workers=1, server__name="heloco", seed=5)))
    assert main(["train", "--resume", str(tmp_path / "real"), "--server", "127.0.0.1:1"]) == 2
    assert "run.toml was changed since: seed was 0 and is 5" in capsys.readouterr().err


def consistent(folder, config):
    """Asserts that each age is the number of updates since the last starting point its worker was sent."""
    updates, greeted = 0, dict.fromkeys(range(config.workers), 0)
    for event in events(folder, config.workers):
        if event["event"] == "return":
            greeted[event["worker"]] = updates
        if event["event"] == "update":
            for worker, age in zip(event["workers"], event["ages"], strict=True):
                assert age <= updates - greeted[worker]
            updates += 1
            greeted |= dict.fromkeys(event["workers"], updates)
    return updates


@pytest.mark.parametrize("name", ["heloco", "cgad", "decoupled_diloco"])
def test_several_workers_take_all_steps_and_every_push_counts_with_its_age(name, tmp_path, monkeypatch):
    options = {"quorum": 2, "grace_s": 0.01} if name == "decoupled_diloco" else {}
    config = served(workers=3, server={"name": name, **options}, run__steps=16, model__layers=1)
    together(config, tmp_path, monkeypatch)
    log = read_events(tmp_path)
    phases = [e for i in range(3) for e in events(tmp_path, i) if e["event"] == "phase"]
    assert sum(e["tokens"] for e in phases) == 3 * 16 * config.length.step_tokens
    assert log.absorbed.tolist() == [sum(e["worker"] == i for e in phases) for i in range(3)]
    assert len(log.ages) == 24
    assert name == "decoupled_diloco" or max(log.ages) > 0  # its grace may take all of them in together
    updates = consistent(tmp_path, config)
    assert updates == 24 if name != "decoupled_diloco" else 8 <= updates < 24
    scored = evals(tmp_path)
    assert scored[-1]["tokens"] == 3 * 16 * config.length.step_tokens and scored[-1]["loss"] < 5.6
    assert evaluate(tmp_path)[1].loss == scored[-1]["loss"]


def test_a_worker_that_comes_back_is_greeted_and_continues_where_it_was(tmp_path, monkeypatch, caplog):
    config = served(workers=2, server__name="heloco", run__steps=12, run__checkpoint_every=2)
    with a_server(config, tmp_path, monkeypatch) as (server, port):
        # A worker of which only the socket is real: it is greeted, and dies without a word.
        mute = joined(port, config, me=1)
        greet(mute, 1)
        assert start_of(mute).go == 1
        mute.close()
        sides = [Process(work, resolve(config, real=True), tmp_path, "127.0.0.1", port, i) for i in range(2)]
        for side in sides:
            side.join(60)
    assert [side.error for side in [server, *sides]] == [None] * 3
    assert "worker 1 is gone" in caplog.text
    kinds = [e["event"] for e in events(tmp_path, 2) if e["event"] in ("leave", "return")]
    assert kinds == ["leave", "return"]
    consistent(tmp_path, config)
    assert read_events(tmp_path).absorbed.sum() == 12  # the steps that were lost have been taken by somebody


NO_CHECKPOINTS = torch.zeros(3, dtype=torch.int64)
NAN = torch.full((PARAMETERS,), float("nan")).view(torch.uint8)


def letter(run, kind=LetterKind.PUSH, body=b"", *, sender=0, **header):
    """A letter of a worker, of which all of `header` may be a lie."""
    check = wire.checksum(body_of(body)) if body else 0
    head = LetterHead(kind, sender, **{"ticket": Ticket(0), "size": len(body), "check": check, **header})
    return encode(head, run) + body


def hello(run, rounds=(0, 0), **header):
    """The first word of a worker."""
    return letter(run, LetterKind.HELLO, torch.tensor((0, *rounds), dtype=torch.int64).numpy().tobytes(), **header)


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


FORGED = {
    "another protocol": (lambda run: b"GET / HTTP/1.1 and more than a header holds".ljust(80), "another program"),
    "itself": (lambda run: hello(run, sender=1), "24 bytes as hello"),
    "a worker that cannot be": (lambda run: hello(run, sender=5), "the sender is 5"),
    "another run after all": (lambda run: hello(run + 1), "runs configuration"),
    "a push before it was greeted": (lambda run: letter(run), "as push"),
    "a huge first word": (lambda run: hello(run, size=1 << 40), str(1 << 40)),
    "a round that cannot be": (lambda run: hello(run, round=1 << 61), f"the round is {1 << 61}"),
    "checkpoints that cannot be": (lambda run: hello(run, (0, 1 << 40)), f"checkpoints of rounds [0, {1 << 40}]"),
    "a later version": (lambda run: hello(run)[:4] + b"\x09\x00" + hello(run)[6:], "version 9"),
    "a flipped bit of a header": (lambda run: flipped(hello(run), 40), "header of its letter changed"),
    "a flipped bit of a body": (lambda run: flipped(hello(run), 83), "another checksum"),
    "half a header": (lambda run: hello(run)[:20], "closed the connection after 20"),
    "a push of another size": (lambda run: (hello(run), letter(run, size=1 << 50)), str(1 << 50)),
    "a push of another phase": (
        lambda run: (hello(run), letter(run, size=4 * PARAMETERS, ticket=Ticket(3))),
        "round=3",
    ),
    "a phase that cannot be": (lambda run: (hello(run), letter(run, ticket=Ticket(5))), "round of its ticket is 5"),
    "a push that is cut": (lambda run: (hello(run), letter(run, size=4 * PARAMETERS) + b"x"), "closed"),
    "a push with another checksum": (
        lambda run: (hello(run), letter(run, body=bytes(4 * PARAMETERS), check=1)),
        "another checksum",
    ),
    "a push of numbers that are none": (
        lambda run: (hello(run), letter(run, body=NAN.numpy().tobytes())),
        "not all finite",
    ),
}
"""What a worker that knows the secret sends, and a part of the server's sentence."""


def test_forged_letters_are_refused_with_a_sentence_each_and_the_run_continues(tmp_path, monkeypatch, caplog):
    config = served(workers=1, server__name="cgad", run__steps=4)
    run = common(config)
    greeting_bytes = HEADER_BYTES + 64 + 4 * PARAMETERS
    with a_server(config, tmp_path, monkeypatch) as (server, port), caplog.at_level(logging.WARNING, "gossamer"):
        for name, (made, part) in FORGED.items():
            letters = made(run)
            caplog.clear()
            with joined(port, config).channel as attacker:
                first, *later = (letters,) if isinstance(letters, bytes) else letters
                attacker.write(first)
                for one in later:
                    attacker.read(greeting_bytes)
                    attacker.write(one)
                with suppress(OSError):  # it may have hung up already
                    attacker._sock.shutdown(socket.SHUT_WR)
                attacker.drain()
            deadline = time.monotonic() + 60
            while part not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            assert part in caplog.text, (name, caplog.text)
            assert all("\n" not in record.getMessage() for record in caplog.records)
        assert server.is_alive()
        worker = Process(work, resolve(config, real=True), tmp_path, "127.0.0.1", port, 0)
        worker.join(60)
    assert worker.error is None and server.error is None
    simulate(config, tmp_path / "virtual")
    assert torch.equal(model(tmp_path, config), model(tmp_path / "virtual", config))


def test_a_worker_learns_the_reason_of_its_refusal_and_trusts_no_server_that_lies(tmp_path, monkeypatch):
    config = served(workers=1, server__name="cgad", run__steps=2)
    with a_server(config, tmp_path / "a", monkeypatch) as (_, port):
        with pytest.raises(
            PeerError,
            match=r"refused this process: worker 0 runs another .*: worker 0 has run.steps = 4 and the server has 2; start",
        ):
            work(
                resolve(served(workers=1, server__name="cgad", run__steps=4), real=True),
                tmp_path / "b",
                "127.0.0.1",
                port,
                0,
            )
        work(resolve(config, real=True), tmp_path / "a", "127.0.0.1", port, 0)
    with pytest.raises(ConfigError, match="--worker got 3 but the run file has workers = 1"):
        work(resolve(config, real=True), tmp_path / "b", "127.0.0.1", port, 3)

    terms = torch.tensor(Terms(0, -5, 1, 0, 0, 0, 0, 0))

    def lie(listener):
        sock, _ = listener.accept()
        with Channel(sock, 10) as liar:
            assert prove_to_dialler(liar, KNOWN.encode(), run=common(config)) == (0, True)
            receive_letter(
                liar, common(config), limits_of(settings_of(config)), letters_up_to(LetterKind.HELLO, most_bytes=24)
            )
            body = wire.pack_frames([terms, torch.zeros(PARAMETERS)])
            send_letter(liar, Letter(LetterKind.START, 1, body=body), common(config))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        lying = Process(lie, listener)
        with pytest.raises(TransportError, match="round=-5"):
            work(resolve(config, real=True), tmp_path / "b", "127.0.0.1", listener.getsockname()[1], 0)
        lying.join(10)


ASKED = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a letter": hello(0),
    "zeros": bytes(4096),
    "noise": bytes(range(256)) * 3,
}


def answer_to(port, request=b""):
    """What a stranger receives that sends this and waits for the end, but for the random bytes, of which only the number."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        # It listens first: a server that hangs up on what is too much resets the connection, and what it had sent may be lost.
        got = sock.recv(32, socket.MSG_WAITALL)
        with suppress(OSError):
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(1 << 16):
                got += part
    return len(got[:32]), got[32:]


def test_a_stranger_learns_nothing_takes_no_seat_and_keeps_no_worker_out(tmp_path, monkeypatch, caplog):
    config = served(workers=2, server__name="heloco", run__steps=6)
    with a_server(config, tmp_path, monkeypatch) as (server, port):
        assert {what: answer_to(port, request) for what, request in ASKED.items()} == dict.fromkeys(ASKED, (32, b""))
        for wrong in ("a secret that is another one, though as long", KNOWN + "!"):
            with pytest.raises(PeerError, match=r"turned away by the server.*give both the same secret"):
                connect(
                    f"127.0.0.1:{port}",
                    secret=wrong.encode(),
                    run=common(config),
                    me=0,
                    limits=limits_of(settings_of(config)),
                    timeout_s=20,
                )
        with (
            pytest.raises(
                PeerError,
                match=r"server refused this process: worker 7 is none of the 2 workers .*; give --worker 0 to 1",
            ),
            closing(joined(port, config, me=7)) as nobody,
        ):
            start_of(nobody)
        seats = {e["worker"] for e in events(tmp_path, 2) if "worker" in e}
        assert not seats and "does not know the secret of this run" in caplog.text
        mute = joined(port, config, me=1)  # a worker that dies, and has to return
        greet(mute, 1)
        start_of(mute)
        mute.close()
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for one in slow:
            one.send(b"x")
        sides = [Process(work, resolve(config, real=True), tmp_path, "127.0.0.1", port, i) for i in range(2)]
        for side in sides:
            side.join(60)
        for one in slow:
            one.close()
    assert [side.error for side in [server, *sides]] == [None] * 3


def test_a_worker_believes_no_server_that_does_not_know_the_secret(tmp_path):
    def pretend(listener):
        for _ in range(5):  # as often as a worker tries
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"GOSS" + WIRE_VERSION.to_bytes(2, "little") + bytes(26))
                sock.recv(1 << 10)
                sock.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        pretending = Process(pretend, listener)
        with pytest.raises(PeerError, match="it answered worker 0 and does not know the secret of this run"):
            joined(port, served(workers=1, server__name="cgad"))
        pretending.join(10)
    assert pretending.error is None


def test_a_worker_with_other_text_than_the_server_is_refused(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 1000)
    config = served(workers=1, server__name="cgad", run__steps=2, data__source=str(text))
    with a_server(config, tmp_path / "a", monkeypatch) as (server, port):
        text.write_text("a line of next\n" * 1000)
        with pytest.raises(PeerError, match=r"worker 0 has the text of data.source = .* and the server has .*; start"):
            work(resolve(config, real=True), tmp_path / "b", "127.0.0.1", port, 0)
        text.write_text("a line of text\n" * 1000)
        work(resolve(config, real=True), tmp_path / "a", "127.0.0.1", port, 0)
    assert server.error is None


def test_waits_are_bounded(tmp_path, monkeypatch):
    config = served(workers=2, server__name="cgad", run__timeout_s=1.0)
    with a_server(config, tmp_path, monkeypatch) as (server, _):
        pass
    assert isinstance(server.error, PeerError) and "no worker has been here for 1 s" in str(server.error)
    port = free_port()
    with pytest.raises(PeerError, match=f"could not reach the server at 127.0.0.1:{port} within 1 s"):
        work(resolve(config, real=True), tmp_path, "127.0.0.1", port, 0)


def test_a_silent_worker_is_left_behind(tmp_path, monkeypatch, caplog):
    config = served(workers=2, server__name="cgad", run__steps=6, run__timeout_s=4.0)
    with a_server(config, tmp_path, monkeypatch) as (server, port):
        mute = joined(port, config, me=1)
        greet(mute, 1)
        worker = Process(work, resolve(config, real=True), tmp_path, "127.0.0.1", port, 0)
        worker.join(60)
    mute.close()
    assert worker.error is None and server.error is None
    assert "worker 1 is gone (worker 1 did nothing for 4 s" in caplog.text


def test_a_worker_that_comes_as_the_run_ends_hears_that_nothing_is_left(tmp_path, monkeypatch):
    config = served(workers=2, server__name="cgad", run__steps=4)
    with a_server(config, tmp_path, monkeypatch) as (server, port):
        late = joined(port, config, me=1)  # which proves who it is, and then takes its time
        work(resolve(config, real=True), tmp_path, "127.0.0.1", port, 0)
        greet(late, 1)
        assert not start_of(late).go
        late.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))
    assert server.error is None
    replay_server(resolve(config, real=True), tmp_path / "replay", tmp_path)
    assert torch.equal(model(tmp_path, config), model(tmp_path / "replay", config))


def start(config, folder):
    """`gossamer train --local N` in the background."""
    (folder.parent / "run.toml").write_text(dump(config))
    return Command("train", folder.parent / "run.toml", "--out", folder, "--local", config.workers)


def in_place_of_a_killed_worker(launcher, folder, killed, *others):
    """A process that takes the place of the worker that was killed, started as the launcher printed when that one ended.

    The `others` stand still until it has joined, so that it has something to do however long it takes to start.
    """
    deadline = time.monotonic() + 100
    with stopped(*others):
        restart_line = next(line for line in launcher.lines() if "start it again with" in line)
        spare = Command(*shlex.split(restart_line[restart_line.index("gossamer train") :])[1:])
        while joined_in(folder).count(killed) < 2:
            assert time.monotonic() < deadline, spare.finish(0)
            time.sleep(0.02)
    return spare


def joined_in(folder):
    """The workers that the record of a run has joining, as they came."""
    lines = (folder / "arrivals.jsonl").read_text().split("\n")[:-1]
    return [one["worker"] for one in map(json.loads, lines) if one["event"] == "join"]


@contextmanager
def stopped(*pids):
    """These processes stand still, so that a run waits for a process that is to join it, however slow the machine is."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(240)
def test_a_run_that_was_killed_resumes_from_the_server_s_snapshot_to_the_same_bits(tmp_path, capsys):
    config = served(
        workers=1,
        server__name="cgad",
        run__steps=24,
        run__checkpoint_every=8,
        run__eval_every=12,
        run__pace_s=0.1,
        model__layers=1,
    )
    launcher = start(config, tmp_path / "real")
    pids = launcher.processes(2)
    store, deadline = tmp_path / "real" / "checkpoints", time.monotonic() + 120
    # The worker's snapshot comes just after the server's, and the next ones in 0.8 s: cut between, both are of one round.
    while not all(checkpoint.rounds(store, i) for i in range(2)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in (launcher.pid, *pids.values()):
        os.kill(pid, signal.SIGKILL)
    launcher.finish()
    assert checkpoint.rounds(store, 0) == checkpoint.rounds(store, 1) != []
    code, output = run("train", "--resume", tmp_path / "real", "--local", 1)
    assert code == 0, output
    simulate(config, tmp_path / "virtual")
    assert torch.equal(model(tmp_path / "real", config), model(tmp_path / "virtual", config))
    ours, theirs = ([(e["round"], e["loss"]) for e in evals(tmp_path / where)] for where in ("real", "virtual"))
    assert ours == theirs
    replay_server(resolve(config, real=True), tmp_path / "replay", tmp_path / "real")
    assert torch.equal(model(tmp_path / "replay", config), model(tmp_path / "real", config))


@pytest.mark.sampled(1)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("whom", ["server", "launcher"])
def test_a_server_that_gets_sigterm_saves_after_its_round_and_resumes_from_it(tmp_path, whom):
    config = served(
        workers=2,
        server__name="heloco",
        run__steps=120,
        run__checkpoint_every=40,
        run__eval_every=40,
        run__pace_s=0.05,
        model__layers=1,
    )
    real = tmp_path / "real"
    launcher = start(config, real)
    pids, deadline = launcher.processes(3), time.monotonic() + 120
    while {*had(real, "push")} != {0, 1} and time.monotonic() < deadline:
        time.sleep(0.02)  # a worker that has not begun cannot end the round under way
    os.kill(launcher.pid if whom == "launcher" else pids["serve"], signal.SIGTERM)  # the system cuts the server's name
    code, output = launcher.finish()
    assert code == 130 and "stopped after round" in output and "Traceback" not in output, output
    assert "which has not ended by itself" not in output, "its workers were asked to leave"
    [stopped] = checkpoint.rounds(real / "checkpoints", config.workers)
    assert f"stopped after round {stopped} of {config.length.rounds}, and saved; resume with --resume {real}" in output
    assert 0 < stopped < 40
    if whom == "launcher":
        replay_server(resolve(config, real=True), tmp_path / "stopped", real)
        assert checkpoint.rounds(tmp_path / "stopped" / "checkpoints", config.workers) == [stopped]
        assert torch.equal(model(tmp_path / "stopped", config, stopped), model(real, config, stopped))
        ours, theirs = (
            sorted(
                (line["worker"], line["step"], line["loss"]) for line in read_metrics(folder) if line["kind"] == "train"
            )
            for folder in (real, tmp_path / "stopped")
        )
        assert ours == theirs, "the replay has each phase that a worker has recorded, whether its push arrived or not"
        replayed = events(tmp_path / "stopped")
        for i in range(2):  # the last answer of a server that stops may not reach a worker
            fetches = [
                [e["target"] for e in some if e["event"] == "fetch"].count(i) for some in (events(real, i), replayed)
            ]
            assert 0 < fetches[0] <= fetches[1] <= fetches[0] + 1
    code, output = run("train", "--resume", real, "--local", 2)
    assert code == 0, output
    replay_server(resolve(config, real=True), tmp_path / "replay", real)
    assert torch.equal(model(tmp_path / "replay", config), model(real, config))


@pytest.mark.timeout(60)
def test_a_server_that_gets_sigterm_without_workers_ends_and_says_what_is_not_saved(tmp_path):
    config = served(workers=2, server__name="heloco", run__steps=4)
    (tmp_path / "run.toml").write_text(dump(config))
    address = f"127.0.0.1:{free_port()}"
    server = Command("train", tmp_path / "run.toml", "--out", tmp_path / "real", "--server", address)
    assert any("serving 2 workers on" in line for line in server.lines())
    os.kill(server.pid, signal.SIGTERM)
    code, output = server.finish(50)
    assert code == 130 and "Traceback" not in output, output
    assert (
        f"and 0 of 8 inner steps are done; go on from the newest checkpoint with --resume {tmp_path / 'real'}" in output
    )


@pytest.mark.timeout(240)
def test_the_workers_of_a_killed_server_join_the_resumed_one_and_both_its_lives_replay_to_the_same_bits(tmp_path):
    config = served(
        workers=2,
        server__name="heloco",
        run__steps=40,
        run__checkpoint_every=4,
        run__eval_every=20,
        run__pace_s=0.1,
        model__layers=1,
    )
    real = tmp_path / "real"
    launcher = start(config, real)
    pids, deadline = launcher.processes(3), time.monotonic() + 120
    while not all(checkpoint.rounds(real / "checkpoints", i) for i in range(3)) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pids["serve"], signal.SIGKILL)  # the system cuts its name
    resume_line = next(line for line in launcher.lines() if "resume it with" in line)
    server = Command(*shlex.split(resume_line[resume_line.index("gossamer train") :])[1:])
    code, output = launcher.finish()
    assert code == 0, output + server.finish(0)[1]
    assert "Traceback" not in output and output.count("trains this phase again") >= 2
    code, printed = server.finish()
    assert code == 0, printed
    inputs = read_arrivals(real)
    (again,) = (k for k, item in enumerate(inputs) if k and item.event == "serve")
    assert inputs[again].round > 0
    assert {item.worker for item in inputs[again:] if item.event == "join"} == {0, 1}
    for i in range(2):  # no phase counts twice: what was under way has been trained again
        assert [e["number"] for e in events(real, i) if e["event"] == "phase"] == [
            *range(read_events(real).absorbed[i])
        ]
    assert read_events(real).absorbed.sum() == 2 * 20
    consistent(real, config)
    replay_server(resolve(config, real=True), tmp_path / "replay", real)
    assert torch.equal(model(tmp_path / "replay", config), model(real, config))
    ours, theirs = ([(e["round"], e["loss"]) for e in evals(where)] for where in (real, tmp_path / "replay"))
    assert ours == theirs


class _Slow(Probe):
    """Validates once it may."""

    may = threading.Event()

    def loss(self, x, buffers=()):
        assert self.may.wait(60)
        return super().loss(x, buffers)


def test_a_server_answers_before_it_has_validated_and_saved_and_records_the_same(tmp_path):
    config = served(workers=2, server__name="heloco", run__eval_every=2, run__checkpoint_every=1)
    pushes = torch.randn(2 * config.length.rounds, PARAMETERS, generator=torch.Generator().manual_seed(1)) / 100
    answers = {}
    for where, replays in (("replay", Threads(1)), ("real", None)):
        made = resolve(config, real=True)
        probe = _Slow(made, task_of(made), torch.device("cpu"))
        probe.may = threading.Event()
        probe.may.set()
        with open_session(made, tmp_path / where, probe, None, replays=replays) as session:
            until(lambda: bool(evals(tmp_path / where)))  # noqa: B023  the initial values are validated first
            if replays is None:
                probe.may.clear()
            greeted = [reply for i in range(2) for reply in session.join(i, [], 0.0)]
            assert len(greeted) == 2
            for k, push in enumerate(pushes):
                (reply,) = session.hear(k % 2, Pushed(0, push, 0, k + 1.0), k + 1.0)
                assert reply.terms.round == (k + 1) // 2
                if k == 1:  # a round has ended and its worker has its answer
                    store = tmp_path / where / "checkpoints"
                    done = [len(evals(tmp_path / where)), len(checkpoint.rounds(store, 2))]
                    assert done == ([2, 1] if replays else [1, 0])
                    probe.may.set()
            assert session.core.is_finished
            session.records.close(100.0)
        answers[where] = evals(tmp_path / where), model(tmp_path / where, config)
    assert answers["real"][0] == answers["replay"][0] and len(answers["real"][0]) == 1 + config.length.rounds
    assert torch.equal(answers["real"][1], answers["replay"][1])


def test_a_worker_that_reconnects_is_refused_on_its_first_connection(tmp_path, monkeypatch):
    config = served(workers=1, server__name="cgad", run__steps=2)
    with a_server(config, tmp_path, monkeypatch) as (server, port):
        first = joined(port, config)
        greet(first)
        start_of(first)
        work(resolve(config, real=True), tmp_path, "127.0.0.1", port, 0)
        with pytest.raises(PeerError, match="refused this process: worker 0 reconnected; this connection is closed"):
            start_of(first)
        first.close()
    assert server.error is None


def test_a_worker_that_reconnects_all_the_time_joins_once_a_second(tmp_path, monkeypatch):
    config = served(workers=2, server__name="cgad", run__steps=2)
    with a_server(config, tmp_path, monkeypatch) as (server, port), ExitStack() as open_:
        began_s = time.monotonic()
        for _ in range(60):
            client = joined(port, config, 1)
            open_.callback(client.close)
            greet(client, 1)
        until(lambda: 1 in had(tmp_path, "join"))
        time.sleep(1.5)
        joins = [who for who in had(tmp_path, "join") if who == 1]
        assert 1 <= len(joins) <= 3 * (time.monotonic() - began_s)
        honest = Process(work, resolve(config, real=True), tmp_path, "127.0.0.1", port, 0)
        honest.join(60)
    assert honest.error is None and server.error is None


def test_impossible_options_of_train_are_refused_in_one_sentence(tmp_path, capsys):
    path = tmp_path / "run.toml"
    for overrides, words, part in [
        ({"server__name": "cgad"}, ["--local", "2"], "workers = 3"),
        ({"server__name": "cgad"}, [], "--server HOST:PORT"),
        ({"server__name": "cgad"}, ["--server", "here"], "'here'"),
        ({"server__name": "cgad", "events": {"fragments": 2, "overlap": True}}, ["--server", "127.0.0.1:1"], "overlap"),
        ({"server__name": "cgad"}, ["--local", "3", "--worker", "1"], "--worker 1 was given with --local 3"),
        ({}, ["--server", "127.0.0.1:1"], "has no [server]"),
        ({"run__elastic": True}, ["--server", "127.0.0.1:1", "--worker", "0"], "has no [server]"),
        ({"run__elastic": True}, ["--local", "3", "--server", "127.0.0.1:1"], "has no [server]"),
    ]:
        path.write_text(dump(timed(**overrides)))
        assert main(["train", str(path), "--out", str(tmp_path / "run"), *words]) == 2
        output = capsys.readouterr().err
        assert output.count("\n") == 1 and part in output, output
