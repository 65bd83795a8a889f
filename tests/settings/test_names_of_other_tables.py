"""The error about a name of another table names that table, and does not only call the name unknown."""

from collections.abc import Callable

import pytest
import torch

import gossamer
from gossamer.asynchronous import SERVERS
from gossamer.codecs import make_codec
from gossamer.errors import ConfigError
from gossamer.rules import make_rule


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: gossamer.Outer(torch.nn.Linear(2, 1), "gossip", codec="intk"),
            "a boundary codec .*forward.* and no codec",
        ),
        (lambda: make_codec("ring"), r"'ring' is a topology \(topology\) and no codec; allowed: bf16, "),
        (
            lambda: make_rule([*SERVERS][-1]),
            r"' is a server \(server\) and no rule; allowed: acco, anchored_gasloc, .*; name one",
        ),
        (lambda: make_rule("restarted"), r"a wrapper \(an option of rule\) and no rule"),
        (lambda: make_rule("nothing"), "unknown rule 'nothing'; "),
    ],
)
def test_a_row_of_another_table_is_named_as_what_it_is(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()
