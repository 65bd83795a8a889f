"""`gossamer doctor`: each thing that keeps a machine from taking part is named by its line, with the remedy."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_machines import machines  # noqa: F401

from gossamer.cli import doctor, main
from gossamer.run.config.run_file import dump
from gossamer.transport.keys import KEY, Peer, keys_for
from gossamer.transport.secret import SECRET
from gossamer.transport.sockets.addresses import listen, shown
from gossamer.transport.sockets.examination import ExaminationServer
from tiny import tiny

WORD = "known to both ends of this test only"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, WORD)


@contextlib.contextmanager
def answering(host: str = "127.0.0.1", secret: bytes = WORD.encode(), keys: Any = None) -> Iterator[str]:
    """The address of a doctor that answers."""
    server = ExaminationServer(listen(host, 0), secret, keys, lambda who, reached: None)
    try:
        yield server.address
    finally:
        server.close()


def findings(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit code, and what was found: by subject the state, and the fact with its remedy."""
    capsys.readouterr()
    code = main(["doctor", *map(str, words), "--json"])
    facts: dict[str, list[tuple[str, str]]] = {}
    for one in json.loads(capsys.readouterr().out)["findings"]:
        facts.setdefault(one["what"], []).append((one["state"], f"{one['fact']}; {one['remedy']}"))
    return code, facts


@pytest.mark.usefixtures("secret")
def test_the_way_to_another_doctor_is_tried_in_both_directions(capsys: pytest.CaptureFixture[str]):
    with answering() as address:
        code, facts = findings(capsys, "--join", address)
    (peer,), (back,), (link,), (_, clock) = (facts[what] for what in ("peer", "way back", "link", "clock"))
    assert code == 0 and peer[0] == back[0] == link[0] == clock[0] == "ok", facts
    assert f"{address} answers in" in peer[1] and "can be reached at 127.0.0.1" in back[1]
    assert "Mbit/s there and" in link[1] and f"that of {address} is" in clock[1]


@pytest.mark.usefixtures("secret")
def test_a_machine_behind_nat_reports_that_it_dials_and_cannot_be_joined(capsys: pytest.CaptureFixture[str]):
    with answering("127.0.0.1") as address, behind_nat(address) as through:
        code, facts = findings(capsys, "--join", through)
    [(state, words)] = facts["way back"]
    assert (code, state) == (0, "warning") and "(127.0.0.1 that is seen as 127.0.0.9) cannot be reached" in words
    assert "it cannot be the one that others join" in words and facts["link"][0][0] == "ok"


@contextlib.contextmanager
def behind_nat(address: str) -> Iterator[str]:
    """An address from which everything is passed on from another one, at which nobody listens."""
    host, port = address.split(":")
    outside = listen("127.0.0.1", 0)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            inner, _ = outside.accept()
            with inner, socket.create_connection((host, int(port)), source_address=("127.0.0.9", 0)) as outer:
                there = threading.Thread(target=pump, args=(inner, outer))
                there.start()
                pump(outer, inner)
                there.join()

    relay = threading.Thread(target=accept)
    relay.start()
    try:
        yield shown(*outside.getsockname()[:2])
    finally:
        with contextlib.suppress(OSError):
            outside.shutdown(socket.SHUT_RDWR)  # a close alone would leave the thread in accept
        outside.close()
        relay.join()


def test_addresses_that_answer_are_distinguished_from_those_that_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, secret: None
):
    with answering() as address:
        monkeypatch.setenv(SECRET, "another one, of sixteen bytes and more")
        code, facts = findings(capsys, "--join", address)
        assert code == 1 and "hung up on without a word: compare those of both machines" in facts["peer"][0][1], facts
        monkeypatch.delenv(SECRET)
        code, facts = findings(capsys, "--join", address)
        assert code == 0 and "somebody listens" in facts["peer"][0][1] and "set GOSSAMER_SECRET" in facts["peer"][0][1]
    monkeypatch.setenv(SECRET, WORD)
    code, facts = findings(capsys, "--join", address)  # it has gone
    assert (
        code == 1 and f"nothing listens at port {address.split(':')[1]}; start gossamer doctor" in facts["peer"][0][1]
    )
    monkeypatch.setattr("gossamer.transport.sockets.examination.PATIENCE_S", 0.5)
    with contextlib.closing(socket.socket()) as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # a connection to a full queue is dropped silently, as by a firewall
            one = waiting.enter_context(contextlib.closing(socket.socket()))
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        time.sleep(0.1)
        code, facts = findings(capsys, "--join", shown(*full.getsockname()))
    assert code == 1 and "let TCP through to port" in facts["peer"][0][1], facts
    with contextlib.closing(listen("127.0.0.1", 0)) as silent:
        at = shown(*silent.getsockname()[:2])
        code, facts = findings(capsys, "--join", at)
    assert code == 1 and f"{at} was silent or hung up" in facts["peer"][0][1], facts
    assert "look what listens there" in facts["peer"][0][1]
    code, facts = findings(capsys, "--join", "no-such-machine.invalid:29400")
    assert code == 1 and "is not known here" in facts["peer"][0][1] and facts["address"][0][0] == "fault"


