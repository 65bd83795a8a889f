"""The page in a real browser: it draws what was recorded, asks nobody else, and follows a run to its end and beyond."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from test_stored import begun, commit, put
from test_watch import served, serving

from commands import Command
from gossamer.cli.play import live_page
from gossamer.cli.watch import calculators
from gossamer.record.folder import RunFolder
from gossamer.record.logs.trace import Entry, Operation
from gossamer.report.page.assets import whole_page
from gossamer.report.page.page import write_report
from gossamer.report.page.web import page_server
from gossamer.report.reading.stored import FollowedStore
from gossamer.run.planning.calculator import Calculator, frozen_contents
from gossamer.run.play.actions import Action
from gossamer.run.play.film import film_contents
from gossamer.run.play.live import Live, filmed
from gossamer.topologies import make_topology
from gossamer.transport.bucket.objects import commit_name
from tiny import document

CHROMIUM = shutil.which("chromium") or ""
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]
TOPOLOGIES = {"random": 8, "ring": 8, "hypercube": 8, "pga": 6}
ROUNDS = 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that may neither say anything on its console nor ask any other machine."""
    found: list[str] = []
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.on("console", lambda message: found.append(message.text))
    opened.on("pageerror", lambda error: found.append(str(error)))
    allowed = ("http://127.0.0.1:", "file://", "data:")
    opened.on("request", lambda request: None if request.url.startswith(allowed) else found.append(request.url))
    opened.found = found
    yield opened
    opened.close()
    gone = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET")  # of a server that has ended
    assert [one for one in found if not any(reason in one for reason in gone)] == []


def recorded(folder: Path, topology: str, n: int) -> Path:
    """A run whose workers sent what a topology plans; a round over everyone is recorded as a mean."""
    mixings = make_topology(topology, n, seed=3)
    text = tomli_w.dumps(
        {"name": topology, "workers": n, "rule": "gossip", "run": {"steps": 2 * ROUNDS, "local_steps": 2}}
    )
    with RunFolder(folder, text) as run:
        for r in range(ROUNDS):
            for i in range(n):
                run.log("train", round=r, worker=i, step=2 * r + 2, loss=3 - 0.1 * r, tokens=64 * (r + 1))
                peers = tuple((j, 1000) for j in mixings.mixing(r).receives_from(i))
                run.log_trace(Entry(r, i, 2, 0.1, (Operation("exchange", 0, peers, peers),)))
            run.log("eval", round=r, step=2 * r + 2, tokens=64 * n * (r + 1), loss=3 - 0.1 * r, disagreement=0.1)
    return folder


def planned(topology: str, n: int, round: int) -> set[str]:
    mixing = make_topology(topology, n, seed=3).mixing(round)
    return {f"{min(i, j)}-{max(i, j)}" for i in range(n) for j in mixing.receives_from(i)}


def drawn(page: Any, run: int, round: int) -> set[str]:
    """The pairs that the page draws for a round, which is chosen with its slider."""
    card = page.locator(f"details[data-run='{run}']")
    card.locator("input[type=range]").evaluate(
        "(one, r) => { one.value = r; one.dispatchEvent(new Event('input')); }", round
    )
    card.locator(f"svg[data-round='{round}']").wait_for()
    return set(card.locator("[data-pair]").evaluate_all("all => all.map(one => one.dataset.pair)"))


def test_the_pairs_drawn_are_those_of_the_topology_on_the_live_page_and_in_the_report(
    page: Any, tmp_path: Path
) -> None:
    folders = {name: recorded(tmp_path / name, name, n) for name, n in TOPOLOGIES.items()}
    write_report(folders, tmp_path / "report.html", {})
    with served(*folders.values()) as server:
        for address in (server.address, (tmp_path / "report.html").as_uri()):
            page.goto(address)
            page.locator("svg[data-round]").nth(len(folders) - 1).wait_for()
            for place, (name, n) in enumerate(TOPOLOGIES.items()):
                for r in (0, 1, ROUNDS - 1):  # the last is that of everyone where there is one
                    assert drawn(page, place, r) == planned(name, n, r), (address, name, r)


