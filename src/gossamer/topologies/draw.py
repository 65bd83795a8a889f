"""Drawings of a topology's round in plain text."""

import math

from gossamer.topologies.contract import Topology
from gossamer.topologies.mixing import Mixing


def draw_round(topology: Topology, round: int) -> str:
    """Draws one round in plain text: up to 16 workers on a circle, and a list of the peers and weights of each worker.

    >>> from gossamer.topologies import star
    >>> print(draw_round(star(4), 0))
    star, 4 workers, round 0
    <BLANKLINE>
            0
          . . .
        .   .   .
      .     .     .
    3       .       1
            .
            .
            .
            2
    <BLANKLINE>
    0 receives from 1, 2, 3 (0.25 each)
    1 receives from 0 (0.25)
    2 receives from 0 (0.25)
    3 receives from 0 (0.25)
    """
    mixing = topology.mixing(round)
    lines = [f"{topology.name}, {topology.n} worker{'s' * (topology.n != 1)}, round {round}", ""]
    if topology.n <= 16:
        lines += [*_circle(mixing), ""]
    listed = min(topology.n, 64)
    for i in range(listed):
        weights = {j: f"{w:.3g}" for j, w in mixing.rows[i] if j != i}
        if len(weights) > 1 and len(set(weights.values())) == 1:
            peers = f"{', '.join(map(str, weights))} ({weights.popitem()[1]} each)"
        else:
            peers = ", ".join(f"{j} ({w})" for j, w in weights.items()) or "nobody"
        lines.append(f"{i} receives from {peers}")
    if topology.n > listed:
        lines.append(f"... and {topology.n - listed} more workers")
    return "\n".join(lines)


def _circle(mixing: Mixing) -> list[str]:
    """Worker 0 on top, the others clockwise, and dots along the links."""
    n = mixing.n
    radius = 4 if n <= 8 else 8
    turns = [2 * math.pi * i / n for i in range(n)]
    # (line, column), rounded so that the last bit of a cosine cannot move a dot
    places = [(round(radius - radius * math.cos(a), 6), round(2 * radius + 2 * radius * math.sin(a), 6)) for a in turns]
    grid = [[" "] * (4 * radius + 2) for _ in range(2 * radius + 1)]
    for i, j in sorted({(min(a, b), max(a, b)) for a in range(n) for b in mixing.receives_from(a)}):
        (y, x), (to_y, to_x) = places[i], places[j]
        steps = math.ceil(max(abs(to_y - y), abs(to_x - x) / 2))
        for part in (s / steps for s in range(1, steps)):
            grid[_nearest(y + (to_y - y) * part)][_nearest(x + (to_x - x) * part)] = "."
    for i, (y, x) in enumerate(places):
        for k, digit in enumerate(str(i)):
            grid[_nearest(y)][_nearest(x) + k] = digit
    return "\n".join("".join(row).rstrip() for row in grid).rstrip().split("\n")


def _nearest(x: float) -> int:
    return math.floor(x + 0.5)
