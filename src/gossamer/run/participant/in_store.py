"""What a process does first whose run lies in a store: it opens the store, and binds its run folder to that run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import ConfigError
from gossamer.record.folder import store_file
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import prepare, run_settings
from gossamer.run.worker.task import Task
from gossamer.transport.bucket.bucket import MOST_HEAD_BYTES, Bucket, bucket_at
from gossamer.transport.bucket.perform import open_sealed, paced
from gossamer.transport.bucket.protocol import StoreTerms
from gossamer.transport.keys import keys_for


class OpenedStore(NamedTuple):
    """The store of a run, with the data of this process."""

    bucket: Bucket
    terms: StoreTerms
    task: Task


def open_store(run: ResolvedRun, folder: Path, url: str, more: Mapping[str, Any] | None = None) -> OpenedStore:
    """Opens the store of a run, and the data; warns where others may read or change what lies there.

    Args: `more` has further settings that all processes must share.
    Raises: ConfigError, also for a run folder with a run where the store has none; DataError, PeerError.
    """
    # The folder is read first: a process of this folder creates the run in the store before.
    if _is_bound(folder) and not _has_run(bucket_at(url)):  # before a folder or a run is created at a wrong address
        raise ConfigError(
            f"'{folder}' holds a run, and none lies in the store '{url}'; give another --out, or the store of that run"
        )
    bucket_at(url)  # an address that is none is refused before the data is read
    keys = keys_for(run.peers, run.workers)
    task, key = prepare(run)
    bucket, seal = open_sealed(url, keys)  # last, as it makes the folder of a new store
    described = {
        "gossamer": 1,
        "key": f"{key:016x}",
        "rounds": run.rounds,
        "settings": run_settings(run, task),
        "workers": run.workers,
        **(more or {}),
    }
    deadline_s = run.loop.round_deadline_s or run.loop.timeout_s
    terms = StoreTerms(described, run.workers, run.rounds, run.loop.timeout_s, deadline_s, seal)
    return OpenedStore(bucket, paced(terms, bucket), task)


def bind_folder(folder: Path, identity: str) -> None:
    """Binds a run folder to the run in a store.

    Checkpoints belong to one history of a run, and no hash of settings tells two of them apart. Raises: ConfigError for a folder
    of another run.
    """
    path = store_file(folder)
    known = path.exists()  # before the run file, which another process of this folder writes later
    if known and path.read_text(encoding="utf-8", errors="replace").strip() == identity:
        return
    if known or _is_bound(folder):
        raise ConfigError(
            f"'{folder}' holds a run that is not the one in this store; give another --out, or the store of that run"
        )
    make_folder(folder)
    atomic_write(path, f"{identity}\n".encode())


def _has_run(bucket: Bucket) -> bool:
    try:
        return bucket.get("run", MOST_HEAD_BYTES) is not None
    except OSError:  # the protocol tries again, and names what stays
        return True


def _is_bound(folder: Path) -> bool:
    return store_file(folder).exists() or (folder / "run.toml").exists()
