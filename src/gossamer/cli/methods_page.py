"""The methods as one table, counted from the running code: what each sends, keeps and needs, and when it fails.

The rounds that are counted run on tensors without data: every message and payload is really made and sent, and none is heard.
"""

import functools
import math
import re
from typing import NamedTuple

import torch

from gossamer.codecs import make_codec
from gossamer.codecs.message import payload_bytes
from gossamer.layout import Layout, Leaf, arrange, layout_of
from gossamer.models.llama import build_model
from gossamer.models.sizes import parameter_count
from gossamer.record.trace import Operation
from gossamer.report.table import markdown_lines
from gossamer.rounds.exchange import first_message
from gossamer.rounds.loop import Method, OuterLoop
from gossamer.rules import Context
from gossamer.run.config import RunConfig, parse
from gossamer.run.document import with_settings
from gossamer.run.methods import FACTORIES, Recipe, first_sentence, made_of, missing, recipes, said
from gossamer.run.settle import pair_rule, server_rule
from gossamer.run.worker import method, parts_of
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import leaves, nbytes

__all__ = ["Row", "Traffic", "markdown", "rows", "traffic"]

_BASE = {"workers": 8, "model.size": "134m", "run.steps": 120, "run.local_steps": 30}
_VOCABULARY = 32_000
_PROBE = 200
_NEEDS = {
    "everyone": "everyone to hear everyone: a barrier",
    "connected": "a graph that connects over time",
    "static": "a graph that never changes",
    "tree": "a tree",
    "push": "a graph whose senders give all away",
}


class Traffic(NamedTuple):
    """What one worker does in one round, in the mean over workers and rounds."""

    sent_bytes: float
    most_bytes: float
    """Of the worker that sends most."""
    messages: float
    peers: float
    kinds: tuple[str, ...]
    """Of `gossamer.record.trace.KINDS`."""
    state_copies: float
    """Outer state, in models."""
    flight_copies: float
    """What is kept for exchanges under way while training goes on, in models, at its most."""


class Row(NamedTuple):
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


def traffic(config: RunConfig, layout: Layout, rounds: int = 0) -> Traffic:
    """Plays rounds of a run on tensors without data and counts; as many as until everything repeats, unless given.

    Args: `layout` is that of the whole model.
    """
    if config.server is not None or config.pair is not None:
        return _on_a_clock(config, layout)
    m, n = method(config), config.workers
    network, schedule, size = MemoryNetwork(n), config.schedule, layout.numel
    layout, spans = arrange(layout, *config.fragments)
    x = torch.empty(size, device="meta")
    averages = config.inner.averaging is not None and m.rule.site == "parameters"
    parts = parts_of(x, layout, spans, torch.cat([x, x]) if averages else None, [x] * len(schedule.inner_every))
    loops = [
        OuterLoop(
            m, network.transport(i), parts, local_steps=config.local_steps(i), full_steps=config.full_steps,
            seed=config.seed,
        )
        for i in range(n)
    ]  # fmt: skip
    rounds = rounds or math.lcm(m.topology.period or 1, *(every for every in schedule.inner_every if every))
    sent: list[list[Operation]] = [[] for _ in loops]
    flight = 0.0
    for t in range(rounds):
        for stop in loops[0].stops(t):
            for loop in loops:
                loop.announce(t, stop)
            for mine, loop in zip(sent, loops, strict=True):
                mine.extend(loop.post(t, stop))
            for loop in loops:
                loop.pop_due(t, stop)  # and never finished: what is received changes no byte
            under_way = [sum(nbytes(tuple(one["sent"])) for one in loop.state_under_way()) for loop in loops]
            flight = max(flight, *under_way)
    totals = [sum(b for operation in mine for _, b in operation.sends) / rounds for mine in sent]
    every = [operation for mine in sent for operation in mine]
    return Traffic(
        sum(totals) / n,
        max(totals),
        sum(len(op.sends) * (2 if op.kind == "mean" else 1) for op in every) / n / rounds,
        sum(len(op.sends) for op in every) / max(1, len(every)),
        tuple(dict.fromkeys(op.kind for op in every)),
        max(sum(nbytes(leaf) for leaf in leaves(loop.state)) for loop in loops) / nbytes(x),
        flight / nbytes(x),
    )


def _on_a_clock(config: RunConfig, layout: Layout) -> Traffic:
    """What a worker pushes, or tells at a meeting, after one local phase."""
    codec, copies = make_codec(config.codec.name, **config.codec.options), 1.0  # the point a server greeted it with
    if config.pair is not None:
        copies = float(pair_rule(config).state_copies)
    spans = arrange(layout, *config.fragments)[1]
    sizes = [payload_bytes(codec, b - a) for a, b in spans]
    sent_bytes = sum(sizes) / len(sizes)
    return Traffic(sent_bytes, sent_bytes, 1, 1, (), copies, 0.0)


@functools.cache
def rows() -> tuple[Row, ...]:
    """A row for every method, for the sizes in the head of `markdown`. Cost: some seconds, and no memory for any model."""
    with torch.device("meta"):
        layout = layout_of(build_model(parse(with_settings({}, _BASE)).model, _VOCABULARY, 128, 0))
    return tuple(_row(name, recipe, layout) for name, recipe in recipes().items())


