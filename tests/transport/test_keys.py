"""Keys: who is listed takes part, as the worker that it may be; on the path nobody reads a word or changes one unnoticed."""

import base64
import contextlib
import errno
import itertools
import os
import re
import secrets
import shlex
import socket
import ssl
import stat
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path

import pytest
import torch

from commands import free_port, until
from gossamer.cli import main
from gossamer.errors import ConfigError, PeerError, RefusedError
from gossamer.library.parts import keys_of_sites
from gossamer.run.config.run_file import dump
from gossamer.settings.schema import build
from gossamer.transport.contract import WIRE_VERSION, Ticket
from gossamer.transport.elastic.core import Outcome
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry, membership_update
from gossamer.transport.elastic.newcomer import Applicant, Handover, ask, host
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.keys import Keys, Peer, certificate_of, keys_for, new_key, read_peers
from gossamer.transport.processes import keyed_store
from gossamer.transport.processes.keyed_store import KeyedStore
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.header import NEWCOMER, WATCHER, LetterKind
from gossamer.transport.sockets.letter import Letter, body_of, encode, receive_letter, send_letter
from gossamer.transport.sockets.listener import Arrival, Listener, Refusals
from gossamer.transport.sockets.tls import TlsSocket
from tiny import limits, tiny

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

RUN, TIMEOUT_S = 77, 60.0
NAMES = ("berlin", "paris", "rome")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: new_key(name, folder / f"{name}.pem") for name in (*NAMES, "stranger")}


def peers_of(files: dict[str, Path], *names: str, **more: Peer) -> dict[str, Peer]:
    return {name: Peer(certificate=base64.b64encode(certificate_of(files[name])).decode()) for name in names} | more


def peers_toml(listed: Mapping[str, Mapping[str, str]]) -> str:
    return "".join(f'[peers.{name}]\ncertificate = "{one["certificate"]}"\n' for name, one in listed.items())


@pytest.fixture(scope="module")
def keys(files: dict[str, Path]) -> list[Keys]:
    """Those of three machines, each with one worker."""
    return [Keys(files[name], peers_of(files, *NAMES), 3) for name in NAMES]


class Opened:
    """A listener with keys, what came to it, and what it refused."""

    def __init__(self, keys: Keys | None) -> None:
        self.came: list[Arrival] = []
        self.refusals = Refusals()
        self._there = threading.Semaphore(0)
        sock = socket.create_server(("127.0.0.1", 0))
        self.listener = Listener(sock, b"a secret", RUN, self._arrived, self.refusals, keys=keys)
        self.port = sock.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def _arrived(self, arrival: Arrival) -> None:
        self.came.append(arrival)
        self._there.release()

    def arrival(self) -> Arrival:
        assert self._there.acquire(timeout=TIMEOUT_S)
        return self.came[-1]

    def close(self) -> None:
        self.listener.close()
        self.listener.hang_up()
        for arrival in self.came:
            arrival.channel.close()


@pytest.fixture
def opened(keys: list[Keys]) -> Iterator[Opened]:
    with contextlib.closing(Opened(keys[0])) as made:
        yield made


class Relay:
    """Somebody on the path: keeps what he sees, and may change bytes that go from the dialler to the listener."""

    def __init__(
        self, port: int, change: Callable[[int, bytes], bytes] = lambda _, data: data, delay_s: float = 0.0
    ) -> None:
        self._sock, self._port, self._change = socket.create_server(("127.0.0.1", 0)), port, change
        self._delay_s = delay_s
        """Of what goes either way."""
        self.seen, self.forth = bytearray(), bytearray()
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self._carried: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._carried += (near := self._sock.accept()[0],)
                self._carried += (far := socket.create_connection(("127.0.0.1", self._port)),)
                for ends in ((near, far, True), (far, near, False)):
                    self._threads.append(threading.Thread(target=self._carry, args=ends, daemon=True))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket, forth: bool) -> None:
        place = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                if forth:
                    self.forth += data
                time.sleep(self._delay_s)
                sink.sendall(self._change(place, data) if forth else data)
                place += len(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # A thread within `accept` does not wake when another closes its socket, and keeps the sockets of its last connection,
        # which would be missed as unclosed in whichever later test a signal ends it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(TIMEOUT_S)  # from here on no thread and no socket is added
        for sock in self._carried:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(TIMEOUT_S)
        for sock in (self._sock, *self._carried):
            sock.close()


def test_a_key_is_for_its_owner_alone_and_its_certificate_contains_no_name(
    files: dict[str, Path], tmp_path: Path
) -> None:
    assert stat.S_IMODE(files["berlin"].stat().st_mode) == 0o600
    raw = certificate_of(files["berlin"])
    assert b"berlin" not in raw
    with pytest.raises(ConfigError, match=r"exists, and a key is never written over"):
        new_key("berlin", files["berlin"])
    open_to_all = tmp_path / "open.pem"
    open_to_all.write_bytes(files["berlin"].read_bytes())
    open_to_all.chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 644\); run chmod 600"):
        certificate_of(open_to_all)


def test_a_key_that_could_not_be_written_leaves_no_file_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, mode: str) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        with pytest.raises(ConfigError, match=r"could not be written to .* \(No space left on device\)"):
            new_key("berlin", tmp_path / "berlin.pem")
    assert new_key("berlin", tmp_path / "berlin.pem").exists()


def test_a_command_that_a_sentence_gives_can_be_typed_for_a_key_of_any_name(tmp_path: Path) -> None:
    path = new_key("o'neil", tmp_path / "o'neil.pem")
    path.chmod(0o644)
    with pytest.raises(ConfigError) as refused:
        certificate_of(path)
    assert shlex.split(str(refused.value).partition("; run ")[2]) == ["chmod", "600", str(path)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "holds no certificate"), (b"-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----", "is damaged")],
)
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "key.pem"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        certificate_of(path)


