"""A second process under the same name, with real processes."""

import time

import pytest

pytestmark = pytest.mark.slow


def test_whose_name_is_taken_says_that_only_and_ends(site):
    """A launcher that starts a client twice must be told so, and not that the server restarted."""
    site.server(every_s=2)
    first = site.client("a")
    site.wait_version(1)
    second = site.client("a")
    second.wait_for("received version")
    begun = time.monotonic()
    first.wait_for("another process took over")
    assert time.monotonic() - begun < 5.0  # what is left is Python, which takes torch apart
    assert first.end() == 2
    assert first.lines[-1].startswith("error: another process took over as a")
    assert "restarted" not in first.text
    assert "is back" not in first.text
    assert second.popen.poll() is None
