"""A run that a visitor plays with: he kills workers, slows links, cuts the network and changes the method while it trains."""

__all__: list[str] = []
