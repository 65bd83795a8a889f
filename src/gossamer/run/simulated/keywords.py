"""The keywords of `gossamer.simulate`: objects and settings, converted into a run file and the user's parts."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin

import torch
from torch import Tensor, nn

from gossamer.asynchronous import PAIRS, SERVERS, PairRule, ServerRule
from gossamer.codecs import Codec
from gossamer.errors import ConfigError, choose, reworded
from gossamer.network.links import Network, read_network, to_options
from gossamer.optimizers import InnerOptimizer
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rounds.schedule import Schedule
from gossamer.rules import RULES, Rule
from gossamer.rules.contract import Needs
from gossamer.run.bookkeeping.inputs import must_be_trusted
from gossamer.run.config.document import flat, load_document, load_run, with_settings
from gossamer.run.config.run_file import LoopSettings, RunConfig, dump, local_steps_faults, parse
from gossamer.run.config.user_parts import GIVEN, KEYS, UserParts, own_parts
from gossamer.run.worker.task import PASSED_BY_NAME
from gossamer.settings import over_time
from gossamer.settings.over_time import begun_alike, local_steps_entries, timetable_of
from gossamer.settings.schema import parse_toml, toml_value
from gossamer.settings.user_code import calling, is_code, name_of
from gossamer.topologies import Topology
from gossamer.topologies.graphs import edges_of, graph


class Keywords(TypedDict, total=False):
    """The keywords of `gossamer.simulate` and `gossamer.sweep`. Every one has a default."""

    model: Callable[[], nn.Module] | str | Path
    """Returns a new model, drawn only from torch's generator; or a size of the built-in Llama, or a folder that
    `transformers` can open."""
    data: Callable[[int, int], Any] | str | Path
    """`data(worker, step)` returns a batch, always the same for the same numbers; or a text, as in data.source."""
    loss: Callable[[nn.Module, Any], Tensor]
    """`loss(model, batch)` returns a scalar; by default the mean cross-entropy of the next token."""
    optimizer: Callable[[Iterable[nn.Parameter]], InnerOptimizer | torch.optim.Optimizer] | str
    """`optimizer(parameters)` returns an optimizer, whose learning rate stays as it is unless `inner.schedule` is set; or a
    name, as in inner.optimizer."""
    validation: Callable[[int], Any]
    """`validation(k)` returns the k-th validation batch; by default the batches that would follow the last inner step."""
    method: str
    """A recipe by name; the other keywords override its settings."""
    rule: str | Rule | ServerRule | PairRule
    topology: Topology | str | Any
    """A topology, its name, a networkx graph, or a list of edges `(i, j)`; by default the one that fits the rule."""
    codec: str | Codec
    schedule: Schedule
    workers: int
    local_steps: int | list[int] | tuple[int, ...] | Mapping[int, int | list[int]]
    """Inner steps of a round (H), one number for all workers or one for each; or a table of these by inner step."""
    rounds: int
    seed: int
    network: Network | str | Path | Mapping[str, Network]
    """A network to price the run on, or a file of one; asynchronous runs need one."""
    settings: Mapping[str, Any]
    """Any other keys of a run file, dotted: `{"inner.lr": 1e-3, "run.eval_every": 100}`."""


_FUNCTIONS = ("model", "data", "loss", "optimizer", "validation")
_ROUNDS = 20
_LENGTHS = {"steps", "tokens", "tokens_per_parameter"}
Run = str | Path | Mapping[str, Any] | RunConfig | None


@contextlib.contextmanager
def in_keywords(given: Keywords) -> Iterator[None]:
    """Rewords errors to name the keyword of a part in place of its key in a run file.

    >>> with in_keywords({"loss": lambda model, batch: None}):
    ...     raise ConfigError("model.loss is 'python:<lambda>.<locals>.<lambda>', which returned a NoneType")
    Traceback (most recent call last):
    gossamer.errors.ConfigError: loss is '<lambda>', which returned a NoneType
    """

    def renamed(sentence: str) -> str:
        for kind in _FUNCTIONS:
            if callable(given.get(kind)):
                key = rf"\b{re.escape(KEYS[kind])}\b( is)? '(?:{GIVEN})?(?:[^' ]*<locals>\.)?"
                sentence = re.sub(key, rf"{kind}\1 '", sentence)
        return sentence.replace(f"{KEYS['loss']} was not given", "loss was not given")

    with reworded(renamed):
        yield


def run_and_parts(run: Run, given: Keywords) -> tuple[RunConfig, UserParts]:
    """The run and the user's parts; imports code that a run file names.

    Raises: ConfigError for unknown keywords and objects of the wrong kind; as `parse` and `own_parts`.
    """
    if isinstance(run, RunConfig) and not given:
        return run, own_parts(run)
    _check(given)
    objects: dict[str, Callable[..., Any]] = {}
    changes: dict[str, Any] = {"method": given["method"]} if "method" in given else {}
    for kind in _FUNCTIONS:
        if (function := given.get(kind)) is not None:
            changes |= _function(kind, function, objects)
    changes |= _combination(given, objects) | _lengths(given)
    _must_take_effect(given, objects)
    changes |= dict(given.get("settings", {}))
    document = with_settings(_document(run), changes)
    if run is None:
        document = with_settings({"record": _QUIET, "run": {"eval_every": 1}}, {**flat(document)})
    if "topology" not in document and isinstance(rule := given.get("rule"), Rule | str) and "rule" in document:
        document["topology"] = {"name": FITTING[_needs(rule)]}
    length = document.setdefault("run", {})
    if "rounds" in given or ("local_steps" in given and not _LENGTHS & length.keys()):
        length["steps"] = _steps(length, given.get("rounds", _ROUNDS))
    if "network" in given:
        document["network"] = {name: to_options(network) for name, network in _networks(given["network"]).items()}
    if "data" in objects and "data.seq_len" not in changes:
        document = with_settings(document, _shape(calling(KEYS["data"], objects["data"])(0, 0)))
    config = parse(document)
    if isinstance(run, str | Path) and Path(run).is_dir():  # possibly from an untrusted source
        must_be_trusted(Path(run), without=[*objects])
    imported = own_parts(config, [*objects])
    return config, UserParts({**imported.own, **objects}, imported.codes)


_TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "rule": ("rule.",),
    "server": ("server.",),
    "pair": ("pair.",),
    "topology": ("topology.",),
    "codec": ("codec.",),
    "model": ("model.",),
    "loss": ("model.loss",),
    "data": ("data.source", "data.text_field", "data.val_fraction", "data.max_bytes", "data.cache"),
    "validation": ("data.validation",),
    "optimizer": ("inner.optimizer", *(f"inner.{name}" for name in (*PASSED_BY_NAME, "moments_every", "slow_weight"))),
}
"""What the keys begin with that say what a part is, of which nothing is taken where a program gives that part as an object."""
_STILL_TAKEN = ("model.options", "model.loss", "codec.back")
"""Keys among these that something takes nevertheless."""
_LENGTHS_OF = {
    "workers": ("workers",),
    "seed": ("seed",),
    "local_steps": ("run.local_steps",),
    "rounds": ("run.steps", "run.tokens", "run.tokens_per_parameter"),
}
"""Keywords, and the settings that say the same."""
_QUIET = {"tensorboard": False, "export": False}
"""Record settings of a run without a run file."""


def _must_take_effect(given: Keywords, objects: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that nothing would take, since a keyword has given what they are of.

    Without it a sweep over one of them would compare a run with itself.
    """
    settings = flat(dict(given.get("settings", {})))
    for keyword, keys in _LENGTHS_OF.items():
        if keyword in given and (twice := [key for key in keys if key in settings]):
            raise ConfigError(f"{keyword} was given, and settings has {twice[0]} too; leave one of them out")
    for kind in objects:
        begins = _TAKEN_BY[kind]
        if kind == "data":  # whose first batch says how many tokens a batch has, unless `seq_len` does
            begins += () if "data.seq_len" in settings else ("data.batch_size",)
            begins += ("data.tokenizer",) if "model" in objects else ()
        still = tuple(key for key in _STILL_TAKEN if key not in begins)
        if idle := sorted(key for key in settings if _is_of(key, begins) and not _is_of(key, still)):
            how = (
                "is called with the parameters alone, so nothing would take it; set it where you make the optimizer, as in "
                "lambda parameters: AdamW(parameters, lr=1e-3)"
                if kind == "optimizer"
                else "is taken as it is, so nothing would take them; leave them out, or change what you give"
            )
            word = "rule" if kind in ("server", "pair") else kind
            raise ConfigError(f"settings has {', '.join(idle)} and {word} is yours, which {how}")


