"""The methods as one table, counted from the running code: bytes sent, memory, requirements, and when it fails.

The rounds that are counted (`gossamer.run.planning.traffic`) run on tensors without data.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gossamer.boundaries import BOUNDARIES, Boundary
from gossamer.layout import Layout, Leaf
from gossamer.models.bottleneck import BOTTLENECKS
from gossamer.models.sizes import parameter_count
from gossamer.report.table import markdown_lines
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.exchange import initial_state, with_mixing
from gossamer.rules import Context
from gossamer.run.config.document import DIRECTIONS, with_settings
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.recipes import FACTORIES, Recipe, docstring_part, first_sentence, made_of, missing, recipes
from gossamer.run.config.resolve import resolve
from gossamer.run.config.resolved import InPairs, RunSettings, WithServer
from gossamer.run.config.run_file import parse
from gossamer.run.planning.traffic import Traffic, traffic
from gossamer.settings.options import summary
from gossamer.tree import leaves

_BASE = {
    "workers": 8,
    "model.size": "134m",
    "run.steps": 120,
    "run.local_steps": 30,
    "network.any": {"uplink_bps": 1e9, "downlink_bps": 1e9, "step_s": 1.0},  # asynchronous methods need one
}
_VOCABULARY = 32_000
_CROSSING = (8, 128, 768)
"""Sequences, tokens and channels of the micro-batch whose bits are counted: the hidden size is that of the model above."""
_WIDTH = 8
"""Numbers of a token that cross the cuts of a narrow model, as by default with the codec `projection`."""
_PROBE = 200
_NEEDS = {
    "everyone": "messages from all workers: a barrier",
    "connected": "a graph that connects over time",
    "static": "a graph that never changes",
    "tree": "a tree",
    "push": "a column-stochastic graph",
}


class MethodRow(NamedTuple):
    """One method, in words."""

    method: str
    source: str
    made_of: str
    round: str
    sends: str
    sent: str
    keeps: str
    needs: str
    fails_when: str


@functools.cache
def rows() -> tuple[MethodRow, ...]:
    """A row for every method, for the sizes in the head of `markdown`. Cost: some seconds, and no memory for any model."""
    layout = layout_for(parse(with_settings({}, _BASE)).model, _VOCABULARY)
    return tuple(_row(name, recipe, layout) for name, recipe in recipes().items())


class BoundaryRow(NamedTuple):
    """What may cross the cuts of a replica in stages, in words."""

    boundary: str
    what_it_does: str
    set_as: str
    bits_per_element: str
    source: str
    fails_when: str


def boundary_rows() -> tuple[BoundaryRow, ...]:
    """A row for every boundary codec, and for every model that is narrow at its cuts."""
    codecs = [_codec_row(name, make) for name, make in BOUNDARIES.items()]
    narrow = f"{32 * _WIDTH / _CROSSING[-1]:.4g}"
    models = [
        _boundary_row(name, made, "`model.bottleneck`, part of the model", narrow)
        for name, (made, _) in BOTTLENECKS.items()
    ]
    return (*codecs, *models)


def _codec_row(name: str, make: Callable[..., Boundary]) -> BoundaryRow:
    codec = make()
    bits = [8 * count(_CROSSING) / math.prod(_CROSSING) for count in (codec.again_bytes, codec.most_bytes) if count]
    counted = ", at a first visit ".join(f"{number:.4g}" for number in bits)
    keys = DIRECTIONS[:1] if codec.remembers else DIRECTIONS
    return _boundary_row(name, make, ", ".join(f"`pipeline.{key}`" for key in keys), counted)


def _boundary_row(name: str, made: Callable[..., Any], set_as: str, bits: str) -> BoundaryRow:
    return BoundaryRow(
        name,
        summary(made),
        set_as,
        bits,
        first_sentence(docstring_part(made, "Source")),
        docstring_part(made, "Fails when"),
    )


def _table(rows: Sequence[MethodRow] | Sequence[BoundaryRow]) -> str:
    headings = [field.replace("_", " ") for field in rows[0]._fields]
    lines = [headings, ["---"] * len(headings)]
    return markdown_lines([*lines, *([f"`{row[0]}`", *(linked(cell) for cell in row[1:])] for row in rows)])


def markdown() -> str:
    """The page, docs/methods.md."""
    differing = {
        name: recipe.differs or docstring_part(FACTORIES[name], "Differs")
        for name, recipe in recipes().items()
        if _own(name)
    }
    notes = "".join(f"- `{name}`: {text.rstrip('.')}.\n" for name, text in differing.items() if text)
    closed = [
        f"`{name}` ({first_sentence(docstring_part(f, 'Source'))})" for name, f in FACTORIES.items() if missing(f)
    ]
    notes = f"Not for training models, but as a reference: {', '.join(closed)}.\n\n" + notes if closed else notes
    return (
        f"{_HEAD}\n{counted_for()}\n\n{_table(rows())}\n{_BOUNDARIES}\n{_table(boundary_rows())}\n"
        f"## What differs from the sources\n\n{linked(notes)}"
    )


def counted_for() -> str:
    """The paragraph about the sizes that the rows are counted for."""
    base = parse(with_settings({}, _BASE))
    parameters = parameter_count(base.model, _VOCABULARY)
    return _COUNTED.format(
        workers=base.workers,
        size=base.model.size,
        parameters=parameters,
        megabytes=4 * parameters / 1e6,
        steps=base.length.full_steps,
    )


_HEAD = """<!-- Made by `make methods` from the code; a test compares the two. -->
# The methods