def without_private_key(files: dict[str, Path], name: str = "berlin") -> str:
    text = files[name].read_text()
    return text[text.index(ssl.PEM_HEADER) :]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("missing", r"no private key that fits its certificate \(it is missing or damaged\); copy the whole file"),
        ("damaged", r"no private key that fits its certificate \(it is missing or damaged\)"),
        ("another one's", r"no private key that fits its certificate \(key values mismatch\)"),
        ("behind a password", r"the private key in '.*' has a password"),
    ],
    ids=["missing", "damaged", "another one's", "behind a password"],
)
def test_a_key_without_the_private_key_of_its_certificate_fails_at_the_start_of_each_verb(
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    sentence: str,
) -> None:
    certificate, private = without_private_key(files), load_pem_private_key(files["berlin"].read_bytes(), None)
    before = {
        "missing": "",
        "damaged": files["berlin"]
        .read_text()
        .replace("-----BEGIN PRIVATE KEY-----\n", "-----BEGIN PRIVATE KEY-----\n!"),
        "another one's": files["paris"].read_text().partition(ssl.PEM_HEADER)[0],
        "behind a password": private.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")
        ).decode(),
    }[what]
    key, run_file = tmp_path / "key.pem", tmp_path / "run.toml"
    key.touch(0o600)
    key.write_text(before.partition(ssl.PEM_HEADER)[0] + certificate)
    monkeypatch.setenv("GOSSAMER_KEY", str(key))
    with pytest.raises(ConfigError, match=sentence):
        Keys(key, peers_of(files, *NAMES), 3)
    listed = {name: {"certificate": one.certificate} for name, one in peers_of(files, *NAMES).items()}
    run_file.write_text(dump(tiny(workers=3, run__elastic=True, peers=listed)))
    out, address = str(tmp_path / "run"), f"127.0.0.1:{free_port()}"
    for words in (
        ["train", str(run_file), "--listen", address, "--out", out, "--key", str(key)],
        ["train", str(run_file), "--join", address, "--out", out, "--key", str(key)],
        ["doctor", str(run_file), "--key", str(key)],
        ["keys", "show", "berlin", "--out", str(key)],
    ):
        assert main(words) in (1, 2), words
        output = capsys.readouterr()
        assert re.search(sentence, " ".join((output.out + output.err).split())), output
    assert not (tmp_path / "run").exists(), "nothing was begun"
    (tmp_path / "peers.toml").write_text(peers_toml(listed))
    with pytest.raises(ConfigError, match=sentence):
        keys_of_sites(tmp_path / "peers.toml", (0, 3))  # what Outer(peers=) asks first


def test_a_machine_finds_its_key_by_the_run_file_and_says_when_it_has_none(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    listed = peers_of(files, *NAMES)
    assert keys_for({}, 3) is None, "a run without [peers] shares a secret"
    with pytest.raises(ConfigError, match=r"lists none of the keys in .* gossamer keys new NAME"):
        keys_for(listed, 3)
    home = tmp_path / "gossamer" / "keys"
    home.mkdir(parents=True)
    for name in ("paris", "stranger"):
        (home / f"{name}.pem").touch(0o600)
        (home / f"{name}.pem").write_bytes(files[name].read_bytes())
    found = keys_for(listed, 3)
    assert found is not None and found.name(found.certificate) == "peer 'paris'"
    monkeypatch.setenv("GOSSAMER_KEY", str(files["stranger"]))
    with pytest.raises(ConfigError, match=r"is none of the run's \[peers\] \(berlin, paris, rome\)"):
        keys_for(listed, 3)


def test_numbers_are_dealt_in_the_order_of_the_file(files: dict[str, Path]) -> None:
    berlin, paris = (peers_of(files, name)[name].certificate for name in ("berlin", "paris"))
    listed = {
        "berlin": Peer(certificate=berlin, workers=2),
        "paris": Peer(certificate=paris, workers=1, server=True),
    }
    keys = Keys(files["paris"], listed, 4)
    assert keys.numbers(certificate_of(files["berlin"])) == {0, 1}
    assert keys.numbers(certificate_of(files["paris"])) == {2, 4}, "the server's number follows those of the workers"
    assert keys.numbers(None) == keys.numbers(certificate_of(files["stranger"])) == frozenset()


def test_letters_pass_in_both_directions_at_once_while_a_relay_reads_nothing(keys: list[Keys], opened: Opened) -> None:
    content = b"these are the parameters of the model" * (1 << 16)
    letters = [Letter(LetterKind.PUSH, 1, body=body_of(content)), Letter(LetterKind.START, 0, body=body_of(content))]
    run_limits = limits(3)
    with contextlib.closing(Relay(opened.port)) as relay:
        with dial(relay.address, b"", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=keys[1], whom=0) as near:
            far = opened.arrival()
            assert (far.peer, far.same_run) == (1, True)
            assert keys[0].name(far.channel.certificate) == "peer 'paris'"
            accepts = lambda letter, size: True  # noqa: E731
            with ThreadPoolExecutor(4) as pool:
                threads = [
                    pool.submit(send_letter, end, one, RUN)
                    for end, one in zip((near, far.channel), letters, strict=True)
                ]
                read = [pool.submit(receive_letter, end, RUN, run_limits, accepts) for end in (far.channel, near)]
                assert [one.result(TIMEOUT_S).content for one in read] == [content, content]
                assert [one.result(TIMEOUT_S) for one in threads] == [None, None]
        assert len(relay.seen) > 2 * len(content)
        hello = b"GOSS" + WIRE_VERSION.to_bytes(2, "little")
        # Of the ten million bytes of a cipher, any four that are looked for are among them once in four hundred runs.
        for word in (content[:20], *(encode(one, RUN)[:8] for one in letters), hello, b"berlin", b"paris"):
            assert word not in relay.seen, word


def test_a_byte_that_was_changed_on_the_path_ends_the_connection_by_name(keys: list[Keys], opened: Opened) -> None:
    def change(place: int, data: bytes) -> bytes:
        at = 20_000 - place
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    with (
        contextlib.closing(Relay(opened.port, change)) as relay,
        dial(relay.address, b"", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=keys[1], whom=0) as near,
        ThreadPoolExecutor(1) as pool,
    ):
        far = opened.arrival()
        body = body_of(bytes(1 << 18))
        pool.submit(send_letter, near, Letter(LetterKind.PUSH, 1, body=body), RUN)
        with pytest.raises(RefusedError, match=r"what it sent was changed on its way") as caught:
            receive_letter(far.channel, RUN, limits(3), lambda letter, size: True)
        assert caught.value.kind == "changed"
        far.channel.interrupt()


def test_a_stranger_with_a_key_that_is_not_listed_is_refused_at_both_ends(
    files: dict[str, Path], opened: Opened
) -> None:
    his = Keys(files["stranger"], peers_of(files, *NAMES, "stranger"), 4)
    with pytest.raises(RefusedError, match=r"refused the key of this machine \(sha256:.*must list it in \[peers\]"):
        dial(opened.address, b"a secret", run=RUN, me=3, timeout_s=TIMEOUT_S, keys=his, whom=0)
    until(lambda: opened.refusals.counts == {"127.0.0.1: key": 1})
    assert not opened.came


def test_a_listed_worker_does_not_talk_to_an_unlisted_listener(files: dict[str, Path], keys: list[Keys]) -> None:
    his = Keys(files["stranger"], peers_of(files, *NAMES, "stranger"), 4)
    with contextlib.closing(Opened(his)) as opened:
        with pytest.raises(RefusedError, match=r"showed a certificate that is not in the run's \[peers\]"):
            dial(opened.address, b"a secret", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=keys[1])
        assert not opened.came


def authority_and_child(folder: Path) -> tuple[Path, Path]:
    """The key of an authority, as openssl req -x509 makes it, and one with a certificate that it has signed."""
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "child")]
    private = [Ed25519PrivateKey.generate() for _ in names]
    files = folder / "authority.pem", folder / "child.pem"
    for file, name, key in zip(files, names, private, strict=True):
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now() - timedelta(days=1))
            .not_valid_after(datetime.now() + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=file == files[0], path_length=None), critical=True)
            .sign(private[0], None)
        )
        file.touch(0o600)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        file.write_bytes(pem + certificate.public_bytes(Encoding.PEM))
    return files


