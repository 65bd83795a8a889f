"""`gossamer list`: everything that a run file can name."""

from gossamer.cli.output import Json, print_json
from gossamer.cli.tables import print_table
from gossamer.errors import ConfigError

__all__ = ["command"]


def command(*, markdown: bool = False, json: Json = False) -> None:
    """Lists methods, rules, topologies, codecs, servers, pairs and boundaries.

    Args:
        markdown: print docs/methods.md, the methods with their traffic, memory and requirements
    """
    if markdown and json:
        raise ConfigError(f"--markdown was given with --json = {json} but prints a page; remove one of the two")
    if markdown:
        from gossamer.cli import methods_page

        print(methods_page.markdown(), end="")
        return
    from gossamer.asynchronous import PAIRS, SERVERS
    from gossamer.boundaries import BOUNDARIES
    from gossamer.codecs import CODECS
    from gossamer.rules import RULES
    from gossamer.run.methods import factory_rows, recipe_rows
    from gossamer.topologies import TOPOLOGIES

    tables = {
        "rules": RULES, "topologies": TOPOLOGIES, "codecs": CODECS, "servers": SERVERS, "pairs": PAIRS,
        "boundaries": BOUNDARIES,
    }  # fmt: skip
    if json:
        rows = {title: factory_rows(table) for title, table in tables.items()}
        named = {
            title: [dict(zip(("name", "what", "options"), r, strict=True)) for r in some]
            for title, some in rows.items()
        }
        methods = [dict(zip(("name", "made_of", "source"), row, strict=True)) for row in recipe_rows()]
        print_json({**named, "methods": methods})
        return
    for title, table in tables.items():
        print_table(("name", "what it does", "options"), factory_rows(table), title=title, text=3)
        if title == "codecs":
            print("every codec takes back=NAME, for rules that take a mean over everyone: what the sums travel back in")
    print_table(("name", "made of", "source"), recipe_rows(), title="methods", text=3)
