"""Closed forms and published figures: utilisation, goodput, stragglers and wall-clock time without a recorded run."""

__all__: list[str] = []
