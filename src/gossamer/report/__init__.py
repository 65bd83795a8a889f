"""Tables, curves and pages of finished runs."""

__all__: list[str] = []
