"""What a run leaves behind: metrics, traces, events and checkpoints, in one folder."""

__all__: list[str] = []
