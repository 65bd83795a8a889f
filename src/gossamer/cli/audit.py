"""`gossamer audit`: whether the workers of a run computed what they should have."""

import re
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gossamer.cli.output import PLAIN, Output, print_json
from gossamer.cli.run_file_options import parts_of_folder
from gossamer.errors import ConfigError
from gossamer.record.progress import echo


def command(
    folder: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    worker: int | None = None,
    rounds: Annotated[str | None, Parameter(metavar="A..B")] = None,
    allow_code: bool = False,
    output: Output = PLAIN,
) -> int:
    """Trains the workers of a run again, and finds the first whose hashes differ (record.hash); the exit code is 1 then.

    Args:
        folder: run folder
        worker: compare this worker alone
        rounds: compare these rounds alone, from 0 (default: all that have hashes)
        allow_code: import the Python code that the run names though the folder is from elsewhere
    """
    asked = _asked(rounds)
    from gossamer.run.config.document import load_run

    document = load_run(folder)  # a folder without a run is refused before torch is imported
    from gossamer.run.config.run_file import parse
    from gossamer.run.replay.audit import audit

    with output.silenced():
        parts = parts_of_folder(parse(document), folder, "repeat", allowed=allow_code)
        result = audit(folder, worker=worker, rounds=asked, parts=parts)
    differs = result.difference
    if output.json:
        print_json({"folder": folder, **result._asdict()})
    elif differs is not None:
        echo(f"round {differs.round}: worker {differs.worker} differs in {differs.what}, and nothing before it does")
    else:
        whose = "all workers" if worker is None else f"worker {worker}"
        since = f"the checkpoints after {result.snapshot} rounds" if result.snapshot else "the start"
        echo(
            f"rounds {result.first} to {result.last}: {result.compared} hashes of {whose} agree, computed again from {since}"
        )
    return 0 if differs is None else 1


def _asked(rounds: str | None) -> tuple[int | None, int | None]:
    """The first and the last round of `A..B`, `A..` or `A`. Raises ConfigError for anything else."""
    if rounds is None:
        return None, None
    if (match := re.fullmatch(r"(\d{1,9})(\.\.(\d{1,9})?)?", rounds)) is None:
        raise ConfigError(
            f"--rounds got '{rounds}'; write the first and the last round as 10..20, or 10.. for all from 10 on"
        )
    first, several, last = match.groups()
    if several is None:
        return int(first), int(first)
    return int(first), None if last is None else int(last)
