"""`gossamer list`: everything that a run file can name."""

from gossamer.cli.tables import print_table

__all__ = ["command"]


def command(*, markdown: bool = False) -> None:
    """Lists methods, rules, topologies, codecs, servers and pairs.

    Args:
        markdown: print docs/methods.md, the methods with their traffic, memory and requirements
    """
    if markdown:
        from gossamer.cli import methods_page

        print(methods_page.markdown(), end="")
        return
    from gossamer.asynchronous import PAIRS, SERVERS
    from gossamer.codecs import CODECS
    from gossamer.rules import RULES
    from gossamer.run.methods import factory_rows, recipe_rows
    from gossamer.topologies import TOPOLOGIES

    tables = {"rules": RULES, "topologies": TOPOLOGIES, "codecs": CODECS, "servers": SERVERS, "pairs": PAIRS}
    for title, table in tables.items():
        print_table(("name", "what it does", "options"), factory_rows(table), title=title, text=3)
        if title == "codecs":
            print("every codec takes back=NAME, for rules that take a mean over everyone: what the sums travel back in")
    print_table(("name", "made of", "source"), recipe_rows(), title="methods", text=3)
