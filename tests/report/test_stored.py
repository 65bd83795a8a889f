"""Runs in a store on the live page: what their objects show, who is there, what does not count, and a store that fails."""

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_follow import RUN_TOML, write_round

from commands import run
from gossamer.errors import ConfigError
from gossamer.record.folder import RunFolder
from gossamer.report.page.live import LiveRuns
from gossamer.report.page.web import Page
from gossamer.report.reading import stored
from gossamer.report.reading.status import store_status
from gossamer.report.reading.stored import NO_LOSSES, FollowedStore
from gossamer.transport.bucket.bucket import Folder, SecretSeal
from gossamer.transport.bucket.objects import commit_name, lease_name

SETTINGS = {"rule.name": '"diloco"', "topology.name": '"complete"'}
START_S = 1_700_000_000.0


class Clock(SimpleNamespace):
    """A clock that a test sets forward."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return START_S + self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stored, "time", clock)
    return clock


@pytest.fixture
def store(tmp_path: Path) -> Folder:
    return begun(tmp_path / "store")


def begun(root: Path, rounds: int | None = 10, **more: object) -> Folder:
    root.mkdir()
    put(folder := Folder(str(root)), "run", {"workers": 2, "rounds": rounds, "settings": SETTINGS, **more})
    for slot in range(2):
        put(folder, lease_name("t", slot, 0), {})
    return folder


def put(store: Folder, name: str, head: dict[str, Any]) -> None:
    assert store.create(name, SecretSeal().sealed(name, head))


def commit(round: int, slots: Sequence[int] = (0, 1), **more: object) -> dict[str, Any]:
    return {
        "parts": {str(slot): {"life": 0, "steps": 5 * round + 5, "begun": None} for slot in slots},
        "steps": [5 * round + 5] * 2,
        "mean": "a" * 64,
        "closer": [round % 2, 0],
        "time_s": START_S + 60 * round,
        "payload_bytes": {**{str(slot): 1000 for slot in slots}, "mean": 2000},
        **more,
    }


def look(run: FollowedStore, clock: Clock | None = None, after_s: float = 0.0) -> FollowedStore:
    """Looks once more, after so many seconds."""
    if clock is not None:
        clock.now_s += after_s
    else:
        run._due_s = 0.0
    run.look()
    while run.progress < 1:
        run.look()
    return run


def view(page: LiveRuns) -> dict[str, Any]:
    return json.loads(page.data(""))["runs"][0]


def test_a_page_shows_rounds_participants_slots_and_bytes_of_a_run_in_a_store(store: Folder, clock: Clock) -> None:
    for round in range(3):
        put(store, commit_name(round), commit(round))
    run = look(FollowedStore(store.root))
    page = LiveRuns([], stores=[run])
    contents = json.loads(page.data(""))
    (shown,) = contents["runs"]
    assert (shown["done"], shown["rounds"], shown["method"], shown["topology"]) == (3, 10, "diloco", "complete")
    assert shown["state"] == "held" and shown["standings"] == ["held"] * 2 and NO_LOSSES in shown["complaints"]
    assert shown["evals"]["y"] == {"closed_rounds": [1, 2, 3], "workers_in_the_round": [2, 2, 2]}
    assert shown["evals"]["x"] == {
        "round": [1, 2, 3],
        "step": [5, 10, 15],
        "bytes": [2000, 4000, 6000],
        "time:": [0, 60, 120],
    }, "each sends 1,000 bytes, and one the mean"
    assert contents["axis"] == "time:" and contents["verdict"] == "" and contents["notes"] == []
    put(store, commit_name(3), commit(3, (1,), steps=[15, 20]))
    put(store, "u00001-0000-00000001", {})
    put(store, lease_name("t", 0, 1), {})
    look(run, clock, 6)
    shown = view(page)
    assert (shown["done"], shown["state"], shown["standings"]) == (4, "training", ["training", "training"])
    assert shown["rounds_of"] == [3, 4] and shown["age_s"] < 1e9
    moment = json.loads(page.moment(0, 3))
    assert moment["alive"] == [1] and moment["mean_bytes"] == 1000
    assert moment["words"] == (
        "Round 3 was closed by worker 1 at 2023-11-14 22:16:20 UTC, by its clock. Took part: 1. Their messages have 1,000 bytes, "
        "and the mean 2,000."
    )
    assert "was not read" in json.loads(page.moment(0, 7))["words"]
    assert shown["holders"] == [
        "process 2 since 2023-11-14 22:30:06 UTC",
        "process 1 since before 2023-11-14 22:30:00 UTC",
    ]


def test_a_file_of_others_that_is_named_key_makes_no_run_encrypted(store: Folder) -> None:
    put(store, commit_name(0), commit(0))
    Path(store.root, "key").write_text("ssh-ed25519 AAAA")
    assert look(FollowedStore(store.root)).done == 1 == store_status(store.root).round
    Path(store.root, "run").write_bytes(b"encrypted" * 9)
    with pytest.raises(ConfigError, match="has \\[peers\\], and is encrypted"):
        store_status(store.root)


def test_the_age_of_the_last_round_is_negative_where_the_clock_of_its_worker_is_ahead(store: Folder) -> None:
    put(store, commit_name(0), commit(0, time_s=1.7e9))
    assert [store_status(store.root, now_s=1.7e9 + past).age_s for past in (60, -3600)] == [60, -3600]


def test_a_page_of_a_run_without_living_workers_shows_its_past_and_says_so(store: Folder, clock: Clock) -> None:
    put(store, commit_name(0), commit(0))
    page = LiveRuns([], stores=[run := look(FollowedStore(store.root))])
    look(run, clock, 290)
    assert view(page)["standings"] == ["held"] * 2, "the pace of the leases is not known"
    put(store, lease_name("v", 1, 0), {})
    look(run, clock, 20)
    contents = json.loads(page.data(""))
    assert contents["runs"][0]["standings"] == ["silent", "left"] and contents["runs"][0]["done"] == 1
    assert contents["runs"][0]["holders"][1] == "process 1 has left"
    (note,) = contents["notes"]
    assert "no process of the run gives a sign of life; round 0 was closed by worker 0 at 2023-11-14 22:13:20" in note
    for beat in range(4):
        put(store, f"u00000-0000-{beat:08d}", {})
        look(run, clock, 10)
    assert view(page)["standings"][0] == "training" and json.loads(page.data(""))["notes"] == []
    look(run, clock, 45)
    assert view(page)["standings"][0] == "silent", "it was silent for more than three of its pauses"


def test_the_end_of_a_run_in_a_store_is_shown_and_a_loop_of_ones_own_has_none(
    store: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_MOST_KEPT", 4)
    monkeypatch.setattr(stored, "_MOST_READ", 3)
    for round in range(10):
        put(store, commit_name(round), commit(round))
    run = FollowedStore(store.root)
    assert not run.look() and run.progress == 0.3
    page = LiveRuns([], stores=[look(run)])
    shown = view(page)
    assert "is not kept" in json.loads(page.moment(0, 5))["words"] and json.loads(page.moment(0, 6))["everyone"]
    assert (shown["state"], shown["standings"]) == ("finished", ["finished"] * 2)
    own = begun(tmp_path / "own", None, settings=None, rule="gasloc(lr=0.5)")
    put(own, commit_name(0), commit(0, mean="", payload_bytes=None))
    shown = view(LiveRuns([], stores=[look(FollowedStore(own.root))]))
    assert (shown["rounds"], shown["state"], shown["method"]) == (None, "held", "gasloc(lr=0.5)")
    assert "bytes" not in shown["evals"]["x"] and shown["sent_bytes"] is None, "of a version that did not record them"


def test_the_rounds_of_a_server_in_a_store_are_those_of_its_events(tmp_path: Path) -> None:
    store = begun(tmp_path / "store", 4, server=True, settings={"server.name": '"hogwild"'})
    events = [("join", 0, 0), ("join", 1, 0), ("push", 0, 0), ("push", 1, 0), ("push", 1, 1), ("leave", 0, 2)]
    for number, (event, worker, rounds) in enumerate(events):
        fields = {"event": event, "at_s": 1.0 * number, "phase": rounds, "message": 0, "owned": [], "rounds": rounds}
        more = {"closer": [worker, 0], "mean": "", "payload_bytes": {str(worker): 500}}
        put(store, commit_name(number), commit(number, (worker,), **more, **fields))
    page = LiveRuns([], stores=[look(FollowedStore(store.root))])
    shown = view(page)
    assert (shown["kind"], shown["method"], shown["done"]) == ("server", "hogwild", 2)
    assert shown["evals"]["y"] == {"closed_rounds": [1, 2], "workers_in_the_round": [2, 1]}
    assert shown["events"] == {"join": 2, "push": 3, "leave": 1} and shown["rounds_of"] == [1, 2]
    assert json.loads(page.moment(0, 0))["pairs"] == [[-1, 0, 500], [-1, 1, 500]]
    assert [2, "worker 0: process 1 leaves, or has died"] in shown["happenings"]
    assert shown["done"] == store_status(store.root).round


FORGED = {
    "a participant that there is not": (1, commit(1, (5,))),
    "a time that no float has": (1, commit(1, time_s=10**400)),
    "a closer that there is not": (1, commit(1, closer=[9, 0])),
    "nothing": (1, {}),
    "no worker's object": (1, None),
    "a round after the last one": (99_999_999, commit(1)),
}


@pytest.mark.parametrize(("number", "head"), FORGED.values(), ids=FORGED)
def test_objects_that_no_worker_writes_are_left_out_and_hide_no_later_ones(
    number: int, head: dict[str, Any] | None, store: Folder
) -> None:
    put(store, commit_name(0), commit(0))
    name = commit_name(number)
    assert store.create(name, b"x" * 99 if head is None else SecretSeal().sealed(name, head))
    store.create("r00000003-commit-", b"")
    store.create("t00001-99999", b"")
    run = look(FollowedStore(store.root))
    assert run.done == 1 and any(f"'{name}'" in one for one in run.complaints)
    if head is not None:
        assert store_status(store.root).workers
    put(store, commit_name(2), commit(2, payload_bytes={"0": -1, "1": True, "mean": "x"}))
    assert look(run).done == 3 and run.sent.rows == 1, "sizes that are none are left out"


def test_a_page_says_since_when_its_store_does_not_answer_and_tries_again(
    store: Folder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, commit_name(0), commit(0))
    page = LiveRuns([], stores=[run := look(FollowedStore(store.root))])
    shutil.move(store.root, f"{store.root}-away")
    look(run, clock, 10)
    look(run, clock, 10)
    contents = json.loads(page.data(""))
    assert contents["runs"][0]["done"] == 1 and contents["runs"][0]["standings"] == ["held"] * 2
    (note,) = contents["notes"]
    assert f"{store.root} cannot be read since 2023-11-14 22:30:10 UTC, and is tried again: " in note
    shutil.move(f"{store.root}-away", store.root)
    put(store, commit_name(1), commit(1))
    look(run, clock, 30)
    assert run.notes() == [] and run.done == 2
    hangs = threading.Event()
    monkeypatch.setattr(stored, "_WAIT_S", 0.01)
    monkeypatch.setattr(Folder, "names", lambda self, after: hangs.wait(20) and [])
    clock.now_s += 30
    assert not run.look() and view(page)["done"] == 2, "the page does not wait for it"
    hangs.set()


def test_an_emptied_store_is_reported_while_the_last_state_stays_on_the_page(store: Folder) -> None:
    for round in range(3):
        put(store, commit_name(round), commit(round))
    run = look(FollowedStore(store.root))
    shutil.rmtree(store.root)
    put(begun(Path(store.root), 7), commit_name(0), commit(0))
    assert (
        look(run).done == 3
        and "'r00000002-commit', which was read, is gone, as somebody has emptied the store" in run.notes()[0]
    )


def test_a_page_makes_at_most_twenty_requests_a_minute_and_none_while_it_is_not_open(
    store: Folder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_FOLDER_PAUSES_S", stored._PAUSES_S)
    requests: list[str] = []
    names, get = Folder.names, Folder.get
    monkeypatch.setattr(Folder, "names", lambda self, after: requests.append("list") or names(self, after))
    monkeypatch.setattr(Folder, "get", lambda self, name, most: requests.append(name) or get(self, name, most))
    run = look(FollowedStore(store.root))
    requests.clear()
    for second in range(60):
        if second % 20 == 0:
            put(store, commit_name(second // 20), commit(second // 20))
        look(run, clock, 1)
    assert run.done == 3 and len(requests) <= 13, requests
    requests.clear()
    clock.now_s += 3600
    assert not requests
    for _ in range(600):
        look(run, clock, 1)
    assert len(requests) <= 15, "one a minute while nothing happens"


def test_the_verb_serves_a_store_beside_run_folders(
    store: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, commit_name(0), commit(0))
    with RunFolder(tmp_path / "a", RUN_TOML) as run_folder:
        write_round(run_folder, 0)
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(Page, "serve_forever", lambda page: served.append(json.loads(page.answers["data.json"]({}))))
    code, output = run("watch", tmp_path / "a", f"file://{store.root}", "--port", 0)
    assert code == 0 and "watch: http://127.0.0.1:" in output, output
    (contents,) = served
    assert contents["command"] == f"gossamer watch {tmp_path / 'a'} file://{store.root}"
    assert [(view["name"], view["done"]) for view in contents["runs"]] == [(f"file://{store.root}", 1), ("x", 1)]
    assert contents["verdict"] and contents["table"]["rows"][1][1] != "–", "that of the folder"


def test_what_can_not_be_watched_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    begun(tmp_path / "big", workers=5000)
    for words, sentence in (
        (("--plan", "s3://bucket/run"), "--plan was given with 's3://bucket/run', which is a store"),
        ((f"file://{tmp_path}/empty",), "no run lies in the store"),
        ((f"file://{tmp_path}/missing",), "no run lies in the store"),
        (("nowhere://bucket/run",), "the store 'nowhere://bucket/run' cannot be opened"),
        ((tmp_path / "missing",), "is no folder"),
        ((tmp_path / "empty", "--peers", tmp_path / "run.toml"), "no run in a store to read with it"),
        ((tmp_path / "big",), "has 5000 workers and a page shows 4096 at most"),
    ):
        code, output = run("watch", "--port", 0, *words)
        assert code == 2 and sentence in output and "Traceback" not in output, output
    with pytest.raises(ConfigError, match="no run lies in the store"):
        FollowedStore(str(tmp_path / "empty"))
