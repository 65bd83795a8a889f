"""Every method by its name, as the settings of a run file: `method = "muloco"`.

A method with its own update equations is a row of `RULES`, `SERVERS` or `PAIRS`. A method that only combines an existing rule
with another topology, codec, schedule or inner optimizer is a row of `METHODS`; a row with the name of a rule has the settings
of its paper.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.boundaries import BOUNDARIES
from gossamer.codecs import CODECS
from gossamer.errors import ConfigError, choose
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rules import RULES
from gossamer.settings.options import listed, options_of, summary
from gossamer.topologies import TOPOLOGIES


class Recipe(NamedTuple):
    """The settings and the description of a method."""

    settings: Mapping[str, Any]
    """Dotted keys of a run file; without `rule.name`, `server.name` or `pair.name`, the recipe has the name of its rule."""
    source: str = ""
    """Its source; by default that in the docstring of its rule."""
    differs: str = ""
    """Differences from the source, in addition to those in the docstring of its rule."""
    fails: str = ""
    """When it fails; by default as in the docstring of its rule."""


_GPA = {"inner.averaging": "gpa", "inner.mu_x": 0.9934}
_MULOCO = {
    "rule.name": "diloco",
    "rule.momentum": 0.6,
    "inner.optimizer": "spectral_muon",
    "inner.lr": 0.02,
    "inner.nesterov": False,
    "inner.weight_decay": 0.01,
}
_SIGN_SGD = {"inner.optimizer": "sgd", "inner.momentum": 0.0, "inner.lr": 4e-4, "inner.weight_decay": 0.0}
_OVERLAP = {"schedule.overlap_steps": 5}
_GLOBAL_FGD = {
    "rule.name": "fgd",
    "rule.mix_parameters": "global",
    "rule.momentum": 0.9,
    "topology.name": "complete",
}
_OWN_MOMENTA = (
    "μ is large: momenta are never mixed, and leave a steady disagreement whose variance is {} with 8 workers."
)
_COMBINE_THEN_ADAPT = {"run.local_steps": 1, "schedule.overlap_steps": 1}
METHODS: dict[str, Recipe] = {
    # The settings of the papers.
    "acco": Recipe({"inner.optimizer": "acco_adamw"}),
    "anchored_gasloc": Recipe({"codec.name": "int4"}),
    "choco": Recipe({"topology.name": "exponential", "codec.name": "int4"}),
    "cocktail": Recipe({"run.local_steps": 1, "codec.name": "cocktail"}),
    "demo": Recipe({"codec.name": "topk", "codec.k": 32, **_SIGN_SGD}),
    "distro": Recipe(
        {
            "rule.name": "demo",
            "rule.signs": True,
            "codec.name": "topk2bit",
            "codec.k": 32,
            "codec.tiles": False,
            **_SIGN_SGD,
        },
        source="Psyche's code, PsycheFoundation/psyche (`quantize_1bit`), after DeMo, arXiv 2411.19870",
        differs="`topk2bit` sends two magnitudes as well, of which only signs are used: 15 bits for each coefficient, where "
        "place and sign are 13; else as in `demo`",
    ),
    "dilocox": Recipe({"codec.name": "int4"}),
    "dilocox_adaptive": Recipe(
        {"rule.name": "dilocox", "rule.adapt_every": 5, "codec.name": "int4"},
        differs="the rounds between two decisions, which were not readable, are ours; else as in `dilocox`",
        fails="few directions hold most of the mean: rank and rounds shrink to them, and the momentum of late means does not.",
    ),
    "relaysum": Recipe({"run.local_steps": 1}),
    "sparseloco": Recipe({"codec.name": "topk2bit"}),
    "sparta": Recipe({"run.local_steps": 1, "rule.one_in": 50}),
    "sgp": Recipe({"run.local_steps": 1}),
    # GASLoC.
    "gasloc_2peer": Recipe({"rule.name": "gasloc", "topology.name": "random", "topology.peers": 2}),
    "gasloc_published": Recipe({"rule.name": "gasloc", "rule.form": "published", "rule.momentum": 0.5}),
    "gasloc_drift": Recipe(
        {"rule.name": "gasloc", "rule.form": "drift"}, source="ours, after arXiv 2606.11081 and 2606.22768"
    ),
    "gasloc_heavy_ball": Recipe({"rule.name": "gasloc", "rule.optimizer": "heavy_ball", "rule.momentum": 0.5}),
    "gasloc_sgd": Recipe({"rule.name": "gasloc", "rule.optimizer": "sgd"}),
    "gasloc_single_step": Recipe(
        {
            "rule.name": "gasloc",
            "rule.lr": 1.0,
            "rule.momentum": 0.5,
            "rule.alpha": "auto",
            "topology.name": "exponential",
            "run.local_steps": 1,
        },
    ),
    "gasloc_restarted": Recipe(
        {"rule.name": "gasloc", "rule.restarted": {"every": 3}},
        source="arXiv 2605.28585 for DiLoCo; for GASLoC ours",
    ),
    "gasloc_overlapped": Recipe({"rule.name": "gasloc", **_OVERLAP}, source="ours, after arXiv 2501.18512"),
    "gasloc_streaming": Recipe(
        {"rule.name": "gasloc", "schedule.fragments": 3, **_OVERLAP}, source="ours, after arXiv 2501.18512"
    ),
    "gasloc_adaptive": Recipe(
        {"rule.name": "gasloc", "run.adapt": True},
        source="arXiv 2606.11081, figures 2 and 3",
        differs="the number of steps of a straggler is inferred; `run.weigh_steps`, which makes them count fully, is ours",
    ),
    # Factored Gossip DiLoCo.
    "fgd_pairs": Recipe({"rule.name": "fgd", "rule.momentum": 0.9, "rule.mix_updates": "random"}),
    "fgd_global": Recipe(_GLOBAL_FGD, fails=_OWN_MOMENTA.format("7.1 times that of the drift")),
    "fgd_global_pairs": Recipe(
        {**_GLOBAL_FGD, "rule.mix_updates": "random"}, fails=_OWN_MOMENTA.format("3 times that of the drift")
    ),
    # Around DiLoCo.
    "fedavg_momentum": Recipe(
        {"rule.name": "diloco", "rule.lr": 1.0, "rule.momentum": 0.5, "rule.optimizer": "heavy_ball"},
        source="arXiv 2003.00295",
        differs="all workers take part in every round",
        fails="η / (1 - μ), the factor on steady progress, is large.",
    ),
    "fedadagrad": Recipe({"rule.name": "fedopt", "rule.optimizer": "adagrad"}),
    "fedyogi": Recipe({"rule.name": "fedopt", "rule.optimizer": "yogi"}),
    "muloco": Recipe(
        _MULOCO,
        source="arXiv 2505.23725",
        differs="norms and biases are not decayed; one learning rate for matrices and all else, as in the authors' package",
    ),
    "muloco_compressed": Recipe(
        {**_MULOCO, "rule.error_feedback": {"decay": 0.95}, "codec.name": "topk2bit"},
        source="arXiv 2505.23725",
        differs="as in `muloco`; they quantise all elements to two bits, `topk2bit` only the largest",
        fails="a worker leaves: its error-feedback buffer is lost.",
    ),
    "opendiloco": Recipe(
        {"rule.name": "diloco", "codec.name": "fp16", "codec.back": "fp16"},
        source="arXiv 2407.07852",
        differs="sums are taken in fp32",
    ),
    "intellect_1": Recipe(
        {"rule.name": "diloco", "codec.name": "int8_statistical", "codec.back": "int8_statistical"},
        source="arXiv 2412.01152",
        differs="quantised once on each of two legs, not at every hop of a ring",
    ),
    "fomoe": Recipe(
        {"rule.name": "diloco", "model.experts.count": 8, "model.experts.holders": 2},
        source="FoMoE, arXiv 2606.19025, by secondary accounts",
        differs="gates are those of Mixtral, where the paper names sigmoid gates, and stay as they are when a token skips; the "
        "balance loss is each worker's own, over all experts; experts stay on their workers; holders weigh the same, whatever "
        "tokens they have seen; moments are not averaged",
        fails="few workers hold an expert: it sees their share of the tokens only, and the others' tokens skip it.",
    ),
    "snoo": Recipe(
        {"rule.name": "diloco", "workers": 1},
        source="arXiv 2510.15830",
        fails="the outer learning rate and momentum are tuned for many workers: one worker averages less noise away.",
    ),
    "edit": Recipe(
        {"rule.name": "diloco", "rule.momentum": 0.8, "rule.penalized": {}},
        source="EDiT, arXiv 2412.07210; the penalty also as in the authors' code, atorch",
        differs="no data parallelism in the first steps; a model sharded inside a worker (`run.shards`) is exchanged at the end "
        "of a round, not layer by layer during the next forward pass",
    ),
    "a_edit": Recipe(
        {"rule.name": "diloco", "rule.momentum": 0.8, "rule.penalized": {}, "run.adapt": True},
        source="A-EDiT, arXiv 2412.07210",
        differs="as in `edit`; local steps follow each worker's pace, where theirs all train for the same seconds; their code "
        "can mix steps into the weights, which here are of norms alone",
    ),
    "streaming_diloco": Recipe(
        {
            "rule.name": "diloco",
            "rule.lr": 0.4,
            "codec.name": "fp4",
            "codec.back": "bf16",
            "schedule.fragments": 3,
            "schedule.overlap_steps": 2,
            "schedule.merge": 0.5,
        },
        source="arXiv 2501.18512",
        differs="the paper does not specify the codec of the returned sums; `codec.back` may be fp4 as well",
        fails="the overlap is long: the paper recommends at most 5 inner steps.",
    ),
    "cocodc": Recipe(
        {
            "rule.name": "diloco",
            "rule.lr": 0.4,
            "schedule.fragments": 3,
            "schedule.overlap_steps": 2,
            "schedule.merge": "taylor",
            "schedule.sends": 3,
        },
        source="arXiv 2504.17672",
        differs="how often fragments are sent is set (`schedule.sends`), not measured, here to the paper's least, once each on "
        "average; rates are counted in sends, and a fragment that was never sent goes first; the correction of a tensor has a "
        "given length (`schedule.merge_strength`), no given factor; the outer learning rate is that of `streaming_diloco`",
        fails="updates come so late, or are so long, that the squares of the gradients say little of the way between.",
    ),
    "asyncmesh": Recipe(
        {
            "rule.name": "sparta",
            "rule.one_in": 20,
            "rule.disjoint": True,
            "topology.name": "complete",
            "run.local_steps": 3,
            "schedule.overlap_steps": 3,
        },
        source="arXiv 2601.22442; the update as in the authors' code, github.com/PluralisResearch/agora-test",
        differs="every worker sends its slice to every other, where theirs is reduced; a round is 3 inner steps, where the code "
        "has 5 and 20, and its slice arrives with the next; workers weigh the same whatever their samples; differences are added "
        "as they are, without the paper's average of their staleness; the moments of the inner optimizer are not averaged; "
        "no pipeline; a copy of the model is kept while a slice is in flight",
        fails="slices are large: the authors found shares from 40 % on unstable.",
    ),
    "naive_delayed": Recipe(
        {"rule.name": "eager", "rule.fresh": False},
        source="arXiv 2502.12996, the baseline of eager updates",
        fails="always, a little: its authors found it clearly worse than eager updates.",
    ),
    "des_loc": Recipe(
        {"rule.name": "local_sgd", "schedule.inner_every": [3, 6]},
        source="arXiv 2505.22549",
        differs="parameters and moments are averaged after the optimizer step, not before it",
    ),
    "local_adam": Recipe(
        {"rule.name": "local_sgd", "schedule.inner_every": [1, 1]},
        source="as in arXiv 2505.22549, which halves its bytes",
        differs="as in `des_loc`",
    ),
    "mt_dao": Recipe(
        {
            "rule.name": "local_sgd",
            "schedule.inner_every": [1, 1],
            "inner.optimizer": "qh_adopt",
            "inner.betas": [0.995, 0.9999],
            "inner.eps": 1e-6,
        },
        source="MT-DAO, arXiv 2510.05361, with one slow momentum, on ADOPT",
        differs="parameters and moments are averaged after the optimizer step, not before it; ω (`inner.slow_weight`) is ours; "
        "the paper's rounds are 32 steps",
        fails="a round is so long that β₁ᴷ is small: the paper loses 1 to 4 % from 32 to 1,024 steps; or the run is as short as "
        "a thousand steps, of which `β₂ = 0.9999` never forgets the first, whose large gradients then keep all steps small.",
    ),
    # Averages of the inner optimizer's iterates.
    "gpa": Recipe(
        {"rule.name": "gossip", "topology.name": "complete", "workers": 1, **_GPA},
        source="arXiv 2512.17131",
        differs="average and iterate are both kept, two buffers for their one; `inner.mu_x = 0.9^(1/H)` is like H local steps, "
        "0.9934 like 16",
        fails="μ_x is so close to one that the average still holds early iterates at the end.",
    ),
    "gpa_data_parallel": Recipe(
        {"rule.name": "data_parallel", **_GPA}, source="arXiv 2512.17131", differs="as in `gpa`"
    ),
    "gpa_gossip": Recipe(
        {"rule.name": "gossip", **_GPA},
        source="arXiv 2512.17131 for one worker; with gossip ours",
        differs="the parameters, which lie between average and iterate, are recomputed from both; any rule works",
    ),
    "schedule_free": Recipe(
        {
            "rule.name": "data_parallel",
            "inner.averaging": "schedule_free",
            "inner.mu_y": 0.9,
            "inner.schedule": "constant",
        },
        source="arXiv 2405.15682",
        differs="average, iterate and a first moment, which is the gradient, are all kept: two buffers more than theirs",
    ),
    # Decentralized, one step a round.
    "d_psgd": Recipe(
        {
            "rule.name": "gossip",
            "topology.name": "ring",
            **_COMBINE_THEN_ADAPT,
            "inner.optimizer": "sgd",
            "inner.momentum": 0.0,
            "inner.lr": 0.1,
            "inner.weight_decay": 1e-4,
        },
        source="Lian et al., arXiv 1705.09056",
        differs="nothing: messages received during the next step were sent before it, so the gradient is taken at the point "
        "before mixing; without the overlap it adapts and then combines",
    ),
    "decentralized_adamw": Recipe(
        {"rule.name": "gossip", "topology.name": "one_peer_exponential", **_COMBINE_THEN_ADAPT},
        source="arXiv 2410.11998",
        differs="decoupled weight decay shrinks the point before mixing, not the one after it",
    ),
    "decentralized_accum_adamw": Recipe(
        {
            "rule.name": "gossip",
            "topology.name": "one_peer_exponential",
            **_COMBINE_THEN_ADAPT,
            "inner.optimizer": "accum_adamw",
            "inner.betas": [0.9, 0.98],
        },
        source="arXiv 2410.11998",
        differs="as in `decentralized_adamw`; in their GPT-2 runs `inner.moments_every` is 8",
    ),
    "gossip_pga": Recipe(
        {"rule.name": "gossip", "topology.name": "pga", "run.local_steps": 1},
        source="arXiv 2105.09080",
        differs="any gossip rule works on `pga`",
    ),
    "moshpit": Recipe(
        {"rule.name": "gossip", "topology.name": "grid"},
        source="Moshpit SGD, arXiv 2103.03239",
        differs="parameters are averaged after every local phase, without the authors' search for peers",
    ),
    "overlap_sgp": Recipe(
        {"rule.name": "sgp", "run.local_steps": 1, "schedule.overlap_steps": 1},
        differs="a message received one step late carries its weight, and both are added together",
    ),
    # Asynchronous.
    "gasloc_without_waiting": Recipe(
        {"rule.name": "gasloc", "rule.momentum": 0.5, "run.wait": False},
        source="ours",
        fails="messages are stale, which lowers the largest stable momentum, or speeds differ: slow workers have more weight.",
    ),
    "delayed_nesterov": Recipe({"server.delay": 8, "events.dylu": True}),
    "decoupled_diloco": Recipe({"events.fragments": 3, "events.overlap": True}),
    "halos": Recipe({"events.dylu": True}),
    "heloco": Recipe({"server.rho": 0.354}),
    "mla": Recipe(
        {"server.name": "heloco", "server.rho": 0.354, "server.c_ok": -1.0},
        source="arXiv 2606.00271, the baseline of HeLoCo",
        fails="messages point against the momentum: they are not corrected.",
    ),
    "pa_cgad": Recipe({"server.name": "cgad", "events.fragments": 3}),
}
"""Configurations by name; a row names its rule unless it has a rule's name."""


TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "rule": RULES,
    "topology": TOPOLOGIES,
    "codec": CODECS,
    "server": SERVERS,
    "pair": PAIRS,
    "boundary": BOUNDARIES,
}
"""The tables of what a run file can name, for each of `gossamer.run.config.document.KINDS`."""
_TABLES = {kind: TABLES[kind] for kind in ("rule", "server", "pair")}
FACTORIES: dict[str, Callable[..., Any]] = {**RULES, **SERVERS, **PAIRS}
"""The factories of rules, servers and pairs, by name."""


@functools.cache
def recipes() -> Mapping[str, Recipe]:
    """All methods that train: the rows of the three tables with the topologies they require, then the other rows of `METHODS`.

    A factory with options that have no default is a closed-form reference, not a method for training.

    >>> recipes()["omr"].settings
    {'topology.name': 'complete', 'rule.name': 'omr'}
    """
    ready = {name: Recipe({}) for table in _TABLES.values() for name in table if not missing(table[name])}
    by_name = {}
    for name, row in {**ready, **METHODS}.items():
        kind, base = _kind_and_name(name, row)
        factory = _TABLES[kind][base]
        settings = {**_required_settings(kind, factory()), f"{kind}.name": base, **row.settings}
        by_name[name] = Recipe(
            settings,
            row.source or docstring_part(factory, "Source"),
            row.differs,
            row.fails or docstring_part(factory, "Fails when"),
        )
    return by_name


