"""The page of results and the figure that `survival.py` makes from the lines of its trials and from runs in virtual time."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from survival_model import Failure, Setting, counted, draw_failures, elastic_run, restarting_run

from gossamer.network.estimates.utilisation import plot_curves
from gossamer.report.figures import on_any_ground
from gossamer.topologies import make_topology

Line = Mapping[str, Any]

WORKERS, HORIZON, NOTICED_S, TRIES = 8, 150, 0.5, 8
MTBF = (math.inf, 300.0, 100.0, 30.0, 10.0)
"""Rounds between two failures of a machine."""
CURVE = (5.0, 7.0, 10.0, 14.0, 20.0, 30.0, 50.0, 100.0, 300.0)
INTERVALS = (1, 2, 4)
SYSTEMS = {"elastic": "elastic GASLoC", "restarting": "DiLoCo that restarts"}
NORMAL_90 = 1.645


@cache
def elastic_shares(mtbf: float, restart: float, draws: int) -> tuple[list[float], list[float]]:
    """Goodput of simulated elastic runs, counted and by weight; times in rounds."""
    topology = make_topology("random", WORKERS)
    found = [
        counted(*_with(topology, *elastic_run(_setting(restart), failures, topology)))
        for failures in _drawn(mtbf, draws)
    ]
    most = WORKERS * HORIZON
    return [one.useful / most for one in found], [one.by_weight / most for one in found]


@cache
def restarting_shares(mtbf: float, restart: float, draws: int) -> list[float]:
    """Goodput of simulated restarting runs under the same failures, with the best of a few intervals between checkpoints."""
    drawn = _drawn(mtbf, draws)
    tried = [[restarting_run(_setting(restart), one, every) / HORIZON for one in drawn] for every in INTERVALS]
    return max(tried, key=fmean)


def _setting(restart: float) -> Setting:
    return Setting(1.0, restart, HORIZON, NOTICED_S / 3)


def _drawn(mtbf: float, draws: int) -> list[list[Failure]]:
    """Failures of so many runs; one run where there are none."""
    count = 1 if mtbf == math.inf else draws
    return [draw_failures(WORKERS, mtbf, HORIZON, f"simulated {mtbf:g} {i}") for i in range(count)]


def _with(topology: Any, lives: Any, alive: Any) -> tuple[Any, Any, Any]:
    return lives, topology, alive


def replayed(line: Line, round_s: float) -> float:
    """The simulated goodput of a real trial, from its failures, its restart time and how long its rounds took.

    Who meets whom is drawn several times, as other slots than the real ones are free when a newcomer comes.
    """
    lasts_s = line["rounds"] * line["round_s"]
    failures = draw_failures(WORKERS, line["mtbf"] * line["round_s"], lasts_s, f"{line['mtbf']:g} {line['seed']}")
    restart_s = fmean(line["restarts_s"]) if line["restarts_s"] else lasts_s
    setting = Setting(round_s, restart_s, lasts_s, NOTICED_S)
    most = WORKERS * math.floor(lasts_s / round_s)
    if line["system"] == "restarting":
        return WORKERS * restarting_run(setting, failures) / most
    graphs = [make_topology("random", WORKERS, seed) for seed in range(TRIES)]
    return fmean(counted(*_with(graph, *elastic_run(setting, failures, graph))).useful / most for graph in graphs)


def compared(lines: Sequence[Line]) -> list[tuple[Line, float, float]]:
    """Each trial with failures, its real and its simulated goodput, at the pace that its rounds had."""
    found: list[tuple[Line, float, float]] = []
    for line in lines:
        if line["mtbf"] is None:
            continue
        alike = [one["real_round_s"] for one in lines if one["system"] == line["system"] and one["real_round_s"]]
        round_s = line["real_round_s"] or median(alike)  # none where no round was ever finished
        most = WORKERS * math.floor(line["rounds"] * line["round_s"] / round_s)
        found.append((line, line["useful"] / most, replayed(line, round_s)))
    return found


def mean_apart(found: Sequence[tuple[Line, float, float]]) -> float:
    """The largest difference of means over the trials of a system and rate."""
    cells: dict[tuple[str, float], list[float]] = {}
    for line, real, again in found:
        cells.setdefault((line["system"], line["mtbf"]), []).append(real - again)
    return max((abs(fmean(apart)) for apart in cells.values()), default=math.nan)


def restart_rounds(lines: Sequence[Line]) -> float:
    """The restart time of the simulations, in rounds: the mean of all real restarts, or 3."""
    found = [seconds / line["round_s"] for line in lines for seconds in line["restarts_s"]]
    return fmean(found) if found else 3.0


def falls_to(share: float, restart: float, draws: int) -> tuple[float, float]:
    """At which mean time between failures the restarting one has this goodput, and that of the elastic one there."""
    low, high = 1.0, 1000.0
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fmean(restarting_shares(middle, restart, draws)) > share else (middle, high)
    middle = math.sqrt(low * high)
    return middle, fmean(elastic_shares(middle, restart, draws)[0])


def draw(lines: Sequence[Line], file: Path, *, draws: int) -> None:
    """The figure: simulated curves, and the real trials as dots."""
    restart = restart_rounds(lines)
    points = [
        (fmean(elastic_shares(mtbf, restart, draws)[0]), fmean(restarting_shares(mtbf, restart, draws)))
        for mtbf in CURVE
    ]
    curves = {
        name: [(mtbf, both[k]) for mtbf, both in zip(CURVE, points, strict=True)]
        for k, name in enumerate(SYSTEMS.values())
    }
    marks = {
        name: [(line["mtbf"], real) for line, real, _ in compared(lines) if line["system"] == system]
        for system, name in SYSTEMS.items()
    }
    plot_curves(
        curves, file, x_label="rounds between two failures of a machine", y_label="goodput", unit=1.0, marks=marks
    )
    file.write_bytes(on_any_ground(file.read_bytes()))


def page(lines: Sequence[Line], *, draws: int, note: str = "") -> str:
    """The results file."""
    restart = restart_rounds(lines)
    found = compared(lines)
    apart = max((abs(real - again) for _, real, again in found), default=math.nan)
    trial = lines[0]
    restarts = (0.25, 1.0, restart, 10.0)
    times = [falls_to(0.3, rounds, draws) for rounds in restarts]
    here = times[2]
    return f"""# What failures cost

    python benchmarks/survival.py

