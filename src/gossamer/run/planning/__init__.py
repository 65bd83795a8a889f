"""What a run will do and cost, before anything is trained."""

__all__: list[str] = []