def test_the_page_of_a_run_in_a_store_draws_rounds_over_time_and_no_empty_losses(page: Any, tmp_path: Path) -> None:
    store = begun(tmp_path / "store")
    for round in range(4):
        put(store, commit_name(round), commit(round, (0, 1) if round else (0,)))
    with serving(page_server((), "127.0.0.1", 0, stores=[FollowedStore(store.root)])) as server:
        page.goto(server.address)
        page.locator("svg[data-round='3']").wait_for()
        assert page.locator("figure[data-figure=closed_rounds] path[data-curve]").count() == 1
        assert page.locator("#axis").input_value() == "time:"
        assert page.get_by_text("a store keeps no losses").count() == 1
        assert not page.get_by_text("Training loss by worker").is_visible()
        page.locator("summary", has_text="workers: 2 held").click()
        page.get_by_text("process 1 since before").nth(1).wait_for()  # drawn when the fold opens
        assert drawn(page, 0, 0) == set() and page.get_by_text("Round 0 was closed by worker 0").is_visible()


def test_a_curve_of_which_a_logarithmic_axis_shows_one_value_is_a_dot(page: Any, tmp_path: Path) -> None:
    metrics = recorded(tmp_path / "a", "ring", 4) / "metrics.jsonl"
    before, last, after = metrics.read_text().rpartition('"disagreement":0.1')
    assert last in before
    metrics.write_text(before.replace(last, '"disagreement":0.0') + last + after)
    write_report({"a": tmp_path / "a"}, tmp_path / "report.html", {})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("circle[r='3']").count() == 1


def test_the_report_sorts_hides_zooms_reads_and_copies_by_mouse_and_by_keyboard(page: Any, tmp_path: Path) -> None:
    evil = '<img src=x onerror="console.log(1)"> seed=0'
    runs = {evil: recorded(tmp_path / "a", "ring", 4), "b seed=0": recorded(tmp_path / "b", "random", 4)}
    write_report(runs, tmp_path / "report.html", {})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("img").count() == 0 and page.get_by_text("<img src=x", exact=False).count() > 2
    page.locator("thead th").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("thead th").first.get_attribute("aria-sort") == "ascending"
    chart = page.locator("figure[data-figure=loss]")
    assert chart.locator("path[data-curve]").count() == 2
    page.locator(".legend button").first.press("Enter")
    assert chart.locator("path[data-curve]").count() == 1
    page.locator(".legend button").first.click()
    svg = chart.locator("svg[role=img]")
    svg.focus()
    page.keyboard.press("ArrowRight")
    assert chart.locator(".tip").is_visible() and "b" in chart.locator(".tip").inner_text()
    before = svg.inner_html()
    page.keyboard.press("+")
    assert svg.inner_html() != before
    page.keyboard.press("0")
    page.select_option("#axis", "tokens")
    assert "tokens" in (svg.get_attribute("aria-label") or "")
    chart.locator("summary").click()
    until(chart.locator("textarea").input_value)  # filled once the browser says that it is open
    lines = chart.locator("textarea").input_value().splitlines()
    assert len(lines) == 1 + ROUNDS and [float(x) for x in lines[-1].split("\t")] == [64 * 4 * ROUNDS, 2.5, 2.5]


