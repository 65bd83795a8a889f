"""The Python reference: every public name, under the module that defines it."""

import importlib
import importlib.util
import inspect
import types
from collections.abc import Iterator

import gossamer
from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.codecs import CODECS
from gossamer.rules import RULES, WRAPPERS
from gossamer.topologies import TOPOLOGIES

_HEAD = """# Python

```python
import gossamer
```

The names of the package stand first, then those of its public modules. Rules, topologies and codecs have their own pages:
[methods](../methods.md), [wrappers](../methods/wrappers.md), [topologies](../topologies.md), [codecs](../codecs.md).
"""
_MODULES = (
    "gossamer.run.simulated.simulation",
    "gossamer.run.simulated.keywords",
    "gossamer.run.experiments.sweep",
    "gossamer.library",
    "gossamer.rules.contract",
    "gossamer.testing",
    "gossamer.integrations",
    "gossamer.errors",
)
"""Modules whose names are public besides those of the package; one that does not exist is left out."""
_FIRST = ("Outer", "simulate", "sweep", "method")
"""What most readers look for."""
_ELSEWHERE = {**RULES, **WRAPPERS, **TOPOLOGIES, **CODECS, **SERVERS, **PAIRS}


def page() -> str:
    """The page, with one directive of mkdocstrings for each name."""
    parts = [_HEAD, "## gossamer\n"]
    seen: set[str] = set()
    parts += _directives("gossamer", seen)
    for module in _MODULES:
        if importlib.util.find_spec(module) is not None:
            about = inspect.getdoc(importlib.import_module(module)) or ""
            parts += [f"## {module}\n", " ".join(about.partition("\n\n")[0].split()) + "\n", *_directives(module, seen)]
    return "\n".join(parts)


def _directives(module: str, seen: set[str]) -> Iterator[str]:
    home = importlib.import_module(module)
    defined = [
        name for name, value in vars(home).items() if getattr(value, "__module__", "") == module and name[0] != "_"
    ]
    names = getattr(home, "__all__", defined)  # a package names what it takes from its modules
    for name in sorted(names, key=lambda name: (name not in _FIRST, name.islower(), name)):
        value = getattr(home, name)
        if not isinstance(value, type | types.FunctionType) or name in _ELSEWHERE:
            continue
        if module == "gossamer.errors" and not isinstance(value, type):
            continue  # what writes the sentences of errors
        path = f"{value.__module__}.{value.__qualname__}"
        if path.startswith(f"{gossamer.__name__}.") and path not in seen:
            seen.add(path)
            yield f"::: {path}\n    options:\n      heading_level: 3\n"
