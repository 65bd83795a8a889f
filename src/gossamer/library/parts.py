"""What `Outer` is given, as what it runs: names become rules, topologies and codecs; a method becomes its parts."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec

import torch
import torch.distributed as dist
from typing_extensions import TypedDict

from gossamer.boundaries import BOUNDARIES as BOUNDARIES  # for the message about one of them that is named as codec
from gossamer.codecs import Codec, codec_of, exact
from gossamer.errors import ConfigError, choose, reworded
from gossamer.library.guard import Rest
from gossamer.optimizers.inner import InnerConfig
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rounds.schedule import Schedule
from gossamer.rules import RULES, Rule, make_rule
from gossamer.settings import over_time
from gossamer.settings.options import Count, Positive, check_option
from gossamer.settings.over_time import Timetable, timetable_of
from gossamer.topologies import Topology, make_topology
from gossamer.transport.keys import Keys, Peer, keys_for, read_peers
from gossamer.transport.sockets.addresses import is_wildcard, split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

P = ParamSpec("P")
Reduction = Literal["ordered", "all_reduce"]
LOCAL_STEPS = 30
"""Inner steps of a round where neither the user nor a method sets them."""
ASKED = re.compile(r"(?P<method>\w+)(?::(?P<steps>[1-9]\d*))?(?:@(?P<join>[^/\s]+:\d+))?")
"""The form of GOSSAMER_OUTER: METHOD[:H][@HOST:PORT]."""


class OuterOptions(TypedDict, total=False):
    """The arguments of `gossamer.Outer` after model and rule."""

    topology: str | Topology | None
    local_steps: int | None
    seed: int
    codec: str | Codec | None
    schedule: Schedule | None
    reduction: Reduction
    timeout_s: Positive
    compile: bool
    process_group: dist.ProcessGroup | None
    rest: Rest
    mesh: "DeviceMesh | None"
    site: tuple[int, int] | None
    join: str | None
    elastic: bool
    peers: str | Path | None
    store: str | Path | None
    workers: int | None


_ELSEWHERE = {
    "H": "local_steps=...",
    "inner_steps": "local_steps=...",
    "sync_every": "local_steps=...",
    "num_fragments": "schedule=Schedule(fragments=...)",
    "model_fragments": "the whole model, and schedule=Schedule(fragments=...)",
    "fragment_sync_delay": "schedule=Schedule(overlap_steps=...)",
    "fragment_update_alpha": "schedule=Schedule(merge=...)",
    "should_quantize": "codec='int8' or another",
    "lr": "a rule with it, such as diloco(lr=0.7, momentum=0.9)",
    "momentum": "a rule with it, such as diloco(lr=0.7, momentum=0.9)",
    "outer_lr": "a rule with it, such as diloco(lr=0.7, momentum=0.9)",
    "outer_momentum": "a rule with it, such as diloco(lr=0.7, momentum=0.9)",
    "outer_optimizer": "a rule, such as diloco(lr=0.7, momentum=0.9)",
    "inner_optimizer": "gossamer.outer_loop(model, optimizer, rule), or a call of step() after optimizer.step()",
    "optimizer": "gossamer.outer_loop(model, optimizer, rule), or a call of step() after optimizer.step()",
    "manager": "process_group=... or nothing, as the workers find each other through torch.distributed",
    "num_workers": "process_group=... or nothing, as the workers find each other through torch.distributed",
}
"""Names that torchft and others have for the methods of Outer."""


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


@contextlib.contextmanager
def in_own_words() -> Iterator[None]:
    """A context in which errors name the arguments of a Python function instead of the equivalent keys of a run file.

    >>> with in_own_words():
    ...     raise ConfigError("raise run.timeout_s")
    Traceback (most recent call last):
    gossamer.errors.ConfigError: raise timeout_s
    """
    with reworded(lambda sentence: _RUN_FILE_KEY.sub(r"\1", sentence)):
        yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A context for the work of `Outer` inside a user's code: without their autocast and default device, and `in_own_words`.

    A matrix product of a codec would be rounded under autocast, and differ from that of a worker without.

    >>> with torch.autocast("cpu"), apart():
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.float32
    """
    with contextlib.ExitStack() as within:
        within.enter_context(in_own_words())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                within.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            within.enter_context(torch.device("cpu"))
        yield


_RUN_FILE_KEY = re.compile(r"\brun\.(timeout_s|local_steps|elastic|seed)\b")


