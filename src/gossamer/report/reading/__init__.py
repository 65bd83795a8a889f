"""Reading of run folders, complete or growing, for pages, tables, the terminal and status."""

__all__: list[str] = []
