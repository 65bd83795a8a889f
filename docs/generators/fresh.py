"""The comparisons of stage 1 on seeds that chose nothing, and of five later methods: A, B and N of registered.md."""

from collections.abc import Iterable, Mapping

from generators.gains import MARGIN
from generators.sources import RESULTS, losses_by_seed
from gossamer.report.paired import effect_cells, effect_heads
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import markdown_lines

FRESH, LONG, RECENT = "fresh", "long_tuned", "recent_tuned"
"""The stems of the files."""
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

_METHODS = ("DiLoCo", "local SGD", "GASLoC 2-Peer", "gossip 2-Peer", "GASLoC 1-Peer", "gossip 1-Peer", "NoLoCo")
COMPARED_LONG = {name: pair for name, pair in COMPARED.items() if set(pair) <= {*_METHODS}} | {
    f"{method}, beside data parallelism": (method, "data parallel") for method in (*_METHODS, "data parallel, Muon")
}
"""Those of them that B has, and each of its methods beside data parallelism."""
COMPARED_RECENT = {
    f"{method}, beside {other}": (method, other)
    for other in ("data_parallel", "diloco")
    for method in ("edit", "mt_dao", "demo", "distro", "acco")
}
"""Those of N."""


def fresh_table(ended: Iterable[PointResult]) -> str:
    """The nine comparisons of A as Markdown, over the seeds that all ten arms have."""
    return _table(ended, COMPARED)


def long_table(ended: Iterable[PointResult]) -> str:
    """The comparisons of B as Markdown, over the seeds that all arms have."""
    return _table(ended, COMPARED_LONG)


def recent_table(ended: Iterable[PointResult]) -> str:
    """The ten comparisons of N as Markdown, over the seeds that all arms have."""
    return _table(ended, COMPARED_RECENT)


def _table(ended: Iterable[PointResult], compared: Mapping[str, tuple[str, str]]) -> str:
    losses = losses_by_seed(ended)
    arms = {method for pair in compared.values() for method in pair}
    if not arms <= losses.keys():
        return ""
    seeds = sorted(set.intersection(*(set(losses[arm]) for arm in arms)))
    pairs = [
        [(losses[ours][seed] - losses[theirs][seed], losses[theirs][seed]) for seed in seeds]
        for ours, theirs in compared.values()
    ]
    heads = ["", "loss of", "above that of", "seeds", *effect_heads(MARGIN, None)[1:]]
    cells = effect_cells(pairs, MARGIN, None)
    rows = [
        [name, ours, theirs, str(len(seeds)), *own[1:]]
        for (name, (ours, theirs)), own in zip(compared.items(), cells, strict=True)
    ]
    return markdown_lines([heads, ["---", "---", "---", *["---:"] * (len(heads) - 3)], *rows]) if seeds else ""


def fresh_page(text: str = "") -> str:
    """The table of the committed outcomes on source code, or on another text."""
    return fresh_table(read_results(RESULTS / "evidence" / f"{FRESH}{text}.jsonl"))


def long_page() -> str:
    """The table of the committed outcomes of B."""
    return long_table(read_results(RESULTS / "evidence" / f"{LONG}.jsonl"))
