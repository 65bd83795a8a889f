"""The server of a live page: on loopback by default, serving only the page, its figures and its requests.

Beyond loopback, and wherever a page may trigger actions, every path begins with a token that only the printed address
contains. A request with a foreign Host header is refused, against DNS rebinding. The token also prevents cross-site
requests that do not need to read the answer.
"""

import contextlib
import hmac
import http.server
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gossamer.errors import ConfigError, GossamerError
from gossamer.record.progress import echo
from gossamer.report.page.assets import ASSETS, shell
from gossamer.report.page.live import LiveRuns
from gossamer.report.reading.stored import FollowedStore

Answers = Mapping[str, Callable[[Mapping[str, str]], bytes]]
Deeds = Mapping[str, Callable[[bytes], bytes]]
_MOST_ASKED = 1 << 16
"""The most bytes of an action's request."""
_MOST_CONNECTIONS = 128
"""The most connections at once, each with a thread and a descriptor; the oldest gives way."""
_MOST_DIGITS = 18
"""The most digits of a number in a request; Python refuses to convert more than 4,300."""
_NONE: Deeds = {}
_LINGER_S = 60.0
"""How long the page of an ended run is served after the last request."""
_POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


class Page(http.server.ThreadingHTTPServer):
    """Serves one page of some runs, each request in its own thread.

    Args:
        answers: functions from a query to JSON, by name; empty for unknown items, and a GossamerError for an invalid
            query.
        host, port: where it listens; port 0 takes one that is free. On any host but loopback all addresses begin with a
            token.
        main: the script that puts the page together.
        deeds: actions on posted bytes, by name; a GossamerError is returned to the page.
    Raises: ConfigError for a port that is taken, or an address of another machine.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = _MOST_CONNECTIONS  # with the default of 5, a flood delays each request by seconds

    def __init__(self, answers: Answers, host: str, port: int, *, main: str = "page", deeds: Deeds = _NONE) -> None:
        self.answers, self.host, self.main, self.deeds = answers, host, main, deeds
        self.beyond = not _is_loopback(host)
        """Whether other machines may connect."""
        # A page of another site cannot read answers from loopback, but could send actions: it does not know the token.
        self.token = secrets.token_urlsafe(16) if self.beyond or deeds else ""
        self.names = {socket.gethostname().lower(), socket.getfqdn().lower()} if self.beyond else set[str]()
        """Host names of this machine; only localhost on loopback."""
        self.asked_s = time.monotonic()
        """The time of the last request."""
        self._open: dict[socket.socket, None] = {}
        """The connections, oldest first."""
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError, TypeError) as error:  # the last for a host that is no name
            raise ConfigError(
                f"port {port} of {host} cannot be opened ({getattr(error, 'strerror', None) or error}); choose another with "
                "--port, or --port 0 for any that is free"
            ) from None

    @property
    def port(self) -> int:
        """The port that it has."""
        return self.server_address[1]

    @property
    def address(self) -> str:
        """Where the page is."""
        host = f"[{self.host}]" if ":" in self.host else socket.gethostname() if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}/" + (f"{self.token}/" if self.token else "")

    def knows(self, host: str) -> bool:
        """Whether a Host header names this machine: loopback, the given address, and beyond loopback any address.

        Raises: ValueError for an invalid host, such as an open bracket.

        >>> page = Page.__new__(Page)
        >>> page.host, page.beyond = "127.0.0.1", False
        >>> [page.knows(host) for host in ("localhost:8250", "127.0.0.1", "[::1]:80", "evil.example:8250", "")]
        [True, True, True, False, False]
        """
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", self.host) or _is_loopback(name):
            return True
        return self.beyond and (_is_address(name) or name in self.names)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread; idle and slow connections keep nobody out."""
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that disconnects in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version = "gossamer"
    sys_version = ""
    timeout = 20

    def do_GET(self) -> None:
        if (asked := self._requested()) is None:
            return
        page, last, query = asked
        if last in ASSETS:
            return self._answer(ASSETS[last].kind, ASSETS[last].read())
        if not last:
            hint = "" if page.beyond else f"ssh -L {page.port}:127.0.0.1:{page.port} {socket.gethostname()}"
            return self._answer("text/html; charset=utf-8", shell(hint, main=page.main))
        if last not in page.answers:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        try:
            body = page.answers[last](query)
        except GossamerError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        if not body:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is no such round")
        self._answer("application/json", body)

    def do_POST(self) -> None:
        if not isinstance(self.server, Page) or not self.server.deeds:
            return self._refuse(HTTPStatus.NOT_IMPLEMENTED, "this server only answers")
        if (asked := self._requested()) is None:
            return
        page, last, _ = asked
        if last not in page.deeds:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        try:
            length = number_of(self.headers.get("Content-Length", ""), "Content-Length")
            if length > _MOST_ASKED:
                self.close_connection = True  # the rest is not read
                return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send at most {_MOST_ASKED} bytes")
            body = page.deeds[last](self.rfile.read(length))
        except GossamerError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        self._answer("application/json", body)

    def _requested(self) -> "tuple[Page, str, dict[str, str]] | None":
        """The requested name; None if it was refused."""
        page = self.server
        assert isinstance(page, Page)
        try:
            known, url = page.knows(self.headers.get("Host", "")), urlsplit(self.path)
        except ValueError:
            why = "the Host header or the address that is asked for cannot be read"
            return self._refuse(HTTPStatus.BAD_REQUEST, why)
        if not known:
            return self._refuse(HTTPStatus.FORBIDDEN, "this server answers to its own address only")
        first, _, last = url.path.removeprefix("/").rpartition("/")
        if not hmac.compare_digest(first.encode(), page.token.encode()):
            return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here; use the address that the command printed")
        page.asked_s = time.monotonic()
        return page, last, {key: values[-1] for key, values in parse_qs(url.query).items()}

    def _answer(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        # A sentence may quote input, and JSON strings may not be valid UTF-8.
        self._answer("text/plain; charset=utf-8", f"{why}\n".encode(errors="backslashreplace"), status)

    def log_message(self, format: str, *args: Any) -> None:
        """No log: a page polls once a second."""


def _answers(runs: LiveRuns) -> Answers:
    return {
        "data.json": lambda query: runs.data(query.get("have", "")),
        "round.json": lambda query: _moment(runs, query),
    }


def _moment(runs: LiveRuns, query: Mapping[str, str]) -> bytes:
    """A requested round; empty if there is no such run or round."""
    try:
        run, round = int(query["run"]), int(query["round"])
    except (KeyError, ValueError):
        return b""
    return runs.moment(run, round)


def number_of(text: str, name: str) -> int:
    """A whole number of an untrusted request. Raises: ConfigError for anything else.

    >>> number_of("12", "have")
    12
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ConfigError(f"{name} is {text!r:.40}; give a whole number of at most {_MOST_DIGITS} digits")
    return int(text)


def page_server(
    folders: Sequence[Path], host: str, port: int, command: str = "", stores: Sequence[FollowedStore] = ()
) -> Page:
    """A server of the runs in these folders and stores, not yet serving. Raises ConfigError, see `LiveRuns` and `Page`."""
    return Page(_answers(LiveRuns(folders, stores=stores, command=command)), host, port)


def show_page(address: str) -> bool:
    """Opens an address in a graphical browser; returns whether there is one.

    Not without a display, nor in a text-mode browser, which would take over the terminal.
    """
    import webbrowser

    screens = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    seen = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in screens)
    if not seen or not sys.stderr.isatty():
        return False
    with contextlib.suppress(webbrowser.Error):
        return webbrowser.open(address)
    return False


def serve_beside(folder: Path, *, show: bool = False) -> None:
    """Serves the page of another process's run, at low priority, on any free loopback port.

    With `show` it opens the page in a browser, if any. It ends when that process has ended, which closes our standard
    input, and the page was not requested for a minute.
    """
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)
    runs = LiveRuns([folder], command=f"gossamer watch {quote(str(folder))}", awaited=True)
    page = Page(_answers(runs), "127.0.0.1", 0)
    echo(f"watch: {page.address}", file=sys.stderr, flush=True)
    if show:  # the browser may be slow to start, or block
        threading.Thread(target=show_page, args=(page.address,), daemon=True).start()

    def end() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        while time.monotonic() - page.asked_s < _LINGER_S:
            time.sleep(1)
        page.shutdown()

    # Reading the parent's pipe blocks until the parent has ended; requests are answered in this thread.
    threading.Thread(target=end, daemon=True).start()
    page.serve_forever()


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
