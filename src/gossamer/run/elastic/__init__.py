"""Rounds on real processes that come and go."""

__all__: list[str] = []
