"""Our goodput under failures against the published one: writes docs/results/goodput.md and its figure.

    python benchmarks/goodput.py [--out docs/results]

Nothing is measured. The numbers come from a formula and from a simulation with a fixed seed, and a test checks the page.
"""

import argparse
from pathlib import Path

from gossamer.network.estimates.goodput import (
    GOODPUT_HEADINGS,
    GoodputOptions,
    goodput_curves,
    goodput_rows,
    goodput_table,
)
from gossamer.network.estimates.published import PUBLISHED_LEARNERS, PublishedGoodput, published_goodput
from gossamer.network.estimates.utilisation import plot_curves
from gossamer.record.whole_files import atomic_write
from gossamer.report.figures import on_any_ground

FIGURE = "goodput.svg"
COLUMNS = [(method, learners) for method, some in PUBLISHED_LEARNERS.items() for learners in some]
CHECKPOINT_S = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder (default: docs/results)")
    out = parser.parse_args().out
    draw(out / FIGURE)
    atomic_write(out / "goodput.md", page().encode())
    print(f"{out / 'goodput.md'}, {out / FIGURE}")


def draw(file: Path) -> None:
    """The figure: a curve for each column of the published table and one for gossip, with the published cells as dots."""
    marks = {title(*column): [(cell.chips, cell.published) for cell in cells(*column)] for column in COLUMNS}
    curves = {
        title(method, learners): goodput_curves(GoodputOptions(learners=learners))[method]
        for method, learners in COLUMNS
    } | {"gossip": goodput_curves()["gossip"]}
    plot_curves(
        curves, file, x_label="chips, each of which fails once a year", y_label="goodput", unit=1.0, marks=marks
    )
    file.write_bytes(on_any_ground(file.read_bytes()))


def title(method: str, learners: int) -> str:
    """The name of a column."""
    return f"{method}, M = {learners}" if method == "decoupled" else method


def cells(method: str, learners: int) -> list[PublishedGoodput]:
    """A column of the published table."""
    return [cell for cell in published_goodput() if (cell.method, cell.learners) == (method, learners)]


def page() -> str:
    """The whole page."""
    off = [abs(cell.published - cell.goodput) for cell in published_goodput() if cell.method != "all_reduce"]
    rigid = [abs(cell.published - cell.goodput) for cell in published_goodput() if cell.method == "all_reduce"]
    most, most_rigid = 100 * max(off), 100 * max(rigid)
    return f"""# Goodput when chips fail

    make results        # python benchmarks/goodput.py

Goodput is the share of all chip time whose training steps count. Nothing here is measured: a closed form gives the numbers, and a
simulation of the same model, with Poisson failures of every chip, checks them.

- **all_reduce**: an interruption of any chip restarts the whole run from its last checkpoint.
- **elastic**: one learner stands still for a short time, and goes on with the chips that are left.
- **decoupled**: M elastic learners; while one stands still, the others train on.
- **gossip**: each worker of 8 chips is a learner of its own, and restarts from the parameters of its peers.

A learner of N/M chips is interrupted after F = M/N years on average if each chip fails once a year. It then stands still for T
seconds: goodput = F / (F + T).

## Compared with the published table

Goodput of Decoupled DiLoCo (arXiv 2604.21428) in percent, with ours in parentheses. **The published numbers are from secondary
sources**: three digests of the paper, which agree where they overlap. The digests do not have the downtimes of the paper's
simulator, so one number is fitted for elastic learners, T = 22.6 s, and one for all-reduce, T = 72 s without lost work. They are
effective values, which stand for all that an interruption costs.
**The {len(off)} cells of elastic and decoupled training differ by at most {most:.1f} points,
the {len(rigid)} of all-reduce by at most {most_rigid:.1f}.**

    gossamer goodput --published

{_published()}

![goodput against the number of chips]({FIGURE})

Curves are ours, dots are published.

The paper's rule, that M learners on N chips have about the goodput of one elastic learner on N/M chips, is exact in this model.
At least one of M learners trains for a share 1 - (1 - g)^M of the time.

## All four on one cluster

1.2 million chips, decoupled with M = 8:

    gossamer goodput

{_table(GoodputOptions())}

The same when all-reduce needs {CHECKPOINT_S} s to write a checkpoint, and writes one after the best interval:

    gossamer goodput --set checkpoint_s={CHECKPOINT_S}

{_table(GoodputOptions(checkpoint_s=CHECKPOINT_S))}

The goodput of gossip does not depend on the number of chips, but on those of one worker only. What is assumed:

{_bullets(goodput_table(GoodputOptions(interruptions=100)).assumptions[:-1])}
"""


def _published() -> str:
    lines = [_row("chips", *(title(*column) for column in COLUMNS)), "|---:|" + "---:|" * len(COLUMNS)]
    columns = [cells(*column) for column in COLUMNS]
    for row in zip(*columns, strict=True):
        lines.append(
            _row(str(row[0].chips), *(f"{100 * cell.published:.0f} ({100 * cell.goodput:.1f})" for cell in row))
        )
    return "\n".join(lines)


def _table(options: GoodputOptions) -> str:
    lines = [_row(*GOODPUT_HEADINGS), "|---|" + "---:|" * (len(GOODPUT_HEADINGS) - 1)]
    return "\n".join([*lines, *(_row(*row) for row in goodput_rows(goodput_table(options)))])


def _bullets(sentences: tuple[str, ...]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