def naming_unknown_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """A context in which the constructor of `Outer` raises ConfigError for unknown arguments, naming the right one."""

    @functools.wraps(init)
    def checked(*args: P.args, **given: P.kwargs) -> None:
        for name in given.keys() - OuterOptions.__annotations__.keys() - {"model", "rule"}:
            if name in _ELSEWHERE:
                raise ConfigError(
                    f"Outer has no argument '{name}', which other libraries or rules have; give {_ELSEWHERE[name]}"
                )
            raise ConfigError(choose("argument of Outer", name, OuterOptions.__annotations__) + "; correct the name")
        if len(args) > 3:
            raise ConfigError(
                f"Outer got {len(args) - 1} arguments without a name; it takes two, the model and the rule, and your "
                "optimizer stays in your own loop: give all else by name"
            )
        with apart():
            init(*args, **given)

    return checked


def settled_parts(
    rule: object,
    topology: object,
    codec: object,
    schedule: object,
    timetable: Timetable | None,
    *,
    reduction: Reduction,
    n: int,
    seed: int,
    shards: int,
    elastic: bool,
    store: bool,
) -> Combination:
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
        if timetable is None and rule.local_steps is not None:
            timetable = timetable_of(((0, rule.local_steps),))
        rule = rule.rule
    rule, timetable = _rule(rule), timetable or timetable_of(((0, LOCAL_STEPS),))
    return Combination(
        driver="library",
        workers=n,
        rule=rule,
        topology=_topology(topology, rule, n, seed),
        codec=_codec(codec),
        schedule=_schedule(schedule),
        local_steps=timetable.at(0).local_steps,
        timetable=timetable if timetable.changes else None,
        reduction=reduction,
        shards=shards,
        elastic=elastic or store,
        store=store,
    )


def timetable_in(local_steps: object) -> Timetable:
    """The rounds that `Outer(local_steps=...)` asks for. Raises ConfigError for what is no number and no table of numbers."""
    if not isinstance(local_steps, Mapping):
        check_option("Outer", "local_steps", local_steps, Count)
        return timetable_of(((0, local_steps),))
    for sentence in over_time.table_faults("local_steps", local_steps, "qsr"):
        raise ConfigError(sentence)
    if "shape" in local_steps:
        raise ConfigError(
            f"local_steps is {dict(local_steps)!r:.80}, which follows the learning rate of a run, and Outer does not know yours; "
            "give a table by inner step such as {0: 4, 2000: 30}"
        )
    for step, one in over_time.entries(local_steps):
        check_option("Outer", f"local_steps[{step}]", one, Count)
    return timetable_of(over_time.entries(local_steps))


def _rule(given: object) -> Rule:
    if isinstance(given, str):
        try:
            return make_rule(given)
        except ConfigError as error:
            if given.casefold() in RULES:
                raise
            raise ConfigError(
                f"'{given}' is no rule; if it is a method, give gossamer.method('{given}'): {error}"
            ) from None
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


def must_be_a_site(
    site: object, join: object, group: object, elastic: bool, peers: object, reduction: Reduction
) -> None:
    """Raises ConfigError unless a site and the address where sites join are both given and valid, or neither is."""
    if peers is not None and (site is None or reduction == "all_reduce"):
        raise ConfigError(
            f"Outer got peers={peers!r:.80} "
            + (
                "and no site: workers of one process group exchange over gloo or NCCL, which cannot encrypt; give site=(0, 3) "
                "and join='HOST:PORT' too, or leave it out"
                if site is None
                else "and reduction='all_reduce', which gloo or NCCL computes, and neither can encrypt; set it to 'ordered'"
            )
        )
    if site is None and join is None:
        if elastic:
            raise ConfigError(
                f"Outer got elastic={elastic} and no site: only workers that are worlds of their own can come and go; give "
                "site=(0, 3) and join='HOST:PORT' too, or leave it out"
            )
        return
    match site, join:
        case (int(worker), int(n)), str() if 0 <= worker < n and type(worker) is type(n) is int:
            pass
        case _:
            raise ConfigError(
                f"Outer got site={site!r:.40} and join={join!r:.80}; give both or neither: site=(0, 3) is the first of three, "
                "and join='HOST:PORT' an address of its first process"
            )
    try:
        host, _ = split(str(join))
    except ValueError as error:
        raise ConfigError(f"Outer got join={join!r:.80}: {error}; give an address and a port of site 0") from None
    if is_wildcard(host):
        raise ConfigError(
            f"Outer got join={join!r:.80}, which is no address that another machine can dial; give all sites that of site 0's "
            "machine, where site 0 listens"
        )
    if group is not None:
        raise ConfigError(
            f"Outer got process_group={group!r:.60} together with site={site!r:.40}, where all processes of the default group "
            "are the worker; leave it out"
        )


