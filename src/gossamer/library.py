"""Gossamer in an existing training loop: the user's model, inner optimizer and data, and three more lines."""

import atexit
import hashlib
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Annotated, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.codecs import Codec, codec_of, exact
from gossamer.errors import CheckpointError, ConfigError
from gossamer.guard import (
    Rest,
    broadcast,
    fingerprints,
    must_be_alike,
    must_be_trainable,
    must_not_be_wrapped,
    rest_of,
)
from gossamer.layout import arrange, attach, keep_attached, layout_of
from gossamer.options import Count, Interval, Positive, check_option
from gossamer.rounds.facts import Facts
from gossamer.rounds.loop import OuterLoop, UnderWay
from gossamer.rounds.method import FITTING, method_of, settled_rule, warnings_of
from gossamer.rounds.schedule import Schedule, Stop
from gossamer.rules import Rule, make_rule
from gossamer.topologies import Topology, make_topology
from gossamer.transport import Transport
from gossamer.transport.backend import backend_of, hang_up
from gossamer.transport.group import GroupTransport
from gossamer.transport.launch import agree
from gossamer.transport.member import Member
from gossamer.transport.memory import MemoryNetwork
from gossamer.transport.secret import environment_secret
from gossamer.tree import leaves, must_fit

__all__ = ["Outer", "OuterState"]

log = logging.getLogger("gossamer")


class OuterState(TypedDict):
    """The value of `Outer.state_dict`."""

    outer: list[Tensor]
    """The state of the rule."""
    under_way: list[UnderWay]
    """The exchanges in flight."""
    rounds: int
    steps: int
    """Inner steps since the last round ended."""


