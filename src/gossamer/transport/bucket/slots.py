"""The slot of a process: how it is taken, held by signs of life, and freed. `protocol` has the states of a slot."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from gossamer.errors import PeerError, TransportError
from gossamer.transport.bucket.bucket import Item
from gossamer.transport.bucket.objects import lease_name, parsed, state_name
from gossamer.transport.bucket.protocol import StoreProcess, StoreTerms
from gossamer.transport.bucket.requests import Create, PatientStore, Remove, Sleep, Steps
from gossamer.transport.bucket.sightings import Sightings
from gossamer.transport.bucket.states import States

P = TypeVar("P", bound=StoreProcess)
BEATS = 3
"""Signs of life within the time after which a silent worker counts as dead."""


class SlotLostError(PeerError):
    """Another process has taken the slot, as this one was silent for too long."""


class SlotHolder(Generic[P]):
    """One process in a run whose state lies in a store: its slot, its lease, and what it has seen.

    Args:
        nonce: a random number by which it recognises its own claim of a slot.
        clock: seconds that never go back.
    """

    def __init__(self, terms: StoreTerms, work: P, nonce: str, clock: Callable[[], float]) -> None:
        self.terms, self.work, self.clock, self._nonce = terms, work, clock, nonce
        self.store = PatientStore(terms, work, clock)
        self.states = States(self.store, work)
        self.seen = Sightings(terms.workers)
        self.slot = self.life = -1
        self.round = 0
        self.over = False
        """Whether it has ended, or tries to get another slot."""
        self.looked_s = self.store.asked_s
        """When the last look was asked for."""
        self.listed: Sequence[str] = ()
        """What the last look has shown."""
        self._beat = -1
        self._believed: dict[str, bool] = {}
        """Names that were read, and whether each was signed by a key that may write it."""

    def agree(self) -> Steps[None]:
        """Writes the object `run`, or compares with the one that is there. Raises: PeerError."""
        yield from self.store.create("run", {**self.terms.run, "id": self._nonce})
        waited_s = 0.0
        while (item := (yield from self.store.read("run"))) is None:  # it is not visible yet
            waited_s += yield from self.store.pause_for("the object 'run'", waited_s)
        here, there = _one_by_one(self.terms.run), _one_by_one(item.head)
        identity = there.pop("id", None)
        # The hash of all settings, the key, tells a person least.
        names = sorted({*here, *there}, key=lambda name: (name == "key", name))
        other = next((name for name in names if here.get(name) != there.get(name)), None)
        if other is not None or not isinstance(identity, str):
            raise PeerError(
                f"the store holds another run: {other} is {there.get(str(other))!r:.160} there and "
                f"{here.get(str(other))!r:.160} here; start all with the same settings, data and gossamer, or give another store"
            )
        self.work.agree(identity)

    # --- from the claim to the end ------------------------------------------------------------------------------------

    def claim(self) -> Steps[None]:
        """Takes a free slot, or one whose worker was silent for too long. Raises: PeerError."""
        waited_s, was_reported = 0.0, False
        while not self.work.asked():
            yield from self.look(None)
            for slot in filter(self.terms.seal.may_hold_slot, range(self.terms.workers)):
                if not self.seen.is_held(slot, self.looked_s, self.terms.timeout_s) and (
                    yield from self._has_claimed(slot)
                ):
                    return
            if waited_s > 1.5 * self.terms.timeout_s:
                raise PeerError(
                    f"all {self.terms.workers} slots of the run are filled, or all that this machine's key may have; wait until "
                    "one has left, or start a run with more workers"
                )
            if not was_reported:
                was_reported = True
                self.work.say(
                    f"all slots are taken; a worker that has died frees its own within {self.terms.timeout_s:g} s"
                )
            waited_s += yield from self.store.pause(waited_s)

    def _has_claimed(self, slot: int) -> Steps[bool]:
        """Claims the next life of a slot; returns whether no other process has done so before."""
        life, now = self.seen.lives.get(slot, -1) + 1, self.looked_s
        name, own = lease_name("t", slot, life), {"nonce": self._nonce}
        created = yield from self.store.create(name, own)
        if not created:  # perhaps by this process, in a request whose answer was lost
            item = yield from self.store.try_read(name)
            if isinstance(item, TransportError):
                if not self.terms.seal.proves_writers:
                    raise item
                self.work.say(str(item))
            created = isinstance(item, Item) and item.head == own
        self.seen.look([name], now)  # a listing may lack the new object
        if created:
            self.life, self._beat, self.slot = life, -1, slot  # in this order, as `beats` reads the slot first
        return created

    def beats(self) -> Steps[None]:
        """Renews the lease repeatedly; runs concurrently with the other steps."""
        while not self.over:
            if self.slot >= 0:
                slot, life, beat = self.slot, self.life, self._beat + 1
                name, self._beat = lease_name("u", slot, life), beat
                try:
                    yield Create(f"{name}-{beat:08d}", b"")
                    if beat:
                        yield Remove(f"{name}-{beat - 1:08d}")
                    if (self.slot, self.life) != (slot, life):  # freed meanwhile, and removed before it was created
                        yield Remove(f"{name}-{beat:08d}")
                except OSError:  # the other steps report it, and wait
                    pass
            yield Sleep(self.terms.timeout_s / BEATS)

    def release(self) -> Steps[None]:
        """Frees its slot, in the store alone."""
        slot, life, self.slot = self.slot, self.life, -1
        yield from self.store.create(lease_name("v", slot, life), {})
        if self._beat >= 0:
            yield from self.store.remove(f"{lease_name('u', slot, life)}-{self._beat:08d}")

    # --- what the store shows -----------------------------------------------------------------------------------------

    def look(self, round: int | None) -> Steps[None]:
        """Lists the objects from a round on; None for those that sort after all rounds: states, claims, signs of life and ends.

        Raises: SlotLostError.
        """
        names = yield from self.store.names("s" if round is None else f"r{round:08d}")
        self.looked_s = self.store.asked_s
        if self.terms.seal.proves_writers:
            names = yield from self._proved(names)
        self.listed = names
        self.seen.look(names, self.looked_s)
        if self.slot >= 0 and self.seen.lives.get(self.slot, self.life) > self.life:
            raise SlotLostError(f"slot {self.slot} belongs to another process")

    def _proved(self, names: Sequence[str]) -> Steps[list[str]]:
        """The names that are proved to come from listed keys, each for slots that it may have.

        Claims and ends of slots, and outcomes of later rounds, are read once each; a name of a life needs the claim of that life.
        """
        matches = [match for match in parsed(names) if match[0] not in self.states.unsound]
        for match in matches:
            name, later = match[0], match["commit"] is not None and int(match["round"]) > self.round
            if (later or match["kind"] in ("t", "v")) and name not in self._believed:
                item = yield from self.store.try_read(name)
                if item is None:
                    continue  # it does not show yet
                self._believed[name] = isinstance(item, Item)
                if isinstance(item, TransportError):
                    self.work.say(str(item))
        kept: list[str] = []
        for match in matches:
            slot, life = match["sender"] or match["slot"], match["of"] or match["life"]
            claimed = slot is None or self._believed.get(f"t{slot}-{life}", False)
            if claimed and self._believed.get(match[0], True):
                kept.append(match[0])
        return kept

    def alive(self) -> set[int]:
        """The slots whose holders may be alive, by the last look."""
        return self.seen.live(self.looked_s, self.terms.timeout_s)

    def put_state(self, head: Mapping[str, Any], body: bytes) -> Steps[None]:
        """Creates the state of this round, and removes what is older than the last state but one."""
        yield from self.store.create(state_name(self.round), head, body)
        yield from self.look(None)
        yield from self.states.remove_older(self.seen.states, self.round)


def _one_by_one(run: object) -> dict[str, Any]:
    """What the object `run` holds, with each setting by its own name."""
    named = dict(run) if isinstance(run, Mapping) else {}
    settings = named.pop("settings", {})
    return {**settings, **named} if isinstance(settings, Mapping) else {**named, "settings": settings}
