"""Runs for a report: the data in each folder, priced on any number of networks."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.data.settings import passes_over
from gossamer.errors import DataError
from gossamer.network.inner_steps import inner_steps
from gossamer.network.links import Network
from gossamer.network.pricing import price
from gossamer.network.timeline import Timeline
from gossamer.record.folder import ended_diverged, newest_evaluation, read_metrics, recoveries
from gossamer.record.inputs import TEXT_FILE, read_text_record
from gossamer.record.lineage import changed_stages, described, read_branches
from gossamer.record.logs.events import EventTotals, read_events
from gossamer.record.logs.pipeline_work import has_stages, read_pipeline
from gossamer.record.logs.trace import Trace, has_trace, read_trace
from gossamer.report.metrics import METRICS
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.lines import networks_in
from gossamer.settings.schema import parse_toml

log = logging.getLogger("gossamer")


def prices_of(run_folder: Path, run_toml: str, trace: Trace, networks: Mapping[str, Network]) -> dict[str, Timeline]:
    """The timelines of a run in rounds, by name of network; empty for a run in stages without a record of their work.

    Args: `run_toml` is the text of its run file.
    Raises: DataError for a spoilt record, ConfigError for a network of other workers or stages.
    """
    work = read_pipeline(run_folder)
    if networks and work is None and has_stages(run_toml):
        log.warning(
            "'%s' is a run in stages without pipeline.json, which an earlier version did not write, so its time on a network is "
            "not shown; gossamer price says it",
            run_folder,
        )
        return {}
    steps = {name: inner_steps(network, work, trace.workers) for name, network in networks.items()}
    return {name: price(trace, one.network, one.computing) for name, one in steps.items()}


def ends_of(timelines: Mapping[str, Timeline], parts: int) -> dict[str, NDArray[np.float64]]:
    """The end of each round on each network, for a run with `parts` trace entries per round."""
    return {name: one.end_s.max(axis=1)[parts - 1 :: parts] for name, one in timelines.items()}


class RunData(NamedTuple):
    """The contents of one run folder."""

    followed: FollowedRun
    """The same in the form for pages, as far as read; its `look` reads the remaining files."""
    evals: list[dict[str, Any]]
    """Evaluations of the mean model, one a round, by round; that of the initial values has round -1."""
    newest: Mapping[str, Any] | None
    """The evaluation that represents the run: the newest, if the settings have not changed since."""
    rounds: int
    """Recorded rounds."""
    sent_bytes: float | None
    """Mean over the workers; None where nothing was recorded."""
    timelines: dict[str, Timeline]
    """By name of network."""
    config: str | None
    sample: str | None
    networks: Mapping[str, Network]
    """The networks on which it is priced."""
    branches: tuple[str, ...] = ()
    """Its changes of settings, and its stages that were lost, in words."""
    sent_until: tuple[float, ...] = ()
    """Bytes sent up to the end of each round, mean over the workers; empty for an asynchronous run."""
    ends_s: Mapping[str, NDArray[np.float64]] = {}
    """When each round ended on each network that the run was priced on."""
    passes: float | None = None
    """Passes over its text; None for a stream, and where the amount of text was not recorded."""
    own: Mapping[int, tuple[float, ...]] = {}
    """By round the validation losses of a real run's workers, each of its own model, since the last change of settings."""
    diverged: bool = False
    """Whether it ended as a number was not finite."""
    changed_stages: str = ""
    """The changes of its stages, where all of its rounds are priced with the last ones."""


def read_runs(runs: Mapping[str, Path], networks: Mapping[str, Network] | None) -> list[RunData]:
    """The runs by label, with the time that each takes on each network; None prices each on those of its own run file.

    Raises: DataError for a folder that is missing or unreadable, ConfigError for a network of other workers.
    """
    return [_read_run(label, Path(folder), networks) for label, folder in runs.items()]


def _read_run(label: str, folder: Path, networks: Mapping[str, Network] | None) -> RunData:
    if not folder.is_dir():
        raise DataError(
            f"run '{label}' should be in {folder}, which is not a folder; give the folder of a finished or running run"
        )
    followed = FollowedRun(label, folder)
    followed.begin()
    metrics, branches = read_metrics(folder, seen=followed.take), read_branches(folder)
    evals = {line["round"]: line for line in metrics if line["kind"] == "eval" and "worker" not in line}
    config = _read_text(folder / "run.toml")
    if networks is None:
        networks = {} if config is None else networks_in(parse_toml(config, f"'{folder / 'run.toml'}'"))
    run = RunData(
        followed,
        list(evals.values()),
        newest_evaluation(metrics, branches),
        # A worker that waits for no other may train its last steps in an earlier round than the one that it ends.
        1 + max((line["round"] for line in metrics if line["kind"] in ("train", "validation", "eval")), default=-1),
        None,
        {},
        config,
        _read_text(folder / "sample.txt"),
        networks,
        (*map(described, branches), *(f"before round {r + 1}: {words}" for r, words in recoveries(metrics))),
        passes=None if config is None else _passes(folder, config, metrics),
        own=_own_losses(metrics, since=max((branch["round"] for branch in branches), default=0)),
        diverged=ended_diverged(metrics),
    )
    return _with_costs(run, folder)


