"""Pretrain language models over slow, uneven networks: gossip, local steps and an outer optimizer."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Outer": "gossamer.library",
    "RULES": "gossamer.rules",
    "Rule": "gossamer.rules",
    "TOPOLOGIES": "gossamer.topology",
    "data_parallel": "gossamer.rules",
    "diloco": "gossamer.rules",
    "gasloc": "gossamer.rules",
    "gossip": "gossamer.rules",
    "local_sgd": "gossamer.rules",
    "make_topology": "gossamer.topology",
    "noloco": "gossamer.rules",
    "price": "gossamer.network",
    "simulate": "gossamer.simulate",
    "stability": "gossamer.stability",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]