def test_a_certificate_that_a_listed_authority_has_signed_is_none_of_the_run_at_either_end(
    files: dict[str, Path], tmp_path: Path
) -> None:
    files = {**files, **dict(zip(("authority", "child"), authority_and_child(tmp_path), strict=True))}
    here = Keys(files["berlin"], peers_of(files, "berlin", "authority"), 2)
    child = Keys(files["child"], peers_of(files, "child", "berlin"), 2)
    listed = Keys(files["authority"], peers_of(files, "berlin", "authority"), 2)
    with contextlib.closing(Opened(here)) as opened:
        for place, me in enumerate((WATCHER, NEWCOMER, 0), 1):
            with contextlib.suppress(PeerError, OSError):  # it may have read the answer before it is turned away
                dial(opened.address, b"", run=RUN, me=me, timeout_s=TIMEOUT_S, keys=child).close()
            until(lambda place=place: opened.refusals.counts == {"127.0.0.1: key": place})
        assert not opened.came
        dial(opened.address, b"", run=RUN, me=WATCHER, timeout_s=TIMEOUT_S, keys=listed).close()
        assert opened.arrival().peer == WATCHER, "who is listed may be an authority, and look"
    with contextlib.closing(Opened(child)) as opened:
        for me, whom in ((WATCHER, None), (NEWCOMER, None), (0, 1)):
            with pytest.raises(
                RefusedError, match=r"showed a certificate \(sha256:.*\) that is not in the run's \[peers\]"
            ):
                dial(opened.address, b"", run=RUN, me=me, timeout_s=TIMEOUT_S, keys=here, whom=whom)


def test_an_entry_is_one_certificate_and_a_certificate_is_one_entry_in_whatever_spelling(
    files: dict[str, Path], tmp_path: Path
) -> None:
    raw = certificate_of(files["berlin"])
    for more in (certificate_of(files["stranger"]), raw, b"\0"):
        with pytest.raises(ConfigError, match="which is not one certificate"):
            build(Peer, {"certificate": base64.b64encode(raw + more).decode()}, source="a test")
    name = next(
        name for name in files if len(certificate_of(files[name])) % 3
    )  # whose base64 ends in bits that count nothing
    text = base64.b64encode(certificate_of(files[name])).decode()
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    last = len(text.rstrip("=")) - 1
    other = text[:last] + digits[digits.index(text[last]) + 1] + text[last + 1 :]
    assert base64.b64decode(other, validate=True) == certificate_of(files[name]) and other != text
    listed = {"one": {"certificate": text}, "two": {"certificate": other}}
    sentence = r"has the same certificate for 'one' and 'two'; list each certificate once"
    (tmp_path / "peers.toml").write_text(peers_toml(listed))
    with pytest.raises(ConfigError, match=sentence):
        read_peers(tmp_path / "peers.toml")
    with pytest.raises(ConfigError, match=sentence):
        tiny(workers=3, run__elastic=True, peers=listed)


