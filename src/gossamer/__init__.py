"""Pretrain language models over slow, uneven networks: gossip, local steps and an outer optimizer.

What most programs need is here; everything else is in the namespaces `rules`, `topologies`, `codecs`, `asynchronous`,
`optimizers`, `models`, `testing` and `errors`, such as `gossamer.rules.diloco` and `gossamer.codecs.int8`.
"""

import importlib
import random
from typing import TYPE_CHECKING, Any

from gossamer.collector import uncollected
from gossamer.version import __version__

if TYPE_CHECKING:
    from gossamer import asynchronous as asynchronous
    from gossamer import codecs as codecs
    from gossamer import errors as errors
    from gossamer import integrations as integrations
    from gossamer import models as models
    from gossamer import optimizers as optimizers
    from gossamer import rules as rules
    from gossamer import testing as testing
    from gossamer import topologies as topologies
    from gossamer.integrations.outer_loop import outer_loop as outer_loop
    from gossamer.library import Outer as Outer
    from gossamer.network.links import Network as Network
    from gossamer.network.pricing import price as price
    from gossamer.record.logs.trace import read_trace as read_trace
    from gossamer.rounds.schedule import Schedule as Schedule
    from gossamer.rules import Rule as Rule
    from gossamer.rules import diloco as diloco
    from gossamer.rules import gasloc as gasloc
    from gossamer.rules import gossip as gossip
    from gossamer.run.config.own_loop import method as method
    from gossamer.run.experiments.sweep import sweep as sweep
    from gossamer.run.simulated.simulate import simulate as simulate
    from gossamer.run.simulated.simulation import Simulation as Simulation

_HOMES = {  # as above, at run time
    "Network": "gossamer.network.links",
    "Outer": "gossamer.library",
    "Rule": "gossamer.rules",
    "Schedule": "gossamer.rounds.schedule",
    "Simulation": "gossamer.run.simulated.simulation",
    "asynchronous": "",
    "codecs": "",
    "diloco": "gossamer.rules",
    "errors": "",
    "gasloc": "gossamer.rules",
    "gossip": "gossamer.rules",
    "integrations": "",
    "method": "gossamer.run.config.own_loop",
    "models": "",
    "optimizers": "",
    "outer_loop": "gossamer.integrations.outer_loop",
    "price": "gossamer.network.pricing",
    "read_trace": "gossamer.record.logs.trace",
    "rules": "",
    "simulate": "gossamer.run.simulated.simulate",
    "sweep": "gossamer.run.experiments.sweep",
    "testing": "",
    "topologies": "",
}
"""The module that defines each public name; none for a namespace."""

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        # Imported at first use, so that `gossamer --help` does not wait for torch.
        if name not in _HOMES:
            raise AttributeError(f"module 'gossamer' has no attribute '{name}'")
        home = _HOMES[name]
        state = random.getstate()
        try:
            with uncollected():
                module = importlib.import_module(home or f"gossamer.{name}")
            return getattr(module, name) if home else module
        finally:
            random.setstate(state)  # rich draws a number when it is imported, and the program may have set a seed


def __dir__() -> list[str]:
    return __all__
