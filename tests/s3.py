"""As much of S3 as a store of a run asks for, on loopback: conditional puts, gets, lists in pages, and removals."""

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest


class S3:
    """Objects by bucket and key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests = 0
        self.page = 3
        """Most keys of one answer to a list, where S3 has 1,000."""
        self.fails_every = 0
        """Every so many requests one is answered with 503, half of them after it was done."""
        self.lock = threading.Lock()

    def answer(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes]:
        """Status and body of an answer."""
        match method:
            case "PUT" if headers.get("if-none-match") == "*" and path in self.objects:
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
            case "PUT":
                self.objects[path] = body
                return 200, b""
            case "POST" if "delete" in query:
                keys = re.findall("<Key>(.*?)</Key>", body.decode())
                for key in keys:
                    self.objects.pop(f"{path}/{key}", None)
                rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                return 200, f"<DeleteResult>{rows}</DeleteResult>".encode()
            case _ if "list-type" in query:
                prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
                after = max(after, query.get("continuation-token", [""])[0])
                every = sorted(name.split("/", 1)[1] for name in self.objects)
                keys = [key for key in every if key.startswith(prefix) and key > after]
                more = len(keys) > self.page
                keys = keys[: self.page]
                token = f"<NextContinuationToken>{escape(keys[-1])}</NextContinuationToken>" if more else ""
                rows = "".join(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[f'{path}/{key}'])}</Size><ETag>e</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                    for key in keys
                )
                cut = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
                return 200, f"<ListBucketResult>{cut}{rows}</ListBucketResult>".encode()
            case _ if path in self.objects:
                return 200, self.objects[path]
            case _:
                return 404, b"<Error><Code>NoSuchKey</Code></Error>"


@contextlib.contextmanager
def s3(environment: pytest.MonkeyPatch) -> Iterator[S3]:
    """S3 while this lasts, with its address and credentials in the environment."""
    pytest.importorskip("obstore")
    store = S3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def _any(self) -> None:
            split = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            with store.lock:
                store.requests += 1
                fails = store.fails_every and store.requests % store.fails_every == 0
                status, found = 503, b"<Error><Code>SlowDown</Code></Error>"
                if not fails or store.requests % (2 * store.fails_every) == 0:
                    status, found = store.answer(
                        self.command,
                        unquote(split.path).strip("/"),
                        parse_qs(split.query, keep_blank_values=True),
                        headers,
                        body,
                    )
                if fails:
                    status, found = 503, b"<Error><Code>SlowDown</Code></Error>"
            self.send_response(status)
            for name, value in (("Content-Length", str(len(found))), ("ETag", "e")):
                self.send_header(name, value)
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(found)

        do_GET = do_PUT = do_POST = _any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    given = {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "REGION": "z", "ALLOW_HTTP": "true"}
    for name, value in {**given, "ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}.items():
        environment.setenv(f"AWS_{name}", value)
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
