"""Sending frames between workers: `memory` inside one process, `processes` over torch.distributed, `sockets` over our own.

A transport belongs to one worker. It knows tickets, peers and frames (flat tensors), but neither rules nor codecs.
"""

__all__: list[str] = []
