"""Errors: one tree, and sentences that say what was given."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer
from gossamer import errors
from gossamer.errors import GossamerError, RefusedError, choose

SOURCE = Path(gossamer.__file__).parent
ERRORS = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}

WITHOUT_A_VALUE = {  # beginning of the sentence: why it has none to show
    "no run file was given": "nothing was given",
    "no experiment file was given": "nothing was given",
    "no run was given to watch": "the same",
    "this page prices no other methods": "it was asked for nothing else",
    "run.device = 'cuda' but torch sees 0 GPUs": "the only value that leads here is in the sentence",
    "DataError(saved_when_unreadable(": "its sentence is made in the journal, with the round and the folder",
    "ConfigError(sentence)": "its sentences are made by `settings.over_time`, with the table that was given",
    "ConfigError(fault)": "its sentences are made by `settings`, with the key or name that was given",
    "ConfigError(wrong)": "its sentences are made above, with the steps that were counted",
    "RefusedError(kind, why)": "its sentences are made above, with the number that the peer gave itself",
    "RefusedError('checksum', 'the header of its letter": "nothing of a changed header can be believed, nor shown",
    "refused_by('the server', letter)": "it is what the server has said",
    "gossamer keys new got no name": "nothing was given",
    "nothing says how long an inner step takes": "the same",
    "what it sent was changed on its way": "nothing of what was changed can be believed, nor shown",
    "it does not encrypt; give all": "it sent what is no encryption, of which nothing can be shown",
    "PairingError(sentence)": "it comes from the table of incompatibilities, whose rows are looked at here too",
}

names = st.text("abcdefgh_", min_size=1, max_size=8)


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = {name: mark for mark, name in re.findall(r"^ *([*x+-]) (\w+)", errors.__doc__ or "", re.MULTILINE)}
    depth = {"*": 0, "x": 1, "+": 2, "-": 3}
    assert {name: depth[mark] for name, mark in drawn.items()} == {
        name: sum(base in ERRORS.values() for base in kind.__mro__[1:]) for name, kind in ERRORS.items()
    }


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_caught_as_ours_and_named_after_what_it_is(name: str) -> None:
    assert issubclass(ERRORS[name], GossamerError)
    made = RefusedError("bounds", "a sentence") if name == "RefusedError" else ERRORS[name]("a sentence")
    assert str(made) == "a sentence"


@settings(max_examples=50, deadline=None)
@given(got=names, allowed=st.lists(names, min_size=1, max_size=5, unique=True))
def test_a_wrong_name_is_answered_with_itself_and_all_that_is_allowed_in_order(got: str, allowed: list[str]) -> None:
    sentence = choose("rule", got, allowed)
    assert sentence.startswith(f"unknown rule '{got}'; ")
    assert sentence.endswith(f"Allowed: {', '.join(sorted(allowed))}")


@given(name=names, others=st.lists(names, max_size=4))
def test_a_slip_of_one_letter_is_answered_with_the_name_that_was_meant(name: str, others: list[str]) -> None:
    assert f"did you mean '{name}zz'?" in choose("codec", f"{name}z", [f"{name}zz"])
    assert "did you mean" not in choose("codec", "0123", others)


def statements(module: ast.Module) -> Iterator[ast.stmt]:
    """All statements of a module, of which there are a tenth as many as of all its nodes."""
    blocks = [module.body]
    for block in blocks:
        for one in block:
            yield one
            blocks += [getattr(one, name) for name in ("body", "orelse", "finalbody") if hasattr(one, name)]
            blocks += [part.body for name in ("handlers", "cases") for part in getattr(one, name, ())]


def messages() -> list[tuple[str, ast.Call, ast.Module]]:
    """Every place in the sources where one of our errors is made, and every row of the table of incompatibilities."""
    makers = {*ERRORS, "Incompatibility"}
    made, found = re.compile(rf"\b(?:{'|'.join(makers)})\("), []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = {text.count("\n", 0, one.start()) + 1 for one in made.finditer(text)}
        if not lines:  # to parse all takes a second
            continue
        module = ast.parse(text)
        for statement in statements(module):
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.withitem) or (
                    isinstance(part, ast.expr) and lines & {*range(part.lineno, (part.end_lineno or part.lineno) + 1)}
                ):
                    found += [
                        (f"{path.relative_to(SOURCE)}:{node.lineno}", node, module)
                        for node in ast.walk(part)
                        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers
                    ]
    return found


def formats(node: ast.AST) -> bool:
    """Whether a value is formatted into a string anywhere in here."""
    return any(isinstance(part, ast.FormattedValue) for part in ast.walk(node))


@functools.cache
def functions_of(module: ast.Module) -> dict[str, ast.FunctionDef]:
    """All functions of a module by their names."""
    return {one.name: one for one in statements(module) if isinstance(one, ast.FunctionDef)}


def shows_a_value(call: ast.Call, module: ast.Module) -> bool:
    """Whether a message is formatted from some value: in place, by `choose`, or by a function of the module that makes it."""
    makers = functions_of(module)
    called = [part.func for part in ast.walk(call) if isinstance(part, ast.Call)]
    names = {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in called}
    return formats(call) or "choose" in names or any(formats(makers[name]) for name in names & set(makers))


def test_every_error_says_what_was_given() -> None:
    found = messages()
    assert len(found) > 100, "the sources were not found"
    silent, used = [], set()
    for place, call, module in found:
        text = ast.unparse(call)
        excuse = next((start for start in WITHOUT_A_VALUE if start in text), None)
        if excuse:
            used.add(excuse)
        elif not shows_a_value(call, module):
            silent.append(f"{place}: {text[:100]}")
    assert not silent, "these messages show no value that was given:\n" + "\n".join(silent)
    assert used == set(WITHOUT_A_VALUE), "an excuse that nothing needs"


def test_where_gossamer_is_imported_and_not_installed_an_extra_comes_from_its_source(monkeypatch) -> None:
    def nowhere(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nowhere)
    assert errors.installs("plots") == "pip install -e '.[plots]' where the source of gossamer is"
