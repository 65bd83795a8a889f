"""The process of a region's server, below a global one: it serves the workers of its region, and reports what they learn.

Its workers go on while a report is under way. They wait only where the global server has granted no more steps: it grants them
with its answers, for the pushes up to the next report and a local phase of each worker.

When it loses the global server, or is started again, it begins from the global model with new momenta, as a worker of one server
begins anew from its model. Its workers then come again, and train again what it had not reported.
"""

import logging
import queue
import threading
from functools import partial
from pathlib import Path

import torch

from gossamer.errors import ConfigError, GossamerError, LostConnectionError
from gossamer.record.whole_files import worker_suffix
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.config.run_file import RunConfig
from gossamer.run.config.user_parts import own_parts
from gossamer.run.served.protocol import settled_server, use_threads
from gossamer.run.served.records import open_files
from gossamer.run.served.region_protocol import RegionLetter, read_answer, read_welcome, regions_of
from gossamer.run.served.server import member_of, with_workers
from gossamer.run.served.session import Reply, ServerSession, region_session
from gossamer.run.worker.task import task_of
from gossamer.transport.contract import Turn
from gossamer.transport.sockets.hub import Hub, listener_at
from gossamer.transport.sockets.stream import HELLO, Patience, Stream, connect

__all__ = ["serve_region"]

log = logging.getLogger("gossamer")


def serve_region(
    config: RunConfig, folder: Path, here: tuple[str, int], above: tuple[str, int], index: int, *, resume: Resume = False
) -> None:  # fmt: skip
    """Serves the workers of one region at the address `here`, below the global server at `above`, until the steps are spent.

    Args: `resume` lets it write into a folder in which it was before.
    Raises: ConfigError, DataError; PeerError when the global server is gone for `run.timeout_s`, or nobody is left to train.
    Cost: the state of the region's rule; one message and one starting point per worker in flight, and a report.
    """
    use_threads(config)
    parts = own_parts(config)
    settled = settled_server(config, parts)
    regions = regions_of(settled.regions)
    if settled.rule.regions is None or not 0 <= index < len(regions):
        count = 0 if settled.rule.regions is None else len(regions)
        raise ConfigError(
            f"--region got {index}, and server '{settled.rule.name}' has {count} regions in this run, numbered from 0; give the "
            "number of one"
        )
    region, n, task = regions[index], config.workers, task_of(config, parts)
    probe = Probe(config, task, torch.device("cpu"))
    member = member_of(config, settled, task, parts, folder, n + 1 + index)
    patience = Patience(config.run.timeout_s)
    with listener_at(*here) as listener:
        manner = with_workers(probe, config, settled.codec, region.members)
        hub = Hub(listener, member, manner, config.run.timeout_s)
        try:
            hub.open()
            while True:
                stream = connect(
                    *above, secret=member.secret, run=member.key, me=member.me, server=n, timeout_s=patience.left_s,
                    settings=member.settings,
                )  # fmt: skip
                try:
                    stream.wait_at_most(config.run.timeout_s)
                    stream.send(Turn(0, 0, HELLO), [torch.zeros(1, dtype=torch.int64)])
                    welcome = read_welcome(stream, len(region.members), probe.x.numel())
                    begin_s, start = welcome.elapsed_us / 1e6, config.rounds if welcome.again else 0 if resume else None
                    with open_files(config, folder, start, owner=member.me, name=worker_suffix(member.me)) as files:
                        session = region_session(config, settled, files, probe, region, welcome, begin_s)
                        return _serve(hub, session, stream, begin_s)
                except LostConnectionError as error:
                    log.warning(
                        "%s; region %d tries again for %g s, and begins anew from the global model",
                        error, index, config.run.timeout_s,
                    )  # fmt: skip
                    resume = "auto"
                    hub.hang_up()
                    patience.lost(stream, error)
                finally:
                    stream.close()
        finally:
            hub.close()


def _serve(hub: Hub, session: ServerSession, stream: Stream, begin_s: float) -> None:
    """Runs a session, while a thread carries its letters to the global server and the answers back."""
    letters: queue.SimpleQueue[RegionLetter] = queue.SimpleQueue()

    def carry() -> None:
        number, done = 0, False
        try:
            while not done:
                letter = letters.get()
                number, done = number + 1, letter.done
                letter.send(stream, number)
                start_s = hub.now()
                answer = read_answer(stream, number, letter)
                hub.act_later(partial(session.answer, answer, start_s))
        except GossamerError as error:
            hub.act_later(partial(_fail, error))

    def pass_on() -> None:
        while session.letters:
            letters.put(session.letters.pop(0))

    threading.Thread(target=carry, daemon=True).start()
    hub.run(session, begin_s, pass_on)


def _fail(error: GossamerError, now_s: float) -> list[Reply]:
    """Ends the session for what its link to the global server met."""
    raise error
