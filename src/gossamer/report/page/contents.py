"""The contents of a page of runs as plain values, for live pages and frozen reports."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.report.colours import places_of
from gossamer.report.metrics import METRICS, Metric
from gossamer.report.reading.runs import figure_in
from gossamer.report.table import has_diverged, method_and_seed, ranked, table_cells
from gossamer.report.verdict import verdict
from gossamer.version import __version__

_AXES = (
    ("round", "rounds"),
    ("step", "inner steps"),
    ("tokens", "tokens of all workers"),
    ("bytes", "bytes sent per worker"),
)
_METRICS = {metric.key: metric for metric in METRICS}


def page_contents(
    views: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    live: bool,
    command: str,
    date: str,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything on a page.

    Args:
        views: of `gossamer.report.page.view.run_view`, in the order to show.
        rows: of `gossamer.report.table.summary_rows`.
        command, date: how and when the data were produced.
        notes: what to know before these runs are compared.
    """
    axes = _axes(views)
    lost = {row["method"] for row in rows if has_diverged(row)}  # such a run has stopped
    runs_on = any(view.get("state") in ("training", "starting") and view["label"] not in lost for view in views)
    rows, stored = ranked(rows), bool(views) and all(view.get("store") for view in views)
    headings, cells = table_cells(rows)
    return {
        "title": title,
        "live": live,
        # Each run in a store says that losses lie elsewhere.
        "verdict": "" if stored else verdict(rows, running=runs_on),
        "command": command,
        "date": date,
        "version": __version__,
        "axes": axes,
        "axis": "time:" if stored and any(axis["key"] == "time:" for axis in axes) else _default_axis(axes, rows),
        "figures": _figures(views),
        "runs": views,
        "groups": groups_of(views),
        "places": places_of([method_and_seed(view["label"])[0] for view in views]),
        "notes": [*notes],
        "table": {"headings": headings, "rows": cells, "best": _best(rows)},
    }


