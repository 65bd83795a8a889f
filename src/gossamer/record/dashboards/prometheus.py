"""The Prometheus endpoint of a running process: `http://127.0.0.1:PORT/metrics`, with the extra `prometheus`.

Worker i serves `record.prometheus_port` + i; a process that writes for all workers serves the port itself. Anyone who
reaches the port can read it, so it is opened on the loopback interface unless `record.prometheus_host` names another.
"""

from collections.abc import Mapping
from typing import Any

from gossamer.errors import ConfigError, require
from gossamer.record.logs.seconds import RoundSeconds


class Exporter:
    """The figures of one process, served from a thread until it is closed.

    Args: `worker` is added to the port.
    Raises: MissingPackageError without the client library, ConfigError when the port cannot be opened.
    """

    def __init__(self, host: str, port: int, worker: int | None) -> None:
        client = require(
            "prometheus_client", "prometheus", f"record.prometheus_port = {port}", "set it to 0, which serves nothing"
        )
        registry = client.CollectorRegistry()
        self._alive = client.Gauge(
            "gossamer_alive_workers", "Workers that take part in this one's view.", registry=registry
        )
        self._round = client.Gauge("gossamer_round", "Rounds that are over.", registry=registry)
        self._loss = client.Gauge("gossamer_loss", "Last loss by kind, nats per token.", ["kind"], registry=registry)
        self._seconds = client.Counter(
            "gossamer_seconds", "Seconds of all rounds by what they were spent on.", ["kind"], registry=registry
        )
        self._exchanges = client.Counter(
            "gossamer_exchanges", "Exchanges of all rounds by what became of them.", ["outcome"], registry=registry
        )
        self._sent = client.Counter("gossamer_sent_bytes", "Bytes of all payloads sent.", registry=registry)
        worker_port = port + (worker or 0)
        try:
            self._server, self._thread = client.start_http_server(worker_port, addr=host, registry=registry)
        except (OSError, OverflowError, UnicodeError) as error:  # the last for a host such as a..b
            raise ConfigError(
                f"record.prometheus_port is {port}, and {host}:{worker_port} cannot be opened ({error}); choose another port, "
                "or 0 to serve nothing"
            ) from None

    def metrics(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Updates the figures from a line of metrics."""
        if isinstance(fields.get("loss"), int | float):
            self._loss.labels(kind).set(fields["loss"])
        self._round.set(fields["round"] + 1)

    def seconds(self, seconds: RoundSeconds) -> None:
        """Adds the seconds of a round."""
        for kind in ("compute", "transfer", "waiting", "other"):
            self._seconds.labels(kind).inc(getattr(seconds, f"{kind}_s"))

    def sent(self, entry: int, worker: int, sent_bytes: int) -> None:
        """Adds the bytes of an entry of a worker's trace."""
        self._sent.inc(sent_bytes)

    def exchanges(self, alive: int, made: int, missed: int, unsure: int) -> None:
        """Sets the participants of a round, and counts the outcomes of its exchanges."""
        self._alive.set(alive)
        for outcome, count in (("made", made), ("missed", missed), ("unsure", unsure)):
            self._exchanges.labels(outcome).inc(count)

    def close(self) -> None:
        """Serves no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
