"""`gossamer train`: each worker a process of its own."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli.run_file import AUTO, File, Overrides, imported_parts, resume_hint, run_and_folder
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.run.config import RunConfig
    from gossamer.run.history import Resume

__all__ = ["command", "import_early"]


def command(
    file: File = None, /, *, overrides: Overrides = (), out: Path | None = None, resume: Path | None = None,
    local: int | None = None, server: str | None = None, worker: int | None = None, secret: Path | None = None,
) -> int:  # fmt: skip
    """Trains as one worker of a run, as the server of one, or starts all workers on this machine.

    Args:
        out: run folder (default: runs/NAME)
        resume: continue this run folder from the newest round of which all workers have sound checkpoints, with --set for what
            changes; auto: continue the run in its folder (--out), or start it there
        local: start this many worker processes on this machine
        server: HOST:PORT at which to serve a run with a [server], or with --worker to join it
        worker: number of this worker, which joins the server
        secret: file with the secret of the run (default: GOSSAMER_SECRET, else the file 'secret' of the run folder)
    """
    if local is not None:
        import_early()
    from gossamer.run.parts import own_parts
    from gossamer.run.settle import settle

    config, folder, resumed = run_and_folder(file, overrides, out, resume)
    settle(
        config, imported_parts(config) if local is not None else own_parts(config), real=True
    )  # before processes start
    if secret is not None:
        from gossamer.transport.secret import SECRET, read_secret

        os.environ[SECRET] = read_secret(secret)
    with resume_hint(folder):
        if local is not None:
            sets = [word for one in overrides for word in ("--set", one)]
            words = (
                ["train", "--resume", str(folder)] if resumed is True else ["train", str(file), "--out", str(folder)]
            )
            words += ["--resume", resumed] if resumed == AUTO else []
            return _start_workers(config, folder, local, [*words, *sets], resume=resumed)
        if config.server is not None:
            _train_served(config, folder, server, worker, resume=resumed)
        elif server is not None or worker is not None:
            raise ConfigError(
                f"--server {server} --worker {worker} was given but the run file has no [server]; start it under torchrun"
            )
        else:
            from gossamer.run.train import train

            train(config, folder, resume=resumed)
    return 0


def import_early() -> None:
    """Starts the process that the workers will be forks of (`gossamer.transport.local`), which imports while we do.

    torch imports its compiler in the first step of any optimizer, which takes as long as importing the rest.
    """
    if sys.platform == "linux":
        work = ["gossamer.run.train", "gossamer.run.serve", "gossamer.run.serve_worker"]
        multiprocessing.set_forkserver_preload(["gossamer.transport.local", "torch._dynamo", *work])
        forkserver.ensure_running()


def _start_workers(config: "RunConfig", folder: Path, n: int, words: list[str], *, resume: "Resume") -> int:
    """Starts all workers of a run, and its server if it has one, on this machine."""
    from gossamer.cli import main
    from gossamer.run.finished import rounds_in_common
    from gossamer.transport.local import run_local, run_served
    from gossamer.transport.secret import folder_secret

    if n != config.workers:
        raise ConfigError(f"--local {n} but the run file has workers = {config.workers}; make them equal")
    if resume and rounds_in_common(config, folder) == config.rounds:
        from gossamer.record import checkpoint

        print(checkpoint.ended(folder, config.rounds))
        return 0
    if config.server is not None:
        return run_served(n, main, words, folder_secret(folder, make=True))
    return run_local(n, main, words)


def _train_served(
    config: "RunConfig", folder: Path, server: str | None, worker: int | None, *, resume: "Resume"
) -> None:
    """The server of a run, or one of its workers."""
    from gossamer.run.serve import serve
    from gossamer.run.serve_protocol import address
    from gossamer.run.serve_worker import work

    if server is None:
        raise ConfigError(
            f"this run needs server '{config.server and config.server.name}': add --local {config.workers} to start all "
            "of it here, or --server HOST:PORT on the server's machine, and the same with --worker I for each worker"
        )
    host, port = address(server)
    if worker is None:
        serve(config, folder, host, port, resume=resume)
    else:
        work(config, folder, host, port, worker, resume=resume)
