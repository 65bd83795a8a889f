"""Every codec in one table; adding one touches its own file and one row here."""

from collections.abc import Callable

from gossamer.codecs.cast import bf16, fp16
from gossamer.codecs.codec import Codec
from gossamer.codecs.dct import dct_topk
from gossamer.codecs.exact import exact
from gossamer.codecs.quantize import fp4, int4, int8, sign
from gossamer.codecs.randomk import cocktail, randomk
from gossamer.codecs.statistical import int8_statistical
from gossamer.codecs.topk import topk, topk2bit

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
