"""Beside one slow uplink: the arms of the penalty surface at equal time, and DiLoCo that leaves the slow worker out."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from generators.sources import RESULTS, ROOT, losses_by_seed
from generators.surface import LEAST, PENALTY, Surface, committed_surface, surface_of, surface_page
from gossamer.report.figures import INK, chart_style, dashed_styles, on_any_ground, plain_axes, svg
from gossamer.report.paired import Effect, effect, holm
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import markdown_lines
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import Point, place_in_experiment, points
from gossamer.run.planning.check import examine_run

LEFT_OUT = "left_out"
"""The stem of the file."""
FIGURE = ROOT / "docs" / "pictures" / "slow_uplink.svg"
_MUON, _TARGET = "MuLoCo", "DiLoCo, exact, H = 30"
_EIGHT = "DiLoCo, int4, H = 120"
"""What keeps all eight workers on equal terms with leaving the slow one out."""
_DRAWN = {
    "DiLoCo, int4": "DiLoCo, 4 bits",
    "MuLoCo": "DiLoCo with Muon, 32 bits",
    "streaming, int4": "streaming DiLoCo, 4 bits",
    "SparseLoCo": "SparseLoCo",
    "GASLoC 1-Peer, int8": "GASLoC, one peer, 8 bits",
    "GASLoC 2-Peer, int8": "GASLoC, two peers, 8 bits",
    "without it, int4": "DiLoCo without the slow worker, 4 bits",
}
"""What the figure has, each method with the fewest bits that cost it nothing there."""
_NETWORK = "tenth"
"""What the figure is of."""


class _Arm(NamedTuple):
    """A row of the surface at one number of local steps, on one network."""

    method: str
    label: str
    time_s: float
    losses: Mapping[int, float]
    """Nats above data parallelism, by seed."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values())


def _above(one: _Arm, other: _Arm) -> Effect:
    """Nats of an arm above another, seed by seed."""
    return effect([(loss - other.losses[seed], 1.0) for seed, loss in sorted(one.losses.items())])


def penalty_page(ended: Iterable[PointResult]) -> str:
    """The tables of the surface, and what of it leads beside a slow uplink, as Markdown."""
    found = [*ended]
    surface = surface_of(found)
    return "\n".join([surface_page(found), *_front_table(surface)]) if surface else ""


def drawn_at_equal_time() -> bytes:
    """Nats above DiLoCo with exact messages and H = 30 over the share of its time, of the committed runs, as SVG."""
    from matplotlib.figure import Figure as Canvas

    arms = _priced(committed_surface())[_NETWORK]
    (target,) = (one for one in arms if one.label == _TARGET)
    seven = _seven(read_results(RESULTS / "evidence" / f"{LEFT_OUT}.jsonl"))[_NETWORK]
    with chart_style():
        canvas = Canvas(figsize=(7.5, 4.2), layout="constrained")
        axes = canvas.subplots()
        for name, (colour, line) in dashed_styles(_DRAWN).items():
            own = [one for one in [*arms, *seven] if one.label.partition(", H = ")[0] == name]
            own = sorted(own, key=lambda one: one.time_s)
            shares, heights = [one.time_s / target.time_s for one in own], [one.mean - target.mean for one in own]
            axes.plot(shares, heights, color=colour, linestyle=line, marker="o", markersize=4, label=_DRAWN[name])
        axes.axhline(0.0, color=INK, linewidth=0.5)
        # Data parallelism, at 15 times as long, and SparseLoCo with 60 and 120 local steps would press all others together.
        axes.set_xlim(0.45, 1.55)
        axes.set_ylim(-0.12, 0.18)
        axes.set_ylabel("nats above its loss", color=INK)
        axes.legend(fontsize=8)
        plain_axes(axes, "share of the time of DiLoCo with 32 bits and 30 local steps, one uplink of eight at a tenth")
        return on_any_ground(svg(canvas))


def left_out_page(ended: Iterable[PointResult]) -> str:
    """DiLoCo without the slow worker beside DiLoCo of eight on each network, as Markdown; nothing before all runs have ended."""
    seven = _seven([*ended])
    surface = committed_surface()
    eight = _priced({name: surface[name] for name in ("DiLoCo, exact", "DiLoCo, int4")})
    return _without_and_with(seven, eight) if seven else ""


def _seven(ended: Sequence[PointResult]) -> dict[str, list[_Arm]]:
    """DiLoCo without the slow worker, on the fast links of each network; nothing before all runs have ended."""
    least = losses_by_seed(read_results(RESULTS / "evidence" / f"{PENALTY}.jsonl"))[LEAST]
    fast = {name: {**one, "uplink_bps": one["uplink_bps"][0]} for name, one in _networks().items()}
    document = load_document(ROOT / "experiments" / "evidence" / f"{LEFT_OUT}.toml")
    runs = points({**document, "network": fast}, seeds=sorted(least))
    losses = {place_in_experiment(one): one.row["loss"] for one in ended}
    if any(losses.get(place_in_experiment(run)) is None for run in runs):
        return {}
    seven = {name: list[_Arm]() for name in fast}
    for own in (run for run in runs if run.seed == min(least)):
        steps, local = own.config.run.steps, int(own.method.rpartition("H = ")[2])
        mine = [run for run in runs if (run.method, run.at) == (own.method, own.at)]
        above = {run.seed: losses[place_in_experiment(run)] - least[run.seed] for run in mine}
        for name, round_s in _round_seconds(own).items():
            seven[name].append(_Arm(own.method, f"{own.method}, {steps:,} steps", steps / local * round_s, above))
    return seven


