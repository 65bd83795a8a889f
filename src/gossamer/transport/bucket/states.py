"""States in a store: those that cannot be loaded are passed over, and what is older than the last but one is removed."""

from collections.abc import Callable
from typing import Any

from gossamer.errors import CheckpointError, GossamerError, TransportError
from gossamer.record.fault import FaultKind
from gossamer.transport.bucket.bucket import Item
from gossamer.transport.bucket.objects import parsed, state_name
from gossamer.transport.bucket.protocol import StoreProcess
from gossamer.transport.bucket.requests import PatientStore, Steps, T


class States:
    """The states that one process reads, and removes once they are old."""

    def __init__(self, store: PatientStore, work: StoreProcess) -> None:
        self._store, self._work = store, work
        self.unsound: dict[str, GossamerError] = {}
        """The names of those that cannot be loaded, and the reasons, in the order in which they were read."""

    def read(self, name: str) -> Steps[Item | None]:
        """A state; None where none of this name can be read."""
        item = yield from self._store.try_read(name)
        if isinstance(item, TransportError):
            self.pass_over(name, item)
            return None
        return item

    def pass_over(self, name: str, error: GossamerError) -> None:
        """Leaves out a state that cannot be loaded: an older one may lead to the same. It is named once."""
        self.unsound[name] = error
        self._work.say(f"the state '{name}' of the store is passed over for another: {error}")

    def remove_older(self, known: set[int], newest: int, slot: int = -1) -> Steps[None]:
        """Removes what is older than the last state but one until the newest, of this slot or of all together.

        Names of later ones, which anybody who may write into the store can give to objects that are none, cost no state.
        """
        states = sorted({one for one in known if one < newest} | {newest})
        if len(states) < 2:
            return
        first, until = (states[0] if len(states) > 2 else 0), states[-2]
        yield from self.remove_rounds(first, until, f"{slot:05d}" if slot >= 0 else "")
        for state in states[:-2]:
            yield from self._store.remove(state_name(state, slot))
            known.discard(state)

    def remove_rounds(self, first: int, until: int, sender: str) -> Steps[None]:
        """Removes the messages, of one sender unless it is empty, and the means of some rounds, but no names of others."""
        names: list[str] = yield from self._store.names(f"r{first:08d}")
        for match in parsed(name for name in names if name < f"r{until:08d}"):
            if match["commit"] is None and sender in ("", match["sender"]):
                yield from self._store.remove(match[0])


def loaded(load: Callable[..., T], *args: Any) -> T | CheckpointError:
    """What a state is loaded with; the error of one that is damaged. Raises: CheckpointError for a sound one of another model."""
    try:
        return load(*args)
    except CheckpointError as error:
        if error.kind != FaultKind.DAMAGED:
            raise
        return error
