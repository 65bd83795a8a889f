"""The built-in model and its sizes."""

__all__: list[str] = []
