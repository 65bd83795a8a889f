"""What the steps of a process ask of a store and of its surroundings, and how patiently.

No I/O is here. Steps are a generator that yields requests (`Asking`): `gossamer.transport.bucket.perform` does what they ask, and
`tests/transport/test_bucket_protocol.py` does so with delays, errors and deaths over virtual time.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from gossamer.errors import PeerError, TransportError
from gossamer.transport.bucket.bucket import Item, is_lasting
from gossamer.transport.bucket.protocol import StoreProcess, StoreTerms

T = TypeVar("T")
LOOK_SHARE = 0.25
"""The pause until the next look, as a share of the time waited so far: long waits make few requests."""


class Names(NamedTuple):
    """Requests all names that sort after one."""

    after: str


class Get(NamedTuple):
    """Requests an object."""

    name: str


class Create(NamedTuple):
    """Creates an object unless there is one."""

    name: str
    content: bytes


class Remove(NamedTuple):
    """Removes an object."""

    name: str


class Sleep(NamedTuple):
    """Waits."""

    seconds: float


class Do(NamedTuple):
    """Computes something."""

    work: Callable[[], Any]


class TrainPhase(Do):
    """Trains a local phase; returns its message. Where the training loop is a user's, the steps are suspended here."""


Asking = Names | Get | Create | Remove | Sleep | Do
Steps = Generator[Asking, Any, T]


class PatientStore:
    """The store of one process: it seals and opens objects, and asks again where the store fails.

    Args: `clock` gives seconds that never go back.
    """

    def __init__(self, terms: StoreTerms, work: StoreProcess, clock: Callable[[], float]) -> None:
        self._terms, self._work, self._clock = terms, work, clock
        self.asked_s = clock()
        """When the last request was made: a process that is stopped meanwhile has an old answer."""

    def names(self, after: str) -> Steps[list[str]]:
        """All names that sort after one. Raises: as `_ask`, like all requests here."""
        return (yield from self._ask(Names(after)))

    def read(self, name: str) -> Steps[Item | None]:
        """An object; None where there is none. Raises: TransportError for one that does not count."""
        raw = yield from self._ask(Get(name))
        return None if raw is None else self._terms.seal.opened(name, raw)

    def try_read(self, name: str) -> Steps[Item | TransportError | None]:
        """As `read`, with the error of an object that does not count as the answer."""
        try:
            return (yield from self.read(name))
        except PeerError:
            raise
        except TransportError as error:
            return error

    def create(self, name: str, head: Mapping[str, Any], body: bytes | memoryview = b"") -> Steps[bool]:
        """Creates an object; returns whether there was none of this name."""
        return (yield from self._ask(Create(name, self._terms.seal.sealed(name, head, body))))

    def remove(self, name: str) -> Steps[None]:
        """Removes an object, if there is one."""
        yield from self._ask(Remove(name))

    def pause(self, waited_s: float) -> Steps[float]:
        """Waits until the next look; returns how long."""
        pause_s = min(self._terms.rest_s, max(self._terms.look_s, LOOK_SHARE * waited_s))
        yield Sleep(pause_s)
        return pause_s

    def pause_for(self, what: str, waited_s: float) -> Steps[float]:
        """Waits for an object that is in the store and does not show. Raises: PeerError.

        Args: `waited_s` has its own pauses: a process that was stopped looks again before it gives up.
        """
        if waited_s > 2 * self._terms.timeout_s:
            raise PeerError(
                f"{what} is in the store and cannot be read for {waited_s:.0f} s; look at the rights of this machine, and at "
                "the store"
            )
        return (yield from self.pause(waited_s))

    def _ask(self, asking: Asking) -> Steps[Any]:
        """The answer of a store, with retries for ten times the patience of the run, once that where it refuses.

        Raises: PeerError.
        """
        # Its own pauses: time in which this process was stopped does not count.
        waited_s, refused_s, was_reported = 0.0, 0.0, False
        while True:
            self.asked_s = self._clock()
            try:
                return (yield asking)
            except TransportError:
                raise
            except OSError as error:
                lasts = is_lasting(error)
                if lasts and refused_s > self._terms.timeout_s:
                    raise PeerError(
                        f"the store has refused for {refused_s:.0f} s to {_description(asking)} ({error}); a worker needs the "
                        "right to list, read, create and remove objects there: mend that, and start again"
                    ) from None
                if waited_s > 10 * self._terms.timeout_s:
                    raise PeerError(
                        f"the store has not done what it was asked for {waited_s:.0f} s ({error}); start again when it does"
                    ) from None
                if not was_reported and waited_s > self._terms.rest_s:
                    was_reported = True
                    answers = f"refuses to {_description(asking)}" if lasts else "does not answer"
                    self._work.say(f"the store {answers} ({error}); it is asked again")
                pause_s = yield from self.pause(waited_s)
                waited_s, refused_s = waited_s + pause_s, refused_s + pause_s if lasts else 0.0


def _description(asking: Asking) -> str:
    """What is asked of the store, for people."""
    match asking:
        case Get(name):
            return f"read '{name}'"
        case Create(name, _):
            return f"create '{name}'"
        case Remove(name):
            return f"remove '{name}'"
        case _:
            return "list its objects"
