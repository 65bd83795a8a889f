"""Several runs: comparisons, sweeps and searches."""

__all__: list[str] = []
