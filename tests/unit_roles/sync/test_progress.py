"""How far a run is: schedules and the outer optimizer follow it."""

import pytest

from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.progress import RunProgress
from fsl_async.roles.sync.ps_state import ParameterServerRules


def test_without_a_limit_there_is_no_progress():
    """A run without a planned end has no last 30 %."""
    assert RunProgress(ParameterServerRules()).with_version(100, 10**6, 1e6) is None


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"limit_rounds": 40}, 0.25),
        ({"limit_tokens": 2000}, 0.55),
        ({"limit_s": 400.0}, 0.75),
        ({"limit_rounds": 40, "limit_tokens": 2000, "limit_s": 400.0}, 0.75),
        ({"limit_rounds": 5}, 1.0),
    ],
)
def test_the_limit_that_is_reached_first_counts(limits, expected):
    """Version 10, 1,000 tokens before it and 100 in it, 250 s served by an earlier process."""
    progress = RunProgress(ParameterServerRules(**limits))
    progress.recovered(1000, 250.0, now=7000.0)
    assert progress.with_version(10, 100, now=7050.0) == pytest.approx(expected)


def test_an_average_has_the_progress_of_its_version(make_server, look):
    """The store chooses the outer step by it."""
    server = make_server(limit_rounds=4)
    server.begin("a")
    server.fire()
    average = look.only(server.store(DeltaKey("a", 1, 0, 1)), do.Average)[0]
    assert (average.version, average.progress) == (1, 0.25)
