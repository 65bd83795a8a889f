"""The pages of experiments: a table and a figure from a config and the outcomes of its runs, without training.

The outcomes of `experiments/FOLDER/NAME.toml` are `docs/results/FOLDER/NAME.jsonl`, and those of one of its sizes
`NAME-SCALE.jsonl`; those of `configs/demo.toml` are in no folder.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from generators.annealed import Branch, annealed_page, branches, drawn_branches
from generators.effective_step import EFFECTIVE_STEP, effective_step_page
from generators.equal_terms import STRAGGLER_CODECS, drawn_shares, equal_terms_page
from generators.fresh import FRESH, LONG, RECENT, fresh_table, long_table, recent_table
from generators.gains import Gain, drawn_gains, gains, gains_page, is_map
from generators.leaderboard import LEADERBOARD, Standing, drawn_standings, leaderboard_table, standings
from generators.slow_uplink import LEFT_OUT, left_out_page, penalty_page
from generators.sources import RESULTS, ROOT, config_of
from generators.surface import PENALTY
from generators.warmups import WARMUPS, warmups_page
from gossamer.cli.tune import tuned_page
from gossamer.record.jsonl import json_lines
from gossamer.report.figures import Figure, draw_figure, figure_table, mean_and_deviation, swept
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines, number_text, table_cells
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import Point, figure, place_in_experiment, points
from gossamer.run.experiments.tune import contenders, searched

FOLDERS = ("", "paper", "evidence")
_COMPARED = {
    FRESH: fresh_table,
    LONG: long_table,
    RECENT: recent_table,
    EFFECTIVE_STEP: effective_step_page,
    PENALTY: penalty_page,
    LEFT_OUT: left_out_page,
    WARMUPS: warmups_page,
}
"""What a page says of those that compare as they were registered."""
_OTHERWISE = (*_COMPARED, STRAGGLER_CODECS, "equal_warmup")
"""Registered experiments that compare something else than momentum with none."""
_HOUR = 3600


def outcome_files() -> list[Path]:
    """The committed outcomes that get a page of their own."""
    return [file for folder in FOLDERS for file in sorted((RESULTS / folder).glob("*.jsonl"))]


def page(outcomes: Path) -> str:
    """What the runs of an experiment have found, as Markdown; of those that have ended."""
    file, scale = config_of(outcomes)
    document = load_document(file)
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
        cells = _cells(file, runs, found)
        at_ends = [] if asked is not None else _branches(found, runs, document)
        compared = _COMPARED[file.stem](found) if file.stem in _COMPARED else ""
        compared = equal_terms_page(at_ends) if file.stem == STRAGGLER_CODECS else compared
        parts.append(_said(lines, len(runs)))
        if ranked := _ranked(outcomes, found):
            parts.append(leaderboard_table(ranked))
        elif asked is not None and _has_target(found, asked):
            parts.append(figure_table(found, asked))
        elif at_ends:
            parts.append(annealed_page(at_ends, runs[0].method))
        elif asked is not None or not cells:
            parts.append(_seeds_table(found))
        if compared:
            parts.append(f"## What is compared\n\n{compared}")
        if cells and not ranked:
            parts.append(f"## With momentum and without\n\n{gains_page(cells)}")
        if (ranked or is_map(cells) or at_ends) if asked is None else _has_target(found, asked):
            parts.append(f"![{outcomes.stem}]({outcomes.stem}.svg)\n")
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def drawn(outcomes: Path) -> bytes | None:
    """The figure of an experiment: what its file asks for, the leaderboard, annealed losses or the gain of momentum."""
    file, scale = config_of(outcomes)
    document = load_document(file)
    if _is_tuning([line for _, line in json_lines(outcomes)]):
        return None
    runs = points(document, seeds=sorted({one.seed for one in read_results(outcomes)}), scale=scale)
    found, asked = _in_order(outcomes, runs), figure(document)
    if asked is not None:
        return draw_figure(found, asked) if _has_target(found, asked) else None
    if ranked := _ranked(outcomes, found):
        return drawn_standings(ranked)
    if at_ends := _branches(found, runs, document):
        return drawn_shares(at_ends) if file.stem == STRAGGLER_CODECS else drawn_branches(at_ends, runs[0].method)
    return drawn_gains(cells) if is_map(cells := _cells(file, runs, found)) else None


def _ranked(outcomes: Path, found: Sequence[PointResult]) -> list[Standing]:
    """The standings of a leaderboard; of any other experiment none."""
    return standings(found) if outcomes.stem in (LEADERBOARD, RECENT) else []


def _cells(file: Path, runs: Sequence[Point], found: Sequence[PointResult]) -> list[Gain]:
    """Momentum against none in each cell of a registered experiment, whose methods are tuned; none where rows look alike."""
    if file.parent.name != "evidence" or file.stem in _OTHERWISE:
        return []
    cells = gains(runs, found)
    places = [(one.method, one.plain, *map(str, one.where.values())) for one in cells]
    return cells if len({*places}) == len(places) else []


def _branches(found: Sequence[PointResult], runs: Sequence[Point], document: Mapping[str, Any]) -> list[Branch]:
    """The annealed runs of variants that differ in their lengths; the target is the first, of as many steps as the file says."""
    if any(run.config.inner.schedule != "wsd" for run in runs) or len({run.config.length.rounds for run in runs}) < 2:
        return []
    return branches(runs, found, runs[0].method, document["run"]["steps"])


def _is_tuning(lines: Sequence[Any]) -> bool:
    """Whether these are outcomes of gossamer tune; its file may be one for gossamer compare too."""
    return bool(lines) and "rung" in lines[0]


def _has_target(found: Sequence[PointResult], asked: Figure) -> bool:
    """Whether a run has ended of the variant that all others are compared with, if there is one."""
    wanted = asked.target or asked.against
    return not wanted or any(one.method == wanted for one in found)


def _in_order(outcomes: Path, runs: Sequence[Point]) -> list[PointResult]:
    """The runs that have ended, in the order of the file, whichever ended first."""
    ended = {place_in_experiment(one): one for one in read_results(outcomes)}
    places = [place_in_experiment(run) for run in runs]
    return [ended[place] for place in places if place in ended]


def _seeds_table(found: Sequence[PointResult]) -> str:
    """A row for each method, at each point of a sweep: its losses over the seeds, and what its runs send and take in the mean."""
    keys = [*dict.fromkeys(key for one in found for key in one.at)]
    at_point: dict[tuple[str, str], list[PointResult]] = {}
    for one in found:
        at_point.setdefault(place_in_experiment(one)[:2], []).append(one)
    groups = [*at_point.values()]
    heads, cells = table_cells([_mean_row([one.row for one in some]) for some in groups])
    others = [k for k, head in enumerate(heads) if head == "worst worker" or heads.index("sent per worker") <= k]
    others = [k for k in others if any(line[k] != DASH for line in cells)]
    several = ["loss, each seed"] if any(len(some) > 1 for some in groups) else []
    apart = ["disagreement"] if any(one.row["disagreement"] for one in found) else []
    titles = [*(key.removeprefix("run.") for key in keys), "loss", *several, *apart, *(heads[k] for k in others)]
    lines = [["method", *titles], ["---", *["---:"] * len(titles)]]
    for some, line in zip(groups, cells, strict=True):
        losses = [one.row["loss"] for one in some]
        lines.append(
            [
                some[0].method,
                *(str(swept(some[0].at.get(key, DASH))) for key in keys),
                mean_and_deviation(losses),
                *(_each(losses, ".4f") for _ in several),
                *(_each([one.row[name] for one in some], ".2g") for name in apart),
                *(line[k] for k in others),
            ]
        )
    return markdown_lines(lines)


def _mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row for all seeds; what one of them does not have, it has not either."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [*values]
        return None if None in known else statistics.fmean(value for value in known if value is not None)

    row: dict[str, Any] = {
        name: mean(own[name] for own in rows) for name in ("loss", "worst_loss", "disagreement", "sent_bytes")
    }
    for name in ("wall_s", "utilisation"):
        row[name] = {network: mean(own[name].get(network) for own in rows) for network in rows[0][name]}
    return {"method": rows[0]["method"], **row}


def _each(values: Sequence[float | None], form: str) -> str:
    return ", ".join(number_text(value, form) for value in values)


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
