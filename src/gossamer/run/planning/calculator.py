"""Answers for a page of calculators: methods priced on a network before anything is trained, and published settings.

Every figure comes from what `gossamer plan` and `gossamer utilisation` call. A page moves inputs over lists of values; a live one
requests each combination, and the one of the docs includes all combinations of shorter lists.
"""

import itertools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gossamer.errors import ConfigError, GossamerError
from gossamer.models.sizes import SIZES, ModelConfig, parameter_count
from gossamer.network.estimates.published import PUBLISHED_GBPS
from gossamer.network.estimates.straggler import STRAGGLER_METHODS, StragglerRun, straggler_table
from gossamer.network.estimates.utilisation import (
    MODELS,
    PUBLISHED_METHODS,
    TARGETS,
    assumed,
    bandwidth_table,
    setting_of,
    utilisation_curve,
)
from gossamer.network.links import Network, StepOf, times_as_fast
from gossamer.record.folder import finite
from gossamer.report.colours import places_of
from gossamer.report.table import digits_text
from gossamer.run.planning.choice import PLAN_HEADINGS, Candidate, Pick, notes_on, plan_rows
from gossamer.run.planning.plan import PlanSettings, RunPlan, bits_per_parameter, plan

Others = Callable[[RunPlan], "tuple[Sequence[Candidate], Mapping[str, str]]"]
"""Prices all other methods for a plan, and gives the reasons for those that have no price."""


class _Input(NamedTuple):
    """An input that a visitor moves."""

    key: str
    label: str
    values: tuple[Any, ...]
    start: Any
    """One of the values."""
    unit: str = ""


_FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_BANDWIDTHS_BPS = (1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 1e11)
_LATENCIES_S = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3)
_LOSSES = (0.0, 0.0001, 0.001, 0.01, 0.03)
_STEPS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_LOCAL_STEPS = (1, 5, 15, 30, 60, 120, 240, 500)
_CODECS = ("exact", "bf16", "int8", "int4")
_SHARES = (1.0, 0.5, 0.2, 0.1, 0.03)
_ROUNDS, _FEW_ROUNDS = 16, 4
"""Rounds that are priced, where `gossamer plan` prices 64; the fewer for all answers of a page without a server."""
_MOST_KEPT = 200
_FIGURE_9 = "70b, one straggler"
_PRESETS = (
    ("Streaming DiLoCo, table 4", {"published": "1b", "steps": 100, "share": 0.2}),
    ("GASLoC, figure 9", {"published": _FIGURE_9, "steps": 30, "share": 0.2}),
)


