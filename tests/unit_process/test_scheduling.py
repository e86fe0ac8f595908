"""How a relay asks for processor time."""

import os
import subprocess
import sys

import pytest

from fsl_async.process import scheduling

SCRIPT = """
import os
from fsl_async.process.scheduling import run_in_batches
os.sched_setscheduler(0, os.{before}, os.sched_param(0))
print(run_in_batches(), os.sched_getscheduler(0) == os.{after})
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
@pytest.mark.parametrize(
    ("before", "after", "is_set"),
    [("SCHED_OTHER", "SCHED_BATCH", True), ("SCHED_IDLE", "SCHED_IDLE", False)],
)
def test_a_relay_does_not_interrupt_who_is_running(before, after, is_set):
    """Unless its operator has chosen something himself. In a process of its own: that of the tests stays as it is."""
    words = [sys.executable, "-c", SCRIPT.format(before=before, after=after)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == f"{is_set} True\n"


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
@pytest.mark.parametrize("fault", [AttributeError, PermissionError])
def test_a_system_that_has_or_allows_none_of_it_is_left_as_it_is(monkeypatch, call, fault):
    """A relay runs there all the same."""
    asked = []

    def refuse(*_):
        asked.append(call)
        raise fault

    for name in ("SCHED_OTHER", "SCHED_BATCH"):
        monkeypatch.setattr(os, name, name, raising=False)
    monkeypatch.setattr(os, "sched_param", int, raising=False)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: "SCHED_OTHER", raising=False)
    monkeypatch.setattr(os, call, refuse, raising=False)
    assert not scheduling.run_in_batches()
    assert asked == [call]
