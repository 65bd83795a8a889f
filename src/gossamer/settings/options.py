"""Options of methods, each declared once: in the signature and the docstring of the factory that takes it.

A factory is a function that makes a rule, a topology, a codec or a server. The annotation of an option says which values it
takes, as that of a field of a run file does: words (`Literal`), numbers with bounds (`Positive`, or a pydantic `Field`), or a
type. The line of the option under `Args:` gives its meaning. Everything else derives from these: the checks, the name and
options of the result, the errors for unknown and missing options, `gossamer list` and the run file.
"""

import functools
import inspect
import re
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, Self, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gossamer.errors import ConfigError, choose
from gossamer.settings import over_time
from gossamer.settings.schema import words_of

V = TypeVar("V")
_OVER_TIME = object()
OverTime = Annotated[V, _OVER_TIME]
"""A number of a rule that may change over a run, by a table or a shape of `gossamer.settings.over_time`. The state that the rule
keeps must not depend on it, but for single values."""
_GIVEN = object()
Given = Annotated[V, _GIVEN]
"""A parameter of a factory that is not an option, such as the number of workers: the caller sets it, not the run file."""

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""The share that a running average keeps in each step, such as a momentum."""
Share = Annotated[float, Field(gt=0, le=1)]
Portion = Annotated[float, Field(ge=0, le=1)]
"""A share that may be zero."""
Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
"""A count that may be zero."""


class Option(NamedTuple):
    """An option of a factory."""

    name: str
    kind: Any
    """Its annotation."""
    default: Any
    """`inspect.Parameter.empty` if the option is required."""
    doc: str
    """Its line under `Args:`."""

    @property
    def needed(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        return words_of(self.kind)


class _Named(Protocol):
    """The result of a factory: a named tuple with these two fields."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    def _replace(self, **fields: Any) -> Self: ...


_signature = functools.partial(inspect.signature, eval_str=True)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=_Named)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to raise ConfigError for arguments its annotations do not allow; errors name an `__init__`
    by its class.
    """
    return _checked(function, function.__qualname__.removesuffix(".__init__"), lambda made, options, arguments: made)


def factory(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a factory to check its options, and to store its name and all options in its result.

    >>> from gossamer.topologies import ring
    >>> ring(4, edge_weight=0.5).name, ring(4, edge_weight=0.5).options
    ('ring', {'edge_weight': 0.5})
    """
    made = _signature(function).return_annotation.__name__  # Codec, Topology, Rule, ServerRule or PairRule
    kind, name = made.removesuffix("Rule").lower() or "rule", function.__name__
    return _checked(function, f"{kind} '{name}'", lambda made, options, _: made._replace(name=name, options=options))


def wrapper(function: Callable[Concatenate[T, P], T]) -> Callable[Concatenate[T, P], T]:
    """As `factory`, for a function from a rule to a rule: it adds its name and options to those of the wrapped rule."""

    def named(made: T, options: dict[str, Any], arguments: list[Any]) -> T:
        inside = arguments[0]
        return made._replace(name=f"{function.__name__}_{inside.name}", options={**inside.options, **options})

    return _checked(function, f"wrapper '{function.__name__}'", named)


