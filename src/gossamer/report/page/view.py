"""A followed run as plain values for a page: thinned curves, standings, seconds and events."""

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError
from gossamer.network.links import Network, links_of
from gossamer.record.lineage import described
from gossamer.report.reading.follow import FollowedRun, figure_of
from gossamer.report.reading.paces import is_silent
from gossamer.report.reading.thinning import spread_out, thinned

MEASURED = ""
"""In place of a network's name: measured seconds."""
_MOST_POINTS = 300
"""Of a curve."""
_MOST_CELLS = 12_000
"""Losses by worker and round of one run."""
_MOST_WAITS = 12
_STRAGGLES = 1.3
"""A worker whose computing takes this many times the median's is reported."""
_NOT_FIGURES = ("round", "branch", "step", "tokens", "time_s")


def run_view(run: FollowedRun, now_s: float, priced: Mapping[str, NDArray[np.float64]] | None = None) -> dict[str, Any]:
    """The view of a run for a page.

    Args:
        now_s: Unix time, from which ages are counted.
        priced: the end of each round by name of network, `[rounds]`, for a run without recorded seconds.
    """
    file = run.file
    head: dict[str, Any] = {"label": run.label, "complaints": [*run.complaints], "progress": round(run.progress, 3)}
    if file is None:
        return {**head, "name": run.label, "empty": True}
    axes = _Axes(run, priced or {})
    words = standings(run, now_s)
    losses, evals, own_losses = run.losses.values(), _evals(run, axes), _mean_of_own_losses(run, axes)
    return {
        **head,
        "empty": False,
        "name": file.name,
        "folder": str(run.folder.resolve()),
        "method": file.method,
        "topology": file.topology,
        "kind": file.kind,
        "simulated": run.is_simulated,
        "workers": file.workers,
        "rounds": file.rounds,
        "done": run.done,
        "state": _state(run, words),
        "age_s": max(0.0, round(now_s - run.modified_s, 1)) if run.modified_s else None,
        "standings": words,
        "rounds_of": run.rounds_of,
        "last_losses": [_rounded(_last(losses[:, worker])) for worker in range(file.workers)],
        "networks": {name: _placed(network, file.workers) for name, network in file.networks.items()},
        "evals": evals if evals["y"] else own_losses,
        "own": own_losses,
        "training": _training(run, axes),
        "by_worker": _by_worker(run, losses),
        "spent": _spent_seconds(run),
        "sent_bytes": axes.sent_bytes,
        "ends_s": {name: float(end_s[-1]) for name, (_, end_s) in axes.clocks.items() if len(end_s)},
        "tokens_per_s": axes.tokens_per_s(),
        "happenings": _happenings(run)[-60:],
        "events": run.events,
        **run.more(),
    }


class _Axes:
    """The cumulative costs of a run after each of its rounds."""

    def __init__(self, run: FollowedRun, priced: Mapping[str, NDArray[np.float64]]) -> None:
        assert run.file is not None
        self._parts = run.parts
        sums = np.nansum(run.sent.values(), axis=1) if run.sent.rows else np.zeros(0)
        self._entries, self._sent = run.sent.rounds(), sums.cumsum() / run.here
        self.sent_bytes = float(self._sent[-1]) if len(self._sent) else None
        self._steps, self._tokens = _largest_by_round(run.steps.rounds(), run.steps.values()), _tokens(run)
        ends_s = {name: _largest_by_round(grid.rounds(), grid.values()) for name, grid in run.clock.items()}
        self.clocks = {name or MEASURED: end_s for name, end_s in ends_s.items()}
        for name, end_s in priced.items():
            if name not in self.clocks:
                self.clocks[name] = np.arange(len(end_s)), end_s

    def at(self, rounds: Sequence[int], lines: Sequence[Mapping[str, Any]] = ()) -> dict[str, list[Any]]:
        """The positions of these rounds on each axis; lines of an evaluation contain steps, tokens and seconds."""
        known: dict[str, list[Any]] = {"round": [r + 1 for r in rounds]}
        for key, curve in (("step", self._steps), ("tokens", self._tokens)):
            if lines and all(isinstance(line.get(key), int | float) for line in lines):
                known[key] = [line[key] for line in lines]
            elif len(curve[0]):
                known[key] = [_rounded(value) for value in _cumulative_at(rounds, *curve)]
        if len(self._entries):
            known["bytes"] = [
                _rounded(x)
                for x in _cumulative_at([(r + 1) * self._parts - 1 for r in rounds], self._entries, self._sent)
            ]
        for name, curve in self.clocks.items():
            known[f"time:{name}"] = [_rounded(x) for x in _cumulative_at(rounds, *curve)]
        return known

    def tokens_per_s(self) -> dict[str, float]:
        """Tokens of all workers a second, on each clock."""
        (rounds, tokens) = self._tokens
        rates = {}
        for name, (_, end_s) in self.clocks.items():
            if len(end_s) and end_s[-1] > 0 and len(rounds):
                rates[name] = float(_cumulative_at([int(rounds[-1])], rounds, tokens)[0] / end_s[-1])
        return rates


