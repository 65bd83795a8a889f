"""The life of one real worker: what workers in rounds, elastic ones, those that wait for nobody and those of a server share."""

__all__: list[str] = []
