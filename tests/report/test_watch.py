"""The server of a live page: what it shows, and all that it refuses."""

import contextlib
import http.client
import importlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from test_follow import RUN_TOML, write_round

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.record.folder import RunFolder, note_evaluation
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.report.page import web
from gossamer.report.page.assets import ASSETS
from gossamer.report.page.contents import groups_of, row_of_view
from gossamer.report.page.live import LiveRuns
from gossamer.report.page.web import Page, page_server, show_page
from gossamer.report.verdict import verdict
from tiny import document


@contextmanager
def serving(page: Page) -> Iterator[Page]:
    with page:
        thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield page
        finally:
            page.shutdown()
            thread.join()


def served(*folders: Path, host: str = "127.0.0.1") -> AbstractContextManager[Page]:
    return serving(page_server(folders, host, 0))


def get(page: Page, path: str, *, host: str | None = None, verb: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    try:
        connection.putrequest(verb, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{page.port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def contents(page: Page, have: str = "") -> dict[str, Any]:
    return json.loads(get(page, f"/data.json?have={have}")[1])


def test_a_page_shows_what_its_runs_write_and_only_what_is_new_is_sent_again(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run, served(tmp_path / "a") as page:
        write_round(run, 0)
        first = contents(page)
        assert first["live"] and first["runs"][0]["done"] == 1 and first["runs"][0]["standings"] == ["training"] * 2
        assert first["table"]["rows"][0][1] == "2.5000" and first["axis"] == "step"
        again = contents(page, first["revision"])
        assert set(again) == {"revision", "pulse", "notes"}
        write_round(run, 1)
        assert contents(page, first["revision"])["runs"][0]["done"] == 2
        moment = json.loads(get(page, "/round.json?run=0&round=1")[1])
        assert moment["pairs"] == [[0, 1, 1000], [1, 0, 1000]]


def test_what_an_evaluation_afterwards_notes_beside_its_figures_is_no_curve(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        write_round(run, 0)
        write_round(run, 1)
    (tmp_path / "a" / "metrics.jsonl").write_text(
        "".join(
            line
            for line in (tmp_path / "a" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            if json.loads(line)["kind"] != "eval"
        ),
        encoding="utf-8",
    )
    note_evaluation(tmp_path / "a", round=1, step=4, loss=2.5, disagreement=0.1)
    with served(tmp_path / "a") as page:
        assert (
            {"loss", "disagreement"}
            <= set(contents(page)["runs"][0]["evals"]["y"])
            <= {
                "loss",
                "disagreement",
                "worst_loss",
            }
        )


def test_a_run_that_has_seconds_and_no_validation_yet_is_shown(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run, served(tmp_path) as page:
        assert contents(page)["runs"][0]["done"] == 0
        run.log_seconds(RoundSeconds(0, 0, None, 1.0, 0.25, {1: 0.5}, 0.0, 1.75))
        (row,) = contents(page)["table"]["rows"]
        assert row[-1] == "1.75 s (57 %)" and row[1] == "–"


def test_a_folder_of_runs_shows_those_that_begin_later(tmp_path: Path) -> None:
    with served(tmp_path) as page:
        empty = contents(page)
        assert empty["runs"] == [] and "holds no run so far" in empty["notes"][0]
        for name in ("a", "b"):
            with RunFolder(tmp_path / name, RUN_TOML) as run:
                write_round(run, 0)
        shown = contents(page, empty["revision"])
        assert [view["label"] for view in shown["runs"]] == ["a", "b"] and shown["notes"] == []


def test_nothing_but_the_page_and_its_figures_is_served(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run:
        write_round(run, 0)
    (tmp_path / "a" / "secret").write_text("very secret")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with served(tmp_path) as page:
        assert [view["label"] for view in contents(page)["runs"]] == ["x"], "a link is no run of this folder"
        for path in (
            "/a/secret",
            "/secret",
            "/../secret",
            "/%2e%2e/secret",
            "//secret",
            "/page.css/..",
            "/a/run.toml",
            "/x/page.css",
            "/round.json",
            "/round.json?run=1&round=0",
            "/round.json?run=-1&round=0",
            "/round.json?run=0&round=-1",
            "/round.json?run=x&round=0",
            f"/{tmp_path}/a/secret",
        ):
            status, body, _ = get(page, path)
            assert status == 404 and b"secret" not in body.replace(b"secret token", b""), path
        for verb in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert get(page, "/", verb=verb)[0] == 501
        for path in ("/", "/data.json", *(f"/{name}" for name in ASSETS)):
            status, _, headers = get(page, path)
            assert status == 200 and headers["X-Content-Type-Options"] == "nosniff"
            assert "default-src 'none'" in headers["Content-Security-Policy"]


def raw_answer(page: Page, request: bytes) -> bytes:
    """What comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as sock:
        with contextlib.suppress(OSError):  # it may have answered before all of it had come
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):
                answer += data
    return bytes(answer)


def odd_requests(page: Page, count: int = 200) -> Iterator[bytes]:
    """Requests that are nearly right, the same each time: parts that no number, host or address can be."""
    chance, digits = random.Random(20261128), b"9" * 5000
    odd = (
        b"",
        b"[",
        b"]",
        b"[::1",
        b"127.0.0.1:[",
        b"\xe2\x84\x80",
        digits,
        b"-1",
        b"1e400",
        b"0x10",
        b"\xc2\xb2",
        b"\xff\xfe",
        b"%",
        b"%5B",
        b"//[",
        b"a:b@[",
        b"?have=" + digits,
        b"#[",
        b"\x00",
        b"\x1b]0;x\x07",
        b"nan",
        b" " * 300,
        b"1_0",
        b"+1",
        b'{"actions": [["\\ud800"]]}',
        b'{"speed": ' + digits + b"}",
        b"[" * 985 + b"]" * 985,
        b'{"again": 1e999}',
    )
    names = [b"data.json", b"round.json", b"play.json", b"act.json", b"film.jsonl", b"", b"page.css"]
    for _ in range(count):
        host = chance.choice((f"127.0.0.1:{page.port}".encode(), chance.choice(odd)))
        token = chance.choice((page.token.encode() + b"/", page.token.encode() + b"/", chance.choice(odd)))
        path = b"/" + token + chance.choice(names) + chance.choice((b"", b"?have=%s&run=%s&round=%s&film=%s"))
        while b"%s" in path:
            path = path.replace(b"%s", chance.choice((b"0", chance.choice(odd))), 1)
        body = chance.choice(odd)
        length = chance.choice((str(len(body)).encode(), str(len(body)).encode(), chance.choice(odd)))
        version = chance.choice((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.1", b"", b"HTTP/9", b"HTTP/" + digits))
        verb = chance.choice((b"GET", b"POST", b"POST", chance.choice(odd)))
        head = verb + b" " + path + b" " + version
        yield head + b"\r\nHost: " + host + b"\r\nContent-Length: " + length + b"\r\n\r\n" + body


def answers_each_in_a_sentence(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """Each odd request is answered, none with a server error, and the terminal of the serving process shows nothing."""
    own = f"127.0.0.1:{page.port}".encode()
    base, digits = f"/{page.token}/".encode() if page.token else b"/", b"9" * 5000
    for request in (
        b"GET " + base + b" HTTP/1.1\r\nHost: [\r\n\r\n",
        b"GET " + base + b" HTTP/1.1\r\nHost: [::1\r\n\r\n",
        b"GET http://[" + base + b" HTTP/1.1\r\nHost: " + own + b"\r\n\r\n",
        *(
            [
                b"GET " + base + b"play.json?have=" + digits + b" HTTP/1.1\r\nHost: " + own + b"\r\n\r\n",
                b"POST " + base + b"act.json HTTP/1.1\r\nHost: " + own + b"\r\nContent-Length: " + digits + b"\r\n\r\n",
            ]
            if page.deeds
            else []
        ),
    ):
        assert b" 400 " in raw_answer(page, request).splitlines()[0], request[:80]
    for request in odd_requests(page):
        answer = raw_answer(page, request)
        assert answer, request[:200]
        if answer.startswith(b"HTTP/"):
            assert answer.split()[1] in (b"200", b"400", b"403", b"404", b"413", b"414", b"431", b"501", b"505"), (
                request[:200]
            )
    assert capsys.readouterr().err == ""


def test_odd_requests_are_answered_and_leave_the_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML) as run, served(tmp_path / "a") as page:
        write_round(run, 0)
        answers_each_in_a_sentence(page, capsys)


def test_a_request_to_a_foreign_name_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as page:
        assert [get(page, "/", host=host)[0] for host in ("evil.example", f"evil.example:{page.port}", "")] == [403] * 3
        assert [get(page, "/", host=host)[0] for host in ("localhost", f"localhost:{page.port}", "[::1]:1")] == [
            200
        ] * 3


def test_beyond_loopback_everything_needs_the_token(tmp_path: Path) -> None:
    with served(tmp_path, host="0.0.0.0") as page:
        assert len(page.token) > 20 and page.address.endswith(f"/{page.token}/")
        assert [get(page, path)[0] for path in ("/", "/data.json", f"/{page.token}x/", "/page.css")] == [404] * 4
        assert [get(page, f"/{page.token}/{name}")[0] for name in ("", "data.json", "page.css")] == [200] * 3
        assert get(page, f"/{page.token}/", host="evil.example")[0] == 403
        assert get(page, f"/{page.token}/", host="10.0.0.7")[0] == 200


def test_idle_connections_are_bounded_and_do_not_block_others(tmp_path: Path) -> None:
    with served(tmp_path) as page, contextlib.ExitStack() as open_:
        before, most = threading.active_count(), web._MOST_CONNECTIONS
        for _ in range(2 * most):
            idle = open_.enter_context(socket.create_connection(("127.0.0.1", page.port)))
            idle.sendall(b"G")
        assert get(page, "/")[0] == 200
        deadline = time.monotonic() + 30
        while threading.active_count() > before + most + 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert threading.active_count() <= before + most + 1 and len(page._open) <= most


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, part in (
            ([str(tmp_path), "--port", port], f"port {port} of 127.0.0.1 cannot be opened"),
            ([str(tmp_path), "--port", "70000"], "cannot be opened"),
            ([str(tmp_path), "--host", "203.0.113.1"], "cannot be opened"),
            ([str(tmp_path), "--host", "ü..b"], "of ü..b cannot be opened"),
            ([str(tmp_path / "nowhere")], "is no folder"),
            ([str(tmp_path / "file")], "is no folder"),
        ):
            assert main(["watch", *words]) == 2
            sentence = capsys.readouterr().err
            assert part in sentence and sentence.count("\n") == 1, sentence
    with pytest.raises(ConfigError, match="is no folder"):
        LiveRuns([tmp_path / "file"], awaited=True)


def test_the_page_of_a_run_ends_when_the_run_has_ended_and_no_browser_is_open(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; import gossamer.report.page.web as web\n"
    program += "web._LINGER_S = 0.0; web.serve_beside(Path(sys.argv[1]))"
    words = [sys.executable, "-c", program, str(tmp_path / "later")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as beside:
        assert beside.stderr is not None and beside.stdin is not None
        assert beside.stderr.readline().startswith("watch: http://127.0.0.1:")
        assert os.getpriority(os.PRIO_PROCESS, beside.pid) >= 10, "training goes first"
        assert beside.poll() is None and not (tmp_path / "later").exists(), "it only reads"
        beside.stdin.close()
        assert beside.wait(60) == 0


@pytest.mark.parametrize(
    ("platform", "screen", "terminal", "opens"),
    [
        ("linux", "DISPLAY", True, True),
        ("linux", "BROWSER", True, True),
        ("linux", "", True, False),
        ("linux", "DISPLAY", False, False),
        ("darwin", "", True, True),
        ("win32", "", False, False),
    ],
)
def test_a_page_opens_by_itself_where_somebody_sits_before_a_browser(
    monkeypatch: pytest.MonkeyPatch, platform: str, screen: str, terminal: bool, opens: bool
) -> None:
    import webbrowser

    opened = list[str]()
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if screen:
        monkeypatch.setenv(screen, "x")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    assert show_page("http://127.0.0.1:1/") == opens and opened == ["http://127.0.0.1:1/"] * opens

    def none(address: str) -> bool:
        raise webbrowser.Error("no browser is here")

    monkeypatch.setattr(webbrowser, "open", none)
    assert not show_page("http://127.0.0.1:1/")


def test_watch_starts_the_page_of_the_run_folder_and_lets_it_go_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gossamer.cli.watch as verb

    (tmp_path / "run.toml").write_text(tomli_w.dumps(document(workers=2, run__steps=2, model__layers=1)))
    monkeypatch.setattr(verb, "_BESIDE", "import sys; open(sys.argv[1] + '.watched', 'w'); sys.stdin.read()")
    folder = tmp_path / "run"
    assert main(["simulate", str(tmp_path / "run.toml"), "--out", str(folder), "--quiet", "--watch"]) == 0
    assert verb._PAGES.pop().wait(60) == 0, "our end of its standard input is closed"
    assert Path(f"{folder}.watched").exists()
    assert main(["simulate", str(tmp_path / "run.toml"), "--out", str(tmp_path / "other"), "--quiet"]) == 0
    assert not verb._PAGES


def test_the_benchmark_of_the_page_writes_records_that_it_reads_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("watch")
    folder = benchmark.written(tmp_path / "a", 4, 3, 5)
    benchmark.add(folder, 4, [3])
    (shown,) = json.loads(LiveRuns([folder]).data(""))["runs"]
    assert (shown["done"], shown["rounds"], shown["complaints"], shown["progress"]) == (4, 5, [], 1.0)
    assert shown["evals"]["x"]["round"] == [1, 2, 3, 4] and shown["spent"]["home"]["kinds"][0] == [4.0, 2.0, 1.0, 0.0]
    page = benchmark.page_of([benchmark.Measured(f"x{k}", 1.0, k, "s") for k in (0, 1)], " --pairs 2", 0.5)
    assert "| x0 | 1 s | 0 s | no |\n| x1 | 1 s | 1 s | yes |" in page and "watch.py --pairs 2" in page


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({"a": [2.0, 2.1, 2.05], "b": [2.3, 2.4, 2.36]}, "a ended with a lower validation loss than b"),
        ({"a": [2.0, 2.3], "b": [2.1, 2.25]}, "No difference is shown between a"),
        ({"a": [2.0], "b": [2.5]}, "one seed each, so this says nothing"),
        (
            {"a": [2.0, 2.1, 2.05], "b": [2.3, 2.4, 2.36], "c": [3.0, 3.1, 3.2]},
            "of 3 methods; to pick them after the fact",
        ),
        ({"a": [2.0, 2.1], "b": [None, float("nan")]}, "1 more ended without a finite loss"),
        ({"a": [2.0, 2.1], "b": [None, None]}, "1 more has no validation of the mean model."),
        ({"a": [None], "b": [float("nan")]}, "No run ended with a finite validation loss"),
        ({"a": [None]}, "No run has a validation of its mean model; gossamer evaluate"),
        ({"a": [2.0, math.nan, 2.1], "b": [2.3, 2.4, 2.36]}, "with some of their seeds, and cannot lead"),
        ({"a": [2.0, math.nan], "b": [math.nan, 2.4]}, "No method ended with a finite validation loss with all"),
        (
            {"a": [3.0, 3.01, 1.0], "b": [2.9, 2.91]},
            "b ended with a lower validation loss than a: 2.9050 against 3.0050",
        ),
    ],
)
def test_the_first_sentence_claims_what_the_seeds_show_and_no_more(
    losses: dict[str, list[float | None]], words: str
) -> None:
    rows = [{"method": f"{m} seed={seed}", "loss": loss} for m, own in losses.items() for seed, loss in enumerate(own)]
    sentence = verdict(rows)
    assert words in sentence
    assert ("lower validation loss than" in sentence) == ("lower" in words or "3 methods" in words)
    assert ("for which this comparison did not search" in sentence) == ("95 % interval" in sentence)
    assert "claimed" in verdict(rows, running=True) or "has a validation loss yet" in verdict(rows, running=True)


def test_the_headline_of_a_live_page_compares_at_equal_time_as_a_report_does() -> None:
    def view(method: str, x: list[float], y: list[float | None]) -> dict[str, Any]:
        evals = {"x": {"round": [0, 1, 2], "time:lan": x}, "y": {"loss": y}}
        return {"label": method, "state": "finished", "evals": evals, "ends_s": {"lan": x[-1]}}

    views = [view("a", [0, 100, 200], [5.0, 2.0, 1.0]), view("b", [0, 60, 120], [5.0, 3.0, 2.5])]
    rows = [row_of_view(one) for one in views]
    assert rows[0]["loss_at_s"] == {"lan": [(100, 2.0), (200, 1.0)]}, "without the initial value"
    ahead = (
        "b ends first on lan, after 2 min 0 s at 2.500; the last validation of a by then is 2.000: at equal time a is"
    )
    assert f"{ahead} ahead with this seed." in verdict(rows)
    assert "at equal time" not in verdict(rows, running=True)
    assert "at equal time" not in verdict([{**row, "loss_at_s": {}} for row in rows])


def test_seeds_that_were_evaluated_at_other_rounds_have_no_common_curve() -> None:
    views = [
        {"label": f"a seed={s}", "evals": {"x": {"round": [1, 2 + s]}, "y": {"loss": [2.0, 1.0]}}} for s in range(2)
    ]
    assert groups_of(views)[0]["mean"] is None
