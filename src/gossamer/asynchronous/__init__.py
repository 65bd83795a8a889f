"""Methods that look at the clock, in two tables; adding one touches its own file and one row here."""

from collections.abc import Callable

from gossamer.asynchronous.a2cid2 import a2cid2, acceleration
from gossamer.asynchronous.ad_psgd import ad_psgd
from gossamer.asynchronous.cgad import cgad
from gossamer.asynchronous.contract import PairRule, PushInfo, ServerRule, Window
from gossamer.asynchronous.dadao import dadao
from gossamer.asynchronous.decoupled_diloco import decoupled_diloco
from gossamer.asynchronous.delayed_nesterov import delayed_nesterov, dylu_steps
from gossamer.asynchronous.heloco import heloco
from gossamer.asynchronous.meetings import Rates, conditions, meeting_rates

__all__ = [
    "PAIRS",
    "SERVERS",
    "PairRule",
    "PushInfo",
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
