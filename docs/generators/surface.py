"""S of docs/evidence/registered.md: what a method loses beside data parallelism after 5,400 steps, by local steps and codec."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from generators.sources import RESULTS, ROOT, losses_by_seed
from generators.verdicts import rises
from gossamer.report.figures import mean_and_deviation
from gossamer.report.paired import effect, holm
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import Point, place_in_experiment, points
from gossamer.run.planning.check import examine_run

PENALTY, LEFT_OUT = "penalty", "left_out"
"""The stems of the files."""
_SPENT = (5, 15, 30, 60, 120)
"""Local steps."""
_HEADS = [f"H = {h}" for h in _SPENT]
_LEAST, _MUON, _TARGET = "data parallel", "MuLoCo", "DiLoCo, exact, H = 30"
_EIGHT = "DiLoCo, int4, H = 120"
"""What keeps all eight workers on equal terms with leaving the slow one out."""
_EXACT, _LOSSY = "exact", ("bf16", "int8", "int4", "topk2bit")

Surface = Mapping[str, Mapping[int, Mapping[int, float]]]
"""Nats above data parallelism, by method with its codec, local steps and seed."""


def surface_of(ended: Iterable[PointResult]) -> Surface:
    """Of each row the seeds that data parallelism has and the row at all of its local steps; nothing before one has."""
    losses = losses_by_seed(ended)
    least = losses.pop(_LEAST, {})
    rows: dict[str, dict[int, dict[int, float]]] = {}
    for label, own in losses.items():
        name, _, steps = label.rpartition(", H = ")
        rows.setdefault(name, {})[int(steps)] = own
    found: dict[str, dict[int, dict[int, float]]] = {}
    for name, row in rows.items():
        if seeds := sorted({*least}.intersection(*row.values())):
            found[name] = {steps: {seed: own[seed] - least[seed] for seed in seeds} for steps, own in row.items()}
    return found


def committed_surface() -> Surface:
    """Of the committed outcomes."""
    return surface_of(read_results(RESULTS / "evidence" / f"{PENALTY}.jsonl"))


def surface_page(ended: Iterable[PointResult]) -> str:
    """Both tables, and Page's test over the local steps of each row, as Markdown."""
    surface = surface_of(ended)
    if not surface:
        return ""
    rows = {name: by_seed(own) for name, own in surface.items() if name.startswith("DiLoCo, ")}
    said = f"That the penalty of DiLoCo rises with local steps, by Page's test after Holm's correction: {rises(rows).effect}.\n"
    tested = [said] if len(rows["DiLoCo, exact"]) > 1 else []
    return "\n".join([penalties_table(surface), *tested, codecs_table(surface), *_beside_a_slow_uplink(surface)])


def penalties_table(surface: Surface) -> str:
    """Nats above data parallelism, mean ± sample standard deviation over the seeds: a row for each method and codec."""
    rows = [
        [name, *(mean_and_deviation([*own[h].values()]) if h in own else DASH for h in _SPENT)]
        for name, own in surface.items()
    ]
    return markdown_lines([["nats above data parallelism", *_HEADS], ["---", *["---:"] * len(_SPENT)], *rows])


