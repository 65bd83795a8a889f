"""The table of every rule's promises, and `check_rule`, which checks them."""

import contextlib
from collections.abc import Callable, Sequence

from gossamer.errors import ConfigError, GossamerError, PairingError, first_line
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rounds.stability import resolve_alpha
from gossamer.rules import Rule
from gossamer.testing import functions, numbers, tags
from gossamer.topologies import TOPOLOGIES, Topology, make_topology

Promise = Callable[[Rule, Sequence[Topology]], object]
"""A check of one property on topologies that the rule may run on, the default one first; raises AssertionError."""

PROMISES: tuple[Promise, ...] = (
    functions.trees_keep_their_form_and_dtype,
    functions.arguments_are_never_written_into,
    functions.the_state_owns_its_memory,
    functions.the_same_call_gives_the_same_bits,
    functions.as_many_copies_are_kept_as_the_tags_say,
    functions.halves_updated_one_by_one_equal_the_whole_to_the_last_bit,
    functions.compiled_code_has_the_same_bits,
    numbers.chunks_and_shards_give_the_same_bits,
    numbers.vectors_of_one_element_work,
    tags.consensus_is_a_fixed_point,
    tags.replicas_that_receive_from_everyone_stay_bitwise_equal,
    tags.no_codec_moves_the_mean_of_a_rule_that_keeps_it,
    tags.disagreement_follows_the_declared_recursion,
    tags.one_worker_is_the_declared_limit,
    tags.after_a_reset_the_outer_optimizer_begins_afresh,
    tags.the_declared_start_is_where_the_round_began,
    numbers.saved_and_resumed_it_goes_on_with_the_same_bits,
    numbers.half_precision_follows_full_precision,
    numbers.allowed_codecs_change_equal_workers_as_little_as_said,
)
"""The properties of every rule; the name of each is a sentence."""


def check_rule(rule: Rule, *, topology: str | Topology | None = None, workers: int = 4) -> None:
    """Checks all promises of every rule: pure functions, states of a fixed structure, and the tags.

    Args:
        rule: what a factory returns, such as `my_rule(lr=0.5)`.
        topology: the only one to check on; by default all of `TOPOLOGIES` that the rule may run on with so many workers.
        workers: how many there are, for a topology by name.
    Raises: AssertionError with one sentence: which property does not hold, the numbers, and what to do. ConfigError for
        anything but a rule, and PairingError for a topology on which the rule cannot run.
    Cost: half a second of one core.

    >>> import gossamer
    >>> gossamer.testing.check_rule(gossamer.gasloc(lr=0.5))
    >>> gossamer.testing.check_rule(gossamer.gossip()._replace(single_worker_limit=gossamer.rules.gasloc().single_worker_limit))
    Traceback (most recent call last):
        ...
    AssertionError: rule 'gossip' breaks 'one worker is the declared limit': ...
    """
    graphs = fitting(must_be_rule("check_rule", rule), topology, workers)
    for promise in PROMISES:
        keep(promise, rule, graphs)


def keep(promise: Promise, rule: Rule, graphs: Sequence[Topology]) -> None:
    """Checks one promise. Raises AssertionError that names it, also when the rule's own code fails."""
    sentence = f"rule '{rule.name}' breaks '{promise.__name__.replace('_', ' ')}'"
    try:
        promise(resolve_alpha(rule, graphs[0]), graphs)
    except AssertionError as error:
        raise AssertionError(f"{sentence}: {error}") from error
    except GossamerError as error:
        raise AssertionError(f"{sentence}: {error}") from error
    except Exception as error:
        raise AssertionError(
            f"{sentence}: its code raised {type(error).__name__} ({first_line(error) if str(error) else 'without a message'}); "
            "correct it at the place that the traceback above shows"
        ) from error


def fitting(rule: Rule, topology: str | Topology | None = None, workers: int = 4) -> list[Topology]:
    """The topologies that a rule may run on: the one that is given, or all of `TOPOLOGIES`, the default one first.

    Raises: PairingError for one that is given and does not fit, or where none does.
    """
    if topology is not None:
        given = make_topology(topology, workers) if isinstance(topology, str) else topology
        for sentence in _faults(rule, given):
            raise PairingError(sentence)
        return [given]
    names = [FITTING[rule.needs], *(name for name in TOPOLOGIES if name != FITTING[rule.needs])]
    made: list[Topology] = []
    for name in names:
        with contextlib.suppress(ConfigError):  # some require certain numbers of workers
            made.append(make_topology(name, workers))
    suitable = [one for one in made if not _faults(rule, one)]
    if not suitable:
        raise PairingError(
            f"rule '{rule.name}' runs on no topology with {workers} workers: {_faults(rule, made[0])[0]}"
        )
    return suitable


def must_be_rule(caller: str, given: object) -> Rule:
    """The given object, if it is a rule. Raises ConfigError."""
    if isinstance(given, Rule):
        return given
    name = getattr(given, "__name__", None)
    shown = f"'{name}', which was not called" if callable(given) and name else f"a {type(given).__name__}"
    raise ConfigError(f"{caller} got {shown}; give a gossamer.Rule, such as my_rule(lr=0.5)")


def _faults(rule: Rule, topology: Topology) -> list[str]:
    return combination_faults(
        Combination(rule=resolve_alpha(rule, topology) if topology.doubly_stochastic else rule, topology=topology)
    )
