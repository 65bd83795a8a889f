"""Encoding and decoding of each codec against this machine's copy bandwidth, in one run.

    python benchmarks/codecs.py [--numel 16_777_216] [--threads 1] [--repeats 7]

Times are medians. GB/s counts the bytes of the fp32 tensor once, for encoding and decoding together; the ratio is to a copy
of that tensor, counted the same way. Below the link speed in "pays below", encoding, sending the payload and decoding takes
less time than sending the tensor as it is. Bits per parameter are those of the payload actually produced.
"""

import argparse

import torch
from timing import median_s

from gossamer.codecs import CODECS, Codec, fp4, int8, topk
from gossamer.tree import nbytes

ROWS: dict[str, Codec] = {
    **{name: factory() for name, factory in CODECS.items() if name != "exact"},
    "int8 stochastic": int8(rounding="stochastic"),
    "fp4 stochastic": fp4(rounding="stochastic"),
    "topk bf16": topk(values="bf16"),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.randn(args.numel, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    copy_s = median_s(lambda: target.copy_(x), args.repeats)
    size = 4 * args.numel
    print(
        f"{args.numel:,} elements, {args.threads} threads, copy {copy_s * 1e3:.1f} ms = {size / copy_s / 1e9:.1f} GB/s"
    )
    header = ("codec", "bits/param", "x less", "encode ms", "decode ms", "GB/s", "of copy", "pays below", "error")
    print(("{:<18}" + "{:>12}" * 8).format(*header))
    for name, codec in ROWS.items():
        payload = codec.encode(x, 1)
        encode_s = median_s(lambda: codec.encode(x, 1), args.repeats)  # noqa: B023 (used at once)
        decode_s = median_s(lambda: codec.decode(payload, x), args.repeats)  # noqa: B023 (used at once)
        error = ((x - codec.decode(payload, x)).norm() / x.norm()).item()
        sent, rate = nbytes(payload), size / (encode_s + decode_s)
        pays_below = 8 * (size - sent) / (encode_s + decode_s)
        row = (
            f"{8 * sent / args.numel:.4f}", f"{size / sent:.1f}", f"{encode_s * 1e3:.1f}", f"{decode_s * 1e3:.1f}",
            f"{rate / 1e9:.2f}", f"{rate * copy_s / size:.3f}", f"{pays_below / 1e9:.2f} Gb/s", f"{error:.4f}",
        )  # fmt: skip
        print(("{:<18}" + "{:>12}" * 8).format(name, *row), flush=True)


if __name__ == "__main__":
    main()
