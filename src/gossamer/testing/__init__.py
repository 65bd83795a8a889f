"""The specification of rules, to test your rule in one line of pytest.

def test_my_rule():
    gossamer.testing.check_rule(my_rule(lr=0.5))

def test_my_rule_in_real_processes():
    gossamer.testing.check_parity(my_rule(lr=0.5), "random")
"""

from gossamer.testing.parity import check_parity as check_parity
from gossamer.testing.specification import PROMISES as PROMISES
from gossamer.testing.specification import check_rule as check_rule

__all__ = ["PROMISES", "check_parity", "check_rule"]
