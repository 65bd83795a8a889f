"""What may go with what: the facts of a run, and one table of the combinations that cannot work."""

__all__: list[str] = []
