"""The tables of asynchronous methods. To add one, write its own file, and import it and add its row here."""

from collections.abc import Callable

from gossamer.asynchronous.a2cid2 import Rates, conditions, meeting_rates
from gossamer.asynchronous.a2cid2 import a2cid2 as a2cid2
from gossamer.asynchronous.a2cid2 import acceleration as acceleration
from gossamer.asynchronous.ad_psgd import ad_psgd as ad_psgd
from gossamer.asynchronous.cgad import cgad as cgad
from gossamer.asynchronous.contract import PairRule, PushInfo, Regions, ServerRule, Slack, Window
from gossamer.asynchronous.dadao import dadao as dadao
from gossamer.asynchronous.decoupled_diloco import decoupled_diloco as decoupled_diloco
from gossamer.asynchronous.delayed_nesterov import delayed_nesterov as delayed_nesterov
from gossamer.asynchronous.delayed_nesterov import dylu_steps as dylu_steps
from gossamer.asynchronous.halos import halos as halos
from gossamer.asynchronous.heloco import heloco as heloco
from gossamer.settings.options import table

__all__ = [
    "PAIRS",
    "SERVERS",
    "PairRule",
    "PushInfo",
    "Rates",
    "Regions",
    "ServerRule",
    "Slack",
    "Window",
    "conditions",
    "meeting_rates",
]

SERVERS: dict[str, Callable[..., ServerRule]] = table(
    cgad,
    decoupled_diloco,
    delayed_nesterov,
    halos,
    heloco,
    kind="server",
    where="server",
)

PAIRS: dict[str, Callable[..., PairRule]] = table(
    a2cid2,
    ad_psgd,
    dadao,
    kind="pair",
    where="pair",
)
