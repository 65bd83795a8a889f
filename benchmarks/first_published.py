"""Five methods at 35M parameters on one GPU, in loans of some minutes: each call trains what is left, for at most so long.

    python benchmarks/first_published.py [--minutes 9] [--seeds 0,1,2] [--folder runs/first_published]

The runs are those of experiments/evidence/first_published.toml, seed by seed. Each that ends is a line of
docs/results/evidence/first_published.jsonl, and is not trained again. One that the time stops has a checkpoint in the folder
and continues from there; where the folder is gone, it begins again. The text is the Python source of torch besides that of the
standard library, which every machine has that runs this. Predictions stand in docs/evidence/registered.md.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from gossamer.record.progress import say
from gossamer.report.results import read_results
from gossamer.run.config.document import parse_overrides
from gossamer.run.config.experiment_file import open_experiment, place_in_experiment, points
from gossamer.run.experiments.compare import train_all

ROOT = Path(__file__).parents[1]
FILE = ROOT / "experiments" / "evidence" / "first_published.toml"
KEPT = ROOT / "docs" / "results" / "evidence" / "first_published.jsonl"


def main(argv: list[str] | None = None) -> int:
    """Trains what is left; returns 0 when all runs have ended, 75 when the time was up, and 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--folder", type=Path, default=Path("runs/first_published"))
    parser.add_argument("--out", type=Path, default=KEPT, help="file of the runs that have ended")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for another run than the registered"
    )
    args = parser.parse_args(argv)
    until = time.monotonic() + 60 * args.minutes
    changes = {"data.source": ["stdlib", str(Path(torch.__file__).parent)], "run.device": "cuda"}
    changes |= parse_overrides(args.set)
    if changes["run.device"] == "cuda" and not torch.cuda.is_available():
        say(
            "this machine has no GPU, and nothing was trained; start it on one, or try it in small with --set run.device=cpu"
        )
        return 2
    if args.set and args.out == KEPT:
        say("--set makes other runs than those registered; give --out FILE for their outcomes")
        return 2
    every = points(open_experiment(FILE, changes), seeds=[int(seed) for seed in args.seeds.split(",")])
    ended = {place_in_experiment(one) for one in read_results(args.out)} if args.out.exists() else set()
    left = [one for one in every if place_in_experiment(one) not in ended]
    say(f"{len(every) - len(left)} of {len(every)} runs have ended")
    folders = {one.label: args.folder / str(number) for number, one in enumerate(every)}
    try:
        train_all(
            left,
            folders,
            args.out,
            resume=True,
            began=lambda one: say(f"{one.label}: {one.config.length.rounds} rounds"),
            on_end=lambda one, end: say(f"{one.label}: {end.loss} after {end.seconds:.0f} s"),
            asked=lambda: time.monotonic() > until,
        )
    except KeyboardInterrupt:
        say("the time is up; start it again for what is left")
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main())
