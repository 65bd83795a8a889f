"""A thousand virtual workers of a tiny model of a user's own: seconds and memory for each worker, from 8 workers to 1,024.

    python benchmarks/many_workers.py [--workers 8 64 1024] [--rounds 4]

Processor seconds of a whole simulation over its workers, without imports, of the fewest workers the median of nine; "flat" means
that a worker of the most costs at most 1.2 times one of the fewest. Memory is the peak of the process, with what it imports. A
mean over everyone is n² messages in the record.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

PROGRAM = """
import sys, tempfile, time, torch, gossamer
from torch import nn
import gossamer.run.simulated.simulate
began = time.process_time()

def batch(worker, step):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * worker + step))
    return x, x.sum(1, keepdim=True)

with tempfile.TemporaryDirectory() as folder:
    run = gossamer.simulate(
        model=lambda: nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 1)), data=batch,
        loss=lambda model, given: (model(given[0]) - given[1]).square().mean(), out=folder + "/run",
        method=sys.argv[1], workers=int(sys.argv[2]), rounds=int(sys.argv[3]), local_steps=2,
        settings={"record.tensorboard": False, "record.export": False, "run.eval_workers": False, "run.checkpoint_every": 0},
    )
print(time.process_time() - began)
"""


def measured(method: str, workers: int, rounds: int) -> tuple[float, float]:
    """Processor seconds of a simulation, and its peak memory in bytes."""
    words = [sys.executable, "-c", PROGRAM, method, str(workers), str(rounds)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, method
    return float(said.splitlines()[-1]), 1024 * used.ru_maxrss


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    counts: Sequence[int] = args.workers
    for method in ("gasloc", "diloco"):
        found = {n: measured(method, n, args.rounds) for n in counts}
        few_s = [measured(method, counts[0], args.rounds)[0] for _ in range(8)]  # of a tenth of a second each
        found[counts[0]] = statistics.median([*few_s, found[counts[0]][0]]), found[counts[0]][1]
        for n, (seconds, peak) in found.items():
            print(f"{method}, {n} workers: {seconds:.1f} s, {1e3 * seconds / n:.0f} ms a worker, {peak / 1e9:.2f} GB")
        fewest, most = counts[0], counts[-1]
        ratio = found[most][0] / most * fewest / found[fewest][0]
        print(f"{method}: a worker of {most} over one of {fewest} = {ratio:.2f}   (aim at most 1.2)")
        print(f"{method}: memory of {most} workers, GB = {found[most][1] / 1e9:.2f}   (aim at most 8)")


if __name__ == "__main__":
    main()
