"""A run from its file to its end: configuration, workers, and the drivers, simulated and real."""

__all__: list[str] = []
