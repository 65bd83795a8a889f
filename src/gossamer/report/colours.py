"""The colours of methods, which are the same on every page and in every figure."""

import itertools
import re
from collections.abc import Sequence

COLOURS = ("#0072b2", "#c94f00", "#00805e", "#b0508a", "#a87400", "#2f8fc4", "#5b5b5b", "#8a3ffc")
"""By place, as `--c0` to `--c7` of a light page; the next places have them again, with dashes."""
KINDS_OF_LINES = 4
"""Solid, and three kinds of dashes."""
_OWN = {
    "diloco": 0,
    "gasloc": 1,
    "gasloc 1-peer": 1,
    "gossip": 2,
    "gossip 1-peer": 2,
    "gasloc 2-peer": 3,
    "local sgd": 4,
    "noloco": 5,
    "data parallel": 6,
    "streaming diloco": 7,
    "streaming": 7,
    "muloco": 8,
    "gasloc drift": 9,
    "gossip 2-peer": 10,
    "eager": 11,
    "edit": 12,
    "fgd pairs": 13,
    "acco": 14,
    "sparseloco": 15,
    "demo": 20,
    "mt dao": 22,
    "distro": 23,
}
"""The place of each method that the evidence compares with others; a label that begins with its name is a variant of it."""


def places_of(methods: Sequence[str]) -> dict[str, int]:
    """The place of each method among the colours: that of its name where it has one, whatever else is shown with it.

    Variants of a method have its colour, each with other dashes.

    >>> places_of(["GASLoC 1-Peer", "DiLoCo, H = 30", "DiLoCo", "GASLoC 2-Peer", "FoMoE"])
    {'GASLoC 1-Peer': 1, 'DiLoCo, H = 30': 8, 'DiLoCo': 0, 'GASLoC 2-Peer': 3, 'FoMoE': 2}
    >>> places_of(["gasloc_2_peer", "streaming_overlap", "streaming"])
    {'gasloc_2_peer': 3, 'streaming_overlap': 15, 'streaming': 7}
    >>> places_of(["lr=0.001", "lr=0.002"])
    {'lr=0.001': 0, 'lr=0.002': 1}
    """
    places, own = dict[str, int](), {method: _own(method) for method in dict.fromkeys(methods)}
    for is_exact in (True, False):
        for method, (place, exact) in own.items():
            if place is None or method in places or exact != is_exact:
                continue
            alike = {(place + k * len(COLOURS)) % (KINDS_OF_LINES * len(COLOURS)) for k in range(KINDS_OF_LINES)}
            left = alike - {*places.values()}
            if left:
                places[method] = place if place in left else min(left)
    free = (place for place in itertools.count() if place not in {*places.values()})
    return {method: places[method] if method in places else next(free) for method in own}


def _own(method: str) -> tuple[int | None, bool]:
    """The place of a label's method, and whether the label is its name alone; None for a method without a place."""
    words = re.sub(r"(\d) ?peer\b", r"\1-peer", method.lower().replace("_", " "))
    names = [name for name in _OWN if re.match(rf"{re.escape(name)}(?![\w-])", words)]
    name = max(names, key=len, default=None)
    return (None, False) if name is None else (_OWN[name], name == words)
