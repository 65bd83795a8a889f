"""Encoding and decoding of each codec against this machine's copy bandwidth, in one run.

    python benchmarks/codecs.py [--numel 16_777_216] [--threads 1] [--repeats 7]

Times are medians of the processor's seconds, shared out among the threads. A copy, encoding and decoding take turns. GB/s counts
the bytes of the fp32 tensor once, for encoding and decoding together, and "of copy" is the median ratio to a copy of that tensor,
counted the same way. Below the link speed in "pays below", encoding, sending the payload and decoding takes less time than
sending the tensor as it is. Bits per parameter are those of the payload actually produced. `--plain` times the form in Python.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch

from gossamer.codecs import CODECS, Codec, fp4, int8, passes, topk
from gossamer.tree import nbytes

ROWS: dict[str, Codec] = {
    **{name: factory() for name, factory in CODECS.items() if name != "exact"},
    "int8 stochastic": int8(rounding="stochastic"),
    "fp4 stochastic": fp4(rounding="stochastic"),
    "topk bf16": topk(values="bf16"),
}
AIMS = {
    **dict.fromkeys(("bf16", "fp16", "int8"), 0.5),
    **dict.fromkeys(("int4", "fp4", "sign"), 0.35),
    **dict.fromkeys(("int8 stochastic", "fp4 stochastic"), 0.3),
    **dict.fromkeys(("topk", "topk2bit", "cocktail"), 0.12),
}
"""None for `int8_statistical` and `dct_topk`: sums in fp64 and products with matrices leave a tenth (docs/adr/0039)."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help="without the compiled passes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.plain:
        passes.LONG = sys.maxsize
    x = torch.randn(args.numel, generator=torch.Generator().manual_seed(0))
    target, size = torch.empty_like(x), 4 * args.numel

    def timed(act: Callable[[], object]) -> float:
        start = time.process_time()
        act()
        return (time.process_time() - start) / args.threads

    print(f"{args.numel:,} elements, {args.threads} threads")
    header = (
        "codec",
        "bits/param",
        "x less",
        "copy ms",
        "encode ms",
        "decode ms",
        "GB/s",
        "of copy",
        "pays below",
        "error",
    )
    print(("{:<18}" + "{:>12}" * 9).format(*header))
    reached: dict[str, float] = {}
    for name, codec in ROWS.items():
        payload = codec.encode(x, 1)
        error = ((x - codec.decode(payload, x)).norm() / x.norm()).item()
        acts = (
            functools.partial(target.copy_, x),
            functools.partial(codec.encode, x, 1),
            functools.partial(codec.decode, payload, x),
        )
        times = [[timed(act) for act in acts] for _ in range(args.repeats)]
        copy_s, encode_s, decode_s = map(statistics.median, zip(*times, strict=True))
        of_copy = reached[name] = statistics.median(copy / (encode + decode) for copy, encode, decode in times)
        sent = nbytes(payload)
        pays_below = 8 * (size - sent) / (encode_s + decode_s)
        row = (
            f"{8 * sent / args.numel:.4f}",
            f"{size / sent:.1f}",
            f"{copy_s * 1e3:.1f}",
            f"{encode_s * 1e3:.1f}",
            f"{decode_s * 1e3:.1f}",
            f"{size / (encode_s + decode_s) / 1e9:.2f}",
            f"{of_copy:.3f}",
            f"{pays_below / 1e9:.2f} Gb/s",
            f"{error:.4f}",
        )
        print(("{:<18}" + "{:>12}" * 9).format(name, *row), flush=True)
    for name, aim in AIMS.items():
        print(f"{name}, encoded and decoded, of a copy's speed = {reached[name]:.3f}   (aim {aim})")


if __name__ == "__main__":
    main()
