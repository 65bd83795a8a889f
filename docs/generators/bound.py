"""Numbers of a page that are written from their source; the page reads as text, and a file beside it says where each is from.

`docs/numbers/how-to/experts.toml` belongs to `docs/how-to/experts.md`, and `docs/numbers/README.toml` to `README.md`. It lists
the sources by short names (files are under `docs/results`), and then the places of the page in their order: the text before a
number, and such a name with a key, whose parts are separated by semicolons.

    [sources]
    h = "paper/h_sweep.jsonl"
    slow = "slow_links.md"

    [numbers]
    places = [
        ["DiLoCo ends at ", "h: DiLoCo; local_steps=30"],
        ["GASLoC needs ", "slow: A over B; measured; less in %"],
        ["| method |", '''
    cells of h
    rows: DiLoCo | GASLoC 1-Peer above DiLoCo
    columns: local_steps=1 | local_steps=5
    '''],
    ]

Each text is looked for after the place before it, any white space in it counts as one blank, and it need only be as long as to
be found there first. `cells of` belongs to a table that begins with the text: a cell has the key of its row and that of its
column; "-" leaves one out, and so does a place of its own. `table 2 of h by paper/h_sweep.toml` replaces a table by the second
that `gossamer compare` makes with that file, `all of claims` by the table of claims, and likewise those of `leaderboard`,
`recent`, `fresh`, `effective step`, `equal terms`, `local steps`, `equal bytes` and `cells`.

The first part of a key is the label of a variant (in a page: the first cell of a row or its start with "…", or "*"), or
`A above B` (difference, seed by seed), `A over B` (ratio), `A with B` (Spearman's rank correlation over the points of a sweep).
Then come, in any order:

- `name=value`: only runs with this value of a swept key, or rows with this cell; `name/graph=ring` for either key; `seed=0`;
- what is read: of outcomes `loss` (unless another is named), `worst`, `worst above mean`, `disagreement`, `sent MB`,
  `training seconds` (that the run took), `seconds on NETWORK`, `seconds to validation` (the first, on the only network), and
  against the last loss of another variant `time to B` and `rounds to B`, or `behind B` after its time, all with `by NETWORK` if
  there are several (or `by sent bytes`, `by rounds`); of a page the heading of a column, "measured (2)" for the second
  of that name, in which a time is in seconds, or `text HEADING` for a cell as it is;
- `in %`, `less in %` (100 (1 - x)), `change in %` (100 (x - 1)), `squared`;
- `each`, of the seeds; `min`, `max`, `count`; `low`, `high`, the ends of the 95 % interval of the mean; `lowest mean`, `highest
  mean` of the points of a sweep; otherwise the mean.

The form is that of the number which stands there: its decimals, its sign, and whether "± 0.0" follows, the sample standard
deviation.
Raises: ValueError, which names the page and the key, for a key without a number and for a text that the page does not have.
"""

import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from generators import effective_step, equal_terms, surface
from generators.claims import claims_page, committed
from generators.fresh import RECENT, fresh_page, long_page
from generators.gains import gains, gains_page
from generators.leaderboard import committed_standings, leaderboard_page, leaderboard_table
from generators.local_steps import equal_bytes_table, lengths, local_steps_table
from generators.sources import NUMBER, RESULTS, ROOT, TEXT, Reading, Source, source
from gossamer.report.figures import figure_table
from gossamer.report.paired import effect
from gossamer.report.results import read_results
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import figure

