"""What failures cost: elastic gossip beside a DiLoCo that restarts everybody, simulated and with real processes that are killed.

    python benchmarks/survival.py                             # all trials that are missing, then the page; Linux
    python benchmarks/survival.py --mtbf 30,10 --seeds 2 --minutes 30

A trial is one run of 8 small workers, each a process, whose machines lose their process by a schedule that the seed draws. Each
trial adds a line to `runs/survival/trials.jsonl`, and those that have a line are not tried again. `docs/results/survival.md` is
written from the lines and from runs in virtual time (`survival_model.py`).
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import tomli_w
from fleet import Fleet, Place, Process
from survival_model import counted, draw_failures
from survival_page import Line, draw, page

from gossamer.record import checkpoint
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import RunConfig, digest, parse

ROOT = Path(__file__).parents[1]
WORKERS, LOCAL_STEPS, START_S = 8, 2, 180.0
STARTS_S = {"elastic": 2.0, "restarting": 8.0}
"""From the start of processes until they train, before the first measurement of a trial."""
ALL_MTBF = (math.inf, 300.0, 100.0, 30.0, 10.0)


class Trial(NamedTuple):
    """One run with failures."""

    system: str
    """elastic or restarting."""
    mtbf: float
    """Mean rounds between two failures of one machine."""
    seed: int


class Machines:
    """The machines of a run, each with one process, or none until it starts another."""

    def __init__(self, trial: Trial, folder: Path, options: argparse.Namespace) -> None:
        self.trial, self.folder, self.fleet = trial, folder, Fleet(folder)
        self.elastic = trial.system == "elastic"
        self.file, self.out, self.places = folder / "run.toml", folder / "run", [Place()] * WORKERS
        raw = document(trial.system, options.round_s)
        self.file.write_text(tomli_w.dumps(raw))
        self.config, self.processes = parse(raw), list[Process]()
        self._restart_s = options.restart_s
        self._started_s = [STARTS_S[trial.system]]
        """From the start of processes until they train."""
        self._fallen: dict[int, tuple[float, float | None]] = {}
        """When machines lost their process, and when they started another; a restarting run falls as machine 0."""
        self.restarts_s, self.unplanned = list[float](), 0

    def start(self) -> None:
        """Starts all processes; a restarting run goes on from its newest checkpoint."""
        more = [] if self.elastic else ["--resume", "auto", "--out", str(self.out)]
        self.processes = self.fleet.start(["train", str(self.file), *more], self.places)

    @property
    def training(self) -> list[Process]:
        """Those that train."""
        return [one for one in self.processes if one.last_mark("train") and one.runs]

    def fail(self, machine: int) -> None:
        """A machine loses its process. A restarting run loses all, as someone ends them at once to start them again."""
        fallen = [machine] if self.elastic else range(WORKERS)
        for number in fallen:
            self.processes[number].kill()
        for number in fallen:
            self.processes[number].process.join(10)
        self._fallen[machine if self.elastic else 0] = (time.time(), None)

    def look(self) -> None:
        """Starts what is due, and notes who trains again."""
        for machine, (fallen_s, started_s) in [*self._fallen.items()]:
            # Machines are given the time that they must take for both systems to restart equally fast.
            if started_s is None and time.time() - fallen_s >= self._restart_s - median(self._started_s):
                self._fallen[machine] = (fallen_s, time.time())
                if self.elastic:
                    self.processes[machine] = self.fleet.join(["train", str(self.file)], self.places[0])
                else:
                    self.start()
            elif started_s is not None and (trains_s := self._trains_s(machine)) is not None:
                self.restarts_s.append(trains_s - fallen_s)
                self._started_s.append(trains_s - started_s)
                del self._fallen[machine]
        for machine, one in enumerate(self.processes):
            if not one.runs and self._fallen.get(machine if self.elastic else 0, (0.0, 0.0))[1] is not None:
                self.unplanned += 1
                self.fail(machine)

    def _trains_s(self, machine: int) -> float | None:
        """Since when all those train that were started."""
        started = [self.processes[machine]] if self.elastic else self.processes
        firsts = [next((mark.time_s for mark in one.marks if mark.what == "train"), None) for one in started]
        return None if None in firsts else max(first for first in firsts if first is not None)


def document(system: str, round_s: float) -> dict[str, Any]:
    """The run file of a system; the restarting one writes a checkpoint after each round, which here costs next to nothing."""
    elastic = system == "elastic"
    return {
        "name": "survival",
        "workers": WORKERS,
        "rule": {"name": "gasloc"} if elastic else {"name": "diloco", "lr": 0.4},
        "topology": {"name": "random" if elastic else "complete"},
        "model": {"hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 32},
        "data": {"source": str(ROOT / "docs" / "adr"), "seq_len": 16, "batch_size": 2},
        "run": {
            "steps": 10_000 * LOCAL_STEPS,
            "local_steps": LOCAL_STEPS,
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 0 if elastic else LOCAL_STEPS,
            "threads": 1,
            "device": "cpu",
            "elastic": elastic,
            "timeout_s": 60.0,
            "pace_s": round_s / LOCAL_STEPS,
        },
        "record": {"tensorboard": False, "export": False},
    }


def attempt(trial: Trial, folder: Path, options: argparse.Namespace) -> Line:
    """Runs a trial for its time and returns its line."""
    lasts_s = options.rounds * options.round_s
    failures = draw_failures(WORKERS, trial.mtbf * options.round_s, lasts_s, f"{trial.mtbf:g} {trial.seed}")
    machines = Machines(trial, folder, options)
    try:
        machines.start()
        _until(lambda: len(machines.training) == WORKERS, time.time() + START_S, lambda: None)
        # Time begins with the first round of all.
        began_s = max(next(m.time_s for m in one.marks if m.what == "train") for one in machines.processes)
        for at_s, machine in failures:
            _until(lambda: False, began_s + at_s, machines.look)
            machines.fail(machine)
        _until(lambda: False, began_s + lasts_s, machines.look)
        useful, by_weight, problem = measured(machines)
    finally:
        machines.fleet.end()
    return {
        **trial._asdict(),
        "mtbf": None if trial.mtbf == math.inf else trial.mtbf,
        "rounds": options.rounds,
        "round_s": options.round_s,
        "useful": useful,
        "by_weight": by_weight,
        "restarts_s": machines.restarts_s,
        "real_round_s": real_round_s(machines.fleet.processes),
        "failures": len(failures),
        "unplanned": machines.unplanned,
        "problem": problem,
    }


def _until(done: Callable[[], bool], end_s: float, look: Callable[[], None]) -> None:
    while not done() and time.time() < end_s:
        look()
        time.sleep(min(0.05, max(0.0, end_s - time.time())))


def measured(machines: Machines) -> tuple[int, float, str]:
    """The rounds of one worker that count at this moment, the same by weight, and what is wrong with the record if anything."""
    training = machines.training
    if machines.trial.system == "restarting":
        rounds = newest_checkpoint(machines.config, machines.out)
        machines.fleet.end()
        return WORKERS * rounds, float(WORKERS * rounds), ""
    alive = {one.marks[-1].slot for one in training}
    machines.fleet.end()
    try:
        found = counted(read_outcomes(machines.out), resolve(machines.config, real=True).in_rounds.topology, alive)
    except Exception as error:  # a trial whose record contradicts itself is told, not lost
        return 0, 0.0, f"{type(error).__name__}: {error}"
    return found.useful, found.by_weight, ""


def newest_checkpoint(config: RunConfig, folder: Path) -> int:
    """The newest round of which all workers have a checkpoint; they write one after each."""
    held = [{*checkpoint.rounds(folder / "checkpoints", i, digest(config))} for i in range(WORKERS)]
    return max(set.intersection(*held), default=0)


def real_round_s(processes: Sequence[Process]) -> float | None:
    """The median time from the start of a round to that of the next; None where nobody got so far."""
    spans: list[float] = []
    for one in processes:
        marks = [mark for mark in one.marks if mark.what == "train"]
        spans += [b.time_s - a.time_s for a, b in pairwise(marks) if b.round == a.round + 1]
    return median(spans) if spans else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--mtbf",
        type=lambda text: [float(x) for x in text.split(",")],
        default=list(ALL_MTBF),
        metavar="A,B",
        help="mean rounds between two failures of a machine; inf for none",
    )
    parser.add_argument(
        "--systems", type=lambda text: text.split(","), default=["elastic", "restarting"], metavar="A,B"
    )
    parser.add_argument("--seeds", type=int, default=1, help="real trials of each kind")
    parser.add_argument("--rounds", type=int, default=40, help="how long a trial is, in rounds without failures")
    parser.add_argument(
        "--round-s", type=float, default=3.0, help="seconds of a round, which a loaded machine must keep"
    )
    parser.add_argument(
        "--restart-s", type=float, default=10.0, help="seconds from a failure until training, or longer"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no trial after so many minutes")
    parser.add_argument("--draws", type=int, default=40, help="simulated runs of each kind")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "survival")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "survival.md")
    parser.add_argument("--note", default="", help="a sentence for the page, such as on what machine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log, began_s = options.out / "trials.jsonl", time.time()
    lines = [json.loads(raw) for raw in log.read_text().splitlines()] if log.exists() else []
    done = {Trial(line["system"], line["mtbf"] or math.inf, line["seed"]) for line in lines}
    trials = [Trial(s, m, i) for i in range(options.seeds) for m in options.mtbf for s in options.systems]
    for trial in trials:
        if trial in done or time.time() - began_s > 60 * options.minutes or (trial.mtbf == math.inf and trial.seed):
            continue
        folder = options.out / f"{trial.system}-{trial.mtbf:g}-{trial.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        lines.append(attempt(trial, folder, options))
        with log.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(json.dumps(lines[-1]), flush=True)
    options.page.write_text(page(lines, draws=options.draws, note=options.note))
    draw(lines, options.page.with_suffix(".svg"), draws=options.draws)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
