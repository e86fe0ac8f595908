"""How far a run is: schedules and the outer optimizer follow it."""

import pytest

from fsl_async.roles.machine import Done, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.progress import Decay, RunLimits, RunPosition, RunProgress, fade_of


def test_without_a_limit_there_is_no_progress():
    """A run without a planned end has no last 30 %."""
    progress = RunProgress()
    progress.recovered(100, 10**6, 0.0, now=0.0)
    position = progress.position(1e6)
    assert not position.is_planned
    assert position.known_progress is None
    assert position.fade == 1.0


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (RunLimits(rounds=40), 0.25),
        (RunLimits(tokens=2000), 0.55),
        (RunLimits(seconds=400.0), 0.75),
        (RunLimits(40, 2000, 400.0), 0.75),
        (RunLimits(rounds=5), 1.0),
    ],
)
def test_the_limit_that_is_reached_first_counts(limits, expected):
    """Version 10, 1,000 tokens before it and 100 in it, 250 s served by an earlier process."""
    progress = RunProgress(limits)
    progress.recovered(9, 1000, 250.0, now=7000.0)
    found = progress.with_version(10, 100, now=7050.0)
    assert found.progress == pytest.approx(expected)
    assert found.is_planned


def test_progress_goes_on_between_versions_at_the_measured_pace():
    """Clients that join in the middle of a round train at the others' rate."""
    progress = RunProgress(RunLimits(rounds=100), round_s=600.0)
    progress.recovered(0, 0, 0.0, now=0.0)
    assert progress.position(0.0).pace_per_s == pytest.approx(1 / 60_000), "as planned"
    progress.committed(1, 500, now=1000.0)
    progress.committed(2, 500, now=2000.0)
    position = progress.position(2500.0)
    assert position.pace_per_s == pytest.approx(1e-5), "as measured: a round takes 1,000 s"
    assert position.progress == pytest.approx(0.025)
    assert position.tokens == 1000
    assert position.planned_tokens == pytest.approx(1000 / 0.025)
    assert position.reach == pytest.approx(0.04)
    assert progress.position(1e9).progress == pytest.approx(0.04), "a round that waits adds no more"


def test_seconds_count_while_a_round_waits():
    """They end the run whether there are versions or not."""
    progress = RunProgress(RunLimits(seconds=1000.0), round_s=10.0)
    progress.recovered(0, 0, 0.0, now=0.0)
    progress.committed(1, 5, now=10.0)
    assert progress.position(20.0).progress == pytest.approx(0.02)
    assert progress.position(500.0).progress == pytest.approx(0.5)
    assert progress.position(500.0).reach == pytest.approx(0.5)
    assert progress.position(5000.0).progress == 1.0


def test_the_fade_is_linear():
    """Rates and outer momentum share it."""
    assert [fade_of(p, 0.7) for p in (None, 0.0, 0.7, 1.0)] == [1.0, 1.0, 1.0, 0.0]
    assert fade_of(0.85, 0.7) == pytest.approx(0.5)
    assert fade_of(1.0, 1.0) == 1.0, "with a date, nothing falls before it"


def positions(effects):
    """The positions announced, by peer."""
    return {
        one.peer: one.message.position
        for one in effects
        if isinstance(one, Send) and isinstance(one.message, msg.Announce)
    }


def test_announcements_carry_the_position(make_server):
    """Every client gets the same one, and a late joiner too."""
    server = make_server(rounds=4)
    server.begin("a", "b")
    server.fire()
    server.store(DeltaKey("a", 1, 0, 1))
    server.store(DeltaKey("b", 1, 0, 1))
    found = positions(server.committed(1))
    assert found["a"] == found["b"]
    assert found["a"].progress == 0.25
    assert found["a"].pace_per_s > 0
    assert found["a"].tokens > 0
    late = positions(server.join("c"))["c"]
    assert late.progress >= 0.25


def ask(server, look, more=None):
    """Ask for a decay; returns the one to keep and, once it is kept, what follows."""
    effects = server.feed(ev.DecayAsked(more) if more else ev.DecayAsked())
    (keep,) = look.only(effects, do.KeepDecay)
    assert effects == [keep], "nothing is announced before it is on disk"
    return keep.decay, server.feed(Done(keep))


def version_1(server):
    """Begin a run and make its first version."""
    server.begin("a")
    server.fire()
    server.store(DeltaKey("a", 1, 0, 1))
    server.committed(1)
    return server


