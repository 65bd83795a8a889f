"""A run folder that is followed while it grows: nothing is read twice or missed, and nothing in it can stop the reader."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.record.folder import RunFolder
from gossamer.record.logs.outcomes import Begun, OutcomeWriter, RoundOutcome
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.logs.trace import Entry, Operation
from gossamer.report.page.contents import page_contents
from gossamer.report.page.view import run_view, standings
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.lines import line_of_kind
from gossamer.report.reading.moment import moment_of
from gossamer.report.reading.tail import Marks, Tail
from gossamer.report.reading.thinning import Grid, KeptLines, spread_out, thinned

RUN_TOML = 'name = "x"\nworkers = 2\nrule = { name = "gasloc" }\n[run]\nsteps = 36\nlocal_steps = 9\n'


def write_round(run: RunFolder, r: int, workers: int = 2, *, parts: int = 1) -> None:
    """A round in which each worker sends 1000 bytes to the next one, in each of its parts."""
    for i in range(workers):
        run.log("train", round=r, worker=i, step=9 * (r + 1), loss=3.0 - 0.1 * r + i, tokens=32 * (r + 1), lr=1e-3)
        for part in range(parts):
            sends, receives = (((i + 1) % workers, 1000),), (((i - 1) % workers, 1000),)
            run.log_trace(Entry(r * parts + part, i, 9, 0.1, (Operation("exchange", part, sends, receives),)))
        run.log_seconds(RoundSeconds(r, i, None, 1.0, 0.25, {1 - i: 0.5} if workers == 2 else {}, 0.0, 1.75 * (r + 1)))
    run.log("eval", round=r, step=9 * (r + 1), tokens=64 * (r + 1), loss=2.0 + 1 / (r + 2), disagreement=0.1)


def followed(folder: Path) -> FollowedRun:
    run = FollowedRun(folder.name, folder)
    assert run.look()
    return run


def view(run: FollowedRun) -> dict[str, Any]:
    return run_view(run, run.modified_s)


def test_a_run_that_grows_gives_the_same_figures_as_one_that_is_read_at_its_end(tmp_path: Path) -> None:
    live = FollowedRun("a", tmp_path / "a")
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        for r in range(4):
            write_round(run, r)
            assert live.look() and live.done == r + 1
    end = FollowedRun("a", tmp_path / "a")
    end.look()
    assert view(live) == view(end)
    shown = view(end)
    assert shown["state"] == "finished" and shown["sent_bytes"] == 4000
    assert shown["evals"]["x"] == {
        "round": [1, 2, 3, 4],
        "step": [9, 18, 27, 36],
        "tokens": [64, 128, 192, 256],
        "bytes": [1000, 2000, 3000, 4000],
        "time:": [1.75, 3.5, 5.25, 7.0],
    }
    assert shown["spent"][""] == {"kinds": [[4.0, 2.0, 1.0, 0.0]] * 2, "waits": [[0, 1, 2.0], [1, 0, 2.0]]}
    assert shown["tokens_per_s"] == {"": pytest.approx(256 / 7)}


def test_outcomes_of_workers_elsewhere_change_no_mean_over_those_with_training_here(tmp_path: Path) -> None:
    folder, before = tmp_path / "a", dict[str, Any]()
    with RunFolder(folder, RUN_TOML, worker=0) as run:
        for r in range(4):
            write_round(run, r, workers=1)
        before = view(followed(folder))
    with OutcomeWriter(folder, 1) as other:  # as a worker in a store writes those of all, at the end
        for r in range(4):
            other.write(RoundOutcome(r, None, frozenset(), frozenset(), 9 * (r + 1)))
    after = view(followed(folder))
    assert after["rounds_of"] == [4, 4] and before["rounds_of"] == [4, 0]
    assert after["sent_bytes"] == before["sent_bytes"] == 4000 and after["evals"] == before["evals"]
    assert after["tokens_per_s"] == before["tokens_per_s"]


def test_what_the_workers_validated_stays_when_the_mean_model_is_scored_afterwards(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        for r in range(4):
            for i in range(2):
                run.log("validation", round=r, worker=i, step=9 * (r + 1), loss=3.0 - 0.5 * r + i)
        own = view(followed(tmp_path / "a"))["evals"]
        assert own["x"]["round"] == [1, 2, 3, 4] and own["y"] == {"own": [3.5, 3.0, 2.5, 2.0]}
        run.log("eval", round=3, step=36, tokens=256, loss=1.75, disagreement=0.1)
    shown = view(followed(tmp_path / "a"))
    assert shown["evals"]["y"]["loss"] == [1.75] and shown["own"] == own
    titles = {
        one["key"]: one["title"]
        for one in page_contents([shown], [], title="", live=True, command="", date="")["figures"]
    }
    assert {"loss", "own"} <= titles.keys()


@pytest.mark.parametrize(
    ("rounds_of_one", "tokens"), [(1, [64, 96, 128, 160]), (0, [64, 128, 192, 256])], ids=["dead", "elsewhere"]
)
def test_a_dead_worker_trains_no_tokens_and_one_that_records_elsewhere_counts_as_the_others_do(
    rounds_of_one: int, tokens: list[int], tmp_path: Path
) -> None:
    for worker, rounds in ((0, 4), (1, rounds_of_one)):
        if rounds:
            with RunFolder(tmp_path, RUN_TOML, worker=worker) as run:
                for r in range(rounds):
                    run.log("train", round=r, worker=worker, step=9 * (r + 1), tokens=32 * (r + 1), loss=3.0, lr=1e-3)
                    run.log_trace(Entry(r, worker, 9, 0.1, (Operation("exchange", 0, ((1 - worker, 1000),), ()),)))
    shown = view(followed(tmp_path))
    assert shown["training"]["x"]["tokens"] == tokens
    assert shown["sent_bytes"] == (2500 if rounds_of_one else 4000)  # by a worker


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        write_round(run, 0)
        live = followed(tmp_path / "a")
        places = {name: tail.offset for name, tail in live.tails.items()}
        revision = live.revision
        assert live.look() and live.revision == revision
        write_round(run, 1)
        chunks = [begin for tail in live.tails.values() for begin, _ in tail.read()]
    assert min(chunks) in places.values() and len(chunks) == 3 + 2 + 2


def test_half_a_line_is_left_for_the_next_look(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        write_round(run, 0)
    live, path = followed(tmp_path / "a"), tmp_path / "a" / "metrics.jsonl"
    line = '{"kind":"train","round":1,"worker":0,"step":18,"loss":1.5}\n'
    with path.open("a") as file:
        file.write(line[:30])
    assert live.look() and live.done == 1 and not live.complaints
    with path.open("a") as file:
        file.write(line[30:])
    assert live.look() and live.done == 2 and not live.complaints


@pytest.mark.parametrize("way", ["replaced", "cut", "cut and grown again", "removed"])
def test_a_run_that_went_back_is_read_again_from_its_start(tmp_path: Path, way: str) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        for r in range(3):
            write_round(run, r)
    live, path = followed(tmp_path / "a"), tmp_path / "a" / "metrics.jsonl"
    first = b"".join(line for line in path.read_bytes().splitlines(keepends=True) if b'"round":0' in line)
    if way == "replaced":
        path.with_suffix(".new").write_bytes(first)
        os.replace(path.with_suffix(".new"), path)
    elif way == "cut":
        os.truncate(path, len(first))
    elif way == "cut and grown again":
        os.truncate(path, len(first))
        with path.open("ab") as file:
            file.write(b"".join(b'{"kind":"other","round":1,"n":%d}\n' % n for n in range(100)))
    else:
        path.unlink()
    live.look()
    again = FollowedRun("a", tmp_path / "a")
    again.look()
    assert view(live) == view(again)
    assert live.losses.rows == (0 if way == "removed" else 1)


def test_a_spoilt_line_costs_itself_and_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        write_round(run, 0)
        with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
            file.write('{"kind":3}\nnothing\n{"kind":"train","round":0,"worker":77}\n')
        write_round(run, 1)
    live = followed(tmp_path / "a")
    assert live.done == 2
    assert len(live.complaints) == 3 and all("metrics.jsonl at byte" in sentence for sentence in live.complaints)
    assert any("names worker 77 of 2" in sentence for sentence in live.complaints)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("workers = 2\n", "another version"),
        ("name", "another version"),
        (None, "no run.toml yet"),
        (RUN_TOML.replace("workers = 2", "workers = 5000"), "at most"),
    ],
)
def test_a_folder_without_a_run_that_can_be_shown_is_one_sentence(tmp_path: Path, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","round":0,"worker":0,"loss":1.0}\n')
    live = followed(tmp_path)
    shown = view(live)
    assert shown["empty"] and len(shown["complaints"]) == 1 and word in shown["complaints"][0]
    (tmp_path / "run.toml").write_text(RUN_TOML)
    os.utime(tmp_path / "run.toml", (1, 1))
    live.look()
    assert live.done == 1 and not live.complaints


def test_no_link_is_followed_out_of_the_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        write_round(run, 0)
    (tmp_path / "secret").write_text('{"kind":"train","round":7,"worker":0,"loss":"very secret"}\n')
    (tmp_path / "a" / "metrics-001.jsonl").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "a" / "trace-001.jsonl")
    live = followed(tmp_path / "a")
    assert live.done == 1
    assert [sentence.split()[1] for sentence in live.complaints] == ["metrics-001.jsonl", "trace-001.jsonl"]
    assert "very secret" not in str(view(live))


def test_a_round_is_read_from_the_files_whatever_came_before_it(tmp_path: Path) -> None:
    with RunFolder(
        tmp_path / "a", RUN_TOML.replace("steps = 36", "steps = 900").replace("workers = 2", "workers = 3")
    ) as run:
        for r in range(40):
            write_round(run, r, 3, parts=2)
    live = followed(tmp_path / "a")
    assert live.parts == 2
    for r in (0, 17, 39):
        moment = moment_of(live, r)
        assert moment["pairs"] == [(0, 1, 2000), (1, 2, 2000), (2, 0, 2000)]
        assert [row[:2] for row in moment["seconds"][""]] == [
            (i, pytest.approx(1.75 * (r + 1) - 1.25)) for i in range(3)
        ]
    assert moment_of(live, 40)["pairs"] == []


def test_outcomes_show_living_workers_failures_and_newcomers(tmp_path: Path) -> None:
    with RunFolder(tmp_path, RUN_TOML.replace("workers = 2", "workers = 3") + "elastic = true\n", worker=0) as run:
        run.log("train", round=0, worker=0, step=9, loss=1.0, tokens=9)
    with OutcomeWriter(tmp_path, 0) as log, OutcomeWriter(tmp_path, 1) as other:
        log.write(Begun(0, 0, 0, 0, 0))
        log.write(RoundOutcome(0, None, frozenset({2}), frozenset(), 9))
        log.write(RoundOutcome(1, frozenset({0, 1}), frozenset(), frozenset(), 18))
        other.write(Begun(1, 1, 0, 9, 1))
        other.write(RoundOutcome(1, frozenset({0, 1}), frozenset(), frozenset(), 18))
    (tmp_path / "metrics-002.jsonl").write_text('{"kind":"train","round":0,"worker":2,"loss":1.0}\n')
    (tmp_path / "outcomes-000-old.jsonl").write_bytes((tmp_path / "outcomes-000.jsonl").read_bytes())
    live = followed(tmp_path)
    assert not live.complaints
    assert standings(live, live.modified_s) == ["training", "training", "gone"]
    assert standings(live, live.modified_s + 3600) == ["silent", "silent", "gone"]
    assert [sentence for _, sentence in live.happenings] == [
        "worker 0: exchange with 2 missed",
        "worker 1 comes with the state of worker 0 after 1 rounds",
    ]
    assert moment_of(live, 0)["failed"] == [(0, 2)] and moment_of(live, 1)["alive"] == [0, 1]


def test_a_round_is_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(tmp_path, RUN_TOML) as run:
        write_round(run, 0)
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write(100_000 * "x" + "\n")
    live, lengths = followed(tmp_path), list[int]()

    def parsed(kind: str, raw: bytes, *more: Any) -> dict[str, Any]:
        lengths.append(len(raw))
        return line_of_kind(kind, raw, *more)

    monkeypatch.setattr("gossamer.report.reading.moment._MOST_BYTES", 1000)
    monkeypatch.setattr("gossamer.report.reading.moment.line_of_kind", parsed)
    assert len(moment_of(live, 0)["pairs"]) == 2 and max(lengths) < 1000


def test_a_long_run_is_kept_in_bounded_memory() -> None:
    mean, total = Grid(2), Grid(2, summed=True)
    for r in range(10_000):
        mean.put(r, 0, float(r))
        total.put(r, 1, 1.0)
    assert mean.rows <= 2048 and mean.stride == 8
    assert np.allclose(mean.values()[:1250, 0], np.arange(1250) * 8 + 3.5) and np.isnan(mean.values()[:, 1]).all()
    assert np.nansum(total.values()) == 10_000
    marks = Marks()
    for r in range(50_000):
        marks.add(r, 10 * r)
    assert all(10 * r - 10 * 32 <= marks.before(r) <= 10 * r for r in (0, 1, 4097, 49_999))


def test_a_validation_that_was_done_again_replaces_the_first_wherever_it_stands() -> None:
    kept = KeptLines()
    for r, loss in ((0, 5.0), (10, 4.0), (20, 3.0), (10, 2.0), (20, 1.0)):
        kept.add({"round": r, "loss": loss})
    assert [(line["round"], line["loss"]) for line in kept.lines()] == [(0, 5.0), (10, 2.0), (20, 1.0)]


@given(st.lists(st.floats(allow_infinity=False), max_size=300), st.integers(4, 50))
def test_a_thinned_curve_keeps_its_ends_and_its_peaks(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) <= max(most, 4) and kept == sorted(set(kept))
    assert not values or (kept[0] == 0 and kept[-1] == len(values) - 1)
    known = [value for value in values if value == value]
    if known:
        shown = [values[k] for k in kept if values[k] == values[k]]
        assert min(shown) == min(known) and max(shown) == max(known)


@pytest.mark.parametrize("most", [4, 5, 50, 999, 1000])
def test_of_a_long_curve_as_many_values_are_kept_as_may_be_with_both_ends(most: int) -> None:
    values = np.random.default_rng(0).normal(size=1000).tolist()
    for kept in (thinned(values, most), spread_out(1000, most)):
        assert most - 2 < len(kept) <= most and kept == sorted({*kept}) and (kept[0], kept[-1]) == (0, 999)


@given(st.lists(st.text(alphabet="ab\n", max_size=6), max_size=12))
def test_a_tail_gives_every_whole_line_once(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    tail, found = Tail(path), []
    for part in ["", *parts]:
        with path.open("a") as file:
            file.write(part)
        found += [raw for _, raw in tail.read()]
    text = "".join(parts)
    assert b"".join(found).decode() == text[: text.rfind("\n") + 1]
