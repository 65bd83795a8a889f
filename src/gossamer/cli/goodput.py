"""`gossamer goodput`: what failures of chips cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.output import Json
from gossamer.cli.tables import print_estimate
from gossamer.errors import ConfigError
from gossamer.record.progress import echo

if TYPE_CHECKING:
    from gossamer.network.estimates.goodput import GoodputOptions


def command(
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", metavar="KEY=VALUE")] = (),
    published: bool = False,
    plot: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Prints the share of all chip time whose training steps count when chips fail, by formula and simulated.

    Args:
        overrides: an option, such as chips=150000, learners=4 or checkpoint_s=20; may be repeated
        published: the published goodputs of Decoupled DiLoCo next to ours instead; takes only restart_s and downtime_s
        plot: draw goodput against the number of chips (.png or .svg)
    """
    from gossamer.network.estimates.goodput import GoodputOptions, build_settings, goodput_curves
    from gossamer.network.estimates.utilisation import plot_curves
    from gossamer.run.config.document import parse_overrides

    given = parse_overrides([*overrides])
    options = build_settings(GoodputOptions, given, "option of goodput")
    if published and (others := given.keys() - {"restart_s", "downtime_s"}):
        raise ConfigError(
            f"--published was given with {', '.join(sorted(others))}, but its cells differ in restart_s and downtime_s only; "
            "remove the others"
        )
    if published:
        _print_published(options, json)
    else:
        _print_goodput(options, json)
    if plot is not None:
        plot_curves(goodput_curves(options), plot, x_label="chips", y_label="goodput", unit=1.0)
        if not json:
            echo(f"plot: {plot}")


def _print_goodput(options: "GoodputOptions", json: bool) -> None:
    from gossamer.network.estimates.goodput import GOODPUT_HEADINGS, goodput_rows, goodput_table

    made = goodput_table(options)
    print_estimate(GOODPUT_HEADINGS, goodput_rows(made), made.assumptions, json=made if json else None)


def _print_published(options: "GoodputOptions", json: bool) -> None:
    from gossamer.network.estimates.published import published_goodput

    cells = published_goodput(options.restart_s, options.downtime_s)
    assumptions = [
        f"an interruption costs all-reduce {options.restart_s:g} s and an elastic learner {options.downtime_s:g} s, and no step "
        "is lost",
        "each chip fails once a year; the published goodputs are from digests of arXiv 2604.21428",
    ]
    rows = [
        (cell.method, str(cell.learners), str(cell.chips), f"{cell.published:.0%}", f"{cell.goodput:.1%}")
        for cell in cells
    ]
    print_estimate(
        ("method", "learners", "chips", "published", "ours"),
        rows,
        assumptions,
        json={"rows": cells, "assumptions": assumptions} if json else None,
    )
