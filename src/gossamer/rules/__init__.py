"""Every rule in one table; adding one touches its own file and one row here."""

from collections.abc import Callable
from typing import Any

from gossamer.rules.anchored import anchored, anchored_gasloc
from gossamer.rules.choco import choco
from gossamer.rules.cocktail import cocktail
from gossamer.rules.contract import Consensus, Context, OuterSGD, Rule
from gossamer.rules.data_parallel import data_parallel
from gossamer.rules.diloco import diloco
from gossamer.rules.eager import eager
from gossamer.rules.easgd import easgd
from gossamer.rules.error_feedback import error_feedback, sparseloco
from gossamer.rules.fedopt import fedopt
from gossamer.rules.gasloc import gasloc
from gossamer.rules.gossip import gossip
from gossamer.rules.jacobi import jacobi
from gossamer.rules.local_sgd import local_sgd
from gossamer.rules.noloco import noloco
from gossamer.rules.relaysum import relaysum
from gossamer.rules.restarted import omr, restarted
from gossamer.rules.sgp import sgp
from gossamer.rules.slowmo import slowmo
from gossamer.rules.sparta import sparta
from gossamer.rules.weighted import weighted

__all__ = [
    "RULES",
    "WRAPPERS",
    "Consensus",
    "Context",
    "OuterSGD",
    "Rule",
    "anchored",
    "anchored_gasloc",
    "choco",
    "cocktail",
    "data_parallel",
    "diloco",
    "eager",
    "easgd",
    "error_feedback",
    "fedopt",
    "gasloc",
    "gossip",
    "jacobi",
    "local_sgd",
    "make_rule",
    "noloco",
    "omr",
    "relaysum",
    "restarted",
    "sgp",
    "slowmo",
    "sparseloco",
    "sparta",
    "weighted",
]

RULES: dict[str, Callable[..., Rule]] = {
    "anchored_gasloc": anchored_gasloc,
    "choco": choco,
    "cocktail": cocktail,
    "data_parallel": data_parallel,
    "diloco": diloco,
    "eager": eager,
    "easgd": easgd,
    "fedopt": fedopt,
    "gasloc": gasloc,
    "gossip": gossip,
    "jacobi": jacobi,
    "local_sgd": local_sgd,
    "noloco": noloco,
    "omr": omr,
    "relaysum": relaysum,
    "sgp": sgp,
    "slowmo": slowmo,
    "sparseloco": sparseloco,
    "sparta": sparta,
}

WRAPPERS: dict[str, Callable[..., Rule]] = {
    "anchored": anchored,
    "error_feedback": error_feedback,
    "restarted": restarted,
}
"""Functions from rule to rule, for `make_rule`."""


def make_rule(name: str, **options: Any) -> Rule:
    """A row of `RULES` with its options; one that is named like a wrapper has the wrapper's own options, and puts it around.

    >>> make_rule("gasloc", lr=1.0, restarted={"every": 3}).name
    'restarted_gasloc'

    Raises: ConfigError for options that cannot work.
    """
    rule = RULES[name](**{key: value for key, value in options.items() if key not in WRAPPERS})
    for key in (key for key in options if key in WRAPPERS):
        rule = WRAPPERS[key](rule, **options[key])
    return rule
