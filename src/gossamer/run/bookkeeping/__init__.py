"""Bookkeeping shared by all drivers of a run: journal, checkpoints, evaluation and resumption."""

__all__: list[str] = []
