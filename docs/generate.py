"""Writes the source of the site: the pages of this folder, those that are made from the code, and the configuration.

    make docs

Nothing that it makes is committed. The tool that builds the site sees a folder of Markdown, and needs no plugin for it.
"""

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from generators import command_line, methods, python_names, run_file, tables
from gossamer.report.page.assets import whole_page
from gossamer.run.planning.calculator import frozen_contents, short_lists
from gossamer.run.play.film import film_contents, read_film

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOW_TO = [
    "how-to/own-loop.md",
    "how-to/real-processes.md",
    "how-to/slow-links.md",
    "how-to/slow-machine.md",
    "how-to/when-a-machine-dies.md",
    "how-to/compare-my-own.md",
    "how-to/own-parts.md",
    "how-to/pipelines.md",
    "how-to/experts.md",
]
"""The order of the first pages; the others of the folder follow them."""
EVIDENCE = [
    "momentum",
    "gossip",
    "slow-worker",
    "size-and-rounds",
    "compression-and-systems",
    "pipelines",
    "leaderboard",
    "claims",
    "method",
    "registered",
]
"""The pages behind the first one, in the order of its answers."""
_DECISIONS = (
    "Each page has the context of a decision, what was decided, the evidence and the consequences. Number 24 was set aside for a "
    "decision that was never written; numbers are not used twice."
)
_REGISTERED = (
    "Outcomes of what is [registered](../../evidence/registered.md), as they come; `make results` writes these pages from "
    "them."
)
_CALCULATORS = """# Calculators

[Open the calculators](calculator.html): move bandwidth, the slowest uplink, model, local steps and codec, and see the share of
the time spent computing, bytes and seconds of a round, for data parallelism, DiLoCo and GASLoC; and published settings with their
published figures. Every answer on that page was computed when this site was built, by what `gossamer plan` and
`gossamer utilisation` call.

`gossamer watch --plan` serves the same page with more values, latency and workers among them, and prices all other methods too.
With a network file it moves the bandwidth of all its links together.
"""
_PAPER = "Experiments at one learning rate, from which [Evidence](../../evidence.md) concludes nothing any more."


EXPERIMENTS = [
    ("results/evidence", "The registered experiments", _REGISTERED),
    ("results/paper", "The paper's experiments", _PAPER),
]


_PAGE_OF_SOURCE = {
    r"(?:rules|asynchronous)/(\w+)\.py": r"methods/\2.md",
    r"(codecs|topologies|boundaries)/__init__\.py": r"\2.md",
    r"run/config/run_file\.py": "reference/run-file.md",
    r"__init__\.py": "reference/python.md",
}
"""Pages link to source, which any reader of the repository has; the site has a page of each in its place."""


def write(folder: Path) -> None:
    """Writes the source of the site into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "docs"
    shutil.copytree(
        DOCS, pages, ignore=shutil.ignore_patterns("*.py", "generators", "numbers", "__pycache__", "*.jsonl")
    )
    for path, text in _made():
        (pages / path).parent.mkdir(parents=True, exist_ok=True)
        (pages / path).write_text(text, encoding="utf-8")
    for page in pages.rglob("*.md"):
        page.write_text(_relinked(page.read_text(encoding="utf-8")), encoding="utf-8")
    settings = yaml.safe_load((DOCS / "site.yml").read_text(encoding="utf-8"))
    settings["nav"] = _filled(settings["nav"], _lists())
    python = settings["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT / "src")]
    python["options"]["extensions"] = [str(DOCS / "generators" / "docstrings.py")]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _made() -> Iterator[tuple[str, str]]:
    """The path and the text of each page that no file of this folder holds."""
    yield from methods.pages()
    yield from tables.pages()
    yield "reference/run-file.md", run_file.page()
    yield "reference/command-line.md", command_line.page()
    yield "reference/python.md", python_names.page()
    yield "calculators.md", _CALCULATORS
    yield (
        "calculator.html",
        whole_page("What a network costs", frozen_contents(short_lists()), "", "", main="calculator"),
    )
    film = read_film(DOCS / "film.jsonl")
    yield "film.html", whole_page("Gossamer play: a film", film_contents(*film, live=False), "", "", main="play")
    yield "adr/index.md", _list_of("adr", "Decisions", _DECISIONS)
    for folder, title, about in EXPERIMENTS:
        if _in_folder(folder):
            yield f"{folder}/index.md", _list_of(folder, title, about)
    for name, page in (("README", "index"), ("CHANGELOG", "changelog"), ("CONTRIBUTING", "contributing")):
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)  # from the root to this folder
        yield f"{page}.md", re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\.(?:py|toml|ipynb|cff)\)", r"\1", text)


def _relinked(text: str) -> str:
    """Lets a link to a folder lead to its first page, one to a page of the root to its copy, and one to source to its page."""
    text = re.sub(r"\]\(((?:[./]|\w)*(?:results/(?:paper|evidence)|adr))/?\)", r"](\1/index.md)", text)
    text = re.sub(
        r"\]\((?:\.\./)?((?:\.\./)*)(CHANGELOG|CONTRIBUTING)\.md", lambda at: f"]({at[1]}{at[2].lower()}.md", text
    )
    for source, page in _PAGE_OF_SOURCE.items():
        text = re.sub(rf"\]\(\.\./((?:\.\./)*)src/gossamer/{source}\)", rf"](\1{page})", text)
    return text.replace("](film.jsonl)", "](film.html)")


def _lists() -> dict[str, list[Any]]:
    """What stands in the navigation for each name in braces."""
    others = [page for page in _in_folder("how-to") if page not in HOW_TO]
    groups = methods.grouped().items()
    return {
        "{how-to}": HOW_TO + others,
        "{evidence}": [f"evidence/{name}.md" for name in EVIDENCE],
        "{methods}": [{methods.GROUPS[group]: [f"methods/{name}.md" for name in names]} for group, names in groups],
        "{results}": [
            *_in_folder("results"),
            *(
                {title: [f"{folder}/index.md", *pages]}
                for folder, title, _ in EXPERIMENTS
                if (pages := _in_folder(folder))
            ),
        ],
        "{decisions}": _in_folder("adr"),
    }


def _filled(nav: Any, lists: dict[str, list[Any]]) -> Any:
    """The navigation with its names in braces replaced by what they stand for."""
    if isinstance(nav, dict):
        return {title: _filled(part, lists) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    return [
        one
        for part in nav
        for one in (lists[part] if isinstance(part, str) and part in lists else [_filled(part, lists)])
    ]


def _in_folder(folder: str) -> list[str]:
    """The pages of a folder but its first, in the order of their names."""
    return sorted(f"{folder}/{page.name}" for page in (DOCS / folder).glob("*.md") if page.name != "index.md")


def _list_of(folder: str, title: str, about: str) -> str:
    """A page that lists those of a folder by their titles."""
    titles = [(page, (DOCS / page).read_text(encoding="utf-8").partition("\n")[0]) for page in _in_folder(folder)]
    lines = [f"- [{heading.removeprefix('# ')}]({Path(page).name})\n" for page, heading in titles]
    return f"# {title}\n\n{about}\n\n{''.join(lines)}"


if __name__ == "__main__":
    logging.getLogger("gossamer").setLevel(logging.ERROR)  # a warning about an unstable pairing is none about the site
    write(Path(sys.argv[1]))
