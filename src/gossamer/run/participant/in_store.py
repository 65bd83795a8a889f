"""What a process does first whose run lies in a store: it opens the store, and binds its run folder to that run."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import ConfigError
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import prepare, run_settings
from gossamer.run.worker.task import Task
from gossamer.transport.bucket.bucket import Bucket, Folder, SecretSeal, opened_bucket
from gossamer.transport.bucket.perform import perform
from gossamer.transport.bucket.protocol import SlotHolder, StoreTerms
from gossamer.transport.bucket.signed import key_seal
from gossamer.transport.keys import keys_for
from gossamer.transport.secret import environment_secret

log = logging.getLogger("gossamer")


class OpenedStore(NamedTuple):
    """The store of a run, with the data of this process."""

    bucket: Bucket
    terms: StoreTerms
    task: Task


def open_store(run: ResolvedRun, url: str, more: Mapping[str, Any] | None = None) -> OpenedStore:
    """Opens the store of a run, and the data; warns where others may read or change what lies there.

    Args: `more` has further settings that all processes must share.
    Raises: ConfigError, DataError, PeerError.
    """
    bucket, keys, secret = opened_bucket(url), keys_for(run.peers, run.workers), environment_secret()
    if keys is None:
        log.warning(
            "what lies in the store '%s' is not encrypted: all who may read there read the parameters, and %s; give rights to "
            "the machines of the run alone, or list their keys as [peers] in the run file (gossamer keys)",
            url,
            "all who know the secret can change the run" if secret else "all who may write there can change the run",
        )
    task, key = prepare(run)
    try:
        seal = SecretSeal(secret) if keys is None else key_seal(bucket, keys)
    except OSError as error:
        raise ConfigError(f"the store '{url}' cannot be used ({error}); look at its address and rights") from None
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
    if isinstance(bucket, Folder):  # where requests are cheap
        terms = terms._replace(look_s=0.05, rest_s=1.0)
    return OpenedStore(bucket, terms, task)


def bind_folder(folder: Path, identity: str) -> None:
    """Binds a run folder to the run in a store.

    Checkpoints belong to one history of a run, and no hash of settings tells two of them apart. Raises: ConfigError for a folder
    of another run.
    """
    path = folder / "store.txt"
    known = path.exists()  # before the run file, which another process of this folder writes later
    if known and path.read_text(encoding="utf-8", errors="replace").strip() == identity:
        return
    if known or (folder / "run.toml").exists():
        raise ConfigError(
            f"'{folder}' holds a run that is not the one in this store; give another --out, or the store of that run"
        )
    make_folder(folder)
    atomic_write(path, f"{identity}\n".encode())


@contextmanager
def renewing(holder: SlotHolder[Any], bucket: Bucket, wait: Callable[[float], object]) -> Iterator[None]:
    """A context in which a thread renews the lease of a process; `wait` waits for so many seconds at most."""
    threading.Thread(
        target=lambda: perform(holder.beats(), bucket, wait=wait), daemon=True, name="gossamer lease"
    ).start()
    try:
        yield
    finally:
        holder.over = True
