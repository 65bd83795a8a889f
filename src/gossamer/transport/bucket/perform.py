"""Performs the effects that the protocol of workers in a store yields, with a bucket and real time."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gossamer.errors import ConfigError
from gossamer.transport.bucket.bucket import Bucket, Folder, Seal, SecretSeal, opened_bucket
from gossamer.transport.bucket.protocol import StoreTerms
from gossamer.transport.bucket.requests import Asking, Create, Do, Get, Names, Remove, Steps, T
from gossamer.transport.bucket.signed import key_seal
from gossamer.transport.bucket.slots import SlotHolder
from gossamer.transport.keys import Keys
from gossamer.transport.secret import environment_secret

log = logging.getLogger("gossamer")


def open_sealed(url: str, keys: Keys | None) -> tuple[Bucket, Seal]:
    """Opens a store; warns where others may read or change what lies there. Raises: ConfigError, PeerError."""
    secret, bucket = environment_secret(), opened_bucket(url)  # a wrong secret is refused before a folder is made
    if keys is None:
        log.warning(
            "what lies in the store '%s' is not encrypted: all who may read there read the parameters, and %s; give rights to "
            "the machines of the run alone, or list their keys as [peers] (gossamer keys)",
            url,
            "all who know the secret can change the run" if secret else "all who may write there can change the run",
        )
    try:
        return bucket, SecretSeal(secret) if keys is None else key_seal(bucket, keys)
    except OSError as error:
        raise ConfigError(f"the store '{url}' cannot be used ({error}); look at its address and rights") from None


def paced(terms: StoreTerms, bucket: Bucket) -> StoreTerms:
    """The terms with shorter pauses between looks in a folder, where requests are cheap."""
    return terms._replace(look_s=0.05, rest_s=1.0) if isinstance(bucket, Folder) else terms


@contextmanager
def renewing(holder: SlotHolder[Any], bucket: Bucket, wait: Callable[[float], object]) -> Iterator[None]:
    """A context in which a thread renews the lease of a process; one that ends with an error frees its slot.

    Args: `wait` waits for so many seconds at most.
    """
    threading.Thread(
        target=lambda: perform(holder.beats(), bucket, wait=wait), daemon=True, name="gossamer lease"
    ).start()
    try:
        yield
    except BaseException:
        free_slot(holder, bucket)
        raise
    finally:
        holder.over = True


def free_slot(holder: SlotHolder[Any], bucket: Bucket) -> None:
    """Frees the slot of a process that ends, if it has one. Where the store fails, the others notice it when the lease ends."""

    def give_up(seconds: float) -> None:
        raise TimeoutError("the store does not answer")

    if holder.slot >= 0:
        with suppress(OSError):
            perform(holder.release(), bucket, wait=give_up)


def perform(
    steps: Steps[T], bucket: Bucket, *, wait: Callable[[float], object], most_bytes: Callable[[], int] = lambda: 1 << 24
) -> T:
    """Runs all steps, and returns their result.

    Args:
        wait: waits for so many seconds at most.
        most_bytes: returns the most bytes of an object, as far as is known now.
    """
    answer: object = None
    failed: OSError | None = None
    while True:
        try:
            effect = steps.send(answer) if failed is None else steps.throw(failed)
        except StopIteration as end:
            return end.value
        answer, failed = None, None
        try:
            answer = _done(effect, bucket, wait, most_bytes)
        except OSError as error:
            if isinstance(effect, Do):  # what was computed has failed, and not the store
                steps.close()
                raise
            failed = error


def _done(effect: Asking, bucket: Bucket, wait: Callable[[float], object], most_bytes: Callable[[], int]) -> object:
    match effect:
        case Names(after):
            return bucket.names(after)
        case Get(name):
            return bucket.get(name, most_bytes())
        case Create(name, content):
            return bucket.create(name, content)
        case Remove(name):
            return bucket.remove(name)
        case Do(work):
            return work()
        case _:
            return wait(effect.seconds)
