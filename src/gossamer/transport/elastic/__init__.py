"""The protocol of runs whose workers come and go, and what such workers ask of each other."""

__all__: list[str] = []
