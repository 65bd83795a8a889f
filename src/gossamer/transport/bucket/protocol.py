"""How workers that share only a store train one run: slots, leases, rounds and states are objects that are created once.

    key                       the key of the run, where it has [peers] (`gossamer.transport.bucket.signed`)
    run                       what all have in common; the first worker writes it
    r00000012-from-00003-0001 what the worker of slot 3, the second there, sends in round 12
    r00000012-mean-HASH       the mean of some of these
    r00000012-commit          the participants and the hash of the mean of round 12: the first one created counts
    s00000012                 the state of a worker after 12 rounds; s00000012-00003 is that of slot 3, where they differ;
                              s00000000 is that of the start, where workers cannot make it by themselves
    t00003-0001               a process takes slot 3 as the second one
    u00003-0001-00000007      its eighth sign of life
    v00003-0001               it has ended

One listing from the round on shows all that a worker needs, as leases sort behind rounds.

**A slot** is free where no life of it was claimed, its last life has ended (v), or neither the number of its sign of life (u) nor
a message of its holder has moved for `timeout_s` by the observer's own monotonic clock; else it is held. A process takes a free
one by creating the claim (t) of the next life, which only one of several can. A holder that sees a claim after its own has lost
the slot. Until it sees that, there are two holders, which does no harm: a commit counts one message of a slot.

**A round** is open until its commit is created. Any worker closes it, one after the other in turn, once all live workers have
sent or the deadline is over, and the commit has the same effect for all: a dead worker holds up the others only until its lease
ends, and a state is an earlier one with the commits since then. A worker whose message a commit leaves out removes it, and
resumes from an earlier state.

**The order of writes** makes each moment one at which a process may die:

1. `key` and `run` before all else, so that a process of another run takes no slot;
2. a claim before anything of that life: with keys, other names of a life count only with it;
3. messages and the mean before the commit that names them, so that a closed round can be read;
4. the state of the start before the first message; a later one after its commit, by the closer, or by each worker in gossip: if
   that process dies in between, the next one is due later;
5. what is older than the last state but one is removed after that: messages and means first, older states last, as the oldest one
   marks where the next removal begins. Commits stay: they are small, record the run, and keep a slow worker from closing an old
   round once more;
6. the next sign of life before the last one is removed, and the end of a life (v) before its last sign.

**Trust.** The mean in the store saves reading all messages. Where objects prove who has written them, a mean by another key is
not trusted: each worker takes the mean of the messages that the commit names, so that the writer of a false mean is reported
and changes nothing.

**Gossip.** The workers differ. A commit has no mean there: each worker takes the messages of its peers, as the topology has them
over those that the commit names, so both ends of an exchange count it or neither does. A worker that takes over a slot
continues from its last state, or from a newer one of another slot where that is old.

A process is a `SlotHolder` (`slots`); a worker is one that takes part in rounds (`rounds`), which it closes (`closing`), and
resumes from a state (`resumption`, `states`). `requests` has what they ask of the store.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from gossamer.transport.bucket.bucket import Seal, SecretSeal
from gossamer.transport.bucket.objects import Basis, Commit


class StoreTerms(NamedTuple):
    """The settings of the protocol that all workers of a run have in common."""

    run: Mapping[str, Any]
    """The content of the object `run`, which must be the same for all."""
    workers: int
    rounds: int
    timeout_s: float
    """Seconds without a move of its lease after which a slot is free."""
    deadline_s: float
    """Seconds that a worker waits in a round for others that live."""
    seal: Seal = SecretSeal()
    look_s: float = 0.5
    """The shortest pause between two looks."""
    rest_s: float = 15.0
    """The longest pause between two looks."""
    gossip: bool = False
    """Whether this is gossip: each worker takes the messages of its peers, and has separate states."""
    rejoin_rounds: int = 0
    """In gossip: most rounds by which a state may be behind; an older one is given up for a newer one of another slot."""
    start_in_store: bool = False
    """Whether the first worker puts the state of the start into the store, as workers cannot make it by themselves."""

    @property
    def compares_states(self) -> bool:
        """Whether messages say what all have in common, so that a newcomer need not believe the writer of a state."""
        return self.seal.proves_writers and not self.gossip


class StoreProcess(Protocol):
    """What each process of a run in a store provides."""

    def agree(self, identity: str) -> None:
        """Checks that the store holds this run; one that was started again has another identity. Raises: ConfigError."""
        ...

    def asked(self) -> bool:
        """Whether it was asked to leave."""
        ...

    def say(self, sentence: str) -> None:
        """Reports a sentence to the user."""
        ...


class StoreWorker(StoreProcess, Protocol):
    """The computations of a worker; bodies of objects are bytes here."""

    def begin(self, slot: int, life: int) -> int:
        """Gives it a slot; returns the rounds behind its own newest state, 0 for that of the start."""
        ...

    def restore(self, after: int) -> str | None:
        """Restores its own state after so many rounds; returns its hash, empty at the start, None where it has none."""
        ...

    def load(self, after: int, donor: int, body: memoryview) -> str:
        """Takes a state from the store; returns its hash. Raises: CheckpointError, of the kind "damaged" for what is no state."""
        ...

    def add(self, commit: Commit, mean: memoryview) -> None:
        """Adds the mean of a round in which this worker had no part. Raises: CheckpointError."""
        ...

    def start(self, round: int, begun: Basis) -> None:
        """Begins to train from this state."""
        ...

    def common(self) -> str:
        """The hash of what all workers have in common now, where they are equal after each round."""
        ...

    def train(self, round: int) -> bytes:
        """Trains a local phase; returns its message."""
        ...

    def steps(self) -> int:
        """Inner steps behind its slot."""
        ...

    def is_sound(self, round: int, body: memoryview) -> bool:
        """Whether a message may count."""
        ...

    def is_mean(self, round: int, own: bytes, there: memoryview) -> bool:
        """Whether another worker's mean equals this one, up to rounding on other hardware."""
        ...

    def mean(self, round: int, messages: Mapping[int, bytes | memoryview]) -> bytes:
        """The mean of the messages of these slots."""
        ...

    def finish(self, commit: Commit, mean: memoryview) -> None:
        """Ends the round with its mean. Raises: CheckpointError."""
        ...

    def peers(self, round: int, parts: Collection[int]) -> Collection[int]:
        """In gossip: the slots from which it takes messages in a round over these slots."""
        ...

    def mix(self, commit: Commit, messages: Mapping[int, memoryview]) -> None:
        """Ends the round with the messages of its peers. Raises: CheckpointError."""
        ...

    def state(self, finished: int) -> bytes | None:
        """Its state, where one is due after so many rounds."""
        ...