_REGISTERED = "docs/evidence/registered.md"
"""What was expected, as it was written before the runs."""
_WRITTEN = re.compile(
    r"^<!-- Made by|^    (?:sudo )?(?:python benchmarks/|make results)|this page is the record of them", re.MULTILINE
)
"""At the head of a page that a program writes as a whole, or that is itself the record of runs whose outcomes were not kept."""
_HEAD_PARTS = 4
_SPREAD = rf"{NUMBER}(?:\s±\s{NUMBER})?"
_LIST = rf"{_SPREAD}(?:,\s{NUMBER})*"
_COMMENT = re.compile(r"<!-- (\w+): ([^>]+?)\s-->")
_OF_A_TABLE = re.compile(r"cells of |table \d|all of ")
_MARK = re.compile(r"<!-- (?:cells of|table|all of) [^>]*-->\n\n|<!-- [^>]*-->")
_CELLS = re.compile(r"<!-- cells of (\w+)\nrows: (.*?)\ncolumns: (.*?)\n-->\n\n?((?:\|[^\n]*\n)+)", re.DOTALL)
_TABLE = re.compile(r"<!-- table (\d+) of (\w+) by (\S+) -->\n\n?((?:\|[^\n]*\n)+)")
_GENERATED: dict[str, Callable[[], str]] = {
    "claims": claims_page,
    "leaderboard": leaderboard_page,
    "recent": lambda: leaderboard_table(committed_standings(RECENT)),
    "fresh": fresh_page,
    "fresh prose": lambda: fresh_page("-prose"),
    "long": long_page,
    "effective step, losses": lambda: effective_step.losses_table(effective_step.committed_arms()),
    "effective step, everyone": lambda: effective_step.compared(effective_step.committed_arms(), "everyone"),
    "effective step, two peers": lambda: effective_step.compared(effective_step.committed_arms(), "two peers"),
    "equal terms": lambda: equal_terms.shares_table(equal_terms.committed_branches()),
    "equal terms, costs": lambda: equal_terms.costs_table(equal_terms.committed_branches()),
    "penalties": lambda: surface.penalties_table(surface.committed_surface()),
    "penalties, codecs": lambda: surface.codecs_table(surface.committed_surface()),
    "local steps": lambda: local_steps_table(lengths()),
    "equal bytes": lambda: equal_bytes_table(lengths()),
    "cells": lambda: gains_page(
        [one for cell in ("", "-h120", "-n32") for one in gains(*committed(f"cells_tuned{cell}"))]
    ),
}
_WHOLE = re.compile(rf"<!-- all of ({'|'.join(_GENERATED)}) -->\n\n?((?:\|[^\n]*\n)+)")
_MEASURED = (
    r"(?<![\d.])(?<!= )(?<!±)(?<!± )(?<!Python )(?<![Tt]orch )(?<!arXiv )\d{1,3}\.\d{2,}(?![\d.]*\d| ?(?:M|million)\b)"
    r"|(?<![\d.])[+−-]?\d+\.\d+ ?%|[+−-]\d+ ?%"
)
_SCALED: dict[str, Callable[[float], float]] = {
    "in %": lambda x: 100 * x,
    "less in %": lambda x: 100 * (1 - x),
    "change in %": lambda x: 100 * (x - 1),
    "squared": lambda x: x * x,
}
_TAKEN = ("each", "min", "max", "count", "low", "high", "lowest mean", "highest mean")
_RELATED: dict[str, Callable[[float, float], float]] = {
    " above ": lambda x, y: x - y,
    " over ": lambda x, y: x / y,
}


def pages() -> list[str]:
    """The pages in which every measured number names its source: all that are written by hand, README first."""
    names = [name for name in _every_page() if name != _REGISTERED and not (ROOT / name).with_suffix(".jsonl").exists()]
    return [name for name in names if not _WRITTEN.search(_head(name))]


def with_sources() -> list[str]:
    """The pages whose numbers have sources: those of `pages` with measured numbers, and records with tables of their own."""
    return [name for name in _every_page() if _file(name).exists()]


class Numbers(NamedTuple):
    """What the file beside a page says of its numbers."""

    sources: Mapping[str, str]
    places: Sequence[tuple[str, str]]
    """The text before each, and where it is from."""


def numbers_of(page: str) -> Numbers:
    """What `docs/numbers` says of a page; nothing of one that has no file there."""
    if not _file(page).exists():
        return Numbers({}, ())
    read = tomllib.loads(_file(page).read_text(encoding="utf-8"))
    return Numbers(read.get("sources", {}), [(before, key.strip()) for before, key in read["numbers"]["places"]])


def marked(text: str, numbers: Numbers, page: str) -> str:
    """A page with a comment after each number, and before each table, that says where it is from."""
    parts, end = list[str](), 0
    for before, key in numbers.places:
        at = re.compile(r"\s+".join(map(re.escape, re.split(r"\s+", before)))).search(text, end)
        if at is None:
            raise ValueError(
                f"{page} has no {before!r} after {text[max(end - 40, 0) : end]!r}; name the text before {key!r}"
            )
        if _OF_A_TABLE.match(key):
            parts += [text[end : at.start()], f"<!-- {key}\n-->\n\n" if "\n" in key else f"<!-- {key} -->\n\n", at[0]]
            end = at.end()
            continue
        number = re.compile(rf"(?:{_LIST if 'each' in _parts(key) else _SPREAD})").match(text, at.end())
        if number is None:
            raise ValueError(f"{page}: no number stands after {before!r}; write one in the form that it shall have")
        parts += [text[end : number.end()], f"<!-- {key} -->"]
        end = number.end()
    return "".join([*parts, text[end:]])