def _front_table(surface: Surface) -> list[str]:
    """The front of each network, and what has Muon inside, in time and loss against DiLoCo with exact messages and H = 30."""
    seeds = {seed for own in surface.values() for some in own.values() for seed in some}
    if any({*some} != seeds for own in surface.values() for some in own.values()):
        return []
    rows: list[list[str]] = []
    for network, arms in _priced(surface).items():
        (target,) = (one for one in arms if one.label == _TARGET)
        with_muon = [one for one in arms if one.method == _MUON]
        ahead = _front([one for one in arms if one.method != _MUON])
        for arm, leads in [*zip(ahead, _leading(ahead, arms), strict=True), *((one, False) for one in with_muon)]:
            above = _above(arm, target)
            half = "" if above.half is None else f"{above.half:.4f}"
            share = f"{arm.time_s / target.time_s:.2f}"
            rows.append([network, arm.label, share, f"{above.mean:+.4f}", half, "leads" if leads else ""])
    heads = ["slow uplink", "arm", "share of the time", "nats above it", "±", ""]
    text = (
        "Beside one slow uplink, of the arms with AdamW those than which none takes at most as long and ends lower, and below "
        f"them those with Muon inside. Shares of the time of {_TARGET}, and nats above it with half of the 95 % interval.\n"
    )
    return [text, markdown_lines([heads, ["---", "---", "---:", "---:", "---:", "---"], *rows])]


def _without_and_with(seven: Mapping[str, Sequence[_Arm]], eight: Mapping[str, Sequence[_Arm]]) -> str:
    """The table, with what ends surely lower than eight in at most as much time, by Holm's correction over all such arms."""
    kept = {name: {one.label: one for one in arms} for name, arms in eight.items()}
    tested = [
        (name, one, _above(one, kept[name][_EIGHT]))
        for name, arms in seven.items()
        for one in arms
        if one.time_s <= kept[name][_EIGHT].time_s
    ]
    corrected = zip(tested, holm([found.apart for _, _, found in tested]), strict=True)
    sure = {(name, one.label) for (name, one, found), p in corrected if found.mean < 0 and p is not None and p < 0.05}
    rows: list[list[str]] = []
    for name, arms in kept.items():
        target, other = arms[_TARGET], arms[_EIGHT]
        for one in (arms["DiLoCo, int4, H = 30"], other, *seven[name]):
            cells = [name, one.label, f"{one.time_s / target.time_s:.2f}"]
            for rival in (target, other):
                found = _above(one, rival)
                cells += [f"{found.mean:+.4f}", "" if found.half is None else f"{found.half:.4f}"]
            rows.append([*cells, "surely lower in less time" if (name, one.label) in sure else ""])
    heads = ["slow uplink", "arm", "share of the time", "nats above it", "±", f"above {_EIGHT}", "± (2)", ""]
    text = f"Shares of the time of {_TARGET} of all eight, nats above it and above {_EIGHT}, with half of the 95 % interval.\n"
    return "\n".join([text, markdown_lines([heads, ["---", "---", *["---:"] * 5, "---"], *rows])])


def _priced(surface: Surface) -> dict[str, list[_Arm]]:
    """The arms on each network. Cost: some seconds.

    A round is priced once for a method and codec: its seconds beyond the steps are the same for each number of these, but for
    streaming, whose messages travel beside them.
    """
    document = load_document(ROOT / "experiments" / "evidence" / f"{PENALTY}.toml")
    networks = _networks()
    runs = {run.method: run for run in points({**document, "network": networks}, seeds=[0])}
    arms: dict[str, list[_Arm]] = {name: [] for name in networks}
    none_above = {1: dict.fromkeys(next(iter(surface["DiLoCo, exact"].values())), 0.0)}
    for name, own in {LEAST: none_above, **surface}.items():
        labels = {h: LEAST if name == LEAST else f"{name}, H = {h}" for h in own}
        most, method = max(own), name.partition(", ")[0]
        at = {h: _round_seconds(runs[labels[h]]) for h in own if method == "streaming" or h == most}
        for h, losses in own.items():
            steps = runs[labels[h]].config.run.steps
            for network in networks:
                round_s = at[h][network] if h in at else at[most][network] - most + h
                arms[network].append(_Arm(method, labels[h], steps / h * round_s, losses))
    return arms


def _round_seconds(run: Point) -> dict[str, float]:
    """Mean seconds of a round, by network, whose steps take a second each."""
    return {one.name: one.round_s for one in examine_run(run.config).networks if one.round_s is not None}


def _front(arms: Sequence[_Arm]) -> list[_Arm]:
    """Those than which no other takes at most as long and ends lower, by their time."""
    ordered = sorted(arms, key=lambda one: (one.time_s, one.mean))
    return [one for place, one in enumerate(ordered) if all(one.mean < other.mean for other in ordered[:place])]


def _leading(front: Sequence[_Arm], arms: Sequence[_Arm]) -> list[bool]:
    """Whether an arm is surely lower than each of another method with AdamW that takes at most as long; not without one."""
    rivals = [
        [other for other in arms if other.time_s <= one.time_s and other.method not in (one.method, _MUON)]
        for one in front
    ]
    tests = [_above(one, other) for one, others in zip(front, rivals, strict=True) for other in others]
    sure = iter(
        found.mean < 0 and p is not None and p < 0.05
        for found, p in zip(tests, holm([found.apart for found in tests]), strict=True)
    )
    return [bool(others) and all([*itertools.islice(sure, len(others))]) for others in rivals]


def _networks() -> dict[str, Any]:
    return load_document(ROOT / "experiments" / "evidence" / "straggler_codecs.toml")["network"]
