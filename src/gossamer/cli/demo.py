"""`gossamer demo`: the comparison to begin with."""

import itertools
import math
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli import compare
from gossamer.cli.init import EXAMPLES
from gossamer.cli.run_file_options import Continues, Overrides, runs_at_a_time, whole_numbers
from gossamer.cli.watch import WATCHABLE, Watchable
from gossamer.record.progress import echo, say

if TYPE_CHECKING:
    from gossamer.report.results import PointResult

_OUT = Path("runs/demo")
NEXT = """next, with your own text and network:
  gossamer init configs                                            # run files and networks, with comments
  gossamer simulate configs/gasloc.toml --set data.source=TEXT     # TEXT: a file or a folder of yours
  gossamer plan configs/networks/slow_uplink.toml --model 0.2m     # edit that file, or measure yours: gossamer probe --help
  gossamer play                                                    # kill workers and slow links while they train"""


def command(
    *,
    overrides: Overrides = (),
    out: Path | None = None,
    seeds: str = "",
    jobs: int | None = None,
    resume: Continues[bool] = False,
    output: Watchable = WATCHABLE,
) -> None:
    """Compares GASLoC in random pairs with DiLoCo, and both without momentum: 8 workers, each with a small Llama; two minutes.

    It is gossamer compare with the experiment file demo.toml, which gossamer init writes. The text is the source of Python's
    standard library, so nothing is downloaded. In a terminal it serves the page of --watch, and opens it where a browser is.

    Args:
        out: folder of all runs (default: runs/demo; to resume, the first of runs/demo, runs/demo-2 and so on without runs of
            other settings, as an earlier version may have left)
        seeds: run every variant with each of these seeds, such as 0,1,2
        jobs: runs at a time, each in its own process (default: one for each core)
        resume: keep the finished runs, continue those that were stopped, and train the others
    """
    from gossamer.report.results import read_results

    if out is None:
        out = _folder(overrides, seeds) if resume else _OUT
    if not output.silent and sys.stderr.isatty():
        output = replace(output, watch=True, opens=True)
    compare.command(
        EXAMPLES / "demo.toml",
        overrides=overrides,
        out=out,
        seeds=seeds,
        jobs=runs_at_a_time(jobs),
        earlier=compare.Earlier(resume=resume),
        output=output,
    )
    if not output.json:
        echo(f"\n{meaning(read_results(out / 'outcomes.jsonl'))}\n\n{next_steps()}")


def _folder(overrides: tuple[str, ...], seeds: str) -> Path:
    """The folder in which a demo continues: none with runs of other settings, which the file had in another version."""
    from gossamer.run.bookkeeping.finished import is_of_other_settings
    from gossamer.run.config.document import parse_overrides
    from gossamer.run.config.experiment_file import folder_name, open_experiment, points
    from gossamer.run.config.resolve import settings_of

    document = open_experiment(EXAMPLES / "demo.toml", parse_overrides([*overrides]))
    runs = points(document, seeds=whole_numbers("--seeds", seeds) if seeds else [])
    out = _OUT
    for number in itertools.count(2):
        if not any(is_of_other_settings(settings_of(run.config), out / folder_name(run.label)) for run in runs):
            break
        further = _OUT.with_name(f"{_OUT.name}-{number}")
        say(f"'{out}' holds runs with other settings than the demo has now; it stays, and '{further}' is taken")
        out = further
    return out


def next_steps(program: str = sys.argv[0]) -> str:
    """`NEXT`, after the line that puts `gossamer` on the path where it was called from an environment that is not active."""
    script, (head, lines) = Path(program).with_name("activate"), NEXT.split("\n", 1)
    active = shutil.which("gossamer")
    if not script.is_file() or (active is not None and Path(active).absolute().parent == script.absolute().parent):
        return NEXT
    return f"{head}\n  {f'. {shlex.quote(str(script))}':<64} # puts gossamer on the path of this shell\n{lines}"


def meaning(results: "Sequence[PointResult]") -> str:
    """The meaning of the demo's table, in one sentence, with its certainty."""
    from gossamer.report.table import seconds_text
    from gossamer.report.verdict import ahead_at_equal_time

    losses = _means(results, lambda row: row["loss"])
    times_s = _means(results, lambda row: row["wall_s"].get("straggler"))
    if not losses or losses.keys() != times_s.keys():
        return "Some of these runs have not ended with a loss, so the table says nothing yet: --resume trains them."
    best = min(losses, key=lambda method: losses[method])
    lowest = f"{best} ends with the lowest validation loss ({losses[best]:.3f})"
    sentence = f"{lowest}, and where one uplink of eight is slow it takes {seconds_text(times_s[best])}"
    sooner = ahead_at_equal_time(results, best, where="there")
    sentence = f"{sentence}. {sooner}" if sooner else f"{sentence}: none ends sooner."
    sure = (
        ""
        if len({one.seed for one in results}) > 1
        else " With one seed each, small differences may be chance: --seeds 0,1,2."
    )
    priced = " Times are what these networks would take, priced from what was sent; nothing here has waited for them."
    return f"What it means: {sentence}{sure}{priced}"


def _means(results: "Sequence[PointResult]", of: Callable[[Mapping[str, Any]], float | None]) -> dict[str, float]:
    """A figure of each method, the mean over its seeds; none of a method that lacks one somewhere."""
    figures: dict[str, list[float | None]] = {}
    for one in results:
        figures.setdefault(one.method, []).append(of(one.row))
    known = {method: [x for x in some if x is not None and math.isfinite(x)] for method, some in figures.items()}
    return {method: statistics.fmean(some) for method, some in known.items() if len(some) == len(figures[method])}
