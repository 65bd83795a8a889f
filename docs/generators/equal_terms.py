"""C of docs/evidence/registered.md: beside a slow uplink, methods against DiLoCo that sends the same kind of message."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from generators.annealed import Branch, branches, shares_between
from generators.claims import committed
from gossamer.report.figures import chart_style, line_style, plain_axes, svg
from gossamer.report.paired import effect, holm
from gossamer.report.table import DASH, markdown_numbers

STRAGGLER_CODECS = "straggler_codecs"
"""The stem of the file."""
_CODECS = ("fp32", "bf16", "4 bits", "2 bits of 3 %")
_DILOCO = ("DiLoCo, H = 30", "DiLoCo, H = 60", "DiLoCo, H = 120")
"""What every other method with the same codec is compared with."""
_SAME_STEPS = (*_DILOCO, "streaming, H = 30")
"""Whose local steps are the same with each codec, so that only the messages differ."""
_LEVEL = 0.05
_STEPS = 1350
"""Of the run whose time counts."""

_Shares = Mapping[tuple[str, str, str], Sequence[float | None]]
"""By method, codec and network: of each seed the share of the target's time after which it is as low; None where it never is."""


def _whole_seeds(found: Sequence[Branch]) -> list[Branch]:
    """The branches of those seeds that every method has at every length."""
    places: dict[tuple[str, int], set[int]] = {}
    for one in found:
        places.setdefault((one.method, one.rounds), set()).add(one.seed)
    seeds = set.intersection(*places.values()) if places else set[int]()
    return [one for one in found if one.seed in seeds]


def committed_branches() -> list[Branch]:
    """Of the committed outcomes, those of whole seeds."""
    runs, ended = committed(STRAGGLER_CODECS)
    return _whole_seeds(branches(runs, ended, f"{_DILOCO[0]}, {_CODECS[0]}", _STEPS) if runs else [])


def equal_terms_page(found: Sequence[Branch]) -> str:
    """All tables as Markdown; of seeds that have run whole."""
    found = _whole_seeds(found)
    if not found:
        return ""
    networks, shares = list(dict.fromkeys(one.network for one in found)), _shares(found)
    seeds = len({one.seed for one in found})
    parts = [
        f"Shares of the target's time, between lengths; means of {seeds} seeds with 95 % intervals. A slow uplink of:\n",
        shares_table(found),
    ]
    for codec in _CODECS:
        others = dict.fromkeys(name for name, own, _ in shares if own == codec and name not in _DILOCO)
        if pairs := list(itertools.product(others, _DILOCO)):
            cells = [_sooner(shares, pairs, codec, network) for network in networks]
            rows = [[*pair, *own] for pair, own in zip(pairs, zip(*cells, strict=True), strict=True)]
            parts += [f"Both with {codec}: share minus that of DiLoCo, seed by seed.\n"]
            parts += [_table(["", "minus", *networks], rows)]
    parts += ["What a codec costs: loss above the same method with fp32 after as many rounds, mean of its lengths.\n"]
    return "\n".join([*parts, costs_table(found)])


def shares_table(found: Sequence[Branch]) -> str:
    """After which share of the target's time each method is as low, on each network."""
    networks, shares = list(dict.fromkeys(one.network for one in found)), _shares(found)
    arms = dict.fromkeys((name, codec) for name, codec, _ in shares)
    rows = [[f"{name}, {codec}", *(_text(shares[name, codec, on]) for on in networks)] for name, codec in arms]
    return _table(["", *networks], rows)


def costs_table(found: Sequence[Branch]) -> str:
    """What each codec costs those methods whose local steps it leaves as they are."""
    arms = {_parts(one.method) for one in found}
    rows = [
        [f"{name}, {codec}", _cost(found, name, codec)]
        for name in _SAME_STEPS
        for codec in _CODECS[1:]
        if (name, codec) in arms
    ]
    return _table(["", "nats"], rows)


