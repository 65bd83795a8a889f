"""TCP keepalive: the system periodically probes the other end of an idle connection.

Routers and firewalls forget connections that were idle for some minutes, and silently drop later packets. A local
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
"""The interval between probes, or a quarter of the time after which a connection counts as lost if that is less."""
_MOST_QUESTIONS = 127  # the maximum on Linux
_IDLE = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # Linux and macOS
_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_LAST_ACK = struct.Struct("56xI")
"""Of `struct tcp_info`: `tcpi_last_ack_recv`, the milliseconds since the last confirmation."""
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


def keep_alive(sock: socket.socket, lasts_s: float) -> None:
    """Enables keepalive on this connection, or on all that a listening socket accepts.

    Args: `lasts_s` is the time without an answer after which an idle connection is lost.
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
    """Enables keepalive on connections that this process opens inside the context, such as torch's, which are in C++.

    Connections opened by other threads at the same time are included, which is harmless.
    """
    before = {inode for _, inode in _sockets()}
    yield
    for descriptor, inode in _sockets():
        if inode in before:
            continue
        # Options belong to the connection, not to the descriptor, which may be closed at any time.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                keep_alive(sock, lasts_s)


def expect_answers(sock: socket.socket, within_s: float | None) -> None:
    """Sets how long sent data may stay unconfirmed before the connection is lost, where the system supports it.

    Linux then ignores the probe count of `keep_alive`: probes end an idle connection only if this is None, and then
    sent data is retransmitted for a quarter of an hour.
    """
    if _USER_TIMEOUT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, 0 if within_s is None else max(1, int(1000 * within_s)))


def has_unanswered(sock: socket.socket) -> bool:
    """Whether sent data is still unconfirmed; True also where the system does not report it."""
    import fcntl
    import termios

    try:
        raw = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return True
    return any(raw)


def silent_s(sock: socket.socket) -> float:
    """Seconds since the other end's system last acknowledged anything, zero-window included; 0 where unknown.

    It acknowledges while its process hangs, and not once the path is cut.
    """
    return (
        0.0 if _INFO is None else _LAST_ACK.unpack(sock.getsockopt(socket.IPPROTO_TCP, _INFO, _LAST_ACK.size))[0] / 1e3
    )


def _sockets() -> list[tuple[int, int]]:
    """The descriptors of the sockets of this process, and their inodes."""
    sockets = list[tuple[int, int]]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor, or one closed by another thread
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets.append((int(name), status.st_ino))
    return sockets
