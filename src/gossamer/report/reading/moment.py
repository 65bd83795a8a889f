"""One round of a followed run: messages, failures, and the breakdown of all workers' seconds.

It is read from the files on request, at the recorded offsets of the round.
"""

import os
from collections.abc import Iterator
from typing import Any

from gossamer.errors import DataError
from gossamer.record.logs.trace import sent_bytes_of
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.lines import kind_of, line_of_kind
from gossamer.report.reading.tail import Marks, open_record

_MOST_BYTES = 1 << 25
"""The most bytes read of one file for one round."""
_MOST_PAIRS = 4096
"""The most pairs reported for one round; a mean over everyone is a flag."""


def moment_of(run: FollowedRun, round: int) -> dict[str, Any]:
    """A round in the form that a page draws.

    Keys: `round`; `pairs`, lists of source, target and bytes, in which -1 is the server; `everyone`, whether it had a mean over
    all, with `mean_bytes` that a worker sent for it; `failed`, pairs of workers whose exchange one of them did not count;
    `alive`, null for everyone; `seconds`, by network lists of worker, start, compute, waiting, the peer waited for, transfer
    and other seconds.
    Cost: reads a round of each file, from at most one round in `rounds / 4096` before it.
    """
    assert run.file is not None
    if (known := run.moment(round)) is not None:
        return known
    pairs: dict[tuple[int, int], int] = {}
    sent_in_means: dict[int, int] = {}
    parts = run.parts
    for line in _lines(run, "trace", round * parts, (round + 1) * parts - 1):
        for operation in line["ops"]:
            if operation["kind"] == "mean":
                sent = sent_bytes_of(operation)
                sent_in_means[line["worker"]] = sent_in_means.get(line["worker"], 0) + sent
                continue
            for peer, size in operation.get("sends", ()):
                pairs[line["worker"], peer] = pairs.get((line["worker"], peer), 0) + size
    for line in _lines(run, "events", round, round):
        if line["event"] in ("push", "fetch", "meet") and "source" in line and "target" in line:
            key = line["source"], line["target"]
            pairs[key] = pairs.get(key, 0) + line.get("bytes", 0)
    failed, alive = _outcomes(run, round)
    listed = sorted((i, j, size) for (i, j), size in pairs.items() if max(i, j) < run.file.workers and i != j)
    return {
        "round": round,
        "pairs": listed[:_MOST_PAIRS],
        "left_out": max(0, len(listed) - _MOST_PAIRS),
        "everyone": bool(sent_in_means),
        "mean_bytes": max(sent_in_means.values(), default=0),
        "failed": failed,
        "alive": alive,
        "seconds": _seconds(run, round),
    }


def _outcomes(run: FollowedRun, round: int) -> tuple[list[tuple[int, int]], list[int] | None]:
    """The exchanges of a round that one end or both did not count, and the live workers."""
    failed: set[tuple[int, int]] = set()
    alive: list[int] | None = None
    for name in sorted(name for name in run.tails if name.startswith("outcomes-")):
        slot = int(name.removeprefix("outcomes-").removesuffix(".jsonl"))
        for line in _lines(run, name.removesuffix(".jsonl"), round, round):
            if line["event"] == "round":
                failed |= {(min(slot, peer), max(slot, peer)) for peer in [*line["missed"], *line["unsure"]]}
                alive = line["alive"] if alive is None else alive
    return sorted(failed), alive


def _seconds(run: FollowedRun, round: int) -> dict[str, list[tuple[Any, ...]]]:
    by_network: dict[str, list[tuple[Any, ...]]] = {}
    for network in run.clock:
        rows = []
        for line in _lines(run, "seconds", round, round, network):
            waits = line["waiting_for"]
            waiting_s = sum(waits.values())
            peer = max(waits, key=lambda peer: waits[peer], default=None)
            spent_s = line["compute_s"], waiting_s, peer, line["transfer_s"], line["other_s"]
            total_s = line["compute_s"] + waiting_s + line["transfer_s"] + line["other_s"]
            rows.append((line["worker"], max(0.0, line["end_s"] - total_s), *spent_s))
        by_network[network or ""] = sorted(rows, key=lambda row: row[0])
    return by_network


def _lines(run: FollowedRun, kind: str, first: int, last: int, network: str | None = None) -> Iterator[dict[str, Any]]:
    """The lines of some rounds from all files of a kind, of a file of seconds those of one network."""
    for name, tail in list(run.tails.items()):
        marks = run.marks.get((name, network))
        if marks is None or (name.removesuffix(".jsonl") != kind and not name.startswith(f"{kind}-")):
            continue
        kind_of_file = kind_of(name)
        try:
            for line in _records(tail.path, marks, tail.offset, first, kind_of_file, len(run.rounds_of)):
                if line.get("network") != network and kind_of_file == "seconds":
                    continue
                if line["round"] > last:
                    break
                if line["round"] >= first and line.get("worker", 0) < len(run.rounds_of):
                    yield line
        except (OSError, ValueError):
            continue  # removed concurrently


def _records(path: Any, marks: Marks, end: int, first: int, kind: str, workers: int) -> Iterator[dict[str, Any]]:
    begin = marks.before(first)
    end = min(end, begin + _MOST_BYTES)
    with os.fdopen(open_record(path), "rb") as file:
        file.seek(begin)
        while begin < end and (raw := file.readline(end - begin)):  # a line of a spoilt file may have any length
            begin += len(raw)
            try:
                yield line_of_kind(kind, raw, path.name, path.name, workers)
            except DataError:
                continue  # reported by the run's reader already
