"""An option is declared in the signature of its factory: what it takes, what is refused, and what is read off it."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import Field, TypeAdapter

from gossamer.errors import ConfigError
from gossamer.rules import RULES, anchored_gasloc, gasloc
from gossamer.settings.fields import Words
from gossamer.settings.options import (
    Count,
    Decay,
    Given,
    Positive,
    check_option,
    checked,
    factory,
    like,
    listed,
    options_of,
    row,
    row_faults,
    table,
    wrapper,
)


class Rule(NamedTuple):
    """What the factories here make."""

    lr: float
    name: str = ""
    options: Mapping[str, Any] = {}


@factory
def plain(n: Given[Count], lr: Positive = 0.5, word: Literal["a", "b"] = "a", *, every: Count | None = None) -> Rule:
    """A rule.

    Args:
        lr: how far
            it goes.
        word, every: two at once.
    """
    return Rule(lr * n)


@wrapper
def twice(rule: Given[Rule], times: Count = 2) -> Rule:
    """A rule around a rule.

    Args:
        times: how often.
    """
    return rule._replace(lr=rule.lr * times)


@factory
def needy(lr: Positive) -> Rule:
    """A rule whose option has no default."""
    return Rule(lr)


def test_a_factory_fills_in_its_name_and_all_its_options_and_nothing_that_is_given() -> None:
    assert plain(2, 3.0) == Rule(6.0, "plain", {"lr": 3.0, "word": "a", "every": None})
    assert twice(plain(2), times=3) == Rule(3.0, "twice_plain", {**plain(2).options, "times": 3})


def test_a_factory_keeps_its_signature_its_name_and_its_docstring() -> None:
    assert [*inspect.signature(plain).parameters] == ["n", "lr", "word", "every"]
    assert (plain.__name__, inspect.signature(plain).return_annotation) == ("plain", Rule)
    assert (inspect.getdoc(plain) or "").startswith("A rule.")
    with pytest.raises(ConfigError, match="rule 'plain' got an unknown option 'lrs'; did you mean 'lr'"):
        plain(2, lrs=0.5)  # pyright: ignore[reportCallIssue]
    for option, words in (
        ("gamma", "did you mean 'momentum'"),
        ("nesterov", "did you mean 'optimizer'"),
        ("topology", "the topology is an argument of its own beside the rule"),
    ):
        with pytest.raises(ConfigError, match=words):
            gasloc(**{option: 0.5})
    with pytest.raises(ConfigError, match="unknown option 'outer_lr'; did you mean 'lr'"):
        plain(2, outer_lr=0.5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match=r"'peers'; .*the number of peers is the topology's, as in random\(peers=2\)"):
        plain(2, peers=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        plain()  # pyright: ignore[reportCallIssue]


def test_options_have_name_default_allowed_values_and_doc() -> None:
    assert [(o.name, o.default, o.allowed, o.doc) for o in options_of(plain)] == [
        ("lr", 0.5, "a number above 0", "how far it goes."),
        ("word", "a", "one of a, b", "two at once."),
        ("every", None, "a whole number of at least 1, or left out", "two at once."),
    ]
    assert [o.name for o in options_of(twice)] == ["times"]
    assert (listed(plain), listed(needy)) == ("lr=0.5, word=a, every=None", "lr")


@pytest.mark.parametrize(
    ("kind", "good", "bad", "allowed"),
    [
        (Positive, [1, 1e-9, 1e300], [0.0, -1.0, float("inf"), float("nan"), True, "1", None], "a number above 0"),
        (Decay, [0, 0.0, 0.999], [1, 1.0, -1e-9, float("nan")], "a number from 0 to below 1"),
        (Count, [1, 10**9], [0, 1.0, True, "1"], "a whole number of at least 1"),
        (Annotated[int, Field(ge=8, le=64, multiple_of=8)], [8, 64], [4, 12, 72], "a multiple of 8 from 8 to 64"),
        (Positive | Literal["auto"], [0.5, "auto"], [0, "Auto"], 'a number above 0 or "auto"'),
        (Count | None, [None, 3], [0], "a whole number of at least 1, or left out"),
        (bool, [True, False], [0, 1, "true", None], "true or false"),
        (Literal["a", "b"], ["a"], ["c", ["a"], None, 1], "one of a, b"),
        (Sequence[str], [["a"], ("a", "b"), []], ["a", [1], None], "a list, each text"),
        (
            tuple[Decay, Decay],
            [(0.1, 0.2), [0.1, 0.2]],
            [(0.1,), (0.1, 1.0), 0.1],
            "a list of 2, each a number from 0 to below 1",
        ),
        (
            Annotated[str | Mapping[str, Any], Words("a name or a table")],
            ["x", {"name": "x"}],
            [3, ["x"]],
            "a name or a table",
        ),
    ],
)
def test_an_annotation_allows_some_values_and_refuses_the_others_in_a_sentence(kind, good, bad, allowed) -> None:
    for value in good:
        check_option("rule 'r'", "o", value, kind)
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            check_option("rule 'r'", "o", value, kind)
        assert str(caught.value) == f"rule 'r' got o = {value!r}, which must be {allowed}"


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        (Positive, {"exclusiveMinimum": 0.0}),
        (Decay, {"minimum": 0.0, "exclusiveMaximum": 1.0}),
        (Annotated[int, Field(ge=8, le=64, multiple_of=8)], {"minimum": 8, "maximum": 64, "multipleOf": 8}),
    ],
)
def test_a_json_schema_has_the_bounds_of_an_interval(kind, bounds) -> None:
    schema = TypeAdapter(kind).json_schema()
    assert {word: value for word, value in schema.items() if word != "type"} == bounds


def test_a_bad_value_is_refused_by_the_factory_that_was_called() -> None:
    for call, start in [
        (lambda: plain(0), "rule 'plain' got n = 0"),
        (lambda: plain(2, lr=0.0), "rule 'plain' got lr = 0.0"),
        (lambda: twice(plain(2), times=0), "wrapper 'twice' got times = 0"),
        (lambda: anchored_gasloc(momentum=1.0), "rule 'anchored_gasloc' got momentum = 1.0"),
    ]:
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(start)


def test_a_checked_function_or_class_is_called_by_its_own_name() -> None:
    class Thing:
        """A class that checks what it is made of."""

        @checked
        def __init__(self, size: Count) -> None:
            self.size = size

    assert Thing(3).size == 3
    with pytest.raises(ConfigError, match=r"Thing got size = 0, which must be"):
        Thing(0)


def test_a_factory_that_passes_its_options_on_has_those_of_the_other() -> None:
    @factory
    @like(plain)
    def same(*args: Any, **options: Any) -> Rule:
        """The same rule."""
        return plain(*args, **options)

    assert options_of(same) == options_of(plain) and inspect.signature(same) == inspect.signature(plain)
    assert same(2, word="b") == plain(2, word="b")._replace(name="same")
    assert options_of(anchored_gasloc) == options_of(gasloc)


def test_a_table_has_its_factories_under_their_names() -> None:
    assert table(plain, needy) == {"plain": plain, "needy": needy}
    assert [*RULES] == [factory.__name__ for factory in RULES.values()]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("plian", [], "unknown rule 'plian'; did you mean 'plain'? Allowed: needy, plain; correct the name"),
        ("plain", ["lr", "word"], ""),
        (
            "plain",
            ["wrod"],
            "rule 'plain' got an unknown option 'wrod'; did you mean 'word'? Allowed: also, every, lr, word",
        ),
        ("plain", ["n"], "rule 'plain' got an unknown option 'n'"),
        ("plain", ["also"], ""),
        ("needy", ["also"], "rule 'needy' needs lr and got also; add what is missing"),
        ("needy", ["lr"], ""),
    ],
)
def test_a_row_of_a_table_is_refused_for_unknown_and_missing_options(name, options, sentence) -> None:
    if not sentence:
        assert row("rule", table(plain, needy), name, options, also=["also"]).__name__ == name
        return
    with pytest.raises(ConfigError) as caught:
        row("rule", table(plain, needy), name, options, also=["also"])
    assert str(caught.value).startswith(sentence)


def test_all_faults_of_a_row_are_reported_at_once() -> None:
    assert len([*row_faults("rule", table(plain, needy), "needy", ["one", "two"])]) == 3
