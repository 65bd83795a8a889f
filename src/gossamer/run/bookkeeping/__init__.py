"""What every driver keeps of a run: its journal, its checkpoints, its evaluation and how it goes on."""

__all__: list[str] = []
