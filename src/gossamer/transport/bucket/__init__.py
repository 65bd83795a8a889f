"""Runs whose whole state lies in an object store: the store, and the protocol of workers that meet there alone."""

__all__: list[str] = []
