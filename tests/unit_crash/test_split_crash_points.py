"""Split learning goes on wherever one of its processes is killed; `test_crash_points.py` has the
rest.
"""

import crash_split
import pytest
from crash_point import EFFECTS, carried_out

from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.client.split_shell import SplitClientShell
from fsl_async.nodes.ps.groups import GroupsShell
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.nodes.split_server.shell import SplitServerShell

SHELLS = {"client": SplitClientShell, "split": SplitServerShell}
STRIDE = {"sl": 919, "splitfed-v1": 2017, "u-shape": 2591, "fsl-sage": 1223, "lockstep": 487}


@pytest.fixture(scope="module")
def points():
    """Return the points of all kinds of runs: kind -> points."""
    return {kind: crash_split.passed(kind) for kind in STRIDE}


@pytest.mark.parametrize("role", SHELLS)
def test_every_effect_of_a_role_has_crash_points(points, role):
    """A run passes a point before and after each effect; a new effect without one fails here."""
    wanted = carried_out(SHELLS[role])
    if role == "client":  # the others have points in `test_crash_points.py`
        wanted -= carried_out(ClientShell)
    for stage in ("before", "after"):
        passed = {
            p.name for kind in points.values() for p in kind if (p.role, p.stage) == (role, stage)
        }
        assert wanted - passed == set()


def test_no_effect_is_outside_the_tables():
    """`carried_out` finds the tables by their text; an effect listed in another way fails here."""
    shells = (ParameterServerShell, ClientShell, GroupsShell, *SHELLS.values())
    known = set().union(*(carried_out(shell) for shell in shells))
    assert {effect.tag for effect in EFFECTS} == known


@pytest.mark.parametrize("kind", STRIDE)
def test_split_learning_goes_on_from_any_point(points, kind):
    """No upload is lost or trained twice, and no version differs."""
    for point in points[kind][STRIDE[kind] // 2 :: STRIDE[kind]]:
        assert crash_split.attempt(kind, point) == [], point
