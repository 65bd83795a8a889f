"""How long it takes from a command to what a user waits for: imports, help, the first inner step of eight workers, a real run.

    python benchmarks/start.py

Medians of processor seconds of whole processes with all their children, as other processes change these little; on an idle
machine a clock shows about as much. What importing torch takes is part of all from `check` on.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STOP = """
import os
from gossamer.run.worker.replica import Replica
step = Replica._step
def stepped(self, round, h):
    step(self, round, h)
    os._exit(0)
Replica._step = stepped
"""
FIRST_STEP = f"import gossamer\ngossamer.simulate{STOP}gossamer.simulate({{'workers': 8}})"
OWN = f"""
import torch
import gossamer
gossamer.simulate{STOP}
gossamer.simulate(model=lambda: torch.nn.Linear(2, 1), data=lambda w, s: torch.ones(4, 2),
    loss=lambda model, x: model(x).square().mean(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
    method="gasloc", workers=8, local_steps=2, rounds=1)
"""
TORCH, CHECK = ("-c", "import torch"), ("-m", "gossamer", "check", "run.toml")
MISTAKES = {"none.toml", "misspelt.toml", "run.stps=3", "7B"}
RUN = 'workers = 2\n[run]\nsteps = 1\nlocal_steps = 1\neval_every = 0\n[model]\nsize = "0.2m"\n'


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats: int = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN)
        (folder / "misspelt.toml").write_text(f'method = "diloco"\nwrkers = 2\n{RUN}')
        (folder / "network.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e8\nstep_s = 1.0\n")

        def once(number: int, *words: str) -> float:
            """Seconds of a processor."""
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            out = ["--out", str(folder / f"run{number}")] if "train" in words else []
            done = subprocess.run([sys.executable, *words, *out], cwd=folder, capture_output=True)
            assert done.returncode == (2 if {*words} & MISTAKES else 0), done.stderr
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        def seconds(*words: str) -> float:
            return statistics.median(once(number, *words) for number in range(repeats))

        def beyond(torch: tuple[str, str], *words: str) -> float:
            """Seconds more than importing torch, in turns: the speed of a machine may change within minutes."""
            pairs = [(once(number, *words), once(number, *torch)) for number in range(repeats)]
            return statistics.median(whole - torch for whole, torch in pairs)

        print(f"import torch, s = {seconds(*TORCH):.2f}")
        print(f"import gossamer, s = {seconds('-c', 'import gossamer'):.2f}   (aim at most 0.15)")
        print(f"gossamer --help, s = {seconds('-m', 'gossamer', '--help'):.2f}   (aim at most 0.3)")
        print(f"gossamer list, s = {seconds('-m', 'gossamer', 'list'):.2f}   (aim at most 0.5)")
        print(
            f"a run file that is missing, s = {seconds('-m', 'gossamer', 'train', 'none.toml'):.2f}   (aim at most 0.5)"
        )
        refused = {
            "a run file with an unknown key": ["train", "misspelt.toml"],
            "--set with an unknown key": ["simulate", "run.toml", "--set", "run.stps=3"],
            "a plan of an unknown size": ["plan", "network.toml", "--workers", "2", "--model", "7B"],
        }
        for mistake, words in refused.items():
            print(f"{mistake}, s = {seconds('-m', 'gossamer', *words):.2f}   (aim at most 0.5)")
        print(f"gossamer check, s = {seconds(*CHECK):.2f}   (aim at most 2)")
        print(f"to the first step of an optimizer of torch's, s = {seconds('-c', OWN):.2f}   (aim at most 1.7)")
        print(f"gossamer check beyond importing torch, s = {beyond(TORCH, *CHECK):.2f}   (aim at most 0.5)")
        own_s = beyond(("-c", "import os, torch; os._exit(0)"), "-c", OWN)
        print(f"to the first step of torch's optimizer beyond importing torch, s = {own_s:.2f}   (aim at most 0.2)")
        first_s = seconds("-c", FIRST_STEP)
        print(f"to the first inner step of eight workers, s = {first_s:.2f}   (aim at most 3)")
        train_s = seconds("-m", "gossamer", "train", "run.toml", "--local", "2")
        print(f"train --local 2, a run of one inner step, s = {train_s:.2f}   (aim at most 5)")


if __name__ == "__main__":
    main()
