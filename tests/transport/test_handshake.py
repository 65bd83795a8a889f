"""The secret of a run, and how both ends of a connection prove that they know it."""

import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from gossamer.errors import ConfigError, PeerError, RefusedError
from gossamer.transport.contract import WIRE_VERSION
from gossamer.transport.secret import SECRET, code, folder_secret, read_secret
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import prove_to_dialler, prove_to_listener
from gossamer.transport.sockets.listener import ConnectionLimit, Refusals

GIVEN = "a secret that somebody else has made"


def proof_from(sock: socket.socket, change: Callable[[bytes], bytes]) -> bytes:
    """Sends a worker's proof to the server at the other end, changed on the way, and returns what the worker had sent."""
    near, far = socket.socketpair()
    with near, Channel(far, 5) as channel, ThreadPoolExecutor(1) as pool:
        side = pool.submit(prove_to_listener, channel, b"s", run=7, me=3, timeout_s=5)
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
    with Channel(ours, 5) as channel, theirs, ThreadPoolExecutor(1) as pool:
        side = pool.submit(prove_to_dialler, channel, b"s", run=7, timeout_s=5)
        act(theirs)
        theirs.shutdown(socket.SHUT_WR)
        return None if isinstance(side.exception(), PeerError) else side.result()


def flipped(proof: bytes, place: int) -> bytes:
    return proof[:place] + bytes([proof[place] ^ 1]) + proof[place + 1 :]


def test_a_proof_holds_for_one_connection_and_every_byte_of_it_counts():
    sent: list[bytes] = []
    assert taken(lambda sock: sent.append(proof_from(sock, bytes))) == (3, True)
    assert taken(lambda sock: sock.sendall(sent[0])) is None  # another time
    for place in range(len(sent[0])):
        assert taken(partial(proof_from, change=partial(flipped, place=place))) is None, place


VERSION = struct.Struct("<4sHxx")


@pytest.mark.parametrize("newer", ["listener", "dialler"])
def test_processes_of_two_versions_refuse_each_other_in_a_sentence_with_both_versions(newer: str):
    sentence = f"speaks version {WIRE_VERSION + 1} of the wire format and this process version {WIRE_VERSION}; install"
    ours, theirs = socket.socketpair()
    with Channel(ours, 5) as channel, theirs, ThreadPoolExecutor(1) as pool:
        if newer == "listener":
            side = pool.submit(prove_to_listener, channel, b"s", run=7, me=3, timeout_s=5)
            theirs.sendall(VERSION.pack(b"GOSS", WIRE_VERSION + 1) + bytes(24))
            assert VERSION.unpack(theirs.recv(1 << 10)) == (b"GOSS", WIRE_VERSION), "so that it can say both too"
        else:
            side = pool.submit(prove_to_dialler, channel, b"s", run=7, timeout_s=5)
            assert VERSION.unpack(theirs.recv(1 << 10)[:8]) == (b"GOSS", WIRE_VERSION)
            theirs.sendall(VERSION.pack(b"GOSS", WIRE_VERSION + 1))
        with pytest.raises(RefusedError, match=sentence):
            side.result()


OLD_PROOF, OLD_LETTER = struct.Struct("<I32s32s32s"), struct.Struct("<4sH")


@pytest.mark.parametrize("magic", [b"GOSS", b"GOSL"])
def test_a_worker_of_version_2_reads_the_version_of_the_process_that_refuses_it(magic: bytes):
    ours, theirs = socket.socketpair()
    with Channel(ours, 5) as channel, theirs, ThreadPoolExecutor(1) as pool:
        side = pool.submit(prove_to_dialler, channel, b"s", run=7, older=magic, timeout_s=5)
        about = theirs.recv(32, socket.MSG_WAITALL), bytes(32), (3).to_bytes(8, "little")
        of_run = code(b"s", b"run", *about, (7).to_bytes(8, "little"))
        theirs.sendall(
            OLD_PROOF.pack(3, bytes(32), of_run, code(b"s", b"worker", *about, of_run)) + b"its first letter"
        )
        assert theirs.recv(32, socket.MSG_WAITALL) == code(b"s", b"server", *about, of_run)
        assert OLD_LETTER.unpack_from(theirs.recv(72, socket.MSG_WAITALL)) == (magic, WIRE_VERSION)
        theirs.close()
        with pytest.raises(RefusedError, match=f"worker 3 speaks version 2 .* and this process version {WIRE_VERSION}"):
            side.result()


