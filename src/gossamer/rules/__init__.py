"""Every rule in one table; adding one touches its own file and one row here."""

from collections.abc import Callable

from gossamer.rules.data_parallel import data_parallel
from gossamer.rules.diloco import diloco
from gossamer.rules.gasloc import gasloc
from gossamer.rules.gossip import gossip
from gossamer.rules.local_sgd import local_sgd
from gossamer.rules.noloco import noloco
from gossamer.rules.rule import Consensus, Context, OuterSGD, Rule

__all__ = [
    "RULES",
    "Consensus",
    "Context",
    "OuterSGD",
    "Rule",
    "data_parallel",
    "diloco",
    "gasloc",
    "gossip",
    "local_sgd",
    "noloco",
]

RULES: dict[str, Callable[..., Rule]] = {
    "data_parallel": data_parallel,
    "diloco": diloco,
    "gasloc": gasloc,
    "gossip": gossip,
    "local_sgd": local_sgd,
    "noloco": noloco,
}
