"""The page of `gossamer play`: what it does when it is asked, and all that it refuses."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_watch import answers_each_in_a_sentence, get, serving

from gossamer.cli.play import film_page, live_page
from gossamer.errors import ConfigError
from gossamer.report.page.web import Page
from gossamer.run.play.actions import Action
from gossamer.run.play.film import Film, film_lines
from gossamer.run.play.live import Live, filmed


def until(wanted: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)
    return found


def post(page: Page, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def playing() -> Iterator[tuple[Page, Live]]:
    live = Live(0)
    with serving(live_page(live, 0)) as page, live.running():
        yield page, live


def asked(page: Page, film: str = "", have: int = 0) -> dict[str, Any]:
    status, body, _ = get(page, f"/{page.token}/play.json?film={film}&have={have}")
    assert status == 200
    return json.loads(body)


@pytest.mark.full
def test_what_a_page_asks_for_is_done_before_the_next_round_and_only_new_rounds_are_sent(
    playing: tuple[Page, Live],
) -> None:
    page, _ = playing
    do = f"/{page.token}/act.json"
    assert post(page, do, b'{"actions": [["local_steps", 1], ["kill", 3]]}') == (200, "{}")
    now = asked(page)
    assert 3 not in now["conditions"]["alive"], "it is shown at once"
    name = now["film"]

    def killed() -> list[dict[str, Any]]:
        return [frame for frame in asked(page, name).get("frames", ()) if ["kill", 3] in frame["actions"]]

    (frame,) = until(killed)
    assert 3 not in frame["there"] and frame["told"]
    assert all(one["round"] > frame["round"] for one in asked(page, name, frame["round"] + 1)["frames"])
    whole = asked(page, "another")["contents"]
    assert whole["live"] and whole["frames"][0]["round"] == 0
    post(page, do, b'{"playing": false}')
    assert not asked(page, name)["playing"]
    stopped = len(asked(page, name)["frames"])
    post(page, do, b'{"step": true}')
    until(lambda: len(asked(page, name)["frames"]) > stopped)
    assert post(page, do, b'{"speed": 4}')[0] == 200 and asked(page, name)["speed"] == 4
    assert post(page, do, b'{"again": 7}')[0] == 200
    fresh = until(lambda: (now := asked(page, name)) and now.get("contents") and now["contents"]["frames"] and now)
    assert fresh["film"] != name and fresh["contents"]["head"]["seed"] == 7
    assert fresh["conditions"]["alive"] == [*range(8)], "a new film begins with everybody"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"[]",
        b"1",
        b"{}",
        b'{"actions": 1}',
        b'{"actions": [["kill", 9]]}',
        b'{"actions": [["kill", 1, 2]]}',
        b'{"speed": 1000}',
        b'{"speed": "1"}',
        b'{"playing": 1}',
        b'{"again": -1}',
        b'{"again": true}',
        b'{"again": 4294967296}',
        b'{"step": false}',
        b'{"actions": [], "speed": 2}',
        b"\xff",
        b"[" * 30000,
        b'{"actions": [' + b'["cut"],' * 70 + b'["cut"]]}',
    ],
)
def test_anything_else_is_refused_in_a_sentence_and_changes_nothing(playing: tuple[Page, Live], body: bytes) -> None:
    page, live = playing
    with pytest.raises(ConfigError):
        live.act(body)
    status, sentence = post(page, f"/{page.token}/act.json", body)
    assert status == 400 and sentence.count("\n") == 1 and len(sentence) < 400


def test_odd_requests_are_answered_and_leave_the_terminal_alone(
    playing: tuple[Page, Live], capsys: pytest.CaptureFixture[str]
) -> None:
    answers_each_in_a_sentence(playing[0], capsys)


def test_only_a_client_with_the_secret_address_gets_an_answer_even_on_loopback(playing: tuple[Page, Live]) -> None:
    page, _ = playing
    assert len(page.token) > 20 and page.address.endswith(f"/{page.token}/")
    kill = b'{"actions": [["kill", 1]]}'
    assert [post(page, path, kill)[0] for path in ("/act.json", "/x/act.json", f"/{page.token}x/act.json")] == [404] * 3
    assert post(page, f"/{page.token}/act.json", kill, Host="evil.example")[0] == 403
    assert post(page, f"/{page.token}/act.json", kill, Host="10.0.0.7")[0] == 403, "it is no address of loopback"
    assert [post(page, f"/{page.token}/{name}", kill)[0] for name in ("", "play.json", "other.json")] == [404] * 3
    assert post(page, f"/{page.token}/act.json", b" " * (1 << 17))[0] == 413
    assert [get(page, path)[0] for path in ("/", "/play.json", "/play.js", "/film.jsonl")] == [404] * 4
    assert [get(page, f"/{page.token}/{name}")[0] for name in ("", "play.js", "page.css")] == [200] * 3
    assert get(page, f"/{page.token}/act.json")[0] == 404, "looking does nothing"


@pytest.fixture(scope="module")
def film() -> Film:
    made = [*filmed(3, [[Action("local_steps", 1)], []])]
    return Film(made[0][0], [frame for _, frame in made])


def test_the_page_of_a_film_shows_it_and_does_nothing(film: Film) -> None:
    with serving(film_page(film, 0)) as page:
        contents = json.loads(get(page, "/play.json")[1])["contents"]
        assert not contents["live"] and [one["round"] for one in contents["frames"]] == [0, 1]
        assert get(page, "/film.jsonl")[1] == film_lines(film)
        assert post(page, "/act.json", b'{"actions": [["cut"]]}')[0] == 501
