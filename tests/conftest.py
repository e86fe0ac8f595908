"""What makes all tests, and the processes they start, independent of processor and load."""

import os

import pytest
from hypothesis import HealthCheck, settings

# By default MKL sums in an order that depends on the processor and on where an array begins, so two
# processes with the same numbers differ in last bits. MKL reads it once, at its start.
os.environ["MKL_CBWR"] = os.environ.get("MKL_CBWR") or "COMPATIBLE"

# A test of values is none of speed: a busy machine takes long for one, above all for the first.
settings.register_profile(
    "busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")


@pytest.fixture
def one_thread():
    """Let torch compute with one thread: sums of equal bits need one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