def recipe_rows() -> list[tuple[str, str, str]]:
    """Every method in words: its name, what it is made of, and its source."""
    return [
        (name, made_of(recipe.settings).replace("`", ""), first_sentence(recipe.source))
        for name, recipe in recipes().items()
    ]


def factory_rows(table: Mapping[str, Callable[..., Any]]) -> list[tuple[str, str, str]]:
    """Every row of a table of rules, topologies, codecs, servers or pairs in words: its name, what it does, its options."""
    return [(name, summary(make), listed(make)) for name, make in table.items()]


def missing(factory: Callable[..., Any]) -> list[str]:
    """The options that have no default."""
    return [option.name for option in options_of(factory) if option.needed]


def _kind_and_name(name: str, row: Recipe) -> tuple[str, str]:
    """The kind of method, and the name in the table of that kind."""
    for kind, table in _TABLES.items():
        if f"{kind}.name" in row.settings or name in table:
            return kind, row.settings.get(f"{kind}.name", name)
    raise KeyError(name)


def recipe(name: object) -> Recipe:
    """A method by its name. Raises ConfigError, with the nearest name, when there is none."""
    if isinstance(name, str) and name in FACTORIES and (needs := missing(FACTORIES[name])):
        (kind,) = (kind for kind, table in _TABLES.items() if name in table)
        options = ", ".join(f"{option} = ..." for option in needs)
        raise ConfigError(
            f"method '{name}' is a reference in closed form, whose {', '.join(needs)} have no default; write {kind} = "
            f'{{ name = "{name}", {options} }}'
        )
    if not isinstance(name, str) or name not in recipes():
        raise ConfigError(choose("method", str(name), recipes()) + "; correct the name")
    return recipes()[name]