def _largest_by_round(
    rounds: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The largest value of any worker in each round; rounds without any are left out."""
    known = np.isfinite(values).any(axis=1)
    most = np.where(np.isfinite(values), values, -np.inf)[known].max(axis=1) if known.any() else np.zeros(0)
    return rounds[known], most


def _tokens(run: FollowedRun) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens of all workers by round: those without lines here count as the others do, and a dead one as far as it came."""
    rounds, values = run.tokens.rounds(), run.tokens.values()
    so_far = np.maximum.accumulate(np.nan_to_num(values), axis=0)
    return rounds, so_far.sum(axis=1) * (values.shape[1] / run.here)


def _cumulative_at(rounds: Sequence[int], at: NDArray[np.int64], values: NDArray[np.float64]) -> list[float]:
    """A cumulative figure after these rounds: zero before the first, and unknown after the last recorded one."""
    if not len(at):
        return [math.nan] * len(rounds)
    interpolated = np.interp(np.array(rounds, float), np.concatenate([[-1], at]), np.concatenate([[0.0], values]))
    last = at[-1]
    return [math.nan if r > last else float(x) for r, x in zip(rounds, interpolated, strict=True)]


def _evals(run: FollowedRun, axes: _Axes) -> dict[str, Any]:
    """The validations of the mean model."""
    lines = run.evaluations.lines()
    names = dict.fromkeys(key for line in lines for key, value in line.items() if _is_figure(key, value))
    figures = {key: [figure_of(line.get(key)) for line in lines] for key in names}
    return _curves(figures, [line["round"] for line in lines], axes, lines)


def _mean_of_own_losses(run: FollowedRun, axes: _Axes) -> dict[str, Any]:
    """The mean of the validations of a real run's workers, each on its own parameters."""
    losses = dict(run.own_losses())
    return _curves({"own": [*losses.values()]} if losses else {}, [*losses], axes)


def _curves(
    figures: Mapping[str, Sequence[float]], rounds: Sequence[int], axes: _Axes, lines: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    kept = thinned(next(iter(figures.values())), _MOST_POINTS) if figures else []
    at = axes.at([rounds[k] for k in kept], [lines[k] for k in kept] if lines else ())
    return {"x": at, "y": {key: [_rounded(values[k]) for k in kept] for key, values in figures.items()}}


def _is_figure(key: str, value: object) -> bool:
    return key not in _NOT_FIGURES and (value is None or not math.isnan(figure_of(value)))


def _training(run: FollowedRun, axes: _Axes) -> dict[str, Any]:
    """The mean training loss of the workers."""
    means = {round: run.losses.mean_at(round) for round in run.losses.rounds().tolist()}
    known = {round: loss for round, loss in means.items() if math.isfinite(loss)}
    return _curves({"loss": [*known.values()]}, [*known], axes)


def _by_worker(run: FollowedRun, losses: NDArray[np.float64]) -> dict[str, Any]:
    """The training loss of each worker."""
    count, workers = losses.shape if len(losses) else (0, run.losses.columns)
    kept = spread_out(count, max(8, min(_MOST_POINTS, _MOST_CELLS // workers)))
    rounds = run.losses.rounds()
    rows = [[_rounded(float(losses[k, worker])) for k in kept] for worker in range(workers)]
    return {"round": [int(rounds[k]) + 1 for k in kept], "losses": rows}


def _spent_seconds(run: FollowedRun) -> dict[str, Any]:
    """By clock the seconds of each worker, and the longest waits of a worker for a peer."""
    spent = {}
    for name, seconds in run.spent_s.items():
        waits = heapq.nlargest(_MOST_WAITS, run.waits_s[name].items(), key=itemgetter(1))
        spent[name or MEASURED] = {
            "kinds": [[_rounded(float(x)) for x in row] for row in seconds],
            "waits": [[i, j, _rounded(s)] for (i, j), s in waits],
        }
    return spent


def _happenings(run: FollowedRun) -> list[tuple[int, str]]:
    """Events, and workers that compute much longer than the others."""
    happenings = list(run.happenings)
    happenings += [(one["round"], f"settings changed {described(one)}") for one in run.branches]
    for name, seconds in run.spent_s.items():
        compute_s = [float(row[0]) for row in seconds if row[0] > 0]
        usual, where = statistics.median(compute_s) if len(compute_s) > 2 else math.inf, f" on {name}" if name else ""
        happenings += [
            (max(0, run.done - 1), f"worker {worker} computes {row[0] / usual:.1f} times as long as the median{where}")
            for worker, row in enumerate(seconds)
            if row[0] > _STRAGGLES * usual
        ]
    return sorted(happenings, key=lambda one: one[0])


def standings(run: FollowedRun, now_s: float) -> list[str]:
    """The standing of each worker from its files, in one word.

    training: its files grow. silent: they have not for 10 s, or five of its rounds if that is longer. gone: the others
    continue without it. left: it was stopped on request. finished: it, or the run, has completed all rounds. empty: it
    has no line.
    """
    assert run.file is not None
    if (known := run.standings()) is not None:
        return known
    everyone, over, words = run.is_simulated, _is_scored(run), list[str]()
    for worker in range(run.file.workers):
        rounds = run.rounds_of[worker]
        files = [tail for name, tail in run.tails.items() if everyone or name.partition("-")[2] == f"{worker:03}.jsonl"]
        age_s = now_s - max((tail.modified_s for tail in files), default=0.0)
        alive_round, alive = run.alive
        if run.ended.get(worker) == "finished" or rounds >= run.file.rounds:
            words.append("finished")
        elif worker in run.ended:
            words.append(run.ended[worker])
        elif not rounds and not files:
            words.append("empty")
        elif alive is not None and worker not in alive and rounds <= alive_round:
            words.append("gone")
        elif over:  # in asynchronous runs, slow workers have fewer rounds
            words.append("finished")
        else:
            words.append("silent" if is_silent(age_s, _round_s(run)) else "training")
    return words


def _round_s(run: FollowedRun) -> float:
    """The seconds of a round, by the measured clock; 0 if unknown."""
    grid = run.clock.get(None)
    if grid is None or not grid.rows:
        return 0.0
    rounds, end_s = _largest_by_round(grid.rounds(), grid.values())
    return float(end_s[-1]) / (int(rounds[-1]) + 1) if len(rounds) else 0.0


def _state(run: FollowedRun, words: Sequence[str]) -> str:
    if _is_scored(run) or ("finished" in words and "training" not in words):
        return "finished"
    return next((word for word in ("training", "held") if word in words), "silent" if run.done else "starting")


def _is_scored(run: FollowedRun) -> bool:
    """Whether there is a validation after the last round."""
    return run.file is not None and any(line["round"] + 1 >= run.file.rounds for line in run.evaluations.lines()[-1:])


def _placed(network: Network, workers: int) -> dict[str, Any] | None:
    """The sites and link speeds of workers; None for a network of another number of workers."""
    try:
        links = links_of(network, workers)
    except ConfigError:
        return None
    return {
        "sites": [*network.sites],
        "site": links.site.tolist() if network.sites else [0] * workers,
        "uplink_bps": [_rounded(x) for x in links.uplink_bps.tolist()],
        "downlink_bps": [_rounded(x) for x in links.downlink_bps.tolist()],
    }


def _last(values: NDArray[np.float64]) -> float:
    known = np.flatnonzero(np.isfinite(values))
    return float(values[known[-1]]) if len(known) else math.nan


def _rounded(value: float) -> float | None:
    """Six digits, which is more than a screen shows; None for what is not finite.

    >>> _rounded(1234567.891), _rounded(0.123456789), _rounded(math.inf)
    (1234570.0, 0.123457, None)
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None
