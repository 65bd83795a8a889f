"""A worker whose replica is cut into stages, in one process or several."""

__all__: list[str] = []
