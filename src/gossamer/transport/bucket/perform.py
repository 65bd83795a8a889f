"""Performs the effects that the protocol of workers in a store yields, with a bucket and real time."""

from collections.abc import Callable

from gossamer.transport.bucket.bucket import Bucket
from gossamer.transport.bucket.protocol import Asking, Create, Do, Get, Names, Remove, Steps, T


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
