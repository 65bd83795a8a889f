"""Every rule in one table; adding one touches its own file and one row here."""

from collections.abc import Callable

from gossamer.rules.anchored import anchored, anchored_gasloc
from gossamer.rules.choco import choco
from gossamer.rules.cocktail import cocktail
from gossamer.rules.data_parallel import data_parallel
from gossamer.rules.diloco import diloco
from gossamer.rules.eager import eager
from gossamer.rules.easgd import easgd
from gossamer.rules.error_feedback import error_feedback, sparseloco
from gossamer.rules.fedopt import fedopt
from gossamer.rules.gasloc import gasloc
from gossamer.rules.gossip import gossip
from gossamer.rules.local_sgd import local_sgd
from gossamer.rules.noloco import noloco
from gossamer.rules.relaysum import relaysum
from gossamer.rules.restarted import omr, restarted
from gossamer.rules.rule import Consensus, Context, OuterSGD, Rule
from gossamer.rules.sgp import sgp
from gossamer.rules.slowmo import slowmo
from gossamer.rules.sparta import sparta
from gossamer.rules.weighted import weighted

__all__ = [
    "RULES",
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
    "local_sgd",
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
    "local_sgd": local_sgd,
    "noloco": noloco,
    "omr": omr,
    "relaysum": relaysum,
    "sgp": sgp,
    "slowmo": slowmo,
    "sparseloco": sparseloco,
    "sparta": sparta,
}
