"""Gossamer in someone else's training loop: their model, their inner optimizer, their data, and three lines of ours."""

import hashlib
import logging
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossamer import stability, sync
from gossamer.codecs import Codec, exact
from gossamer.errors import CheckpointError, ConfigError
from gossamer.fragment import attach, layout_of
from gossamer.launch import Member, agree
from gossamer.mixing import Mixing
from gossamer.rules import Context, Rule
from gossamer.sync import Exchange
from gossamer.topology import Topology, make_topology
from gossamer.transport import Transport
from gossamer.transport.group import GroupTransport, hang_up
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import leaves

__all__ = ["Outer"]

log = logging.getLogger("gossamer")


class Outer:
    """The outer loop around a training loop: counts inner steps, and exchanges with the peers after every `local_steps`.

        outer = gossamer.Outer(model, gossamer.gasloc(), local_steps=30)      # after init_process_group
        for batch in data:
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            outer.step()
        outer.close()

    Args:
        model: its trainable parameters become views of one flat buffer; optimizers made before or after keep working. All
            workers start from the parameters of worker 0.
        rule: from `gossamer.rules`; one on gradients, such as `data_parallel`, is refused.
        topology: a name from `TOPOLOGIES`, or a `Topology`; by default random pairs, or what the rule needs instead:
            the complete graph, a ring, a tree.
        local_steps: inner steps between two exchanges; workers may differ.
        timeout_s: how long an exchange waits for a peer.
    Raises: ConfigError and PairingError for what cannot work; PeerError when workers disagree on model, rule or topology.
    Cost: the rule's state, one message, and what is heard of the peers; the exchange blocks, with the receives posted a whole
        local phase before. Buffers such as batch-norm statistics stay each worker's own.

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
        codec: Codec | None = None, timeout_s: float = 300.0, compile: bool = False,
    ) -> None:  # fmt: skip
        if local_steps < 1:
            raise ConfigError(f"local_steps is {local_steps}; it must be at least 1")
        if rule.site == "gradients":
            raise ConfigError(
                f"rule '{rule.name}' acts on gradients, between your backward and your optimizer, where this class does not "
                "reach; use torch's DistributedDataParallel, or a rule on parameters such as 'diloco'"
            )
        self.local_steps, self.seed = local_steps, seed
        self.worker, self.n = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if not isinstance(topology, Topology):
            fitting = {"everyone": "complete", "static": "ring", "tree": "tree"}.get(rule.needs, "random")
            topology = make_topology(topology or fitting, self.n, seed=seed)
        if topology.n != self.n:
            raise ConfigError(
                f"the topology '{topology.name}' is for {topology.n} workers and the process group has {self.n}"
            )
        self.topology, self.codec = topology, codec or exact()
        self.rule = stability.settle(rule, topology)
        sync.check(self.rule, topology, self.codec)
        if sentence := stability.warning(self.rule, topology):
            log.warning(sentence)
        self.layout = layout_of(model)
        self.x = attach(model, self.layout)
        self.rounds = self.steps = 0
        self._kernel = sync.compiled() if compile else sync.PLAIN
        self._group: dist.ProcessGroup | None = None
        self._transport = self._join(timeout_s)
        mixing = topology.mixing(0)
        self.state = sync.initial_state(self.rule, mixing, self.x, self._context(mixing))
        self._exchange: Exchange | None = None

    def step(self) -> bool:
        """Counts one inner step; after every `local_steps` of them exchanges. Returns whether it did.

        Call it after `optimizer.step()`. Raises: PeerError naming the worker that failed first.
        """
        if self._exchange is None:  # not before there is a step to follow: nothing is under way after the last exchange
            self._exchange = self._begin()
        self.steps += 1
        if self.steps < self.local_steps:
            return False
        with torch.no_grad():
            sync.carry(self._exchange, self._transport)
        self._exchange, self.steps, self.rounds = None, 0, self.rounds + 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """The outer state to save beside your model's and optimizer's; call it right after a step that exchanged."""
        return {"outer": [leaf.clone() for leaf in leaves(self.state)], "rounds": self.rounds, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a saved outer state back, after the model's parameters were loaded. Raises CheckpointError if it does not fit."""
        mine, saved = leaves(self.state), state.get("outer", [])
        if [t.shape for t in mine] != [t.shape for t in saved]:
            raise CheckpointError(
                f"the outer state has tensors of {[tuple(t.shape) for t in saved]} where rule '{self.rule.name}' keeps "
                f"{[tuple(t.shape) for t in mine]}; load it with the rule and the model it was saved with"
            )
        for own, other in zip(mine, saved, strict=True):
            own.copy_(other)
        self.rounds, self.steps = state["rounds"], state["steps"]

    def close(self) -> None:
        """Ends the outer loop and its connections; the process group you made stays yours."""
        self._exchange = None
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

    def _begin(self) -> Exchange:
        mixing = self.topology.mixing(self.rounds)
        part = sync.Part(self.x, self.state, self.layout)
        return sync.begin(
            self.rule, self.codec, mixing, self._transport, part, self._context(mixing), seed=self.seed, kernel=self._kernel
        )  # fmt: skip

    def _context(self, mixing: Mixing) -> Context:
        return Context(self.worker, self.n, self.rounds, self.local_steps, mixing.weight(self.worker), self.layout)

    def _join(self, timeout_s: float) -> Transport:
        """Makes sure that all workers do the same, and start from the parameters of worker 0."""
        if not dist.is_initialized():
            return MemoryNetwork(1).transport(0)
        store = dist.distributed_c10d._get_default_store()  # it has no public name
        common = (
            self.layout,
            self.rule.name,
            self.rule.options,
            self.topology.name,
            self.topology.options,
            self.codec.name,
            self.seed,
        )
        digest = hashlib.sha256(repr(common).encode()).hexdigest()[:16]
        agree(Member(self.worker, self.n, self.x.device, store), digest, timeout_s=timeout_s)
        dist.broadcast(self.x, src=0)
        group = dist.new_group()  # connections of our own, which `close` may close
        assert isinstance(group, dist.ProcessGroup)  # every worker is in it
        self._group = group
        return GroupTransport(
            store, run=int(digest, 16), timeout_s=timeout_s, device=self.x.device, group=group
        )  # fmt: skip
