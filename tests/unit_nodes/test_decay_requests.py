"""The parameter server looks for requests to decay, and for the date."""

from fsl_async.nodes.ps.decay_requests import FILE, DecayRequests, write_request
from fsl_async.roles.sync.events import DecayAsked
from fsl_async.roles.sync.progress import RunLimits
from fsl_transport.testing.virtual_time import VirtualScheduler


def test_a_request_is_taken_once(tmp_path):
    """The ledger has it from then on."""
    scheduler, asked = VirtualScheduler(), []
    requests = DecayRequests(tmp_path, asked.append, scheduler)
    requests.start()
    scheduler.run_until(3.0)
    assert asked == []
    write_request(tmp_path, RunLimits(tokens=500))
    scheduler.run_until(5.0)
    assert asked == [DecayAsked(RunLimits(tokens=500))]
    assert not (tmp_path / FILE).exists()
    scheduler.run_until(9.0)
    assert len(asked) == 1
    requests.close()
    write_request(tmp_path, RunLimits(rounds=1))
    scheduler.run_until(20.0)
    assert len(asked) == 1


def test_a_date_is_reached_once(tmp_path):
    """By the wall clock, with a time zone."""
    scheduler, asked = VirtualScheduler(), []
    wall = [0.0]
    requests = DecayRequests(
        tmp_path,
        asked.append,
        scheduler,
        at="1970-01-01T01:00:10+01:00",
        wall_clock=lambda: wall[0],
    )
    requests.start()
    scheduler.run_until(2.0)
    assert asked == []
    wall[0] = 10.0
    scheduler.run_until(6.0)
    assert asked == [DecayAsked()]


def test_a_date_waits_for_version_0_and_gives_way_to_a_request(tmp_path):
    """A parameter server may wait for its first client past the date."""
    for was_asked, expected in ((False, [DecayAsked()]), (True, [])):
        scheduler, asked = VirtualScheduler(), []
        begun = []
        requests = DecayRequests(
            tmp_path,
            asked.append,
            scheduler,
            at="1970-01-01T00:00+00:00",
            has_begun=lambda begun=begun: bool(begun),
            was_asked=lambda was_asked=was_asked: was_asked,
            wall_clock=lambda: 5.0,
        )
        requests.start()
        scheduler.run_until(4.0)
        assert asked == []
        begun.append(True)
        scheduler.run_until(9.0)
        assert asked == expected
        requests.close()
