"""The version of this package, as written into files."""

__version__ = "0.2.0"
