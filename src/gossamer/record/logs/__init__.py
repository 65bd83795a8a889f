"""Lines in the files of a run folder: what was done, when, and what decided it."""

__all__: list[str] = []
