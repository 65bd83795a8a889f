"""The status of a run: its workers and their progress, from its files and from its workers; and how it ended."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import urllib.request
import zlib
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import until
from gossamer.cli import main
from gossamer.errors import ConfigError, DataError, DiskError, PeerError, TransportError
from gossamer.record.addresses import Address, write_address
from gossamer.record.folder import RecordConfig, RunFolder
from gossamer.record.locks import locked
from gossamer.record.logs.outcomes import Begun, Ended, Life, OutcomeWriter, RoundOutcome
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.logs.trace import Entry as TraceEntry
from gossamer.record.logs.trace import Operation
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.status import Sighting, run_status, standing_of
from gossamer.run.bookkeeping.which_round import round_to_resume, round_to_score
from gossamer.run.config.run_file import dump
from gossamer.run.participant.exit_status import exit_status, far_in_rounds
from gossamer.run.participant.life import changes
from gossamer.transport.elastic.ask import look
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import LetterHead, LetterKind, encode
from tiny import limits, tiny

SECRET = b"0123456789abcdef0123456789abcdef"
RUN = 77


@contextmanager
def a_worker(slot, others, slots=5):
    """A worker of an elastic run that listens, with what it knows of the others; and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    own = SlotEntry(slot, 0, 10 + slot, MemberStatus.ALIVE, 0, address, 6, 30)
    transport = ElasticTransport(Members(limits(slots), slot, [own, *others]), Endpoint(listener, RUN, SECRET, 5.0))
    try:
        yield address
    finally:
        transport.close()


def refused(address, count, slots=5):
    """The refusals of a worker, once there are so many: it counts one just after the other end has received the reason."""
    deadline = time.monotonic() + 30
    while True:
        found = look(address, SECRET, run=RUN, limits=limits(slots), timeout_s=5).refused
        if sum(found.values()) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def nobody():
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


VIEW = b'{"worker": 0, "entries": "[]", "silent_s": {}, "refused": {}}'


def view_of(answer, check=None):
    """An answer to who looks at a run."""
    head = LetterHead(LetterKind.VIEW, 0, size=len(answer), check=zlib.crc32(answer) if check is None else check)
    return encode(head, RUN) + answer


def write_slot(folder, config, slot, rounds, ended=None):
    """What a worker leaves that has trained so many rounds."""
    with (
        RunFolder(folder, dump(config), config.record, worker=slot) as record,
        OutcomeWriter(folder, slot) as log,
    ):
        log.write(Begun(0, 0, slot, 0, 0))
        for r in range(rounds):
            log.write(RoundOutcome(r, None, frozenset({1}) if r == 0 else frozenset(), frozenset(), 2 * (r + 1)))
            record.log("train", round=r, worker=slot, step=2 * (r + 1), loss=5.0 - r, lr=0.1, tokens=64)
            record.log_seconds(RoundSeconds(r, slot, None, 2.0, 0.5, {1: 0.25}, 0.25, 3.0 * (r + 1)))
        if ended is not None:
            log.write(Ended(rounds, ended))


@pytest.mark.parametrize(
    ("of", "is_kind", "remedy"), [("rounds", {}, "[peers]"), ("server", {"server": {"name": "heloco"}}, "there too")]
)
def test_status_says_why_it_knows_nothing_of_workers_of_other_machines(of, is_kind, remedy, tmp_path, capsys):
    config = tiny(workers=3, **is_kind)
    (tmp_path / "run.toml").write_text(dump(config))
    assert run_status(tmp_path).note is None, "nobody has begun"
    write_slot(tmp_path, config, 0, 2)
    status = run_status(tmp_path)
    assert status.kind == of and [one.standing for one in status.workers][1:] == ["unknown", "unknown"]
    assert main(["status", str(tmp_path)]) == 0
    (output,) = [line for line in capsys.readouterr().out.splitlines() if "no files of worker 1, 2 are here" in line]
    assert "call gossamer status there too" in output and remedy in output
    for slot in (1, 2):
        write_slot(tmp_path, config, slot, 2)
    assert run_status(tmp_path).note is None