@pytest.mark.parametrize("late", [True, False], ids=["expired", "not valid yet"])
def test_a_listed_certificate_outside_its_period_is_refused_with_the_advice_to_set_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(days=-20 * 365 if late else 20 * 365)

    files = {"berlin": new_key("berlin", tmp_path / "berlin.pem")}
    with monkeypatch.context() as changed:
        changed.setattr("gossamer.transport.keys.datetime", Clock)
        files["paris"] = new_key("paris", tmp_path / "paris.pem")
    here, there = (Keys(files[name], peers_of(files, "berlin", "paris"), 2) for name in ("berlin", "paris"))
    with contextlib.closing(Opened(here)) as opened:
        with pytest.raises(RefusedError, match="has expired by the clock of" if late else "refused the key") as caught:
            dial(opened.address, b"", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=there)
        assert caught.value.kind == "key"
        until(lambda: opened.refusals.counts == {"127.0.0.1: key": 1})
    sentence = r"does not hold at \d{4}-.* UTC, which is the time on .* set the clock"
    with contextlib.closing(Opened(there)) as opened, pytest.raises(RefusedError, match=sentence):
        dial(opened.address, b"", run=RUN, me=0, timeout_s=TIMEOUT_S, keys=here)


def test_a_reader_waits_for_no_writer(keys: list[Keys], opened: Opened) -> None:
    """Both ends may be stuck in writing, and each continues once the other one reads."""
    with dial(opened.address, b"", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=keys[1], whom=0) as near:
        far = opened.arrival().channel
        sock = near._sock
        assert isinstance(sock, TlsSocket)
        buffer, looked = sock._goes, list[bool]()

        class Watched:
            def read(self) -> bytes:
                return buffer.read()

            @property
            def pending(self) -> int:
                looked.append(sock._state.locked())  # else it may be what a writer is about to take
                return buffer.pending

        sock._goes = Watched()  # type: ignore[assignment]
        far.write(b"hello")
        assert near.read(5) == b"hello"
        assert looked and all(looked)


def test_the_machine_that_starts_a_run_has_the_key_of_its_first_workers(
    files: dict[str, Path], keys: list[Keys]
) -> None:
    keys[0].must_start(1)
    with pytest.raises(ConfigError, match=r"peer 'berlin' in \[peers\], with the workers 0; give --local at most 1"):
        keys[0].must_start(2)
    with pytest.raises(
        ConfigError, match=r"with the workers 1; let the machine of peer 'berlin' start the run and join"
    ):
        keys[1].must_start(1)


def test_a_peer_is_only_the_worker_that_its_key_may_be(
    files: dict[str, Path], keys: list[Keys], opened: Opened
) -> None:
    with pytest.raises(
        ConfigError, match=r"is peer 'paris' in \[peers\], with the workers 1, and this process is worker 2"
    ):
        dial(opened.address, b"", run=RUN, me=2, timeout_s=TIMEOUT_S, keys=keys[1])
    # One that does not obey its own run file, as another one deals the numbers otherwise.
    lying = Keys(files["paris"], peers_of(files, "berlin", "rome", "paris"), 3)
    with dial(opened.address, b"", run=RUN, me=2, timeout_s=TIMEOUT_S, keys=lying, whom=0):
        until(lambda: opened.refusals.counts == {"127.0.0.1: key": 1})
    assert not opened.came
    # Nor does who dials take another peer for the one whom he wants.
    with pytest.raises(RefusedError, match=r"peer 'berlin' calls itself worker 2, which its key may not be"):
        dial(opened.address, b"", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=keys[1], whom=2)


@pytest.mark.parametrize("with_keys", ["listener", "dialler"])
def test_a_process_with_keys_and_one_without_refuse_each_other(keys: list[Keys], with_keys: str) -> None:
    ours, theirs, timeout_s = (keys[0], None, 0.5) if with_keys == "listener" else (None, keys[1], TIMEOUT_S)
    with contextlib.closing(Opened(ours)) as opened:
        with pytest.raises((PeerError, ConnectionError)) as caught:
            dial(opened.address, b"a secret", run=RUN, me=1, timeout_s=timeout_s, keys=theirs)
        assert with_keys == "listener" or "does not encrypt; give all machines the same run file" in str(caught.value)
        until(lambda: bool(opened.refusals.counts))
        assert not opened.came


def test_floods_and_slow_connections_cost_no_descriptor_for_good(keys: list[Keys], opened: Opened) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    slow = []
    for i in range(300):
        sock = socket.create_connection(("127.0.0.1", opened.port))
        with contextlib.suppress(OSError):
            sock.sendall(secrets.token_bytes(1 + i))
        if i % 30:
            sock.close()
        else:
            slow.append(sock)
    with dial(opened.address, b"", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=keys[1], whom=0):
        assert opened.arrival().peer == 1, "a peer still gets in"
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    for _ in range(30):  # who goes through the handshake, and shows no certificate
        with (
            contextlib.suppress(OSError),
            nobody.wrap_socket(socket.create_connection(("127.0.0.1", opened.port))) as sock,
        ):
            sock.settimeout(TIMEOUT_S)
            sock.recv(1)
    for sock in slow:
        sock.close()
    until(lambda: descriptors() <= before + 1)  # that of the peer; the listener continues
    opened.close()
    until(lambda: descriptors() <= before)


