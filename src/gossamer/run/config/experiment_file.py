"""Experiment files: variants times a grid, over one base, and their `[tune]` table."""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from gossamer.errors import ConfigError, choose
from gossamer.report.figures import Figure, swept
from gossamer.report.results import PointResult
from gossamer.run.config.document import EXPERIMENT, flat, load_document, with_settings
from gossamer.run.config.recipes import recipe, recipes
from gossamer.run.config.run_file import RunConfig, parse
from gossamer.settings.fields import Words
from gossamer.settings.options import Count, Decay, Positive, Share
from gossamer.settings.schema import build, settings, settings_faults

OuterValues = tuple[Positive, Decay]


@settings("tune")
class TuneConfig:
    """The `[tune]` table of an experiment file: what `gossamer tune` tries for each method, and with how many tokens."""

    budget_tokens: Count
    """The most tokens that one method may train on, all its runs together; the same for every method."""
    lr: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """The first grid of `inner.lr`, each twice the one before. It grows where the best is at its edge."""
    outer: Annotated[
        tuple[OuterValues, ...], Words("a list of pairs [η, γ] with η above 0 and γ from 0 to below 1")
    ] = (
        (0.7, 0.5),
        (1.0, 0.5),
        (0.7, 0.7),
        (1.0, 0.0),
    )
    """Outer learning rates and momenta (η, γ) of methods that have both, and beyond them where the best is at their edge. A
    method with an empty list keeps its own."""
    grid: Literal["cross", "product"] = "cross"
    """"cross": each `inner.lr` with the first pair, each pair at the best of them, and then what is missing around the best;
    "product": each `inner.lr` with each pair, and η takes these values only."""
    rungs: Annotated[tuple[Share, ...], Field(min_length=1)] = (1.0,)
    """Lengths of the runs as shares of the whole run, from the first rung of successive halving to the last, which is 1. Runs
    of a quarter of the length, which cost less, ranked η the other way round than whole ones."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    """Every setting is run with each of them, and judged by the mean."""
    final_seeds: tuple[int, ...] = ()
    """With these the two best settings of the last rung are run again, and the mean decides between them; empty for no final. A
    seed that a setting has been run with is not run again."""

    def __post_init__(self) -> Iterator[str]:
        if any(abs(high / low - 2) > 1e-6 for low, high in zip(self.lr, self.lr[1:], strict=False)):
            yield (
                f"tune.lr is {[*self.lr]}, but each must be twice the one before; write a grid such as [5e-4, 1e-3, 2e-3]"
            )
        if sorted(set(self.rungs)) != [*self.rungs] or self.rungs[-1] != 1:
            yield (f"tune.rungs is {[*self.rungs]}, but they must grow and end in 1.0; write [0.25, 1.0]")
        for name, values in (("outer", self.outer), ("seeds", self.seeds), ("final_seeds", self.final_seeds)):
            if len(set(values)) < len(values):
                yield (f"tune.{name} is {[*values]}, which contains duplicates; list each once")
        if self.final_seeds and not {*self.final_seeds} > {*self.seeds}:
            yield (
                f"tune.final_seeds is {[*self.final_seeds]}, but it must hold all of tune.seeds, {[*self.seeds]}, and one more; "
                f"write {[*self.seeds, max(self.seeds) + 1]}, or leave it out"
            )


class Point(NamedTuple):
    """One run of an experiment file: its variant, its point of the grid, and the run itself."""

    method: str
    """The label of its variant."""
    at: Mapping[str, Any]
    """The swept keys and their values here, the seed not among them."""
    seed: int
    label: str
    """The method with all that was swept: the run's own name."""
    config: RunConfig


class Draft(NamedTuple):
    """A `Point` whose run is not validated yet."""

    method: str
    at: Mapping[str, Any]
    label: str
    document: dict[str, Any]


class Variant(NamedTuple):
    """A variant of an experiment file."""

    label: str
    settings: dict[str, Any]
    """Its dotted keys."""
    table: Mapping[str, Any]
    """Its whole table in the file."""


def place_in_experiment(run: Point | PointResult) -> tuple[str, str, int]:
    """The place of a run in its experiment, before and after it has ended: method, swept keys and values, and seed."""
    return run.method, json.dumps(run.at, sort_keys=True), run.seed