def test_a_worker_that_slows_down_is_named_by_status_and_by_the_page(tmp_path, capsys):
    config = tiny(workers=2, run__steps=40)
    (tmp_path / "run.toml").write_text(dump(config))
    usual, slow = [2.0, 2.1, 1.9, 2.2, 2.0, 9.0, 2.0], [4.4, 5.0, 4.6]  # one slow round is none
    for slot, seconds in enumerate(([*usual, *slow], [*usual, 2.0, 2.0, 2.0])):
        with RunFolder(tmp_path, dump(config), config.record, worker=slot) as record:
            for r, compute_s in enumerate(seconds):
                record.log("train", round=r, worker=slot, step=2 * (r + 1), loss=5.0, lr=0.1, tokens=64)
                record.log_seconds(RoundSeconds(r, slot, None, compute_s, 0.5, {}, 0.0, 10.0 * (r + 1)))
    assert [one.slowed for one in run_status(tmp_path).workers] == [pytest.approx(4.4 / 2.0), None]
    assert main(["status", str(tmp_path)]) == 0
    sentence = "worker 0 has slowed down: 2.2 times its usual seconds of a step"
    assert sentence in capsys.readouterr().out
    followed = FollowedRun("k", tmp_path)
    followed.look()
    assert [one for one in followed.happenings if "slowed" in one[1]] == [(9, sentence)]