def test_a_server_of_version_2_reads_the_version_of_the_worker_that_refuses_it():
    ours, theirs = socket.socketpair()
    with Channel(ours, 5) as channel, theirs, ThreadPoolExecutor(1) as pool:
        side = pool.submit(prove_to_listener, channel, b"s", run=7, me=3, older=b"GOSS", timeout_s=5)
        hello = bytes(32)
        theirs.sendall(hello)
        worker, nonce, of_run, proof = OLD_PROOF.unpack(theirs.recv(OLD_PROOF.size, socket.MSG_WAITALL))
        about = hello, nonce, worker.to_bytes(8, "little")
        assert proof == code(b"s", b"worker", *about, of_run), "it believes the proof and reads on"
        theirs.sendall(code(b"s", b"server", *about, of_run))
        assert OLD_LETTER.unpack_from(theirs.recv(72, socket.MSG_WAITALL)) == (b"GOSS", WIRE_VERSION)
        theirs.close()
        with pytest.raises(RefusedError, match=f"speaks version 2 .* and this process version {WIRE_VERSION}"):
            side.result()


def test_another_program_at_the_port_is_not_taken_for_an_older_gossamer():
    ours, theirs = socket.socketpair()
    with Channel(ours, 5) as channel, theirs:
        theirs.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(
            RefusedError, match=r"it began with b'SSH-2\.0-OpenSSH_', .* another program, such as an SSH server"
        ):
            prove_to_listener(channel, b"s", run=7, me=3, timeout_s=5)


def test_the_oldest_of_too_many_connections_of_a_peer_gives_way_to_a_new_one():
    def gone(sock: socket.socket) -> bool:
        sock.setblocking(False)
        try:
            return sock.recv(1) == b""
        except BlockingIOError:
            return False

    pairs = [(Channel(inside, 5), outside) for inside, outside in (socket.socketpair() for _ in range(8))]
    doors = ConnectionLimit(per_peer=2, total=4)
    for (inside, _), address in zip(pairs[:7], "aabaccd", strict=True):
        doors.admit(inside, address)
    assert [gone(outside) for _, outside in pairs] == [True, True, False, False, True, False, False, False]
    doors.release(pairs[2][0])
    doors.close()
    doors.admit(pairs[7][0], "e")  # its handshake was in progress
    assert [gone(outside) for _, outside in pairs] == [True, True, False, True, True, True, True, True]
    for pair in pairs:
        for end in pair:
            end.close()


def test_refusals_are_counted_by_peer_and_kind_and_strangers_do_not_fill_the_counts():
    refusals = Refusals()
    for error in (RefusedError("bounds", "x"), RefusedError("bounds", "y"), PeerError("z"), OSError("w")):
        refusals.add("worker 3", error)
    assert refusals.counts == {"worker 3: bounds": 2, "worker 3: protocol": 1, "worker 3: lost": 1}
    for number in range(1000):
        refusals.add(f"10.0.{number // 256}.{number % 256}", RefusedError("secret", "x"))
    assert (
        len(refusals.counts) < 300 and sum(refusals.counts.values()) == 1004 and refusals.counts["others: secret"] > 700
    )


def test_a_server_started_by_hand_makes_a_secret_for_its_owner_alone_and_a_copy_for_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
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
    assert not caplog.records
    path.chmod(0o644)
    assert read_secret(path).encode() == made
    assert [one.getMessage() for one in caplog.records] == [
        f"others on this machine may read the secret '{path}' (mode 644); run chmod 600 {path}"
    ]
    path.write_text("guess\n")
    with pytest.raises(ConfigError, match="holds a secret of 5 characters and at least 32 are needed"):
        folder_secret(tmp_path / "run")
    monkeypatch.setenv(SECRET, GIVEN)
    assert folder_secret(tmp_path / "run") == GIVEN.encode()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "nowhere")
