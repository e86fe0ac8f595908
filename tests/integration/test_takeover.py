"""A second process under the same name, with real processes."""

import time

import pytest

pytestmark = pytest.mark.slow


def test_a_replaced_client_reports_only_that_and_ends(site):
    """When a launcher starts a client twice, the first ends with that message, not "restarted"."""
    site.server(every_s=2)
    first = site.client("a")
    site.wait_version(1)
    second = site.client("a")
    second.wait_for("received version")
    begun = time.monotonic()
    first.wait_for("another process took over")
    assert time.monotonic() - begun < 5.0  # the rest is Python's exit with torch imported
    assert first.end() == 2
    assert first.lines[-1].startswith("error: another process took over as a")
    assert "restarted" not in first.text
    assert "is back" not in first.text
    assert second.popen.poll() is None
