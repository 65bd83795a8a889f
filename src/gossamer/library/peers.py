"""The other workers of an `Outer`: the settings that all must agree about, and private connections."""

import atexit
import contextlib
import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.codecs import Codec
from gossamer.errors import PeerError, first_line
from gossamer.layout import Layout
from gossamer.library.flat import Flat
from gossamer.library.guard import Rest, broadcast, fingerprints, must_be_alike
from gossamer.library.lane import Lane
from gossamer.record.jsonl import json_from_peer
from gossamer.record.lineage import choice_in_words
from gossamer.rounds.compatibility.combine import Method
from gossamer.transport.contract import Delivery, Reduce, Ticket, TimedTransport, Transport, Wait
from gossamer.transport.memory import MemoryNetwork
from gossamer.transport.processes.backend import Backend, backend_of, gloo_group, hang_up, nccl_group
from gossamer.transport.processes.group import GroupTransport, all_reduce
from gossamer.transport.processes.launch import agree, part
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.sockets import SocketTransport
from gossamer.transport.processes.store import Entries, NoAnswerError
from gossamer.transport.secret import environment_secret
from gossamer.transport.sockets.addresses import listen, shown
from gossamer.transport.sockets.connection import Endpoint

_LONGEST = 160  # characters of a peer's words in an error
_ANSWER_S = 2.0
"""Seconds that a store may take to answer a query that only informs."""


class Common(NamedTuple):
    """Settings that all workers must have in common, each as text that two workers compare."""

    model: str
    rule: str
    topology: str
    codec: str
    schedule: str
    reduction: str
    rest: str
    local_steps: str
    seed: str


def common_of(m: Method, flat: Flat, *, reduction: str, rest: Rest, local_steps: str, seed: int) -> Common:
    """The settings that a worker of this configuration must have in common with the others.

    Numbers of local steps may differ, except where messages in flight are counted in steps.
    """
    same_steps = m.schedule.overlap_steps or m.rule.delay_rounds
    return Common(
        describe_model(flat.layout, flat.x.dtype, flat.words),
        choice_in_words(m.rule.name, m.rule.options),
        choice_in_words(m.topology.name, m.topology.options),
        f"{_codec(m.codec)}{f' and back {_codec(m.codec.back)}' if m.codec.back else ''}",
        str(m.schedule),
        reduction,
        rest,
        local_steps if same_steps else "any",
        str(seed),
    )


def describe_model(layout: Layout, dtype: torch.dtype, shard: str) -> str:
    """The names and the layout of the parameters, as text that two workers compare."""
    shapes = hashlib.sha256(repr(layout).encode()).hexdigest()[:8]
    return f"{len(layout.leaves)} tensors of {layout.numel} numbers in {dtype}, whose names and shapes hash to {shapes}{shard}"


def must_agree(statements: Sequence[object], common: Common) -> None:
    """Raises PeerError, with what each of two workers has, for the first thing in which workers differ from worker 0."""
    # The schedule first: other fragments change the layout of the same model, and so its hash.
    for key in sorted(Common._fields, key=lambda one: one != "schedule"):
        place = Common._fields.index(key)
        words = [_stated(theirs, place) for theirs in statements]
        if odd := [worker for worker, theirs in enumerate(words) if theirs != words[0]]:
            who = f"worker {odd[0]} differs" if len(odd) == 1 else f"workers {', '.join(map(str, odd))} differ"
            raise PeerError(
                f"{who} from worker 0 in {key.replace('_', ' ')}: worker {odd[0]} has "
                f"{words[odd[0]]:.{_LONGEST}} and worker 0 {words[0]:.{_LONGEST}}; make Outer with the same on all workers"
            )
    for worker, theirs in enumerate(statements):
        if not isinstance(theirs, list) or len(theirs) != len(common):
            raise PeerError(
                f"worker {worker} compares other things than the {len(common)} of this worker; install the same gossamer version "
                "everywhere"
            )


def _stated(statement: object, place: int) -> str:
    return str(statement[place]) if isinstance(statement, list) and place < len(statement) else "nothing"


def _codec(codec: Codec) -> str:
    return choice_in_words(codec.name, codec.options)


def read_losses(entries: Entries, workers: int) -> dict[int, float]:
    """The losses published in a store, by worker, without those that are no finite number."""
    losses = dict[int, float]()
    for worker, text in entries.several([str(worker) for worker in range(workers)]).items():
        loss = json_from_peer(text)
        if type(loss) in (int, float) and abs(loss) < 1e300:
            losses[int(worker)] = float(loss)
    return losses


