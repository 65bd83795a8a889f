"""The trace: lines on disk, columns in memory, and what a foreign line may not do."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import DataError
from gossamer.record.jsonl import json_lines
from gossamer.record.logs.trace import (
    KINDS,
    TRACE_LINES,
    Entry,
    MeanShare,
    Operation,
    Trace,
    entry_of,
    from_entries,
    from_targets,
    line_of,
    read_trace,
    share_in_mean,
)

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**12)), max_size=3).map(tuple)
LISTED = st.builds(
    Operation, st.sampled_from(KINDS), st.integers(0, 4), PAIRS, PAIRS, st.integers(0, 9), share=st.none()
)
SHARES = st.builds(MeanShare, st.just(((0, 3), (7, 2))), *[st.integers(0, 2**49)] * 4)
OPERATIONS = LISTED | st.builds(
    Operation, st.just("mean"), st.integers(0, 4), st.just(()), st.just(()), st.integers(0, 9), SHARES
)
ENTRIES = st.builds(
    Entry,
    st.integers(0, 1000),
    st.just(0),
    st.integers(0, 1000),
    st.floats(0, 1e9),
    st.lists(OPERATIONS, max_size=3).map(tuple),
)
GOOD = {
    "round": 0,
    "worker": 3,
    "steps": 15,
    "compute_s": 1.2,
    "ops": [{"kind": "exchange", "fragment": 0, "sends": [[5, 34]], "receives": [[5, 34]]}],
}

SHARE = {"members": [[0, 8]], "there": 10, "back": 20, "sent": 210, "received": 210}
SPOILT = ({"kind": "exchange"}, {"sends": []}, {"share": {**SHARE, "back": -1}}, {"share": {"there": 1}})
NO_MEMBERS = ([[0, 2]], [], [[0, 4], [3, 2]], [[4, 2], [0, 4]], [[0, 4], [4, 0]], [[0, 2**40]])


def swap(round: int, pairs: list[tuple[int, int]], size: int = 100, steps: int = 30) -> list[Entry]:
    """Entries of a round in which each pair exchanges messages of one size."""
    both = pairs + [(b, a) for a, b in pairs]
    return [Entry(round, a, steps, 0.5, (Operation("exchange", 0, ((b, size),), ((b, size),)),)) for a, b in both]


def same(one: Trace, other: Trace) -> bool:
    columns = zip((*one[:2], *one.messages), (*other[:2], *other.messages), strict=True)
    return all(np.array_equal(a, b) for a, b in columns)


def write(path: Path, entries: list[Entry]) -> None:
    path.write_text("".join(map(line_of, entries)))


def read_back(entry: Entry) -> Entry:
    return entry_of(TRACE_LINES.parse(line_of(entry), "here"), "here")


@settings(max_examples=50, deadline=None)
@given(ENTRIES)
def test_an_entry_comes_back_from_its_line(entry: Entry) -> None:
    assert read_back(entry) == entry


@pytest.mark.parametrize(
    "change",
    [
        {"round": -1},
        {"round": True},
        {"round": 2**40},
        {"worker": 1.0},
        {"steps": "15"},
        {"compute_s": -0.1},
        {"compute_s": None},
        {"compute_s": 10**400},
        {"ops": {}},
        {"ops": [{"kind": "exchange"}]},
        {"ops": [{"kind": "gather", "fragment": 0, "sends": [], "receives": []}]},
        {"ops": [{"kind": "mean", "fragment": 0, "sends": [[1, 2, 3]], "receives": []}]},
        {"ops": [{"kind": "mean", "fragment": 0, "sends": [[1, -2]], "receives": []}]},
        {"ops": [{"kind": "mean", "fragment": 0, "sends": [[3, 10]], "receives": []}]},
        {"ops": [{"kind": "mean", "fragment": 0, "sends": [], "receives": [], "overlap_steps": -1}]},
        {"extra": 1},
        {"ops": [{"kind": "mean", "fragment": 0, "sends": []}]},
        *({"ops": [{"kind": "mean", "fragment": 0, "share": SHARE, **change}]} for change in SPOILT),
        *({"ops": [{"kind": "mean", "fragment": 0, "share": {**SHARE, "members": some}}]} for some in NO_MEMBERS),
    ],
)
def test_a_foreign_line_is_refused_with_its_place(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "trace.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(DataError, match=r"trace\.jsonl:2"):
        read_trace(tmp_path)


def test_an_operation_that_waits_at_once_has_the_line_it_always_had() -> None:
    operation = Operation("exchange", 0, ((5, 34),), ((5, 34),))
    line = line_of(Entry(0, 3, 15, 1.2, (operation, operation._replace(overlap_steps=7))))
    assert json.loads(line)["ops"] == [GOOD["ops"][0], {**GOOD["ops"][0], "overlap_steps": 7}]


def test_a_missing_key_is_refused() -> None:
    with pytest.raises(DataError, match=r"here: this has the keys .* and 'steps' is needed too"):
        TRACE_LINES.parse(json.dumps({key: value for key, value in GOOD.items() if key != "steps"}), "here")


@pytest.mark.parametrize("line", ["[1]", "nonsense", '{"a": NaN}', '{"a": 1e', "[" * 100_000, "\xff"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n' + line.encode("latin-1") + b'\n{"a":2}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2"):
        list(json_lines(path))


def test_a_last_line_that_a_kill_cut_short_is_skipped_at_every_length(tmp_path: Path) -> None:
    path, line = tmp_path / "x.jsonl", b'{"a":[1,2],"b":"c"}\n'
    for length in range(len(line) - 1):
        path.write_bytes(b'{"a":1}\n' + line[:length])
        assert [value for _, value in json_lines(path)] == [{"a": 1}]
    path.write_bytes(b'{"a":1}\n' + line[:-1])
    assert len(list(json_lines(path))) == 2, "a whole object counts even without its newline"


def test_one_file_and_one_file_per_worker_are_the_same_trace(tmp_path: Path) -> None:
    entries = swap(0, [(0, 1), (2, 3)]) + swap(1, [(0, 2), (1, 3)])
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    write(tmp_path / "one" / "trace.jsonl", entries)
    for worker in range(4):
        write(tmp_path / "many" / f"trace-{worker:03}.jsonl", [e for e in reversed(entries) if e.worker == worker])
    trace = read_trace(tmp_path / "one")
    assert same(trace, read_trace(tmp_path / "many"))
    assert (trace.rounds, trace.workers) == (2, 4)
    assert trace.sent_bytes.tolist() == [200] * 4
    assert trace.messages.target.tolist() == [1, 0, 3, 2, 2, 3, 0, 1]


def test_local_phases_are_the_same_with_and_without_a_look_at_the_messages(tmp_path: Path) -> None:
    entries = swap(0, [(0, 1), (2, 3)]) + swap(1, [(0, 2), (1, 3)], steps=7)
    write(tmp_path / "trace.jsonl", entries)
    whole, alone = read_trace(tmp_path), read_trace(tmp_path, messages=False)
    assert np.array_equal(whole.steps, alone.steps) and np.array_equal(whole.compute_s, alone.compute_s)
    assert len(whole.messages.round) and not len(alone.messages.round)
    (tmp_path / "trace.jsonl").write_text(line_of(entries[0]).replace('"steps"', '"step"'))
    with pytest.raises(DataError, match=r"trace\.jsonl:1"):
        read_trace(tmp_path, messages=False)


def test_planned_targets_give_the_trace_that_a_run_would_leave() -> None:
    entries = [*swap(0, [(0, 1)]), Entry(0, 2, 30, 0.5, ()), *swap(1, [(1, 2)]), Entry(1, 0, 30, 0.5, ())]
    planned = from_targets(np.array([[1, 0, 2], [0, 2, 1]]), 100, steps=30, compute_s=0.5)
    assert same(planned, from_entries(entries))


def test_planned_targets_may_be_several_for_each_worker() -> None:
    ring = np.array([[[3, 1], [2, 0], [1, 3], [0, 2]]])
    trace = from_targets(ring, 10, steps=[1, 2, 3, 4])
    assert trace.sent_bytes.tolist() == [20] * 4
    assert trace.messages.source.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert trace.messages.target.tolist() == [1, 3, 0, 2, 1, 3, 0, 2]


def test_a_message_that_only_one_end_tells_of_counts_once() -> None:
    survivor, dead = swap(0, [(0, 1)])
    rest = swap(1, [(0, 1)])
    assert from_entries([survivor, *rest]).messages.source.tolist() == [0, 1, 0, 1]
    assert from_entries([survivor, *rest]).steps.tolist() == [[30, 0], [30, 30]]
    assert same(from_entries([survivor, dead, *rest]), from_entries([dead, *rest, survivor]))


def test_ends_that_differ_about_a_message_are_refused() -> None:
    a, b = swap(0, [(0, 1)])
    liar = b._replace(operations=(b.operations[0]._replace(receives=((0, 99),)),))
    with pytest.raises(DataError, match="message from worker 0 to worker 1"):
        from_entries([a, liar])


def test_two_entries_of_one_worker_and_round_are_refused() -> None:
    entries = swap(0, [(0, 1)])
    with pytest.raises(DataError, match="2 entries for round 0 of worker 1"):
        from_entries([*entries, entries[1]])


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_a_worker_without_any_entry_is_refused(absent: int) -> None:
    entries = swap(0, [(0, 1), (2, 3)])
    with pytest.raises(DataError, match=f"the trace names . workers and has entries of ., none of worker {absent}"):
        from_entries([entry for entry in entries if entry.worker != absent])


def test_a_folder_with_the_trace_of_one_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace-000.jsonl").write_text(line_of(swap(0, [(0, 1)])[0]))
    with pytest.raises(DataError, match=r"the trace in '.*' names 2 workers and has entries of 1, none of worker 1"):
        read_trace(tmp_path)


def test_a_line_with_a_huge_round_or_worker_does_not_claim_memory() -> None:
    with pytest.raises(DataError, match="cells"):
        from_entries([Entry(2**31 - 1, 0, 1, 0.0, ())])
    with pytest.raises(DataError, match="none of worker 0"):
        from_entries([Entry(0, 2**31 - 1, 1, 0.0, ())])


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no trace"):
        read_trace(tmp_path)


def mean_of(members: list[int], there: list[int], back: list[int], *, as_shares: bool) -> list[Entry]:
    """A round of a mean among some of nine workers, in two fragments; as shares or message by message."""

    def operations(i: int) -> tuple[Operation, ...]:
        if i not in members:
            return ()
        if as_shares:
            return tuple(Operation("mean", f, (), (), 2, share_in_mean(members, i, there, back)) for f in (0, 1))
        bytes_of = dict(zip(members, zip(there, back, strict=True), strict=True))
        sends, receives = (
            tuple((j, bytes_of[a(i, j)][0] + bytes_of[b(i, j)][1]) for j in members if j != i)
            for a, b in ((lambda i, j: j, lambda i, j: i), (lambda i, j: i, lambda i, j: j))
        )
        return tuple(Operation("mean", f, sends, receives, 2) for f in (0, 1))

    return [Entry(0, i, 5, 0.5, operations(i)) for i in range(9)]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_shares_of_a_mean_stand_for_the_messages_that_old_traces_list(data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, 8), min_size=2)))
    there, back = (data.draw(st.lists(st.integers(0, 9), min_size=(n := len(members)), max_size=n)) for _ in range(2))
    old, entries = (from_entries(mean_of(members, there, back, as_shares=new)) for new in (False, True))
    lines = mean_of(members, there, back, as_shares=True)
    read = from_entries(map(read_back, lines))
    assert not len(read.messages.round) and len(read.means) == 2, "a row for each fragment"
    assert same(read.listed(), old) and same(entries.listed(), old)
    assert read.sent_bytes.tolist() == old.sent_bytes.tolist() and read.round_bytes.tolist() == old.round_bytes.tolist()
    assert sum(operation.sent_bytes for entry in lines for operation in entry.operations) == old.sent_bytes.sum()
    received = [operation.received_bytes for operation in lines[members[0]].operations]
    assert received == [int(read.means[0].received_bytes[0])] * 2
    dead = data.draw(st.sampled_from(members))
    lines[dead] = lines[dead]._replace(operations=())
    assert same(from_entries(lines).listed(), old), "a worker that died before it wrote its line"


@pytest.mark.parametrize(
    "change",
    [
        {"members": ((0, 9),)},
        {"members": ((0, 2), (3, 3))},
        {"members": ((0, 2**30),)},
        {"there": 11},
        {"back": 4},
        {"sent": 400},
        {"received": 1},
    ],
)
def test_shares_that_contradict_each_other_are_refused(change: dict[str, object]) -> None:
    entries = mean_of([0, 1, 4, 5], [10, 10, 10, 12], [7, 7, 7, 9], as_shares=True)
    first, second = entries[1].operations
    entries[1] = entries[1]._replace(operations=(first._replace(share=first.share._replace(**change)), second))  # pyright: ignore
    with pytest.raises(DataError, match=r"differ about the members or the bytes of a mean|none of worker 9"):
        from_entries(entries)
