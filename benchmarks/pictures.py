"""The pictures of the docs: gossip as it was recorded, and the pages of `gossamer watch` and `gossamer report`.

    make pictures

Trains 16 small workers for ten rounds in random pairs, and draws what their record holds into docs/pictures: gossip.svg, an
animation of SMIL that any browser plays without a script, and with Chromium and Playwright also phone.webp,
plan.webp and play.webp. Plays the film of docs/play.md into docs/film.jsonl. Some minutes.
"""

import math
import shutil
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from gossamer.record.folder import read_metrics
from gossamer.report.page.assets import whole_page
from gossamer.report.page.page import write_report
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.moment import moment_of
from gossamer.run.planning.calculator import frozen_contents, short_lists
from gossamer.run.play.actions import action_of
from gossamer.run.play.film import Film, film_contents, write_film
from gossamer.run.play.live import filmed
from gossamer.run.simulated.simulate import simulate

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WORKERS, ROUNDS = 16, 10
RUN = {
    "name": "gossip",
    "workers": WORKERS,
    "seed": 4,
    "rule": {"name": "gasloc"},
    "topology": {"name": "random", "peers": 1},
    "model": {"size": "0.2m"},
    "data": {"source": str(ROOT / "docs" / "adr"), "seq_len": 32, "batch_size": 4},
    "inner": {"lr": 3e-3, "warmup_steps": 20},
    "run": {"steps": 5 * ROUNDS, "local_steps": 5, "eval_every": 5, "eval_batches": 2, "threads": 1},
    "record": {"export": False},
    "network": {
        "home": {
            "uplink_bps": [*[2e7] * (WORKERS - 1), 2e6],
            "downlink_bps": 1e8,
            "latency_s": 0.03,
            "step_s": 0.2,
        }
    },
}
PLAYED = {
    8: [["slow", 7]],
    13: [["method", "gasloc"]],
    22: [["mend", 7]],
    30: [["kill", 3]],
    38: [["revive", 3]],
    44: [["cut"]],
    62: [["method", "diloco"]],
    70: [["heal"]],
    77: [["local_steps", 1]],
    90: [["local_steps", 40]],
    95: [["local_steps", 10], ["method", "gasloc"], ["momentum", 0.95]],
    120: [["momentum", 0.3]],
    136: [["method", "gossip"]],
    142: [["kill", 1], ["kill", 4], ["kill", 6]],
    150: [["revive", 1], ["revive", 4], ["revive", 6]],
    158: [["method", "diloco"]],
}
"""What is done before which rounds of the film of the site."""
PLAYED_ROUNDS = 166
SEEN = 57
"""The round of the film that the picture of its page shows."""
ROUND_S, REST_S = 1.6, 2.4
"""Seconds of a round in the animation, and of the rest at its end."""
SIZE = 360
STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #22262a; --pale: #ffffff; --full: #0072b2; --line: #c94f00; --word: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e8ea; --pale: #1c2024; --full: #56b4e9; --line: #ff8c42; --word: #14171a; }
}
circle { stroke: var(--ink); } text { fill: var(--ink); text-anchor: middle; } line { stroke: var(--line); stroke-width: 2.5; }
.full { fill: var(--full); } .pale { fill: var(--pale); } .on { fill: var(--word); }
.dot circle { fill: var(--line); stroke: none; }
"""


def reach(rounds: Sequence[Sequence[tuple[int, int]]], begin: int = 0) -> list[int | None]:
    """After how many rounds each worker holds something that worker `begin` had learned; None for never.

    >>> reach([[(0, 1), (2, 3)], [(1, 2), (0, 3)]])[:3]
    [0, 1, 2]
    """
    found: list[int | None] = [None] * (1 + max(max(pair) for pairs in rounds for pair in pairs))
    found[begin] = 0
    for done, pairs in enumerate(rounds, 1):
        known = [after is not None for after in found]
        for i, j in pairs:
            for one, other in ((i, j), (j, i)):
                if known[other] and found[one] is None:
                    found[one] = done
    return found


def animation(rounds: Sequence[Sequence[tuple[int, int]]], losses: Sequence[float]) -> str:
    """The rounds one after the other: who exchanges, and who has something of worker 0."""
    workers = 1 + max(max(pair) for pairs in rounds for pair in pairs)
    middle, radius, total_s = SIZE / 2, SIZE / 2 - 34, ROUND_S * len(rounds) + REST_S
    at = [
        (middle + radius * math.sin(2 * math.pi * i / workers), middle - radius * math.cos(2 * math.pi * i / workers))
        for i in range(workers)
    ]

    def moved(name: str, steps: Sequence[tuple[float, str]], mode: str = "linear") -> str:
        times, values = ";".join(f"{s / total_s:.4f}" for s, _ in steps), ";".join(value for _, value in steps)
        return (
            f'<animate attributeName="{name}" calcMode="{mode}" dur="{total_s:g}s" repeatCount="indefinite" '
            f'keyTimes="{times}" values="{values}"/>'
        )

    def sent(x: float, y: float, u: float, v: float, begin_s: float, sent_s: float) -> str:
        return (
            f'<circle r="5"><animateMotion dur="{total_s:g}s" repeatCount="indefinite" calcMode="linear" keyPoints="0;0;1;1" '
            f'keyTimes="0;{begin_s / total_s:.3f};{sent_s / total_s:.3f};1" path="M{x:.0f} {y:.0f}L{u:.0f} {v:.0f}"/></circle>'
        )

    def shown(begin_s: float, end_s: float) -> str:
        steps = [(0.0, "0"), (begin_s, "1"), (end_s, "0")] if begin_s else [(0.0, "1"), (end_s, "0")]
        return moved("opacity", steps, "discrete")

    parts = []
    for r, pairs in enumerate(rounds):
        begin_s, sent_s, end_s = ROUND_S * r, ROUND_S * (r + 0.75), ROUND_S * (r + 0.95)
        lines, dots = [], []
        for i, j in pairs:
            (x, y), (u, v) = at[i], at[j]
            lines.append(f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{u:.0f}" y2="{v:.0f}"/>')
            dots += [sent(*at[i], *at[j], begin_s, sent_s), sent(*at[j], *at[i], begin_s, sent_s)]
        parts.append(f'<g opacity="0">{"".join(lines)}{shown(begin_s, end_s)}</g>')
        parts.append(f'<g class="dot" opacity="0">{"".join(dots)}{shown(begin_s, sent_s)}</g>')
        words = f"round {r + 1}: training loss {losses[r]:.2f}"
        last_s = total_s if r + 1 == len(rounds) else begin_s + ROUND_S
        parts.append(f'<text x="{middle}" y="{SIZE + 16}" opacity="0">{words}{shown(begin_s, last_s)}</text>')
    for worker, after in enumerate(reach(rounds)):
        x, y = at[worker]
        parts.append(f'<circle class="pale" cx="{x:.1f}" cy="{y:.1f}" r="14"/>')
        appears = [(0.0, "0"), (ROUND_S * ((after or 0) - 0.2), "1")]
        full = None if after is None else moved("opacity", appears, "discrete") if after else ""
        hidden = ' opacity="0"' if full else ""
        if full is not None:
            parts.append(f'<circle class="full" cx="{x:.1f}" cy="{y:.1f}" r="14"{hidden}>{full}</circle>')
        parts.append(f'<text x="{x:.1f}" y="{y + 4.5:.1f}">{worker}</text>')
        if full is not None:
            word = f'<text class="on" x="{x:.1f}" y="{y + 4.5:.1f}"{hidden}>{worker}'
            parts.append(f"{word}{full}</text>")
    about = (
        f"{workers} workers exchange in random pairs. Filled: what worker 0 has learned is part of this worker's model."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE + 30}" width="{SIZE}" role="img">'
        f"<title>{about}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def photographs(report: Path, calculator: Path, film: Path) -> None:
    """Both pages as a browser shows them."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, page, width, height, scheme in (
            ("phone", report, 400, 1000, "dark"),
            ("plan", calculator, 1100, 830, "light"),
            ("play", film, 1180, 1010, "light"),
        ):
            opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            opened.goto(page.as_uri())
            opened.wait_for_timeout(1500)
            if name == "plan":
                opened.locator("[data-part=plan] [data-key=share]").press("ArrowRight")
                opened.wait_for_timeout(300)
            if name == "play":
                opened.locator("input[aria-label=round]").evaluate(
                    "(one, round) => { one.value = round; one.dispatchEvent(new Event('input')); }", SEEN
                )
                opened.wait_for_timeout(1000)
            image: Any = Image.open(BytesIO(opened.screenshot()))
            image.save(PICTURES / f"{name}.webp", quality=80, method=6)
        browser.close()


