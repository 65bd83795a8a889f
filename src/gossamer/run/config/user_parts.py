"""The parts of a run that are the user's own: given in Python as objects, or named in a run file as "package.module:name"."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from gossamer.asynchronous import PAIRS, SERVERS, PairRule, ServerRule
from gossamer.codecs import Codec, both_ways, codec_of, make_codec
from gossamer.errors import ConfigError
from gossamer.record.inputs import CodeInput
from gossamer.rules import WRAPPERS, Rule, make_rule, wrapped
from gossamer.run.config.document import KINDS
from gossamer.run.config.guarded import guarded
from gossamer.run.config.run_file import RunConfig
from gossamer.settings.options import unknown_options
from gossamer.settings.schema import toml_value
from gossamer.settings.user_code import Code, calling, hash_of_code, imported, is_code, located
from gossamer.topologies import Topology, make_topology

KEYS = {
    "rule": "rule.name",
    "topology": "topology.name",
    "codec": "codec.name",
    "server": "server.name",
    "pair": "pair.name",
    "model": "model.size",
    "loss": "model.loss",
    "data": "data.source",
    "validation": "data.validation",
    "optimizer": "inner.optimizer",
}
"""The key of a run file that names each kind of part."""
GIVEN = "python:"
"""Begins the name of a part that was given as an object, and that no run file can name."""
_KINDS: Mapping[str, type] = {
    "rule": Rule,
    "topology": Topology,
    "codec": Codec,
    "server": ServerRule,
    "pair": PairRule,
    "model": nn.Module,
}


class UserParts(NamedTuple):
    """The user's own parts of a run."""

    own: Mapping[str, Callable[..., Any]] = {}
    """Parts by kind (`KEYS`): the factory of a rule, topology, codec, server, pair, model or optimizer; the loss; the batches."""
    codes: tuple[Code, ...] = ()
    """Code that was imported for a run file."""


BUILT_IN = UserParts()
"""No part of the user's."""


def named(config: RunConfig) -> dict[str, str]:
    """The Python code that a run names, by kind."""
    names: dict[str, Any] = {
        "model": config.model.size,
        "loss": config.model.loss,
        "data": config.data.source,
        "validation": config.data.validation,
        "optimizer": config.inner.optimizer,
        "codec": config.codec.name,
    }
    if config.server is not None:
        names["server"] = config.server.name
    else:
        names["topology"] = config.topology.name
        names |= {"rule": config.rule.name} if config.pair is None else {"pair": config.pair.name}
    return {kind: name for kind, name in names.items() if isinstance(name, str) and is_code(name)}


def named_code(config: RunConfig) -> dict[str, tuple[str, str]]:
    """The Python code that a run names, by kind, each with its options as JSON; not what a program gave as an object."""
    others = {"model": config.model.options, "data": config.data.options, "optimizer": config.inner.options}
    given = {kind: getattr(config, kind).options if kind in KINDS else others.get(kind) for kind in named(config)}
    return {
        kind: (name, json.dumps(toml_value(given[kind] or {}), sort_keys=True, default=str))
        for kind, name in sorted(named(config).items())
        if not name.startswith(GIVEN)
    }


def code_of(names: Mapping[str, tuple[str, str]]) -> list[CodeInput]:
    """The Python code that a run names (`named_code`) as it is now, without running any: the files from which it comes.

    The versions of torch and gossamer stand for their own code.
    """
    inputs: list[CodeInput] = []
    for kind, (name, options) in names.items():
        module = name.partition(":")[0]
        has_version = module.partition(".")[0] in ("torch", "gossamer")
        sha256 = "" if has_version else hash_of_code(module)
        path = str(located(module) or "")
        inputs.append({"kind": kind, "name": name, "options": options, "path": path, "sha256": sha256})
    return inputs


def own_parts(config: RunConfig, without: Collection[str] = ()) -> UserParts:
    """Imports the code that a run names; nothing without any.

    Args: `without` are kinds that are imported already, or are not needed.

    Raises: ConfigError and UserCodeError, as `gossamer.settings.user_code.imported`.
    """
    imported = {kind: _imported(kind, name) for kind, name in named(config).items() if kind not in without}
    return UserParts({kind: code.object for kind, code in imported.items()}, tuple(dict.fromkeys(imported.values())))


