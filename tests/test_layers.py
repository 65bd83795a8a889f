"""The shape of the package: imports go one way, light commands stay light, and everything public is declared and explained."""

import ast
import functools
import graphlib
import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import gossamer
from gossamer.cli import VERBS
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.config.resolved import InPairs, ResolvedRun, WithServer

SOURCE = Path(gossamer.__file__).parent
SOURCES = {  # by dotted name
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text(
        encoding="utf-8"
    ).splitlines()
    for path in sorted(SOURCE.rglob("*.py"))
}

LAYERS = (  # a room imports from the rooms above its own line only; of two names the longer one is that of the room
    "version errors rng stop_signals tree collector",
    "finite settings",
    "layout record data",
    "transport",
    "topologies codecs models optimizers",
    "rules asynchronous network boundaries",
    "rounds report",
    "library clock",
    "run.config",
    "run.worker",
    "run.bookkeeping",
    "run.participant",
    "run.planning run.simulated run.synchronous run.served run.elastic run.asynchronous",
    "run.replay run.experiments run.play",
    "run integrations",
    "testing",
    "cli",
    "__main__",
)
LAYER = {unit: depth for depth, units in enumerate(LAYERS) for unit in units.split()}

LIGHT = [  # work without torch
    "errors",
    "rng",
    "stop_signals",
    "tree",
    "collector",
    "settings.user_code",
    "settings.fields",
    "settings.schema",
    "finite",
    "settings.options",
    "models.sizes",
    "topologies",
    "rounds.schedule",
    "rounds.stability",
    "record.addresses",
    "record.whole_files",
    "record.jsonl",
    "record.logs.seconds",
    "record.logs.trace",
    "record.logs.arrivals",
    "record.logs.events",
    "record.folder",
    "record.logs.pipeline_work",
    "record.logs.outcomes",
    "record.progress",
    "record.dashboards.loggers",
    "transport.sockets.handshake",
    "transport.elastic.members",
    "transport.elastic.ask",
    "transport.bucket.bucket",
    "transport.bucket.rounds",
    "transport.bucket.server_log",
    "network.inner_steps",
    "network.links",
    "network.estimates.goodput",
    "run.planning.measured_losses",
    "run.planning.expected_loss",
    "run.planning.choice",
    "run.config.document",
    "run.config.spelling",
    "network.fluid",
    "network.pacing",
    "network.probe_limits",
    "network.timeline",
    "network.replay",
    "network.pricing",
    "run.planning.teams",
    "run.planning.optima",
    "run.planning.plan",
    "run.planning.planned_run_file",
    "network.estimates.utilisation",
    "network.estimates.wall_clock",
    "network.estimates.straggler",
    "network.estimates.published",
    "report.reading.runs",
    "report.reading.status",
    "report.reading.stored",
    "report.metrics",
    "report.table",
    "report.colours",
    "report.figures",
    "report.page.page",
    "report.reading.tail",
    "report.reading.thinning",
    "report.reading.lines",
    "report.reading.follow",
    "report.reading.moment",
    "report.page.view",
    "report.verdict",
    "report.page.contents",
    "report.page.assets",
    "report.page.live",
    "run.planning.calculator",
    "report.terminal",
    "report.page.web",
    "run.play.actions",
    "run.play.film",
    "run.play.live",
    "report.reach",
    "report.results",
    "cli",
    "cli.status",
    "cli.watch",
    "cli.play",
]  # work without torch
TWO_HOMES = {"cocktail"}  # a rule and a codec of one paper
LATE = {
    "transformers",
    "tokenizers",
    "datasets",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "wandb",
    "trackio",
    "prometheus_client",
}  # slow, or optional
LATE |= {"accelerate", "lightning"}
COPIED = "gossamer.models.modeling_bottleneck"  # is written beside a model, for transformers


@functools.cache
def modules() -> dict[str, ast.Module]:
    """All modules of the package, parsed by the process that runs these tests, and not by each that collects them."""
    return {name: ast.parse("\n".join(source)) for name, source in SOURCES.items()}


def unit(module: str) -> str:
    """The room that a module belongs to: `gossamer.rules.diloco` to `rules`, `gossamer.run.worker.task` to `run.worker`."""
    words = module.split(".")[1:] or [module]
    return next((".".join(words[:n]) for n in (2, 1) if ".".join(words[:n]) in LAYER), words[0])


