"""Replay of recorded real runs in one process, bit for bit."""

__all__: list[str] = []
