"""Recorded real runs, computed again in one process to the last bit."""

__all__: list[str] = []
