"""The shape of the package: imports go one way, light commands stay light, and everything public is declared and explained."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gossamer
from gossamer.cli import VERBS

SOURCE = Path(gossamer.__file__).parent
MODULES = {  # dotted name: parsed source
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
        path.read_text(encoding="utf-8")
    )
    for path in sorted(SOURCE.rglob("*.py"))
}

LAYERS = (  # a room (a module, or a package of modules) imports from the rooms above its own line only
    "errors rng tree",
    "options layout record data transport",
    "topologies codecs models optimizers",
    "rules asynchronous network",
    "rounds report",
    "library clock",
    "run",
    "cli",
    "__main__",
)
LAYER = {unit: depth for depth, units in enumerate(LAYERS) for unit in units.split()}

LIGHT = [  # work without torch
    "errors",
    "rng",
    "tree",
    "options",
    "models.sizes",
    "topologies",
    "rounds.schedule",
    "record.files",
    "record.jsonl",
    "record.trace",
    "record.arrivals",
    "record.events",
    "record.folder",
    "record.progress",
    "network.links",
    "network.fluid",
    "network.pacing",
    "network.timeline",
    "network.replay",
    "network.pricing",
    "network.plan",
    "network.utilisation",
    "network.wall_clock",
    "network.straggler",
    "network.published",
    "report.page",
    "report.panels",
    "report.figures",
    "cli",
]  # work without torch
LATE = {"transformers", "tokenizers", "datasets", "pyarrow", "matplotlib", "tensorboard", "wandb"}  # slow, or optional


def unit(module: str) -> str:
    """The part of the package that a module belongs to: `gossamer.rules.diloco` to `rules`."""
    return module.split(".")[1] if "." in module else module


def imported(tree: ast.Module) -> Iterator[str]:
    """The names of all modules (or names of modules' members) that are imported, wherever in the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write 'from gossamer.x import y'"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_its_layer() -> None:
    assert {unit(name) for name in MODULES} - {"gossamer"} == set(LAYER), "give a new module a place in LAYERS"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    own = LAYER.get(unit(module), -1)
    for name in imported(MODULES[module]):
        if name.startswith("gossamer.") and unit(name) != "__version__" and unit(name) != unit(module):
            assert LAYER[unit(name)] < own, f"{module} imports {name}, which is not in a layer below its own"


def at_import(tree: ast.Module) -> ast.Module:
    """The statements that run when a module is imported, and not for a type checker only."""
    statements = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ast.Module([node for node in statements if not ast.unparse(node).startswith("if TYPE_CHECKING:")], [])


@pytest.mark.parametrize("module", MODULES)
def test_slow_and_optional_packages_are_imported_where_they_are_used(module: str) -> None:
    assert not {name.split(".")[0] for name in imported(at_import(MODULES[module]))} & LATE


def test_modules_that_need_no_torch_do_not_import_it() -> None:
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(f'gossamer.{name}')\n"
    program += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", program, *LIGHT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_imports_nothing_slow() -> None:
    program = "import sys\nfrom gossamer.cli import VERBS, main\n"
    program += (
        "assert main(['--help']) == 0 and not [name for name in VERBS if f'gossamer.cli.{name}' in sys.modules]\n"
    )
    program += "assert not [name for name in VERBS if main([name, '--help'])]\nprint('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    usage, _, loaded = done.stdout.rpartition("loaded ")
    for verb in ("", *(f" {name}" for name in VERBS)):
        assert f"Usage: gossamer{verb} " in usage, verb
    assert not set(loaded.split()) & (LATE | {"torch", "numpy", "pydantic"})


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__")])
def test_all_holds_what_is_public(module: str) -> None:  # and ruff sees to it that it is sorted
    loaded = importlib.import_module(module)
    assert all(hasattr(loaded, name) for name in loaded.__all__)
    defined = [node.name for node in MODULES[module].body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    forgotten = {name for name in defined if not name.startswith("_")} - set(loaded.__all__)
    assert not forgotten, "put these into __all__, or a _ before them"


def test_the_public_names_of_the_package_are_sorted() -> None:
    names = [name for name in gossamer.__all__ if name != "__version__"]
    assert names == sorted(names)


def undocumented(owner: str, node: ast.AST) -> Iterator[str]:
    """Names of the public functions, classes and methods in here that have no docstring."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and not part.name.startswith("_"):
            name = f"{owner}.{part.name}"
            if ast.get_docstring(part) is None:
                yield name
            if isinstance(part, ast.ClassDef):
                yield from undocumented(name, part)


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_explained(module: str) -> None:
    assert ast.get_docstring(MODULES[module]) is not None
    assert list(undocumented(module, MODULES[module])) == []
