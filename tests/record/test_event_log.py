"""The logs of a run: one way to write them, to read them and to continue after half a line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.errors import DataError
from gossamer.record.logs.arrivals import ArrivalWriter, ServerInput, arrivals_file, read_arrivals
from gossamer.record.logs.order import Entered, Mixed, OrderWriter, Published, read_order
from gossamer.record.logs.outcomes import Begun, OutcomeWriter, RoundOutcome, read_outcomes

NOBODY = frozenset[int]()


def outcomes(folder: Path, goes_on: bool) -> Path:
    with OutcomeWriter(folder, 0, 1 if goes_on else None) as log:
        log.write(RoundOutcome(1, frozenset({2, 0}), NOBODY, NOBODY, 4) if goes_on else Begun(0, 0, 0, 0, 0))
        if not goes_on:
            log.write(RoundOutcome(0, None, NOBODY, NOBODY, 2))
    return folder / "outcomes-000.jsonl"


def order(folder: Path, goes_on: bool) -> Path:
    with OrderWriter(folder, 0, life=9 if goes_on else 7, goes_on=goes_on) as log:
        log.write(Entered(1 if goes_on else 0, 0, None, 0.0))
        log.write(Published(1 if goes_on else 0, 0, 0.0, 1.5))
        log.write(Mixed(1 if goes_on else 0, None, ((1, 2, 99),), 1.5))
    return folder / "order-000.jsonl"


def arrivals(folder: Path, goes_on: bool) -> Path:
    with ArrivalWriter(folder, resume=goes_on) as log:
        log.append(ServerInput("tick", 2.0) if goes_on else ServerInput("serve", 0.0, workers=1, digest="d"))
        log.append(ServerInput("join", 3.0 if goes_on else 1.5, worker=0))
    return arrivals_file(folder)


LOGS: dict[str, tuple[Callable[[Path, bool], Path], Callable[[Path], object]]] = {
    "outcomes": (outcomes, read_outcomes),
    "order": (order, read_order),
    "arrivals": (arrivals, read_arrivals),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_continues_after_half_a_line_of_any_length_as_if_that_had_not_been_begun(
    name: str, tmp_path: Path
) -> None:
    write, read = LOGS[name]
    whole = write(tmp_path / "whole", False).read_bytes()
    write(tmp_path / "whole", True)
    *_, last = whole.splitlines(keepends=True)
    for length in range(len(last) - 1):
        path = write(folder := tmp_path / str(length), False)
        path.write_bytes(whole + last[:length])
        if name == "outcomes":
            path.write_bytes(whole + last.replace(b'"round":0', b'"round":1')[:length])
        write(folder, True)
        assert len(path.read_bytes().splitlines()) == len((tmp_path / "whole" / path.name).read_bytes().splitlines())
        assert read(folder) == read(tmp_path / "whole")


def test_a_last_line_that_lacks_only_its_line_break_counts_and_keeps_counting(tmp_path: Path) -> None:
    path = arrivals(tmp_path, False)
    path.write_bytes(path.read_bytes()[:-1])
    before = read_arrivals(tmp_path)
    ArrivalWriter(tmp_path, resume=True).close()
    assert read_arrivals(tmp_path) == before and path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"event":"sleep","round":0}', "unknown event 'sleep'"),
        ('{"event":"end","round":1,"why":"bored","time_s":0}', "unknown why 'bored'"),
        ('{"event":"end","round":-1,"why":"left","time_s":0}', "round is -1 but must be a whole number from 0"),
        ('{"event":"end","round":true,"why":"left","time_s":0}', "round is True but must be a whole number"),
        ('{"event":"end","round":1,"why":"left","time_s":0,"more":1}', "unknown key 'more'"),
        ('{"event":"end","round":1,"why":"left"}', "'time_s' is needed too"),
        (
            '{"event":"begin","round":1,"after":1,"donor":2,"steps":4,"incarnation":1,"sha256":"","followed":[[2,0,4,""]],"time_s":0}',
            "followed",
        ),
        (
            '{"event":"round","round":0,"alive":[0,"a"],"missed":[],"unsure":[],"steps":1,"time_s":0}',
            "alive is 'a' but",
        ),
    ],
)
def test_a_line_that_is_no_event_is_refused_with_its_place(line: str, fault: str, tmp_path: Path) -> None:
    path = outcomes(tmp_path, False)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=f"outcomes-000.jsonl:3: .*{fault}"):
        read_outcomes(tmp_path)
    with pytest.raises(DataError, match=r"outcomes-000\.jsonl:3: "):
        OutcomeWriter(tmp_path, 0, 1)
    assert path.read_text().endswith(line + "\n"), "nothing is cut from a file that cannot be read"


def test_lines_have_the_bytes_that_they_always_had(tmp_path: Path) -> None:
    order(tmp_path, False), arrivals(tmp_path, False)
    with OutcomeWriter(tmp_path, 3) as log:
        log.write(Begun(1, 1, 2, 4, 1))
        log.write(RoundOutcome(1, frozenset({3, 0}), frozenset({2}), NOBODY, 6))
    lines = [json.loads(line) for line in (tmp_path / "outcomes-003.jsonl").read_text().splitlines()]
    assert [json.dumps({**line, "time_s": 0}, separators=(",", ":")) for line in lines] == [
        '{"event":"begin","round":1,"after":1,"donor":2,"steps":4,"incarnation":1,"sha256":"","followed":[],"time_s":0}',
        '{"event":"round","round":1,"alive":[0,3],"missed":[2],"unsure":[],"steps":6,"time_s":0}',
    ]
    assert (tmp_path / "order-000.jsonl").read_text().splitlines() == [
        '{"life":7,"event":"begin","number":0,"round":0,"source":null,"time_s":0.0}',
        '{"life":7,"event":"publish","number":0,"round":0,"start_s":0.0,"time_s":1.5}',
        '{"life":7,"event":"mix","number":0,"alive":null,"heard":[[1,2,99]],"time_s":1.5}',
    ]
    assert arrivals_file(tmp_path).read_text().splitlines() == [
        '{"event":"serve","time_s":0.0,"workers":1,"round":0,"digest":"d"}',
        '{"event":"join","time_s":1.5,"worker":0,"checkpoint":0}',
    ]
