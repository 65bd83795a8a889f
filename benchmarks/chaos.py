"""Real workers that are killed, stopped, cut off and left without a disk, while an elastic run goes on.

    python benchmarks/chaos.py                                  # all trials that are missing; Linux; partitions as root
    python benchmarks/chaos.py --kinds kill,leader --seeds 2 --minutes 10

A trial is one run of 4 or 8 small workers, each a process, with faults that its seed draws. Each trial adds a line to
`runs/chaos/trials.jsonl`, and those that have a line are not tried again. `docs/results/chaos.md` is written from the lines.
What is checked of each trial stands in `verdict.py` and on the page.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from chaos_page import page
from fleet import Fleet, Network, Place, Process, network, sh
from verdict import Fault, Seen, final_hashes, joins, pauses, problems

from gossamer.record import checkpoint
from gossamer.record.origin import origin
from gossamer.run.config.run_file import digest, parse
from gossamer.run.simulated.simulate import simulate

ROOT = Path(__file__).parents[1]
TIMEOUT_S, ROUNDS, LOCAL_STEPS, PACE_S = 4.0, 80, 2, 0.1
GRACE_S = 10.0
"""How long a process may outlive its deadline: a timeout after its last sign of work."""
START_S = 120.0
"""How long a process may take to start; this machine may be busy."""
STOPS = 10
"""How often a run of the kind `stop` is stopped."""
METHODS = {
    "gossip": ({"name": "gasloc"}, {"name": "random"}),
    "mean": ({"name": "diloco", "lr": 0.4}, {"name": "complete"}),
}


class Hang(Exception):
    """A process that has done nothing for longer than it may."""


class Trial(NamedTuple):
    """One run with faults."""

    kind: str
    method: str
    workers: int
    seed: int


class Running:
    """A trial while it runs."""

    def __init__(self, trial: Trial, folder: Path, places: Sequence[Place], fleet: Fleet) -> None:
        self.trial, self.fleet, self.folder = trial, fleet, folder
        self.rng = random.Random(repr(trial))
        self.places, self.faults = list(places), list[Fault]()
        self.file, self.out = folder / "run.toml", folder / "run"
        self.values: dict[str, Any] = {}
        """What a kind of trial measures besides."""
        self.document = document(trial)
        self.file.write_text(tomli_w.dumps(self.document))
        self.config = parse(self.document)

    def start(self) -> None:
        """Starts all workers, and waits until they train."""
        self.fleet.start(["train", str(self.file)], self.places)
        self.until(lambda: all(one.last_mark("train") for one in self.fleet.processes), START_S)

    def resume(self) -> None:
        """Starts all workers again, to go on from their checkpoints."""
        for one in self.fleet.start(["train", "--resume", str(self.out)], self.places):
            one.resumes = True

    def until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Waits; returns whether it came in time."""
        end_s = time.time() + limit_s
        while not (came := done()) and time.time() < end_s:
            time.sleep(0.02)
        return came

    @property
    def round(self) -> int:
        """The newest round that a worker is in."""
        return max((mark.round for one in self.fleet.living if (mark := one.last_mark("train"))), default=0)

    def at(self, round: int) -> None:
        """Waits for a random moment of a round."""
        self.until(lambda: self.round >= round or not self.fleet.living, START_S)
        time.sleep(self.rng.random() * LOCAL_STEPS * PACE_S)

    def working(self) -> list[Process]:
        """The processes that train, by their slots."""
        return sorted((one for one in self.fleet.living if one.last_mark("train")), key=lambda one: one.slot or 0)

    def note(self, what: str, hit: Sequence[Process]) -> None:
        """Notes a fault of now."""
        self.faults.append(Fault(time.time(), what, [self.fleet.processes.index(one) for one in hit]))

    def kill(self, victims: Sequence[Process]) -> None:
        """Ends processes at once."""
        self.note("kill", victims)
        for one in victims:
            one.kill()

    def rejoin(self, *, count: int = 1) -> list[Process]:
        """Starts newcomers after a moment, and waits until they train."""
        time.sleep(self.rng.random())
        place = self.places[0]._replace(folder=None, most_bytes=None)
        newcomers = [self.fleet.join(["train", str(self.file)], place) for _ in range(count)]
        self.until(lambda: all(one.last_mark("train") or not one.runs for one in newcomers), 40)
        return newcomers

    def finish(self) -> None:
        """Waits until all processes have ended. Raises: Hang."""
        while living := self.fleet.living:
            for one in living:
                last = one.marks[-1].time_s if one.marks else one.started_s + START_S
                silent_s = time.time() - max(last, one.quiet_until_s)
                if silent_s > TIMEOUT_S + GRACE_S:
                    raise Hang(
                        f"process {self.fleet.processes.index(one)} (slot {one.slot}) was silent for {silent_s:.0f} s"
                    )
            time.sleep(0.05)


