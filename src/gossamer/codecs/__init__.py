"""Every codec in one table; adding one touches its own file and one row here."""

from collections.abc import Callable

from gossamer.codecs.codec import Codec
from gossamer.codecs.exact import exact

__all__ = ["CODECS", "Codec", "exact"]

CODECS: dict[str, Callable[..., Codec]] = {"exact": exact}
