"""`gossamer demo`: the comparison to begin with."""

from pathlib import Path

from gossamer.cli import compare
from gossamer.cli.init import EXAMPLES
from gossamer.cli.run_file_options import Overrides
from gossamer.cli.watch import WATCHABLE, Watchable

__all__ = ["command"]


def command(
    *, overrides: Overrides = (), out: Path = Path("runs/demo"), seeds: str = "", jobs: int | None = None, resume: bool = False,
    output: Watchable = WATCHABLE,
) -> None:  # fmt: skip
    """Compares GASLoC in random pairs with DiLoCo, and both without momentum: 8 workers, each with a small Llama; some minutes.

    It is gossamer compare with the experiment file demo.toml, which gossamer init writes. The text is the source of Python's
    standard library, so nothing is downloaded.

    Args:
        out: folder of all runs (default: runs/demo)
        seeds: run every variant with each of these seeds, such as 0,1,2
        jobs: runs at a time, each in a process of its own (default: one for each core)
        resume: keep the finished runs, and train the others
    """
    from gossamer.transport.processes.launch import available_cores

    jobs = available_cores() if jobs is None else jobs
    compare.command(
        EXAMPLES / "demo.toml",
        overrides=overrides,
        out=out,
        seeds=seeds,
        jobs=jobs,
        earlier=compare.Earlier(resume=resume),
        output=output,
    )
