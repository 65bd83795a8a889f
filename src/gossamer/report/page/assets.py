"""The files of a page: its markup, its style and its scripts, as they are served, and as one file."""

import json
from html import escape
from importlib import resources
from typing import Any, NamedTuple


class Asset(NamedTuple):
    """A file next to this module."""

    name: str
    kind: str

    def read(self) -> bytes:
        """What is in it."""
        return (resources.files("gossamer.report.page") / "files" / self.name).read_bytes()


_STYLE = Asset("page.css", "text/css; charset=utf-8")
_PARTS = {
    "page": ("marks", "charts", "gossip", "timeline", "page"),
    "calculator": ("marks", "charts", "calculator"),
    "play": ("marks", "charts", "timeline", "gossip", "play"),
}
"""The scripts of each page, by the last of them, which puts it together."""
_SCRIPTS = {name: Asset(f"{name}.js", "text/javascript; charset=utf-8") for names in _PARTS.values() for name in names}
ASSETS = {asset.name: asset for asset in (_STYLE, *_SCRIPTS.values())}
"""By name; nothing else is served from here."""


def shell(hint: str = "", *, main: str = "page") -> bytes:
    """The markup of a live page, which asks its server for everything else.

    Args:
        hint: how to look from another machine.
        main: the script that puts the page together.
    """
    links = f'<link rel="stylesheet" href="{_STYLE.name}">'
    scripts = "".join(f'<script src="{_SCRIPTS[part].name}" defer></script>' for part in _PARTS[main])
    words = f"From another machine: <code>{escape(hint)}</code>, then open the same address there." if hint else ""
    plain, note = "<p>This page needs JavaScript.</p>", f'<p class="faint">{words}</p>'
    return _markup("gossamer", links + scripts, plain, note).encode()


def whole_page(title: str, contents: dict[str, Any], plain: str, body: str, *, main: str = "page") -> str:
    """A page that needs no other file.

    Args:
        contents: what the live page would be given by its server, with "moments", the rounds that can be drawn.
        plain: markup that is shown where there are no scripts.
        body: markup that is always shown.
        main: the script that puts the page together.
    """
    style = f"<style>{_STYLE.read().decode()}</style>"
    # In a script element only "<" can end the element or begin a comment.
    data = json.dumps(contents, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = "".join(
        f"<script>{script.read().decode()}</script>" for script in map(_SCRIPTS.__getitem__, _PARTS[main])
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{style}'
    tail = f'<script type="application/json" id="contents">{data}</script>{scripts}'
    needs = "<p>The charts need JavaScript; the table and the settings do not.</p>"
    return _markup(title, head, f"{needs}{plain}", f"{body}\n{tail}")


def _markup(title: str, head: str, plain: str, tail: str) -> str:
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    icon = '<link rel="icon" href="data:,">'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{meta}<title>{escape(title)}</title>{icon}{head}</head>\n'
        f'<body>\n<main id="page"><noscript>{plain}</noscript></main>\n{tail}\n</body>\n</html>\n'
    )
