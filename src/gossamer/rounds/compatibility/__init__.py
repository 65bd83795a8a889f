"""What may go with what: the combination that a run is, and one table of the incompatibilities."""

__all__: list[str] = []
