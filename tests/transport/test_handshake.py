"""The secret of a run, and how both ends of a connection prove that they know it."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from gossamer.errors import ConfigError, PeerError
from gossamer.transport.secret import SECRET, folder_secret, read_secret
from gossamer.transport.sockets.handshake import HalfOpen, prove_to_server, prove_to_worker

GIVEN = "a secret that somebody else has made"


def proof_from(sock: socket.socket, change: Callable[[bytes], bytes]) -> bytes:
    """Sends a worker's proof to the server at the other end, changed on the way, and returns what the worker had sent."""
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as pool:
        side = pool.submit(prove_to_server, far, b"s", run=7, me=3, timeout_s=5)
        near.sendall(sock.recv(32))
        proof = near.recv(1 << 10)
        sock.sendall(change(proof))
        if change(proof) == proof:
            near.sendall(sock.recv(32))
            assert side.result() is True
        else:
            near.shutdown(socket.SHUT_WR)
            assert isinstance(side.exception(), PeerError)
    return proof


def taken(act: Callable[[socket.socket], object]) -> tuple[int, bool] | None:
    """Whom a server takes the other end for that acts so; None for a stranger."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        side = pool.submit(prove_to_worker, ours, b"s", run=7, timeout_s=5)
        act(theirs)
        theirs.shutdown(socket.SHUT_WR)
        return None if isinstance(side.exception(), PeerError) else side.result()


def flipped(proof: bytes, place: int) -> bytes:
    return proof[:place] + bytes([proof[place] ^ 1]) + proof[place + 1 :]


def test_a_proof_holds_for_one_connection_and_every_byte_of_it_counts():
    said: list[bytes] = []
    assert taken(lambda sock: said.append(proof_from(sock, bytes))) == (3, True)
    assert taken(lambda sock: sock.sendall(said[0])) is None  # another time
    for place in range(len(said[0])):
        assert taken(partial(proof_from, change=partial(flipped, place=place))) is None, place


def test_old_half_open_connections_give_way_to_new_ones_of_their_address():
    def gone(sock: socket.socket) -> bool:
        sock.setblocking(False)
        try:
            return sock.recv(1) == b""
        except BlockingIOError:
            return False

    pairs = [socket.socketpair() for _ in range(7)]
    doors = HalfOpen(per_address=2, total=4)
    for (inside, _), address in zip(pairs, "aabaccd", strict=True):
        doors.admit(inside, address)
    assert [gone(outside) for _, outside in pairs] == [True, True, False, False, True, False, False]
    doors.settle(pairs[2][0])
    doors.close()
    assert [gone(outside) for _, outside in pairs] == [True, True, False, True, True, True, True]
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_server_started_by_hand_makes_a_secret_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(ConfigError, match="does not know the secret of the run"):
        folder_secret(tmp_path / "worker")
    made = folder_secret(tmp_path / "run", make=True)
    path = tmp_path / "run" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600 and len(made) == 64
    assert (
        folder_secret(tmp_path / "run")
        == folder_secret(tmp_path / "run", make=True)
        == made
        == read_secret(path).encode()
    )
    path.write_text("guess\n")
    with pytest.raises(ConfigError, match="holds a secret of 5 characters and at least 32 are needed"):
        folder_secret(tmp_path / "run")
    monkeypatch.setenv(SECRET, GIVEN)
    assert folder_secret(tmp_path / "run") == GIVEN.encode()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "nowhere")
