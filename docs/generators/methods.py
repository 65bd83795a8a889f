"""A page for every method, and the page that leads to them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomli_w

from generators import drawing
from generators.methods_table import MethodRow, counted_for, linked, rows
from generators.prose import about, begun, escaped, options_table, table
from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.rules import RULES, WRAPPERS
from gossamer.run.config.document import with_settings
from gossamer.run.config.recipes import FACTORIES, Recipe, docstring_part, made_of, missing, recipes
from gossamer.settings.options import summary
from gossamer.topologies import make_topology

KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {"rule": RULES, "server": SERVERS, "pair": PAIRS}
GROUPS = {
    "rule": "Rules in rounds",
    "recipe": "Recipes around a rule",
    "server": "With a server",
    "pair": "In pairs",
}
"""The headings under which the methods stand, by the group of `grouped`."""
_DRAWN = 8
_HEAD = """# Methods

Select a method by its name: `method = "muloco"` in a run file, or on the command line:

```
gossamer simulate configs/gasloc.toml --set method=muloco --set rule.lr=0.8
```

Settings next to the name override the method's own. A method with its own equations has a rule (or a server rule, or a pair
rule) of its own. A **recipe** combines an existing rule with another topology, codec, schedule or inner optimizer.

A method replaces only the keys that it sets. All else in the file stays, with two exceptions: naming another rule, topology,
codec, server or pair discards the options of the old one; and a rule, a server and a pair method exclude each other.
"""


def pages() -> Iterator[tuple[str, str]]:
    """The path and the Markdown of each page."""
    yield "methods.md", _index()
    counted = {row.method: row for row in rows()}
    for name, recipe in recipes().items():
        yield f"methods/{name}.md", _page(name, recipe, counted[name])
    for name in FACTORIES:
        if missing(FACTORIES[name]):
            yield f"methods/{name}.md", _reference_page(name)
    yield "methods/wrappers.md", _wrappers()


def grouped() -> dict[str, list[str]]:
    """The names of all pages about methods, by group."""
    found: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, recipe in recipes().items():
        kind = _kind(recipe.settings)
        found["recipe" if kind == "rule" and name not in FACTORIES else kind].append(name)
    for name in FACTORIES:
        if missing(FACTORIES[name]):
            found[next(kind for kind, rows in KINDS.items() if name in rows)].append(name)
    return found


def python_of(settings: Mapping[str, Any]) -> str:
    """The lines that make the same method with `gossamer.Outer`; empty where only a run file can.

    >>> print(python_of({"rule.name": "diloco", "rule.lr": 0.4, "topology.name": "complete"}))
    from gossamer import Outer, rules
    <BLANKLINE>
    outer = Outer(model, rules.diloco(lr=0.4), topology="complete", local_steps=30)
    """
    parts = {head: dict(_below(settings, head)) for head in ("rule", "topology", "codec", "schedule", "run", "inner")}
    rule = parts["rule"].pop("name", None)
    decides = bool({"adapt", "wait"} & parts["run"].keys()) or "adapt_every" in parts["rule"]
    if rule is None or RULES[rule]().site == "gradients" or decides:
        return ""
    if any(key.startswith("model.") for key in settings):  # the model is that of the loop
        return ""
    if "inner_every" in parts["schedule"] or "averaging" in parts["inner"]:
        return ""
    names = {"Outer"}
    words = ["model", _rule_call(rule, parts["rule"], names)]
    if topology := parts["topology"].pop("name", None):
        words.append(f'topology="{topology}"')
        if options := parts["topology"]:
            # A topology with options is made for a number of workers.
            names.add("topologies")
            words[-1] = f"topology=topologies.{topology}(workers, {_arguments(options)})"
    words.append(f"local_steps={parts['run'].get('local_steps', 30)}")
    if codec := parts["codec"].pop("name", None):
        words.append(f'codec="{codec}"')
        if back := parts["codec"].pop("back", None):
            names.add("codecs")
            words[-1] = f'codec=codecs.make_codec("{codec}", back="{back}")'
    if parts["schedule"]:
        names.add("Schedule")
        words.append(f"schedule=Schedule({_arguments(parts['schedule'])})")
    imports = sorted(names, key=lambda name: (name.islower(), name))
    call = f"outer = Outer({', '.join(words)})"
    if len(call) > 90:
        call = "outer = Outer(\n" + "".join(f"    {word},\n" for word in words) + ")"
    return f"from gossamer import {', '.join(imports)}\n\n{call}"


def _rule_call(name: str, options: dict[str, Any], names: set[str]) -> str:
    around = {key: options.pop(key) for key in [*options] if key in WRAPPERS}
    if not options and not around:
        return f'"{name}"'
    names.add("rules")
    call = f"rules.{name}({_arguments(options)})"
    for wrapper, own in around.items():
        call = f"rules.{wrapper}({call}, {_arguments(own)})"
    return call


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}".replace("'", '"') for key, value in options.items())


def _below(settings: Mapping[str, Any], head: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if key.startswith(f"{head}."):
            yield key.removeprefix(f"{head}."), value


def _kind(settings: Mapping[str, Any]) -> str:
    return next(kind for kind in KINDS if f"{kind}.name" in settings)


def _index() -> str:
    counted = {row.method: row for row in rows()}
    parts = [_HEAD]
    for group, names in grouped().items():
        lines = []
        for name in names:
            link = f"[`{name}`](methods/{name}.md)"
            if name not in counted:
                lines.append(
                    (
                        link,
                        escaped(summary(FACTORIES[name])),
                        "",
                        "",
                        escaped(docstring_part(FACTORIES[name], "Source")),
                    )
                )
                continue
            row = counted[name]
            what = escaped(summary(FACTORIES[name])) if name in FACTORIES else row.made_of
            lines.append(
                (link, what, f"{row.sends}<br>{_together(row.sent)}", _together(row.keeps), linked(row.source))
            )
        parts.append(f"## {GROUPS[group]}\n\n" + table(("method", "what it does", "sends", "keeps", "source"), lines))
    parts.append("[Wrappers](methods/wrappers.md) change any rule that fits them.\n")
    parts.append(f"## How it was counted\n\n{counted_for()}\n")
    parts.append(
        "[Bytes and times](results/methods.md) of all of them on three networks; [losses](evidence/leaderboard.md) of one "
        "method of each family, all tuned alike.\n"
    )
    return "\n".join(parts)


def _page(name: str, recipe: Recipe, row: MethodRow) -> str:
    kind = _kind(recipe.settings)
    base = recipe.settings[f"{kind}.name"]
    factory = KINDS[kind][base]
    own = name == base
    parts = [f"# {name}\n"]
    if own:
        parts.append(about(factory, labels=()))
    else:
        changes = {key: value for key, value in recipe.settings.items() if recipes()[base].settings.get(key) != value}
        if any(key.startswith(f"{kind}.") for key in changes):
            changes = {f"{kind}.name": base, **changes}  # so that its options stand next to its name
        said_of_base = escaped(summary(factory).rstrip("."))
        parts.append(f"[`{base}`]({base}.md) with {made_of(changes)}.\n\n`{base}`: {said_of_base}.\n")
        parts.append(about(factory, first=False, labels=()))
    parts += [
        "## Who sends to whom\n",
        _picture(kind, recipe.settings),
        "\n## Cost\n",
        _cost(row, docstring_part(factory, "Cost")),
    ]
    parts.append(f"## When it fails\n\n{_fails(recipe.fails)}\n")
    parts.append(f"## Source\n\n{_sentence(recipe.source)}\n")
    differs = [text for text in (recipe.differs, docstring_part(factory, "Differs")) if text]
    if differs:
        parts.append("## Where it differs from the source\n\n" + "\n\n".join(map(_sentence, differs)) + "\n")
    if options := options_table(factory):
        parts.append(f"## Options of `{base}`\n\n{options}")
    parts.append(_run_it(name, recipe.settings, kind))
    return "\n".join(parts)


def _reference_page(name: str) -> str:
    factory = FACTORIES[name]
    note = "!!! note\n    This is a closed-form reference for tests. It trains no model, so no run file can name it.\n"
    return f"# {name}\n\n{about(factory)}\n{note}\n## Options\n\n{options_table(factory)}"


def _wrappers() -> str:
    parts = [
        "# Wrappers\n",
        "A wrapper changes any rule that fits it. In a run file it is a table inside the rule:\n",
        '```toml\nrule = { name = "gasloc", restarted = { every = 3 } }\n```\n',
        "In Python it is a call around the rule:\n",
        "```python\nfrom gossamer import rules\n\nrule = rules.restarted(rules.gasloc(), every=3)\n```\n",
    ]
    for name, wrapper in WRAPPERS.items():
        parts.append(
            f"## {name}\n\n{about(wrapper, labels=('Cost', 'Source', 'Raises', 'Fails when'))}\n{options_table(wrapper)}"
        )
    return "\n".join(parts)


def _picture(kind: str, settings: Mapping[str, Any]) -> str:
    if kind == "server":
        return f'<div class="graphs">{drawing.hub(_DRAWN)}</div>\n'
    if settings.get("workers") == 1:
        return "One worker: nothing is sent.\n"
    options = dict(_below(settings, "topology"))
    name = options.pop("name")
    topology = make_topology(name, _DRAWN, seed=0, **options)
    link = f"[`{name}`](../topologies.md#{name})"
    text = f"Topology {link}, {_DRAWN} workers."
    if kind == "rule" and RULES[settings["rule.name"]]().needs == "connected":
        text += " Any other that keeps the mean may be named instead."
    if kind == "pair":
        text = (
            f"Workers meet in pairs, at random times, along the links of topology [`{name}`](../topologies.md#{name})."
        )
    return f'<div class="graphs">{drawing.rounds(topology, _DRAWN)}</div>\n\n{text}\n'


def _cost(row: MethodRow, words: str) -> str:
    lines = [
        ("exchanges", f"after every {row.round.removeprefix('1 ')}"),
        ("sends", row.sends),
        ("sent", _together(row.sent)),
        ("keeps", _together(row.keeps)),
        ("needs", row.needs),
    ]
    note = "P is the size of the model in fp32. [How it was counted](../methods.md#how-it-was-counted)."
    counted = table(("per worker and round", "counted"), lines)
    return f"{_sentence(words)}\n\n{counted}\n{note}\n"


def _run_it(name: str, settings: Mapping[str, Any], kind: str) -> str:
    toml = tomli_w.dumps(with_settings({}, settings)).rstrip()
    clocked = kind != "rule" or not settings.get("run.wait", True) or settings.get("run.adapt", False)
    file = "configs/heloco.toml" if clocked else "configs/gasloc.toml"
    parts = [
        "## Run it\n",
        f'In a run file, `method = "{name}"`, which stands for\n',
        f"```toml\n{toml}\n```\n",
        "On the command line:\n",
        f"```\ngossamer simulate {file} --set method={name}\n```\n",
    ]
    if clocked:
        needs = "It follows the seconds of a network, which that file declares as `[network.NAME]`"
        parts.append(f"{needs} ([run file](../reference/run-file.md#events)).\n")
    if code := python_of(settings):
        parts.append(f"In your own loop ([how](../how-to/own-loop.md)):\n\n```python\n{code}\n```\n")
        if inner := dict(_below(settings, "inner")):
            words = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in inner.items())
            parts.append(f"The inner optimizer is yours there; the method's own has {words}.\n")
    else:
        parts.append("`gossamer.Outer` does not offer it: it runs from a run file only.\n")
    return "\n".join(parts)


def _together(text: str) -> str:
    """Numbers that stay on one line with their units."""
    return re.sub(r"(?<=[\d)]) (?=P|MB)", "\u00a0", text)


def _fails(text: str) -> str:
    """The words of a docstring after "Fails when:", as a sentence."""
    return escaped(text[:1].upper() + text[1:] if text.startswith("always") else f"When {text}")


def _sentence(text: str) -> str:
    return begun(text if text.endswith(".") else text + ".")