class Peers:
    """The connections of one worker with the others.

    Args:
        transport: carries the messages of the exchanges.
        reduce: the backend's own all-reduce, where it was asked for.
        group: its own process group, which `close` ends.
        member: this process among the others; None where there are none.
        start: identifies this start of the loop on all workers.
        timeout_s: how long to wait for the others.
    """

    def __init__(
        self,
        transport: Transport,
        reduce: Reduce | None = None,
        group: dist.ProcessGroup | None = None,
        member: Member | None = None,
        start: str = "",
        timeout_s: float = 300.0,
    ) -> None:
        self.transport, self.reduce = transport, reduce
        self.start = start or secrets.token_hex(8)  # a repeated one would let the states of two runs pass for one
        self._group, self._member, self._timeout_s, self._is_silent = group, member, timeout_s, False
        if group is not None:
            atexit.register(self._hang_up)  # a thread that is still inside torch would abort the process

    @classmethod
    def of_site(cls, transport: TimedTransport, lane: Lane | None, start: str, timeout_s: float) -> "Peers":
        """The peers of a process of an elastic site; `lane` is None where the site has come back to a running run."""
        member = None
        if lane is not None:
            store = PrefixStore(start, lane.store)
            member = Member.at(lane.worker, lane.n, torch.device("cpu"), store, secret=environment_secret())
        return cls(transport, None, None, member, start, timeout_s)

    def part(self) -> None:
        """Stops using the store: from now on a worker decides alone, and publishes nothing."""
        self._member = None

    @classmethod
    def none(cls) -> "Peers":
        """A worker that is alone."""
        return cls(MemoryNetwork(1).transport(0))

    @classmethod
    def of(
        cls,
        user_group: dist.ProcessGroup | None,
        lane: Lane,
        common: Common,
        x: Tensor,
        others: Mapping[str, Tensor],
        *,
        timeout_s: float,
    ) -> "Peers":
        """Meets the other workers: checks that all have the same configuration, and broadcasts what worker 0 starts from.

        Args:
            user_group: the user's group, which only determines the backend.
            lane: of this process; it meets those that hold the same shard of the other workers.
            x: the parameters; they become those of worker 0.
            others: frozen parameters and buffers, compared or broadcast as `common.rest` says.
        Raises: PeerError when workers differ or do not come.
        """
        backend, store = "gloo" if lane.joint is not None else backend_of(user_group), lane.store
        member = Member.at(lane.worker, lane.n, x.device, store, secret=environment_secret())
        rest = fingerprints(others, numbers=common.rest == "compare") if common.rest != "own" else []
        with contextlib.ExitStack() as undo:
            # Listens before it publishes its address: a reader may connect at once.
            listener = None if lane.keys is None else undo.enter_context(listen(lane.address, 0))
            address = "" if listener is None else shown(*listener.getsockname()[:2])
            statements = all_at("the start of Outer", member, [common, rest, secrets.token_hex(8), address], timeout_s)
            must_agree([one[0] if isinstance(one, list) and len(one) == 4 else None for one in statements], common)
            must_be_alike([one[1] for one in statements], list(others))
            start = str(statements[0][2])
            # In a part of the store for this start, without the reports of an earlier Outer of the same workers.
            member = member._replace(store=PrefixStore(start, store), behind=lane.behind)
            run = int(hashlib.sha256(repr((common, lane.shard, start)).encode()).hexdigest()[:16], 16)
            group, reduce = None, None
            if listener is not None:
                endpoint = Endpoint(listener, run, member.secret, timeout_s, keys=lane.keys)
                transport = SocketTransport(member, endpoint, [one[3] for one in statements])
                carry = transport.broadcast
            else:
                group = _group_of(backend, member, lane, timeout_s)
                transport = GroupTransport(member, run=run, timeout_s=timeout_s, group=group)
                reduce = all_reduce(timeout_s, group) if common.reduction == "all_reduce" else None
                carry = partial(_broadcast_in, group)
            peers = cls(transport, reduce, group, member, start, timeout_s)
            undo.callback(peers.close)
            carrier = x.device if backend == "nccl" else torch.device("cpu")
            for tensor in (x, *(others.values() if common.rest == "broadcast" else ())):
                broadcast(tensor, carry, carrier)
            undo.pop_all()
            return peers

    def agree(self, call: str, facts: object) -> list[Any]:
        """The facts of each worker in a call of `Outer`, in worker order. Raises PeerError naming those that time out."""
        return [facts] if self._member is None else all_at(f"{call}() of Outer", self._member, facts, self._timeout_s)

    def publish(self, topic: str, facts: object) -> None:
        """Publishes facts without waiting for readers; does nothing where the store is gone, as at the end."""
        if self._member is not None and (entries := self._notices(topic)) is not None:
            with self._asking():
                entries.set(str(self._member.worker), json.dumps(facts))

    def published(self, topic: str) -> dict[int, Any]:
        """The latest facts of each worker, by worker; without those that are no JSON."""
        latest = dict[int, Any]()
        if self._member is not None and (entries := self._notices(topic)) is not None:
            with self._asking():
                for worker, text in entries.several([str(worker) for worker in range(self._member.workers)]).items():
                    if (facts := json_from_peer(text)) is not None:
                        latest[int(worker)] = facts
        return latest

    def losses(self, loss: float) -> dict[int, float]:
        """The latest published losses of the others, and this one's."""
        if self._member is None:
            return {0: loss}
        if math.isfinite(loss):
            self.publish("loss", loss)
        latest = dict[int, float]()
        if (entries := self._notices("loss")) is not None:
            with self._asking():
                latest = read_losses(entries, self._member.workers)
        return {**latest, self._member.worker: loss}

    def _notices(self, topic: str) -> Entries | None:
        """The published entries of a topic; None once the store has failed, so that training does not wait at each step."""
        if self._member is None or self._is_silent:
            return None
        return self._member.entries.within(min(_ANSWER_S, self._timeout_s / 4)).under(topic)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except NoAnswerError:
            self._is_silent = True
        except RuntimeError:  # its process has ended
            pass

    def timed_reduce(self, add: Callable[[float], None]) -> Reduce | None:
        """The all-reduce, which reports the seconds of each call; None where none was asked for."""
        if (reduce := self.reduce) is None:
            return None

        def timed(frames: Sequence[Tensor], ticket: Ticket) -> None:
            start_s = time.perf_counter()
            reduce(frames, ticket)
            add(time.perf_counter() - start_s)

        return timed

    def waits(self, fragments: int) -> tuple[list[Wait], list[Delivery]]:
        """The waits for messages of so many fragments since the last call, and the messages that came."""
        if not isinstance(self.transport, TimedTransport):
            return [], []
        waits = [wait for wait in self.transport.waits() if wait.ticket.fragment < fragments]
        return waits, self.transport.deliveries()

    def close(self) -> None:
        """Ends all transfers and connections; the user's own process group stays open. A second call does nothing."""
        self.transport.close()
        self._hang_up()
        if self._member is not None and self._member.behind is not None:
            self._member.behind.close()

    def _hang_up(self) -> None:
        if self._group is not None:
            hang_up(self._group)
            if backend_of(self._group) == "nccl":
                # Ends NCCL's own threads; destroying the group would first wait for transfers to a peer that may be gone.
                self._group.shutdown()
        self._group = None
        atexit.unregister(self._hang_up)


