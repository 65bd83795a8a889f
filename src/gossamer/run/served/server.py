"""The process of a server: threads carry the frames of its workers' connections, and one session decides and computes.

Every push is absorbed when it arrives, whatever its staleness. With one worker the bits equal a simulation's; with
more, `gossamer.run.replay.served` recomputes them from the record of arrivals.

A worker may die, hang or come late: its connection ends, the other workers take its unfinished steps, and when it returns
it receives the server's model and continues with its own last checkpoint of the inner optimizer. That may be older than the
server's, which is written first, as neither waits for the other.

The server may die too. One that is resumed goes on from its newest snapshot, and its workers, which try again for
`run.timeout_s`, join it as workers that return do. It grants every phase anew, so what they were training when it died, and what
it absorbed after its snapshot, is trained again and counts once.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.codecs import Codec, fitted
from gossamer.codecs.message import decode, payload_like
from gossamer.errors import TransportError
from gossamer.finite import all_finite
from gossamer.layout import arrange, layout_of
from gossamer.record import checkpoint
from gossamer.record.progress import say
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.resume import Resume, history
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.served.protocol import OWNED, run_key, run_settings, use_threads
from gossamer.run.served.session import Pushed, Reply, open_session
from gossamer.run.worker.task import task_of
from gossamer.transport.contract import Turn
from gossamer.transport.secret import SECRET_FILE, environment_secret, folder_secret
from gossamer.transport.sockets.hub import Conversation, Credentials, Hub, Manner, listener_at
from gossamer.transport.sockets.stream import PUSH, START, Stream
from gossamer.tree import leaves, refill

__all__ = ["serve"]

log = logging.getLogger("gossamer")


def serve(config: ResolvedRun, folder: Path, host: str, port: int, *, resume: Resume = False) -> None:
    """Serves workers until together they have taken all inner steps of the run.

    Workers prove that they know the secret of the run, which is in GOSSAMER_SECRET, or else in the run folder, where a new one is
    written if there is none.

    Args: `resume` goes on from the newest sound checkpoint of the server; "auto" starts where there is none.
    Raises: ConfigError, CheckpointError; PeerError when no worker is left and none comes within `run.timeout_s`.
    Cost: the rule's state; one message and one starting point per worker in flight.
    """
    use_threads(config)
    task = task_of(config)
    probe, start = Probe(config, task, torch.device("cpu")), _first_round(config, folder, resume)
    if start == config.rounds:
        return
    secret = folder_secret(folder, make=True)
    if not environment_secret():
        log.warning(
            "the workers need the secret of the run: copy '%s' into the run folder of each machine",
            folder / SECRET_FILE,
        )
    key, settings = run_key(config, task), run_settings(config, task)
    with open_session(config, folder, probe, start) as session, listener_at(host, port) as listener:
        member, manner = Credentials(config.workers, secret, key, settings), _manner(probe, config)
        hub = Hub(listener, member, manner, config.run.timeout_s)
        try:
            hub.open()
            hub.run(session, session.records.now_s)
        finally:
            hub.close()


def _first_round(config: ResolvedRun, folder: Path, resume: Resume) -> int | None:
    """The rounds that are over where a server begins; None for a new run, and that of the end is said."""
    if not resume:
        return None
    store, past, me = folder / "checkpoints", history(config, folder), config.workers
    start = past.newest(
        folder, [checkpoint.rounds(store, me, past.lineage)], auto=resume == "auto", owners=[me],
        faults=lambda round: [checkpoint.fault(store, round, me, past.lineage)],
    )  # fmt: skip
    if start == config.rounds:
        say(checkpoint.ended(folder, start))
    else:
        past.go_on(folder, start)
    return start


def _manner(probe: Probe, config: ResolvedRun) -> Manner:
    """How workers are talked with: each starting point is answered with a push."""
    layout, spans = arrange(layout_of(probe.model), *config.fragments)
    codecs = [fitted(config.method.codec, layout.slice(*span)) for span in spans]

    def talk(connection: Conversation[Reply], heard: Callable[[Any], None], now: Callable[[], float]) -> None:
        stream, number = connection.stream, 0
        while True:
            reply = connection.next()
            for p, (x, updates) in reply.send.starts.items():
                terms = torch.tensor(reply.terms._replace(updates=updates), dtype=torch.int64)
                stream.send(Turn(number, p, START), [terms, x])
            if not reply.terms.go:
                return
            number = reply.terms.phases
            heard(_push(stream, codecs, spans, number, now()))

    return Manner(config.workers, OWNED, talk)


def _push(
    stream: Stream, codecs: Sequence[Codec], spans: Sequence[tuple[int, int]], number: int, start_s: float
) -> Pushed:  # fmt: skip
    """The push that follows the phase of this number."""
    p = number % len(spans)
    like = torch.empty(spans[p][1] - spans[p][0])
    frames = stream.receive(Turn(number, p, PUSH), leaves(payload_like(codecs[p], like)))
    message = _decoded(codecs[p], frames, like, stream.name)
    return Pushed(p, message, sum(frame.numel() * frame.element_size() for frame in frames), start_s)


def _decoded(codec: Codec, frames: Sequence[Tensor], like: Tensor, name: str) -> Tensor:
    """The pseudo-gradient in these frames. Raises TransportError when there is none."""
    try:
        message = decode(codec, refill(payload_like(codec, like), frames), like)
    except (RuntimeError, ValueError, IndexError) as error:
        raise TransportError(
            f"{name} pushed a payload that codec '{codec.name}' cannot decode ({str(error).splitlines()[0]:.100})"
        ) from None
    if not all_finite(message):
        raise TransportError(f"{name} pushed {message.numel()} numbers that are not all finite; lower inner.lr")
    return message
