"""Numbers far too large: check, plan and topology end at once or refuse them in a sentence, whichever key or option it is."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.cli import main
from gossamer.codecs import CODECS
from gossamer.rules import RULES, WRAPPERS
from gossamer.run.config.document import with_settings
from gossamer.run.config.json_schema import json_schema
from gossamer.run.planning.check import examine_document
from gossamer.settings.options import options_of
from gossamer.topologies import TOPOLOGIES
from tiny import document

LARGE, HUGE = 10**5, 10**12
ROWS: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {
    "rule": (RULES, {}),
    "topology": (TOPOLOGIES, {"workers": 8}),
    "codec": (CODECS, {}),
    "server": (SERVERS, {}),
    "pair": (PAIRS, {"topology.name": "complete"}),
}
"""The tables of which each row has options of its own, and what else a run with such a row needs."""
TABLES = [
    "data",
    "events",
    "figure",
    "inner",
    "model",
    "pipeline",
    "record",
    "run",
    "schedule",
    "seed",
    "tune",
    "workers",
]
"""The other keys at the top of a file that are numbers or tables with some."""
GOSSIP = ("gasloc", "anchored_gasloc", "gossip", "choco", "noloco", "sparta")
"""Rules that need no mean over everyone."""


@functools.cache  # not when the file is imported: that takes a second, which each process of tests would need
def schema() -> Mapping[str, Any]:
    return json_schema()


def resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema()["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part


def kinds(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a key may be: one kind, or each of several."""
    several = [*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())]
    return [
        one for kind in map(resolved, [part, *several]) for one in ([kind] if kind is part else [kind, *kinds(kind)])
    ]


def numeric(part: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The keys of a table, and of those in it, that may be numbers."""
    for key, value in part.get("properties", {}).items():
        of_key = [resolved(value), *kinds(resolved(value))]
        if any(kind.get("type") in ("integer", "number") for kind in of_key):
            yield f"{before}{key}"
        for kind in of_key:
            yield from numeric(kind, f"{before}{key}.")


@functools.cache
def keys_by_table() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in dict.fromkeys(numeric(resolved(schema()))):
        if (table := key.split(".")[0]) not in ROWS:
            found.setdefault(table, []).append(key)
    return found


def must_end(settings: Mapping[str, Any]) -> None:
    """Checks the tiny run of one layer with these settings: it can start, or there is a sentence why not."""
    assert all(examine_document(with_settings(document(model__layers=1), settings))[1]), settings


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", [LARGE, HUGE])
@pytest.mark.parametrize("table", TABLES)
def test_check_ends_for_a_huge_number_under_any_key_of_a_table(table: str, number: int) -> None:
    assert sorted(keys_by_table()) == TABLES
    for key in keys_by_table()[table]:
        must_end({key: number})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [LARGE, HUGE])
@pytest.mark.parametrize("table", ROWS)
def test_check_ends_for_a_huge_number_as_any_option_of_a_row(table: str, number: int) -> None:
    rows, needed = ROWS[table]
    for name, row in rows.items():
        everyone = {"topology.name": "complete"} if table == "rule" and name not in GOSSIP else {}
        for option in options_of(row):
            must_end({**needed, **everyone, f"{table}.name": name, f"{table}.{option.name}": number})


@pytest.mark.parametrize("wrapped", WRAPPERS)
def test_check_ends_for_a_huge_number_as_any_option_of_a_wrapper(wrapped: str) -> None:
    for option in options_of(WRAPPERS[wrapped]):
        for rule, topology in (("gasloc", "random"), ("diloco", "complete")):
            must_end({"rule.name": rule, "topology.name": topology, f"rule.{wrapped}.{option.name}": HUGE})


@pytest.mark.parametrize(
    "option", ["workers", "tokens", "hours", "vocab", "seq-len", "batch-size", "step-s", "local-steps", "memory-bytes"]
)
def test_plan_ends_for_a_huge_number_as_any_option(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (links := tmp_path / "network.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e8\nlatency_s = 0.05\n")
    given = {"model": "0.2m", "workers": 4, "local-steps": 2, "tokens": 1e6, "step-s": 0.5} | {option: HUGE}
    if option == "hours":
        del given["tokens"]
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert main(["plan", str(links), *words]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topology_ends_for_a_huge_number_as_any_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in options_of(TOPOLOGIES[name]):
        assert main(["topology", name, "--set", f"{option.name}={HUGE}"]) in (0, 2)
    for option in ("workers", "round", "momentum", "alpha"):
        assert main(["topology", name, f"--{option}", str(HUGE)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
