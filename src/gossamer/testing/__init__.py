"""The specification of rules, for a test of a rule of your own in one line of pytest.

def test_my_rule():
    gossamer.testing.check_rule(my_rule(lr=0.5))

def test_my_rule_in_real_processes():
    gossamer.testing.check_parity(my_rule(lr=0.5), "random")

def test_my_gossip_rule_where_workers_die():
    gossamer.testing.check_faults(my_rule(lr=0.5), seed=3)
"""

from gossamer.testing.faults import FaultReport as FaultReport
from gossamer.testing.faults import FaultyNetwork as FaultyNetwork
from gossamer.testing.faults import check_faults as check_faults
from gossamer.testing.parity import check_parity as check_parity
from gossamer.testing.specification import PROMISES as PROMISES
from gossamer.testing.specification import check_rule as check_rule

__all__ = ["PROMISES", "FaultReport", "FaultyNetwork", "check_faults", "check_parity", "check_rule"]
