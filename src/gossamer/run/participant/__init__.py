"""The life cycle of one real worker, shared by workers in rounds, elastic, asynchronous and served ones."""

__all__: list[str] = []
