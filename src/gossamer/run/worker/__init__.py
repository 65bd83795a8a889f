"""One worker: its task, its replica, and its batches and steps."""

__all__: list[str] = []
