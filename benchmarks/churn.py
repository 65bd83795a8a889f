"""What replaced workers cost: half of the fleet is replaced every few rounds, against the same run in calm.

    python benchmarks/churn.py                  # writes docs/results/churn.md; an hour on one idle core
    python benchmarks/churn.py --rounds 11 --seeds 2 --out /tmp/churn --page /tmp/churn.md      # does it run?

The log of outcomes of an elastic run is an input like its seed. So this script writes logs in which workers die in the middle of
a round and newcomers fill their slots with the state of a worker that lives, and computes the runs of each seed from their
logs, as `gossamer simulate --replay` does: with real deaths that leave this log the numbers would be the same.

Each run adds a line to `runs/churn/runs.jsonl` when it ends, and those that have a line are not computed again. So it may be
stopped at any time, and loses the run that it is at.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.record.logs.outcomes import Begun, Ended, OutcomeWriter, RoundOutcome
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import RunConfig, dump, parse
from gossamer.run.replay.elastic import replay_elastic

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "churn.md"
WORKERS, ROUNDS, LOCAL_STEPS, EVERY, SEEDS = 8, 100, 5, 10, 8
KINDS = {
    "calm": "nothing happens, and each slot trains in each round on the same text as with deaths",
    "churn": "half of the workers die, and newcomers take the state that another had at the end of its last round",
    "fresh": "the same, but newcomers wait for the state of the round that is under way",
    "own": "half of the workers lose a round, and go on with their own state of its start",
    "other": "nothing happens, and all train on other text",
}
T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""The 95th percentile of Student's distribution with 1, 2, 3, ... degrees of freedom."""

Lines = Mapping[tuple[str, int, str], Mapping[str, Any]]


def document(method: str, seed: int, rounds: int) -> dict[str, Any]:
    """The run of one seed."""
    return {
        "name": "churn",
        "method": method,
        "workers": WORKERS,
        "seed": seed,
        "model": {"size": "0.2m"},
        "data": {"source": "stdlib", "seq_len": 64, "batch_size": 4},
        "inner": {"lr": 2e-3, "clip": 1.0, "warmup_steps": 20},
        "run": {
            "steps": rounds * LOCAL_STEPS,
            "local_steps": LOCAL_STEPS,
            "elastic": True,
            "eval_every": 0,
            "eval_batches": 256,
            "checkpoint_every": 0,
        },
        "record": {"export": False, "tensorboard": False},
    }