def _checked(
    function: Callable[P, R], owner: str, finish: Callable[[R, dict[str, Any], list[Any]], R]
) -> Callable[P, R]:
    signature = _signature(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            unknown = [name for name in kwargs if name not in signature.parameters]
            if unknown:
                names = [option.name for option in options_of(function)]
                raise ConfigError(next(unknown_options(owner, unknown, names))) from None
            raise
        given.apply_defaults()
        changing = dict[str, Mapping[str, Any]]()
        for parameter, value in given.arguments.items():
            if may_change(kind := signature.parameters[parameter].annotation) and isinstance(value, Mapping):
                changing[parameter] = _over_time(owner, parameter, value, signature.parameters[parameter])
            else:
                check_option(owner, parameter, value, kind)
        if changing or any(getattr(value, "at", None) is not None for value in given.arguments.values()):
            return typing.cast(R, _changing(run, given, changing))
        options = {option.name: given.arguments[option.name] for option in options_of(function)}
        return finish(function(*args, **kwargs), options, [*given.arguments.values()])

    return run


def may_change(kind: Any) -> bool:
    """Whether an option with this annotation may change over a run."""
    return _OVER_TIME in getattr(kind, "__metadata__", ())


def _over_time(owner: str, option: str, value: Mapping[Any, Any], parameter: inspect.Parameter) -> Mapping[str, Any]:
    """A scheduled option (table or shape), checked and completed. Raises: ConfigError."""
    name = f"{owner.partition(' ')[0]}.{option}"
    for sentence in over_time.table_faults(name, value, "cosine"):
        raise ConfigError(sentence)
    value = over_time.as_written(value)
    if "shape" in value:
        value = {"from": parameter.default, **value}
    for key, number in value.items():
        if key == "steps":
            check_option(owner, f"{option}.steps", number, Count)
        elif key != "shape":
            check_option(owner, f"{option}.{key}", number, parameter.annotation)
            if not isinstance(number, int | float):
                raise ConfigError(
                    f"{name} has {key} = {number!r:.40}, and only numbers change over a run; give a number"
                )
    return value


def _changing(
    make: Callable[..., Any], given: inspect.BoundArguments, changing: Mapping[str, Mapping[str, Any]]
) -> Any:
    """A factory's result with scheduled options: that of the start, with an `at` for any other step."""

    def at(step: int, steps: int) -> Any:
        now = {
            name: over_time.in_force(changing[name], step, steps)
            if name in changing
            else value
            if getattr(value, "at", None) is None
            else value.at(step, steps)
            for name, value in given.arguments.items()
        }
        bound = inspect.BoundArguments(given.signature, OrderedDict(now))
        return make(*bound.args, **bound.kwargs)

    inside = [value.options for value in given.arguments.values() if getattr(value, "at", None) is not None]
    kept = {name: value for options in inside for name, value in options.items() if over_time.changes(value)}
    made = at(0, 0)
    return made._replace(options={**made.options, **kept, **changing}, at=at)


def like(model: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Decorates a factory that passes all its options on to another: it takes over that factory's signature and options."""

    def same(function: Callable[..., T]) -> Callable[P, T]:
        made = _signature(function).return_annotation
        vars(function).update(__signature__=_signature(model).replace(return_annotation=made), __like__=model)
        return function

    return same


@functools.cache
def options_of(factory: Callable[..., Any]) -> tuple[Option, ...]:
    """The options of a factory, in the order of its signature.

    >>> from gossamer.codecs import sign
    >>> [(option.name, option.default, option.allowed, option.doc) for option in options_of(sign)]
    [('block', 1024, 'a multiple of 8 from 8 to 65536', 'elements per scale.')]
    """
    docs = _docs(getattr(factory, "__like__", factory))
    return tuple(
        Option(p.name, p.annotation, p.default, docs.get(p.name, ""))
        for p in _signature(factory).parameters.values()
        if _GIVEN not in getattr(p.annotation, "__metadata__", ())
    )


def _docs(function: Callable[..., Any]) -> dict[str, str]:
    """The line of each parameter in the docstring."""
    block = re.search(r"^Args:\n((?:    .*\n?)+)", inspect.getdoc(function) or "", re.MULTILINE)
    matches = re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", block[1] if block else "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in matches for name in names.split(", ")}


def summary(made: object) -> str:
    """The first paragraph of a docstring on one line, without its cost.

    >>> from gossamer.rules import jacobi
    >>> summary(jacobi)[-29:]
    'for graphs of that dimension.'
    """
    return " ".join((inspect.getdoc(made) or "").partition("\n\n")[0].split()).partition(" Cost: ")[0]


def listed(factory: Callable[..., Any]) -> str:
    """The options of a factory with their defaults, on one line.

    >>> from gossamer.codecs import randomk
    >>> listed(randomk)
    'one_in=64, scaled=False, values=same'
    """
    return ", ".join(o.name if o.needed else f"{o.name}={o.default}" for o in options_of(factory))


def in_short(made: _Named) -> str:
    """A result of a factory in short: its name with its options.

    >>> from gossamer.topologies import random
    >>> random(8, peers=2)
    random(peers=2)
    """
    return f"{made.name or type(made).__name__}({', '.join(f'{key}={value}' for key, value in made.options.items())})"


_KINDS: dict[str, dict[str, str]] = {}
"""For each row name, the tables that contain it: the word for a row, and the key that takes it."""


def table(*factories: Callable[..., R], kind: str = "row", where: str = "") -> dict[str, Callable[..., R]]:
    """Factories by their names.

    Args: `kind` is the word for a row and `where` the key that takes it, for errors about rows of another table.
    """
    for factory in factories:
        _KINDS.setdefault(factory.__name__, {})[kind] = where
    return {factory.__name__: factory for factory in factories}


def row(
    kind: str, table: Mapping[str, Callable[..., R]], name: str, options: Iterable[str], also: Iterable[str] = ()
) -> Callable[..., R]:
    """A row of a table, checked against these option names.

    Args:
        kind: the word for a row in errors.
        also: names that every row of the table takes in addition to its own options.
    Raises: ConfigError, with the nearest name, for an unknown row or option; and when an option without a default is missing.
    """
    if faults := [*row_faults(kind, table, name, options, also)]:
        raise ConfigError(f"{faults[0]}")
    return table[name]


def row_faults(
    kind: str, table: Mapping[str, Callable[..., Any]], name: str, options: Iterable[str], also: Iterable[str] = ()
) -> Iterator[str]:
    """A sentence for each reason why `row` refuses these arguments, with the nearest name."""
    if name not in table:
        others = [f"a {other} ({where})" for other, where in _KINDS.get(name, {}).items() if other != kind and where]
        yield (
            f"'{name}' is {' and '.join(others)} and no {kind}; allowed: {', '.join(sorted(table))}; name one of these"
            if others
            else choose(kind, name, table) + "; correct the name"
        )
        return
    row_options, given = options_of(table[name]), list(options)
    yield from unknown_options(f"{kind} '{name}'", given, [*(option.name for option in row_options), *also])
    if missing := [option.name for option in row_options if option.needed and option.name not in given]:
        yield f"{kind} '{name}' needs {', '.join(missing)} and got {', '.join(given) or 'no options'}; add what is missing"


_MEANT = {
    "beta": "momentum",
    "beta1": "momentum",
    "eta": "lr",
    "gamma": "momentum",
    "learning_rate": "lr",
    "mu": "momentum",
    "nesterov": "optimizer",
}
"""What papers and other libraries call options."""
_ELSEWHERE = {
    "codec": "the codec is an argument of its own beside the rule",
    "local_steps": "the local steps of a round are an argument of their own beside the rule",
    "peers": "the number of peers is the topology's, as in random(peers=2)",
    "topology": "the topology is an argument of its own beside the rule",
}
"""Where what looks like an option is given."""


def unknown_options(owner: str, options: Iterable[str], allowed: Sequence[str]) -> Iterator[str]:
    """A sentence, with the nearest name, for each option that is not allowed."""
    for option in options:
        if option not in allowed:
            known = choose("option", option, allowed) if allowed else f"unknown option '{option}'; it has none"
            if (meant := _MEANT.get(option)) in allowed and "did you mean" not in known:
                known = known.replace("Allowed:", f"did you mean '{meant}'? Allowed:")
            elsewhere = f"; {_ELSEWHERE[option]}" if option in _ELSEWHERE else ""
            yield f"{owner} got an {known}{elsewhere}; correct or remove it"


def check_option(owner: str, option: str, got: object, kind: Any) -> None:
    """Raises ConfigError unless `got` fits `kind`, an annotation such as `Annotated[int, Field(ge=1, le=8)]`."""
    if not _fits(tuple(got) if isinstance(got, list) else got, kind):  # TOML has no tuples
        raise ConfigError(f"{owner} got {option} = {got!r}, which must be {words_of(kind)}")


def check_values(kind: Any, **values: object) -> None:
    """Raises ConfigError for the first of these values that does not fit `kind`; the keys are the names in the message.

    >>> check_values(Count, replicas=0)
    Traceback (most recent call last):
    gossamer.errors.ConfigError: replicas is 0 but must be a whole number of at least 1
    """
    for name, got in values.items():
        if not _fits(got, kind):
            raise ConfigError(f"{name} is {got!r} but must be {words_of(kind)}")


def _fits(value: object, kind: Any) -> bool:
    if (checks := _checker(kind)) is None:
        return True
    try:
        checks.validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def _checker(kind: Any) -> TypeAdapter[Any] | None:
    """Checks values against an annotation; None for one that allows all, such as the rule of a wrapper."""
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)) if _is_plain(kind) else None


def _is_plain(kind: Any) -> bool:
    """Whether an annotation is of a TOML type, or of a path."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _is_plain(args[0])
    if origin in (types.UnionType, typing.Union, tuple, Sequence, Mapping):
        return all(map(_is_plain, args))
    return origin is Literal or kind in (float, int, bool, str, Path, types.NoneType, Any)