def codec_costs(surface: Surface) -> Surface:
    """What a codec adds to exact messages, by method with that codec, local steps and seed."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for method in dict.fromkeys(name.rpartition(", ")[0] for name in surface if name.endswith(f", {_EXACT}")):
        exact = surface[f"{method}, {_EXACT}"]
        for codec in _LOSSY:
            own = surface.get(f"{method}, {codec}", {})
            both = {
                h: {seed: nats - exact[h][seed] for seed, nats in some.items() if seed in exact[h]}
                for h, some in own.items()
            }
            if both and all(both.values()):
                found[f"{method}, {codec}"] = both
    return found


def codecs_table(surface: Surface) -> str:
    """What each codec adds, with the 95 % interval of the mean over seeds, and in the mean over local steps."""
    rows = [
        [name, *(_interval([*own[h].values()]) if h in own else DASH for h in _SPENT), _interval(means_by_seed(own))]
        for name, own in codec_costs(surface).items()
    ]
    heads = ["nats above exact messages", *_HEADS, "mean of all"]
    return markdown_lines([heads, ["---", *["---:"] * (len(heads) - 1)], *rows])


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


def _beside_a_slow_uplink(surface: Surface) -> list[str]:
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
            above = effect([(arm.losses[seed] - target.losses[seed], 1.0) for seed in sorted(seeds)])
            half = "" if above.half is None else f"{above.half:.4f}"
            share = f"{arm.time_s / target.time_s:.2f}"
            rows.append([network, arm.label, share, f"{above.mean:+.4f}", half, "leads" if leads else ""])
    heads = ["slow uplink", "arm", "share of the time", "nats above it", "±", ""]
    said = (
        "Beside one slow uplink, of the arms with AdamW those than which none takes at most as long and ends lower, and below "
        f"them those with Muon inside. Shares of the time of {_TARGET}, and nats above it with half of the 95 % interval.\n"
    )
    return [said, markdown_lines([heads, ["---", "---", "---:", "---:", "---:", "---"], *rows])]


def _priced(surface: Surface) -> dict[str, list[_Arm]]:
    """The arms on each network. Cost: some seconds.

    A round is priced once for a method and codec: its seconds beyond the steps are the same for each number of these, but for
    streaming, whose messages travel beside them.
    """
    document = load_document(ROOT / "experiments" / "evidence" / f"{PENALTY}.toml")
    networks = load_document(ROOT / "experiments" / "evidence" / "straggler_codecs.toml")["network"]
    runs = {run.method: run for run in points({**document, "network": networks}, seeds=[0])}
    arms: dict[str, list[_Arm]] = {name: [] for name in networks}
    none_above = {1: dict.fromkeys(next(iter(surface["DiLoCo, exact"].values())), 0.0)}
    for name, own in {_LEAST: none_above, **surface}.items():
        labels = {h: _LEAST if name == _LEAST else f"{name}, H = {h}" for h in own}
        most, method = max(own), name.partition(", ")[0]
        at = {h: _round_seconds(runs[labels[h]]) for h in own if method == "streaming" or h == most}
        for h, losses in own.items():
            steps = runs[labels[h]].config.run.steps
            for network in networks:
                round_s = at[h][network] if h in at else at[most][network] - most + h
                arms[network].append(_Arm(method, labels[h], steps / h * round_s, losses))
    return arms


def left_out_page(ended: Iterable[PointResult]) -> str:
    """DiLoCo without the slow worker beside DiLoCo of eight on each network, as Markdown; nothing before all runs have ended."""
    stems = {PENALTY: read_results(RESULTS / "evidence" / f"{PENALTY}.jsonl"), LEFT_OUT: [*ended]}
    least, surface = losses_by_seed(stems[PENALTY])[_LEAST], surface_of(stems[PENALTY])
    eight = _priced({name: surface[name] for name in ("DiLoCo, exact", "DiLoCo, int4")})
    networks = load_document(ROOT / "experiments" / "evidence" / "straggler_codecs.toml")["network"]
    fast = {name: {**one, "uplink_bps": one["uplink_bps"][0]} for name, one in networks.items()}
    document = load_document(ROOT / "experiments" / "evidence" / f"{LEFT_OUT}.toml")
    runs = points({**document, "network": fast}, seeds=sorted(least))
    losses = {place_in_experiment(one): one.row["loss"] for one in stems[LEFT_OUT]}
    if any(losses.get(place_in_experiment(run)) is None for run in runs):
        return ""
    seven = {name: list[_Arm]() for name in networks}
    for own in (run for run in runs if run.seed == min(least)):
        steps, local = own.config.run.steps, int(own.method.rpartition("H = ")[2])
        mine = [run for run in runs if (run.method, run.at) == (own.method, own.at)]
        above = {run.seed: losses[place_in_experiment(run)] - least[run.seed] for run in mine}
        for name, round_s in _round_seconds(own).items():
            seven[name].append(_Arm(own.method, f"{own.method}, {steps:,} steps", steps / local * round_s, above))
    return _without_and_with(seven, eight)


def _without_and_with(seven: Mapping[str, Sequence[_Arm]], eight: Mapping[str, Sequence[_Arm]]) -> str:
    """The table, with what ends surely lower than eight in at most as much time, by Holm's correction over all such arms."""
    kept = {name: {one.label: one for one in arms} for name, arms in eight.items()}
    tested = [
        (name, one, effect([(one.losses[seed] - kept[name][_EIGHT].losses[seed], 1.0) for seed in one.losses]))
        for name, arms in seven.items()
        for one in arms
    ]
    in_time = [(name, one, found) for name, one, found in tested if one.time_s <= kept[name][_EIGHT].time_s]
    corrected = zip(in_time, holm([found.apart for _, _, found in in_time]), strict=True)
    sure = {(name, one.label) for (name, one, found), p in corrected if found.mean < 0 and p is not None and p < 0.05}
    rows: list[list[str]] = []
    for name, arms in kept.items():
        target, other = arms[_TARGET], arms[_EIGHT]
        for one in (arms["DiLoCo, int4, H = 30"], other, *seven[name]):
            cells = [name, one.label, f"{one.time_s / target.time_s:.2f}"]
            for rival in (target, other):
                found = effect([(one.losses[seed] - rival.losses[seed], 1.0) for seed in sorted(one.losses)])
                cells += [f"{found.mean:+.4f}", "" if found.half is None else f"{found.half:.4f}"]
            rows.append([*cells, "surely lower in less time" if (name, one.label) in sure else ""])
    heads = ["slow uplink", "arm", "share of the time", "nats above it", "±", f"above {_EIGHT}", "± (2)", ""]
    text = f"Shares of the time of {_TARGET} of all eight, nats above it and above {_EIGHT}, with half of the 95 % interval.\n"
    return "\n".join([text, markdown_lines([heads, ["---", "---", *["---:"] * 5, "---"], *rows])])


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
    tests = [
        effect([(one.losses[seed] - other.losses[seed], 1.0) for seed in one.losses])
        for one, others in zip(front, rivals, strict=True)
        for other in others
    ]
    sure = iter(
        found.mean < 0 and p is not None and p < 0.05
        for found, p in zip(tests, holm([found.apart for found in tests]), strict=True)
    )
    return [bool(others) and all([*itertools.islice(sure, len(others))]) for others in rivals]


def by_seed(own: Mapping[int, Mapping[int, float]]) -> list[tuple[float, ...]]:
    """A row, over its local steps, of each seed."""
    return [*zip(*(some.values() for some in own.values()), strict=True)]


def means_by_seed(own: Mapping[int, Mapping[int, float]]) -> list[float]:
    """The means of a row over its local steps, of each seed."""
    return [statistics.fmean(seed) for seed in by_seed(own)]


def _interval(differences: Sequence[float]) -> str:
    found = effect([(difference, 1.0) for difference in differences])
    return f"{found.mean:+.4f}" + ("" if found.half is None else f" ± {found.half:.4f}")
