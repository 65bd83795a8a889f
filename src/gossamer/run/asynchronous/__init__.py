"""Asynchronous workers on real processes."""

__all__: list[str] = []