def filled(text: str, numbers: Numbers, page: str) -> str:
    """A page with every number that has a source as its source has it."""
    names = {name: RESULTS / file for name, file in numbers.sources.items()}
    text = marked(text, numbers, page)

    def of(name: str) -> Source:
        if name not in names:
            raise ValueError(
                f"{page} names the source '{name}' and lists {', '.join(names) or 'none'}; add it to its sources"
            )
        return source(names[name])

    def written(like: str, name: str, key: str) -> str:
        try:
            return _written(of(name), key, like)
        except (ValueError, KeyError, StopIteration) as error:
            raise ValueError(f"{page}: {name}: {key}: {error}") from None

    def whole_table(at: re.Match[str]) -> str:
        asked = figure(load_document(ROOT / "experiments" / at[3]))
        assert asked is not None
        made = figure_table(read_results(names[at[2]]), asked).split("\n\n")[int(at[1]) - 1]
        return at[0][: at.start(4) - at.start()] + made.rstrip("\n") + "\n"

    def cells(at: re.Match[str]) -> str:
        heads, lines = at[4].splitlines()[:2], at[4].splitlines()[2:]
        rows, columns = ([part.strip() for part in at[k].split(" | ")] for k in (2, 3))
        if len(rows) != len(lines):
            raise ValueError(f"{page}: {len(rows)} rows are named for a table of {len(lines)}, {rows[0]!r} the first")
        made = [
            _line(line, row, columns, lambda like, key: written(like, at[1], key))
            for line, row in zip(lines, rows, strict=True)
        ]
        return at[0][: at.start(4) - at.start()] + "\n".join([*heads, *made]) + "\n"

    def generated(at: re.Match[str]) -> str:
        return at[0][: at.start(2) - at.start()] + _GENERATED[at[1]]()

    text = _CELLS.sub(cells, _TABLE.sub(whole_table, _WHOLE.sub(generated, text)))
    parts, end = list[str](), 0
    for at in _COMMENT.finditer(text):
        before = text[end : at.start()]
        number = re.search(rf"(?:{_LIST if 'each' in _parts(at[2]) else _SPREAD})$", before)
        assert number is not None, "marked put it there"
        parts += [before[: number.start()], written(number[0], at[1], at[2]), at[0]]
        end = at.end()
    return _MARK.sub("", "".join([*parts, text[end:]]))


