"""Gossamer in an existing training loop: the user's model, inner optimizer and data, and three more lines."""

import hashlib
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Annotated, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.codecs import Codec, exact
from gossamer.errors import CheckpointError, ConfigError
from gossamer.layout import arrange, attach, layout_of
from gossamer.options import Interval, check_option
from gossamer.rounds import stability
from gossamer.rounds.facts import Facts
from gossamer.rounds.loop import OuterLoop, UnderWay
from gossamer.rounds.method import FITTING, method_of, settled_rule
from gossamer.rounds.schedule import Schedule, Stop
from gossamer.rules import Rule
from gossamer.topologies import Topology, make_topology
from gossamer.transport import Transport
from gossamer.transport.group import GroupTransport, hang_up
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
            workers start from the parameters of worker 0.
        rule: from `gossamer.rules`; one on gradients, such as `data_parallel`, is refused.
        topology: a name from `TOPOLOGIES`, or a `Topology`; by default random pairs, or the topology that the rule requires:
            the complete graph, a ring, a tree, random pushes.
        local_steps: inner steps of a round; workers may differ where the schedule has no overlap.
        schedule: exchange in several fragments, and overlap with training; by default neither.
        timeout_s: how long an exchange waits for a peer.
    Raises: ConfigError and PairingError for what cannot work; PeerError when workers disagree on model, rule, topology or codec.
    Cost: the rule's state, one message, and those received from the peers; the exchange blocks, and its receives are posted a
        whole local phase before. Buffers such as batch-norm statistics stay each worker's own.

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
        self, model: nn.Module, rule: Rule, *, topology: str | Topology | None = None, local_steps: int = 30, seed: int = 0,
        codec: Codec | None = None, schedule: Schedule | None = None, timeout_s: float = 300.0, compile: bool = False,
    ) -> None:  # fmt: skip
        if local_steps < 1:
            raise ConfigError(f"local_steps is {local_steps}; it must be at least 1")
        self.local_steps, self.seed = local_steps, seed
        self.worker, self.n = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if not isinstance(topology, Topology):
            topology = make_topology(topology or FITTING[rule.needs], self.n, seed=seed)
        facts = Facts(
            driver="library", workers=self.n, rule=rule, topology=topology, codec=codec or exact(),
            schedule=schedule or Schedule(), local_steps=local_steps,
        )  # fmt: skip
        self.method = method_of(facts._replace(rule=settled_rule(facts)), compile=compile)
        if sentence := stability.warning(self.method.rule, topology):
            log.warning(sentence)
        self.layout, spans = arrange(layout_of(model), self.method.schedule.fragments, self.method.schedule.pattern)
        self.x = attach(model, self.layout)
        self.rounds = self.steps = 0
        self._group: dist.ProcessGroup | None = None
        self._transport = self._join(timeout_s)
        parts = [(self.x[a:b], self.layout.slice(a, b)) for a, b in spans]
        self._loop = OuterLoop(
            self.method,
            self._transport,
            parts,
            local_steps=local_steps,
            full_steps=local_steps,
            seed=seed,
        )
        self._stops: list[Stop] = []

    def step(self) -> bool:
        """Counts one inner step; and exchanges after every `local_steps` of them. Returns whether it exchanged.

        Call it after `optimizer.step()`. Raises: PeerError naming the worker that failed first.
        """
        if not self._stops:  # only when a step follows, so that nothing is announced after the last exchange
            self._stops = [stop for stop in self._loop.stops(self.rounds) if stop.step > self.steps]
            self._loop.announce(self.rounds, self._stops[0])
        self.steps += 1
        with torch.no_grad():
            self._loop.advance()
            while self._stops and self._stops[0].step == self.steps:
                stop = self._stops.pop(0)
                self._loop.post(self.rounds, stop)
                self._loop.receive(self.rounds, stop)
                if self._stops:
                    self._loop.announce(self.rounds, self._stops[0])
        if self._stops:
            return False
        self.steps, self.rounds = 0, self.rounds + 1
        return True

    def finish(self) -> None:
        """Finishes the exchanges in flight when training ends; without overlap there are none. Raises: PeerError."""
        with torch.no_grad():
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
        """Ends the outer loop and its connections; your own process group stays open."""
        self._loop.under_way.clear()
        self._transport.close()
        if self._group is not None and dist.is_initialized():
            hang_up(self._group)
            dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> "Outer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, timeout_s: float) -> Transport:
        """Checks that all workers have the same configuration, and broadcasts the parameters of worker 0."""
        if not dist.is_initialized():
            return MemoryNetwork(1).transport(0)
        store = dist.distributed_c10d._get_default_store()  # it has no public name
        m = self.method
        common = (
            self.layout, m.rule.name, m.rule.options, m.topology.name, m.topology.options, *_identity(m.codec),
            m.codec.back and _identity(m.codec.back), m.schedule,
            self.local_steps if m.schedule.overlap_steps or m.rule.delay_rounds else None, self.seed,
        )  # fmt: skip
        digest = hashlib.sha256(repr(common).encode()).hexdigest()[:16]
        member = Member.at(self.worker, self.n, self.x.device, store, secret=environment_secret())
        agree(member, digest, timeout_s=timeout_s)
        dist.broadcast(self.x, src=0)
        group = dist.new_group()  # connections of our own, which `close` may close
        assert isinstance(group, dist.ProcessGroup)  # every worker is in it
        self._group = group
        return GroupTransport(member, run=int(digest, 16), timeout_s=timeout_s, group=group)


def _identity(codec: Codec) -> tuple[str, dict[str, Any]]:
    """What workers compare of a codec."""
    return codec.name, dict(codec.options)
