"""Training over rate-limited links: wall-clock to a target loss, measured and priced, method by method.

    sudo python benchmarks/slow_links.py                                         # Linux, as root; first prints a time estimate
    sudo python benchmarks/slow_links.py --workers 4 --methods "GASLoC 2-Peer" --shares 0.1 --ways both

Each worker is a process in a network namespace of its own, whose link to a bridge is limited by `tc tbf` in both directions;
one worker has a slow uplink, or a slow link both ways. Inner steps are paced (`run.pace_s`), so that a few cores can
stand for one accelerator per worker. An exchange at full bandwidth lasts 5/3 inner steps. With H = 30, a worker with a tenth of
the bandwidth finishes with the others if it takes 15 steps in random pairs, or one step where everybody has two peers.

Losses do not depend on the network, so they come from a simulation. The real run repeats its first rounds to the last bit,
which is checked. The target is the loss of DiLoCo's mean model after its last round. The real run goes on for as many rounds as
the target takes (for data parallelism only a few steps, since all are alike). Its rounds are timed from outside, by the lines
that workers add to their traces, after a first round in which connections are made. The same rounds are priced twice:

* before the run, from the declared times of a step, to compare methods
* after it, from the measured times of its steps, so that measured over priced compares the links alone (aim: 0.85 to 1.15)
"""

import argparse
import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from gossamer.cli import main as main_of_gossamer
from gossamer.cli.train import import_early
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.links import Floats, Network, links_of
from gossamer.network.pricing import price
from gossamer.record.folder import read_metrics
from gossamer.record.logs.trace import Trace, read_trace
from gossamer.record.whole_files import atomic_write
from gossamer.run.config.run_file import parse
from gossamer.run.planning.plan import matched_steps

SIZE = "0.2m"
PAYLOAD_BYTES = 4 * parameter_count(ModelConfig(size=SIZE), 256)
EXCHANGE_STEPS = 5 / 3
"""Inner steps that a model takes between two healthy workers."""
GOODPUT = 1448 / 1514
"""Bytes of a message per byte that the limiter counts; the rest is Ethernet, IP and TCP headers of full packets."""
QUEUE_BYTES = 1000 * 1514
"""Queue in front of a limiter: the thousand packets of a Linux device; a shorter one drops packets when many send at once."""
FEW_STEPS = 6
"""Steps of data parallelism that are measured."""
METHODS: dict[str, tuple[dict[str, Any], int | None]] = {
    "data parallel": ({"name": "data_parallel"}, None),
    "DiLoCo": ({"name": "diloco", "lr": 0.7, "momentum": 0.7}, None),
    "GASLoC 2-Peer": ({"name": "gasloc", "lr": 0.7, "momentum": 0.7}, 2),
    "GASLoC 1-Peer": ({"name": "gasloc", "lr": 0.7, "momentum": 0.7}, 1),
}
"""Rule and number of peers of each method; None exchanges with everyone."""
WAYS = ("uplink", "both")


class Setting(NamedTuple):
    """What is trained, on which links."""

    workers: int = 8
    local_steps: int = 30
    rounds: int = 8
    """Rounds of DiLoCo, whose last loss is the target; the others may take twice as many to reach it."""
    pace_s: float = 0.2
    methods: tuple[str, ...] = tuple(METHODS)
    shares: tuple[float, ...] = (0.1, 0.2)
    ways: tuple[str, ...] = WAYS
    seeds: tuple[int, ...] = (0,)

    @property
    def cells(self) -> list["Cell"]:
        """All measurements, with those on the same links next to each other."""
        return [
            Cell(method, share, way, seed)
            for share in self.shares
            for way in self.ways
            for seed in self.seeds
            for method in self.methods
        ]


QUICK = Setting(4, 10, 3, 0.1, ("DiLoCo", "GASLoC 1-Peer"), (0.2,), ("uplink",))


class Cell(NamedTuple):
    """A method on links one of which is slow."""

    method: str
    share: float
    way: str
    seed: int


