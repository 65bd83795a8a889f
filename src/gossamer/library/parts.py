"""What `Outer` is given, as what it runs: names become rules, topologies and codecs, and a method is taken apart."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from gossamer.codecs import Codec, codec_of, exact
from gossamer.errors import ConfigError
from gossamer.optimizers.inner import InnerConfig
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Rule, make_rule
from gossamer.topologies import Topology, make_topology

__all__ = ["LOCAL_STEPS", "OuterMethod", "Reduction", "ranks_of", "settled_parts"]

Reduction = Literal["ordered", "all_reduce"]
LOCAL_STEPS = 30
"""Inner steps of a round where neither the user nor a method says otherwise."""


class OuterMethod(NamedTuple):
    """The parts of a named method that `Outer` runs, as `gossamer.method` returns them."""

    name: str
    rule: Rule
    topology: str
    """The name of the topology; it is made for the number of workers that are there."""
    topology_options: Mapping[str, Any]
    codec: Codec
    schedule: Schedule
    local_steps: int | None = None
    """Inner steps of a round, where the method sets them."""
    workers: int | None = None
    """The number of workers that the method is for, where it is for one number only."""
    inner: InnerConfig | None = None
    """The inner optimizer that belongs to the method, where it was published with one. The optimizer stays yours:
    `gossamer.optimizers.inner.build_optimizer(method.inner, model)` makes that one, without its learning-rate schedule."""


def settled_parts(
    rule: object, topology: object, codec: object, schedule: object, local_steps: int | None, *, reduction: Reduction,
    n: int, seed: int,
) -> Combination:  # fmt: skip
    """The parts that run, with everything that was not given filled in: by the method, or by what fits the rule.

    Raises: ConfigError for what is no rule, topology, codec or schedule, and for a method of another number of workers.
    """
    if isinstance(rule, OuterMethod):
        if rule.workers not in (None, n):
            raise ConfigError(
                f"method '{rule.name}' is for {rule.workers} worker and there are {n}; use another method, such as 'diloco'"
            )
        if topology is None:
            topology = make_topology(rule.topology, n, seed=seed, **rule.topology_options)
        codec, schedule = codec or rule.codec, schedule or rule.schedule
        local_steps = local_steps or rule.local_steps
        rule = rule.rule
    rule = _rule(rule)
    return Combination(
        driver="library", workers=n, rule=rule, topology=_topology(topology, rule, n, seed), codec=_codec(codec),
        schedule=_schedule(schedule), local_steps=local_steps or LOCAL_STEPS, reduction=reduction,
    )  # fmt: skip


def _rule(given: object) -> Rule:
    if isinstance(given, str):
        try:
            return make_rule(given)
        except ConfigError as error:
            raise ConfigError(f"{error}, or give gossamer.method(...) for a method that is more than a rule") from None
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


def ranks_of(group: object) -> list[int]:
    """The workers, as ranks of the default process group, in the order of these; [0] where there is no group.

    Raises: ConfigError for what is no process group that this process is a member of.
    """
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
