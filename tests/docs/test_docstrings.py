"""What a method says of itself is one sentence each for a reader, and for a program that makes a table of them."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import gossamer
from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.codecs import CODECS
from gossamer.rules import RULES, WRAPPERS
from gossamer.settings.options import options_of
from gossamer.topologies import TOPOLOGIES

METHODS = {**RULES, **SERVERS, **PAIRS}
TABLES = {"rule": RULES, "wrapper": WRAPPERS, "topology": TOPOLOGIES, "codec": CODECS, "server": SERVERS, "pair": PAIRS}
FACTORIES = {f"{kind} {name}": factory for kind, table in TABLES.items() for name, factory in table.items()}
REQUIRED = {
    "a2cid2": {"eta": 0.1},
    "dadao": {"strong_convexity": 1.0, "smoothness": 10.0, "chi1": 1.0},
}


def sections(factory) -> dict[str, str]:
    """The parts of a docstring that begin with a word and a colon, each on one line."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(factory) or "").splitlines():
        if begins := re.match(r"(Args|Cost|Source|Differs|Fails when|Raises):\s*(.*)", line):
            name, text = begins.groups()
            assert name not in found, f"{name} comes twice"
            found[name] = text
        elif name and line.startswith("    "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("part", ["Cost", "Source", "Fails when"])
def test_cost_source_and_failure_are_one_sentence_each(name, part):
    text = sections(METHODS[name]).get(part, "")
    assert text, f"the docstring of {name} has no line that begins with '{part}: '; write one, of one sentence"
    assert text.endswith(".") and not re.search(r"[.!?]\s", text), text


@pytest.mark.parametrize("name", METHODS)
def test_the_cost_is_what_is_sent_and_then_what_is_kept(name):
    sent, _, kept = sections(METHODS[name]).get("Cost", "").partition("; ")
    copies = METHODS[name](**REQUIRED.get(name, {})).state_copies
    assert sent and kept and ";" not in kept, (
        f"write 'Cost: what is sent; what is kept (in P).' for {name}, or '; nothing kept.'"
    )
    assert re.fullmatch(r"nothing kept\.|\S.* kept( at the \w+)? \(.*\bP\b.*\)\.", kept), kept
    assert kept.startswith("nothing kept") == (copies == 0)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_every_option_says_what_it_means_and_what_it_allows(factory):
    for option in options_of(factory):
        assert option.doc, f"write a line '    {option.name}: ...' under 'Args:' in the docstring of {factory.__name__}"
        assert option.allowed not in ("tables", "numbers", "whole numbers"), f"give {option.name} an interval"


SRC = Path(gossamer.__file__).parent
SEPARATE = "separate, private, or 'its ...'"
WORDS = {
    "told": (r"\btold\b(?! apart|:)", "reported, given, notified"),
    "anew": (r"\banew\b", "again, or a verb with re-"),
    "whoever": (r"\bwhoever\b", "the worker that ..., any process that ..."),
    "heard": (r"(?<![\".`])\bheard\b(?![\"`])", "received"),
    "of its own": (OWN := r"\bof (?:its|their) own(?=[.,;:)]|$| (?:instead|and|for|that|with|has|to)\b)", SEPARATE),
    "of their own": (OWN, SEPARATE),
}
"""Words that stop a reader: where each is one, and what to write instead."""


def sentences_of(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, each with its line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_docstrings_and_comments_use_the_words_of_the_field():
    odd = []
    for path in sorted(SRC.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        words = " ".join(source.split())
        if not (wrong := [rest for word, rest in WORDS.items() if word in words]):  # to parse all takes seconds
            continue
        for line, text in sentences_of(source):
            for pattern, instead in wrong:
                if found := re.search(pattern, " ".join(text.split())):
                    odd.append(f"{path.relative_to(SRC)}:{line} has {found[0]!r}; write {instead}")
    assert not odd, "\n".join(odd)


@pytest.mark.parametrize(
    "text",
    [
        "It is told so.",
        "begins anew",
        "whoever asks",
        "what was heard",
        "a thread of its own.",
        "files of their own, too",
    ],
)
def test_a_word_that_stops_a_reader_is_noticed(text):
    assert any(re.search(pattern, text) for pattern, _ in WORDS.values()), text
