"""Bad peers: what three of eight workers that falsify their messages do to the other five, with and without the defences.

    python benchmarks/attacks.py                # eight seeds, then docs/results/attacks.md; about an hour of one core
    python benchmarks/attacks.py --seeds 0,1

Eight simulated workers, of which three falsify every message from round 5 on (`gossamer.testing.attacks`). What counts is the
validation loss of the mean of the five honest workers, less that of the same five (same data, seeds and initial values) training
alone, seed by seed. The options in `METHODS` were fixed before the seeds were run, by trials with seed 100, which is not counted.
Each run adds a line to `docs/results/attacks/runs.jsonl`, and those that have a line are not made again.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, cast

import torch

from gossamer.errors import GossamerError
from gossamer.finite import all_finite
from gossamer.rounds.loop import EVERYONE, Membership
from gossamer.run.bookkeeping.evaluate import Probe, Probes, assess
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import parse
from gossamer.run.simulated.rounds import make_workers, train_together
from gossamer.run.worker.batched import Stacks
from gossamer.run.worker.task import task_of
from gossamer.testing.attacks import ATTACKS, Attacker
from gossamer.transport.contract import Transport
from gossamer.transport.memory import MemoryNetwork

ROOT = Path(__file__).parents[1]
WORKERS, BAD, FROM_ROUND, ROUNDS, LOCAL_STEPS = 8, frozenset({1, 4, 6}), 5, 40, 3

PAIRS, TWO, ALL = {"name": "random", "peers": 1}, {"name": "random", "peers": 2}, {"name": "complete"}
CLIPPED: dict[str, Any] = {"clipped": {"at": 1.5, "decline": 2.5, "strikes": 2, "window": 16}}
TRIMMED: dict[str, Any] = {"robust": {"by": "trimmed", "faulty": 3}}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gossip, pairs": ({"name": "gossip"}, PAIRS, CLIPPED),
    "gossip, two peers": ({"name": "gossip"}, TWO, CLIPPED),
    "GASLoC, pairs": ({"name": "gasloc"}, PAIRS, CLIPPED),
    "GASLoC, two peers": ({"name": "gasloc"}, TWO, CLIPPED),
    "DiLoCo, trimmed mean": ({"name": "diloco"}, ALL, TRIMMED),
}
"""The rule, the topology, and the options that defend it."""
SEEDS = 8
"""By default."""
HARM, COST = 0.03, 0.005
"""Aims in nats: the upper end of the 95 % interval of the harm of an attack, and the mean cost of the options without one."""
T975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantiles of Student's distribution for 1 to 9 degrees of freedom."""

Line = Mapping[str, Any]


class Case(NamedTuple):
    """One run: which method, defended or not, and the attack, none, or the five honest workers alone."""

    method: str
    defended: bool
    attack: str
    seed: int


