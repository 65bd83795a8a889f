"""A topology as a picture: who sends to whom, in the first rounds."""

import math
from collections.abc import Sequence

from gossamer.topologies import Topology

_SIZE, _RADIUS, _DOT = 150, 56, 9
Edge = tuple[int, int]


def rounds(topology: Topology, n: int, most: int = 3) -> str:
    """The first rounds of a topology side by side; one if all of them are alike."""
    drawn = [_edges(topology, n, t) for t in range(most)]
    if all(edges == drawn[0] for edges in drawn):
        return _figure([(drawn[0], "every round")], n)
    return _figure([(edges, f"round {t}") for t, edges in enumerate(drawn)], n)


def hub(n: int) -> str:
    """Workers around a server."""
    middle = _SIZE / 2
    lines = "".join(_line(_place(i, n), (middle, middle), False) for i in range(n))
    square = f'<rect x="{middle - 11}" y="{middle - 11}" width="22" height="22" rx="4" class="server"/>'
    label = f'<text x="{middle}" y="{middle + 4}">S</text>'
    return _wrapped(lines + _dots(n) + square + label, "each on its own clock", f"{n} workers around a server S")


def _edges(topology: Topology, n: int, round: int) -> frozenset[Edge]:
    mixing = topology.mixing(round)
    return frozenset((sender, i) for i in range(n) for sender in mixing.receives_from(i))


def _figure(pictures: Sequence[tuple[frozenset[Edge], str]], n: int) -> str:
    return "".join(
        _wrapped("".join(_arrows(edges, n)) + _dots(n), caption, f"Who sends to whom among {n} workers, {caption}")
        for edges, caption in pictures
    )


def _arrows(edges: frozenset[Edge], n: int) -> list[str]:
    """One line for each pair; with an arrowhead where only one of the two sends."""
    both = {(a, b) for a, b in edges if (b, a) in edges}
    return [
        _line(_place(a, n), _place(b, n), (a, b) not in both) for a, b in sorted(edges) if (a, b) not in both or a < b
    ]


def _place(i: int, n: int) -> tuple[float, float]:
    angle = 2 * math.pi * i / n - math.pi / 2
    return _SIZE / 2 + _RADIUS * math.cos(angle), _SIZE / 2 + _RADIUS * math.sin(angle)


def _line(a: tuple[float, float], b: tuple[float, float], arrow: bool) -> str:
    length = math.dist(a, b)
    dx, dy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    x, y = b[0] - dx * (_DOT + 1), b[1] - dy * (_DOT + 1)
    line = f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>'
    if not arrow:
        return line
    back, side = 7, 3.5
    corners = (
        (x, y),
        (x - back * dx - side * dy, y - back * dy + side * dx),
        (x - back * dx + side * dy, y - back * dy - side * dx),
    )
    return line + f'<polygon points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in corners)}"/>'


def _dots(n: int) -> str:
    places = [_place(i, n) for i in range(n)]
    return "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_DOT}"/><text x="{x:.1f}" y="{y + 4:.1f}">{i}</text>'
        for i, (x, y) in enumerate(places)
    )


def _wrapped(inside: str, caption: str, label: str) -> str:
    svg = f'<svg viewBox="0 0 {_SIZE} {_SIZE}" role="img" aria-label="{label}">{inside}</svg>'
    return f'<figure class="graph">{svg}<figcaption>{caption}</figcaption></figure>'