def _imported(kind: str, name: str) -> Code:
    if name.startswith(GIVEN):
        raise ConfigError(_was_given(kind, name))
    return imported(KEYS[kind], name)


def given_faults(config: RunConfig) -> list[str]:
    """A sentence for each part of a run that a program gave as an object, so that no verb can run it from a file."""
    return [_was_given(kind, name) for kind, name in named(config).items() if name.startswith(GIVEN)]


def _was_given(kind: str, name: str) -> str:
    return (
        f"{KEYS[kind]} is '{name}', an object that a Python program gave, and no file has it; run that program again, or put "
        "the object into a module and name it as package.module:name"
    )


def caller(parts: UserParts, kind: str, name: str) -> Callable[..., Any]:
    """The user's own function of this kind, whose arguments are checked at its first call, and its result at each.

    Raises: ConfigError when it is not here; when called, ConfigError if it does not take its arguments or returns something of
        another type than the kind has, and UserCodeError when it fails.
    """
    function, fact = parts.own.get(kind), f"{KEYS[kind]} is '{name}'"
    if function is None:
        raise ConfigError(
            f"{fact}, which is Python code and is not imported here; simulate, train, compare and evaluate import it"
        )
    guarded, kind_of, fits = calling(KEYS[kind], function), _KINDS.get(kind, object), False

    def call(*given: Any, **options: Any) -> Any:
        nonlocal fits
        if not fits:
            _must_take(fact, function, given, options)
            fits = True
        made = guarded(*given, **options)
        if not isinstance(made, kind_of):
            raise ConfigError(
                f"{fact}, which returned a {type(made).__name__} where a {kind_of.__name__} is needed; return one, or name the "
                f"function that does"
            )
        return made

    return call


def _must_take(fact: str, function: Callable[..., Any], given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raises ConfigError when the function does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function that is not Python's
        return
    names = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        for sentence in unknown_options(fact + ", which", [*options], names[len(given) :]):
            raise ConfigError(sentence) from None
        raise ConfigError(
            f"{fact}, which cannot be called with {len(given)} arguments and the options {', '.join(options) or 'none'} "
            f"({error}); its parameters are {', '.join(names) or 'none'}: add or remove what does not fit"
        ) from None


def make(parts: UserParts, kind: str, config: RunConfig) -> Any:
    """The rule, topology, codec, server or pair of a run: Gossamer's own by its name, or the user's.

    Raises: ConfigError and UserCodeError.
    """
    choice = getattr(config, kind)
    name, options = choice.name, dict(choice.options)
    if not is_code(name):
        return _FROM_TABLES[kind](config, name, options)
    around = {key: options.pop(key) for key in [*options] if kind == "rule" and key in WRAPPERS}
    back = options.pop("back", None) if kind == "codec" else None
    given = (config.workers,) if kind == "topology" else ()
    seeded = kind == "topology" and "seed" in inspect.signature(parts.own.get(kind, make_topology)).parameters
    made = caller(parts, kind, name)(*given, **({"seed": config.seed} if seeded else {}), **options)
    if not name.startswith(GIVEN):  # so that two rules of different modules differ in reports
        made = made._replace(name=name, options=options)
    if kind != "rule" or not config.run.compile:  # the compiler takes the functions as they are
        made = guarded(kind, made)
    if kind == "codec":
        return made if back in (None, "none") else both_ways(made, codec_of(back))
    return wrapped(made, around) if kind == "rule" else made


def _topology(config: RunConfig, name: str, options: Mapping[str, Any]) -> Topology:
    # Checks and resolution ask for the same rounds, which a topology keeps; planning those of a million workers takes
    # seconds. Options that are no single values are of small graphs.
    single = all(isinstance(value, int | float | str | None) for value in options.values())
    return (_kept if single else make_topology)(name, config.workers, config.seed, **options)


_kept = lru_cache(maxsize=4, typed=True)(make_topology)


_FROM_TABLES: Mapping[str, Callable[[RunConfig, str, Mapping[str, Any]], Any]] = {
    "rule": lambda config, name, options: make_rule(name, **options),
    "topology": _topology,
    "codec": lambda config, name, options: make_codec(name, **options),
    "server": lambda config, name, options: SERVERS[name](**options),
    "pair": lambda config, name, options: PAIRS[name](**options),
}