@contextlib.contextmanager
def flood(port: int, per_s: float, first: bytes) -> Iterator[list[socket.socket]]:
    """In here somebody opens so many connections in a second, sends this in each, and then a byte a tick in the newest ones."""
    ended, opened = threading.Event(), list[socket.socket]()

    def open_them() -> None:
        while per_s and not ended.wait(1 / per_s):
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection(("127.0.0.1", port)))
                opened[-1].sendall(first)
            for sock in opened[-10:] if first else ():
                with contextlib.suppress(OSError):
                    sock.sendall(b"\1")

    thread = threading.Thread(target=open_them, daemon=True)
    thread.start()
    try:
        yield opened
    finally:
        ended.set()
        thread.join(TIMEOUT_S)
        for sock in opened:
            sock.close()


BEGINNINGS = {False: b"GOS", True: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"}
"""Of an honest dial, by whether it is encrypted: of its version, and of a ClientHello of 512 bytes."""


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    ("per_s", "slow"), [(0, False), (12, False), (40, False), (40, True)], ids=["calm", "12/s", "40/s", "40/s, slow"]
)
def test_honest_dials_get_in_while_idle_and_slow_connections_come_from_their_address(
    keys: list[Keys], encrypted: bool, per_s: float, slow: bool
) -> None:
    """Honest workers behind the same router as the flood, 200 ms of round trip away."""
    ours, theirs = (keys[0], keys[1]) if encrypted else (None, None)
    with (
        contextlib.closing(Opened(ours)) as opened,
        contextlib.closing(Relay(opened.port, delay_s=0.1)) as relay,
        flood(opened.port, per_s, BEGINNINGS[encrypted] if slow else b"") as strangers,
        ThreadPoolExecutor(6) as pool,
    ):
        until(lambda: len(strangers) >= 10 or not per_s)
        made = [
            pool.submit(dial, relay.address, b"a secret", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=theirs)
            for _ in range(6)
        ]
        for one in made:
            one.result(TIMEOUT_S).close()
        until(lambda: len(opened.came) == 6)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_handshake_in_progress_outlives_any_number_of_silent_connections_and_threads_are_bounded(
    keys: list[Keys], encrypted: bool
) -> None:
    def arrivals() -> int:
        return sum(thread.name == "gossamer arrival" for thread in threading.enumerate())

    hello = BEGINNINGS[False] + b"S" + WIRE_VERSION.to_bytes(2, "little") + bytes(2)
    if encrypted:
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            keys[1].context(server=False).wrap_bio(came, goes).do_handshake()
        hello = goes.read()
    with contextlib.closing(Opened(keys[0] if encrypted else None)) as opened, contextlib.ExitStack() as stack:

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", opened.port), TIMEOUT_S))

        honest, first = connected(), connected()
        honest.sendall(hello)
        assert honest.recv(1 << 16), "it is answered"
        until(lambda: len(opened.listener._handshakes[1]._open) == 1)  # it may be answered before what it sent is read
        silent = [connected() for _ in range(200)]
        first.settimeout(TIMEOUT_S)
        with contextlib.suppress(ConnectionError):
            while first.recv(1 << 16):  # until it has given way to a later one
                pass
        until(lambda: arrivals() <= 66)
        honest.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert honest.recv(1 << 16), "it has been ended"
        assert opened.listener.busy
        del silent


@contextlib.contextmanager
def crew(keys: list[Keys], absent: int | None = None) -> Iterator[list[ElasticTransport]]:
    """Workers of an elastic run that know each other; one of the keys may have none yet."""
    keys = [key for i, key in enumerate(keys) if i != absent]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in keys]
    entries = [
        SlotEntry(i, 0, secrets.randbits(40), MemberStatus.ALIVE, 0, f"127.0.0.1:{sock.getsockname()[1]}")
        for i, sock in enumerate(listeners)
    ]
    made = [
        ElasticTransport(Members(limits(3), i, entries), Endpoint(sock, RUN, b"", TIMEOUT_S, keys=keys[i]))
        for i, sock in enumerate(listeners)
    ]
    try:
        yield made
    finally:
        with ThreadPoolExecutor(len(made)) as pool:
            list(pool.map(ElasticTransport.close, made))


def test_workers_exchange_over_encrypted_connections(keys: list[Keys]) -> None:
    like, ticket = [torch.empty(4)], Ticket(0)
    with crew(keys) as workers:
        for worker in workers:
            others = [i for i in range(3) if i != worker.worker]
            worker.begin_round(0, lambda alive, others=others: others, 15)
            for other in others:
                worker.expect(ticket, other, like)
                worker.post(ticket, other, [torch.full((4,), float(worker.worker))])
        for worker in workers:
            worker.wait(ticket)
            received = worker.collect(ticket)
            assert all(frames[0].tolist() == [float(peer)] * 4 for peer, frames in received.items())
            assert set(worker.outcomes()[ticket].values()) == {Outcome.MADE}


FORGED = {
    "is suspected": {"status": MemberStatus.SUSPECT},
    "has left": {"status": MemberStatus.LEFT},
    "has come back for the last round": {"incarnation": 1, "since": limits(3).rounds},
    "listens elsewhere": {"incarnation": 1, "address": "127.0.0.1:9"},
    "is given to another process": {
        "incarnation": 1,
        "nonce": 7,
        "status": MemberStatus.JOINING,
        "address": "127.0.0.1:9",
    },
    "is filled by another process": {"incarnation": 9, "nonce": 7, "address": "127.0.0.1:9"},
    "is filled by the liar": {"incarnation": 9, "nonce": 7, "address": ""},
    "has the highest incarnation": {"incarnation": 1 << 16, "nonce": (1 << 62) - 1, "address": "127.0.0.1:9"},
    "is in the last round": {"round": limits(3).rounds, "steps": limits(3).steps},
}
"""What a listed peer may say of another one's slot."""


