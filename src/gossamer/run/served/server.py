"""The process of a server: threads transport the frames of its workers' connections, and one session decides and
computes.

Every push is absorbed when it arrives, whatever its staleness. With one worker the result is bitwise equal to a
simulation's; with more, `gossamer.run.replay.served` recomputes them from the record of arrivals.

A worker may die, hang or arrive late: its connection ends, the other workers take its unfinished steps, and on its
return it receives the server's model and continues with its own last checkpoint of the inner optimizer. That may be
older than the server's, which is written first, as neither waits for the other.

The server may die too. A resumed one continues from its newest snapshot, and its workers, which retry for
`run.timeout_s`, rejoin. It grants every phase again, so phases in progress at its death, and pushes absorbed after its
snapshot, are repeated and count once.
"""

import logging
from pathlib import Path
from shlex import quote

import torch

from gossamer.record.locks import locked
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.inputs import note_inputs
from gossamer.run.bookkeeping.resume import Resume, resumed
from gossamer.run.bookkeeping.which_round import alone, begin_or_resume
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import run_key, run_settings, use_recorded_threads, use_threads
from gossamer.run.served.connections import ConnectionServer, listener_at
from gossamer.run.served.letters import WorkerLetters
from gossamer.run.served.session import open_session
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import task_of
from gossamer.stop_signals import leaving
from gossamer.transport.keys import keys_for
from gossamer.transport.secret import SECRET_FILE, environment_secret, folder_secret
from gossamer.transport.sockets.connection import Endpoint

log = logging.getLogger("gossamer")


def serve(run: ResolvedRun, folder: Path, host: str, port: int, *, resume: Resume = False) -> None:
    """Serves workers until together they have taken all inner steps of the run.

    Workers authenticate with the secret of the run, from GOSSAMER_SECRET, or else from the run folder, where a new one
    is written if there is none.

    Args: `resume` continues from the newest sound checkpoint of the server; "auto" starts if there is none.
    Raises: ConfigError, CheckpointError; PeerError when no worker is left and none comes within `run.timeout_s`;
        KeyboardInterrupt on a stop signal, once the current round is over and saved, or no worker is connected.
    Cost: the rule's state; one message and one starting point per worker in flight.
    """
    use_threads(run)
    if resume:
        use_recorded_threads(run, folder, run.workers)
    with locked(folder, run.workers):
        _serve(run, folder, host, port, resume)


def _serve(run: ResolvedRun, folder: Path, host: str, port: int, resume: Resume) -> None:
    task, store = task_of(run), Store(run, folder)
    probe, past = Probe(run, task, torch.device("cpu")), resumed(run, folder, resume)
    start = begin_or_resume(store, task, past, alone(store, past, [run.workers]))
    if start.round == run.rounds:
        return
    start.go_on([run.workers])
    keys = keys_for(run.peers, run.workers)
    secret = folder_secret(folder, make=True) if keys is None else b""
    if keys is None and not environment_secret():
        log.warning(
            "the workers need the secret of the run: copy '%s' into the run folder of each machine",
            folder / SECRET_FILE,
        )
    key, settings = run_key(run, task), run_settings(run, task)
    with (
        leaving("the server is asked to save and to end after its round") as asked,
        open_session(run, folder, probe, start.cut) as session,
        listener_at(host, port) as listener,
    ):
        note_inputs(run, task, folder, run.workers)
        endpoint = Endpoint(listener, key, secret, run.loop.timeout_s, keys=keys)
        letters = WorkerLetters(probe, run)
        server = ConnectionServer(endpoint, letters, settings)
        try:
            server.open()
            session.records.asked = asked.is_set
            server.run(session, session.records.now_s, asked.is_set)
            if not session.core.is_finished:
                raise KeyboardInterrupt(
                    f"stopped without a worker that could end the round in progress, and {session.progress}; go on from the "
                    f"newest checkpoint with --resume {quote(str(folder))}, or auto where there is none"
                )
            letters.compare_batches()  # also if some were too slow to join before the others had taken all steps
        finally:
            server.close()
