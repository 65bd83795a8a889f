"""Settings of run files and options of methods: their fields, their bounds, and one sentence for each fault."""

__all__: list[str] = []
