"""Every codec in one table; adding one touches its own file and one row here."""

import inspect
from collections.abc import Callable
from typing import Any

from gossamer.codecs.cast import bf16, fp16
from gossamer.codecs.codec import Codec
from gossamer.codecs.dct import dct_topk
from gossamer.codecs.exact import exact
from gossamer.codecs.quantize import fp4, int4, int8, sign
from gossamer.codecs.randomk import cocktail, randomk
from gossamer.codecs.statistical import int8_statistical
from gossamer.codecs.topk import topk, topk2bit
from gossamer.errors import ConfigError, choose

__all__ = [
    "CODECS",
    "Codec",
    "bf16",
    "cocktail",
    "dct_topk",
    "exact",
    "fp4",
    "fp16",
    "int4",
    "int8",
    "int8_statistical",
    "make_codec",
    "randomk",
    "sign",
    "topk",
    "topk2bit",
]

CODECS: dict[str, Callable[..., Codec]] = {
    "exact": exact,
    "bf16": bf16,
    "fp16": fp16,
    "int8": int8,
    "int8_statistical": int8_statistical,
    "int4": int4,
    "fp4": fp4,
    "sign": sign,
    "topk": topk,
    "topk2bit": topk2bit,
    "dct_topk": dct_topk,
    "randomk": randomk,
    "cocktail": cocktail,
}


def make_codec(name: str, **options: Any) -> Codec:
    """The codec of that name in `CODECS`, with its own options.

    Raises: ConfigError when the name or an option is unknown, or a value cannot work.

    >>> make_codec("topk", k=8).name
    'topk'
    """
    if name not in CODECS:
        raise ConfigError(choose("codec", name, CODECS))
    allowed = inspect.signature(CODECS[name]).parameters
    for option, value in options.items():
        if not allowed:
            raise ConfigError(f"codec '{name}' takes no options, and got {option} = {value!r}: leave it out")
        if option not in allowed:
            raise ConfigError(choose(f"option of codec '{name}'", option, allowed))
    return CODECS[name](**options)