def docstring_part(factory: Callable[..., Any], label: str) -> str:
    """The text in a factory's docstring under a label such as "Fails when", on one line; empty if there is none.

    >>> docstring_part(RULES["easgd"], "Differs")[:10]
    'no server.'
    """
    match = re.search(rf"^{label}: (.+(?:\n    .+)*)", inspect.getdoc(factory) or "", re.MULTILINE)
    return " ".join(match[1].split()) if match else ""


def first_sentence(text: str) -> str:
    """The first of several sentences, without its dot."""
    return re.split(r"\.(?= [A-Z]|$)", text, maxsplit=1)[0]


_NAMED = ("rule", "server", "pair", "topology", "codec")


def made_of(settings: Mapping[str, Any]) -> str:
    """Settings in few words.

    >>> made_of({"rule.name": "gasloc", "rule.lr": 1.0, "run.local_steps": 1})
    'rule `gasloc(lr = 1.0)`, `run.local_steps = 1`'
    """
    parts = []
    for head in _NAMED:
        if f"{head}.name" in settings:
            options_of_head = [
                f"{k.partition('.')[2]} = {_toml_of(v)}" for k, v in settings.items() if k.startswith(f"{head}.")
            ]
            options = ", ".join(one for one in options_of_head if not one.startswith("name = "))
            parts.append(f"{head} `{settings[f'{head}.name']}{f'({options})' if options else ''}`")
    rest = (item for item in settings.items() if item[0].partition(".")[0] not in _NAMED)
    return ", ".join([*parts, *(f"`{key} = {_toml_of(value)}`" for key, value in rest)])


def _toml_of(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {_toml_of(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _required_settings(kind: str, rule: Any) -> dict[str, Any]:
    """The topology that the tags of a rule require, and local steps = 1 for a rule on gradients."""
    if kind != "rule":
        return {"topology.name": "ring"} if kind == "pair" else {}
    return {"topology.name": FITTING[rule.needs], **({"run.local_steps": 1} if rule.site == "gradients" else {})}