def exchanged(workers: list[ElasticTransport], round: int) -> list[set[Outcome]]:
    """A round in which each exchanges with all others; what became of it, by worker."""
    ticket, like = Ticket(round), [torch.empty(4)]
    for worker in workers:
        others = [one.worker for one in workers if one is not worker]
        worker.begin_round(round, lambda alive, others=others: others, 15 * (round + 1))
        for other in others:
            worker.expect(ticket, other, like)
            worker.post(ticket, other, [torch.full((4,), float(worker.worker))])
    for worker in workers:
        worker.wait(ticket)
        worker.collect(ticket)
    return [set(worker.outcomes()[ticket].values()) for worker in workers]


@contextlib.contextmanager
def liar(workers: list[ElasticTransport], keys: list[Keys], slot: int = 2) -> Iterator[Callable[[SlotEntry], None]]:
    """A peer that is listed, and tells worker 0 what its test wants; returns once that has been read."""
    own = SlotEntry(slot, 0, 1234, MemberStatus.JOINING, 0, "127.0.0.1:9")
    with dial(
        workers[0]._listener.address, b"", run=RUN, me=slot, timeout_s=TIMEOUT_S, keys=keys[slot], whom=0
    ) as near:

        def say(entry: SlotEntry) -> None:
            nonlocal own
            own = own._replace(incarnation=own.incarnation + 1)
            known = {own.slot: own, entry.slot: entry}
            send_letter(near, Letter(LetterKind.MEMBERSHIP, slot, body=body_of(membership_update(known))), RUN)
            until(lambda: slot in workers[0].members.entries and workers[0].members.entries[slot] == own)

        yield say
        near.interrupt()


@pytest.mark.parametrize("about", [0, 1], ids=["the one that hears it", "a third one"])
def test_what_a_listed_peer_makes_up_about_another_slot_changes_nothing(keys: list[Keys], about: int) -> None:
    with crew(keys, absent=2) as workers:
        assert exchanged(workers, 0) == [{Outcome.MADE}] * 2
        with liar(workers, keys) as say:
            before = [worker.members.entries[about] for worker in workers]
            for wrong in FORGED.values():
                say(workers[0].members.entries[about]._replace(**wrong))
            # Old news that was true once: an entry of an earlier incarnation.
            with workers[1].changed:
                workers[1].members.declare(MemberStatus.ALIVE)
            say(before[0])
            for worker, was in zip(workers, before, strict=True):
                entry = worker.members.entries[about]
                names = ("nonce", "status", "since", "address", "round", "steps")
                assert [getattr(entry, one) for one in names] == [getattr(was, one) for one in names]
            assert exchanged(workers, 1) == [{Outcome.MADE}] * 2
        assert not any(worker.members.replaced for worker in workers)
        assert exchanged(workers, 2) == [{Outcome.MADE}] * 2


def test_a_round_that_one_peer_claims_alone_takes_no_other_to_the_end_of_the_run(keys: list[Keys]) -> None:
    last = limits(3).rounds
    with crew(keys, absent=2) as workers:
        assert exchanged(workers, 0) == [{Outcome.MADE}] * 2
        own = SlotEntry(2, 0, 1234, MemberStatus.ALIVE, 0, "127.0.0.1:9", last)
        for worker in workers:
            doubted = worker.members.own._replace(status=MemberStatus.SUSPECT)
            with dial(worker._listener.address, b"", run=RUN, me=2, timeout_s=TIMEOUT_S, keys=keys[2]) as near:
                body = body_of(membership_update({2: own, worker.worker: doubted}))
                send_letter(near, Letter(LetterKind.MEMBERSHIP, 2, round=last, body=body), RUN)
                send_letter(near, Letter(LetterKind.DECLINE, 2, Ticket(0), round=last), RUN)
                until(lambda worker=worker: worker.core.passed and worker.members.own.incarnation == 1)
                assert worker.members.entries[2].round == last
                assert worker.newest_round == 2 and worker.next_round() <= 3


def test_a_key_is_believed_to_be_a_few_rounds_ahead_of_all_others(keys: list[Keys]) -> None:
    def newest(rounds: list[int], one_key: frozenset[int] = frozenset(), *, gone: int | None = None) -> int:
        entries = [
            SlotEntry(i, 0, i, MemberStatus.SUSPECT if i == gone else MemberStatus.ALIVE, 0, "", round)
            for i, round in enumerate(rounds)
        ]
        members = Members(limits(len(rounds)), 0, entries)
        members.restrict_trust(lambda a, b: a == b or {a, b} <= one_key)
        return members.newest_round

    assert newest([2]) == 2
    assert newest([2, 9]) == 9, "nobody else can say"
    assert newest([2, 4, 3]) == 4
    assert newest([2, 9, 3]) == newest([2, 3, 9]) == 5
    assert newest([4, 9, 3]) == 6
    assert newest([2, 9, 8, 3]) == 9
    assert newest([2, 9, 9, 3], frozenset({1, 2})) == 5
    assert newest([2, 9, 3], frozenset({0, 1})) == 9
    assert newest([2, 9, 3], gone=2) == 9
    assert newest([7, 9, 3], gone=1) == 7