_LONGEST = 200
"""Bytes in the name of a folder: file systems take 255, and a copy in progress has a suffix."""
_NO_SETTINGS = ("label", "sweep", "scale", "tune")
"""The keys of a variant that are no settings of its run."""


def open_experiment(file: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The document in an experiment file with dotted overrides applied, which hold at all of its sizes.

    A variant's own settings stay: they are what is compared.
    Raises: ConfigError when the file is no TOML file, and for variants and sizes that are no tables.
    """
    document = load_document(file, overrides)
    for owner, table in (("", document), *(("variant.", row) for row in _variants(document))):
        for size in _scales(table, owner).values():
            kept = {key: value for key, value in flat(size).items() if key not in overrides}
            size.clear()
            size.update(kept)
    return document


def points(document: Mapping[str, Any], *, seeds: Sequence[int] = (), scale: str = "") -> list[Point]:
    """All runs of an experiment file: `[[variant]]` tables, times the grid in `[sweep]`, over one base.

    A variant is a table of dotted overrides with a `label`; `[sweep]` maps dotted keys to lists of values, and a variant
    may have a separate `[variant.sweep]` instead. A value may be a table of settings that change together; `[[sweep]]` tables
    are the points of a list, in place of a grid. A file without both is one run, labelled with its name. The method "*" stands
    for every method that no other variant names.
    `[scale.NAME]` has dotted overrides for another size of the same experiment, `[variant.scale.NAME]` those of a variant.

    Args:
        seeds: run every point with each of them.
        scale: the name of the size to take; empty for the file as it is.
    """
    drafted = drafts(document, seeds=seeds, scale=scale)
    configs = [parse(draft.document) for draft in drafted]
    return [
        Point(method, {k: v for k, v in at.items() if k != "seed"}, config.seed, label, config)
        for (method, at, label, _), config in zip(drafted, configs, strict=True)
    ]


def drafts(document: Mapping[str, Any], *, seeds: Sequence[int] = (), scale: str = "") -> list[Draft]:
    """The documents of all runs of an experiment file, as in `points`. Raises ConfigError for what is no experiment."""
    base, rows = base_and_variants(document, scale=scale)
    runs: list[Draft] = []
    for row in rows:
        for here in _places(row.table.get("sweep", document.get("sweep", {})), seeds):
            label = row.label + "".join(f" {key.rpartition('.')[2]}={swept(value)}" for key, value in here.items())
            settings = {**row.settings, **flat(here), "name": re.sub(r"[/\\]", "-", label)}
            runs.append(Draft(row.label, here, label, with_settings(base, settings)))
    if twice := next((label for label, many in Counter(run.label for run in runs).items() if many > 1), ""):
        raise ConfigError(
            f"several of the {len(runs)} runs have the label {twice!r:.200}; each variant needs its own: set label"
        )
    return runs


def base_and_variants(document: Mapping[str, Any], *, scale: str = "") -> tuple[dict[str, Any], list[Variant]]:
    """The base run of an experiment file, and its variants, at one of its sizes. Raises ConfigError for what is no experiment."""
    base = {key: value for key, value in document.items() if key not in EXPERIMENT}
    rows, scales = _variants(document), _scales(document, "")
    if scale and not scales:
        raise ConfigError(f"--scale got '{scale}' and the file has no [scale.NAME]; leave --scale out, or write one")
    if scale and scale not in scales:
        raise ConfigError(choose("scale", scale, scales) + "; name one that the file has")
    named = {str(row.get("method")) for row in rows}
    others = [name for name in recipes() if name not in named]
    rows = [
        row if row.get("method") != "*" else {**row, "method": name}
        for row in rows
        for name in (others if row.get("method") == "*" else [""])
    ]
    base = with_settings(base, flat(scales.get(scale, {})))
    variants: list[Variant] = []
    for row in rows:
        settings = flat({key: value for key, value in row.items() if key not in _NO_SETTINGS})
        settings |= flat(_scales(row, "variant.").get(scale, {}))
        variants.append(Variant(str(row.get("label", row.get("method", base.get("name", "run")))), settings, row))
    return base, variants


def overruled_settings(document: Mapping[str, Any], *, scale: str = "") -> str:
    """A sentence about numbers in `[inner]` that the methods of variants replace by their own; empty without such.

    >>> print(overruled_settings({"inner": {"lr": 2e-3}, "variant": [{"method": "demo"}, {"method": "diloco"}]}))
    variant 'demo' has inner.lr = 0.0004 of its method, and not 0.002 of the file; set it in the variant to change that
    """
    base, variants = base_and_variants(document, scale=scale)
    common = flat({"inner": base.get("inner", {})})
    replaced = [
        f"variant '{one.label}' has {key} = {value} of its method, and not {common[key]} of the file"
        for one in variants
        if "method" in one.settings
        for key, value in recipe(one.settings["method"]).settings.items()
        if isinstance(value, float) and common.get(key, value) != value and key not in one.settings
    ]
    more = f"; and so for {len(replaced) - _NAMED} more" if len(replaced) > _NAMED else ""
    return f"{'; '.join(replaced[:_NAMED])}{more}; set it in the variant to change that" if replaced else ""


_NAMED = 3
"""The most settings that are named."""


def figure(document: Mapping[str, Any]) -> Figure | None:
    """What the `[figure]` table of an experiment file asks for. Raises ConfigError when it asks for the impossible."""
    return build(Figure, document["figure"], "figure") if "figure" in document else None


def table_faults(document: Mapping[str, Any]) -> list[str]:
    """Faults in the tables of an experiment file that do not belong to its runs."""
    tables = {"figure": Figure, "tune": TuneConfig}
    return [
        str(error)
        for key, kind in tables.items()
        if key in document
        for error in settings_faults(kind, document[key], key)
    ]


def folder_name(label: str) -> str:
    """A label as the name of a folder; of one that is too long for a file system its begin and a hash of it.

    >>> folder_name("GASLoC (0.7, 0.5)"), folder_name("edges=" + 90 * "[0, 1], ")[-28:]
    ('gasloc--0.7--0.5-', '---0--1----0--1-c4cd513934b1')
    """
    name = "".join(c if c.isalnum() or c in "-_.=" else "-" for c in label.lower())
    if len(name.encode()) > _LONGEST:
        mark = hashlib.sha256(name.encode()).hexdigest()[:12]
        name = f"{name.encode()[: _LONGEST - 13].decode(errors='ignore')}-{mark}"
    return name if name.strip(".") else name.replace(".", "-")  # ".." is another folder


def _variants(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variants of an experiment file; one without settings where it has none."""
    rows = document.get("variant", [{}])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"variant is {rows!r:.60}; write each variant as a [[variant]] table")
    for key, value in ((key, row[key]) for row in rows for key in ("label", "method") if key in row):
        if not isinstance(value, str) or not value:
            raise ConfigError(f"variant.{key} is {value!r:.60}; write a name, as text that is not empty")
    return rows


