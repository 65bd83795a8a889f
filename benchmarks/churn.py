"""What replaced workers cost: half of the fleet is replaced every few rounds, against the same run in calm.

    python benchmarks/churn.py                  # writes docs/results/churn.md; some minutes

The log of outcomes of an elastic run is an input like its seed. So this script writes logs in which workers die in the middle of
a round and newcomers fill their slots with the state of a worker that lives, and computes both runs of each seed from their
logs, as `gossamer simulate --replay` does: with real deaths that leave this log the numbers would be the same.
"""

import argparse
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from gossamer.record.outcomes import Begun, Ended, OutcomeWriter, RoundOutcome
from gossamer.run.config import RunConfig, dump, parse
from gossamer.run.replay import replay_elastic
from gossamer.run.settle import in_rounds

PAGE = Path(__file__).parents[1] / "docs" / "results" / "churn.md"
WORKERS, ROUNDS, LOCAL_STEPS, EVERY, SEEDS = 8, 100, 5, 10, 8
T_90 = 1.895
"""The 95th percentile of Student's distribution with seven degrees of freedom."""


def document(method: str, seed: int) -> dict[str, Any]:
    """The run of one seed."""
    return {
        "name": "churn", "method": method, "workers": WORKERS, "seed": seed, "model": {"size": "0.2m"},
        "data": {"source": "stdlib", "seq_len": 64, "batch_size": 4}, "inner": {"lr": 3e-3},
        "run": {
            "steps": ROUNDS * LOCAL_STEPS, "local_steps": LOCAL_STEPS, "elastic": True, "eval_every": 0, "checkpoint_every": 0,
        },
        "record": {"export": False, "tensorboard": False},
    }  # fmt: skip


def write_log(config: RunConfig, folder: Path, every: int | None) -> int:
    """The log of outcomes of a run whose fleet is replaced by halves; returns how many workers died.

    A worker that dies has trained half of its round in vain: its peers keep their weight at home, and its slot's steps are taken
    again by the newcomer, which begins in the next round with the state of a worker that lives.
    """
    draw = random.Random(f"churn {config.seed}")
    topology = in_rounds(config).method.topology
    everyone, deaths = frozenset(range(WORKERS)), 0
    logs = [OutcomeWriter(folder, slot) for slot in range(WORKERS)]
    steps, lives = [0] * WORKERS, [0] * WORKERS
    for slot, log in enumerate(logs):
        log.begin(Begun(0, 0, slot, 0, 0))
    for round in range(ROUNDS):
        dies = (
            frozenset(draw.sample(range(WORKERS), WORKERS // 2))
            if every and round % every == every - 1
            else frozenset()
        )
        dies = dies if round + 1 < ROUNDS else frozenset()
        mixing = topology.mixing(round)
        for slot in sorted(everyone - dies):
            steps[slot] += LOCAL_STEPS
            lost = frozenset(mixing.hears_from(slot)) & dies
            logs[slot].round(RoundOutcome(round, None, lost, frozenset(), steps[slot]))
        for slot in sorted(dies):
            deaths, lives[slot] = deaths + 1, lives[slot] + 1
            donor = draw.choice(sorted(everyone - dies))
            logs[slot].begin(Begun(round + 1, round + 1, donor, steps[slot], lives[slot]))
    (folder / "run.toml").write_text(dump(config))
    for log in logs:
        log.end(Ended(ROUNDS, "finished"))
        log.__exit__(None, None, None)
    return deaths


def loss_of(method: str, seed: int, every: int | None) -> tuple[float, int]:
    """The validation loss of the mean model at the end, and how many workers died."""
    config = parse(document(method, seed))
    with tempfile.TemporaryDirectory() as place:
        recorded = Path(place) / "recorded"
        deaths = write_log(config, recorded, every)
        return replay_elastic(config, Path(place) / "again", recorded).loss, deaths


def row(method: str, seeds: int) -> str:
    """The paired differences of one method, as a row of the table."""
    pairs = []
    for seed in range(seeds):
        (calm, _), (churned, deaths) = loss_of(method, seed, None), loss_of(method, seed, EVERY)
        pairs.append((calm, churned, deaths))
        print(f"{method}, seed {seed}: {calm:.4f} in calm, {churned:.4f} with {deaths} deaths", flush=True)
    apart = [churned - calm for calm, churned, _ in pairs]
    half = T_90 * statistics.stdev(apart) / math.sqrt(len(apart))
    mean = statistics.fmean
    return (
        f"| {method} | {mean(calm for calm, _, _ in pairs):.4f} | {mean(churned for _, churned, _ in pairs):.4f} | "
        f"{mean(apart):+.4f} ± {half:.4f} | {pairs[0][2]} |"
    )


def main() -> None:
    """Computes all pairs and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["gasloc"])
    methods = parser.parse_args().methods
    rows = [row(method, SEEDS) for method in methods]
    PAGE.write_text(
        f"""# Half of the fleet replaced every {EVERY} rounds

    python benchmarks/churn.py --methods {" ".join(methods)}

{WORKERS} workers of 0.2M parameters train {ROUNDS} rounds of {LOCAL_STEPS} inner steps. Every {EVERY} rounds four of them, drawn
anew, die in the middle of a round; newcomers fill their slots in the next one, with the parameters, the outer and the inner
state of a worker that lives. The steps that died are taken again by the newcomer, so a run with deaths trains on fewer steps. The
loss is that of the mean model at the end (nats), the difference is paired by seed, with its 90 % interval over {SEEDS} seeds.

| method | calm | churn | difference | deaths |
|---|---:|---:|---:|---:|
"""
        + "\n".join(rows)
        + "\n"
    )
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
