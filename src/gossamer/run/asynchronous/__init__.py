"""Real processes that wait for nobody."""

__all__: list[str] = []
