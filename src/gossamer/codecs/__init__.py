"""The table of codecs. To add a codec, write its own file, and import it and add its row here."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from gossamer.codecs.cast import bf16 as bf16
from gossamer.codecs.cast import exact as exact
from gossamer.codecs.cast import fp16 as fp16
from gossamer.codecs.codec import Codec, both_ways, fitted
from gossamer.codecs.dct import dct_topk as dct_topk
from gossamer.codecs.quantize import fp4 as fp4
from gossamer.codecs.quantize import int4 as int4
from gossamer.codecs.quantize import int8 as int8
from gossamer.codecs.quantize import sign as sign
from gossamer.codecs.randomk import cocktail as cocktail
from gossamer.codecs.randomk import randomk as randomk
from gossamer.codecs.statistical import int8_statistical as int8_statistical
from gossamer.codecs.topk import topk as topk
from gossamer.codecs.topk import topk2bit as topk2bit
from gossamer.errors import ConfigError
from gossamer.settings.fields import Words
from gossamer.settings.options import row, table

__all__ = [
    "CODECS",
    "Codec",
    "CodecSpec",
    "both_ways",
    "codec_of",
    "fitted",
    "make_codec",
]

CODECS: dict[str, Callable[..., Codec]] = table(
    exact,
    bf16,
    fp16,
    int8,
    int8_statistical,
    int4,
    fp4,
    sign,
    topk,
    topk2bit,
    dct_topk,
    randomk,
    cocktail,
    kind="codec",
    where="codec",
)


CodecSpec = Annotated[str | Mapping[str, Any], Words("a codec's name, or a table with its name and options")]


def make_codec(name: str, **options: Any) -> Codec:
    """The codec of that name in `CODECS`, with its options; `back` is the codec of the return leg (`both_ways`) or "none".

    Raises: ConfigError when the name or an option is unknown, or a value cannot work.

    >>> make_codec("topk", k=8).name, make_codec("fp4", back="bf16").back.name
    ('topk', 'bf16')
    """
    build = row("codec", CODECS, name, options, also=["back"])
    back = options.pop("back", None)
    codec = build(**options)
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
        raise ConfigError(
            f"back is {spec!r}, which has its own back; there is only one return leg: remove the inner back"
        )
    return make_codec(**table)
