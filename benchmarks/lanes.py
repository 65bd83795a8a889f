"""How many cores a simulation of a user's own model keeps busy, on a machine that has fewer: forward and backward passes sleep.

    python benchmarks/lanes.py

A pass sleeps in place of computing, which leaves Python's lock to others as torch's operations do, and `available_cores` is
replaced. What remains is how far the threads wait for each other: the speed-up over one thread that sleeps for all. A forward
pass takes a third of a step, as measured for models of 0.1 to 5 million parameters.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from gossamer.run.simulated import threads
from gossamer.run.simulated.rounds import Rounds

FORWARD_S, BACKWARD_S, LOCAL_STEPS, ROUNDS = 0.026, 0.049, 8, 4
AIMS = {2: None, 4: None, 8: 7, 16: 14}


class Nap(torch.autograd.Function):
    """Sleeps both ways, and passes on what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same values."""
        time.sleep(FORWARD_S)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The same gradient."""
        time.sleep(BACKWARD_S)
        return gradients[0]


def batch(worker: int, step: int) -> Tensor:
    """Four places of two numbers."""
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(1000 * worker + step))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """Of a step that takes FORWARD_S and BACKWARD_S."""
    return (Nap.apply(model(x)) - 1).square().mean()


def speed_up(cores: int, workers: int, turns: bool) -> float:
    """Over one thread for all, by the median round after the first, in which it is learned that nothing draws."""
    threads.available_cores = lambda: cores
    times, advance = list[float](), Rounds.advance

    def timed(self: Rounds) -> None:
        began = time.perf_counter()
        advance(self)
        times.append(time.perf_counter() - began)

    Rounds.advance = timed
    settings = {
        "run.threads": 1,
        "run.take_turns": turns,
        "run.eval_every": 0,
        "run.eval_batches": 1,
        "run.checkpoint_every": 0,
        "record.tensorboard": False,
        "record.export": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        gossamer.simulate(
            model=lambda: nn.Linear(2, 1),
            data=batch,
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            method="diloco",
            workers=workers,
            local_steps=LOCAL_STEPS,
            rounds=ROUNDS,
            out=Path(folder) / "run",
            settings=settings,
        )
    Rounds.advance = advance
    return LOCAL_STEPS * workers * (FORWARD_S + BACKWARD_S) / statistics.median(times[1:])


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--turns", action="store_true", help="forward passes take turns, as those that draw do")
    given = parser.parse_args()
    for cores, aim in AIMS.items():
        found = speed_up(cores, given.workers, given.turns)
        print(f"{cores} emulated cores / one = {found:.2f}" + (f"   (aim {aim})" if aim else ""), flush=True)


if __name__ == "__main__":
    main()
