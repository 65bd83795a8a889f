"""Rounds on real processes."""

__all__: list[str] = []
