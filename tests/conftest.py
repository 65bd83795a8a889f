"""What all tests share: one intra-op thread, an option for what takes too long in CI, and markers for what a machine may lack."""

import functools
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from execnet.xspec import XSpec

    from s3 import S3

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may share the cores
settings.register_profile("untimed", UNTIMED)
settings.register_profile("repeatable", UNTIMED, derandomize=True)
settings.load_profile("untimed")

TESTS = sorted(Path(__file__).parent.rglob("test_*.py"))
LONGEST = (
    "parity",
    "sigterm",
    "stages",
    "browser",
    "methods",
    "contributing",
    "docs",
    "elastic_runs",
    "integrations",
    "simulate",
    "shards",
    "flat",
    "library",
    "resume",
    "first_hour",
    "keyed_rounds",
    "rules",
    "server_processes",
    "simulation",
    "plan",
    "sites",
    "layers",
    "async_runs",
    "stability",
    "evidence",
    "race",
    "virtual",
    "faults",
    "topology",
    "served_in_store",
    "check",
    "store_runs",
    "in_store",
    "fuzz",
    "codecs",
    "elastic_replay",
    "choice",
    "cli",
    "rendezvous",
    "pricing",
    "data",
    "numbers",
    "pipeline",
    "audit",
    "transport",
    "leaving",
    "scenes",
    "launch",
    "teams",
    "checkpoint",
    "regroup",
    "which_round",
    "config",
    "optimizers",
    "bucket_protocol",
    "spoilt",
    "exchange",
    "tune",
    "state_transfer",
    "branches",
    "batched_replicas",
    "train",
    "events",
    "lossy_codecs",
    "adapt",
    "comparison",
    "fomoe",
    "pipeline_time",
    "liars",
    "elastic_fuzz",
    "experiments",
    "evaluate",
    "testing",
    "sites_of_trainers",
    "averaging",
    "keys",
    "inputs",
    "elastic_sockets",
    "locks",
    "closing",
    "numerics",
    "cocktail",
    "injuries",
    "samples",
    "taking_over",
    "recovery",
    "status",
    "async_lives",
    "record",
    "machines",
    "master",
    "errors",
    "single_rules",
    "own_parts",
    "seconds",
    "sparse",
    "boundary_product",
    "docstrings",
    "identities",
    "schedule",
    "results",
)
"""The files that take longest. They come first: each is run by one process (`--dist loadfile`), and none shall be waited for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="all of what CI takes a part of: tests marked full or sampled, each allowed pairing of the parity suite, "
        "a thousand faulty networks",
    )


class _OfExamples:
    """Looks for doctests only in files that have examples, which are half of them."""

    @pytest.hookimpl
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        without = collection_path.suffix == ".py" and b">>>" not in collection_path.read_bytes()
        return True if without and not collection_path.name.startswith("test_") else None


def pytest_configure(config: pytest.Config) -> None:
    # Tests take helpers from each other, so no two files share a name.
    sys.path += sorted({str(path.parent) for path in TESTS} - {*sys.path})
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script starts what stands before & with Ctrl-C ignored, and then all processes of the tests would ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        # What this user has run is none of theirs, and theirs is nothing that this user has run.
        os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="gossamer-tests-")
        config.add_cleanup(functools.partial(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True))
        if config.getoption("numprocesses", None):
            return  # this process runs no tests
    if config.getoption("hypothesis_profile", None) == "repeatable":
        # Examples would be drawn from the constants of those modules, too, that this process happens to have imported by then.
        setattr(providers, "_get_local_constants", lambda: providers._local_constants)  # noqa: B010  which stay none
    gc.disable()  # until all is collected: what is imported and what describes the tests stays
    config.pluginmanager.register(_OfExamples())  # for src and docs too
    import torch

    torch.set_num_threads(1)  # tests run beside their own worker processes
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True  # else pytest hangs three handlers into each of some forty loggers, for every test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: "Sequence[XSpec]") -> None:
    if sys.platform == "linux" and all(spec.popen and not spec.python for spec in specs):
        from prefork import fork_workers

        given = [Path(one.partition("::")[0]).resolve() for one in config.args]
        fork_workers(config, specs, [path for path in TESTS if any(path.is_relative_to(one) for one in given)])


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Looks for no doctests in the files of tests, which have none."""
    return [one for one in (yield) if type(one) is pytest.Module]  # of which a file of doctests is a kind


def beyond_ci(items: list[pytest.Item]) -> set[pytest.Item]:
    """What ``--full`` alone runs: tests marked ``full``, and all cases but n, spread evenly, of those marked ``sampled(n)``."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for item in items if item.get_closest_marker("full")}
    for of_one_test in cases.values():
        (n,), every = of_one_test[0].get_closest_marker("sampled").args, len(of_one_test)
        left_out |= {*of_one_test} - {of_one_test[k * every // n] for k in range(n)}
    return left_out


def named_in(given: list[str]) -> dict[Path, set[str]]:
    """The classes, tests and cases of each file that a command line names by node ids."""
    named: dict[Path, set[str]] = {}
    for file, _, names in (one.partition("::") for one in given):
        if names:
            named.setdefault(Path(file).resolve(), set()).add(names)
    return named


def is_named(item: pytest.Item, named: dict[Path, set[str]]) -> bool:
    """Whether a node id was given for this test: then it is run, as a note that it was left out would help nobody."""
    whole = [part.nodeid.partition("::")[2] for part in item.listchain()]  # the class, the test; "" for a file
    of_one = item.nodeid.partition("[")[0].partition("::")[2]  # all cases
    return not named.get(item.path, set()).isdisjoint([*whole, of_one])


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after other plugins have shuffled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    if not config.getoption("--full"):
        # Before other plugins shuffle, so that a case is in CI or is not, whatever the seed.
        named = named_in(config.args)
        left_out = {item for item in beyond_ci(items) if not is_named(item, named)}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
    yield
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()  # else each full collection looks at all that was imported and at all tests, for a third of a second
    gc.enable()


@pytest.fixture(scope="module")
def looked_at(request: pytest.FixtureRequest) -> set[object]:
    """Each `name` of the tests of this file that will be run, so that a fixture that trains all cases leaves out the others."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return {call.params.get("name") for call in calls if call}


@pytest.fixture(autouse=True)
def environment() -> Generator[None]:
    """Verbs that a test calls in this process set variables for what they start; the next test must not have them."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        for name in {*os.environ} - {*before}:
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> "Generator[S3]":
    """An object store on this machine that runs reach as s3://bucket."""
    from s3 import s3

    with s3(monkeypatch) as store:
        yield store


@pytest.fixture(scope="session")
def forks() -> None:
    """Processes that tests start are forks of one that has imported what they need."""
    from commands import start_forking

    start_forking()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
    if item.get_closest_marker("netns") and (lack := lacking_for_netns()):
        pytest.skip(f"needs network namespaces, and {lack}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (prefork := sys.modules.get("prefork")):
        report.sections.append(("What processes of all tests have written of late", prefork.written_of_late()))
    return report


@functools.cache
def lacking_for_netns() -> str:
    """Why workers cannot be given a network of their own on this machine; empty where they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"this machine has no {' and no '.join(missing)}"
    name = f"gossamer-{os.getpid()}-tried"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=10)
    return "" if tried.returncode == 0 else f"making one failed: {tried.stderr.strip()}"