def _with_costs(run: RunData, folder: Path) -> RunData:
    """The run with its bytes and seconds: by its events if it is asynchronous, else by its trace."""
    if (events := read_events(folder, seen=run.followed.take)) is not None:
        timelines = {events.network: _recorded_timeline(events)} if len(events.end_s) else {}
        sent_bytes = float(events.sent_bytes.mean())
        return run._replace(sent_bytes=sent_bytes, timelines=timelines, ends_s=ends_of(timelines, 1))
    if not has_trace(folder) or not (trace := read_trace(folder, seen=run.followed.take)).rounds:  # it has just begun
        return run
    per_round = max(1, round(trace.rounds / (run.rounds or trace.rounds)))
    sent_until = (trace.round_bytes.cumsum() / trace.workers).tolist()[per_round - 1 :: per_round]
    # A single worker does not send.
    timelines = prices_of(folder, run.config or "", trace, run.networks) if trace.workers > 1 else {}
    changed = changed_stages(run.followed.branches) if timelines else ""
    return run._replace(
        sent_bytes=float(trace.sent_bytes.mean()),
        timelines=timelines,
        sent_until=tuple(sent_until),
        ends_s=ends_of(timelines, per_round),
        changed_stages=changed,
    )


def _own_losses(metrics: Iterable[Mapping[str, Any]], since: int) -> dict[int, tuple[float, ...]]:
    """By round the validation losses of workers from a round on."""
    losses = dict[int, tuple[float, ...]]()
    for line in metrics:
        if line["kind"] == "validation" and line["round"] >= since:
            losses[line["round"]] = (*losses.get(line["round"], ()), _or_nan(line.get("loss")))
    return losses


def _passes(folder: Path, config: str, metrics: Iterable[Mapping[str, Any]]) -> float | None:
    """The passes over the text so far."""
    text = read_text_record(folder)
    if text is None or text.train_tokens is None:
        return None
    document = parse_toml(config, f"'{folder / 'run.toml'}'")
    data, workers = document.get("data", {}), document.get("workers")
    if not isinstance(data, Mapping) or not isinstance(workers, int):
        return None
    trained = dict.fromkeys(range(workers), 0.0)
    for line in metrics:
        if line["kind"] == "train" and (worker := line.get("worker")) in trained:
            trained[worker] = max(trained[worker], line.get("tokens", 0))
    try:
        return passes_over(data.get("shards"), text.train_tokens, [*trained.values()])
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(
            f"'{folder / TEXT_FILE}' is of another text than the run file ({error}); restore it, or remove it"
        ) from None


def _recorded_timeline(events: EventTotals) -> Timeline:
    """The timeline of an asynchronous run, whose seconds are part of its result."""
    end_s = np.broadcast_to(events.end_s[:, None], events.compute_s.shape)
    spent_s = np.diff(end_s, axis=0, prepend=0.0)
    return Timeline(events.compute_s, spent_s - events.compute_s, np.zeros(end_s.shape, np.int32), end_s)


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def figure_in(line: Mapping[Any, Any], key: Any) -> float | None:
    """A figure of a line of metrics, or of a view: None where it is missing, NaN where it was not finite."""
    return _or_nan(line[key]) if key in line else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def summary_row(run: RunData) -> dict[str, Any]:
    """The run's row of `gossamer.report.table.summary_rows`."""
    run = run._replace(evals=[line for line in run.evals if line["round"] >= 0])
    last: Mapping[str, Any] = run.newest or {"round": max(run.own, default=-1)}
    worst = [*map(_or_nan, last.get("worker_losses", []))]
    worker_losses = worst or run.own.get(last["round"], ())
    row = {
        "method": run.followed.label,
        "loss": figure_in(last, "loss"),
        "loss_of_workers": math.fsum(worker_losses) / len(worker_losses) if worker_losses else None,
        "round": last["round"] + 1 if last["round"] >= 0 else None,
        "rounds": run.rounds,
        "passes": run.passes,
        # max() would drop a NaN among finite losses.
        "worst_loss": math.nan if any(map(math.isnan, worst)) else max(worst, default=None),
        **{one.name: figure_in(last, one.name) for one in METRICS if one.reduction == "newest"},
        "sent_bytes": run.sent_bytes,
        "wall_s": {name: timeline.total_s for name, timeline in run.timelines.items()},
        "utilisation": {name: timeline.mean_utilisation for name, timeline in run.timelines.items()},
        "changed_stages": run.changed_stages or None,
        "loss_at_s": {name: _losses_after(run, end_s.tolist()) for name, end_s in run.ends_s.items()},
        "loss_at_round": _without_gaps((e["round"] + 1, figure_in(e, "loss")) for e in run.evals),
        "loss_at_bytes": _losses_after(run, run.sent_until),
    }
    return diverged_row(row) if run.diverged else row


def diverged_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a run that ended without a finite loss, as if it had been validated where it ended: an earlier loss is not its
    result.
    """
    ends_at = {"loss_at_round": row["rounds"], "loss_at_bytes": row["sent_bytes"]}
    curves = {key: _until_lost(row[key], at) for key, at in ends_at.items()}
    on = {name: _until_lost(curve, row["wall_s"].get(name)) for name, curve in row["loss_at_s"].items()}
    lost = dict.fromkeys(("loss", "loss_of_workers", "worst_loss"), math.nan)
    return {**row, **lost, "round": row["rounds"], **curves, "loss_at_s": on}


def _until_lost(curve: Sequence[tuple[float, float]], at: float | None) -> list[tuple[float, float]]:
    return [*curve, *([(at, math.nan)] if at is not None and (not curve or at > curve[-1][0]) else [])]


def _losses_after(run: RunData, spent: Sequence[float]) -> list[tuple[float, float]]:
    """Validation loss against the cost up to the end of each round."""
    until = [0.0, *spent]
    priced = [one for one in run.evals if -1 <= one["round"] < len(spent)]
    return _without_gaps((until[one["round"] + 1], figure_in(one, "loss")) for one in priced)


def _without_gaps(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The points that have both coordinates; NaN leaves a gap."""
    return [(x, y) for x, y in points if y is not None]
