"""Buckets: objects that are created once, in a folder and in an object store."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.errors import ConfigError, TransportError
from gossamer.transport.bucket.bucket import (
    Bucket,
    Folder,
    ObjectStore,
    SecretSeal,
    bucket_at,
    is_lasting,
    opened_bucket,
)
from s3 import s3


@pytest.fixture(params=["folder", "in memory", "S3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    if request.param == "folder":
        yield opened_bucket(str(tmp_path / "store"))
        return
    pytest.importorskip("obstore")
    if request.param == "in memory":
        yield opened_bucket("memory:///run")
        return
    with s3(monkeypatch):
        yield opened_bucket("s3://bucket/run")


def test_of_many_concurrent_creates_of_an_object_one_succeeds_and_all_read_its_bytes(bucket: Bucket) -> None:
    created: list[int] = []

    def create(k: int) -> None:
        if bucket.create("r0-commit", bytes([k]) * 100_000):
            created.append(k)

    threads = [threading.Thread(target=create, args=(k,)) for k in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(created) == 1
    assert bucket.get("r0-commit", 100_000) == bytes(created) * 100_000


def test_what_killed_processes_have_left_of_objects_is_removed_from_a_folder(tmp_path: Path) -> None:
    """A worker that is killed as it writes leaves up to a whole state under another name."""
    left, written, others = ".0123456789abcdef", ".fedcba9876543210", ".nfs00000000012"
    for name in (left, written, others, "s00000002"):
        (tmp_path / name).write_bytes(b"a part")
    for name in (left, others, "s00000002"):
        os.utime(tmp_path / name, (time.time() - 3700,) * 2)
    assert opened_bucket(str(tmp_path)).names("") == ["s00000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([written, others, "s00000002"])


def test_names_come_sorted_and_only_those_behind_the_one_that_is_given(bucket: Bucket) -> None:
    for name in ("r1-from-1", "r0-commit", "u0", "r1-commit"):
        assert bucket.create(name, b"x")
    assert bucket.names("r1") == ["r1-commit", "r1-from-1", "u0"]
    bucket.remove("r1-commit")
    bucket.remove("r1-commit")
    assert bucket.names("r1") == ["r1-from-1", "u0"]
    assert bucket.get("r1-commit", 10) is None
    many = [f"r2-{k:02}" for k in range(20)]  # several pages of S3
    assert all(bucket.create(name, b"x") for name in many)
    assert bucket.names("r2-07") == [*many[8:], "u0"]


def test_an_object_that_is_larger_than_any_of_the_run_is_not_read(bucket: Bucket) -> None:
    assert bucket.create("s1", bytes(1000))
    with pytest.raises(
        TransportError, match="the object 's1' of the store has 1000 bytes where at most 999 are expected"
    ):
        bucket.get("s1", 999)


def test_a_folder_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    (tmp_path / "elsewhere").write_text("secret")
    os.symlink(tmp_path / "elsewhere", tmp_path / "s1")
    os.mkfifo(tmp_path / "s2")
    for name in ("s1", "s2"):
        with pytest.raises(OSError, match=name):
            folder.get(name, 100)


class Overwrites(Folder):
    """A store whose put knows no condition."""

    def create(self, name: str, content: bytes) -> bool:
        Path(self.root, name).write_bytes(content)
        return True


def test_a_store_that_writes_over_an_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.transport.bucket.bucket.Folder", Overwrites)
    with pytest.raises(ConfigError, match="has no conditional create"):
        opened_bucket(str(tmp_path))
    assert not [*tmp_path.iterdir()]
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match="has no conditional create"):
        opened_bucket("http://127.0.0.1:9/run")


def test_a_store_that_cannot_be_opened_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened_bucket(str(tmp_path / "file"))
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match="the store 'nosuch://x' cannot be opened"):
        bucket_at("nosuch://x")


def test_the_trial_of_a_store_leaves_nothing_there_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(folder: Folder, after: str) -> list[str]:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(Folder, "names", names)
    with pytest.raises(ConfigError, match=r"cannot be used .403 Forbidden"):
        opened_bucket(str(tmp_path))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("url", ["s3:/bucket/run", "file:/tmp/run", "file://localhost/tmp/run", "file://run"])
def test_an_incomplete_address_makes_no_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"the store '{url}' is no complete address"):
        opened_bucket(url)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("what", ["head", "body", "name", "secret", "length"])
def test_an_object_that_is_damaged_or_of_somebody_else_is_refused(what: str) -> None:
    raw = bytearray(SecretSeal(b"k").sealed("r0", {"steps": 5}, b"abc"))
    if what == "length":
        raw[32:36] = (1 << 30).to_bytes(4, "little")
    raw[-1] ^= what == "body"
    raw[40] ^= what == "head"
    with pytest.raises(TransportError, match="is not what a worker of this run wrote there"):
        SecretSeal(b"other" if what == "secret" else b"k").opened("r1" if what == "name" else "r0", bytes(raw))
    for size in range(0, 40, 7):
        with pytest.raises(TransportError):
            SecretSeal(b"k").opened("r0", bytes(raw[:size]))


def test_errors_of_an_object_store_are_those_of_a_system_that_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "y"), ("REGION", "z"), ("ALLOW_HTTP", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    store = ObjectStore("s3://bucket/run")
    with pytest.raises(OSError, match="S3 error") as failed:
        store.create("r0", b"")
    assert not isinstance(failed.value, TransportError)


@pytest.mark.parametrize(
    ("status", "code", "lasts"),
    [
        (403, "AccessDenied", True),
        (401, "", True),
        (400, "ExpiredToken", True),
        (404, "NoSuchBucket", True),
        (409, "", False),
    ],
)
def test_what_an_object_store_refuses_differs_from_what_another_try_may_change(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, lasts: bool
) -> None:
    with s3(monkeypatch) as there:
        store = ObjectStore("s3://bucket/run")
        monkeypatch.setattr(there, "answer", lambda *_: (status, f"<Error><Code>{code}</Code></Error>".encode()))
        asked = [lambda: store.names("a"), lambda: store.create("x", b"")]
        asked += [] if status == 404 else [lambda: store.get("x", 10), lambda: store.remove("x")]
        for ask in [one for k, one in enumerate(asked) if (status, k) != (409, 1)]:  # which is the answer to a create
            with pytest.raises(OSError, match=str(status)) as failed:
                ask()
            assert is_lasting(failed.value) == lasts and not isinstance(failed.value, TransportError)


def test_a_folder_where_an_object_should_be_lasts_and_a_store_that_may_not_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s1").mkdir()
    with pytest.raises(OSError, match="s1") as failed:
        Folder(str(tmp_path)).get("s1", 10)
    assert is_lasting(failed.value)
    with s3(monkeypatch) as there:
        answer = there.answer
        monkeypatch.setattr(
            there,
            "answer",
            lambda method, path, query, *more: (
                (403, b"") if "list-type" in query else answer(method, path, query, *more)
            ),
        )
        with pytest.raises(ConfigError, match="in which this machine may list, read, create and remove"):
            opened_bucket("s3://bucket/run")


def test_a_folder_that_is_made_for_a_new_run_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        opened_bucket(f"{tmp_path}/new")
    assert [one.partition(" for ")[0] for one in caplog.messages] == [
        f"the store '{tmp_path}/new' was not there and is made"
    ]


def test_an_address_of_a_folder_is_decoded_as_any_other_url(tmp_path: Path) -> None:
    opened_bucket(f"file://{tmp_path}/two%20words").create("x", b"1")
    assert (tmp_path / "two words" / "x").read_bytes() == b"1"
    assert opened_bucket(f"{tmp_path}/two%20words").names("") == [], "a path is none"
