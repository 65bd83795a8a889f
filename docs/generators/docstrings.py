"""How our docstrings are written, and for mkdocstrings: the same docstrings in the form that it reads.

It imports nothing of gossamer, because mkdocstrings reads the sources without running them.
"""

import inspect
import re
from typing import Any

import griffe

LABEL = re.compile(r"(Args|Cost|Source|Differs|Fails when|Raises|Returns|Shapes|Units): ?(.*)")


class Ours(griffe.Extension):
    """Rewrites each docstring while the sources are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_google(obj.docstring.value)


def capital(text: str) -> str:
    """A text with a capital at its beginning, if it begins with a word of English.

    >>> capital("a mean"), capital("one mean"), capital("arXiv 1"), capital("γ is small")
    ('A mean', 'One mean', 'arXiv 1', 'γ is small')
    """
    word = text.partition(" ")[0]
    english = word == "a" or (len(word) > 1 and word.isalpha() and word.isascii() and word != "arXiv")
    return text[:1].upper() + text[1:] if english else text


def under(label: str, text: str) -> str:
    """What a docstring says under a label, as Markdown.

    >>> under("Source", "a paper."), under("Fails when", "it rains.")
    ('**Source.** A paper.', '**Fails when** it rains.')
    """
    words = {"Differs": "Where it differs"}.get(label, label)
    return f"**{words}** {text}" if label == "Fails when" else f"**{words}.** {capital(text)}"


def is_equation(paragraph: str) -> bool:
    """Whether a paragraph holds equations: it does not end like a sentence, and has a sign of one.

    >>> is_equation("θ ← θ - η d"), is_equation("The rate is η = 1."), is_equation("a word")
    (True, False, False)
    """
    if paragraph.rstrip().endswith((".", ":")) or "`" in paragraph:
        return False
    return bool(re.search(r" [=←→≥≤] ", paragraph))


def block(equations: str) -> str:
    """Equations as Markdown."""
    return f"``` {{.text .equation}}\n{equations}\n```"


def to_google(text: str) -> str:
    """A docstring of ours in the form that mkdocstrings reads: equations in blocks, and a label as a bold word.

    >>> print(to_google("Adds.\\n\\na = b\\n\\nCost: none,\\n    ever."))
    Adds.
    <BLANKLINE>
    ``` {.text .equation}
    a = b
    ```
    <BLANKLINE>
    **Cost.** none, ever.
    """
    parts: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith(">>>"):
            parts.append(f"```pycon\n{paragraph}\n```")
        elif LABEL.match(paragraph):
            parts += _labels(paragraph)
        else:
            parts.append(block(paragraph) if is_equation(paragraph) and paragraph[0] != " " else paragraph)
    return "\n\n".join(parts)


def _labels(paragraph: str) -> list[str]:
    """The labelled parts of a paragraph, each a paragraph of its own."""
    parts: list[str] = []
    for line in paragraph.splitlines():
        begins = LABEL.match(line)
        if begins and begins[1] == "Args" and not begins[2]:
            parts.append(line)
        elif begins:
            parts.append(under(begins[1], begins[2]))
        elif parts and parts[-1].startswith("Args:"):
            parts[-1] += "\n" + line
        elif parts:
            parts[-1] += " " + line.strip()
    return parts