class Result(NamedTuple):
    """A line of the table."""

    cell: Cell
    straggler_steps: int
    target: float
    rounds: float | None
    """Rounds to the target, interpolated between two evaluations; None where twice those of DiLoCo are not enough."""
    priced_s: float
    """Seconds of these rounds, from declared times of a step; of all rounds where the target is not reached."""
    measured_s: float
    measured_rounds: int
    """How many rounds ran after the first; the seconds of further rounds are extrapolated from these."""
    measured_over_priced: float
    """The ratio for the rounds that ran, priced from measured times of a step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four workers and two methods, in a few minutes")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--local-steps", type=int, help="H of a healthy worker")
    parser.add_argument("--rounds", type=int, help="rounds of DiLoCo, whose last loss is the target")
    parser.add_argument("--pace-s", type=float, help="seconds of an inner step")
    parser.add_argument("--methods", type=names, metavar="A,B", help=f"some of: {', '.join(METHODS)}")
    parser.add_argument(
        "--shares", type=numbers(float), metavar="0.1,0.2", help="bandwidth of the slow worker over that of others"
    )
    parser.add_argument("--ways", type=names, metavar="A,B", help="uplink, both")
    parser.add_argument("--seeds", type=numbers(int), metavar="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/slow_links"), help="results are OUT.md and OUT.json")
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    out: Path = given.pop("out")
    setting = (QUICK if given.pop("quick") else Setting())._replace(**given)
    for what, chosen, known in (("method", setting.methods, METHODS), ("way", setting.ways, WAYS)):
        if unknown := set(chosen) - set(known):
            parser.error(f"there is no {what} {sorted(unknown)}; choose from {list(known)}")
    if setting.workers <= max(METHODS[method][1] or 1 for method in setting.methods):
        parser.error(
            f"{setting.workers} workers are too few for the peers of {', '.join(setting.methods)}; use more workers"
        )
    if not can_limit():
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{headline(setting)}\nabout {estimate_s(setting) / 60:.0f} min", flush=True)

    simulated: dict[Any, Simulated] = {}
    results: list[Result] = []
    for cell in setting.cells:
        with namespaces(setting, cell.share, cell.way) as places:
            results.append(measure(setting, cell, places, simulated))
        text = report(setting, results, f"sudo python {shlex.join(sys.argv)}")
        atomic_write(out.with_suffix(".md"), text.encode())
        atomic_write(out.with_suffix(".json"), json.dumps(plain(setting, results), indent=1).encode())
        print(table(results).splitlines()[-1], flush=True)
    print(f"\n{table(results)}\nresults: {out.with_suffix('.md')}, {out.with_suffix('.json')}")
    return 0


def names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def numbers(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    return lambda text: tuple(kind(word) for word in text.split(","))


def headline(setting: Setting) -> str:
    rate_bps = max(rates_bps(setting, 1.0, "both")[0])
    return (
        f"{setting.workers} workers, {PAYLOAD_BYTES / 1e3:.0f} kB a model, links of {rate_bps / 1e6:.1f} Mbit/s, inner steps "
        f"paced to {setting.pace_s:g} s (run.pace_s), H = {setting.local_steps}, an exchange lasts 5/3 steps"
    )


def estimate_s(setting: Setting) -> float:
    """A rough estimate of the total seconds: rounds, starting processes, and simulating."""
    total_s = 0.0
    for method, share, way, _ in setting.cells:
        _, peers = METHODS[method]
        steps = 1 if method == "data parallel" else setting.local_steps
        if peers is None:
            round_s = (steps + 2 * EXCHANGE_STEPS / share) * setting.pace_s
        else:
            round_s = (steps + peers * EXCHANGE_STEPS) * setting.pace_s * (1.3 if way == "both" else 1.1)
        some = FEW_STEPS if method == "data parallel" else setting.rounds * (1.0 if method == "DiLoCo" else 1.2)
        total_s += round_s * (some + 1) + 5 + 2.5 * setting.workers
    each_s = setting.rounds * setting.local_steps * setting.workers * 0.01
    return total_s + each_s * len(setting.seeds) * (2 + 4 * len(setting.shares))


# --- links ------------------------------------------------------------------------------------------------------------


def rates_bps(setting: Setting, share: float, way: str) -> tuple[list[float], list[float]]:
    """The outgoing and incoming rate of each worker's limiters."""
    full_bps = 8 * PAYLOAD_BYTES / (EXCHANGE_STEPS * setting.pace_s) / GOODPUT
    slow = [full_bps] * (setting.workers - 1) + [share * full_bps]
    return slow, slow if way == "both" else [full_bps] * setting.workers