class Calculator:
    """Answers the queries of a page of calculators; any thread may ask.

    Args:
        network: moves the bandwidth of all its links together, in place of equal links.
        others: prices the methods that `gossamer.run.planning.plan` does not.
        rounds: rounds to price; with uneven links the mean over more pairings is better.
    """

    def __init__(self, network: Network | None = None, others: Others | None = None, *, rounds: int = _ROUNDS) -> None:
        self._network, self._others, self._rounds = network, others, rounds
        self._locks = {kind: threading.Lock() for kind in ("plan", "others", "published")}
        """One for each kind of answer, which may take long, so that nothing is computed twice."""
        self._kept: dict[str, bytes] = {}
        self.inputs = _inputs(network)
        self.answers: dict[str, Callable[[Mapping[str, str]], bytes]] = {
            "inputs.json": lambda query: _json(self.contents()),
            "plan.json": lambda query: self._answer("plan", query),
            "others.json": lambda query: self._answer("others", query),
            "published.json": lambda query: self._answer("published", query),
        }

    def contents(self) -> dict[str, Any]:
        """The initial content of the page."""
        return {
            "inputs": {part: [one._asdict() for one in some] for part, some in self.inputs.items()},
            "presets": [{"label": label, "set": values} for label, values in _PRESETS],
            "all": self._others is not None,
            "file": self._network is not None,
        }

    def _answer(self, kind: str, query: Mapping[str, str]) -> bytes:
        """The computed answer to this query; a sentence where it is impossible."""
        key = json.dumps([kind, sorted(query.items())])
        with self._locks[kind]:
            if (kept := self._kept.get(key)) is None:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                try:
                    part = "published" if kind == "published" else "plan"
                    asked = {one.key: _chosen(one, query) for one in self.inputs[part]}
                    answer = {"plan": self.sweep, "others": self.priced, "published": _published}[kind](asked)
                except GossamerError as error:
                    answer = {"error": str(error)}
                kept = self._kept[key] = _json(answer)
            return kept

    def sweep(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The candidates at every bandwidth, with everything else as asked."""
        moved = self.inputs["plan"][0]
        plans = [self.planned({**asked, moved.key: value}) for value in moved.values]
        methods = dict.fromkeys(one.name for made in plans for one in made.candidates if not one.left_out)
        return {
            "headings": PLAN_HEADINGS,
            "parameters": plans[0].parameters,
            "rows": [plan_rows(one.choice, one.candidates) for one in plans],
            "best": [one.candidates.index(one.best) for one in plans],
            "summaries": [" ".join([_description(one), *_notes(one.choice, one.candidates)]) for one in plans],
            "curves": {
                method: [float(f"{_of_method(one, method).utilisation:.5g}") for one in plans] for method in methods
            },
            "places": places_of([*methods]),
        }

    def priced(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """All other methods at one bandwidth."""
        if self._others is None:
            raise ConfigError("this page prices no other methods; run gossamer watch --plan")
        made = self.planned(asked)
        candidates, unpriced = self._others(made)
        rows, notes = plan_rows(made.choice, candidates), _notes(made.choice, candidates)
        return {"headings": PLAN_HEADINGS, "rows": rows, "notes": notes, "unpriced": dict(unpriced)}

    def planned(self, asked: Mapping[str, Any]) -> RunPlan:
        """The plan that `gossamer plan` makes for these values."""
        of = self._network.step_of if self._network is not None else None
        if of is None:
            of = StepOf(model=ModelConfig(size=asked["model"]), vocab_size=asked["vocab"])
        codec = asked["codec"]
        bits = bits_per_parameter([codec], parameter_count(of.model, of.vocab_size))
        settings = PlanSettings(
            vocab_size=of.vocab_size,
            seq_len=of.seq_len,
            batch_size=of.batch_size,
            workers=asked.get("workers"),
            local_steps=(asked["steps"],),
            step_s=asked.get("step_s"),
            codecs={codec: bits[codec]},
            rounds=self._rounds,
        )
        return plan(self._links(asked), of.model, settings)

    def _links(self, asked: Mapping[str, Any]) -> Network:
        if self._network is not None:
            return times_as_fast(self._network, asked["factor"])
        bps, n, share = asked["bandwidth"], asked["workers"], asked["share"]
        return Network(
            uplink_bps=bps if share == 1 else (*(bps,) * (n - 1), bps * share),
            downlink_bps=bps,
            latency_s=asked["latency"],
            loss=asked["loss"],
            step_s=asked["step_s"],
        )


def _of_method(made: RunPlan, name: str) -> Candidate:
    """The candidate of this name, of several the one that computes most; where no worker is slow enough for fewer local steps,
    the one in which all take the same.
    """
    named = [one for one in made.candidates if one.name == name]
    alike = named or [one for one in made.candidates if one.method == name.removesuffix(" uneven")]
    return max(alike, key=lambda one: one.utilisation)


def _description(made: RunPlan) -> str:
    """What a table is for."""
    choice = made.choice
    far = f" {' and '.join(choice.scale.outside)} are outside of what was measured." if choice.scale.outside else ""
    dropped = made.best.dropped
    lost = f" It drops {dropped}, and the text that nobody else has." if dropped else ""
    fewer = f" In the choice {made.best.fewer} of {made.best.full_steps} local steps." if made.best.fewer else ""
    hours = digits_text(choice.hours)
    return f"{choice.tokens:.4g} tokens, and the {hours} hours that the choice needs for them.{lost}{fewer}{far}"


def _notes(choice: Pick, candidates: Sequence[Candidate]) -> list[str]:
    """Sentences about words and marks in a table, with a full stop each."""
    return [f"{one}." for one in notes_on(choice, candidates)]


def _published(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The curves of published settings, with the published figures as points, and all that was assumed."""
    steps = asked["steps"]
    if asked["published"] == _FIGURE_9:
        run = StragglerRun(local_steps=steps, bandwidth_share=asked["share"])
        points = straggler_table(run=run)
        curves = {name: [(p.bandwidth_bps, p.mean) for p in points if p.method == name] for name in STRAGGLER_METHODS}
        assumptions, rows, marks = list(dict.fromkeys(text for p in points for text in p.assumptions)), [], {}
    else:
        model = asked["published"]
        settings = {
            method: setting_of(model, method, **({} if defaults.get("local_steps") == 1 else {"local_steps": steps}))
            for method, defaults in PUBLISHED_METHODS.items()
        }
        curves = {method: utilisation_curve(setting) for method, setting in settings.items()}
        needs = {method: bandwidth_table(setting) for method, setting in settings.items()}
        rows = [[method, *(_gbps(row.bandwidth_bps) for row in table)] for method, table in needs.items()]
        assumptions = [assumed(model, method, setting) for method, setting in settings.items()]
        known = PUBLISHED_GBPS.get(model, {}) if steps == 100 else {}
        marks = {method: [(1e9 * x, y) for x, y in zip(gbps, TARGETS, strict=True)] for method, gbps in known.items()}
    return {
        "headings": ["method", *(f"{target:.0%}" for target in TARGETS)],
        "rows": rows,
        "assumptions": assumptions,
        "curves": {name: _axes(points) for name, points in curves.items()},
        "places": places_of([*curves]),
        "marks": {name: _axes(points) for name, points in marks.items()},
    }


def short_lists() -> Calculator:
    """The calculator of a page without a server: lists of values so short that all answers are computed in seconds."""
    calculator = Calculator(rounds=_FEW_ROUNDS)
    short: dict[str, tuple[Any, ...]] = {
        "bandwidth": (1e7, 3e7, 1e8, 3e8, 1e9, 1e10, 1e11),
        "latency": (0.03,),
        "loss": (0.0,),
        "workers": (8,),
        "share": (1.0, 0.1),
        "step_s": (0.3,),
        "model": ("134m", "1b"),
        "vocab": (32_000,),
        "steps": (30, 120),
        "codec": ("exact", "int8"),
    }
    few = {"published": (*MODELS, _FIGURE_9), "steps": (30, 100), "share": (0.2,)}
    for part, lists in (("plan", short), ("published", few)):
        calculator.inputs[part] = tuple(
            one._replace(values=values, start=one.start if one.start in values else values[0])
            for one in calculator.inputs[part]
            for values in (lists[one.key],)
        )
    return calculator


def frozen_contents(calculator: Calculator) -> dict[str, Any]:
    """All that a page without a server needs: every answer of a calculator. Its inputs should have few values."""
    plans, published = map(_combinations, (calculator.inputs["plan"][1:], calculator.inputs["published"]))
    answers = {
        "plan": {_key(asked): calculator.sweep(asked) for asked in plans},
        "published": {_key(asked): _published(asked) for asked in published},
    }
    return finite({**calculator.contents(), "answers": answers})


def _inputs(network: Network | None) -> dict[str, tuple[_Input, ...]]:
    """The inputs of a page, the bandwidth first."""
    model = (_Input("model", "model", tuple(SIZES), "134m"), _Input("vocab", "vocabulary", (256, 32_000), 256))
    train = (_Input("steps", "local steps", _LOCAL_STEPS, 60), _Input("codec", "codec", _CODECS, "exact"))
    seconds = _Input("step_s", "seconds of an inner step", _STEPS_S, 0.3, "s")
    if network is None:
        links = (
            _Input("bandwidth", "bandwidth", _BANDWIDTHS_BPS, 1e9, "bit/s"),
            _Input("latency", "latency", _LATENCIES_S, 0.03, "s"),
            _Input("loss", "share of packets that a worker's link loses", _LOSSES, 0.0),
            _Input("workers", "workers", (2, 4, 8, 16, 32), 8),
            _Input("share", "uplink of the slowest, as a share", _SHARES, 1.0),
            seconds,
        )
    else:
        links = (_Input("factor", "bandwidth of the file, times", _FACTORS, 1.0),)
        links += () if network.workers is not None else (_Input("workers", "workers", (2, 4, 8, 16, 32), 8),)
        links += () if network.step_s is not None else (seconds,)
        model = () if network.step_of is not None else model  # seconds that were measured are those of one model
    figures = (
        _Input("published", "model", (*MODELS, _FIGURE_9), "1b"),
        _Input("steps", "local steps", (10, 30, 100, 300), 100),
        _Input("share", "the straggler's share of the bandwidth", (0.1, 0.2, 0.5), 0.2),
    )
    return {"plan": (*links, *model, *train), "published": figures}


def _chosen(field: _Input, query: Mapping[str, str]) -> Any:
    """The value of an input in a query. Raises ConfigError for one that is not offered."""
    word = query.get(field.key, str(field.start))
    for value in field.values:
        if word == str(value) or (not isinstance(value, str) and _number(word) == value):
            return value
    raise ConfigError(f"{field.key} is {word:.40} but must be one of {', '.join(map(str, field.values))}")


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _combinations(inputs: Sequence[_Input]) -> list[dict[str, Any]]:
    return [
        dict(zip((one.key for one in inputs), values, strict=True))
        for values in itertools.product(*(one.values for one in inputs))
    ]


def _key(asked: Mapping[str, Any]) -> str:
    """The name of an answer, as the page makes it: values by the order of their inputs."""
    return " ".join(f"{value:g}" if isinstance(value, int | float) else value for value in asked.values())


def _gbps(bandwidth_bps: float | None) -> str:
    return "more than 1000" if bandwidth_bps is None else f"{bandwidth_bps / 1e9:.1f}"


def _axes(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[float(f"{x:.4g}") for x, _ in points], [float(f"{y:.4g}") for _, y in points]]


def _json(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(answer), allow_nan=False).encode()