def all_at(place: str, member: Member, facts: object, timeout_s: float) -> list[Any]:
    """The facts of each worker at a place in the loop that all must come to. Raises: PeerError naming who did not."""
    try:
        statements = agree(member, "gossamer.Outer", [place, facts], timeout_s=timeout_s)
    except PeerError as error:
        raise PeerError(f"not all workers came to {place} together: {error}") from error
    places = [one[0] if isinstance(one, list) and len(one) == 2 else None for one in statements]
    if odd := [worker for worker, theirs in enumerate(places) if theirs != place]:
        part(member, min(timeout_s, 10.0))  # so that all can report it rather than a lost store
        raise PeerError(
            f"worker {odd[0]} came to {places[odd[0]]!s:.60} where worker {member.worker} came to {place}; let all workers call "
            "the same methods of Outer in the same order, and make Outer on all of them at the same place"
        )
    return [one[1] for one in statements]


def _broadcast_in(group: dist.ProcessGroup, data: Tensor) -> None:
    group.broadcast(data, 0).wait()


def _group_of(backend: Backend, member: Member, lane: Lane, timeout_s: float) -> dist.ProcessGroup:
    """A private process group, which `close` may close."""
    store = PrefixStore("lane", member.store)
    if backend == "gloo":
        try:
            return gloo_group(store, member.worker, member.workers, timeout_s, lane.address)
        except RuntimeError as error:
            raise PeerError(
                f"worker {member.worker} could not connect to the other {member.workers - 1} ({first_line(error)}); look at "
                "their logs, and check that their machines reach each other"
            ) from error
    return nccl_group(store, member.worker, member.workers, timeout_s)
