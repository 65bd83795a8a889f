"""The protocol of elastic runs, whose workers come and go, and the requests between such workers."""

__all__: list[str] = []