def unbound(text: str) -> list[str]:
    """The measured numbers of a marked page that neither have a source nor stand in a bound table.

    Measured are numbers with two decimals or more, as losses, ratios and seconds have, and per cents with a sign or decimals. A
    place may say what else one is from: the test that computes it (`tests/rounds/test_stability.py`), the benchmark that measured
    it when its outcome was not kept, the paper that says it (`arXiv 2606.19025`), or `registered` where it was expected or asked
    for. After an equals sign it is a setting, after ± a margin, and before M a size.
    """
    text = _WHOLE.sub("", _TABLE.sub("", _CELLS.sub("", text)))
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|(?<=\n\n)(?: {4}[^\n]*\n)+", "", text, flags=re.DOTALL)
    text = re.sub(rf"(?:{NUMBER} to )?{_LIST}\**<!-- (?:\w+: |tests/|benchmarks/|arXiv |registered )[^>]*-->", "", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.findall(_MEASURED, text)


def _every_page() -> list[str]:
    return ["README.md", *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").rglob("*.md")))]


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _head(page: str) -> str:
    return "\n\n".join(_text(page).split("\n\n")[:_HEAD_PARTS])


def _file(page: str) -> Path:
    return ROOT / "docs" / "numbers" / Path(page.removeprefix("docs/")).with_suffix(".toml")


def _parts(key: str) -> list[str]:
    return [part.strip() for part in key.split(";")]


def _line(line: str, row: str, columns: Sequence[str], written: Callable[[str, str], str]) -> str:
    first, *cells = line.strip("|").split("|")
    if row == "-":
        return line
    if len(columns) != len(cells):
        raise ValueError(f"{len(columns)} columns are named for the {len(cells)} of the line {line!r}")
    made = [
        cell if column == "-" or "<!--" in cell else _cell(cell, f"{row}; {column}", written)
        for cell, column in zip(cells, columns, strict=True)
    ]
    return f"|{'|'.join([first, *made])}|"


def _cell(cell: str, key: str, written: Callable[[str, str], str]) -> str:
    parts = _parts(key)
    if any(part.startswith(TEXT) for part in parts):
        return f" {written('', key)} "
    form = _LIST if "each" in parts else _SPREAD
    return re.sub(form, lambda number: written(number[0], key), cell, count=1)


def _written(of: Source, key: str, like: str) -> str:
    """The number of a key in the form of another."""
    label, *others = _parts(" ".join(key.split()))
    like = " ".join(like.split())
    only = dict[str, str]()
    scaled, taken, measure = None, "", "loss"
    for part in others:
        name, equals, value = part.partition("=")
        if part in _SCALED:
            scaled = _SCALED[part]
        elif part in _TAKEN:
            taken = part
        elif equals and not name.endswith(" "):  # as in "H = 30"
            only[name] = value
        else:
            measure = part
    if " with " in label and label not in of.labels:
        return _form(_rank_correlation(*(_all(of, one, only, measure) for one in label.split(" with "))), like)
    found = _all(of, label, only, measure)
    if measure.startswith(TEXT) and found:
        return str(found[0].value)
    if scaled is not None:
        found = [one._replace(value=scaled(one.value)) for one in found]  # pyright: ignore[reportArgumentType]
    values = [float(one.value) for one in found]
    if not values:
        raise ValueError(f"there is no such number; labels are {', '.join(of.labels)}")
    if taken == "each":
        return ", ".join(_form(value, like) for value in values)
    if taken in ("lowest mean", "highest mean"):
        return _form((min if taken.startswith("lowest") else max)(_means(found).values()), like)
    if taken in ("low", "high"):
        found = effect([(value, 1.0) for value in values])
        if found.half is None:
            raise ValueError("one seed has no interval")
        return _form(found.mean + (found.half if taken == "high" else -found.half), like)
    if taken:
        return _form(float(len(values)) if taken == "count" else min(values) if taken == "min" else max(values), like)
    mean = _form(statistics.fmean(values), like)
    if " ± " not in like:
        return mean
    return f"{mean} ± {_form(statistics.stdev(values), like.partition(' ± ')[2])}"


def _all(of: Source, label: str, only: Mapping[str, str], measure: str) -> list[Reading]:
    """The readings of a label, or of two that are related seed by seed."""
    if label.endswith("…"):
        (label,) = (one for one in of.labels if one.startswith(label[:-1]))
    if label in of.labels:
        return of.read(label, only, measure)
    for word, related in _RELATED.items():
        if word in label:
            ours, theirs = (of.read(one, only, measure) for one in label.split(word))
            other = {(one.point, one.seed): float(one.value) for one in theirs}
            return [
                one._replace(value=related(float(one.value), other[one.point, one.seed]))
                for one in ours
                if (one.point, one.seed) in other
            ]
    raise ValueError(f"'{label}' is none of {', '.join(of.labels)}")


def _means(found: Sequence[Reading]) -> dict[str, float]:
    points: dict[str, list[float]] = {}
    for one in found:
        points.setdefault(one.point, []).append(float(one.value))
    return {point: statistics.fmean(own) for point, own in points.items()}


def _rank_correlation(a: Sequence[Reading], b: Sequence[Reading]) -> float:
    from scipy.stats import spearmanr

    ours, theirs = _means(a), _means(b)
    found = spearmanr([*ours.values()], [theirs[point] for point in ours])
    return float(cast(Any, found).statistic)


def _form(value: float, like: str) -> str:
    """A number with the decimals and the kind of sign of another."""
    decimals = len(like.split(",")[0].split(" ")[0].partition(".")[2])
    said = format(value, f"{'+' if like[0] in '+−-' else ''}.{decimals}f")
    return said if "-" in like or value >= 0 else said.replace("-", "−")
