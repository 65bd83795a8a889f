"""Runs of many workers in one process."""

__all__: list[str] = []
