"""`gossamer` with a worker whose gradient is infinite where its loss does not see it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from gossamer.cli import main
from gossamer.run.worker.replica import Replica

WORKER = 1
UNSEEN = 255
"""A byte that is in no text."""


@contextmanager
def poison(at_step: int) -> Iterator[None]:
    """From this inner step on, the gradient of one worker is infinite in one element of an embedding row that no batch has."""
    clean: Callable[[Replica, Mapping[int, int]], tuple[float, int]] = Replica._backward

    def backward(self: Replica, places: Mapping[int, int]) -> tuple[float, int]:
        found = clean(self, places)
        if self.index == WORKER and self.steps_taken >= at_step:
            gradient = self.model.get_parameter("model.embed_tokens.weight").grad
            assert gradient is not None
            gradient[UNSEEN, 0] = torch.inf
        return found

    Replica._backward = backward
    try:
        yield
    finally:
        Replica._backward = clean


def poisoned_main(argv: Sequence[str]) -> int:
    """`gossamer`, whose worker is poisoned from its inner step 4 on."""
    with poison(4):
        return main(argv)
