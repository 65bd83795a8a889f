"""`gossamer status`: who takes part in a run, how far everybody is, and where the last round's seconds went."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json
from gossamer.record.progress import echo

if TYPE_CHECKING:
    from gossamer.record.logs.seconds import RoundSeconds
    from gossamer.report.reading.status import RunStatus, StoreStatus


def command(run: Annotated[str, Parameter(name="RUN")], /, *, peers: Path | None = None, json: Json = False) -> None:
    """Shows who takes part in a run, in which round everybody is, how old that news is, and where the last round's seconds went.

    It reads the run folder, and asks the workers whose addresses are there. Of a run in a store it reads that, and asks nobody.

    Args:
        run: run folder, or the store of a run that was started with --store, or of an Outer(store=...)
        peers: run file, or file of peers, of a run with [peers] that lies in a store, which this machine's key opens
    """
    from gossamer.report.reading.status import run_status, store_status
    from gossamer.report.reading.stored import is_store

    if is_store(run):
        of_store = store_status(run, peers=peers)
        print_json(of_store) if json else _print_store(of_store)
    else:
        status = run_status(Path(run))
        print_json(status) if json else _print(status)


def _print_store(status: "StoreStatus") -> None:
    from gossamer.cli.tables import print_table

    did = "the last event was added" if status.server else "the last was closed"
    of = "the server after event" if status.server else "a worker after round"
    last = "" if status.closed_by is None else f"; {did} by worker {status.closed_by}, {_by_its_clock(status.age_s)}"
    of_all = "" if status.rounds is None else f" of {status.rounds}"
    echo(f"{status.store}: {status.round}{of_all} rounds are closed{last}")
    echo(f"states of {of}: {', '.join(map(str, status.states)) or 'none yet'}")
    rows = [
        [str(one.worker), one.standing, str(one.lives), str(one.steps), "yes" if one.counted else "no"]
        for one in status.workers
    ]
    counted = "in the last event" if status.server else "in the last round"
    print_table(["worker", "slot", "processes so far", "inner steps", counted], rows, text=2)


_SPARE = ("other", "round s", "transfer", "compute", "unsure", "declined", "missed", "waiting", "waits for")
"""Columns that a narrow terminal leaves out, the first of them first."""


def _print(status: "RunStatus") -> None:
    from gossamer.cli.tables import print_table
    from gossamer.report.table import number_text

    standings = [one.standing for one in status.workers]
    counted = ", ".join(f"{standings.count(one)} {one}" for one in dict.fromkeys(standings))
    echo(f"{status.name} ({status.kind}): {status.round} of {status.rounds} rounds; workers: {counted}")
    if status.note:
        echo(status.note)
    elif status.answered:
        echo(f"asked now: worker {', '.join(map(str, status.answered))}")
    if status.refused:
        echo(f"refused: {', '.join(f'{who} ({count})' for who, count in status.refused.items())}")
    for one in status.workers:
        if one.slowed is not None:
            echo(
                f"worker {one.worker} has slowed down: {one.slowed:.1f} times its usual seconds of a step for three rounds"
            )
    headings = ["worker", "standing", "rounds", "news", "loss", "missed", "unsure", "declined"]
    headings += ["round s", "compute", "transfer", "waiting", "other", "waits for"]
    rows = [
        [
            str(one.worker),
            one.standing,
            str(one.round),
            _age(one.age_s),
            "-" if one.loss is None else number_text(one.loss, ".4f"),
            str(one.missed),
            str(one.unsure),
            str(one.declined),
            *_seconds(one.seconds),
        ]
        for one in status.workers
    ]
    print_table(headings, rows, text=2, spare=_SPARE)


def _by_its_clock(age_s: float | None) -> str:
    """When another machine did something, by the clock of that machine, which may be set otherwise.

    >>> [_by_its_clock(age_s) for age_s in (-3600, -0.5, 0.2, 7300)]
    ['by its clock, which is 60 min ahead of that here', 'just now', 'just now', '2 h ago by its clock']
    """
    if age_s is not None and age_s < -1:
        return f"by its clock, which is {_age(-age_s)} ahead of that here"
    return "just now" if age_s is not None and age_s < 1 else f"{_age(age_s)} ago by its clock"


def _age(age_s: float | None) -> str:
    """How long ago, in a few characters.

    >>> [_age(age_s) for age_s in (None, 0.2, 59.6, 3000, 7300, 200000)]
    ['-', 'now', '60 s', '50 min', '2 h', '2 d']
    """
    if age_s is None:
        return "-"
    if age_s < 1:
        return "now"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if age_s < limit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s / 86400:.0f} d"


def _seconds(spent: "RoundSeconds | None") -> list[str]:
    """The seconds of a round by kind, and the peer that was waited for longest."""
    if spent is None:
        return ["-"] * 6
    kinds = (spent.total_s, spent.compute_s, spent.transfer_s, spent.waiting_s, spent.other_s)
    peer = max(spent.waiting_for, key=lambda peer: spent.waiting_for[peer], default=None)
    named = "-" if peer is None else "server" if peer < 0 else str(peer)
    return [*(f"{seconds:.2f}" for seconds in kinds), named]
