"""How a relay asks for processor time."""

import os
import subprocess
import sys

import pytest

from fsl_async import scheduling

SCRIPT = """
import os
from fsl_async.scheduling import run_in_batches
print(run_in_batches(), os.sched_getscheduler(0) == os.SCHED_BATCH)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_a_relay_does_not_interrupt_who_is_running():
    """In a process of its own: there is a way back only with privileges on some systems."""
    words = [sys.executable, "-c", SCRIPT]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "True True\n"


@pytest.mark.parametrize("fault", [AttributeError, PermissionError])
def test_a_system_that_has_or_allows_none_of_it_is_left_as_it_is(monkeypatch, fault):
    """A relay runs there all the same."""

    def refuse(*_):
        raise fault

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    assert not scheduling.run_in_batches()
