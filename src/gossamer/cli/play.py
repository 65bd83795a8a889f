"""`gossamer play`: a page on which a visitor drives the simulator."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import ConfigError
from gossamer.record.progress import echo

if TYPE_CHECKING:
    from gossamer.report.page.web import Page
    from gossamer.run.play.film import Film
    from gossamer.run.play.live import Live

PORT = 8251


def command(*, seed: int = 0, record: Path | None = None, film: Path | None = None, port: int = PORT) -> None:
    """Serves a page on which you play with eight workers while they train, until Ctrl-C: kill one, slow a link, cut the network.

    They are the workers of gossamer simulate, with a small model and the source of Python's standard library, so nothing is
    downloaded. A film is the seed and what you did before each round: the same film has the same losses.

    Args:
        seed: of the parameters, the order of the text and the pairs (default: 0)
        record: write the film into this file at the end
        film: show the film of this file, without training; with --record, train its rounds again with the same actions, and
            write what comes of them
        port: port of the page (default: 8251); 0 takes one that is free
    """
    from gossamer.record.whole_files import make_folder
    from gossamer.run.play.film import Film, read_film, write_film

    if not 0 <= seed < 2**31:
        raise ConfigError(f"--seed got {seed}; give a number from 0 to {2**31 - 1}")
    if record is not None:  # before anybody plays for the film that it would hold
        make_folder(record.parent)
        if record.is_dir():
            raise ConfigError(f"--record got '{record}', which is a folder; name a file in it")
    if film is not None and record is not None:
        again(read_film(film), record)
    elif film is not None:
        with film_page(read_film(film), port) as page:
            _serve(page)
    else:
        from gossamer.run.play.live import Live

        live = Live(seed)
        with live_page(live, port) as page, live.running():
            _serve(page)
        if record is not None and (made := live.film) is not None:
            write_film(record, Film(*made))
            echo(f"film: {record}")


def again(film: "Film", record: Path) -> None:
    """Trains the rounds of a film again, and records the result."""
    from gossamer.cli.output import working
    from gossamer.run.play.film import Film, write_film
    from gossamer.run.play.live import filmed

    with working(f"training {len(film.frames)} rounds again"):
        made = [*filmed(film.head["seed"], film.actions)]
    repeated = Film(made[0][0], [frame for _, frame in made])
    write_film(record, repeated)
    frames = zip(repeated.frames, film.frames, strict=True)
    differs = next((one["round"] for one, other in frames if one != other), None)
    same = "the same to the last digit" if differs is None else f"other from round {differs} on"
    echo(f"film: {record}, {len(made)} rounds, {same} as in the film that was given")


def live_page(live: "Live", port: int) -> "Page":
    """A server of a film that is made while a visitor plays, not yet serving."""
    from gossamer.report.page.web import Page, number_of

    def data(query: Mapping[str, str]) -> bytes:
        return live.data(query.get("film", ""), number_of(query.get("have", "0"), "have"))

    answers = {"play.json": data, "film.jsonl": lambda query: live.lines()}
    return Page(answers, "127.0.0.1", port, main="play", deeds={"act.json": live.act})


def film_page(film: "Film", port: int) -> "Page":
    """A server of a film that is shown, not yet serving."""
    import json

    from gossamer.report.page.web import Page
    from gossamer.run.play.film import film_contents, film_lines

    contents = json.dumps({"contents": film_contents(film.head, film.frames, live=False)}).encode()
    answers = {"play.json": lambda query: contents, "film.jsonl": lambda query: film_lines(film)}
    return Page(answers, "127.0.0.1", port, main="play")


def _serve(page: "Page") -> None:
    """Prints the address of a page, opens it where a browser is, and serves it until Ctrl-C."""
    import threading

    from gossamer.report.page.web import show_page

    echo(f"play: {page.address}", flush=True)
    # The browser may be slow to start, and asks for the page that only this thread serves.
    threading.Thread(target=show_page, args=(page.address,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        page.serve_forever()