def film() -> Film:
    """Plays the film of the site, and writes it."""
    made = [*filmed(0, [[action_of(one) for one in PLAYED.get(round, ())] for round in range(PLAYED_ROUNDS)])]
    found = Film(made[0][0], [frame for _, frame in made])
    write_film(ROOT / "docs" / "film.jsonl", found)
    return found


def main() -> None:
    """Writes the pictures."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "gossip"
        simulate(RUN, folder)
        run = FollowedRun("gossip", folder.resolve())
        run.look()
        rounds = [[(i, j) for i, j, _ in moment_of(run, r)["pairs"] if i < j] for r in range(ROUNDS)]
        train = [line for line in read_metrics(folder) if line["kind"] == "train"]
        losses = [math.fsum(line["loss"] for line in train if line["round"] == r) / WORKERS for r in range(ROUNDS)]
        played = film()
        (PICTURES / "gossip.svg").write_text(animation(rounds, losses), encoding="utf-8")
        if shutil.which("chromium") is None:
            print("chromium is not installed; phone.webp, plan.webp and play.webp stay as they are")
            return
        report, calculator = Path(made) / "report.html", Path(made) / "calculator.html"
        write_report({"gossip": folder}, report, {}, command="make pictures")
        page = whole_page("What a network costs", frozen_contents(short_lists()), "", "", main="calculator")
        calculator.write_text(page, encoding="utf-8")
        shown = Path(made) / "film.html"
        shown.write_text(
            whole_page("a film", film_contents(*played, live=False), "", "", main="play"), encoding="utf-8"
        )
        photographs(report, calculator, shown)


if __name__ == "__main__":
    main()
