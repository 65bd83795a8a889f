"""Frames and letters over our own sockets: handshake, connections and servers."""

__all__: list[str] = []
