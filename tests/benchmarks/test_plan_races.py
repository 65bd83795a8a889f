"""Races on networks that no rule has seen: who runs, that they go on where they stopped, and what the page says of them."""

import re
from pathlib import Path
from typing import Any

import plan_races
import pytest

from gossamer.record.jsonl import json_line
from tiny import TEXT

ROOT = Path(__file__).parents[2]

CELL = plan_races.HeldOut("two", "sympy", "1m", "DiLoCo 15 fp4", "DiLoCo 5 fp4")


def test_the_cells_are_those_that_were_registered() -> None:
    text = (ROOT / "docs" / "evidence" / "registered.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert rows == [tuple(cell) for cell in plan_races.HELD_OUT_CELLS] and len(rows) == 8
    assert all((plan_races.HELD_OUT_NETWORKS / f"{cell.network}.toml").is_file() for cell in plan_races.HELD_OUT_CELLS)


def test_the_registered_pick_gives_the_time_and_alone_runs_and_a_stopped_race_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two.toml").write_text(
        "uplink_bps = [2e7, 2e7]\ndownlink_bps = 1e8\nlatency_s = 0.01\nstep_s = [0.25, 0.5]\n"
    )
    raced = plan_races.held_out_cell(CELL, tmp_path)
    labels = [one.label for one in raced.course.entrants]
    assert {CELL.raced, CELL.planned, raced.choice, raced.second} <= {*labels} and "one machine alone 1 exact" in labels
    assert 5 <= len(labels) <= 9
    second = plan_races.planned(tmp_path / "two.toml", CELL.size).at_the_scale_of_the_race(raced.course.horizon_s)
    for one in raced.course.entrants:  # the machine alone is the quicker of the two, not the last one of that label
        of_raced = second.loss(one.candidate)
        assert of_raced is not None and raced.expected[one.label] == of_raced.nats
    of_pick = next(one for one in raced.course.entrants if one.label == CELL.raced)
    assert of_pick.seconds == pytest.approx(raced.course.horizon_s) and of_pick.last == of_pick.candidate.local_steps
    assert raced.course.tokens_of(of_pick) == pytest.approx(20 * 139_584, rel=0.01)

    file, trained = tmp_path / "held_out.jsonl", list[tuple[str, int]]()
    monkeypatch.setattr(plan_races, "HELD_OUT", file)
    monkeypatch.setattr(plan_races, "held_out_cell", lambda cell: raced)

    class Once:
        """In place of processes: each run ends at once, after an hour of a core."""

        def __init__(self, jobs: int) -> None:
            self.waiting: list[Any] = []

        def __enter__(self) -> "Once":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        busy = property(lambda self: bool(self.waiting))

        def add(self, what: tuple[str, int, str], *_: object) -> None:
            self.waiting.append(what)

        def ended(self) -> list[Any]:
            what = self.waiting.pop(0)
            trained.append(what[:2])
            loss = 1.5 + 0.008 * labels.index(what[0]) + 0.001 * (what[1] % 3)
            return [(what, plan_races.RunEnd(loss, "", 400.0, core_s=360.0))]

        def drop(self) -> None:
            self.waiting.clear()

    monkeypatch.setattr(plan_races, "RunPool", Once)
    sources = {"sympy": str(TEXT), "pods": str(TEXT)}
    for _ in range(2):  # each for half an hour
        plan_races.run_held_out(0.5, 1, sources, [CELL])
    assert len(trained) == len({*trained}) == 10
    plan_races.run_held_out(9.0, 1, sources, [CELL])
    assert len(trained) == len({*trained}) == 5 * len(labels) == len(plan_races.outcomes(file))
    assert {seed for _, seed in trained} == {60, 61, 62, 63, 64}
    plan_races.run_held_out(9.0, 1, sources, [CELL])
    assert len(trained) == 5 * len(labels), "nothing is left to run"

    monkeypatch.setattr(plan_races, "HELD_OUT_CELLS", (CELL, *plan_races.HELD_OUT_CELLS))
    said = plan_races.held_out_section(plan_races.outcomes(file))
    assert said.startswith(plan_races.SECTION) and "1 of 9 networks have run" in said
    gap = 0.008 * labels.index(CELL.raced)
    assert f"| {CELL.raced} | +{gap:.4f} ± 0.0000 |" in said and all(f"| {label} |" in said for label in labels)
    counted = re.search(r"are (\d) picks of the planner .* and (\d) of the registered", said)
    assert counted is not None and counted.group(2) == str(int(gap <= 0.02))


def test_the_page_names_the_picks_of_today_that_were_not_raced_beside_those_that_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, new = plan_races.outcomes(), {"even_1g": "data parallel 1 exact", "even_10m": "DiLoCo 5 fp4"}

    def cell_of(network: str, size: str, horizon_s: float) -> Any:
        own = plan_races.of_cell(lines, network, size)
        factor = 0.5 if (network, size) == ("even_10m", "1m") else 1.0  # raced, and twice as fast since
        pick = new.get(network) if size == "1m" else None
        pick = pick or next(one["label"] for one in reversed(own) if one["second"])
        prices = {one["label"]: factor * one["round_s"] for one in own}
        return plan_races.Cell(None, None, pick, pick, dict.fromkeys(prices, 0.0), prices)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(plan_races, "cell_of", cell_of)
    said = plan_races.page()
    assert (
        "In 2 of 12 cells its pick of today was not raced, or not at its price, and the row has the last pick that was, with the "
        "commit of its plan: even, 1 Gbit/s, 1m: data parallel 1 exact (raced: data parallel 1 bf16, of 47c976c7); "
        "even, 10 Mbit/s, 1m: DiLoCo 5 fp4 (raced: DiLoCo 15 fp4, of 475b9133)."
    ) in said
    assert "| even, 1 Gbit/s | 1m | data parallel 1 bf16 | data parallel 1 bf16 | 0 |" in said
    assert "| data parallel 1 exact | not raced |" in said and "| DiLoCo 5 fp4 | not raced |" in said
    assert "DiLoCo 15 fp4 (pick)" in said and "picks that were not raced: 2." in said


def test_what_was_written_of_the_slowest_machine_alone_is_read_as_of_the_quickest(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    lines = [
        {"network": "two_desks", "label": label, "expected": 0.2252}
        for label in ("one machine alone 1 exact", "DiLoCo")
    ]
    file.write_text("".join(map(json_line, lines)))
    assert [round(one["expected"], 4) for one in plan_races.held_out_outcomes(file)] == [0.0728, 0.2252]


def test_the_section_of_the_page_says_so_before_anything_has_run() -> None:
    assert "None has run with all seeds" in plan_races.held_out_section([])
