"""A film while it is made, and its file."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from commands import run
from gossamer.cli import main
from gossamer.errors import DataError
from gossamer.run.play import live as module
from gossamer.run.play.actions import Action
from gossamer.run.play.film import Film, read_film, write_film
from gossamer.run.play.live import Live, filmed


@pytest.fixture(scope="module")
def film() -> Film:
    made = [*filmed(3, [[Action("local_steps", 1)], [Action("kill", 2), Action("cut")], []])]
    return Film(made[0][0], [frame for _, frame in made])


def test_it_trains_while_somebody_looks_and_at_once_when_somebody_acts() -> None:
    live, later = Live(0), time.monotonic() + 3600
    assert live._may_train(due_s=0.0) and not live._may_train(due_s=later), "each round is shown for a while"
    live._seen_s -= 2 * module._UNSEEN_S
    assert not live._may_train(due_s=0.0)
    live.data("", 0)
    assert live._may_train(due_s=0.0)
    live.act(b'{"actions": [["cut"]]}')
    assert live._may_train(due_s=later)
    live.act(b'{"playing": false}')
    assert not live._may_train(due_s=0.0)
    live.act(b'{"step": true}')
    assert live._may_train(due_s=later)


def test_a_film_that_is_trained_again_is_the_same_to_the_last_byte(film: Film, tmp_path: Path) -> None:
    write_film(tmp_path / "a.jsonl", film)
    code, output = run("play", "--film", tmp_path / "a.jsonl", "--record", tmp_path / "b.jsonl")
    assert code == 0 and "3 rounds, the same to the last digit" in output
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_place_where_no_film_can_be_is_refused_before_anybody_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place, words in ((tmp_path, "which is a folder"), (tmp_path / "file" / "a.jsonl", "is a file, and a folder")):
        assert main(["play", "--port", "0", "--record", str(place)]) == 2
        assert words in capsys.readouterr().err


def test_what_is_no_film_is_refused_in_a_sentence(film: Film, tmp_path: Path) -> None:
    write_film(tmp_path / "a.jsonl", film)
    head, *lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    frame = json.loads(lines[1])

    def changed(**values: Any) -> bytes:
        return json.dumps(frame | values).encode() + b"\n"

    spoilt = {
        "empty": b"",
        "head alone": head,
        "no head": b"".join(lines),
        "torn": head + lines[0][:100],
        "foreign": b"{}\n{}\n",
        "a round is missing": head + lines[0] + lines[2],
        "text": b"hello\nworld\n",
        "no action": head + lines[0] + changed(actions=[["dance", 1]]),
        "nine": head + lines[0] + changed(there=[8]),
        "method": head + lines[0] + changed(method="__proto__"),
        "long": head + lines[0] + changed(says="x" * 500),
        "seven": head + lines[0] + changed(seconds=[None] * 7),
        "infinite": head + lines[0] + b'{"round": Infinity}\n',
        "newer": head.replace(b'"film":1', b'"film":2') + lines[0],
    }
    for name, raw in spoilt.items():
        (tmp_path / "b.jsonl").write_bytes(raw)
        with pytest.raises(DataError):
            read_film(tmp_path / "b.jsonl")
        code, output = run("play", "--film", tmp_path / "b.jsonl")
        assert code == 2 and output.count("\n") == 1 and "Traceback" not in output, name
    for words in (["--film", tmp_path / "nowhere"], ["--film", tmp_path], ["--seed", -1], ["--seed", 2**31]):
        code, output = run("play", *words)
        assert code == 2 and output.count("\n") == 1, output


def test_a_film_is_read_as_it_was_written(film: Film, tmp_path: Path) -> None:
    write_film(tmp_path / "a.jsonl", film)
    found = read_film(tmp_path / "a.jsonl")
    assert found.head == film.head and [*found.frames] == [*film.frames]
    assert found.actions == [[Action("local_steps", 1)], [Action("kill", 2), Action("cut")], []]