Goodput is the share of worker-steps that are in the final mean model, of those in the same time without failures. Each of
{WORKERS} machines fails on its own, after a mean time that is given in rounds; it may also fail while its process starts. Elastic
GASLoC goes on and takes newcomers in (`gossamer train FILE --out RUN --join auto`). The DiLoCo beside it is not elastic: when a
machine fails, all processes are ended at once and started again with `--resume auto`. Both restart in the same time. A checkpoint
costs nothing here, so the best interval is each round.

**At the rate at which the restarting run falls to 30 % ({here[0]:.0f} rounds), the elastic one has {100 * here[1]:.0f} %.**

## Simulated

{draws} runs of {HORIZON} rounds in virtual time for each rate, with a restart of {restart:.1f} rounds, the mean of the real
trials below. Mean and 90 % interval of the mean.

{_curve(restart, draws)}

The worker-steps of one that dies stay in the mean if it has exchanged them. The next column gives each its weight in the final
mean over the weight that it has without failures, at most one: a newcomer brings its donor's steps a second time.

![goodput against the time between failures]({"survival.svg"})

Curves are simulated, dots are real trials.

## Real

Processes on one machine, a tiny model, rounds paced to {trial["round_s"]:g} s (`run.pace_s`), {trial["rounds"]} rounds' time for
each trial; machines lose their process by `kill -9` as the seed draws it. The worker-steps are counted from the log of outcomes,
and those of the restarting run from its newest checkpoint. A machine stands still for a while before it starts another process,
so that both systems take the same time from a failure to training.
{note}
The simulation of each trial has its failures and the mean of its own restarts. **Simulated and real differ by at most
{100 * apart:.1f} points in a trial, and {100 * mean_apart(found):.1f} in the mean of the trials of a system and rate.** One round
is {100 / trial["rounds"]:.1f} points of a restarting run.

{_real(found)}

## Other restart times

What the restarting run loses to a failure all {WORKERS} machines lose; of the elastic one it is one machine, for the time of a
restart and about one round: the half that it did not finish, and the half until the next begins.

{_others(restarts, times)}

With T the restart, F the time between two failures of a machine and n machines, a restarting run trains for e^(-nT/F) of the
time, and an elastic machine for e^(-T/F). So where restarts are all that costs, the elastic run has 0.3^(1/n) when the
restarting one has 30 %: {100 * 0.3 ** (1 / WORKERS):.0f} % with {WORKERS} machines, {100 * 0.3 ** (1 / 16):.0f} % with 16.
About a round is lost besides with each failure. Checkpoints that cost time would make the restarting run fall at lower rates.
"""


def _curve(restart: float, draws: int) -> str:
    rows = [
        "| rounds between two failures of a machine | elastic GASLoC | by weight | DiLoCo that restarts |",
        "|---:|---:|---:|---:|",
    ]
    for mtbf in MTBF:
        both = (*elastic_shares(mtbf, restart, draws), restarting_shares(mtbf, restart, draws))
        cells = [_percent(values) for values in both]
        rows.append(f"| {'∞' if mtbf == math.inf else f'{mtbf:g}'} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _percent(values: Sequence[float]) -> str:
    half = NORMAL_90 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{100 * fmean(values):.1f} % ± {100 * half:.1f}"


def _real(found: Sequence[tuple[Line, float, float]]) -> str:
    rows = [
        "| system | rounds between failures | trial | failures | restart, mean | real | simulated | by weight |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line, real, again in sorted(found, key=lambda one: (one[0]["system"], -one[0]["mtbf"], one[0]["seed"])):
        restart = f"{fmean(line['restarts_s']):.1f} s" if line["restarts_s"] else "none"
        rows.append(
            f"| {SYSTEMS[line['system']]} | {line['mtbf']:g} | {line['seed'] + 1} | {line['failures']} | {restart} | "
            f"{100 * real:.1f} % | {100 * again:.1f} % | {100 * line['by_weight'] * real / max(1, line['useful']):.1f} % |"
        )
    return "\n".join(rows)


def _others(restarts: Sequence[float], times: Sequence[tuple[float, float]]) -> str:
    rows = ["| restart, in rounds | the restarting one has 30 % at | the elastic one there |", "|---:|---:|---:|"]
    rows += [
        f"| {restart:.2g} | {mtbf:.0f} rounds | {100 * share:.0f} % |"
        for restart, (mtbf, share) in zip(restarts, times, strict=True)
    ]
    return "\n".join(rows)
