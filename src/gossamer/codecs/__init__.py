"""Every codec in one table; adding one touches its own file and one row here."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gossamer.codecs.cast import bf16, fp16
from gossamer.codecs.codec import Codec, both_ways
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
    "both_ways",
    "cocktail",
    "codec_of",
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
    """The codec of that name in `CODECS`, with its own options, and `back`, the codec of the way back (`both_ways`) or "none".

    Raises: ConfigError when the name or an option is unknown, or a value cannot work.

    >>> make_codec("topk", k=8).name, make_codec("fp4", back="bf16").back.name
    ('topk', 'bf16')
    """
    if name not in CODECS:
        raise ConfigError(choose("codec", name, CODECS))
    allowed = [*inspect.signature(CODECS[name]).parameters, "back"]
    for option in options:
        if option not in allowed:
            raise ConfigError(choose(f"option of codec '{name}'", option, allowed))
    back = options.pop("back", None)
    codec = CODECS[name](**options)
    return codec if back in (None, "none") else both_ways(codec, codec_of(back))


def codec_of(spec: object) -> Codec:
    """A codec by its name, or by a table with its name and options. Raises ConfigError for anything else.

    >>> codec_of({"name": "topk", "k": 8}).name
    'topk'
    """
    table = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(
            f"back is {spec!r}; allowed are a codec's name, or a table with its name and options: give one"
        )
    if "back" in table:
        raise ConfigError(f"back is {spec!r}, which has a back of its own; there are two ways only: leave it out")
    return make_codec(**table)
