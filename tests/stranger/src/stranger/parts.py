"""A rule, a topology, a codec, a server, a model with its loss, data and an inner optimizer."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.asynchronous import PushInfo, ServerRule
from gossamer.codecs import Codec, bf16
from gossamer.rules import Context, Rule, gasloc
from gossamer.topologies import Topology, graph
from gossamer.topologies.mixing import pull
from gossamer.tree import Tree


def damped(lr: float = 0.5, momentum: float = 0.3) -> Rule:
    """Gasloc with other defaults."""
    return gasloc(lr=lr, momentum=momentum)


def halfway(share: float = 0.5) -> Rule:
    """Every worker goes a share of the way to the mean of its neighbourhood."""

    def init(x: Tensor, ctx: Context) -> Tree:
        return ()

    def send(x: Tensor, s: Tree, ctx: Context) -> Tree:
        return x

    def recv(x: Tensor, s: Tree, own_decoded: Tree, combined: Any, ctx: Context) -> tuple[Tensor, Tree]:
        return x + share * combined, s

    return Rule(init, send, pull, recv, needs="connected", single_worker_limit="inner", mean_preserving=True)


def line(n: int) -> Topology:
    """Workers in a line."""
    return graph(n, edges=[(i, i + 1) for i in range(n - 1)])


def short(block: int = 64) -> Codec:
    """Half precision by another name."""
    return bf16()


class _Server(NamedTuple):
    x: Tensor


def averaging(share: float = 0.5) -> ServerRule:
    """A server that follows each worker a share of its way."""

    def absorb(s: _Server, delta: Tensor, info: PushInfo) -> _Server:
        return _Server(s.x - share * delta)

    return ServerRule(init=lambda x: _Server(x.clone()), greet=lambda s: s.x, absorb=absorb)


def small(width: int = 8) -> nn.Module:
    """A model of numbers, not of text."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def batch(worker: int, step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """The batch of a worker at a step."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1000 * worker + step))
    return x, x.sum(1, keepdim=True)


def same_for_all(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch that forgets its worker."""
    return batch(0, step)


def held_out(k: int) -> tuple[Tensor, Tensor]:
    """The k-th validation batch."""
    return batch(10**6, k)


def square(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """The mean squared error."""
    return (model(given[0]) - given[1]).square().mean()


def descent(parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.0, factor: float = 1.0) -> Any:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=lr * factor, momentum=momentum)


def broken(lr: float = 0.5) -> Rule:
    """Raises."""
    raise ZeroDivisionError(f"lr is {lr}")


not_callable = 3
