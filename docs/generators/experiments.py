"""The pages of experiments: a table and a figure from a config and the outcomes of its runs, without training.

The outcomes of `configs/FOLDER/NAME.toml` are `docs/results/FOLDER/NAME.jsonl`, and those of one of its sizes `NAME-SCALE.jsonl`;
those of `configs/demo.toml` are in no folder.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generators.annealed import Branch, annealed_page, branches, drawn_branches
from generators.gains import Gain, drawn_gains, gains, gains_page, is_map
from generators.leaderboard import LEADERBOARD, Standing, drawn_standings, leaderboard_table, standings
from generators.sources import RESULTS, ROOT, config_of
from gossamer.cli.tune import tuned_page
from gossamer.record.jsonl import json_lines
from gossamer.report.figures import Figure, draw_figure, spread, swept, table
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines, markdown_table
from gossamer.run.document import load
from gossamer.run.experiment import Point, figure, place_of, points
from gossamer.run.tune import contenders, searched

__all__ = ["FOLDERS", "drawn", "outcome_files", "page"]

FOLDERS = ("", "paper", "evidence")
_HOUR = 3600


def outcome_files() -> list[Path]:
    """The committed outcomes that get a page of their own."""
    return [file for folder in FOLDERS for file in sorted((RESULTS / folder).glob("*.jsonl"))]


def page(outcomes: Path) -> str:
    """What the runs of an experiment have found, as Markdown; of those that have ended."""
    file, scale = config_of(outcomes)
    document = load(file)
    lines = [line for _, line in json_lines(outcomes)]
    verb = "tune" if _is_tuning(lines) else "compare"
    seeds = sorted({line["seed"] for line in lines})
    words = ["gossamer", verb, str(file.relative_to(ROOT)), *(["--scale", scale] if scale else [])]
    words += ["--seeds", ",".join(map(str, seeds))] if verb == "compare" and seeds != [document.get("seed", 0)] else []
    parts = [f"# {outcomes.stem}", _about(file), f"    {' '.join(words)}"]
    if verb == "tune":
        parts += [_said(lines, None), tuned_page(searched(contenders(document, scale=scale), outcomes))]
    else:
        runs, asked = points(document, seeds=seeds, scale=scale), figure(document)
        found = _in_order(outcomes, runs)
        cells = _cells(outcomes, runs, found)
        at_ends = [] if asked is not None else _branches(found, runs)
        parts.append(_said(lines, len(runs)))
        if ranked := _ranked(outcomes, found):
            parts.append(leaderboard_table(ranked))
        elif asked is not None and _has_target(found, asked):
            parts.append(table(found, asked))
        elif at_ends:
            parts.append(annealed_page(at_ends, runs[0].method))
        elif asked is None and not cells and any(one.at for one in found):
            parts.append(_points_table(found))
        elif asked is not None or not cells:
            parts.append(markdown_table([one.row for one in found]))
        if cells and not ranked:
            parts.append(f"## With momentum and without\n\n{gains_page(cells)}")
        if (ranked or is_map(cells) or at_ends) if asked is None else _has_target(found, asked):
            parts.append(f"![{outcomes.stem}]({outcomes.stem}.svg)\n")
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def drawn(outcomes: Path) -> bytes | None:
    """The figure of an experiment: what its file asks for, the leaderboard, annealed losses or the gain of momentum."""
    file, scale = config_of(outcomes)
    document = load(file)
    if _is_tuning([line for _, line in json_lines(outcomes)]):
        return None
    runs = points(document, seeds=sorted({one.seed for one in read_results(outcomes)}), scale=scale)
    found, asked = _in_order(outcomes, runs), figure(document)
    if asked is not None:
        return draw_figure(found, asked) if _has_target(found, asked) else None
    if ranked := _ranked(outcomes, found):
        return drawn_standings(ranked)
    if at_ends := _branches(found, runs):
        return drawn_branches(at_ends, runs[0].method)
    return drawn_gains(cells) if is_map(cells := _cells(outcomes, runs, found)) else None


def _ranked(outcomes: Path, found: Sequence[PointResult]) -> list[Standing]:
    """The standings of the leaderboard; of any other experiment none."""
    return standings(found) if outcomes.stem == LEADERBOARD else []


def _cells(outcomes: Path, runs: Sequence[Point], found: Sequence[PointResult]) -> list[Gain]:
    """Momentum against none in each cell of a registered experiment, whose methods are tuned."""
    return gains(runs, found) if outcomes.parent.name == "evidence" else []


def _branches(found: Sequence[PointResult], runs: Sequence[Point]) -> list[Branch]:
    """The annealed runs of an experiment whose variants differ in their lengths; the first variant is the target."""
    if any(run.config.inner.schedule != "wsd" for run in runs) or len({run.config.rounds for run in runs}) < 2:
        return []
    return branches(runs, found, runs[0].method)


def _is_tuning(lines: Sequence[Any]) -> bool:
    """Whether these are outcomes of gossamer tune; its file may be one for gossamer compare too."""
    return bool(lines) and "rung" in lines[0]


def _has_target(found: Sequence[PointResult], asked: Figure) -> bool:
    """Whether a run has ended of the variant that all others are compared with, if there is one."""
    wanted = asked.target or asked.against
    return not wanted or any(one.method == wanted for one in found)


def _in_order(outcomes: Path, runs: Sequence[Point]) -> list[PointResult]:
    """The runs that have ended, in the order of the file, whichever ended first."""
    ended = {place_of(one): one for one in read_results(outcomes)}
    places = [place_of(run) for run in runs]
    return [ended[place] for place in places if place in ended]


def _points_table(found: Sequence[PointResult]) -> str:
    """Loss at each point of a sweep over its seeds, and the disagreement of what does not agree."""
    keys = [*dict.fromkeys(key for one in found for key in one.at)]
    at_point: dict[tuple[str, str], list[PointResult]] = {}
    for one in found:
        at_point.setdefault(place_of(one)[:2], []).append(one)
    figures = ["loss", *(["disagreement"] if any(one.row["disagreement"] for one in found) else [])]
    heads = ["method", *(key.removeprefix("run.") for key in keys), "loss", *(f"{name}, each seed" for name in figures)]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for some in at_point.values():
        columns = [[one.row[name] for one in some] for name in figures]
        each = [", ".join(DASH if one is None else f"{one:.4f}" for one in own) for own in columns]
        at = [str(swept(some[0].at.get(key, DASH))) for key in keys]
        lines.append([some[0].method, *at, spread(columns[0]), *each])
    return markdown_lines(lines)


def _about(file: Path) -> str:
    """What an experiment file says of itself before its command."""
    comments = itertools.takewhile(lambda line: line.startswith("# "), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("# ") for line in comments)


def _said(lines: Sequence[Any], asked: int | None) -> str:
    """How many runs have ended, and by what they were computed."""
    of = f" of {asked}" if asked is not None and asked != len(lines) else ""
    said = [f"{len(lines)}{of} runs"]
    origins = [line["origin"] for line in lines if line.get("origin")]
    if origins:
        commits = dict.fromkeys(
            one["commit"][:9] + "+" * one["commit"].endswith("+") for one in origins if one["commit"]
        )
        said += [f"commit {', '.join(commits)}"] if commits else []
        said.append(f"torch {', '.join(dict.fromkeys(one['versions']['torch'] for one in origins))}")
        said.append(f"{sum(one['seconds'] or 0 for one in origins) / _HOUR:.2f} hours of training")
    return "; ".join(said) + "."
