"""When a round merges, and the reason."""

import pytest

from fsl_async.config.settings import SyncConfig
from fsl_async.roles.sync.ps_state import ArrivalHistory, Round
from fsl_async.roles.sync.triggers import QuorumAndGrace

RULES = SyncConfig(quorum=0.5)


def open_round(*names, cap_s=100.0):
    return Round(3, 1000.0, cap_s, dict.fromkeys(names, 1))


def decide(open_, now, pending=1, history=None):
    return QuorumAndGrace(RULES).verdict(open_, history or ArrivalHistory(), now, pending=pending)


@pytest.mark.parametrize(("quorum", "needed"), [(0.0, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_quorum_rounds_up_and_is_at_least_one(quorum, needed):
    """Half of four is two, and zero is never enough."""
    open_ = open_round("a", "b", "c", "d")
    rules = SyncConfig(quorum=quorum or 1e-9)
    verdict = QuorumAndGrace(rules).verdict(open_, ArrivalHistory(), 1001.0, pending=0)
    assert verdict.reason.endswith(f"0 of 4 called clients sent a delta, {needed} needed")
