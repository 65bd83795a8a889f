"""Methods that look at the clock, in two tables; adding one touches its own file and one row here."""

from collections.abc import Callable

from gossamer.servers.a2cid2 import a2cid2, acceleration
from gossamer.servers.ad_psgd import ad_psgd
from gossamer.servers.cgad import cgad
from gossamer.servers.contract import Arrival, PairRule, ServerRule, Window
from gossamer.servers.dadao import dadao
from gossamer.servers.decoupled_diloco import decoupled_diloco
from gossamer.servers.delayed_nesterov import delayed_nesterov, dylu_steps
from gossamer.servers.fragments import Fragment, pack
from gossamer.servers.heloco import heloco
from gossamer.servers.meetings import Rates, conditions, meeting_rates

__all__ = [
    "PAIRS",
    "SERVERS",
    "Arrival",
    "Fragment",
    "PairRule",
    "Rates",
    "ServerRule",
    "Window",
    "a2cid2",
    "acceleration",
    "ad_psgd",
    "cgad",
    "conditions",
    "dadao",
    "decoupled_diloco",
    "delayed_nesterov",
    "dylu_steps",
    "heloco",
    "meeting_rates",
    "pack",
]

SERVERS: dict[str, Callable[..., ServerRule]] = {
    "cgad": cgad,
    "decoupled_diloco": decoupled_diloco,
    "delayed_nesterov": delayed_nesterov,
    "heloco": heloco,
}

PAIRS: dict[str, Callable[..., PairRule]] = {
    "a2cid2": a2cid2,
    "ad_psgd": ad_psgd,
    "dadao": dadao,
}
