"""Keepalive: the system asks the other end of an idle connection again and again whether it is there.

Routers and firewalls forget connections that have carried nothing for some minutes, and drop what comes later in silence. A local
phase may be longer than that. Needs no torch.
"""

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

EVERY_S = 30
"""The pause between two questions, or a quarter of the time after which a connection counts as lost if that is less."""
_MOST_QUESTIONS = 127  # Linux takes no more
_IDLE = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # Linux and macOS
_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_LAST_ACK = struct.Struct("56xI")
"""Of `struct tcp_info`: `tcpi_last_ack_recv`, the milliseconds since the last confirmation."""
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


def keep_alive(sock: socket.socket, lasts_s: float) -> None:
    """Has the system ask on this connection, or on all that a listening socket accepts.

    Args: `lasts_s` is after how long without an answer an idle connection is lost.
    """
    every_s = int(max(1, min(EVERY_S, lasts_s / 4)))
    questions = max(1, min(_MOST_QUESTIONS, round(lasts_s / every_s) - 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (_IDLE, every_s),
        (getattr(socket, "TCP_KEEPINTVL", None), every_s),
        (getattr(socket, "TCP_KEEPCNT", None), questions),
    ):
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.contextmanager
def keeping_alive(lasts_s: float) -> Iterator[None]:
    """Has the system ask on the connections that this process opens meanwhile, such as torch's, which are in C++.

    Those that other threads open at the same time are asked too, which harms nobody.
    """
    before = {inode for _, inode in _sockets()}
    yield
    for descriptor, inode in _sockets():
        if inode in before:
            continue
        # The options are of the connection, whichever descriptor they are set by; this one may be closed at any time.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                keep_alive(sock, lasts_s)


def expect_answers(sock: socket.socket, within_s: float | None) -> None:
    """How long the other end may confirm nothing of what was sent before the connection is lost, where the system can tell.

    Linux then counts no questions of `keep_alive`: they end an idle connection only where this is None, and what was sent is
    repeated for a quarter of an hour.
    """
    if _USER_TIMEOUT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, 0 if within_s is None else max(1, int(1000 * within_s)))


def has_unanswered(sock: socket.socket) -> bool:
    """Whether the other end has still to confirm something that was sent; also where the system does not tell."""
    import fcntl
    import termios

    try:
        raw = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return True
    return any(raw)


def silent_s(sock: socket.socket) -> float:
    """How long ago the other end's system has confirmed something or said that it takes no more; 0 where nobody tells.

    It does so while its process hangs, and does not once the way to it is cut.
    """
    return (
        0.0 if _INFO is None else _LAST_ACK.unpack(sock.getsockopt(socket.IPPROTO_TCP, _INFO, _LAST_ACK.size))[0] / 1e3
    )


def _sockets() -> list[tuple[int, int]]:
    """The descriptors of the sockets of this process, and their inodes."""
    found = list[tuple[int, int]]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself, or closed by another thread
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.append((int(name), status.st_ino))
    return found