def _scales(table: Mapping[str, Any], owner: str) -> dict[str, dict[str, Any]]:
    """The other sizes that a file or a variant describes, by name."""
    scales = table.get("scale", {})
    if not isinstance(scales, dict) or not all(isinstance(one, dict) for one in scales.values()):
        raise ConfigError(
            f"{owner}scale is {scales!r:.60}; write each size as a table [{owner}scale.NAME] of dotted keys"
        )
    return scales


def _places(sweep: Any, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The swept keys with their values at each point; the seed comes last, so that labels differ by their end."""
    if isinstance(sweep, list) and sweep and all(isinstance(point, Mapping) and point for point in sweep):
        points = [flat(dict(point)) for point in sweep]
    elif isinstance(sweep, Mapping) and all(isinstance(values, list) and values for values in sweep.values()):
        points = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    else:
        raise ConfigError(
            f"sweep is {sweep!r:.99}; write it as a [sweep] table of dotted keys with lists of values, or as [[sweep]] tables "
            "of settings, one for each point"
        )
    if seeds and any("seed" in point for point in points):
        raise ConfigError(f"--seeds got {[*seeds]}, and the file sweeps seed too; leave one of them out")
    points = [{key: point[key] for key in sorted(point, key=lambda key: key == "seed")} for point in points]
    return [point | own for point in points for own in ([{"seed": seed} for seed in seeds] or [{}])]