def drawn_shares(found: Sequence[Branch]) -> bytes:
    """Mean shares with their intervals as SVG: a panel for each network, a row for each method, a colour for each codec."""
    from matplotlib.figure import Figure as Canvas

    shares = _shares(_whole_seeds(found))
    names, networks = (list(dict.fromkeys(key[k] for key in shares)) for k in (0, 2))
    with chart_style():
        canvas = Canvas(figsize=(2.2 + 2.6 * len(networks), 3.8), layout="constrained")
        panels = canvas.subplots(1, len(networks), squeeze=False, sharey=True)[0]
        drawn = [one for one in _CODECS if any(of == one and None not in own for (_, of, _), own in shares.items())]
        for axes, network in zip(panels, networks, strict=True):
            for place, codec in enumerate(drawn):
                known = {
                    names.index(name): _interval([share for share in own if share is not None])
                    for (name, of, on), own in shares.items()
                    if (of, on) == (codec, network) and None not in own
                }
                axes.errorbar(
                    [mean for mean, _ in known.values()],
                    [row + 0.15 * (place - 1) for row in known],
                    xerr=[half for _, half in known.values()],
                    fmt="o",
                    markersize=4,
                    elinewidth=1,
                    color=line_style(place)[0],
                    label=codec,
                )
            for row, name in enumerate(names):
                if not any(key[0] == name and key[2] == network and None not in own for key, own in shares.items()):
                    axes.text(0.03, row, "never as low", transform=axes.get_yaxis_transform(), va="center")
            axes.axvline(1.0, color="black", linewidth=0.6)
            axes.set_title(network, fontsize=10)
            plain_axes(axes, "share of the time")
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        canvas.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(drawn), frameon=False
        )
        return svg(canvas)


def _shares(found: Sequence[Branch]) -> _Shares:
    return {
        (*_parts(method), network): [*shares_between(found, method, network).values()]
        for method, network in dict.fromkeys((one.method, one.network) for one in found)
    }


def _parts(method: str) -> tuple[str, str]:
    """A label without its codec, and its codec."""
    name, _, codec = method.rpartition(", ")
    return name, codec


def _sooner(shares: _Shares, pairs: Sequence[tuple[str, str]], codec: str, network: str) -> list[str]:
    """The difference of each pair on a network, "sooner" or "later" after Holm's correction over all pairs."""
    found = []
    for ours, theirs in pairs:
        both = [*zip(shares[ours, codec, network], shares[theirs, codec, network], strict=True)]
        known = [(one - other, 1.0) for one, other in both if one is not None and other is not None]
        found.append(effect(known) if len(known) == len(both) else None)
    adjusted = holm([None if one is None else one.apart for one in found])
    return [
        DASH
        if one is None
        else f"{one.mean:+.3f}"
        + (f" ± {one.half:.3f}" if one.half is not None else "")
        + ((" sooner" if one.mean < 0 else " later") if p is not None and p < _LEVEL else "")
        for one, p in zip(found, adjusted, strict=True)
    ]


def _cost(found: Sequence[Branch], name: str, codec: str) -> str:
    """The loss of a codec, whichever network prices it."""
    losses: dict[str, dict[tuple[int, int], float]] = {codec: {}, _CODECS[0]: {}}
    for one in found:
        label, own = _parts(one.method)
        if label == name and own in losses:
            losses[own][one.seed, one.rounds] = one.above
    above: dict[int, list[float]] = {}
    for place, loss in losses[codec].items():
        above.setdefault(place[0], []).append(loss - losses[_CODECS[0]][place])
    mean, half = _interval([statistics.fmean(own) for own in above.values()])
    return f"{mean:+.4f} ± {half:.4f}"


def _text(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        return f"{len(known)} of {len(shares)} seeds"
    mean, half = _interval(known)
    return f"{mean:.2f} [{mean - half:.2f}, {mean + half:.2f}]"


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half its 95 % interval, which one seed does not have."""
    found = effect([(value, 1.0) for value in values])
    return found.mean, found.half or 0.0


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_numbers(heads, rows)