def write_log(config: RunConfig, folder: Path, kind: str) -> int:
    """The log of outcomes of a run of a kind; returns how often a worker lost its round.

    A worker that dies has trained half of its round in vain: its peers keep their weight at home, and its slot's steps are taken
    again by the newcomer, which begins in the next round. In a calm run the slot takes them again too: both runs of a pair have
    the same text in each slot and round, as other text alone makes a difference.
    """
    draw, rounds = random.Random(f"churn {config.seed}"), config.length.rounds
    topology = resolve(config).in_rounds.topology
    everyone, lost_rounds = frozenset(range(WORKERS)), 0
    logs = [OutcomeWriter(folder, slot) for slot in range(WORKERS)]
    steps = [rounds * LOCAL_STEPS if kind == "other" else 0] * WORKERS
    lives = [0] * WORKERS
    for slot, log in enumerate(logs):
        log.write(Begun(0, 0, slot, steps[slot], 0))
    for round in range(rounds):
        due = kind != "other" and round % EVERY == EVERY - 1 and round + 1 < rounds
        hit = frozenset(draw.sample(range(WORKERS), WORKERS // 2) if due else ())
        absent = frozenset[int]() if kind == "calm" else hit
        lost_rounds += len(absent)
        mixing = topology.mixing(round)
        for slot in sorted(everyone - absent):
            missed = frozenset(mixing.receives_from(slot)) & absent
            logs[slot].write(RoundOutcome(round, None, missed, frozenset(), steps[slot] + LOCAL_STEPS))
            steps[slot] += 0 if slot in hit else LOCAL_STEPS
        for slot in sorted(hit):
            lives[slot] += 1
            donor = draw.choice(sorted(everyone - hit))
            donor, after = {
                "calm": (slot, round + 1),
                "churn": (donor, round),
                "fresh": (donor, round + 1),
                "own": (slot, round),
            }[kind]
            logs[slot].write(Begun(round + 1, after, donor, steps[slot], lives[slot]))
    (folder / "run.toml").write_text(dump(config))
    for log in logs:
        log.write(Ended(rounds, "finished"))
        log.__exit__(None, None, None)
    return lost_rounds


def computed(method: str, seed: int, kind: str, rounds: int) -> dict[str, Any]:
    """The line of one run, with the validation loss of the mean model at its end."""
    config, began_s = parse(document(method, seed, rounds)), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        recorded = Path(place) / "recorded"
        lost_rounds = write_log(config, recorded, kind)
        loss = replay_elastic(resolve(config, real=True), Path(place) / "again", recorded).loss
    wall_s = time.perf_counter() - began_s
    line = {"method": method, "seed": seed, "kind": kind, "rounds": rounds}
    return {**line, "loss": loss, "lost_rounds": lost_rounds, "wall_s": wall_s}


def row(lines: Lines, method: str, kind: str) -> str | None:
    """The paired differences of one kind from the calm runs, as a row of the table; None with fewer than two pairs."""
    seeds = [seed for m, seed, k in lines if (m, k) == (method, kind) and (m, seed, "calm") in lines]
    if len(seeds) < 2:
        return None
    calm, other = ([lines[method, seed, k]["loss"] for seed in seeds] for k in ("calm", kind))
    apart = [a - b for a, b in zip(other, calm, strict=True)]
    return (
        f"| {method} | {KINDS[kind]} | {lines[method, seeds[0], kind]['lost_rounds']} | {statistics.fmean(calm):.4f} | "
        f"{statistics.fmean(other):.4f} | {statistics.fmean(apart):+.4f} ± {half_width(apart):.4f} | "
        f"{statistics.stdev(apart):.4f} | {len(seeds)} |"
    )


def half_width(values: Sequence[float]) -> float:
    """Half of the 90 % interval of their mean."""
    t = T_90[min(len(values) - 1, len(T_90)) - 1]
    return t * statistics.stdev(values) / math.sqrt(len(values))


def page(lines: Lines, methods: Sequence[str], rounds: int) -> str:
    """The page of results."""
    rows = [text for m in methods for kind in list(KINDS)[1:] if (text := row(lines, m, kind)) is not None]
    return f"""# Half of the fleet replaced every {EVERY} rounds

    python benchmarks/churn.py --methods {" ".join(methods)}

{WORKERS} workers of 0.2M parameters train {rounds} rounds of {LOCAL_STEPS} inner steps. Every {EVERY} rounds four of them, drawn
anew, die in the middle of a round; newcomers fill their slots in the next one, with the parameters, the outer and the inner
state that a worker which lives had at the end of its last round. The steps that died are taken again by the newcomer. Both runs
of a pair have the same initial parameters, topology and text in each slot and round. The loss is that of the mean model at the
end (nats), the difference is paired by seed, with its 90 % interval over the seeds.

| method | what happens | lost worker-rounds | calm | loss | difference | deviation of one pair | seeds |
|---|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}
"""


def main() -> None:
    """Computes all runs that are missing and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["gasloc"])
    parser.add_argument("--kinds", nargs="+", default=["churn"], choices=list(KINDS)[1:], help="beside calm")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "churn")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "runs.jsonl"
    found = [json.loads(raw) for raw in log.read_text().splitlines()] if log.exists() else []
    found = [line for line in found if line.get("rounds", ROUNDS) == options.rounds]
    lines = {(line["method"], line["seed"], line["kind"]): line for line in found}
    for method in options.methods:
        for seed in range(options.seeds):
            for kind in ("calm", *options.kinds):
                if (method, seed, kind) in lines:
                    continue
                lines[method, seed, kind] = line = computed(method, seed, kind, options.rounds)
                with log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    options.page.write_text(page(lines, options.methods, options.rounds))
    print(options.page.read_text())


if __name__ == "__main__":
    main()
