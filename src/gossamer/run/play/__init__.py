"""An interactive run: a visitor kills workers, slows links, partitions the network and changes the method during training."""

__all__: list[str] = []
