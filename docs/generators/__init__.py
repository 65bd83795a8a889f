"""The pages of the site that are made from the code when it is built; none of them is committed."""

__all__: list[str] = []
