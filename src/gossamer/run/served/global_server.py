"""The process of a global server: it serves the servers of regions (`gossamer.run.served.region`), and nobody waits for another.

A region may be lost or come late, as a worker of one server may: what it has not reported is trained again, and when it returns
it begins from the global model. A global server that is resumed goes on from its newest snapshot, and so do regions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.config.run_file import RunConfig
from gossamer.run.served.global_session import GlobalReply, GlobalSession, LetterHeard, open_global
from gossamer.run.served.region_protocol import Answer, RegionLetter, read_letter, read_report
from gossamer.run.served.server import serve_with
from gossamer.transport.sockets.hub import Conversation, Manner

__all__ = ["serve_regions"]


def serve_regions(config: RunConfig, folder: Path, host: str, port: int, *, resume: Resume = False) -> None:
    """Serves the servers of all regions until together they have reported all inner steps of the run.

    Args: `resume` as in `gossamer.run.served.server.serve`, which is for runs with one server.
    Raises: ConfigError, CheckpointError; PeerError when no region is left and none comes within `run.timeout_s`.
    Cost: the state of the global rule; one report and one model per region in flight.
    """
    serve_with(config, folder, (host, port), open_global, lambda session, *_: _with_regions(session), resume=resume)


def _with_regions(session: GlobalSession) -> Manner:
    """How regions are talked with: each letter has an answer."""
    first, spans = session.config.workers + 1, session.core.spans
    members = [len(one.members) for one in session.regions]

    def talk(connection: Conversation[GlobalReply], heard: Callable[[Any], None], now: Callable[[], float]) -> None:
        stream, number, letter = connection.stream, 0, RegionLetter(-1, 0, 0, False, ())
        while True:
            reply = connection.next()
            if isinstance(reply.content, Answer):
                reply.content.send(stream, number, letter.fragment)
            else:
                reply.content.send(stream)
            if reply.done:
                return
            number += 1
            letter = read_letter(stream, number, members[connection.peer], len(spans))
            start_s = now()
            heard(LetterHeard(read_report(stream, number, letter, spans), start_s))

    return Manner("region", range(first, first + len(session.regions)), first, 1, talk)