Select a method by name in the run file or with `--set method=NAME`. Settings given next to it, in the same file or in another
`--set` of the same command, override the method's own:

    gossamer simulate configs/gasloc.toml --set method=muloco --set rule.lr=0.8

`--set method=` replaces only the keys the method defines; everything else in the file is kept, except: (1) naming a different
rule, topology, codec, server or pair discards the old one's options; (2) a rule, a server and a pair method exclude each other,
so each replaces the others and their settings.

A method stands for the settings under "made of". A method with its own update equations has its own rule; the others combine an
existing rule with another topology, codec, schedule or inner optimizer. Asynchronous methods (those with a server, in pairs or
without waiting) are simulated over virtual time, with the seconds of a network in the run file
([ADR 15](adr/0015-a-server-is-a-process-and-a-phase-is-granted.md)). The documentation of each rule has its equation. What each
sends and takes on three networks is [computed](results/methods.md); losses of one method of each family, all tuned alike, are on
the [leaderboard](evidence/leaderboard.md).
"""
_COUNTED = """\
The columns "sent" and "keeps" are counted by running rounds without data, with {workers} workers and {steps} local steps (1
where the method sets that). The model is `{size}`, with {parameters:,} parameters; P is its size in fp32, {megabytes:.0f} MB.
"Sent": mean bytes per worker and round (per local phase for asynchronous methods); "differences" are zero for a worker
that has not moved. "Keeps": copies in addition to parameters and inner optimizer; those "in flight" belong to exchanges that
overlap with training. The P of a mixture of experts is that of the whole mixture."""

_BOUNDARIES = f"""\
## Boundaries

What crosses the cuts of a replica in stages ([how-to](how-to/pipelines.md)). Codecs are named for each direction in `[pipeline]`,
and act outside of autograd. The last two are models with few numbers of a token at their cuts, and gradients of their own.

