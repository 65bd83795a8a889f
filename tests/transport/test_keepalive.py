"""Connections are kept alive: the system asks on each that is idle, and one that is cut in silence is lost in time."""

import os
import socket
import threading
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from torch.distributed import HashStore

from commands import until
from gossamer.transport.processes.backend import gloo_group, hang_up
from gossamer.transport.processes.store import Entries, listening, reached_store, served_store
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.keepalive import keep_alive
from gossamer.transport.sockets.listener import Arrival, Listener, Refusals

TIMEOUT_S, SECRET, RUN = 300.0, b"known to the workers of this test only", 7
linux = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="reads options that Linux has")


@contextmanager
def connections(but: Container[int] = ()) -> Iterator[dict[int, socket.socket]]:
    """The TCP connections of this process, by their inodes, but for some."""
    with ExitStack() as open_:
        found = dict[int, socket.socket]()
        for name in os.listdir("/proc/self/fd"):
            try:
                sock = open_.enter_context(socket.socket(fileno=os.dup(int(name))))
            except OSError:  # no socket
                continue
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if sock.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                found[os.fstat(sock.fileno()).st_ino] = sock
        yield {inode: sock for inode, sock in found.items() if inode not in but}


@linux
def test_both_ends_of_every_connection_of_a_run_are_kept_alive() -> None:
    with ExitStack() as open_:

        def channel() -> None:
            came = list[Arrival]()
            arrived = threading.Event()
            server = socket.create_server(("127.0.0.1", 0))
            listener = Listener(server, SECRET, RUN, lambda one: (came.append(one), arrived.set(), None)[2], Refusals())
            open_.callback(listener.close)
            open_.enter_context(dial(listener.address, SECRET, run=RUN, me=1, timeout_s=TIMEOUT_S))
            assert arrived.wait(60)
            came[0].channel.wait_at_most(TIMEOUT_S)
            open_.enter_context(came[0].channel)

        kept = list[object]()

        def store() -> None:
            kept.append(served_store(listening("127.0.0.1", 0), TIMEOUT_S))
            kept.append(reached_store("127.0.0.1", kept[0].port, TIMEOUT_S))  # type: ignore[attr-defined]
            Entries(kept[1], b"").set("here", "")  # type: ignore[arg-type]

        def group() -> None:
            common = HashStore()
            with ThreadPoolExecutor(2) as pool:
                made = [pool.submit(gloo_group, common, i, 2, TIMEOUT_S, "127.0.0.1") for i in range(2)]
                kept.extend(one.result(60) for one in made)

        for make, ends in ((channel, 2), (store, 4), (group, 2)):
            with connections() as before:
                known = {*before}
            make()
            with connections(known) as found:
                assert len(found) >= ends, (make.__name__, found)
                for sock in found.values():
                    options = [
                        sock.getsockopt(level, option)
                        for level, option in (
                            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                        )
                    ]
                    lasts_s = TIMEOUT_S / 2 if make is channel else TIMEOUT_S
                    assert options == [1, 30, 30, lasts_s / 30 - 1], (make.__name__, sock)
        for one in kept[-2:]:
            hang_up(one)  # type: ignore[arg-type]


@linux
@pytest.mark.parametrize(("lasts_s", "options"), [(0.5, (1, 1, 1)), (30.0, (7, 7, 3)), (86_400.0, (30, 30, 127))])
def test_a_short_timeout_asks_sooner_and_a_long_one_stays_in_bounds(lasts_s: float, options: tuple[int, ...]) -> None:
    with socket.socket() as sock:
        keep_alive(sock, lasts_s)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert tuple(sock.getsockopt(socket.IPPROTO_TCP, name) for name in names) == options


@linux
def test_keepalive_decides_alone_once_all_that_was_sent_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with Channel(near, 40.0) as channel, far:
        patience = lambda: near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)  # noqa: E731
        assert patience() == 40_000, "with it set, Linux would not count the questions of keepalive"
        assert channel.settle() and patience() == 0
        channel.write(b"a push")
        assert patience() == 40_000
        assert far.recv(6) == b"a push"
        until(channel.settle)  # what was read may be confirmed a moment later
        assert patience() == 0
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        near.setblocking(False)
        try:
            while near.send(bytes(1 << 16)):
                pass
        except BlockingIOError:
            pass
        near.setblocking(True)
        channel.wait_at_most(40.0)
        assert not channel.settle() and patience() == 40_000, "the other end takes nothing"
        channel._waits_since_s -= 30.0
        assert not channel.settle(), "its process hangs, and its system answers"
        monkeypatch.setattr("gossamer.transport.sockets.channel.silent_s", lambda sock: 30.0)
        with pytest.raises(ConnectionError, match="its machine has confirmed nothing for 30 s"):
            channel.settle()
