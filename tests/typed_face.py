"""Right and wrong uses of the public names, for the type checker: each wrong one must be an error, or its comment is one.

`make test` checks this file and never runs it.
"""

from collections.abc import Callable
from typing import assert_type

import torch
from torch import Tensor, nn

import gossamer

# Names with their types, none of them Any: to something that can be Any, a wrong assignment would be no error.
_outer: int = gossamer.Outer  # pyright: ignore[reportAssignmentType]
_simulation: int = gossamer.Simulation  # pyright: ignore[reportAssignmentType]
_rule: int = gossamer.Rule  # pyright: ignore[reportAssignmentType]
_schedule: int = gossamer.Schedule  # pyright: ignore[reportAssignmentType]
_network: int = gossamer.Network  # pyright: ignore[reportAssignmentType]
_diloco: int = gossamer.diloco  # pyright: ignore[reportAssignmentType]
_gasloc: int = gossamer.gasloc  # pyright: ignore[reportAssignmentType]
_gossip: int = gossamer.gossip  # pyright: ignore[reportAssignmentType]
_price: int = gossamer.price  # pyright: ignore[reportAssignmentType]
_read_trace: int = gossamer.read_trace  # pyright: ignore[reportAssignmentType]
_simulate: int = gossamer.simulate  # pyright: ignore[reportAssignmentType]
_sweep: int = gossamer.sweep  # pyright: ignore[reportAssignmentType]
_asynchronous: int = gossamer.asynchronous  # pyright: ignore[reportAssignmentType]
_codecs: int = gossamer.codecs  # pyright: ignore[reportAssignmentType]
_integrations: int = gossamer.integrations  # pyright: ignore[reportAssignmentType]
_method: int = gossamer.method  # pyright: ignore[reportAssignmentType]
_errors: int = gossamer.errors  # pyright: ignore[reportAssignmentType]
_models: int = gossamer.models  # pyright: ignore[reportAssignmentType]
_optimizers: int = gossamer.optimizers  # pyright: ignore[reportAssignmentType]
_rules: int = gossamer.rules  # pyright: ignore[reportAssignmentType]
_testing: int = gossamer.testing  # pyright: ignore[reportAssignmentType]
_topologies: int = gossamer.topologies  # pyright: ignore[reportAssignmentType]

# Options are checked by name and by type.
assert_type(gossamer.gasloc(lr=0.5, momentum=0.3), gossamer.Rule)
gossamer.gasloc(lr="oops")  # pyright: ignore[reportArgumentType]
gossamer.gasloc(momentun=0.3)  # pyright: ignore[reportCallIssue]
assert_type(gossamer.rules.diloco(), gossamer.Rule)
gossamer.rules.no_such_rule()  # pyright: ignore[reportAttributeAccessIssue]
gossamer.codecs.int8(block=1024)
gossamer.codecs.int8(block="many")  # pyright: ignore[reportArgumentType]
gossamer.topologies.ring(8, edge_weight=0.5)
gossamer.topologies.ring("eight")  # pyright: ignore[reportArgumentType]
gossamer.asynchronous.heloco()
gossamer.nothing()  # pyright: ignore[reportAttributeAccessIssue]

# Tests of rules.
gossamer.testing.check_rule(gossamer.gasloc(lr=0.5), topology="ring", workers=3)
gossamer.testing.check_rule(gossamer.gasloc)  # pyright: ignore[reportArgumentType]
gossamer.testing.check_parity(gossamer.gasloc(lr=0.5), "random", codec="int8", schedule=gossamer.Schedule(fragments=2))
gossamer.testing.check_parity(gossamer.gasloc(lr=0.5), worker=2)  # pyright: ignore[reportCallIssue]

# The outer loop.
outer = gossamer.Outer(nn.Linear(2, 1), gossamer.gasloc(), topology="random", local_steps=30)
assert_type(outer.step(), bool)
assert_type(outer.rounds, int)
assert_type(outer.metrics().bytes_sent, int)
with outer.mean_model() as mean:
    assert_type(mean, nn.Linear)
gossamer.Outer(nn.Linear(2, 1), gossamer.method("streaming_diloco"))
gossamer.Outer(nn.Linear(2, 1), "gasloc", reduction="tree")  # pyright: ignore[reportArgumentType]
gossamer.Outer(nn.Linear(2, 1), gossamer.gasloc)  # pyright: ignore[reportArgumentType]
gossamer.Outer(nn.Linear(2, 1), gossamer.gasloc(), local_step=30)  # pyright: ignore[reportCallIssue]

# Simulations.
make: Callable[[], nn.Module] = lambda: nn.Linear(2, 1)  # noqa: E731


def batch(worker: int, step: int) -> Tensor:
    """A batch."""
    return torch.ones(4, 2)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """A loss."""
    return model(x).mean()


run = gossamer.simulate(model=make, data=batch, loss=loss, rule=gossamer.gasloc(), workers=8, rounds=10)
assert_type(run, gossamer.Simulation)
assert_type(run.loss, float)
assert_type(run.mean_model(), nn.Module)
assert_type(run.go_on(until=5), gossamer.Simulation)
gossamer.simulate(workers="eight")  # pyright: ignore[reportArgumentType]
gossamer.simulate(worker=8)  # pyright: ignore[reportCallIssue]
gossamer.simulate(model=nn.Linear(2, 1), data=lambda worker: worker)  # pyright: ignore[reportArgumentType]
gossamer.sweep({"inner.lr": [1e-3, 2e-3]}, seeds=[0, 1], model=make).best()
gossamer.sweep(seeds=[0])  # pyright: ignore[reportCallIssue]