Bits are those of the longest payload for {_CROSSING[0]} sequences of {_CROSSING[1]} tokens with {_CROSSING[2]} channels, with
width {_WIDTH} where that is an option.
"""


def _own(name: str) -> bool:
    """Whether it has notes of its own."""
    return name in FACTORIES or bool(recipes()[name].differs)


def _row(name: str, recipe: Recipe, layout: Layout) -> MethodRow:
    config = resolve(parse(with_settings(with_settings({}, _BASE), recipe.settings)))
    if config.model.experts is not None:
        layout = layout_for(config.model, _VOCABULARY)
    m, size = config.method, 4.0 * layout.numel
    counted = traffic(config, layout)
    sent = f"{counted.sent_bytes / 1e6:,.0f} MB ({_models(counted.sent_bytes / size)})"
    if counted.most_bytes > 1.05 * counted.sent_bytes:
        sent += f", at most {_models(counted.most_bytes / size)}"
    keeps = _models(counted.state_copies)
    if counted.flight_copies:
        keeps += f", and {_models(counted.flight_copies)} in flight"
    if isinstance(m, WithServer):
        regions = m.rule.regions
        keeps += f", and {_models(m.rule.state_copies)} at the server"
        sends, needs = "differences to the server", ["a server"]
        if regions is not None:
            keeps += f" of each region and {_models(regions.rule.state_copies)} at the global one"
            sends, needs = "differences to the server of its region", ["servers in two levels"]
        needs += ["whole tensors"] * (not m.rule.elementwise)
    elif isinstance(m, InPairs):
        sends, needs = "parameters at each meeting", ["a graph that never changes"]
    else:
        sends, needs = _sends(m, config, counted), _needs(m, config)
    if config.events.fragments > 1:
        sends = sends.replace("differences", f"differences of one of {config.events.fragments} parts")
    if config.event_driven:
        needs.append("no waiting")
    steps = "1 step" if config.full_steps == 1 else f"{config.full_steps} steps"
    return MethodRow(
        name,
        first_sentence(recipe.source),
        made_of(recipe.settings),
        steps,
        sends,
        sent,
        keeps,
        "; ".join(needs),
        recipe.fails,
    )


def _needs(m: Method, config: RunSettings) -> list[str]:
    needs = [_NEEDS[m.rule.needs]] if config.workers > 1 else ["nobody"]
    if hidden := config.schedule.overlap_steps + m.rule.delay_rounds * config.full_steps:
        needs.append(
            f"{hidden} step{'s' * (hidden > 1)} in which the transfer{' of parameters' * bool(m.rule.mixes_updates)} is hidden"
        )
    if config.schedule.inner_every:
        needs.append("AdamW inside, whose moments are exchanged")
    if not m.rule.elementwise:
        needs.append("whole tensors")
    return needs


def _models(copies: float) -> str:
    return f"{copies:.3g} P" if round(copies, 6) else "0"


def _sends(m: Method, config: RunSettings, counted: Traffic) -> str:
    """The kind of message and its receivers: a message is a difference if workers that have not moved send zeros."""
    if not counted.messages:
        return "nothing"
    kinds = {1: "a number", _PROBE: "parameters"}
    words = [
        kinds.get(t.numel(), "some parameters") if t.any() else "differences" for t in _messages_at_rest(config, m)
    ]
    what = "gradients" if m.rule.site == "gradients" else " and ".join(words)
    if m.rule.mixes_updates:
        what += " ahead, and differences"
    if config.schedule.fragments > 1:
        what += f" in {config.schedule.fragments} parts"
    if config.inner.averaging is not None and m.rule.site == "parameters":
        what = f"averaged and last {what}"
    if config.schedule.inner_every:
        what += ", and moments at times"
    if "mean" in counted.kinds:
        to = "everyone, by chunk owners" + (" or one peer" if "exchange" in counted.kinds else "")
    else:
        to = "everyone" if m.topology.everyone else f"{counted.peers:.3g} peer{'s' * (counted.peers != 1)}"
    if m.holders:
        to += ", experts to their holders"
    back = f", the sums in {m.codec.back.name}" if m.codec.back is not None else ""
    return f"{what}{'' if m.codec.exact else f' in {m.codec.name}'} to {to}{back}"


def _messages_at_rest(config: RunSettings, m: Method) -> list[torch.Tensor]:
    """What a worker that has not moved sends, for a model of `_PROBE` numbers from 1 on."""
    x = torch.arange(1.0, 1.0 + _PROBE)
    ctx = Context(0, config.workers, 0, config.full_steps, 0.5, Layout((Leaf("w", (_PROBE,), 0, _PROBE),), _PROBE))
    mixing = m.topology.mixing(0)
    return leaves(m.rule.send(x, initial_state(m.rule, mixing, x, ctx), with_mixing(ctx, mixing)))


def linked(text: str) -> str:
    """A text with its papers as links, in Markdown."""
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    print(markdown(), end="")