def document(trial: Trial) -> dict[str, Any]:
    """The run file of a trial."""
    rule, topology = METHODS[trial.method]
    rounds = ROUNDS // 2 if trial.kind == "stop" else ROUNDS
    return {
        "name": "chaos",
        "workers": trial.workers,
        "seed": 0,
        "rule": rule,
        "topology": topology,
        "model": {"hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 32},
        "data": {"source": str(ROOT / "docs" / "adr"), "seq_len": 16, "batch_size": 2},
        "run": {
            "steps": rounds * LOCAL_STEPS,
            "local_steps": LOCAL_STEPS,
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 8 * LOCAL_STEPS,
            "threads": 1,
            "device": "cpu",
            "elastic": True,
            "timeout_s": TIMEOUT_S,
            "pace_s": PACE_S,
            "rejoin_rounds": ROUNDS if trial.seed % 4 > 1 else 2,
        },
        "record": {"tensorboard": False, "export": False},
    }


# --- kinds of trials --------------------------------------------------------------------------------------------------


def kill(run: Running) -> None:
    """Four kills, one after the other, each with a newcomer."""
    for i in range(4):
        run.at(5 + 15 * i)
        run.kill([run.rng.choice(run.working())])
        run.rejoin()


def leader(run: Running) -> None:
    """Slot 0, which leads the rounds of a mean, is killed three times."""
    for i in range(3):
        run.at(5 + 20 * i)
        run.kill(run.working()[:1])
        run.rejoin()


def three(run: Running) -> None:
    """Three workers are killed inside one round, twice, and three newcomers come at once."""
    for i in range(2):
        run.at(5 + 30 * i)
        victims = run.rng.sample(run.working(), min(3, (run.trial.workers - 1) // 2))
        for one in victims:
            run.kill([one])
            time.sleep(run.rng.random() * LOCAL_STEPS * PACE_S / 4)
        run.rejoin(count=len(victims))


def pause(run: Running) -> None:
    """Workers are stopped for less than the timeout, and slot 0, which leads a mean, for more."""
    for i, share in enumerate((0.4, 0.8, 2.0)):
        run.at(5 + 20 * i)
        victim = run.working()[0] if share > 1 else run.rng.choice(run.working())
        run.note("stop", [victim])
        victim.signal(signal.SIGSTOP)
        time.sleep(share * TIMEOUT_S)
        victim.quiet_until_s = time.time()
        victim.signal(signal.SIGCONT)


def leave(run: Running) -> None:
    """Workers are asked to leave by SIGTERM, and newcomers take their slots."""
    for i in range(3):
        run.at(5 + 20 * i)
        victim = run.rng.choice(run.working())
        run.note("leave", [victim])
        asked_s = time.time()
        victim.signal(signal.SIGTERM)
        if not run.until(lambda victim=victim: not victim.runs, TIMEOUT_S + GRACE_S):
            raise Hang(f"slot {victim.slot} did not leave within {TIMEOUT_S + GRACE_S:g} s of SIGTERM")
        run.values.setdefault("leave_s", []).append(time.time() - asked_s)
        run.rejoin()


def disk(run: Running) -> None:
    """Two workers cannot write their checkpoints: one has a full disk, the other a limit of the size of files."""
    full = [one for one in run.fleet.processes if one.place.folder is not None or one.place.most_bytes is not None]
    run.note("disk", full)
    run.until(lambda: not any(one.runs for one in full), 60)
    run.rejoin(count=len(full))


def partition(run: Running, net: Network) -> None:
    """The network falls in two, for longer than the timeout, and heals."""
    run.at(6)
    inside = {place.namespace for place in run.places[run.trial.workers // 2 + 1 :]}
    minority = [one for one in run.working() if one.place.namespace in inside]
    run.note("partition", minority if run.trial.method == "mean" else [])
    net.part()
    time.sleep((1.5 + run.rng.random()) * TIMEOUT_S)
    net.heal()
    healed_s = time.time()
    for one in minority:
        one.quiet_until_s = healed_s
    if run.trial.method == "mean":
        again = [run.until(lambda one=one: one.marks[-1].time_s > healed_s or not one.runs, 30) for one in minority]
        run.values["healed_s"] = max(one.marks[-1].time_s for one in minority) - healed_s if all(again) else None


def stop(run: Running) -> None:
    """Everything is killed at a random moment and resumed, ten times: one time in four while the workers start."""
    had, last = 8, run.config.length.rounds - 4  # the first stop comes after the first checkpoint
    for i in range(STOPS):
        if i and run.rng.random() < 0.25:
            time.sleep(3 * run.rng.random())
        else:
            run.at(min(had + run.rng.randrange(2, 16), last))
        if not all(one.runs for one in run.fleet.processes[-run.trial.workers :]):
            break  # it has come to its end
        run.kill(run.fleet.living)
        run.until(lambda: not run.fleet.living, 10)
        store, digested = run.out / "checkpoints", digest(run.config)
        held = [{*checkpoint.rounds(store, i, digested)} for i in range(run.trial.workers)]
        had = max(set.intersection(*held), default=0)
        run.values["stops"] = i + 1
        run.resume()


def mixed(run: Running) -> None:
    """Kills, stops and leaves in any order."""
    for i in range(4):
        run.at(5 + 15 * i)
        victim = run.rng.choice(run.working())
        what = run.rng.choice(["kill", "stop", "leave"])
        if what == "kill":
            run.kill([victim])
            run.rejoin()
        elif what == "leave":
            run.note("leave", [victim])
            victim.signal(signal.SIGTERM)
            run.rejoin()
        else:
            run.note("stop", [victim])
            victim.signal(signal.SIGSTOP)
            time.sleep(run.rng.choice([0.5, 1.5]) * TIMEOUT_S)
            victim.quiet_until_s = time.time()
            victim.signal(signal.SIGCONT)


KINDS: dict[str, Callable[..., None]] = {
    "kill": kill,
    "leader": leader,
    "three": three,
    "pause": pause,
    "leave": leave,
    "disk": disk,
    "partition": partition,
    "stop": stop,
    "mixed": mixed,
}


def trials(kinds: Sequence[str], seeds: int) -> Iterator[Trial]:
    """All trials, every kind once before any comes again."""
    for seed, kind in itertools.product(range(seeds), kinds):
        for method in METHODS:
            if kind == "leader" and method == "gossip":
                continue  # gossip has no leader
            yield Trial(kind, method, 4 if seed % 3 == 2 else 8, seed)


# --- one trial --------------------------------------------------------------------------------------------------------


def attempt(trial: Trial, folder: Path) -> dict[str, Any]:
    """Runs a trial and returns its line. Raises: PermissionError where this machine does not allow its faults."""
    began_s = time.time()
    with contextlib.ExitStack() as stack:
        places = [Place() for _ in range(trial.workers)]
        net: Network | None = None
        if trial.kind == "partition":
            most = trial.workers // 2 + 1
            net = stack.enter_context(network(most, trial.workers - most))
            places = [Place(name) for name in net.names]
        elif trial.kind == "disk":
            places[1] = Place(folder=stack.enter_context(small_disk(folder / "disk")) / "run")
            places[2] = Place(most_bytes=200_000)
        fleet = Fleet(folder, "127.0.0.1" if net is None else "10.78.0.250")
        stack.callback(fleet.end)
        run, wrong = Running(trial, folder, places, fleet), list[str]()
        hangs = 0
        try:
            run.start()
            KINDS[trial.kind](run, *([] if net is None else [net]))
            run.finish()
        except Hang as hang:
            hangs, wrong = 1, [f"hang: {hang}"]
            fleet.end()
        except Exception:  # what the trial itself did not expect is told like what the run did
            wrong = [f"the trial failed: {traceback.format_exc().splitlines()[-1]}"]
            fleet.end()
        own = [place.folder for place in places if place.folder is not None and place.folder.exists()]
        seen = Seen(run.config, [run.out, *own], fleet.processes, run.faults)
        try:
            line = measured(trial, seen, run.values, folder.parent)
        except Exception:
            line = {"problems": [f"the records cannot be read: {traceback.format_exc().splitlines()[-1]}"]}
        line["problems"] = [*wrong, *line.get("problems", [])]
        return {**trial._asdict(), "hangs": hangs, "wall_s": time.time() - began_s, **line}


def measured(trial: Trial, seen: Seen, values: dict[str, Any], out: Path) -> dict[str, Any]:
    """What is measured and checked of a trial."""
    came = joins(seen)
    line: dict[str, Any] = {
        "faults": [f.what for f in seen.faults for _ in (f.numbers if f.what != "partition" else "1")],
        "pause_s": [max(pauses(seen, fault), default=0.0) for fault in seen.faults if fault.what != "disk"],
        "join_s": [one.ready_s for one in came],
        "start_s": [one.start_s for one in came],
        "own": sum(one.own for one in came),
        "hashes": sum(one.hash_is_donors for one in came),
        "problems": problems(seen),
        **values,
    }
    line["problems"] += [
        "a newcomer trained on other parameters than its donor's" for one in came if not (one.own or one.hash_is_donors)
    ]
    if trial.kind == "stop":
        expected = calm(trial, out)
        hashes = final_hashes(seen)
        line["bitwise"] = len(hashes) == trial.workers and all(expected[str(slot)] == x for slot, x in hashes.items())
        line["pause_s"] = []
    return line


def calm(trial: Trial, out: Path) -> dict[str, str]:
    """The hashes of the parameters of the same run when nothing happens, from the simulator."""
    import hashlib

    file = out / f"calm-{trial.method}-{trial.workers}.json"
    if not file.exists():
        config, folder = parse(document(trial)), out / f"calm-{trial.method}-{trial.workers}"
        simulate(config, folder)
        states = [
            checkpoint.load(folder / "checkpoints", config.length.rounds, i, digest(config))
            for i in range(config.workers)
        ]
        file.write_text(
            json.dumps({str(i): hashlib.sha256(s["x"].numpy().tobytes()).hexdigest() for i, s in enumerate(states)})
        )
    return json.loads(file.read_text())


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system that has room for a few records and no checkpoint."""
    folder.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        sh("umount", "--lazy", str(folder))


# --- all of them ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(KINDS), metavar="A,B", help=", ".join(KINDS)
    )
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS), metavar="A,B")
    parser.add_argument("--seeds", type=int, default=6, help="trials of each kind and method")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no trial after so many minutes")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "chaos")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "chaos.md")
    parser.add_argument(
        "--note", default="", help="a sentence for the page, such as on what machine; --minutes 0 writes only it"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log, began_s = options.out / "trials.jsonl", time.time()
    lines = [json.loads(raw) for raw in log.read_text().splitlines()] if log.exists() else []
    done = {tuple(line[name] for name in Trial._fields) for line in lines}
    for trial in trials(options.kinds, options.seeds):
        if trial in done or trial.method not in options.methods:
            continue
        if time.time() - began_s > 60 * options.minutes:
            break
        folder = options.out / f"{trial.kind}-{trial.method}-{trial.workers}-{trial.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            line = {**attempt(trial, folder), "commit": origin("", None)["commit"]}
        except PermissionError as error:
            print(f"{trial.kind} is not possible here: {error}", flush=True)
            continue
        lines.append(line)
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        if not line["problems"] and max(line["pause_s"], default=0.0) <= TIMEOUT_S:
            shutil.rmtree(folder)
    text = page(lines, timeout_s=TIMEOUT_S, pace_s=PACE_S, local_steps=LOCAL_STEPS, rounds=ROUNDS, note=options.note)
    options.page.write_text(text)
    return 1 if any(line["problems"] for line in lines) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
