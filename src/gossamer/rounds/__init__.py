"""A synchronous round: when what is exchanged, the exchange itself, and whether it is stable."""

__all__: list[str] = []
