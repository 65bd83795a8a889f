"""Real processes with a server."""

__all__: list[str] = []
