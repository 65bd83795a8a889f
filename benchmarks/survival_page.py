"""The page of results and the figure that `survival.py` makes from the lines of its trials and from runs in virtual time."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from survival_model import Setting, counted, draw_failures, elastic_run, restarting_run

from gossamer.network.utilisation import plot_curves
from gossamer.topologies import make_topology

__all__ = ["Line", "draw", "page"]

Line = Mapping[str, Any]

WORKERS, HORIZON, NOTICED_S = 8, 150, 0.5
MTBF = (math.inf, 300.0, 100.0, 30.0, 10.0)
"""Rounds between two failures of a machine."""
CURVE = (5.0, 7.0, 10.0, 14.0, 20.0, 30.0, 50.0, 100.0, 300.0)
INTERVALS = (1, 2, 4)
SYSTEMS = {"elastic": "elastic GASLoC", "restarting": "DiLoCo that restarts"}
NORMAL_90 = 1.645


class Shares(NamedTuple):
    """Goodput of simulated runs, in shares of the time without failures."""

    elastic: list[float]
    by_weight: list[float]
    restarting: list[float]
    every: int
    """Rounds between two checkpoints that are best for the restarting one."""


@cache
def simulated(mtbf: float, restart: float, draws: int) -> Shares:
    """Both systems under the same failures; times in rounds."""
    setting, topology = Setting(1.0, restart, HORIZON, NOTICED_S / 3), make_topology("random", WORKERS)
    elastic, by_weight = list[float](), list[float]()
    restarting: dict[int, list[float]] = {every: [] for every in INTERVALS}
    for i in range(1 if mtbf == math.inf else draws):
        failures = draw_failures(WORKERS, mtbf, HORIZON, f"simulated {mtbf:g} {i}")
        found = counted(*_with(topology, *elastic_run(setting, failures, topology)))
        elastic.append(found.useful / WORKERS / HORIZON)
        by_weight.append(found.by_weight / WORKERS / HORIZON)
        for every, shares in restarting.items():
            shares.append(restarting_run(setting, failures, every) / HORIZON)
    best = max(INTERVALS, key=lambda every: fmean(restarting[every]))
    return Shares(elastic, by_weight, restarting[best], best)


def _with(topology: Any, lives: Any, alive: Any) -> tuple[Any, Any, Any]:
    return lives, topology, alive


def replayed(line: Line, calm: Line) -> float:
    """The simulated goodput of a real trial: its failures, its restart time, and the rounds of the calm trial."""
    lasts_s = line["rounds"] * line["round_s"]
    mtbf = line["mtbf"] or math.inf
    failures = draw_failures(WORKERS, mtbf * line["round_s"], lasts_s, f"{mtbf:g} {line['seed']}")
    restart_s = median(line["restarts_s"]) if line["restarts_s"] else 0.0
    setting = Setting(calm["real_round_s"], restart_s, lasts_s, NOTICED_S)
    if line["system"] == "restarting":
        useful = WORKERS * restarting_run(setting, failures)
    else:
        topology = make_topology("random", WORKERS)
        useful = counted(*_with(topology, *elastic_run(setting, failures, topology))).useful
    return useful / calm["useful"]


def calm_of(lines: Sequence[Line], line: Line) -> Line | None:
    """The trial of the same system in which nothing failed."""
    alike = [one for one in lines if one["mtbf"] is None]
    same = ("system", "rounds", "round_s")
    return next((one for one in alike if all(one[key] == line[key] for key in same)), None)


def compared(lines: Sequence[Line]) -> list[tuple[Line, float, float]]:
    """Each trial with failures, its real and its simulated goodput."""
    pairs = [(line, calm_of(lines, line)) for line in lines if line["mtbf"] is not None]
    return [(line, line["useful"] / calm["useful"], replayed(line, calm)) for line, calm in pairs if calm is not None]


def restart_rounds(lines: Sequence[Line]) -> float:
    """The restart time of the simulations, in rounds: the median over all real restarts, or 3."""
    found = [seconds / line["round_s"] for line in lines for seconds in line["restarts_s"]]
    return median(found) if found else 3.0


def falls_to(share: float, restart: float, draws: int) -> tuple[float, float]:
    """At which mean time between failures the restarting one has this goodput, and that of the elastic one there."""
    low, high = 1.0, 1000.0
    for _ in range(7):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fmean(simulated(middle, restart, draws).restarting) > share else (middle, high)
    middle = math.sqrt(low * high)
    return middle, fmean(simulated(middle, restart, draws).elastic)


def draw(lines: Sequence[Line], file: Path, *, draws: int) -> None:
    """The figure: simulated curves, and the real trials as dots."""
    restart = restart_rounds(lines)
    read: dict[str, Callable[[Shares], list[float]]] = {
        "elastic": lambda s: s.elastic,
        "restarting": lambda s: s.restarting,
    }
    curves = {
        name: [(mtbf, fmean(read[system](simulated(mtbf, restart, draws)))) for mtbf in CURVE]
        for system, name in SYSTEMS.items()
    }
    marks = {
        name: [(line["mtbf"], real) for line, real, _ in compared(lines) if line["system"] == system]
        for system, name in SYSTEMS.items()
    }
    plot_curves(
        curves, file, x_label="rounds between two failures of a machine", y_label="goodput", unit=1.0, marks=marks
    )  # fmt: skip


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

{draws} runs of {HORIZON} rounds in virtual time for each rate, with a restart of {restart:.1f} rounds, the median of the real
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
The simulation of each trial has its failures and the median of its own restarts. **Simulated and real differ by at most
{100 * apart:.1f} points.**

{_real(found)}

## Other restart times

What the restarting run loses to a failure all {WORKERS} machines lose; of the elastic one it is one machine, for the time of a
restart and about one round: the half that it did not finish, and the half until the next begins.

{_others(restarts, times)}

With T the restart, F the time between two failures of a machine and n machines, the restarting run has at most e^(-nT/F), as
nobody may fail in a restart, and an elastic one e^(-T/F). Where the first is 30 %, the second is at most
0.3^(1/{WORKERS}) = {100 * 0.3 ** (1 / WORKERS):.0f} %, however good it is, as long as checkpoints are free; with 16 machines it
is {100 * 0.3 ** (1 / 16):.0f} %.
"""


def _curve(restart: float, draws: int) -> str:
    rows = [
        "| rounds between two failures of a machine | elastic GASLoC | by weight | DiLoCo that restarts |",
        "|---:|---:|---:|---:|",
    ]  # fmt: skip
    for mtbf in MTBF:
        found = simulated(mtbf, restart, draws)
        cells = [_percent(values) for values in (found.elastic, found.by_weight, found.restarting)]
        rows.append(f"| {'∞' if mtbf == math.inf else f'{mtbf:g}'} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _percent(values: Sequence[float]) -> str:
    half = NORMAL_90 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{100 * fmean(values):.1f} % ± {100 * half:.1f}"


def _real(found: Sequence[tuple[Line, float, float]]) -> str:
    rows = [
        "| system | rounds between failures | trial | failures | restart, median | real | simulated | by weight |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line, real, again in sorted(found, key=lambda one: (one[0]["system"], -one[0]["mtbf"], one[0]["seed"])):
        restart = f"{median(line['restarts_s']):.1f} s" if line["restarts_s"] else "none"
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
