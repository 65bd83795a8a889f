"""W of docs/evidence/registered.md: losses by the share of the steps that warms up, at two lengths."""

import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from generators.sources import RESULTS
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import markdown_lines

WARMUPS = "warmup_shares"
"""The stem of the file."""
_SHARES = {1350: {5: 68, 10: 135, 20: 270, 40: 540}, 5400: {5: 270, 10: 540, 20: 1080, 40: 2160}}
"""Steps of warm-up, by all steps and per cent of these."""
_BEFORE = {
    (1350, 20): ("equal_warmup", ", "),
    (5400, 10): ("penalty", ", exact, "),
    (5400, 20): ("four_times_as_long", ", "),
}
"""The experiments that had run with such a warm-up, and what stands in their labels between method and local steps."""
_MARGIN = 0.01
"""Nats."""


class WarmUps(NamedTuple):
    """A method at one length: its mean losses by the per cent of the steps that warm up, over the seeds that all have."""

    method: str
    steps: int
    losses: Mapping[int, float]

    @property
    def as_good(self) -> list[int]:
        """The shares whose mean is within the registered margin of the lowest."""
        return [share for share, loss in self.losses.items() if loss <= min(self.losses.values()) + _MARGIN]


def warmups(ended: Iterable[PointResult]) -> list[WarmUps]:
    """Each method at each length with all of its warm-ups; without those that lack a warm-up."""
    runs = {(one.method, one.at["inner.warmup_steps"], one.seed): one.row["loss"] for one in ended}
    before = {
        at: {(one.method, one.seed): one.row["loss"] for one in read_results(RESULTS / "evidence" / f"{stem}.jsonl")}
        for at, (stem, _) in _BEFORE.items()
    }
    there = list[WarmUps]()
    for steps, shares in _SHARES.items():
        for label in dict.fromkeys(label.removesuffix(", four times as long") for label, _, _ in runs):
            by_share = dict[int, dict[int, float]]()
            for share, warmup in shares.items():
                if (at := (steps, share)) in before:
                    between = _BEFORE[at][1]
                    names = {f"{label}{between}H = 30", label, label.replace(" ", "_")}
                    own = {seed: loss for (name, seed), loss in before[at].items() if name in names}
                else:
                    name = label if steps == min(_SHARES) else f"{label}, four times as long"
                    own = {seed: loss for (one, many, seed), loss in runs.items() if (one, many) == (name, warmup)}
                by_share[share] = own
            if seeds := set.intersection(*({*own} for own in by_share.values())):
                means = {share: statistics.fmean(own[seed] for seed in seeds) for share, own in by_share.items()}
                there.append(WarmUps(label, steps, means))
    return there


def warmups_page(ended: Iterable[PointResult]) -> str:
    """The table of mean losses with the shares that are as good as the lowest, as Markdown."""
    there = warmups(ended)
    rows = [
        [one.method, f"{one.steps:,}", *(f"{loss:.4f}" for loss in one.losses.values()), _listed(one.as_good)]
        for one in there
    ]
    shares = [*_SHARES[min(_SHARES)]]
    heads = ["method", "steps", *(f"{share} %" for share in shares), f"within {_MARGIN:g} of the lowest"]
    counts = ", ".join(f"{share} % in {sum(share in one.as_good for one in there)}" for share in shares)
    text = f"As good as the lowest in so many of {len(there)} rows: {counts}.\n"
    return (
        "\n".join([markdown_lines([heads, ["---", *["---:"] * (1 + len(shares)), "---"], *rows]), text]) if rows else ""
    )


def _listed(shares: Iterable[int]) -> str:
    return ", ".join(f"{share} %" for share in shares)
