"""Workers over torch.distributed: their group, store and launch."""

__all__: list[str] = []