def _is_of(key: str, keys: Iterable[str]) -> bool:
    """Whether a key is one of these, or lies in a table among them."""
    return any(f"{key}.".startswith(one if one.endswith(".") else f"{one}.") for one in keys)


def _check(given: Keywords) -> None:
    """Raises ConfigError for an unknown keyword, or a value of the wrong type."""
    for name, value in given.items():
        if name not in Keywords.__annotations__:
            raise ConfigError(
                choose("keyword", name, Keywords.__annotations__)
                + "; put other keys of a run file into settings={'inner.lr': 1e-3}"
            )
        kinds = _kinds(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            called = getattr(value, "__name__", None)
            shown = f"'{called}', which was not called" if callable(value) and called else f"a {type(value).__name__}"
            words = " or ".join("text" if kind is str else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} is {shown}; give {words}")


def _kinds(name: str) -> tuple[type, ...]:
    """The types that a keyword takes; a function or a topology is looked at where it is used."""
    if name in (*_FUNCTIONS, "topology"):
        return (object,)
    hint = Keywords.__annotations__[name]
    return tuple(get_origin(one) or one for one in (get_args(hint) if isinstance(hint, UnionType) else [hint]))


def _document(run: Run) -> dict[str, Any]:
    match run:
        case None:
            return {}
        case RunConfig():
            return parse_toml(dump(run), "a run")
        case Mapping():
            return dict(run)
    path = Path(run)
    return load_run(path) if path.is_dir() else load_document(path)


def _function(kind: str, value: Any, objects: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """The settings for a user's function, which is added to the user's parts, or for its name."""
    if isinstance(value, str | Path):
        if kind == "model" and Path(value).is_dir():
            return {KEYS[kind]: "gossamer.models.pretrained:pretrained", "model.options": {"folder": str(value)}}
        return {KEYS[kind]: str(value)}
    if not callable(value) or isinstance(value, nn.Module):
        raise ConfigError(
            f"{kind} is a {type(value).__name__}; give a function"
            + (" that returns a new model, such as a lambda, as each worker needs its own" if kind == "model" else "")
        )
    objects[kind] = value
    if kind == "optimizer":  # the user's learning rate stays as it is, as in the user's own loop: no setting is passed
        return {KEYS[kind]: _given(value), "inner.schedule": "constant", "inner.warmup_steps": 0}
    return {KEYS[kind]: _name(value)}


def _name(value: object) -> str:
    """The run-file name of an object, or a placeholder if it has none."""
    name = name_of(value)
    module, _, attribute = name.partition(":")
    resolved: Any = None if module == "__main__" else sys.modules.get(module)
    for part in attribute.split("."):
        resolved = getattr(resolved, part, None)
    return name if resolved is value and is_code(name) else _given(value)


def _given(value: object) -> str:
    """A placeholder name for an object that a run file cannot name."""
    name = GIVEN + name_of(value).partition(":")[2]
    return name if is_code(name) else GIVEN + type(value).__name__


def _combination(given: Keywords, objects: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """The settings for rule, topology, codec and schedule; objects are added to the user's parts."""
    settings: dict[str, Any] = {}
    if "rule" in given:
        rule = given["rule"]
        if isinstance(rule, str):
            kind = "server" if rule in SERVERS else "pair" if rule in PAIRS else "rule"
            settings[f"{kind}.name"] = rule
        else:
            kind = "server" if isinstance(rule, ServerRule) else "pair" if isinstance(rule, PairRule) else "rule"
            settings |= _object(kind, rule, objects)
    if "codec" in given:
        codec = given["codec"]
        settings |= {"codec.name": codec} if isinstance(codec, str) else _object("codec", codec, objects)
    if "topology" in given:
        topology = given["topology"]
        if isinstance(topology, str):
            settings["topology.name"] = topology
        elif isinstance(topology, Topology):
            settings |= {"workers": topology.n, **_object("topology", topology, objects)}
        else:
            workers, edges = edges_of(topology)
            settings |= {"workers": workers, "topology.name": name_of(graph), "topology.edges": edges}
    if "schedule" in given:
        settings["schedule"] = toml_value(given["schedule"])
    return settings


def _object(kind: str, value: Any, objects: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """The settings for a rule, topology or codec that was made in Python."""
    objects[kind] = lambda *_, **__: value
    return {f"{kind}.name": GIVEN + (value.name if value.name.isidentifier() else kind)}


def _lengths(given: Keywords) -> dict[str, Any]:
    settings: dict[str, Any] = {name: given.get(name) for name in ("workers", "seed") if name in given}
    if "local_steps" in given:
        steps = given["local_steps"]
        written = isinstance(steps, Mapping)
        settings["run.local_steps"] = (
            over_time.as_written(steps) if written else steps if isinstance(steps, int) else list(steps)
        )
    return settings


def _steps(length: Mapping[str, Any], rounds: int) -> int:
    """The inner steps of `rounds` rounds. Raises ConfigError for an invalid table."""
    local_steps, start = length.get("local_steps", LoopSettings().local_steps), length.get("synchronous_steps", 0)
    for sentence in local_steps_faults(local_steps):
        raise ConfigError(sentence)
    if isinstance(local_steps, Mapping) and "shape" in local_steps:
        raise ConfigError(
            f"local_steps is {dict(local_steps)!r:.80}, by which rounds follow the learning rate of the whole run; give its "
            "length by settings={'run.steps': ...}"
        )
    each = tuple(local_steps) if isinstance(local_steps, list) else local_steps
    return timetable_of(begun_alike(local_steps_entries(each), start)).begin(rounds)


def _needs(rule: Rule | str) -> Needs:
    """The topology requirement of a rule; "connected" for code that is not imported yet."""
    if isinstance(rule, Rule):
        return rule.needs
    return RULES[rule]().needs if rule in RULES else "connected"


def _networks(given: Network | str | Path | Mapping[str, Network]) -> dict[str, Network]:
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, Network):
        return {"network": given}
    return {Path(given).stem: read_network(Path(given))}


def _shape(batch: Any) -> dict[str, int]:
    """The number of tokens in a batch: rows and columns of text, or the rows of anything else."""
    while not isinstance(batch, Tensor):
        inside = [*batch.values()] if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else []
        if not inside:
            return {"data.batch_size": 1, "data.seq_len": 1}
        batch = inside[0]
    rows = batch.shape[0] if batch.ndim else 1
    text = batch.ndim == 2 and not batch.is_floating_point() and batch.shape[1] > 1
    return {"data.batch_size": max(rows, 1), "data.seq_len": batch.shape[1] - 1 if text else 1}