def imported(tree: ast.Module) -> Iterator[str]:
    """The names of all modules (or names of modules' members) that are imported, wherever in the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write 'from gossamer.x import y'"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_its_layer() -> None:
    assert {unit(name) for name in modules()} - {"gossamer"} == set(LAYER), "give a new module a place in LAYERS"


def test_imports_go_one_way() -> None:
    for module, tree in modules().items():
        own = LAYER.get(unit(module), len(LAYERS))  # the package itself, whose names are those of all rooms
        for name in imported(tree):
            if name.startswith("gossamer.") and unit(name) != "__version__" and unit(name) != unit(module):
                assert LAYER[unit(name)] < own, f"{module} imports {name}, which is not in a layer below its own"


def test_no_two_files_import_each_other_not_even_on_a_detour() -> None:
    """Imports inside functions and for type checkers count: who changes one file of a circle has to know all of them."""
    graph = {module: {file_of(name) for name in imported(tree)} - {module, None} for module, tree in modules().items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        raise AssertionError(f"these import each other: {' -> '.join(circle.args[1])}") from None


RAW = "gossamer.run.config.run_file"
"""Where a run file is read and validated, which is not resolved yet."""
MAY_TAKE_A_RUN_FILE = {"run.config", "run.planning", "run.experiments", "cli"} | {
    f"run.simulated.{module}" for module in ("keywords", "simulate", "simulation")
}
"""Who turns run files into runs: the verbs, and what they share; `gossamer.simulate` and its object take one from a user."""


def test_code_that_trains_records_or_evaluates_a_run_sees_no_run_file() -> None:
    """Drivers, replicas, journals and replays take a `ResolvedRun`, or the `RunSettings` in it: a run is resolved once."""
    for module, tree in modules().items():
        if {unit(module), module.removeprefix("gossamer.")} & MAY_TAKE_A_RUN_FILE:
            continue
        taken = [name for name in imported(tree) if file_of(name) == RAW]
        assert not taken, f"{module} imports {taken}; take what run.config.resolve gives"


def test_a_resolved_run_holds_no_run_file() -> None:
    members = [vars(kind) for kind in ResolvedRun.__mro__ if kind is not object]
    functions = [getattr(one, "fget", one) for some in members for one in some.values()]
    hints = [typing.get_type_hints(one) for one in functions if inspect.isfunction(one)]
    named = [typing.get_type_hints(ResolvedRun), *hints, *map(typing.get_type_hints, (Method, WithServer, InPairs))]
    assert len(named) > 10 and "RunConfig" not in str(named)


def file_of(name: str) -> str | None:
    """The module that a dotted name stands in: itself, or the one whose member it is."""
    return next((module for module in (name, name.rpartition(".")[0]) if module in SOURCES), None)


def at_import(tree: ast.Module) -> ast.Module:
    """The statements that run when a module is imported, and not for a type checker only."""
    statements = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ast.Module([node for node in statements if not ast.unparse(node).startswith("if TYPE_CHECKING:")], [])


def test_slow_and_optional_packages_are_imported_where_they_are_used() -> None:
    for module, tree in modules().items():
        if module == COPIED:
            continue
        early = {name.split(".")[0] for name in imported(at_import(tree))} & LATE
        assert not early, f"{module} imports {sorted(early)} when it is imported"


def test_one_module_prints_and_shows_control_characters_of_files_and_peers_as_escapes() -> None:
    printing = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == "print")
            or (isinstance(node.func, ast.Attribute) and node.func.attr in ("print_exception", "print_exc"))
            or ast.unparse(node.func) in ("sys.stdout.write", "sys.stderr.write")
        )
    }
    assert printing == {"gossamer.record.progress"}, "others use its echo"


WALL_CLOCK = {
    "gossamer.cli.doctor": "shows how far apart clocks are",
    "gossamer.record.logs.outcomes": "when a line was written",
    "gossamer.report.page.live": "how long ago a run was heard of",
    "gossamer.report.reading.status": "how long ago a run was heard of",
    "gossamer.report.reading.stored": "since when a store does not answer",
    "gossamer.report.terminal": "how long ago a run was heard of",
    "gossamer.transport.bucket.objects": "when an object was written",
    "gossamer.transport.keys": "from when a certificate holds",
    "gossamer.transport.sockets.examination": "how far apart clocks are",
    "gossamer.transport.sockets.tls": "the sentence about a certificate that does not hold now",
}
"""The users of the wall clock and their purposes: it may be set forward or back during a run, and no wait may change."""


def test_no_wait_nor_deadline_of_a_run_follows_the_wall_clock() -> None:
    reads = {f"time.{name}" for name in ("time", "time_ns", "ctime", "gmtime", "localtime", "clock_gettime")}
    reads |= {f"{of}.{name}" for of in ("datetime", "datetime.datetime") for name in ("now", "today", "utcnow")}
    found = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in reads)
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
    }
    assert found == {*WALL_CLOCK}


def test_modules_that_need_no_torch_do_not_import_it() -> None:
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(f'gossamer.{name}')\n"
    program += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", program, *LIGHT], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


ANSWERED_AT_ONCE = {  # each with its exit code
    "list": 0,
    "list rules --json": 0,
    "list nothing": 2,
    "topology ring": 0,
    "topology nothing": 2,
    "check none.toml": 2,
    "check bad.toml --set workers=3": 2,
    "simulate none.toml": 2,
    "simulate --resume none": 2,
    "simulate bad.toml --set workers": 2,
    "simulate misspelt.toml": 2,
    "simulate good.toml --set run.stps=3": 2,
    "simulate good.toml --set rule.name=gaslocc": 2,
    "simulate good.toml --set rule.name=gasloc --set rule.lrr=1": 2,
    "simulate good.toml --set method=dilco": 2,
    "train misspelt.toml --local 2": 2,
    "compare good.toml --set optimizer=adamw": 2,
    "tune misspelt.toml": 2,
    "plan network.toml --workers 2 --model 7B": 2,
    "plan network.toml --workers 2 --method gaslocc": 2,
    "plan network.toml --workers 2 --codec int9": 2,
    "train none.toml --local 2": 2,
    "train bad.toml": 2,
    "compare none.toml": 2,
    "compare bad.toml": 2,
    "tune none.toml": 2,
    "plan none.toml": 2,
    "price none none.toml": 2,
    "report none": 2,
    "evaluate none": 2,
    "audit none": 2,
    "status none": 2,
}


def test_tables_and_refusals_of_what_is_missing_or_misspelt_do_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("workers = = 3")
    (tmp_path / "misspelt.toml").write_text('method = "diloco"\nwrkers = 3')
    (tmp_path / "good.toml").write_text("workers = 3")
    (tmp_path / "network.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e8\nstep_s = 1.0\n")
    program = "import sys\nfrom gossamer.cli import main\n"
    program += "for words in sys.argv[1:]:\n    code = main(words.split())\n"
    program += "    assert 'torch' not in sys.modules, words\n    print('code', code)"
    done = subprocess.run(
        [sys.executable, "-c", program, *ANSWERED_AT_ONCE], capture_output=True, text=True, timeout=250, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("code ")]
    assert dict(zip(ANSWERED_AT_ONCE, codes, strict=True)) == ANSWERED_AT_ONCE, done.stderr


def test_help_imports_nothing_slow() -> None:
    program = "import sys\nfrom gossamer.cli import VERBS, main\n"
    program += (
        "assert main(['--help']) == 0 and not [name for name in VERBS if f'gossamer.cli.{name}' in sys.modules]\n"
    )
    program += "assert not [name for name in VERBS if main([name, '--help'])]\nprint('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    usage, _, loaded = done.stdout.rpartition("loaded ")
    for verb in ("", *(f" {name}" for name in VERBS)):
        assert f"Usage: gossamer{verb} " in usage, verb
    assert not set(loaded.split()) & (LATE | {"torch", "numpy", "pydantic"})


def test_only_packages_list_their_public_names() -> None:
    """In a module, public is what has no underscore before it; a package says which names of its modules it offers."""
    for module, tree in modules().items():
        listed = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"]
        is_package = (SOURCE.parent / module.replace(".", "/")).is_dir()
        assert is_package or not listed, (
            f"{module} is no package: leave __all__ out, and put a _ before what is private"
        )
        if listed:
            package = importlib.import_module(module)
            assert [name for name in package.__all__ if not hasattr(package, name)] == [], module


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


def test_everything_public_is_explained() -> None:
    assert [module for module, tree in modules().items() if ast.get_docstring(tree) is None] == []
    assert [name for module, tree in modules().items() for name in undocumented(module, tree)] == []


def defined(tree: ast.Module) -> Iterator[tuple[str, type[ast.AST]]]:
    """The public names that a module defines, each with the kind of statement."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        yield from ((name, type(node)) for name in names if not name.startswith("_"))


def test_no_class_and_no_exported_name_is_defined_in_two_modules() -> None:
    homes: dict[str, list[str]] = {}
    for module, tree in modules().items():
        for name, _ in defined(tree):
            homes.setdefault(name, []).append(module)
    packages = [name for name in modules() if (SOURCE.parent / name.replace(".", "/")).is_dir()]
    exported = {name for package in packages for name in importlib.import_module(package).__all__}
    for package in packages:  # "import NAME as NAME" exports a name, too
        aliases = (
            alias for node in modules()[package].body if isinstance(node, ast.ImportFrom) for alias in node.names
        )
        exported |= {alias.name for alias in aliases if alias.asname == alias.name}
    classes = {name for tree in modules().values() for name, kind in defined(tree) if kind is ast.ClassDef}
    twice = {name: homes[name] for name in (exported | classes) - TWO_HOMES if len(homes.get(name, [])) > 1}
    assert not twice, "one word, one thing: rename one of them"
