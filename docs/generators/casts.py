"""What a cast of the messages saves beside one slow uplink: seconds of a round, computed; nothing is trained."""

from collections.abc import Mapping
from typing import Any

from generators.sources import ROOT
from gossamer.report.table import markdown_numbers
from gossamer.run.config.experiment_file import open_experiment, points
from gossamer.run.planning.check import examine_run

_FILE = "experiments/evidence/straggler_steps.toml"
_FIFTH = "uplink_20"
_MEAN: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"codec.name": "bf16", "codec.back": "bf16"},
    "4 bits, bf16 back": {"codec.name": "fp4", "codec.back": "bf16"},
    "4 bits both ways": {"codec.name": "fp4", "codec.back": "fp4"},
}
_GOSSIP: Mapping[str, Mapping[str, Any]] = {"fp32": {}, "bf16": {"codec.name": "bf16"}, "int8": {"codec.name": "int8"}}
"""Of whole parameters: four bits are too coarse for them, which `gossamer check` says."""
_METHODS = {
    "DiLoCo": _MEAN,
    "DiLoCo without the slow worker": _MEAN,
    "GASLoC 2-Peer": _GOSSIP,
    "GASLoC 1-Peer": _GOSSIP,
}
"""Variants of the file, at 30 local steps, and their messages."""
_HEAD = f"""# What a cast saves beside a slow uplink

<!-- Made by `make results`. -->

    gossamer check {_FILE} --set codec.name=bf16 --set codec.back=bf16

One uplink of eight at a tenth of the others, or at a fifth. Seconds of a round with 30 local steps of a second, computed from
played rounds as `gossamer check` does it, and the time over that of DiLoCo with fp32 messages, which is the share of its time
that as many rounds take. Nothing was trained, so losses are not in it. GASLoC keeps the local steps that the file gives its
slow worker for fp32 messages, of which more would fit with smaller ones.

"""


def casts_page() -> str:
    """The page. Cost: some seconds."""
    prices: dict[tuple[str, str], list[float]] = {}
    for scale in ("", _FIFTH):
        for method, codecs in _METHODS.items():
            for name, codec in codecs.items():
                prices.setdefault((method, name), []).append(_round_s(method, codec, scale))
    whole = prices["DiLoCo", "fp32"]
    rows = [
        [
            f"{method}, {name}",
            *(cell for one, of in zip(each, whole, strict=True) for cell in (f"{one:.2f}", f"{one / of:.3f}")),
        ]
        for (method, name), each in prices.items()
    ]
    heads = ["method, messages", "s a round, a tenth", "share, a tenth", "s a round, a fifth", "share, a fifth"]
    return _HEAD + markdown_numbers(heads, rows)


def _round_s(method: str, codec: Mapping[str, Any], scale: str) -> float:
    runs = points(open_experiment(ROOT / _FILE, {**codec, "run.batched": 1}), scale=scale)
    run = next(run for run in runs if run.method == f"{method}, H = 30")
    (network,) = examine_run(run.config).networks
    assert network.round_s is not None
    return network.round_s
