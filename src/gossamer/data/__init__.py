"""Training text: files and streams, tokenizers, and batches as pure functions of worker and step."""

__all__: list[str] = []