def document(method: str, seed: int, *, defended: bool, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The run file."""
    rule, topology, defence = METHODS[method]
    defence = dict(defence if options is None else options)
    return {
        "name": "attacks",
        "workers": WORKERS,
        "seed": seed,
        "rule": {**rule, **(defence if defended else {})},
        "topology": topology,
        "model": {"size": "0.2m", "layers": 2},
        "data": {"source": "stdlib", "seq_len": 64, "batch_size": 4},
        "inner": {"lr": 2e-3, "clip": 1.0, "schedule": "cosine", "warmup_steps": 15},
        "run": {
            "steps": ROUNDS * LOCAL_STEPS,
            "local_steps": LOCAL_STEPS,
            "eval_every": 0,
            "eval_batches": 64,
            "checkpoint_every": 0,
            "batched": WORKERS,
            "device": "cpu",
            "threads": 1,
        },
        "record": {"export": False, "tensorboard": False},
    }


def made(case: Case, options: Mapping[str, Any] | None = None) -> Line:
    """Makes one run, and returns the loss of the mean of the honest workers."""
    began = time.process_time()
    config = resolve(parse(document(case.method, case.seed, defended=case.defended, options=options)))
    task, network = task_of(config), MemoryNetwork(WORKERS)
    honest, alone = frozenset(range(WORKERS)) - BAD, case.attack == "alone"

    def transport(i: int) -> Transport:
        own = network.transport(i)
        if i not in BAD or case.attack not in ATTACKS:
            return own
        attacker = Attacker(own, case.attack, FROM_ROUND, case.seed)
        return cast(Transport, attacker)  # it forwards what it does not falsify

    probe = Probe(config, task, torch.device("cpu"))
    membership = Membership(lambda round, fragment: honest) if alone else EVERYONE
    workers = make_workers(config, task, config.in_rounds, probe.x, transport, membership=lambda worker: membership)
    if alone:
        workers = [worker for worker in workers if worker.index in honest]
    train, now = Stacks(workers, WORKERS).train, 0
    serially = lambda function, items: [function(item) for item in items]  # noqa: E731
    ended = None
    try:
        for now in range(ROUNDS):
            train_together(workers, now, serially, train)
    except GossamerError as error:
        ended = f"round {now}: {error}"
    mean = [worker.replica.evaluated for worker in workers if worker.index in honest]
    sound = ended is None and all_finite(tuple(mean))
    found = assess(mean, Probes([probe])) if sound else None
    counts = [worker.loop.fragments[0] for worker in workers if worker.index in honest]
    distrusts = config.in_rounds.rule.distrusts
    counted = torch.stack([distrusts(one.part.s) for one in counts]).sum(0).tolist() if distrusts is not None else None
    return {
        **case._asdict(),
        "loss": None if found is None else found.loss,
        "ended": ended,
        "counted": counted,
        "disagreement": None if found is None else found.disagreement,
        "cpu_s": round(time.process_time() - began, 1),
    }


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the 95 % interval of Student's distribution."""
    mean = fmean(values)
    half = T975[len(values) - 2] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return mean, mean - half, mean + half


def page(lines: Sequence[Line]) -> str:
    """The page of results."""
    loss = {Case(**{name: line[name] for name in Case._fields}): line["loss"] for line in lines}
    seeds = sorted({line["seed"] for line in lines})
    rows, beyond = list[str](), list[str]()
    for method in METHODS:
        cells = [method]
        for kind in ("none", *ATTACKS):
            against = (lambda seed: Case(method, False, "none", seed)) if kind == "none" else None  # noqa: B023
            pairs = [
                (
                    loss[Case(method, True, kind, seed)],
                    loss[against(seed) if against else Case(method, False, "alone", seed)],
                )
                for seed in seeds
            ]
            if any(one is None for one, _ in pairs):
                cells.append("ended")
                beyond.append(f"{method}, {kind}: {sum(one is None for one, _ in pairs)} of {len(pairs)} runs ended")
                continue
            mean, low, high = interval([one - other for one, other in pairs])
            cells.append(f"{mean:+.4f} ({low:+.4f} to {high:+.4f})")
            if (kind == "none" and mean > COST) or (kind != "none" and high > HARM):
                what = f"costs {mean:.4f} in the mean" if kind == "none" else f"may harm by {high:.4f}"
                beyond.append(f"{method}, {'without an attack' if kind == 'none' else kind}: {what}")
        rows.append(f"| {' | '.join(cells)} |")
    defences = "\n".join(f"- {name}: `{json.dumps(defence)}`" for name, (_, _, defence) in METHODS.items())
    found = "\n".join(f"- {one}" for one in beyond) or "- nothing"
    bad = ", ".join(map(str, sorted(BAD)))
    only = "" if len(seeds) == SEEDS else f" --seeds {','.join(map(str, seeds))}"
    return f"""# Bad peers

    python benchmarks/attacks.py{only}

Eight simulated workers of 0.14M parameters train {ROUNDS} rounds of {LOCAL_STEPS} inner steps; workers {bad} falsify every
message from round {FROM_ROUND} on. The harm of an attack is the validation loss of the mean of the five honest workers, in nats
per byte, less that of the same five training alone with the undefended rule. Without an attack it is the loss of the same five
less that of the same five without the options. Means over seeds {", ".join(map(str, seeds))} and their 95 % intervals.
The options were fixed with another seed before these ran:

{defences}

| method | no attack | {" | ".join(ATTACKS)} |
|---|{"---:|" * (1 + len(ATTACKS))}
{chr(10).join(rows)}

**Beyond the aims** (the upper end of the interval at most {HARM}; without an attack a mean of at most {COST}):

{found}
"""


def cases(seeds: Sequence[int]) -> list[Case]:
    """All runs of the page, seed by seed."""
    kinds = [(False, "alone"), (False, "none"), (True, "none"), *((True, attack) for attack in ATTACKS)]
    return [Case(method, *kind, seed) for seed in seeds for method in METHODS for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default=",".join(map(str, range(SEEDS))))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "attacks")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "attacks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    log, seeds = options.out / "runs.jsonl", [int(seed) for seed in options.seeds.split(",")]
    lines = [json.loads(raw) for raw in log.read_text().splitlines()] if log.exists() else []
    done = {Case(**{name: line[name] for name in Case._fields}) for line in lines}
    for case in cases(seeds):
        if case not in done:
            lines.append(made(case))
            with log.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(lines[-1], flush=True)
    options.page.write_text(page([line for line in lines if line["seed"] in seeds]))


if __name__ == "__main__":
    main()
