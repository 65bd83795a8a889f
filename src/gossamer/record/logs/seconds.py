"""How the seconds of a run were spent: one line for each worker and round, the same for simulated and for real runs.

`seconds.jsonl` has those of a simulation, `seconds-003.jsonl` those of worker 3 of a real run:

* `{"round":r,"worker":i,"network":"home","compute_s":a,"transfer_s":b,"waiting_for":{"2":c},"other_s":d,"end_s":t}`

The rounds of a worker are contiguous in time: a round lasts `compute_s + transfer_s + waiting_s + other_s` and ends
`end_s` after the first of all rounds began. Only time that delays training is transfer or waiting; messages in flight
while a worker trains cost no seconds here. A worker waits for a peer until that peer begins to send the last message
that it needs; the rest is transfer. On a declared network, the time by which the peer's slower link exceeds the worker's own is
waiting for that peer too; a real worker cannot tell the two apart. `network` names the declared network whose seconds these are;
null stands for measured seconds.

A real worker measures its seconds and writes a line when a round ends. A simulation in rounds prices its trace on each network
of the run file when it ends; without a network it has compute seconds only. A simulation over virtual time knows all
seconds.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from gossamer.record.jsonl import folder_lines, json_line
from gossamer.record.logs.event_log import Seconds, Whole, row_lines

SERVER = -1
"""Stands for the server among the peers that are waited for."""


class RoundSeconds(NamedTuple):
    """The seconds of one worker in one round."""

    round: Whole
    worker: Whole
    network: str | None
    """The declared network whose seconds these are; None for measured seconds."""
    compute_s: Seconds
    """Seconds of the local phase; in stages, without waits between stages: as measured by the first stage of a real
    worker, averaged over the stages of a priced one.
    """
    transfer_s: Seconds
    """Seconds during which messages were in flight and the worker did not train."""
    waiting_for: dict[Annotated[int, Field(ge=-1, lt=2**31)], Seconds]
    """Seconds of waiting until each peer had sent; -1 is a server."""
    other_s: Seconds
    """All other seconds: outer steps, codecs, validation and checkpoints of a real worker; between the stages of one,
    their waits for each other and for messages; in virtual time absence, a local phase that an absence ended, and the
    end of the run when no steps are left to take.
    """
    end_s: Seconds
    """The end of the round, in seconds since the start of the first round of all."""

    @property
    def waiting_s(self) -> float:
        """Waiting for anybody."""
        return sum(self.waiting_for.values())

    @property
    def total_s(self) -> float:
        """The seconds of the round."""
        return self.compute_s + self.transfer_s + self.waiting_s + self.other_s


SECONDS_LINES = row_lines(RoundSeconds)


def seconds_line(seconds: RoundSeconds) -> str:
    """One line of a file of seconds.

    >>> seconds_line(RoundSeconds(0, 1, "home", 3.0, 0.5, {2: 1.5}, 0.0, 5.0))
    '{"round":0,"worker":1,"network":"home","compute_s":3.0,"transfer_s":0.5,"waiting_for":{"2":1.5},"other_s":0.0,"end_s":5.0}\\n'
    """
    return json_line(seconds._asdict())


def seconds_lines(seconds: Iterable[RoundSeconds]) -> str:
    """The text of a file of seconds."""
    return "".join(map(seconds_line, seconds))


def read_seconds(run_folder: Path) -> list[RoundSeconds]:
    """The seconds of a run from all its `seconds*.jsonl`, by network, round and worker; empty if none were recorded.

    Raises: DataError for a malformed line.
    """
    rows = [RoundSeconds(**line) for _, _, line in folder_lines(run_folder, "seconds", SECONDS_LINES)]
    return sorted(rows, key=lambda one: (one.network or "", one.round, one.worker))


def unmeasured(folder: Path, rows: Iterable[RoundSeconds]) -> Iterator[RoundSeconds]:
    """Of rows in order of rounds, those that no real worker of this folder has measured, on a clock that continues theirs."""
    lines = folder_lines(folder, "seconds", SECONDS_LINES)
    known = {(line["round"], line["worker"]): line["end_s"] for path, _, line in lines if path.stem != "seconds"}
    later_s = dict[int, float]()
    for one in rows:
        if (end_s := known.get((one.round, one.worker))) is None:
            yield one._replace(end_s=one.end_s + later_s.get(one.worker, 0.0))
        else:
            later_s[one.worker] = end_s - one.end_s


def recorded_s(folder: Path, worker: int, newest: int | None) -> float:
    """When the last round of this worker ended that is not run again."""
    kept = [one.end_s for one in read_seconds(folder) if one.worker == worker and one.round < (newest or 0)]
    return max(kept, default=0.0)
