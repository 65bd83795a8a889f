"""Run folders as they are read, whole or while they grow, for pages, tables, the terminal and status."""

__all__: list[str] = []
