"""How long it takes from a command to what a user waits for: imports, help, the first inner step of eight workers, a real run.

    python benchmarks/start.py

Medians of processor seconds of whole processes with all their children, as other processes change these little; on an idle
machine a clock shows about as much. What importing torch takes is part of the last two.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FIRST_STEP = """
import os
from gossamer.run.worker.replica import Replica
step = Replica._step
def stepped(self, round, h):
    step(self, round, h)
    os._exit(0)
Replica._step = stepped
import gossamer
gossamer.simulate({"workers": 8})
"""
RUN = 'workers = 2\n[run]\nsteps = 1\nlocal_steps = 1\neval_every = 0\n[model]\nsize = "0.2m"\n'


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats: int = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN)

        def seconds(*words: str) -> float:
            """Of a processor, the median."""
            times = []
            for number in range(repeats):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                out = ["--out", str(folder / f"run{number}")] if "train" in words else []
                subprocess.run([sys.executable, *words, *out], cwd=folder, check=True, capture_output=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            return statistics.median(times)

        print(f"import torch, s = {seconds('-c', 'import torch'):.2f}")
        print(f"import gossamer, s = {seconds('-c', 'import gossamer'):.2f}   (aim at most 0.15)")
        print(f"gossamer --help, s = {seconds('-m', 'gossamer', '--help'):.2f}   (aim at most 0.3)")
        first_s = seconds("-c", FIRST_STEP)
        print(f"to the first inner step of eight workers, s = {first_s:.2f}   (aim at most 3)")
        train_s = seconds("-m", "gossamer", "train", "run.toml", "--local", "2")
        print(f"train --local 2, a run of one inner step, s = {train_s:.2f}   (aim at most 5)")


if __name__ == "__main__":
    main()
