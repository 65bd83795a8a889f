"""Our numbers of compute utilisation against the published ones: writes docs/results/utilisation.md and its figure.

    python benchmarks/utilisation.py [--out docs/results]

Nothing is measured. All numbers come from formulas, so the page is the same on every machine; a test checks that.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from gossamer.network.estimates.published import PUBLISHED_GBPS, grid_steps_above_published
from gossamer.network.estimates.straggler import STRAGGLER_METHODS, matched_local_steps, straggler_table
from gossamer.network.estimates.utilisation import PUBLISHED_METHODS, TARGETS, bandwidth_table, plot_curves, setting_of
from gossamer.network.estimates.wall_clock import wall_clock_table
from gossamer.record.whole_files import atomic_write
from gossamer.report.figures import on_any_ground

PUBLISHED_STEPS = {(1, 0.1): 15, (2, 0.1): 1}
"""Local steps (out of 30) of a straggler, by number of peers and share of the bandwidth: arXiv 2606.11081, figures 2 and 3."""
FIGURE = "utilisation_figure9.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder (default: docs/results)")
    out = parser.parse_args().out
    rows = straggler_table()
    curves = {name: [(row.bandwidth_bps, row.mean) for row in rows if row.method == name] for name in STRAGGLER_METHODS}
    plot_curves(curves, out / FIGURE)
    (out / FIGURE).write_bytes(on_any_ground((out / FIGURE).read_bytes()))
    atomic_write(out / "utilisation.md", page().encode())
    print(f"{out / 'utilisation.md'}, {out / FIGURE}")


def page() -> str:
    """The whole page."""
    off = [
        steps
        for model, methods in PUBLISHED_GBPS.items()
        for method in methods
        for steps in grid_steps_above_published(model, method)
    ]
    return f"""# Compute utilisation compared with the published numbers

    make results        # python benchmarks/utilisation.py

All numbers are computed by formula; nothing is measured. Utilisation is compute time over total time.

## Bandwidth needed for a given utilisation

Gbit/s between two sites needed to compute 50 to 99 % of the time, H = 100 (Streaming DiLoCo, arXiv 2501.18512, table 4). The
published values are points of a grid of 50 from 0.1 to 1000, 21 % apart, printed with one decimal. Our calculation follows every
layer through the link. The paper does not say how many bits a layer sends, and 0.84 of its bits fits best.
**{off.count(0)} of {len(off)} are the same point, the others one point off**; their published value and the distance are in
parentheses.

    gossamer utilisation --model 1b --method diloco

{_needed()}

## One straggler

The share of the time that workers compute when one of 8 has 20 % of the others' uplink, 70B parameters (GASLoC, arXiv 2606.11081,
figure 9). The paper gives no formula for the figure. Its caption names model, straggler and methods; all other assumptions are
ours and listed below.

    gossamer utilisation --figure9 --plot figure9.svg

![utilisation over bandwidth with one straggler]({FIGURE})

Each entry is the mean over the workers; in parentheses are the value of a healthy worker and the local steps of the straggler:

{_stragglers()}

{_bullets(sentence for row in straggler_table() for sentence in row.assumptions)}

## Local steps of a straggler

`H_i = clamp(⌊H - (1/share - 1)·c⌋, 1, H)` with H = 30 and an exchange at full bandwidth of c = 5/3 steps for each peer lets the
straggler finish with the others. The constant is chosen to give the two published values; those at 20 % are predictions.

{_steps()}

## Hours of a whole run

By the formulas of DiLoCo's scaling laws (arXiv 2503.09799, appendices A and B), for 1B parameters in four replicas:

    gossamer utilisation --analytic --set replicas=4 --set network=low

{_hours()}

{_bullets(wall_clock_table().assumptions)}
"""


def _needed() -> str:
    lines = [_row("model", "method", *(f"{target:.0%}" for target in TARGETS)), "|---|---|" + "---:|" * len(TARGETS)]
    for model, methods in PUBLISHED_GBPS.items():
        for method in PUBLISHED_METHODS:
            cells = [
                f"{(row.bandwidth_bps or 0) / 1e9:.3g}" + (f" ({published:g}, {steps:+d})" if steps else "")
                for row, published, steps in zip(
                    bandwidth_table(setting_of(model, method)),
                    methods[method],
                    grid_steps_above_published(model, method),
                    strict=True,
                )
            ]
            lines.append(_row(model, method, *cells))
    return "\n".join(lines)


def _stragglers() -> str:
    lines = [_row("Gbit/s", *STRAGGLER_METHODS), "|---:|" + "---:|" * len(STRAGGLER_METHODS)]
    for gbps in (1, 3, 10, 30, 100, 300, 1000):
        rows = straggler_table(bandwidths_bps=gbps * 1e9)
        lines.append(
            _row(str(gbps), *(f"{one.mean:.1%} ({one.healthy:.1%}, {one.straggler_local_steps})" for one in rows))
        )
    return "\n".join(lines)


def _steps() -> str:
    lines = [_row("peers", "share of the bandwidth", "local steps", "published"), "|---:|---:|---:|---|"]
    for share in (0.1, 0.2):
        for peers in (1, 2):
            steps = matched_local_steps(30, share, peers * 5 / 3)
            published = PUBLISHED_STEPS.get((peers, share))
            lines.append(
                _row(str(peers), f"{share:.0%}", str(steps), "prediction" if published is None else str(published))
            )
    return "\n".join(lines)


def _hours() -> str:
    lines = [
        _row("method", "hours", "computing", "reducing each step", "each round", "Gbit at once"),
        "|---|" + "---:|" * 5,
    ]
    for row in wall_clock_table().rows:
        total_s = row.clock.total_s
        shares = (f"{seconds / total_s:.1%}" for seconds in row.clock)
        lines.append(_row(row.method, f"{total_s / 3600:.1f}", *shares, f"{row.at_once_bits / 1e9:.3g}"))
    return "\n".join(lines)


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in dict.fromkeys(sentences))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
