"""The comparisons of stage 1 on seeds that chose nothing: those that docs/evidence/registered.md lists, corrected together."""

from collections.abc import Iterable

from generators.gains import MARGIN
from generators.sources import RESULTS, losses_by_seed
from gossamer.report.paired import effect_cells, effect_heads
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import markdown_lines

__all__ = ["COMPARED", "FRESH", "fresh_page", "fresh_table"]

FRESH = "fresh"
"""The stem of the file."""
COMPARED = {
    "momentum, everyone": ("DiLoCo", "averaging, everyone"),
    "momentum, two peers": ("GASLoC 2-Peer", "averaging, two peers"),
    "momentum, one peer": ("GASLoC 1-Peer", "averaging, one peer"),
    "momentum over η = 1, everyone": ("DiLoCo", "local SGD"),
    "momentum over η = 1, two peers": ("GASLoC 2-Peer", "gossip 2-Peer"),
    "momentum over η = 1, one peer": ("GASLoC 1-Peer", "gossip 1-Peer"),
    "two peers": ("GASLoC 2-Peer", "DiLoCo"),
    "one peer": ("GASLoC 1-Peer", "DiLoCo"),
    "NoLoCo": ("NoLoCo", "GASLoC 1-Peer"),
}
"""What each is of, and the two methods: the loss of the first above that of the second."""


def fresh_table(ended: Iterable[PointResult]) -> str:
    """The nine comparisons as Markdown, over the seeds that all ten arms have."""
    losses = losses_by_seed(ended)
    arms = {method for pair in COMPARED.values() for method in pair}
    if not arms <= losses.keys():
        return ""
    seeds = sorted(set.intersection(*(set(losses[arm]) for arm in arms)))
    pairs = [
        [(losses[ours][seed] - losses[theirs][seed], losses[theirs][seed]) for seed in seeds]
        for ours, theirs in COMPARED.values()
    ]
    heads = ["", "loss of", "above that of", "seeds", *effect_heads(MARGIN, None)[1:]]
    cells = effect_cells(pairs, MARGIN, None)
    rows = [
        [name, ours, theirs, str(len(seeds)), *own[1:]]
        for (name, (ours, theirs)), own in zip(COMPARED.items(), cells, strict=True)
    ]
    return markdown_lines([heads, ["---", "---", "---", *["---:"] * (len(heads) - 3)], *rows]) if seeds else ""


def fresh_page(text: str = "") -> str:
    """The table of the committed outcomes on source code, or on another text."""
    return fresh_table(read_results(RESULTS / "evidence" / f"{FRESH}{text}.jsonl"))