def must_be_what_is_asked(
    rule: object,
    local_steps: object = None,
    site: object = None,
    join: object = None,
    peers: object = None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raises ConfigError where the environment asks for something else than a script gives to `Outer`, which does not read it.

    `outer_loop` and the callbacks, which read it, pass on what it says.

    >>> must_be_what_is_asked("diloco", environment={"GOSSAMER_OUTER": "diloco:30"})
    >>> must_be_what_is_asked("diloco", 2, environment={"GOSSAMER_OUTER": "diloco:30"})
    Traceback (most recent call last):
    gossamer.errors.ConfigError: GOSSAMER_OUTER is 'diloco:30' and Outer, which does not read it, got ...
    """
    name = rule if isinstance(rule, str) else getattr(rule, "name", None)
    steps = local_steps or (rule.local_steps if isinstance(rule, OuterMethod) else None) or LOCAL_STEPS
    of = f"{site[0]}/{site[1]}" if isinstance(site, tuple) and len(site) == 2 else None
    outer = ASKED.fullmatch(environment.get("GOSSAMER_OUTER", ""))
    what = outer and (outer["method"], outer["steps"] or str(steps), outer["join"])
    alike = {
        "GOSSAMER_OUTER": what == (name, str(steps), join),
        "GOSSAMER_SITE": re.sub(r"\b0+(?=\d)", "", environment.get("GOSSAMER_SITE", "")) == of,
        "GOSSAMER_PEERS": environment.get("GOSSAMER_PEERS") == str(peers),
    }
    if asked := [variable for variable in alike if environment.get(variable)]:
        if all(alike[variable] for variable in asked):
            return
        given = f"rule {name!r:.60}, local_steps={steps!r:.60}, site={site!r:.40}, join={join!r:.60} and peers={peers!r:.60}"
        raise ConfigError(
            f"{' and '.join(f'{one} is {environment[one]!r}' for one in asked)} and Outer, which does not read "
            f"{'it' if len(asked) == 1 else 'them'}, got {given}; use gossamer.outer_loop or a trainer's callback without a "
            f"rule, or unset {' and '.join(asked)}"
        )


def must_be_in_a_store(store: object, workers: object, others: Mapping[str, object]) -> None:
    """Raises ConfigError unless a store and the number of workers are both given, without another way to meet.

    Args: `others` are the arguments of other ways, by name.
    """
    if store is None or workers is None:
        if store is not workers:
            raise ConfigError(
                f"Outer got store={store!r:.80} and workers={workers!r:.40}; give both or neither: workers=3 lets three "
                "processes take part at a time"
            )
        return
    check_option("Outer", "workers", workers, Count)
    if given := [f"{name}={value!r:.60}" for name, value in others.items() if value not in (None, False)]:
        raise ConfigError(
            f"Outer got store={store!r:.80} together with {' and '.join(given)}, and workers in a store need no other way to "
            "meet: leave the latter out"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"Outer got store={store!r:.80} in a process group of {dist.get_world_size()} processes, and a worker in a store is "
            "one process: start each by itself, or use site=... and join=... for workers of several processes"
        )


def keys_in_store(peers: str | Path | None, workers: int) -> Keys | None:
    """The keys of the workers in a store; None without a file of [peers]. Raises: ConfigError as `keys_of_sites` does."""
    return None if peers is None else keys_for(_listed(peers, workers, "workers"), workers)


def keys_of_sites(peers: str | Path | None, site: tuple[int, int] | None) -> Keys | None:
    """The keys of this site among those in a file of [peers]; None without one.

    Raises: ConfigError for a file that is none, for another number of peers than sites, and for a key that is not there.
    """
    if peers is None or site is None:
        return None
    keys = keys_for(_listed(peers, site[1], "sites"), site[1])
    if keys is not None:
        keys.must_own(site[0])
    return keys


def _listed(peers: str | Path, n: int, members: str) -> dict[str, Peer]:
    listed = read_peers(Path(peers))
    if (dealt := sum(one.workers for one in listed.values())) != n:
        raise ConfigError(
            f"'{peers}' has [peers] for {dealt} {members} and there are {n}; list one for each, in the order of their numbers"
        )
    return listed


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
    """The class of a value; the name of a class or a function, as the call was probably forgotten."""
    name = getattr(given, "__name__", None)
    return (
        f"a '{name}' that was not called" if callable(given) and name else f"an object of type {type(given).__name__}"
    )
