"""From a run file, and what a user gave, to what runs."""

__all__: list[str] = []
