"""Random numbers as pure functions of where they are used, so that no generator state is stored or exchanged."""

import contextlib
import hashlib
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

TURN = threading.RLock()
"""The lock of the thread that draws from torch's process-wide generators, or calls a user's function."""


def key(seed: int, *path: int | str) -> int:
    """A 63-bit key for one use of randomness: `key(seed, worker, step, "data")`.

    Equal arguments give equal keys on every machine; any other path gives an unrelated key. The hash covers the path as a
    tuple, so `key(1, 23)` and `key(12, 3)` differ.

    >>> key(0, 1, "data") == key(0, 1, "data"), key(0, 1, "data") == key(0, 2, "data")
    (True, False)
    """
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_rng(seed: int, *path: int | str) -> np.random.Generator:
    """A numpy generator at `key(seed, *path)`."""
    return np.random.Generator(np.random.PCG64(key(seed, *path)))


def torch_rng(seed: int, *path: int | str) -> "torch.Generator":
    """A CPU torch generator at `key(seed, *path)`; draw on the CPU and move, so that every device gets the same numbers."""
    import torch  # imported here, because planning and pricing draw numbers without torch

    return torch.Generator().manual_seed(key(seed, *path))


def generators_state() -> tuple[object, ...]:
    """The state of this process's generators that functions of a user draw from: torch's, numpy's and Python's. Some 20 µs."""
    import torch

    numpys = pickle.dumps(np.random.get_state(legacy=False))
    return torch.get_rng_state().numpy().tobytes(), numpys, random.getstate()


@contextlib.contextmanager
def drawing(device: "torch.device", seed: int, *path: int | str) -> Iterator[None]:
    """Lets what runs inside draw from torch's own generators (of the CPU, and of the device) at `key(seed, *path)`.

    Afterwards the generators are as they were, and other threads wait meanwhile: draws inside depend on the key only,
    in any thread or process, and a checkpoint needs no generator state. Cost: some 20 µs.
    """
    import torch

    gpus = [device] if device.type == "cuda" else []
    with TURN, torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed, which would also change the seeds of other accelerators.
        torch.default_generator.manual_seed(key(seed, *path))
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(key(seed, *path))
        yield


def sets_generator(act: Callable[[], object]) -> bool:
    """Whether `act` sets the state of torch's generator, as a backward pass with activation checkpointing does.

    Other threads may not draw meanwhile: call it while `TURN` is held.
    """
    import torch

    original, was_set = torch.set_rng_state, False

    def noted(new_state: torch.Tensor) -> None:
        nonlocal was_set
        was_set = True
        original(new_state)

    torch.set_rng_state = noted
    try:
        act()
    finally:
        torch.set_rng_state = original
    return was_set
