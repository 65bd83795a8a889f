"""Pretrain language models over slow, uneven networks: gossip, local steps and an outer optimizer."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AccumAdamW": "gossamer.optimizers",
    "GPA": "gossamer.optimizers",
    "Network": "gossamer.network.links",
    "Outer": "gossamer.library",
    "RULES": "gossamer.rules",
    "Rule": "gossamer.rules",
    "Schedule": "gossamer.rounds.schedule",
    "TOPOLOGIES": "gossamer.topologies",
    "anchored": "gossamer.rules",
    "anchored_gasloc": "gossamer.rules",
    "choco": "gossamer.rules",
    "cocktail": "gossamer.rules",
    "data_parallel": "gossamer.rules",
    "diloco": "gossamer.rules",
    "eager": "gossamer.rules",
    "easgd": "gossamer.rules",
    "error_feedback": "gossamer.rules",
    "fedopt": "gossamer.rules",
    "gasloc": "gossamer.rules",
    "gossip": "gossamer.rules",
    "jacobi": "gossamer.rules",
    "local_sgd": "gossamer.rules",
    "make_topology": "gossamer.topologies",
    "method": "gossamer.run.own_loop",
    "noloco": "gossamer.rules",
    "omr": "gossamer.rules",
    "price": "gossamer.network.pricing",
    "read_trace": "gossamer.record.trace",
    "relaysum": "gossamer.rules",
    "restarted": "gossamer.rules",
    "sgp": "gossamer.rules",
    "slowmo": "gossamer.rules",
    "sparseloco": "gossamer.rules",
    "sparta": "gossamer.rules",
    "weighted": "gossamer.rules",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # Imported at first use, so that `gossamer --help` does not wait for torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gossamer' has no attribute '{name}'")