def test_a_key_that_does_not_fit_is_named_and_one_that_does_opens_the_way(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("cryptography")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(KEY, raising=False)
    peers, files = {}, {}
    for name in ("rome", "oslo", "stranger"):
        files[name] = tmp_path / f"{name}.pem"
        capsys.readouterr()
        assert main(["keys", "new", name, "--out", str(files[name]), "--json"]) == 0
        peers[name] = {"certificate": json.loads(capsys.readouterr().out)["keys"][0]["certificate"], "workers": 2}
    stranger = peers.pop("stranger")
    (tmp_path / "run.toml").write_text(dump(tiny(workers=4, run__elastic=True, peers=peers)))
    there = {"rome": Peer(**peers["rome"]), "oslo": Peer(**peers["oslo"])}
    monkeypatch.setenv(KEY, str(files["rome"]))
    with answering(keys=keys_for(there, 4)) as address:
        code, facts = findings(capsys, tmp_path / "run.toml", "--join", address, "--key", files["oslo"])
        assert code == 0, facts
        assert "is peer 'oslo' of the run file, which may be worker 2, worker 3" in facts["key"][0][1]
        assert "and has the key of a peer" in facts["peer"][0][1] and "for 2 workers" in facts["memory"][0][1]
        code, facts = findings(capsys, tmp_path / "run.toml", "--join", address, "--key", files["stranger"])
        assert code == 1 and "none of the run's [peers]" in facts["key"][0][1] and "peer" not in facts
        (tmp_path / "theirs.toml").write_text(
            dump(tiny(workers=4, run__elastic=True, peers={"rome": peers["rome"], "else": stranger}))
        )
        code, facts = findings(capsys, tmp_path / "theirs.toml", "--join", address, "--key", files["stranger"])
        assert code == 1 and facts["key"][0][0] == "ok" and "refused the key" in facts["peer"][0][1], facts


def test_a_run_that_does_not_fit_and_a_clock_that_stands_are_faults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run.toml").write_text(dump(tiny()))
    monkeypatch.setattr(doctor, "_free_memory_bytes", lambda: 1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_000))
    monkeypatch.setattr(
        doctor, "time", SimpleNamespace(time=lambda: 86400.0, strftime=time.strftime, gmtime=time.gmtime)
    )
    code, facts = findings(capsys, tmp_path / "run.toml")
    assert code == 1 and {facts[what][0][0] for what in ("memory", "disk", "clock")} == {"fault"}, facts
    assert "give this machine fewer workers" in facts["memory"][0][1] and "make room" in facts["disk"][0][1]
    assert "it is 1970-01-02 00:00:00 UTC here" in facts["clock"][0][1] and "not encrypted" in facts["key"][0][1]
    (tmp_path / "run.toml").write_text("workers = 'many'")
    code, facts = findings(capsys, tmp_path / "run.toml")
    assert code == 1 and f"gossamer check {tmp_path / 'run.toml'}" in facts["run file"][0][1]


def test_another_package_with_the_same_files_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert "package" not in findings(capsys)[1]
    (tmp_path / "gossamer_web-0.9.35.dist-info").mkdir()
    (tmp_path / "gossamer_web-0.9.35.dist-info" / "METADATA").write_text("Name: gossamer-web\nVersion: 0.9.35\n")
    (tmp_path / "gossamer_web-0.9.35.dist-info" / "top_level.txt").write_text("gossamer\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, facts = findings(capsys)
    assert code == 1 and facts["package"][0][0] == "fault" and "gossamer-web" in facts["package"][0][1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--join", "a:1", "--listen", "b:2"), "were both given; start one"),
        (("--join", "10.0.0.1"), "write HOST:PORT"),
        (("--listen", "127.0.0.1:0"), "write HOST:PORT"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *words]) == 2 and sentence in capsys.readouterr().err


def test_no_client_is_answered_without_a_proof(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SECRET, raising=False)
    with contextlib.closing(listen("127.0.0.1", 0)) as free:
        address = shown(*free.getsockname()[:2])
    assert main(["doctor", "--listen", address]) == 2
    assert f"--listen {address} answers only who proves that he takes part" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.timeout(120)
def test_machines_whose_names_lead_to_themselves_report_it_and_reach_each_other(machines: list[str]):  # noqa: F811
    def on(i: int, *words: str) -> subprocess.Popen[str]:
        namespace, hosts = machines[i].split()
        inside = ["sh", "-c", 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"', hosts, f"m{i}"]
        command = [*inside, sys.executable, "-u", "-m", "gossamer", "doctor", *words]
        return subprocess.Popen(
            ["unshare", "--mount", "--uts", "ip", "netns", "exec", namespace, *command],
            env={**os.environ, SECRET: WORD},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    answers = on(0, "--listen", "10.78.0.1:29600")
    try:
        assert answers.stdout is not None
        first = next(line for line in answers.stdout if "answers at" in line)
        assert "10.78.0.1:29600 until Ctrl-C" in first
        output, _ = (asks := on(1, "--join", "m0:29600")).communicate(timeout=60)
        assert asks.returncode == 0, output
        assert "'m1' leads to 127.0.1.1, where no other machine reaches this one; give 10.78.0.2" in output
        assert "10.78.0.2 on eth0 leads to m0" in output and "this machine can be reached at 10.78.0.2" in output
        output, _ = (lost := on(0, "--join", "m0:29600")).communicate(timeout=60)
        assert lost.returncode == 1 and "'m0' leads to 127.0.1.1, which is this machine itself" in output
    finally:
        answers.terminate()
        answers.communicate(timeout=60)