class Outer:
    """The outer loop around a training loop: counts inner steps, and exchanges with the peers after every `local_steps` of them.

        outer = gossamer.Outer(model, gossamer.gasloc(), local_steps=30)      # after init_process_group
        for batch in data:
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            outer.step()
        outer.close()

    Args:
        model: its trainable parameters become views of one flat buffer; optimizers made before or after keep working. All
            workers start from the parameters of worker 0. No DistributedDataParallel may be around it.
        rule: a name from `RULES`, or a `Rule`; one on gradients, such as `data_parallel`, is refused.
        topology: a name from `TOPOLOGIES`, or a `Topology`; by default random pairs, or the topology that the rule requires:
            the complete graph, a ring, a tree, random pushes.
        local_steps: inner steps of a round; workers may differ where the schedule has no overlap.
        codec: a name from `CODECS`, or a `Codec`; by default nothing is lost.
        schedule: exchange in several fragments, and overlap with training; by default neither.
        timeout_s: how long an exchange waits for a peer.
        process_group: its members are the workers, in the order of their ranks; the default group when None. It may be made
            with any backend string that has gloo for the CPU, or with NCCL alone, which was never run. Connections are
            Outer's own.
        rest: what is done at the start with frozen parameters and buffers, which are never exchanged: "compare" refuses
            workers that differ, "broadcast" takes those of worker 0, "own" leaves them.
    Raises: ConfigError and PairingError for what cannot work; PeerError when workers disagree on model, rule, topology or codec.
    Cost: the rule's state, one message, and those received from the peers; the exchange blocks, and its receives are posted a
        whole local phase before. At the start a hash of all frozen numbers (1 GB/s). Buffers such as batch-norm statistics
        stay each worker's own after the start. Parameters in bf16 or fp16 are sent as such and have an outer state in fp32:
        twice the bytes for the rule's copies, and one fp32 copy of the parameters more where the rule does not keep the start
        of the round (as `gossip` and `local_sgd`).

    Parameters that `load_state_dict(assign=True)` has replaced are taken back into the flat buffer at the next exchange. A
    model that was converted, moved or resized, or of which more became trainable, is refused there in a sentence.

    Without a process group there is one worker, and the rule is its limit for one: an outer momentum, or nothing.

    >>> import gossamer, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> outer = gossamer.Outer(model, gossamer.gasloc(lr=0.5, momentum=0.0), local_steps=1)
    >>> before = model.weight.detach().clone()
    >>> with torch.no_grad(): _ = model.weight.add_(1.0)
    >>> outer.step()
    True
    >>> bool(torch.allclose(model.weight, before + 0.5))
    True
    """

    def __init__(
        self, model: nn.Module, rule: str | Rule, *, topology: str | Topology | None = None, local_steps: int = 30,
        seed: int = 0, codec: str | Codec | None = None, schedule: Schedule | None = None, timeout_s: float = 300.0,
        compile: bool = False, process_group: dist.ProcessGroup | None = None, rest: Rest = "compare",
    ) -> None:  # fmt: skip
        must_be_trainable(model)
        for name, given, kind in (
            ("local_steps", local_steps, Count), ("seed", seed, int), ("timeout_s", timeout_s, Positive),
            ("compile", compile, bool), ("rest", rest, Rest),
        ):  # fmt: skip
            check_option("Outer", name, given, kind)
        rule, codec, schedule = _rule(rule), _codec(codec), _schedule(schedule)
        self.local_steps, self.seed, self.model = local_steps, seed, model
        self.ranks = _ranks(process_group)
        """The workers, as ranks of the default process group; one of them alone without a group."""
        self.worker, self.n = self.ranks.index(dist.get_rank() if dist.is_initialized() else 0), len(self.ranks)
        topology = _topology(topology, rule, self.n, seed)
        facts = Facts(
            driver="library", workers=self.n, rule=rule, topology=topology, codec=codec, schedule=schedule,
            local_steps=local_steps,
        )  # fmt: skip
        facts = facts._replace(rule=settled_rule(facts))
        self.method = method_of(facts, compile=compile)
        for sentence in warnings_of(facts):
            log.warning(sentence)
        self.layout, spans = arrange(layout_of(model), self.method.schedule.fragments, self.method.schedule.pattern)
        self.x = attach(model, self.layout)
        self.rounds: int = 0
        self.steps: int = 0
        self._closed = False
        self._watched = True  # until the first round has ended, for a wrapper that is put on later
        self._group: dist.ProcessGroup | None = None
        self._transport = self._join(process_group, timeout_s, rest)
        parts = [(self.x[a:b], self.layout.slice(a, b)) for a, b in spans]
        self._loop = OuterLoop(
            self.method, self._transport, parts, local_steps=local_steps, full_steps=local_steps, seed=seed
        )
        self._stops: list[Stop] = []

    def step(self) -> bool:
        """Counts one inner step; and exchanges after every `local_steps` of them. Returns whether it exchanged.

        Call it after `optimizer.step()`. Raises: PeerError naming the worker that failed first; ConfigError after `close`, for a
            wrapper that was put around the model, or when its parameters are not what they were.
        """
        self._must_be_open("step")
        if self._watched and self.steps == 0:
            must_not_be_wrapped(self.model, self.ranks)
        if not self._stops:  # only when a step follows, so that nothing is announced after the last exchange
            self._stops = [stop for stop in self._loop.stops(self.rounds) if stop.step > self.steps]
            self._loop.announce(self.rounds, self._stops[0])
        self.steps += 1
        with torch.no_grad():
            self._loop.advance()
            while self._stops and self._stops[0].step == self.steps:
                stop = self._stops.pop(0)
                self._look()
                self._loop.post(self.rounds, stop)
                self._loop.receive(self.rounds, stop)
                if self._stops:
                    self._loop.announce(self.rounds, self._stops[0])
        if self._stops:
            return False
        self.steps, self.rounds = 0, self.rounds + 1
        return True

    def finish(self) -> None:
        """Finishes the exchanges in flight when training ends; without overlap there are none.

        Raises: PeerError; ConfigError as `step` does.
        """
        self._must_be_open("finish")
        with torch.no_grad():
            self._look()
            self._loop.end()

    def state_dict(self) -> OuterState:
        """The outer state, to be saved together with your model and optimizer after any step, the same on all workers.

        It holds the exchanges in flight, which are sent again when it is loaded.
        """
        return {
            "outer": [leaf.clone() for leaf in leaves(self._loop.state)],
            "under_way": self._loop.state_under_way(),
            "rounds": self.rounds,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved outer state, after the model's parameters were loaded; training continues from that step.

        Raises: CheckpointError if it does not fit rule, model, schedule and local steps, if it is incomplete, or if this Outer
            has exchanges in flight: load it before the first step of a round.
        """
        self._must_be_open("load_state_dict")
        if self._loop.under_way:
            raise CheckpointError(
                f"a state was given after {self.steps} steps of round {self.rounds}, with {len(self._loop.under_way)} exchanges "
                "in flight; load it into a new Outer"
            )
        mine = leaves(self._loop.state)
        try:
            rounds, steps, saved = state["rounds"], state["steps"], list(state["outer"])
            check_option("a saved outer state", "rounds", rounds, Annotated[int, Interval(f"[0, {(1 << 31) - 1}]")])
            check_option(
                "a saved outer state", "steps", steps, Annotated[int, Interval(f"[0, {self.local_steps - 1}]")]
            )
            must_fit(saved, mine)
            under_way = {(one["round"], one["fragment"]) for one in state["under_way"]}
            if under_way and under_way != (expected := self._sent_by(rounds, steps)):  # none after `finish`
                raise ValueError(f"{sorted(under_way)} are in flight where the schedule has {sorted(expected)}")
            self._loop.restore_under_way(state["under_way"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._loop.under_way.clear()
            raise CheckpointError(
                f"the outer state does not fit rule '{self.method.rule.name}' with {self.local_steps} local steps on this model "
                f"({error!r:.200}); load it with the rule, the model, the schedule and the local steps it was saved with"
            ) from None
        for own, other in zip(mine, saved, strict=True):
            own.copy_(other)
        self.rounds, self.steps, self._stops = rounds, steps, []

    def _sent_by(self, rounds: int, steps: int) -> set[tuple[int, int]]:
        """Round and fragment of what has been sent and not received after so many steps of this round."""
        sent = set[tuple[int, int]]()
        for round in range(max(0, rounds - self.method.rule.delay_rounds - 2), rounds + 1):
            for stop in self._loop.stops(round):
                if round < rounds or stop.step <= steps:
                    sent |= {(round, p) for p in stop.sends}
                    sent -= {(round - lag, p) for p, lag in stop.receives}
        return sent

    def close(self) -> None:
        """Ends the outer loop and its connections; your own process group stays open. A second call does nothing."""
        self._closed = True
        self._loop.under_way.clear()
        self._transport.close()
        self._hang_up()

    def __enter__(self) -> "Outer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _must_be_open(self, call: str) -> None:
        if self._closed:
            raise ConfigError(
                f"{call}() was called on an Outer that was closed after round {self.rounds}; call close() last, or make another"
            )

    def _look(self) -> None:
        """What must hold whenever the flat buffer is sent or overwritten."""
        if self._watched and not self._stops:
            self._watched = False
            must_not_be_wrapped(self.model, self.ranks)
        keep_attached(self.model, self.layout, self.x)

    def _join(self, theirs: dist.ProcessGroup | None, timeout_s: float, rest: Rest) -> Transport:
        """Checks that all workers have the same configuration, and broadcasts what worker 0 starts from."""
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                log.warning(
                    "WORLD_SIZE is %s and there is no process group, so this worker trains alone; call "
                    "torch.distributed.init_process_group before Outer is made",
                    os.environ["WORLD_SIZE"],
                )
            return MemoryNetwork(1).transport(0)
        m, others = self.method, rest_of(self.model)
        common = (
            self.layout, m.rule.name, m.rule.options, m.topology.name, m.topology.options, *_identity(m.codec),
            m.codec.back and _identity(m.codec.back), m.schedule, rest,
            self.local_steps if m.schedule.overlap_steps or m.rule.delay_rounds else None, self.seed,
        )  # fmt: skip
        digest = hashlib.sha256(repr(common).encode()).hexdigest()[:16]
        backend = backend_of(theirs)
        # Groups of the same processes have one place in the store; others never read what these write.
        place = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        store = PrefixStore(f"outer/{place}", dist.distributed_c10d._get_default_store())  # it has no public name
        member = Member.at(self.worker, self.n, self.x.device, store, secret=environment_secret())
        said = fingerprints(others, numbers=rest == "compare") if rest != "own" else []
        must_be_alike(agree(member, digest, said, timeout_s=timeout_s), list(others))
        group = dist.new_group(  # connections of our own, which `close` may close
            self.ranks, timedelta(seconds=timeout_s), backend,
            use_local_synchronization=self.n < dist.get_world_size(),
        )  # fmt: skip
        assert isinstance(group, dist.ProcessGroup)  # every worker is in it
        self._group = group
        atexit.register(self._hang_up)  # a thread that is still inside torch would abort the process
        carrier = self.x.device if backend == "nccl" else torch.device("cpu")
        for tensor in (self.x, *(others.values() if rest == "broadcast" else ())):
            broadcast(tensor, group, carrier)
        return GroupTransport(member, run=int(digest, 16), timeout_s=timeout_s, group=group)

    def _hang_up(self) -> None:
        if self._group is not None and dist.is_initialized():
            hang_up(self._group)
            dist.destroy_process_group(self._group)
        self._group = None
        atexit.unregister(self._hang_up)


def _rule(given: object) -> Rule:
    if isinstance(given, str):
        return make_rule(given)
    if not isinstance(given, Rule):
        raise ConfigError(
            f"Outer got {_kind(given)} as rule; it takes a rule, such as gossamer.gasloc(), or its name, and your optimizer "
            "stays in your own loop: give a rule"
        )
    return given


def _codec(given: object) -> Codec:
    if isinstance(given, str):
        return codec_of(given)
    if not isinstance(given, Codec | None):
        raise ConfigError(
            f"Outer got {_kind(given)} as codec; it takes a codec or its name: give one, or None for no loss"
        )
    return given or exact()


def _schedule(given: object) -> Schedule:
    if not isinstance(given, Schedule | None):
        raise ConfigError(f"Outer got {_kind(given)} as schedule; it takes a gossamer.Schedule: give one, or None")
    return given or Schedule()


def _topology(given: object, rule: Rule, n: int, seed: int) -> Topology:
    if isinstance(given, str | None):
        return make_topology(given or FITTING[rule.needs], n, seed=seed)
    if not isinstance(given, Topology):
        raise ConfigError(f"Outer got {_kind(given)} as topology; it takes a topology or its name: give one, or None")
    return given


def _ranks(group: object) -> list[int]:
    """The workers, as ranks of the default process group."""
    if not dist.is_initialized():
        if group is not None:
            raise ConfigError(f"Outer got {_kind(group)} as process_group and torch.distributed is not initialised")
        return [0]
    if not isinstance(group, dist.ProcessGroup | None):  # torch gives a number to those that are not in a group
        raise ConfigError(
            f"Outer got {group!r} as process_group; it takes a group that this process is a member of: make Outer on its "
            "members only, or leave it out"
        )
    return sorted(dist.get_process_group_ranks(group or dist.group.WORLD))


def _kind(given: object) -> str:
    """The class of what was given; of a class or a function its own name, since it was probably not called."""
    name = getattr(given, "__name__", None)
    return f"a '{name}' that was not called" if callable(given) and name else f"a {type(given).__name__}"


def _identity(codec: Codec) -> tuple[str, dict[str, Any]]:
    """What workers compare of a codec."""
    return codec.name, dict(codec.options)
