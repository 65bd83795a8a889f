"""What has happened to the other workers of an elastic run, one sentence for each event."""

from collections.abc import Callable, Collection, Iterator, Mapping

from gossamer.record.progress import say
from gossamer.transport.elastic.members import MemberStatus, SlotEntry
from gossamer.transport.elastic.transport import ElasticTransport

__all__ = ["changes", "say_changes"]


def say_changes(
    known: Mapping[int, SlotEntry], transport: ElasticTransport, *, round: int, rounds: int = 1 << 31,
    done: Collection[int] = (),
) -> dict[int, SlotEntry]:  # fmt: skip
    """Says a line for each event that a worker has learnt of since it knew that; returns what it knows now."""
    now = {entry.slot: entry for entry in transport.view().entries}
    for sentence in changes(known, now, transport.worker, rounds, transport.why, done):
        say(f"round {round + 1}: {sentence}")
    return now


def changes(
    before: Mapping[int, SlotEntry], after: Mapping[int, SlotEntry], me: int, rounds: int, why: Callable[[int], str],
    done: Collection[int] = (),
) -> Iterator[str]:  # fmt: skip
    """The sentences about what one worker's view has learnt.

    Args:
        before: its view when it was last asked; `after` is its view now.
        me: the worker's own slot, of which nothing is said.
        rounds: of the whole run.
        why: the reason for which a worker is suspected.
        done: the workers that have said that they have taken their last step.

    >>> a = SlotEntry(2, 0, 7, MemberStatus.ALIVE, 0, "127.0.0.1:4000")
    >>> [*changes({2: a}, {2: a._replace(status=MemberStatus.SUSPECT)}, 0, 9, lambda slot: "it is silent")]
    ['worker 2 is suspected: it is silent']
    """
    for slot, now in sorted(after.items()):
        was = before.get(slot)
        if slot == me or (was is not None and was.rank == now.rank):
            continue
        other = was is None or was.nonce != now.nonce
        if other and was is not None and was.address:
            yield f"worker {slot} is replaced: another process has taken its slot"
        if now.status == MemberStatus.JOINING:
            yield f"worker {slot} joins, and fetches its state"
        elif now.status == MemberStatus.GHOST:
            yield f"worker {slot} warms its inner optimizer as a ghost, of whom nobody hears yet"
        elif now.status == MemberStatus.SUSPECT:
            yield f"worker {slot} is suspected: {why(slot)}"
        elif now.status == MemberStatus.LEFT:
            yield f"worker {slot} has {'finished' if slot in done or now.round + 1 >= rounds else 'left'}"
        elif other or (was is not None and was.status < MemberStatus.ALIVE):
            yield f"worker {slot} has joined, and takes part from round {now.since + 1} on"
        else:
            yield f"worker {slot} is back, and takes part from round {now.since + 1} on"