def test_status_shows_which_workers_are_alive_suspect_gone_joining_left_or_have_never_come(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("GOSSAMER_SECRET", SECRET.decode())
    config = tiny(workers=6, run__elastic=True)
    (tmp_path / "run.toml").write_text(dump(config))
    refusing = nobody()
    write_slot(tmp_path, config, 0, 3)
    write_slot(tmp_path, config, 1, 2)
    write_slot(tmp_path, config, 2, 4, ended="left")
    others = [
        SlotEntry(1, 0, 11, MemberStatus.SUSPECT, 0, refusing, 2, 4),
        SlotEntry(2, 0, 12, MemberStatus.LEFT, 0, "10.0.0.9:4000", 3, 8),
        SlotEntry(3, 1, 13, MemberStatus.JOINING, 0, "", 0, 6),
        SlotEntry(4, 0, 0, MemberStatus.LEFT, 0, "", 0, 0),
        SlotEntry(5, 0, 15, MemberStatus.SUSPECT, 0, "", 5, 10),
    ]
    with a_worker(0, others, slots=6) as address:
        write_address(tmp_path, Address(0, address, RUN))
        write_address(tmp_path, Address(1, refusing, RUN))
        with pytest.raises(PeerError):
            look(address, SECRET[::-1], run=RUN, limits=limits(6), timeout_s=5)
        refused(address, 1, slots=6)
        found = run_status(tmp_path)
        assert found.refused == {"127.0.0.1: secret": 1}
        standings = ["alive", "gone", "left", "joining", "empty", "suspect"]
        assert [one.standing for one in found.workers] == standings
        assert (found.kind, found.rounds, found.round, found.answered) == ("elastic", 6, 6, [0])
        alive, gone, left, *_ = found.workers
        assert (alive.round, alive.steps, alive.loss, alive.age_s, alive.missed) == (6, 6, 3.0, 0.0, 1)
        assert alive.address == address and alive.seconds is not None and alive.seconds.total_s == 3.0
        assert (gone.round, left.round) == (2, 4) and 0 <= gone.age_s < 600
        assert main(["status", str(tmp_path)]) == 0
        table = capsys.readouterr().out
        assert (
            "1 alive, 1 gone, 1 left, 1 joining, 1 empty, 1 suspect" in table
            and "asked now: worker 0" in table
            and "refused: 127.0.0.1: secret (1)" in table
        )
    assert main(["status", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [one["standing"] for one in result["workers"]] == ["gone", "gone", "left", *["unknown"] * 3], (
        "their logs say that all took part"
    )
    assert result["note"].startswith("no worker answers")


def test_a_worker_whose_files_are_elsewhere_is_unknown_and_an_unused_slot_is_empty(tmp_path):
    (tmp_path / "run.toml").write_text(dump(tiny(workers=3, run__elastic=True)))
    with OutcomeWriter(tmp_path, 0) as log:
        log.write(Begun(0, 0, 0, 0, 0))
        log.write(RoundOutcome(0, frozenset({0, 2}), frozenset(), frozenset(), 2))
    assert [one.standing for one in run_status(tmp_path).workers[1:]] == ["empty", "unknown"]


@pytest.mark.parametrize("kind", ["elastic", "no waiting", "rounds"])
def test_a_worker_whose_process_here_has_ended_is_gone_even_if_its_port_is_in_use(kind, tmp_path):
    more = {"elastic": {"run__elastic": True}, "no waiting": {"run__wait": False}, "rounds": {}}
    config = tiny(**more[kind])
    with RunFolder(tmp_path, dump(config), config.record, worker=1) as record:
        record.log("train", round=0, worker=1, step=2, loss=5.0, lr=0.1, tokens=64)
    with socket.create_server(("127.0.0.1", 0)) as other:
        if kind != "rounds":
            (tmp_path / "secret").write_text(SECRET.decode())
            (tmp_path / "secret").chmod(0o600)
            write_address(tmp_path, Address(1, f"127.0.0.1:{other.getsockname()[1]}", RUN))
        with locked(tmp_path, 1):
            assert run_status(tmp_path).workers[1].standing == ("alive" if kind == "rounds" else "unknown")
            later = run_status(tmp_path, now_s=time.time() + 13).workers[1]  # as of a process that was stopped
            assert later.standing == ("silent" if kind == "rounds" else "unknown") and later.age_s > 12
        assert run_status(tmp_path).workers[1].standing == "gone"
        (tmp_path / ".lock-001").write_text("process 7 on another machine")
        assert run_status(tmp_path).workers[1].standing == "unknown"


def test_a_worker_shows_its_view_only_to_a_process_with_the_secret_of_its_run():
    with a_worker(2, [SlotEntry(0, 0, 9, MemberStatus.ALIVE, 0, "", 4, 8)]) as address:
        view = look(address, SECRET, run=RUN, limits=limits(5), timeout_s=5)
        assert view.worker == 2 and [(entry.slot, entry.round) for entry in view.entries] == [(0, 4), (2, 6)]
        for secret, run in ((SECRET, RUN + 1), (SECRET[::-1], RUN)):
            with pytest.raises(PeerError):
                look(address, secret, run=run, limits=limits(5), timeout_s=5)
        counts = refused(address, 2)
        assert sum(counts.values()) == 2 and any("secret" in who for who in counts), counts
        with pytest.raises(PeerError, match="no view of a run with 2 workers"):
            look(address, SECRET, run=RUN, limits=limits(2), timeout_s=5)


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff" * 80,
        view_of(b"[1]"),
        view_of(b"{"),
        view_of(VIEW, check=1),
        view_of(VIEW.replace(b"0", b"1")),
        view_of(VIEW + b" " * (1 << 23)),
        b"",
    ],
    ids=["no letter", "another value", "no JSON", "another checksum", "another worker", "too long", "nothing"],
)
def test_an_answer_that_is_no_view_is_refused(answer, monkeypatch):
    def answered(raw):
        ours, theirs = socket.socketpair()
        monkeypatch.setattr("gossamer.transport.elastic.ask.dial", lambda *_, **__: Channel(ours, 5))
        threading.Thread(target=sent, args=(theirs, raw), daemon=True).start()
        return look("127.0.0.1:1", SECRET, run=RUN, limits=limits(2), timeout_s=5)

    def sent(theirs, raw):
        with theirs, contextlib.suppress(OSError):  # where what is too long is not read
            theirs.sendall(raw)

    assert answered(view_of(VIEW)).worker == 0
    with pytest.raises((TransportError, ConnectionError)):
        answered(answer)


def test_status_of_runs_that_are_not_elastic_comes_from_their_files(tmp_path, capsys):
    config = tiny(workers=2)
    for folder, worker in ((tmp_path / "real", 1), (tmp_path / "simulated", None)):
        with RunFolder(folder, dump(config), RecordConfig(tensorboard=False), worker=worker) as record:
            for r in range(config.length.rounds):
                record.log("train", round=r, worker=1, step=r, loss=2.0, lr=0.1, tokens=64)
    found = [run_status(tmp_path / name) for name in ("real", "simulated")]
    assert [one.kind for one in found] == ["rounds", "simulation"]
    assert [[worker.standing for worker in one.workers] for one in found] == [["unknown", "finished"]] * 2
    assert found[0].workers[0].age_s is None and found[0].workers[1].age_s is not None
    assert main(["status", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    (tmp_path / "real" / "run.toml").write_text("workers = 2")
    with pytest.raises(DataError, match=r"run\.toml"):
        run_status(tmp_path / "real")


def test_a_suspect_that_answers_is_still_suspect_and_one_that_left_after_its_last_round_has_finished():
    entry = SlotEntry(1, 0, 5, MemberStatus.SUSPECT, 0, "127.0.0.1:4000")
    assert standing_of(Sighting(entry, answered=True)) == "suspect"
    assert standing_of(Sighting(entry._replace(status=MemberStatus.LEFT), finished=True)) == "finished"


def test_every_event_of_another_worker_is_logged_in_one_sentence():
    a = SlotEntry(1, 0, 5, MemberStatus.ALIVE, 0, "10.0.0.1:4000", 3)
    left = a._replace(status=MemberStatus.LEFT)
    suspected, b = a._replace(status=MemberStatus.SUSPECT), SlotEntry(1, 1, 6, MemberStatus.JOINING, 0, "10.0.0.2:4000")
    steps = [
        (a, a._replace(round=4), []),
        (a, suspected, ["worker 1 is suspected: it is silent"]),
        (suspected, a._replace(incarnation=1, since=6), ["worker 1 is back, and takes part from round 7 on"]),
        (a, left, ["worker 1 has left"]),
        (a, left._replace(round=8), ["worker 1 has finished"]),
        (
            suspected,
            b,
            ["worker 1 is replaced: another process has taken its slot", "worker 1 joins, and fetches its state"],
        ),
        (b, b._replace(status=MemberStatus.ALIVE, since=9), ["worker 1 has joined, and takes part from round 10 on"]),
        (None, b, ["worker 1 joins, and fetches its state"]),
    ]
    for before, after, sentences in steps:
        known = {} if before is None else {1: before}
        assert [*changes(known, {0: a._replace(slot=0), 1: after}, 0, 9, lambda slot: "it is silent")] == sentences
    done = changes({1: a}, {1: left}, 0, 1 << 31, lambda slot: "", done={1})
    assert [*done] == ["worker 1 has finished"], "who waits for nobody has finished when it has said so"


def test_a_run_has_ended_well_once_somebody_has_trained_all_rounds():
    def life(why, rounds):
        outcomes = tuple(RoundOutcome(r, None, frozenset(), frozenset(), 0) for r in range(rounds))
        return [Life(Begun(0, 0, 0, 0, 0), outcomes, None if why is None else Ended(rounds, why))]

    lives = {0: life("finished", 9), 1: life(None, 4), 2: life("left", 5)}
    far = far_in_rounds(lives, 9)
    well = exit_status({1: 137, 2: 0, 0: 0}, {1: 4}, far)
    assert well.code == 0
    assert well.sentences == ["worker 1 ended with code 137 after round 4 of 9", "worker 2 has left after round 5 of 9"]
    assert exit_status({1: 137, 2: 0}, {1: 4}, far).code == 137  # worker 0 may have finished, and another run at that
    assert exit_status({2: 0}, {}, far) == (
        2,
        ["worker 2 has left after round 5 of 9", "no worker has reached round 9"],
    )
    assert exit_status({0: 2, 1: 130}, {}, far).code == 130
    taken_over = [Life(Begun(7, 7, 0, 0, 0, "0" * 64), (), Ended(7, "left"))]
    far = far_in_rounds({2: taken_over}, 9)
    assert exit_status({2: 0}, {}, far).sentences[0] == "worker 2 has left after round 7 of 9"


ROUNDS = st.frozensets(st.integers(1, 9), max_size=5)


@given(st.lists(ROUNDS, min_size=1, max_size=5))
def test_a_calm_run_resumes_from_the_newest_round_that_all_have_where_there_is_one(owned):
    held = {slot: dict.fromkeys(rounds) for slot, rounds in enumerate(owned)}
    having = [rounds for rounds in owned if rounds]
    common = frozenset.intersection(*having) if having else frozenset()
    found = round_to_resume(held)
    assert found == max(common) if common else found in {0, *(r for rounds in owned for r in rounds)}
    assert bool(found) == bool(having)


@given(st.lists(ROUNDS, min_size=1, max_size=5))
def test_the_round_to_score_is_never_older_than_one_that_most_have(owned):
    found = round_to_score({slot: dict.fromkeys(rounds) for slot, rounds in enumerate(owned)})
    having = sum(map(bool, owned))
    assert all(r <= found for r in range(1, 10) if 2 * sum(r in rounds for rounds in owned) > having)


def test_a_client_of_prometheus_that_is_missing_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"prometheus-client.* set it to 0"):
        RunFolder(tmp_path / "without", "", RecordConfig(tensorboard=False, prometheus_port=9200))


def test_a_port_for_prometheus_that_is_taken_is_one_sentence(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another port"):
        RunFolder(tmp_path / "b", "", RecordConfig(tensorboard=False, prometheus_port=taken.getsockname()[1]))


def test_a_host_for_prometheus_that_is_no_name_is_one_sentence(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    with pytest.raises(ConfigError, match=r"a\.\.b:9200 cannot be opened"):
        RunFolder(tmp_path, "", RecordConfig(tensorboard=False, prometheus_port=9200, prometheus_host="a..b"))


def test_a_run_folder_that_lacks_another_dashboard_leaves_no_port_open(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    monkeypatch.setitem(sys.modules, "wandb", None)
    host, _, port = nobody().rpartition(":")
    config = RecordConfig(prometheus_port=int(port), wandb_project="x")
    with pytest.raises(ConfigError, match="wandb"):
        RunFolder(tmp_path, "", config)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10)


def test_a_run_folder_with_a_file_that_cannot_be_opened_leaves_no_port_nor_file_open(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    host, _, port = nobody().rpartition(":")
    (tmp_path / "machines.jsonl").mkdir()
    before = sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else []
    with pytest.raises(DiskError, match="machines"):
        RunFolder(tmp_path, "", RecordConfig(tensorboard=False, prometheus_port=int(port)))
    assert not before or sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10)


def test_prometheus_reads_the_figures_of_a_worker_until_it_ends(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    port = int(nobody().rpartition(":")[2]) - 3
    config = RecordConfig(tensorboard=False, prometheus_port=port)
    before = set(threading.enumerate())
    with RunFolder(tmp_path, "", config, worker=3) as record:
        for r in range(2):
            record.log("train", round=r, worker=3, step=r, loss=2.5)
            record.log_trace(TraceEntry(r, 3, 2, 0.1, (Operation("exchange", 0, ((0, 100), (1, 100)), ((0, 100),)),)))
            record.log_seconds(RoundSeconds(r, 3, None, 2.0, 0.5, {1: 0.25}, 0.25, 3.0 * (r + 1)))
            record.show_exchanges(alive=4 - r, made=2, missed=r, unsure=0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 3}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "_created" not in line)
    assert {name: float(value) for name, value in figures.items()} == {
        "gossamer_alive_workers": 3.0,
        "gossamer_round": 2.0,
        'gossamer_loss{kind="train"}': 2.5,
        'gossamer_seconds_total{kind="compute"}': 4.0,
        'gossamer_seconds_total{kind="transfer"}': 1.0,
        'gossamer_seconds_total{kind="waiting"}': 0.5,
        'gossamer_seconds_total{kind="other"}': 0.5,
        'gossamer_exchanges_total{outcome="made"}': 4.0,
        'gossamer_exchanges_total{outcome="missed"}': 1.0,
        'gossamer_exchanges_total{outcome="unsure"}': 0.0,
        "gossamer_sent_bytes_total": 400.0,
    }
    until(lambda: set(threading.enumerate()) <= before)  # that which has answered may end a moment after its answer
