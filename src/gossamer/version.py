"""The version of this package, for all who must say which one wrote a file."""

__version__ = "0.2.0"
