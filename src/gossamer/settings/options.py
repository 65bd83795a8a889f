"""Options of methods, each declared once: in the signature and the docstring of the factory that takes it.

A factory is a function that makes a rule, a topology, a codec or a server. The annotation of an option says which values it
takes: words (`Literal`), numbers in an `Interval`, which are whole where the type is `int`, or a type. The line of the option
under `Args:` gives its meaning. Everything else derives from these: the checks, the name and options of the result, the errors
for unknown and missing options, `gossamer list` and the run file.
"""

import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, Self, TypeVar

from gossamer.errors import ConfigError, choose

__all__ = [
    "Count",
    "Decay",
    "Given",
    "Interval",
    "NotNegative",
    "Option",
    "Positive",
    "Share",
    "check_option",
    "checked",
    "factory",
    "in_short",
    "like",
    "listed",
    "options_of",
    "row",
    "row_faults",
    "table",
    "unknown_options",
    "wrapper",
]


@dataclass(frozen=True)
class Interval:
    """The numbers of an interval, as mathematics writes it, or the multiples of a whole number in it.

    >>> 0 in Interval("[0, 1)"), 1 in Interval("[0, 1)"), 12 in Interval("[8, 64]", multiples_of=8)
    (True, False, False)
    """

    text: str
    multiples_of: int = 1

    def __contains__(self, number: Any) -> bool:
        low, high = map(float, self._ends())
        above = low < number if self.text[0] == "(" else low <= number
        below = number < high if self.text[-1] == ")" else number <= high
        return above and below and (self.multiples_of == 1 or number % self.multiples_of == 0)

    def _ends(self) -> list[str]:
        return self.text[1:-1].replace(" ", "").split(",")

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        low, high = map(float, self._ends())  # so that editors of run files check the bounds
        bounds = {
            "exclusiveMinimum" if self.text[0] == "(" else "minimum": low,
            "exclusiveMaximum" if self.text[-1] == ")" else "maximum": high,
        }
        multiple = {"multipleOf": self.multiples_of} if self.multiples_of > 1 else {}
        return handler(schema) | {word: end for word, end in bounds.items() if math.isfinite(end)} | multiple

    def words(self, *, whole: bool) -> str:
        """The interval in the words of errors."""
        if not whole:
            return f"numbers in {self.text}"
        low, high = self._ends()
        span = f"of at least {low}" if high == "inf" else f"from {low} to {high}"
        return f"{'whole numbers' if self.multiples_of == 1 else f'multiples of {self.multiples_of}'} {span}"


V = TypeVar("V")
_GIVEN = object()
Given = Annotated[V, _GIVEN]
"""A parameter of a factory that is not an option, such as the number of workers: the caller sets it, not the run file."""

Positive = Annotated[float, Interval("(0, inf)")]
NotNegative = Annotated[float, Interval("[0, inf)")]
Decay = Annotated[float, Interval("[0, 1)")]
"""The share that a running average keeps in each step, such as a momentum."""
Share = Annotated[float, Interval("(0, 1]")]
Count = Annotated[int, Interval("[1, inf)")]


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
        return _words(self.kind)


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
    """Lets a function raise ConfigError for arguments its annotations do not allow; errors name an `__init__` by its class."""
    return _checked(function, function.__qualname__.removesuffix(".__init__"), lambda made, options, arguments: made)


def factory(function: Callable[P, T]) -> Callable[P, T]:
    """Lets a factory check its options, and store its name and all its options in its result.

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
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for parameter, value in given.arguments.items():
            check_option(owner, parameter, value, signature.parameters[parameter].annotation)
        options = {option.name: given.arguments[option.name] for option in options_of(function)}
        return finish(function(*args, **kwargs), options, [*given.arguments.values()])

    return run


def like(model: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """For a factory that passes all its options on to another: it takes over that factory's signature and options."""

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
    [('block', 1024, 'multiples of 8 from 8 to 65536', 'elements per scale.')]
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
    found = re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", block[1] if block else "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


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


def table(*factories: Callable[..., R]) -> dict[str, Callable[..., R]]:
    """Factories by their names."""
    return {factory.__name__: factory for factory in factories}


def row(
    kind: str, table: Mapping[str, Callable[..., R]], name: str, options: Iterable[str], also: Iterable[str] = ()
) -> Callable[..., R]:
    """A row of a table, for options of these names.

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
        yield choose(kind, name, table) + "; correct the name"
        return
    own, given = options_of(table[name]), list(options)
    yield from unknown_options(f"{kind} '{name}'", given, [*(option.name for option in own), *also])
    if missing := [option.name for option in own if option.needed and option.name not in given]:
        yield f"{kind} '{name}' needs {', '.join(missing)} and got {', '.join(given) or 'no options'}; add what is missing"


def unknown_options(owner: str, options: Iterable[str], allowed: Sequence[str]) -> Iterator[str]:
    """A sentence, with the nearest name, for each option that is not allowed."""
    for option in options:
        if option not in allowed:
            known = choose("option", option, allowed) if allowed else f"unknown option '{option}'; it has none"
            yield f"{owner} got an {known}; correct or remove it"


def check_option(owner: str, option: str, got: object, kind: Any) -> None:
    """Raises ConfigError unless `got` fits `kind`, an annotation such as `Annotated[int, Interval("[1, 8]")]`."""
    if not _fits(kind, got):
        raise ConfigError(f"{owner} got {option} = {got!r}; allowed are {_words(kind)}: choose one of them")


def _fits(kind: Any, value: Any) -> bool:
    """Whether an annotation allows a value; unknown annotations, such as the rule of a wrapper, allow all values."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(one, value) for one in args)
    if origin is Annotated:
        return _fits(args[0], value) and all(value in one for one in args[1:] if isinstance(one, Interval))
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in args)
    if origin is tuple:
        return isinstance(value, tuple | list) and len(value) == len(args) and all(map(_fits, args, value))
    if origin is Sequence:
        return isinstance(value, tuple | list) and all(_fits(args[0], one) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, bool, types.NoneType):
        return type(value) is kind
    return isinstance(value, {Mapping: Mapping, str: str}.get(origin or kind, object))


def _words(kind: Any) -> str:
    """The values that an annotation allows, in words; a text in `Annotated` replaces them."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(one) for one in args if one is not types.NoneType)
    if origin is Annotated:
        said = (one.words(whole=args[0] is int) if isinstance(one, Interval) else one for one in args[1:])
        return next((words for words in said if isinstance(words, str)), _words(args[0]))
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin is tuple:
        return f"{len(args)} {_words(args[0])}"
    if origin is Sequence:
        return f"lists of {_words(args[0])}"
    return {bool: "true, false", int: "whole numbers", float: "numbers", str: "text"}.get(kind, "tables")
