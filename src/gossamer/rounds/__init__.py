"""A synchronous round: its schedule, the exchange, and its stability."""

__all__: list[str] = []
