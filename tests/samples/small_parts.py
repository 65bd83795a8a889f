"""The model, the data and the loss of the runs in this folder, which 0.1.0 wrote; with a real text they would be a megabyte."""

import torch
from torch import Tensor, nn


def net() -> nn.Module:
    """A model of three parameters."""
    return nn.Linear(2, 1)


def batch(worker: int, step: int) -> Tensor:
    """Four points for an inner step of a worker."""
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(1000 * worker + step))


def held_out(step: int) -> Tensor:
    """A batch to validate on."""
    return batch(99, step)


def square(model: nn.Module, points: Tensor) -> Tensor:
    """The mean square of what the model lacks of the sum of the coordinates."""
    return (model(points).squeeze(-1) - points.sum(-1)).square().mean()