def markdown() -> str:
    """The page that `gossamer list --markdown` prints."""
    base = parse(with_settings({}, _BASE))
    parameters = parameter_count(base.model, _VOCABULARY)
    head = _HEAD.format(
        workers=base.workers, size=base.model.size, parameters=parameters, megabytes=4 * parameters / 1e6,
        steps=base.full_steps,
    )  # fmt: skip
    headings = [field.replace("_", " ") for field in Row._fields]
    lines = [headings, ["---"] * len(headings)]
    lines += [[f"`{row.method}`", *(_linked(cell) for cell in row[1:])] for row in rows()]
    table = markdown_lines(lines)
    differing = {
        name: recipe.differs or said(FACTORIES[name], "Differs") for name, recipe in recipes().items() if _own(name)
    }
    notes = "".join(f"- `{name}`: {text.rstrip('.')}.\n" for name, text in differing.items() if text)
    closed = [f"`{name}` ({first_sentence(said(f, 'Source'))})" for name, f in FACTORIES.items() if missing(f)]
    notes = f"Not for training models, but as a reference: {', '.join(closed)}.\n\n" + notes if closed else notes
    return f"{head}\n{table}\n## What differs from the sources\n\n{_linked(notes)}"


_HEAD = """<!-- Made by `make methods` from the code; a test compares the two. -->
# The methods

A method is run by its name, in a run file or on the command line, and what is said beside it goes first, which is what stands
in the same file, or in another `--set` of the same command:

    gossamer simulate configs/gasloc.toml --set method=muloco --set rule.lr=0.8

On the command line a method replaces the same keys of the file. What else the file says of rule, topology, codec, schedule and
the rest, by a method of its own too, stays, with two exceptions: naming another rule, topology, codec, server or pair drops the
options of the old one, and a server, pairs and a rule replace each other with all that belongs to them.

A method stands for the settings under "made of". Some are a rule and nothing else; others are a rule of an older method on
another topology, or with another codec, schedule or inner optimizer: a method has a rule of its own only where its equations
differ. Those with a server or pairs, and those that do not wait, run over virtual time, on the clock of a network in the run file
([ADR 15](adr/0015-a-server-is-a-process-and-a-phase-is-granted.md)). `gossamer compare configs/methods.toml` trains them all on
the same data ([results](results/methods.md)); the documentation of each rule has its equation.

What a worker sends and keeps is counted from rounds that were played without data: {workers} workers, model `{size}` with
{parameters:,} parameters, so that P, the model in fp32, is {megabytes:.0f} MB, and {steps} local steps where the method does not
say 1. Sent is what one worker sends in one round (after one local phase where there are no rounds), in the mean; "differences"
are zero for a worker that has not moved. Kept are copies beside parameters and inner optimizer; those "under way" belong to
exchanges that overlap with training.
"""


def _own(name: str) -> bool:
    """Whether its notes are not those of another row."""
    return name in FACTORIES or bool(recipes()[name].differs)


def _row(name: str, recipe: Recipe, layout: Layout) -> Row:
    config = parse(with_settings(with_settings({}, _BASE), recipe.settings))
    counted, size = traffic(config, layout), 4.0 * layout.numel
    sent = f"{counted.sent_bytes / 1e6:,.0f} MB ({_models(counted.sent_bytes / size)})"
    if counted.most_bytes > 1.05 * counted.sent_bytes:
        sent += f", at most {_models(counted.most_bytes / size)}"
    keeps = _models(counted.state_copies)
    if counted.flight_copies:
        keeps += f", and {_models(counted.flight_copies)} under way"
    if config.server is not None:
        server = server_rule(config)
        keeps += f", and {_models(server.state_copies)} at the server"
        sends, needs = "differences to the server", ["a server"] + ["whole tensors"] * (not server.elementwise)
    elif config.pair is not None:
        sends, needs = "parameters at each meeting", ["a graph that never changes"]
    else:
        m = method(config)
        sends, needs = _sends(m, config, counted), _needs(m, config)
    if config.events.fragments > 1:
        sends = sends.replace("differences", f"differences of one of {config.events.fragments} parts")
    if config.event_driven:
        needs.append("no waiting")
    steps = "1 step" if config.full_steps == 1 else f"{config.full_steps} steps"
    return Row(
        name, first_sentence(recipe.source), made_of(recipe.settings), steps, sends, sent, keeps, "; ".join(needs),
        recipe.fails,
    )  # fmt: skip


def _needs(m: Method, config: RunConfig) -> list[str]:
    needs = [_NEEDS[m.rule.needs]] if config.workers > 1 else ["nobody"]
    if hidden := config.schedule.overlap_steps + m.rule.delay_rounds * config.full_steps:
        needs.append(f"{hidden} step{'s' * (hidden > 1)} in which the transfer is hidden")
    if config.schedule.inner_every:
        needs.append("AdamW inside, whose moments are exchanged")
    if not m.rule.elementwise:
        needs.append("whole tensors")
    return needs


def _models(copies: float) -> str:
    return f"{copies:.3g} P" if round(copies, 6) else "0"


def _sends(m: Method, config: RunConfig, counted: Traffic) -> str:
    """What goes to whom: a message is a difference if workers that have not moved send zeros."""
    if not counted.messages:
        return "nothing"
    x = torch.arange(1.0, 1.0 + _PROBE)
    ctx = Context(0, config.workers, 0, config.full_steps, 0.5, Layout((Leaf("w", (_PROBE,), 0, _PROBE),), _PROBE))
    message = leaves(first_message(m.rule, m.topology.mixing(0), x, ctx))
    kinds = {1: "a number", _PROBE: "parameters"}
    words = [kinds.get(leaf.numel(), "some parameters") if leaf.any() else "differences" for leaf in message]
    what = "gradients" if m.rule.site == "gradients" else " and ".join(words)
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
    back = f", the sums in {m.codec.back.name}" if m.codec.back is not None else ""
    return f"{what}{'' if m.codec.exact else f' in {m.codec.name}'} to {to}{back}"


def _linked(text: str) -> str:
    """Papers as links."""
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