def test_a_method_has_its_colour_whatever_else_is_on_the_page_and_so_have_its_seeds(page: Any, tmp_path: Path) -> None:
    labels = ["GASLoC 1-Peer seed=0", "NoLoCo seed=0", "DiLoCo seed=0", "DiLoCo seed=1"]
    write_report(
        {label: recorded(tmp_path / label[:3] / label[-1], "ring", 4) for label in labels}, tmp_path / "r.html", {}
    )
    page.goto((tmp_path / "r.html").as_uri())
    strokes = (
        "all => all.map(one => [one.dataset.curve, one.getAttribute('stroke'), one.getAttribute('stroke-dasharray')])"
    )
    curves = "figure[data-figure=loss] path[data-curve]"
    page.select_option("#seeds", "each")
    found = {label: (stroke, dash or "") for label, stroke, dash in page.locator(curves).evaluate_all(strokes)}
    assert [found[label] for label in labels] == [
        ("var(--c1)", ""),
        ("var(--c5)", ""),
        ("var(--c0)", ""),
        ("var(--c0)", "7 3"),
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_telephone_and_its_words_can_be_read_in_both_schemes(
    browser: Any, tmp_path: Path, scheme: str
) -> None:
    write_report({"a": recorded(tmp_path / "a", "ring", 4)}, tmp_path / "report.html", {})
    page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme=scheme)
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("svg[data-round]").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    value = "k => getComputedStyle(document.documentElement).getPropertyValue(k).trim()"
    colours = f"['--ink', '--faint', '--ground', '--card'].map({value})"
    ink, faint, *grounds = page.evaluate(colours)
    assert min(contrast(words, ground) for words in (ink, faint) for ground in grounds) >= 4.5
    page.close()


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminance, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_follows_real_runs_and_outlives_an_end_a_kill_and_its_own_server(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.report.reading.paces._SILENT_S", 2.0)
    for name, steps in (("ended", 20), ("killed", 2000)):
        text = tomli_w.dumps(
            document(name=name, workers=2, run__steps=steps, run__checkpoint_every=0, run__pace_s=0.2, model__layers=1)
        )
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs") as server:
        page.goto(server.address)
        killed = train(tmp_path, "killed")
        workers = killed.processes(2)
        try:
            ended = train(tmp_path, "ended")
            until(lambda: shown_rounds(page, "ended") > 0 and shown_rounds(page, "killed") > 0)
            first = shown_rounds(page, "killed")
            until(lambda: shown_rounds(page, "killed") > first + 1)
            page.locator("path[data-curve=killed]").first.wait_for()
            code, output = ended.finish(120)
            assert code == 0, output
            until(lambda: "ended: finished, 10 of 10 rounds" in summaries(page))
        finally:
            for pid in (killed.pid, *workers.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.finish()
        until(lambda: re.search(r"killed: silent, \d+ of 1000 rounds", summaries(page)))
    until(lambda: "does not answer" in page.locator("[role=status]").inner_text())
    assert "ended: finished" in summaries(page), "what was shown stays"


@pytest.mark.full
def test_the_calculators_follow_what_is_moved_by_keyboard_with_and_without_a_server(page: Any, tmp_path: Path) -> None:
    short = {
        "latency": (0.03,),
        "workers": (4,),
        "step_s": (0.3,),
        "vocab": (256,),
        "model": ("1m",),
        "share": (1.0, 0.1),
    }
    calculator = Calculator()
    calculator.inputs["plan"] = tuple(
        one._replace(values=short.get(one.key, (one.start,)), start=short.get(one.key, (one.start,))[0])
        if place
        else one
        for place, one in enumerate(calculator.inputs["plan"])
    )
    frozen = tmp_path / "calculator.html"
    frozen.write_text(whole_page("x", frozen_contents(calculator), "", "", main="calculator"))
    with serving(calculators((), "127.0.0.1", 0)) as server:
        for address in (server.address, frozen.as_uri()):
            page.goto(address)
            part = page.locator("section[data-part=plan]")
            part.locator("path[data-curve=DiLoCo]").wait_for()
            assert part.locator("path[data-curve=DiLoCo]").get_attribute("stroke") == "var(--c0)"
            rows, curve = part.locator("tbody").inner_text(), part.locator("path[data-curve=DiLoCo]").get_attribute("d")
            part.locator("[data-key=bandwidth]").press("ArrowRight")
            assert part.locator("tbody").inner_text() != rows
            part.locator("[data-key=share]").press("ArrowRight")
            until(lambda part=part, curve=curve: part.locator("path[data-curve=DiLoCo]").get_attribute("d") != curve)
            part.locator("[data-key=bandwidth]").press("Home")
            part.get_by_text(re.compile("It drops workers? [0-9, ]+, and the text")).wait_for()
            figures = page.locator("section[data-part=published]")
            figures.get_by_text("GASLoC, figure 9").click()
            figures.locator("path[data-curve=gasloc_1_peer]").wait_for()


def test_a_visitor_plays_and_the_page_shows_what_he_did(page: Any, tmp_path: Path) -> None:
    live = Live(0)
    with serving(live_page(live, 0)) as server, live.running():
        page.goto(server.address)
        page.locator(".map[data-round]").wait_for(timeout=120_000)
        live.act(b'{"actions": [["local_steps", 1]]}')
        page.select_option("select[aria-label=speed]", "4")
        page.get_by_role("button", name="kill worker 3").click()
        page.locator("[data-worker='3'][data-standing=dead]").wait_for()
        page.get_by_role("button", name="revive worker 3").wait_for()
        page.get_by_role("button", name="slow the uplink of worker 7").press("Enter")
        page.locator("[data-worker='7'][data-standing='slow uplink']").wait_for()
        page.locator("[data-method=gossip]").click()
        page.locator("[data-pair]").first.wait_for()
        page.locator("[data-do=cut]").click()
        page.locator(".map .cut").wait_for()
        page.locator("[data-method=diloco]").click()
        page.get_by_text("no side has as many").wait_for()  # four of eight are not more than half
        page.locator("[data-worker='3']").hover()
        page.mouse.down()
        drawn = page.locator(".map[data-round]").get_attribute("data-round")
        page.locator(f".map[data-round]:not([data-round='{drawn}'])").wait_for()
        page.mouse.up()  # a round between press and release costs no press
        page.locator("[data-worker='3'][data-standing=trains]").wait_for()
        assert page.locator("[data-worker='5'][data-standing=waits]").count() == 1
        momentum = page.locator("[data-do=momentum]")
        momentum.press("End")
        until(lambda: live.film and live.film.frames[-1]["momentum"] == 0.95)
        page.get_by_role("button", name="begin again").click()
        page.locator("[data-standing=trains]").nth(7).wait_for()
        until(lambda: page.locator("figure path[data-curve^='before: ']").count() > 0)
        film = live.film
    assert film is not None
    until(lambda: "does not answer" in page.locator("[role=status]").inner_text())


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_film_plays_by_itself_from_a_file_and_fits_a_telephone(browser: Any, tmp_path: Path, scheme: str) -> None:
    actions = [[Action("local_steps", 1)], [Action("kill", 2)], [Action("method", "gasloc"), Action("cut")], []]
    made = [*filmed(0, actions)]
    contents = film_contents(made[0][0], [frame for _, frame in made], live=False)
    (tmp_path / "film.html").write_text(whole_page("a film", contents, "", "", main="play"))
    page, found = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme=scheme), list[str]()
    page.on("console", lambda message: found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.goto((tmp_path / "film.html").as_uri())
    page.locator(".map[data-round='3']").wait_for()
    assert page.locator("[data-worker='2'][data-standing=dead]").count() == 1
    assert page.locator(".map .cut").count() == 1 and page.locator("[data-pair]").count() >= 2
    assert page.locator("[data-do=cut]").is_disabled() and page.locator("[data-method=gasloc]").is_disabled()
    page.locator("input[aria-label=round]").evaluate("one => { one.value = 0; one.dispatchEvent(new Event('input')); }")
    page.locator(".map[data-round='0']").wait_for()
    assert page.locator("[data-worker='2'][data-standing=trains]").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 400 and not found
    page.close()


def train(folder: Path, name: str) -> Command:
    words = ["train", folder / f"{name}.toml", "--local", 2, "--quiet", "--out", folder / "runs" / name]
    return Command(*words)


def summaries(page: Any) -> str:
    return "\n".join(page.locator("details[data-run] > summary").all_inner_texts())


def shown_rounds(page: Any, name: str) -> int:
    found = re.search(rf"{name}: \w+, (\d+) of", summaries(page))
    return int(found[1]) if found else 0


def until(wanted: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.2)
