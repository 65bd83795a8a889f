"""Compatibility of a run's parts: its combination, and one table of incompatibilities."""

__all__: list[str] = []