def network_of(setting: Setting, share: float, way: str) -> Network:
    """The same links without the overhead of packet headers, as messages use them."""
    up_bps, down_bps = (tuple(GOODPUT * bps for bps in rates) for rates in rates_bps(setting, share, way))
    return Network(uplink_bps=up_bps, downlink_bps=down_bps, step_s=setting.pace_s)


def namespaces(setting: Setting, share: float, way: str) -> contextlib.AbstractContextManager[list[str]]:
    """A namespace for each worker."""
    return limited(*rates_bps(setting, share, way))


def can_limit() -> bool:
    """Whether `limited` can work here; says why if it cannot."""
    if sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
        return True
    print("skipped: slow links need Linux, root, and the commands ip and tc")
    return False


@contextlib.contextmanager
def limited(ups_bps: Sequence[float], downs_bps: Sequence[float]) -> Iterator[list[str]]:
    """Namespaces with links of these rates to a bridge in one more; all are removed at the end, with their devices."""
    names = [f"gossamer-{os.getpid()}-{place}" for place in (*range(len(ups_bps)), "hub")]
    *workers, hub = names
    made: list[str] = []
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            made.append(name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        sh("ip", "-n", hub, "link", "set", "bridge0", "up")
        for i, (name, up_bps, down_bps) in enumerate(zip(workers, ups_bps, downs_bps, strict=True)):
            port = f"port{i}"
            sh("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", hub, "link", "set", port, "master", "bridge0", "up")
            sh("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            for where, device, bps in ((name, "eth0", up_bps), (hub, port, down_bps)):
                burst = str(max(8_000, int(bps / 8 / 250)))
                limit = ("rate", f"{bps:.0f}bit", "burst", burst, "limit", str(QUEUE_BYTES))
                sh("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield workers
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"slow_links: '{' '.join(words)}' failed: {done.stderr.strip()}")


# --- runs -------------------------------------------------------------------------------------------------------------


def document(setting: Setting, cell: Cell, steps: Sequence[int], rounds: int, **run: Any) -> dict[str, Any]:
    """The run file of a method."""
    rule, peers = METHODS[cell.method]
    return {
        "workers": setting.workers,
        "seed": cell.seed,
        "rule": rule,
        "topology": {"name": "complete"} if peers is None else {"name": "random", "peers": peers},
        "model": {"size": SIZE},
        "data": {"seq_len": 64, "batch_size": 2, "max_bytes": 2_000_000},
        # A learning rate that does not depend on the length of the run, so that a longer run begins like a shorter one.
        "inner": {"lr": 2e-3, "clip": 1.0, "schedule": "constant"},
        "run": {
            "steps": rounds * max(steps),
            "local_steps": steps[0] if len(set(steps)) == 1 else list(steps),
            "checkpoint_every": 0,
            "device": "cpu",
            "backend": "gloo",
            "threads": 1,
            **run,
        },
        "record": {"tensorboard": False, "export": False},
    }


def steps_of(setting: Setting, cell: Cell) -> tuple[int, ...]:
    """Inner steps of each worker in a round; with gossip the straggler takes as many as let it finish with the others."""
    _, peers = METHODS[cell.method]
    if peers is not None:
        links = links_of(network_of(setting, cell.share, cell.way), setting.workers)
        return matched_steps(links, setting.local_steps, peers * PAYLOAD_BYTES)
    return (1 if cell.method == "data parallel" else setting.local_steps,) * setting.workers


class Simulated(NamedTuple):
    """The part of a run that does not depend on its network."""

    rounds: list[int]
    losses: list[float]
    """Validation loss of the mean model after each of `rounds`."""
    trace: Trace
    train: Mapping[tuple[int, int], float]
    """Training loss by round and worker."""

    def rounds_to(self, target: float) -> float | None:
        """After how many rounds the loss reaches the target, interpolated linearly between evaluations."""
        before = (0.0, math.inf)
        for point in zip(self.rounds, self.losses, strict=True):
            if point[1] <= target:
                share = (before[1] - target) / (before[1] - point[1]) if before[1] < math.inf else 1.0
                return before[0] + share * (point[0] - before[0])
            before = point
        return None


def simulate(setting: Setting, cell: Cell, rounds: int) -> Simulated:
    from gossamer.run.simulated.simulate import simulate

    steps = steps_of(setting, cell)
    every = max(1, setting.local_steps // 3) if cell.method == "data parallel" else max(steps)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        simulate(parse(document(setting, cell, steps, rounds, eval_every=every, eval_batches=16)), out)
        lines = read_metrics(out)
        scored = [line for line in lines if line["kind"] == "eval" and line["round"] >= 0]
        return Simulated(
            [line["round"] + 1 for line in scored],
            [line["loss"] for line in scored],
            read_trace(out),
            train_losses(lines),
        )


def train_losses(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], float]:
    return {(line["round"], line["worker"]): line["loss"] for line in lines if line["kind"] == "train"}


def measure(setting: Setting, cell: Cell, places: list[str], simulated: dict[Any, Simulated]) -> Result:
    """Simulates a method unless that is already done, runs the rounds to its target on real processes, and compares."""

    def known(cell: Cell, rounds: int) -> Simulated:
        # One round more than requested, as the first is not measured.
        key = cell.method, cell.seed, steps_of(setting, cell)
        if key not in simulated:
            simulated[key] = simulate(setting, cell, rounds + 1)
        return simulated[key]

    goal = known(cell._replace(method="DiLoCo"), setting.rounds)
    target = goal.losses[goal.rounds.index(setting.rounds)]
    steps, network = steps_of(setting, cell), network_of(setting, cell.share, cell.way)
    # The rounds of the simulation without the first; all methods have the same number of inner steps.
    most = setting.rounds if cell.method == "DiLoCo" else 2 * setting.rounds * setting.local_steps // max(steps)
    run = known(cell, most)
    rounds = run.rounds_to(target)
    asked = most if rounds is None else rounds
    ran = min(math.ceil(asked), FEW_STEPS if max(steps) == 1 else most)
    priced_s = elapsed_s(price(run.trace, network).end_s.max(axis=1), asked)

    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.toml", Path(folder) / "run"
        made = document(setting, cell, steps, ran + 1, eval_every=0, eval_batches=1, pace_s=setting.pace_s)
        file.write_text(tomli_w.dumps(made))
        seen = train(places, file, out)
        trace, losses = read_trace(out), train_losses(read_metrics(out))
    if losses != {key: run.train[key] for key in losses}:
        raise SystemExit(
            f"slow_links: the losses of {cell} differ from those of its simulation; they must be the same bits"
        )
    ends_s = np.array(seen).max(axis=0)
    ran_s = elapsed_s(ends_s, ran)
    return Result(
        cell,
        steps[-1],
        target,
        rounds,
        priced_s,
        elapsed_s(ends_s, asked) if asked <= ran else ran_s * asked / ran,
        ran,
        ran_s / elapsed_s(price(trace, replace(network, step_s=None)).end_s.max(axis=1), ran),
    )


def elapsed_s(ends_s: Floats, rounds: float) -> float:
    """Seconds of this many rounds, after the first."""
    return float(np.interp(rounds, np.arange(len(ends_s)), ends_s) - ends_s[0])


def train(names: list[str], file: Path, out: Path) -> list[list[float]]:
    """Runs the workers to their end; returns when each was observed to end each round."""
    import_early()
    context, log = multiprocessing.get_context("forkserver"), file.parent / "log"
    words = ["train", str(file), "--out", str(out)]
    processes = [context.Process(target=enter, args=(name, i, len(names), words, log)) for i, name in enumerate(names)]
    try:
        for process in processes:
            process.start()
        seen: dict[str, list[float]] = {}
        while any(process.exitcode is None for process in processes):
            for path in sorted(out.glob("trace*.jsonl")):
                ends = seen.setdefault(path.name, [])
                ends += [time.perf_counter()] * (path.read_bytes().count(b"\n") - len(ends))
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.005)
        for process in processes:
            process.join(30)
        if any(process.exitcode != 0 for process in processes):
            raise SystemExit(f"slow_links: a worker failed:\n{log.read_text()[-2000:]}")
        return list(seen.values())
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join(5)
            process.kill()
            process.join()


def enter(name: str, rank: int, workers: int, words: list[str], log: Path) -> None:
    """What a new process does first: it moves to its namespace, and then is `gossamer WORDS`."""
    os.setsid()  # Ctrl-C reaches only the process that started it, which then ends it
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29577",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main_of_gossamer(words))


# --- results ----------------------------------------------------------------------------------------------------------


def over_diloco(results: Sequence[Result], one: Result) -> tuple[float, float] | None:
    """Priced and measured seconds to the target over those of DiLoCo on the same links; None where either is missing."""
    for other in results:
        if other.cell == one.cell._replace(method="DiLoCo") and one.rounds is not None:
            return one.priced_s / other.priced_s, one.measured_s / other.measured_s
    return None


def table(results: Sequence[Result]) -> str:
    """The results so far, as Markdown."""
    lines = [
        "| slow link | seed | method | H of slow | rounds to target | priced | measured | over DiLoCo, priced | measured | "
        "measured / priced of its rounds |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        method, share, way, seed = one.cell
        over = over_diloco(results, one)
        priced, measured = (f"{seconds:.1f} s" for seconds in (one.priced_s, one.measured_s))
        if one.rounds is None:
            rounds, priced, measured = "not reached", f"> {priced}", f"> {measured}"
        else:
            rounds = f"{one.rounds:.1f}"
            if one.rounds > one.measured_rounds:
                measured = f"{measured} from {one.measured_rounds}"
        lines.append(
            f"| {share:.0%} {way} | {seed} | {method} | {one.straggler_steps} | {rounds} | {priced} | {measured} | "
            + (" | ".join(f"{ratio:.2f}" for ratio in over) if over else " | ")
            + f" | {one.measured_over_priced:.2f} |"
        )
    return "\n".join(lines)


def report(setting: Setting, results: Sequence[Result], command: str) -> str:
    """The results file."""
    targets = ", ".join(
        f"{loss:.4f} (seed {seed})" for seed, loss in sorted({(r.cell.seed, r.target) for r in results})
    )
    return f"""# Training over slow links

    {command}

{headline(setting)}.

One worker has only a share of that bandwidth, on its uplink or both ways. In GASLoC it takes as many local steps as let it finish
with the others. The target is the loss of DiLoCo's mean model after {setting.rounds} rounds: {targets} nats a byte.
Seconds count until the target, priced from the declared time of a step, and measured on real processes behind rate limiters. The
last column compares the links alone: its prices use the measured times of the steps. "from N" means that N rounds were measured
and the remaining ones extrapolated from them.

{table(results)}
"""


def plain(setting: Setting, results: Sequence[Result]) -> dict[str, Any]:
    """The results file as data."""
    return {
        "setting": setting._asdict() | {"payload_bytes": PAYLOAD_BYTES, "exchange_steps": EXCHANGE_STEPS},
        "results": [
            one._asdict() | {"cell": one.cell._asdict(), "over_diloco": over_diloco(results, one)} for one in results
        ],
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
