"""The metrics of a run, a row for each: to add one, record it in a line of metrics and give it a row here.

A row says of what it is and in which unit, which of its figures is that of a table, and where it is shown.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Rows = Sequence[Mapping[str, Any]]


class Metric(NamedTuple):
    """A figure of a run.

    >>> next(metric.heading for metric in METRICS if metric.name == "worst_loss")
    'worst worker'
    """

    name: str
    """In the lines of metrics, and in the rows of `gossamer.report.table.summary_rows`."""
    unit: Literal["nats per token", "nats", "rms", "share", "bytes", "passes"]
    title: str = ""
    """Of its curve on a page; empty where the name in words does."""
    heading: str = ""
    """In tables; empty where they leave it out."""
    reduction: Literal["newest", "own"] = "newest"
    """newest: that of the newest validation. own: `summary_rows` computes it."""
    curve: str = ""
    """The name of its curve, where that is another."""
    log: bool = False
    """Whether the axis of its curve is logarithmic."""
    shown: Callable[[Rows], bool] = lambda rows: True
    """Whether the table of these rows has it."""
    dated: bool = False
    """Whether its cell names the round, where the run has trained more since."""
    live: str = ""
    """In the terminal; empty where it is left out."""

    @property
    def key(self) -> str:
        """The name of its curve."""
        return self.curve or self.name


def _has_own_losses_only(rows: Rows) -> bool:
    """Whether there is a real run that nobody has evaluated; elsewhere the loss of the mean model is enough."""
    return any(row["loss"] is None and row.get("loss_of_workers") is not None for row in rows)


def _with_repetition(rows: Rows) -> bool:
    return any((row.get("passes") or 0) > 1 for row in rows)


_LOSS = "nats per token"
METRICS = (
    Metric("loss", _LOSS, "Validation loss of the mean model", "val loss", dated=True, live="val"),
    Metric(
        "loss_of_workers",
        _LOSS,
        "Validation loss, mean of the workers' own",
        "val of workers",
        "own",
        curve="own",
        shown=_has_own_losses_only,
        dated=True,
        live="val of workers",
    ),
    Metric("worst_loss", _LOSS, "Validation loss of the worst worker", "worst worker", "own", curve="worst worker"),
    Metric("disagreement", "rms", "Disagreement of the workers (rms)", "disagreement", log=True, live="disagreement"),
    Metric("sent_bytes", "bytes", heading="sent per worker", reduction="own"),
    Metric("passes", "passes", heading="passes over the text", reduction="own", shown=_with_repetition),
)
