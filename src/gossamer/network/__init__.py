"""The network model: links, prices of recorded runs, plans, probes and utilisation."""

__all__: list[str] = []
