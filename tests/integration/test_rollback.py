"""A real parameter server that is started from an older copy of its run directory."""

import shutil
import signal

import pytest

from fsl_async.commands.status_report import NodeStatus

pytestmark = pytest.mark.slow


def test_a_restored_copy_is_reported_on_both_sides(warm_site):
    """The client holds versions that the copy lacks: it goes back, and both sides have a line."""
    site = warm_site
    copy = site.folder / "copy"
    server = site.server(every_s=0.4)
    client = site.client("a")
    site.wait_version(1)
    server.signal(signal.SIGSTOP)  # so that no file is renamed meanwhile
    shutil.copytree(site.run_dir, copy)
    server.signal(signal.SIGCONT)
    newest = max(one["version"] for one in site.ledger("version"))
    client.wait_for(f"version {newest + 1}: step")
    server.kill()
    shutil.rmtree(site.run_dir)
    copy.rename(site.run_dir)
    again = site.server(every_s=0.4)
    line = client.wait_for("the run has gone back behind version")
    assert " gone, with about " in line
    again.wait_for("a holds a version that this run lacks: version")
    site.wait_version(newest + 1)

    def shown():
        ps = NodeStatus(site.run_dir).state.ps
        return ps.alarms == 1 and ps.gone >= 1

    site.wait_until(shown, "the alarm in the journal")
