"""The table of rules. To add a rule, write its own file, and import it and add its row here."""

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.rules.acco import acco as acco
from gossamer.rules.anchored import anchored as anchored
from gossamer.rules.anchored import anchored_gasloc as anchored_gasloc
from gossamer.rules.choco import choco as choco
from gossamer.rules.clipped import clipped as clipped
from gossamer.rules.cocktail import cocktail as cocktail
from gossamer.rules.contract import Context, OuterSGD, Rule
from gossamer.rules.data_parallel import data_parallel as data_parallel
from gossamer.rules.demo import demo as demo
from gossamer.rules.diloco import diloco as diloco
from gossamer.rules.diloco import slowmo as slowmo
from gossamer.rules.dilocox import dilocox as dilocox
from gossamer.rules.eager import eager as eager
from gossamer.rules.easgd import easgd as easgd
from gossamer.rules.error_feedback import error_feedback as error_feedback
from gossamer.rules.error_feedback import sparseloco as sparseloco
from gossamer.rules.fedopt import fedopt as fedopt
from gossamer.rules.fgd import fgd as fgd
from gossamer.rules.gasloc import gasloc as gasloc
from gossamer.rules.gossip import gossip as gossip
from gossamer.rules.jacobi import jacobi as jacobi
from gossamer.rules.local_sgd import local_sgd as local_sgd
from gossamer.rules.noloco import noloco as noloco
from gossamer.rules.penalized import capped as capped
from gossamer.rules.penalized import penalized as penalized
from gossamer.rules.relaysum import relaysum as relaysum
from gossamer.rules.restarted import omr as omr
from gossamer.rules.restarted import restarted as restarted
from gossamer.rules.robust import robust as robust
from gossamer.rules.sgp import sgp as sgp
from gossamer.rules.sparta import sparta as sparta
from gossamer.rules.trusted import trusted as trusted
from gossamer.rules.weighted import weighted as weighted
from gossamer.settings.options import row, table
from gossamer.topologies.mixing import Consensus

__all__ = [
    "RULES",
    "WRAPPERS",
    "Consensus",
    "Context",
    "OuterSGD",
    "Rule",
    "make_rule",
    "wrapped",
]

RULES: dict[str, Callable[..., Rule]] = table(
    acco,
    anchored_gasloc,
    choco,
    cocktail,
    data_parallel,
    demo,
    diloco,
    dilocox,
    eager,
    easgd,
    fedopt,
    fgd,
    gasloc,
    gossip,
    jacobi,
    local_sgd,
    noloco,
    omr,
    relaysum,
    sgp,
    slowmo,
    sparseloco,
    sparta,
    kind="rule",
    where="rule",
)

WRAPPERS: dict[str, Callable[..., Rule]] = table(
    anchored,
    capped,
    clipped,
    error_feedback,
    penalized,
    restarted,
    robust,
    trusted,
    kind="wrapper",
    where="an option of rule",
)
"""Functions from rule to rule, for `make_rule`."""


def make_rule(name: str, **options: Any) -> Rule:
    """Builds the rule of that name in `RULES`; an option named like a wrapper wraps the rule, and holds the wrapper's options.

    >>> make_rule("gasloc", lr=1.0, restarted={"every": 3}).name
    'restarted_gasloc'

    Raises: ConfigError for options that cannot work.
    """
    rule_options = {key: value for key, value in options.items() if key not in WRAPPERS}
    rule = row("rule", RULES, name, rule_options, also=WRAPPERS)(**rule_options)
    return wrapped(rule, {key: value for key, value in options.items() if key in WRAPPERS})


def wrapped(rule: Rule, wrappers: Mapping[str, Mapping[str, Any]]) -> Rule:
    """The rule inside wrappers, given by name with the options of each; the first is the innermost."""
    for name, options in wrappers.items():
        rule = row("wrapper", WRAPPERS, name, options)(rule, **options)
    return rule
