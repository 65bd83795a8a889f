"""`gossamer simulate`: all workers of a run in one process."""

from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli.report import publish, show
from gossamer.cli.run_file_options import NO_CHANGES, Changes, File, imported_parts, resume_hint, run_and_folder
from gossamer.cli.watch import WATCHABLE, Watchable

if TYPE_CHECKING:
    from gossamer.run.bookkeeping.resume import Resume
    from gossamer.run.config.resolved import ResolvedRun
    from gossamer.run.config.run_file import RunConfig
    from gossamer.run.config.user_parts import UserParts

__all__ = ["command", "train_here"]


def command(
    file: File = None, /, *, changes: Changes = NO_CHANGES, out: Path | None = None, resume: Path | None = None,
    replay: Path | None = None, output: Watchable = WATCHABLE,
) -> None:  # fmt: skip
    """Trains all workers of a run in this process, and writes its report.

    Args:
        out: run folder (default: runs/NAME)
        resume: continue this run folder from its newest sound checkpoint, with --set for what changes; auto: continue or start
        replay: compute the real run in this folder again from its record: one with a server, elastic, or that waits for nobody
    """
    from gossamer.run.config.resolve import resolve
    from gossamer.run.config.user_parts import own_parts

    config, folder, resumed = run_and_folder(file, changes.words, out, resume)
    with output.silenced(), resume_hint(folder), output.watching(folder):
        parts = imported_parts(config) if replay is None else own_parts(config)
        with output.showing() as terminal:
            terminal.follow(config.name, folder, config.record.print_every)
            if replay is None:
                train_here(config, parts, folder, resume=resumed)
            else:
                _replay(resolve(config, parts, real=True), folder, replay)
        page, runs = folder / "report.html", {config.name: folder}
        show(runs, publish(runs, page, config.network, f"gossamer report {folder}"), page, json=output.json)


def train_here(config: "RunConfig", parts: "UserParts", folder: Path, *, resume: "Resume" = False) -> None:
    """Trains all workers in this process, in rounds or over virtual time."""
    from gossamer.run.config.resolve import resolve
    from gossamer.run.simulated.simulate import engine_of
    from gossamer.run.simulated.simulation import Simulation

    Simulation(config, engine_of(resolve(config, parts), folder, resume=resume)).go_on()


def _replay(config: "ResolvedRun", folder: Path, recorded: Path) -> None:
    from gossamer.run.replay.asynchronous import replay_asynchronous
    from gossamer.run.replay.elastic import replay_elastic
    from gossamer.run.replay.served import replay_server

    replays = {"rounds": replay_elastic, "server": replay_server}
    replays.get(config.kind, replay_asynchronous)(config, folder, recorded)