def test_a_decay_begins_now_and_ends_the_run_after_more(make_server, look):
    """`fsl-node decay`: durable first, then announced; the run ends when it says."""
    server = version_1(make_server())
    decay, effects = ask(server, look, RunLimits(rounds=3))
    assert decay == Decay(0.25, RunLimits(rounds=4), RunLimits())
    assert positions(effects)["a"] == RunPosition(
        server.machine.tokens_total,
        4 * server.machine.tokens_total,
        True,
        0.25,
        1 / 2400,
        0.75,
        0.25,
    )
    assert "from version 1 on, 25% of the run, until the run ends at version 4" in look.notes(
        effects
    )
    assert server.machine.progress.limits.is_last(3)
    refused = look.notes(server.feed(ev.DecayAsked()))
    assert "fall already, since 25% of the run, until version 4" in refused


def test_a_decay_can_get_another_end(make_server, look):
    """A typing error is not final: rates go on falling from where they are, to the new end."""
    server = version_1(make_server(rounds=4, decay_share=1.0))
    before = server.machine.progress.position(server.now).fade
    assert before < 1.0
    decay, effects = ask(server, look, RunLimits(rounds=40))
    assert decay.limits == RunLimits(rounds=41)
    assert "rates fall until the run ends at version 41" in look.notes(effects)
    shorter, _ = ask(server, look, RunLimits(rounds=1))
    position = server.machine.progress.position(server.now)
    assert (position.progress, shorter.limits) == (0.5, RunLimits(rounds=2))
    assert shorter.planned == RunLimits(rounds=4), "a restart with these keeps the decay"


def test_a_new_end_leaves_the_rate_where_it_is():
    """No jump: neither up nor down."""
    progress = RunProgress(RunLimits(rounds=100), decays_from=0.5)
    progress.recovered(80, 0, 0.0, now=0.0)
    assert progress.position(0.0).fade == pytest.approx(0.4)
    progress.adopt(progress.decay(RunLimits(rounds=40), 0.0), 0.0)
    position = progress.position(0.0)
    assert position.progress == pytest.approx(80 / 120)
    assert position.fade == pytest.approx(0.4)


def test_only_a_schedule_with_a_decay_can_be_asked_to_decay(make_server, look):
    """Cosine and constant are what they are; the answer says so."""
    server = version_1(make_server(rounds=4, schedule="constant"))
    assert "set train.schedule = wsd" in look.notes(server.feed(ev.DecayAsked()))


def test_a_decay_in_rounds_takes_the_place_of_a_limit_in_seconds(make_server, look):
    """The old deadline must not end the run while its rates are still high."""
    server = version_1(make_server(seconds=9000.0))
    assert server.machine.deadlines.when("limit") is not None
    ask(server, look, RunLimits(rounds=100))
    assert server.machine.deadlines.when("limit") is None


def test_seconds_before_version_0_are_no_part_of_the_run():
    """Clients may wait in a queue for an hour; that must not be the time at full rates."""
    progress = RunProgress(RunLimits(seconds=3600.0))
    progress.recovered(-1, 0, 0.0, now=0.0)
    assert progress.position(2400.0).progress == 0.0
    progress.committed(0, 0, now=2400.0)
    assert progress.position(2400.0).progress == 0.0
    assert progress.position(3000.0).progress == pytest.approx(0.5)
    again = RunProgress(RunLimits(seconds=3600.0))
    again.recovered(3, 10, 3000.0, now=7.0, began_s=2400.0)
    assert again.position(307.0).progress == pytest.approx(0.75)


def test_a_decay_needs_an_end(make_server, look):
    """Without one, rates would never reach their last value."""
    server = make_server()
    server.begin("a")
    text = look.notes(server.feed(ev.DecayAsked()))
    assert "give --rounds, --tokens or --seconds" in text


def test_a_decay_in_seconds_ends_the_run_by_the_clock(make_server, look):
    """The deadline of the limit is set."""
    server = make_server()
    server.begin("a")
    ask(server, look, RunLimits(seconds=100.0))
    assert server.machine.deadlines.when("limit") == pytest.approx(server.now + 100.0)


def test_a_decay_outlives_a_restart_with_the_same_limits(make_server):
    """A restarted parameter server goes on with it; other limits drop it."""
    decay = Decay(0.5, RunLimits(rounds=20), RunLimits(rounds=100))
    for limit, expected in ((100, 0.5), (200, 0.7)):
        progress = RunProgress(RunLimits(rounds=limit))
        progress.recovered(12, 0, 0.0, now=0.0, decay=decay)
        assert progress.position(0.0).decays_from == expected
