"""Frames and letters over sockets of our own: the handshake, links and hubs."""

__all__: list[str] = []
