"""The page of runs: live on loopback, or frozen as one file."""

__all__: list[str] = []