def test_a_key_has_a_few_connections_whatever_addresses_they_come_from(
    keys: list[Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, count = socket.create_connection, itertools.count(2)

    def elsewhere(address: tuple[str, int], timeout: float) -> socket.socket:
        return connect(address, timeout, source_address=(f"127.0.1.{next(count)}", 0))

    with crew(keys, absent=2) as workers, contextlib.ExitStack() as open_:
        assert exchanged(workers, 0) == [{Outcome.MADE}] * 2
        links = [*workers[1]._links[0]]
        with monkeypatch.context() as patched:
            patched.setattr(socket, "create_connection", elsewhere)
            try:
                for me in [2] * 80 + [NEWCOMER] * 80:
                    address = workers[1]._listener.address
                    open_.enter_context(dial(address, b"", run=RUN, me=me, timeout_s=TIMEOUT_S, keys=keys[2]))
            except OSError:
                pytest.skip("this machine has one address of loopback")
        until(lambda: len(workers[1]._links[2]) <= 4)
        assert workers[1]._links[0] == links
        assert exchanged(workers, 1) == [{Outcome.MADE}] * 2


def test_a_slot_belongs_to_its_own_key_whatever_others_claim_about_it(keys: list[Keys]) -> None:
    with crew(keys[:2], absent=1) as workers, liar(workers, keys, slot=1) as say:
        known = workers[0].members.entries
        say(SlotEntry(2, 1 << 16, 5, MemberStatus.ALIVE, 0, "127.0.0.1:9"))
        assert 2 not in known, "no process has been in so many"
        say(SlotEntry(2, 9, 5, MemberStatus.ALIVE, 0, "127.0.0.1:9"))
        given = workers[0].give_slot(99, "127.0.0.1:9", keys[0].numbers(keys[2].certificate))
        assert given is not None and (given.slot, given.nonce) == (2, 99)
        own = SlotEntry(2, 0, 100, MemberStatus.ALIVE, 0, "127.0.0.1:9")
        with dial(workers[0]._listener.address, b"", run=RUN, me=2, timeout_s=TIMEOUT_S, keys=keys[2], whom=0) as near:
            send_letter(near, Letter(LetterKind.MEMBERSHIP, 2, body=body_of(membership_update({2: own}))), RUN)
            until(lambda: known[2].nonce == 100)


def test_a_process_claimed_at_an_unreachable_address_takes_no_slot(keys: list[Keys]) -> None:
    with crew(keys, absent=2) as workers, liar(workers, keys) as say:
        before = workers[0].members.own
        say(before._replace(incarnation=9, nonce=7, address="there.invalid:1"))
        until(lambda: workers[0].members.own.incarnation == 10)
        assert workers[0].members.own.nonce == before.nonce and not workers[0].members.replaced
        assert exchanged(workers, 0) == [{Outcome.MADE}] * 2


def test_a_worker_checks_itself_whether_another_one_is_gone(keys: list[Keys]) -> None:
    with crew(keys) as workers:
        assert exchanged(workers, 0) == [{Outcome.MADE}] * 3
        ended = workers[1]
        ended.close(leaves=False)
        until(lambda: all(one.members.entries[1].status == MemberStatus.SUSPECT for one in (workers[0], workers[2])))


def test_a_process_gives_way_to_another_one_of_the_same_key_and_to_no_other(keys: list[Keys]) -> None:
    with crew(keys[:2], absent=1) as workers, socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        own = workers[0].members.own
        second = ElasticTransport(
            Members(limits(3), 0, [own._replace(incarnation=1, nonce=own.nonce + 1, address=address)]),
            Endpoint(listener, RUN, b"", TIMEOUT_S, keys=keys[0]),
        )
        with liar(workers, keys, slot=1) as say:
            say(own._replace(incarnation=1, nonce=own.nonce + 2, address="127.0.0.1:9"))
            until(lambda: workers[0].members.own.incarnation == 2)
            assert not workers[0].members.replaced, "nobody listens there"
            until(
                lambda: workers[0].members.replaced or bool(say(own._replace(incarnation=5, nonce=7, address=address)))
            )
        second.close()


def test_a_newcomer_gets_a_slot_of_its_own_key_and_no_other(files: dict[str, Path], keys: list[Keys]) -> None:
    given: list[object] = []

    def serve(arrival: Arrival) -> None:
        allowed = keys[0].numbers(arrival.channel.certificate)
        with arrival.channel as channel, contextlib.suppress(OSError):
            given.append(allowed)
            host(
                channel,
                members,
                Endpoint(sock, RUN, b"", TIMEOUT_S, keys=keys[0]),
                give_slot=lambda place: members.give_slot(place.nonce, place.address, kept(allowed)),
                boundary=lambda *_: Handover(0, lambda: b"state"),
            )

    def kept(allowed: frozenset[int]) -> set[int]:
        return set(range(3)) - allowed

    members = Members(limits(3), 0, [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0, "127.0.0.1:9")])
    sock = socket.create_server(("127.0.0.1", 0))
    listener = Listener(sock, b"", RUN, serve, Refusals(), keys=keys[0])
    try:
        place = Applicant(5, "127.0.0.1:10")
        offer = ask(listener.address, b"", place, run=RUN, limits=limits(3), timeout_s=TIMEOUT_S, keys=keys[2])
        assert (offer.slot, offer.raw) == (2, b"state") and given == [{2}]
        members.entries[2] = members.entries[2]._replace(status=MemberStatus.ALIVE)
        with pytest.raises(PeerError, match=r"all that this machine's key may be \(worker 2\) is alive, as worker 0"):
            ask(listener.address, b"", place, run=RUN, limits=limits(3), timeout_s=TIMEOUT_S, keys=keys[2])
        members.entries[2] = members.entries[2]._replace(status=MemberStatus.LEFT)
        at_most = {"limits": limits(3), "timeout_s": TIMEOUT_S, "keys": keys[2], "most_bytes": 4}
        with pytest.raises(PeerError, match="worker 0 offers a state of 5 bytes, and one of this run has at most 4"):
            ask(listener.address, b"", place._replace(slot=2), run=RUN, **at_most)
        # A worker must be the one in its certificate, and a request for another one does not get this one's.
        with pytest.raises(PeerError, match="peer 'berlin' calls itself worker 1"):
            ask(listener.address, b"", place, run=RUN, limits=limits(3), timeout_s=TIMEOUT_S, keys=keys[2], whom=1)
        # The state of a slot is for its own key too, from a worker that has the number by which it calls itself.
        members.entries[1] = members.entries[0]._replace(slot=1)
        in_1 = partial(ask, listener.address, b"", place._replace(slot=1), run=RUN, limits=limits(3), timeout_s=2.0)
        assert in_1(keys=keys[1]).raw == b"state"
        with pytest.raises((PeerError, OSError)):
            in_1(keys=keys[2])
        members = Members(limits(3), 1, [*members.entries.values()])
        with pytest.raises(RefusedError, match="peer 'berlin' calls itself worker 1, which its key may not be"):
            in_1(keys=keys[1])
    finally:
        listener.close()
        listener.hang_up()


def test_an_old_connection_played_again_changes_nothing(keys: list[Keys], opened: Opened) -> None:
    with contextlib.closing(Relay(opened.port)) as relay:
        sent = bytearray()
        relay._change = lambda place, data: (sent.extend(data), data)[1]
        with dial(relay.address, b"", run=RUN, me=1, timeout_s=TIMEOUT_S, keys=keys[1], whom=0) as near:
            opened.arrival()
            near.write(b"a letter that counts")
    came = len(opened.came)
    with socket.create_connection(("127.0.0.1", opened.port), timeout=TIMEOUT_S) as again:
        again.sendall(sent)
        until(lambda: bool(opened.refusals.counts))
    assert len(opened.came) == came


def test_a_store_behind_keys_is_readable_for_their_owners_and_not_on_the_path(
    files: dict[str, Path], keys: list[Keys]
) -> None:
    port, word = free_port(), secrets.token_hex(16)
    with contextlib.closing(KeyedStore.hosted("127.0.0.1", port, keys[0], TIMEOUT_S)) as hosted:
        hosted.store.set("from 0", word)
        with contextlib.closing(Relay(port)) as relay:
            relayed = int(relay.address.rpartition(":")[2])
            with contextlib.closing(KeyedStore.reached("127.0.0.1", relayed, keys[1], 1, TIMEOUT_S)) as reached:
                assert reached.store.get("from 0").decode() == word
                reached.store.set("large", "x" * 300_000)
                assert hosted.store.get("large") == b"x" * 300_000
                assert len(relay.seen) > 300_000 and word.encode() not in relay.seen and b"from 0" not in relay.seen
                del reached.store
        # One that may not be whom it calls itself, one that nobody lists, and one that has no key at all.
        with pytest.raises(ConfigError, match="with the workers 2"):
            KeyedStore.reached("127.0.0.1", port, keys[2], 1, TIMEOUT_S)
        stranger = Keys(files["stranger"], peers_of(files, "berlin", "stranger"), 2)
        with pytest.raises((PeerError, OSError)):
            KeyedStore.reached("127.0.0.1", port, stranger, 1, 0.5)
        with pytest.raises((PeerError, OSError)):
            dial(f"127.0.0.1:{port}", b"a secret", run=RUN, me=1, timeout_s=1.0)


def test_a_key_has_a_bounded_number_of_connections_with_a_store(keys: list[Keys]) -> None:
    port = free_port()
    behind = KeyedStore.hosted("127.0.0.1", port, keys[0], TIMEOUT_S)
    honest = KeyedStore.reached("127.0.0.1", port, keys[1], 1, TIMEOUT_S)
    with contextlib.closing(behind), contextlib.closing(honest), contextlib.ExitStack() as open_:
        before = threading.active_count()
        for _ in range(60):
            address = f"127.0.0.1:{port}"
            open_.enter_context(dial(address, b"", run=keyed_store._RUN, me=2, timeout_s=TIMEOUT_S, keys=keys[2]))
        until(lambda: threading.active_count() <= before + 2 * keyed_store._MOST_OF_A_WORKER)
        honest.store.set("word", "heard")
        assert behind.store.get("word") == b"heard"


def test_a_changed_byte_ends_the_connection_with_a_store_and_changes_nothing_in_it(keys: list[Keys]) -> None:
    port, changed_at = free_port(), [1 << 62]
    with contextlib.closing(KeyedStore.hosted("127.0.0.1", port, keys[0], 2.0)) as hosted:

        def change(place: int, data: bytes) -> bytes:
            at = changed_at[0] - place
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

        with contextlib.closing(Relay(port, change)) as relay:
            relayed = int(relay.address.rpartition(":")[2])
            with contextlib.closing(KeyedStore.reached("127.0.0.1", relayed, keys[1], 1, 2.0)) as reached:
                reached.store.set("a", "1")
                assert reached.store.get("a") == b"1"
                changed_at[0] = len(relay.forth) + 2000
                with contextlib.suppress(RuntimeError):  # of a connection that ends, as the next one says
                    reached.store.set("a", "2" * 5000)
                with pytest.raises(RuntimeError):
                    reached.store.get("a")
                del reached.store
        assert hosted.store.get("a") == b"1"


def test_a_file_of_peers_is_read_as_it_is_printed_and_a_wrong_one_is_refused(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peers.toml"
    for name in NAMES:
        assert main(["keys", "show", name, "--out", str(files[name])]) == 0
    path.write_text(printed := capsys.readouterr().out)
    assert read_peers(path) == peers_of(files, *NAMES)
    path.write_text(printed + printed.replace("[peers.", "[peers.other-"))
    with pytest.raises(ConfigError, match=r"has the same certificate for 'berlin' and 'other-berlin'"):
        read_peers(path)
    path.write_text("workers = 3\n")
    with pytest.raises(ConfigError, match="has no table"):
        read_peers(path)
    path.write_text('[peers.berlin]\ncertificate = "abc"\n')
    with pytest.raises(ConfigError, match="which is not one certificate"):
        read_peers(path)
