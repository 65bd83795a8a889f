"""Elastic rounds on real processes."""

__all__: list[str] = []
