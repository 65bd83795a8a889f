"""`gossamer` with a worker whose gradient is infinite where its loss does not see it: `python poisoned.py STEP WORDS...`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gossamer.cli import main
from gossamer.run.replica import Replica

__all__ = ["poison"]

WORKER = 1
UNSEEN = 255
"""A byte that is in no text."""


@contextmanager
def poison(at_step: int) -> Iterator[None]:
    """From this inner step on, the gradient of one worker is infinite in one element of an embedding row that no batch has."""
    clean: Callable[[Replica, int], tuple[float, int]] = Replica._backward

    def backward(self: Replica, step: int) -> tuple[float, int]:
        found = clean(self, step)
        if self.index == WORKER and step >= at_step:
            gradient = self.model.get_parameter("model.embed_tokens.weight").grad
            assert gradient is not None
            gradient[UNSEEN, 0] = torch.inf
        return found

    Replica._backward = backward
    try:
        yield
    finally:
        Replica._backward = clean


if __name__ == "__main__":
    with poison(int(sys.argv[1])):
        sys.exit(main(sys.argv[2:]))
