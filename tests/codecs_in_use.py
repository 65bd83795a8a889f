"""Every codec, in forms that meet its edges."""

from gossamer.codecs import CODECS, Codec, cocktail, dct_topk, fp4, int4, int8, randomk, sign, topk, topk2bit

VARIANTS: dict[str, Codec] = {
    **{name: factory() for name, factory in CODECS.items()},
    "int8 short blocks": int8(block=8),
    "int8 stochastic": int8(rounding="stochastic"),
    "int4 stochastic": int4(rounding="stochastic"),
    "int4 in 128": int4(block=128),
    "fp4 stochastic": fp4(rounding="stochastic"),
    "fp4 short blocks": fp4(block=24),
    "sign in 8": sign(block=8),
    "topk odd": topk(k=3, chunk=10),
    "topk all": topk(k=4096),
    "topk bf16": topk(values="bf16"),
    "topk fp16": topk(values="fp16"),
    "topk2bit odd": topk2bit(k=3, chunk=10),
    "topk2bit in runs": topk2bit(tiles=False),
    "topk2bit single": topk2bit(k=1, chunk=7),
    "dct_topk bf16": dct_topk(k=7, values="bf16"),
    "randomk all": randomk(one_in=1),
    "randomk scaled": randomk(one_in=4, scaled=True),
    "randomk bf16": randomk(one_in=3, values="bf16"),
    "cocktail odd": cocktail(one_in=3, k=5, chunk=11, block=8),
    "cocktail all": cocktail(one_in=1, k=1280),
}
