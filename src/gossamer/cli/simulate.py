"""`gossamer simulate`: all workers of a run in one process."""

import logging
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from gossamer.cli.report import print_runs
from gossamer.cli.run_file_options import (
    NO_CHANGES,
    Changes,
    Continues,
    File,
    parts_to_train,
    resume_hint,
    run_and_folder,
)
from gossamer.cli.watch import WATCHABLE, Watchable
from gossamer.stop_signals import leaving

if TYPE_CHECKING:
    from gossamer.run.bookkeeping.resume import Resume
    from gossamer.run.config.run_file import RunConfig
    from gossamer.run.config.user_parts import UserParts

log = logging.getLogger("gossamer")


def command(
    file: File = None,
    /,
    *,
    changes: Changes = NO_CHANGES,
    out: Path | None = None,
    resume: Continues[Path | None] = None,
    replay: Continues[Path | None] = None,
    allow_code: Continues[bool] = False,
    output: Watchable = WATCHABLE,
) -> None:
    """Trains all workers of a run in this process, and writes its report.

    Args:
        out: run folder (default: runs/NAME)
        resume: continue this run folder from its newest sound checkpoint, with --set for what changes; auto: continue or start
        replay: replay the recorded run in this folder bit for bit (server, elastic, asynchronous, or with changed settings);
            without FILE with the run file of that folder
        allow_code: import the Python code that a run folder names though the folder is from elsewhere, or resume with code that
            has changed since
    """
    of_folder = replay if file is None and resume is None else None
    if file is None and resume is None and replay is not None:
        from gossamer.record.folder import run_file

        file = run_file(replay)
    config, folder, resumed = run_and_folder(file, changes.words, out, resume)
    from gossamer.report.page.page import write_report
    from gossamer.run.config.resolve import resolve

    with output.silenced(), resume_hint(folder), output.watching(folder):
        parts = parts_to_train(config, folder, resumed, allowed=allow_code, recorded=replay, of_folder=of_folder)
        if replay is None and not resumed:
            _say_what_it_is_not(file)
        with output.showing() as terminal:
            terminal.follow(config.name, folder, config.record.print_every)
            if replay is None:
                train_here(config, parts, folder, resume=resumed, file=file)
            else:
                from gossamer.record.locks import locked
                from gossamer.run.replay.replay import replay as repeat

                with locked(folder, None):
                    repeat(lambda real: resolve(config, parts, real=real), folder, replay)
        page, runs = folder / "report.html", {config.name: folder}
        rows = write_report(runs, page, config.network, command=f"gossamer report {quote(str(folder))}")
        print_runs(runs, rows, page, json=output.json)


def train_here(
    config: "RunConfig", parts: "UserParts", folder: Path, *, resume: "Resume" = False, file: Path | None = None
) -> None:
    """Trains all workers in this process, in rounds or over virtual time.

    Args: `file` is the run file; where it is that of a recorded run, the workers have the threads that they had there.
    """
    from gossamer.run.simulated.simulate import recorded_beside, simulate_until_asked

    recorded = None if file is None or resume else recorded_beside(file)
    with leaving("the simulation is asked to stop after this round, and to save then") as asked:
        simulate_until_asked(config, parts, folder, resume=resume, recorded=recorded, asked=asked.is_set)


def _say_what_it_is_not(file: Path | None) -> None:
    """Warns where the run file belongs to a recorded run whose settings were changed on the way, and cannot repeat it alone."""
    from gossamer.record.lineage import described, read_branches

    if file is None or file.name != "run.toml":
        return
    if branches := read_branches(file.parent):
        log.warning(
            "the run in '%s' went on with other settings %s; its run.toml has the settings since then alone, so this is another "
            "run; --replay %s computes the recorded one",
            file.parent,
            described(branches[-1]),
            file.parent,
        )
