"""`gossamer utilisation`: compute utilisation as a function of bandwidth."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json
from gossamer.cli.tables import print_estimate
from gossamer.errors import ConfigError
from gossamer.record.progress import echo


def command(
    *,
    model: str = "1b",
    method: str = "streaming",
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", metavar="KEY=VALUE")] = (),
    figure9: bool = False,
    analytic: bool = False,
    plot: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Prints compute utilisation as a function of bandwidth, for published models.

    Args:
        model: 1b, 10b, 70b or 100b (default: 1b)
        method: data_parallel, diloco, streaming, ... (default: streaming)
        overrides: an option, such as local_steps=30; may be repeated
        figure9: all-reduce and gossip with one straggler instead, on the 70b model
        analytic: hours of a whole run by formula instead, on nodes in several sites
        plot: draw utilisation against bandwidth (.png or .svg)
    """
    from gossamer.network.estimates.utilisation import plot_curves
    from gossamer.run.config.document import parse_overrides

    options = parse_overrides([*overrides])
    if analytic and (figure9 or plot is not None):
        other = "--figure9" if figure9 else f"--plot {plot}"
        raise ConfigError(f"--analytic was given with {other} but cannot be combined with it; remove one of the two")
    if analytic:
        _print_hours(options, json)
        return
    curves = _print_stragglers(options, json) if figure9 else _print_bandwidths(model, method, options, json)
    if plot is not None:
        plot_curves(curves, plot)
        if not json:
            echo(f"plot: {plot}")


def _print_bandwidths(model: str, method: str, options: Mapping[str, Any], json: bool) -> dict[str, Any]:
    """Prints which bandwidth a method needs for which utilisation; returns its curve."""
    from gossamer.network.estimates.utilisation import assumed, bandwidth_table, setting_of, utilisation_curve

    setting = setting_of(model, method, **options)
    curves, rows = {f"{method}, {model}": utilisation_curve(setting)}, bandwidth_table(setting)
    if json:
        print_json({"rows": rows, "assumptions": [assumed(model, method, setting)]})
        return curves
    echo(assumed(model, method, setting))
    for row in rows:
        needed = "more than 1 Tbit/s" if row.bandwidth_bps is None else f"{row.bandwidth_bps / 1e9:.1f} Gbit/s"
        echo(f"{row.utilisation:.0%} computing: {needed}")
    return curves


def _print_hours(options: Mapping[str, Any], json: bool) -> None:
    """Prints where the hours of a run go, method by method, and all that was assumed."""
    from gossamer.network.estimates.goodput import build_settings
    from gossamer.network.estimates.wall_clock import HOURS_HEADINGS, WallClockOptions, hours_rows, wall_clock_table

    made = wall_clock_table(build_settings(WallClockOptions, options, "option of --analytic"))
    print_estimate(HOURS_HEADINGS, hours_rows(made), made.assumptions, json=made if json else None)


def _print_stragglers(options: Mapping[str, Any], json: bool) -> dict[str, Any]:
    """Prints mean utilisation with one straggler, and all that was assumed; returns the curves."""
    from gossamer.network.estimates.goodput import build_settings
    from gossamer.network.estimates.straggler import STRAGGLER_METHODS, StragglerRun, straggler_rows, straggler_table

    run = build_settings(StragglerRun, options, "option of --figure9", without=["model"])
    points = straggler_table(run=run)
    assumptions = list(dict.fromkeys(sentence for point in points for sentence in point.assumptions))
    curves = {name: [(p.bandwidth_bps, p.mean) for p in points if p.method == name] for name in STRAGGLER_METHODS}
    rows = [{key: value for key, value in p._asdict().items() if key != "assumptions"} for p in points]
    print_estimate(
        ("Gbit/s", *STRAGGLER_METHODS),
        straggler_rows(run),
        assumptions,
        text=0,
        title="share of the time spent computing, mean over workers (straggler's local steps)",
        json={"rows": rows, "assumptions": assumptions} if json else None,
    )
    return curves