def row_of_view(view: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table for a run that is followed, with the keys of `gossamer.report.table.summary_rows`."""
    # Without validation of the mean model, `evals` are the workers' own.
    evals, workers = (view.get(key, {"x": {}, "y": {}}) for key in ("evals", "own"))
    trained = max(evals["x"].get("round", []), default=0)  # 0: only initial values
    last = {key: values[-1] for key, values in evals["y"].items() if values and trained}
    of_workers = dict(zip(workers["x"].get("round", []), workers["y"].get("own", []), strict=True))
    wall_s = {name or "its own clock": end_s for name, end_s in view.get("ends_s", {}).items()}
    return {
        "method": view["label"],
        **{one.name: figure_in(last, one.key) for one in METRICS if one.curve or one.reduction == "newest"},
        "loss_of_workers": figure_in(of_workers, trained) if trained else None,
        "round": trained or None,
        "rounds": view.get("done", 0),
        "sent_bytes": view.get("sent_bytes"),
        "wall_s": wall_s,
        "loss_at_s": _losses_at_s(evals),
        "utilisation": {name: _computing(view, name) for name in wall_s},
    }


def _losses_at_s(evals: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The losses of a view by the seconds of each clock, as in a row of `summary_rows`; initial values are in none."""
    losses, after = evals["y"].get("loss", []), evals["x"].get("round", [])
    curves = {key.removeprefix("time:"): x for key, x in evals["x"].items() if key.startswith("time:")}
    return {
        name or "its own clock": [
            (at_s, math.nan if loss is None else loss)
            for at_s, loss, round in zip(x, losses, after, strict=True)
            if at_s is not None and round > 0
        ]
        for name, x in curves.items()
        if losses
    }


def groups_of(views: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The runs of one method with several seeds, whose labels end in " seed=3", with the mean and the range of their curves.

    >>> run = lambda seed, loss: {"label": f"a seed={seed}", "evals": {"x": {"round": [1]}, "y": {"loss": [loss]}}}
    >>> (group,) = groups_of([run(0, 1.0), run(1, 2.0)])
    >>> group["label"], group["runs"], group["mean"]["y"], group["low"], group["high"]
    ('a', [0, 1], {'loss': [1.5]}, {'loss': [1.0]}, {'loss': [2.0]})
    """
    members: dict[str, list[int]] = {}
    for place, view in enumerate(views):
        members.setdefault(method_and_seed(view["label"])[0], []).append(place)
    spreads = {label: _spread([views[k] for k in places]) for label, places in members.items()}
    return [{"label": label, "runs": places, **spreads[label]} for label, places in members.items()]


def _spread(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    curves = [view["evals"] for view in views if view.get("evals", {}).get("y")]
    if len(curves) < 2 or any(curve["x"]["round"] != curves[0]["x"]["round"] for curve in curves):
        return {"mean": None}
    xs = {axis: _each([curve["x"].get(axis) for curve in curves], statistics.fmean) for axis in curves[0]["x"]}
    names = [name for name in curves[0]["y"] if all(name in curve["y"] for curve in curves)]
    ys = [[curve["y"][name] for curve in curves] for name in names]
    of_all = (statistics.fmean, min, max)
    mean, low, high = ({name: _each(y, of) for name, y in zip(names, ys, strict=True)} for of in of_all)
    return {"mean": {"x": xs, "y": mean}, "low": low, "high": high}


def _each(curves: Sequence[Sequence[float | None] | None], of: Any) -> list[float | None]:
    """A pointwise figure of several curves; None where any of them has none."""
    known = [curve for curve in curves if curve is not None]
    if len(known) < len(curves):
        return []
    return [None if None in point else of(point) for point in zip(*known, strict=True)]


def _axes(views: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The axes available for all runs with a curve."""
    curves = [view.get(key) for view in views for key in ("evals", "training")]
    having = [set(curve["x"]) for curve in curves if curve and curve["y"]]
    shared = set.intersection(*having) if having else set()
    times = [axis for view in views for axis in view.get("evals", {}).get("x", {}) if axis.startswith("time:")]
    axes = [{"key": key, "label": label} for key, label in _AXES if key in shared]
    for axis in dict.fromkeys(times):
        name = axis.removeprefix("time:")
        axes.append({"key": axis, "label": f"seconds on {name}" if name else "measured seconds"})
    return axes


def _default_axis(axes: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """The clock on which the runs differ most, as an effect of communication; inner steps without a clock."""
    keys, spread = [axis["key"] for axis in axes], dict[str, float]()
    for key in keys:
        seconds = [row["wall_s"][name] for row in rows if (name := key.removeprefix("time:")) in row["wall_s"]]
        if key.startswith("time:") and len(seconds) == len(rows) > 0 and min(seconds) > 0:
            spread[key] = max(seconds) / min(seconds)
    widest = max(spread, key=lambda key: spread[key], default="")
    if widest and spread[widest] > 1:
        return widest
    return next((key for key in ("step", "round") if key in keys), keys[0] if keys else "round")


def _figures(views: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for view in views for key in ("evals", "own") for name in view.get(key, {}).get("y", {}))
    ordered = [name for name in _METRICS if name in names] + [name for name in names if name not in _METRICS]
    drawn = [_METRICS.get(name, Metric(name, "share")) for name in ordered]
    figures = [{"key": one.key, "title": one.title or one.key.replace("_", " "), "log": one.log} for one in drawn]
    if any(view.get("training", {}).get("y", {}).get("loss") for view in views):
        figures.append({"key": "training", "title": "Training loss, mean over workers", "log": False})
    return figures


def _best(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The index of the row with the lowest loss."""
    known = [(row["loss"], place) for place, row in enumerate(rows) if row["loss"] is not None]
    losses = [(loss, place) for loss, place in known if math.isfinite(loss)]
    return min(losses)[1] if losses and len(rows) > 1 else None


def _computing(view: Mapping[str, Any], name: str) -> float:
    """The share of its seconds that a run computed; NaN where its seconds are not recorded."""
    kinds = view.get("spent", {}).get("" if name == "its own clock" else name, {}).get("kinds", [])
    total = sum(map(sum, kinds))
    return sum(row[0] for row in kinds) / total if total else math.nan
