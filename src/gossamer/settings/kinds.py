"""The three kinds of method that a run file names, each by its table."""

INSTEAD: dict[str, tuple[str, ...]] = {
    "server": ("rule", "pair", "topology"),
    "pair": ("rule", "server"),
    "rule": ("server", "pair"),
}
"""The tables of a run file that each of the three kinds of method excludes."""
