"""Decisions of the parameter server when its disk or a client's memory is damaged."""

from fsl_async.roles.machine import Finish, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.ps_state import EXIT_DAMAGED


def alarms(effects):
    return [one for one in effects if isinstance(one, Note) and "alarm" in one.facts]


def test_damage_beyond_repair_ends_this_process_and_not_the_run(make_server, look):
    """A commit must not be tried forever; clients wait for the next start and do not leave."""
    server = make_server(every_s=4.0)
    server.begin("a")
    server.fire()
    server.store(DeltaKey("a", 1, 0, 1))
    effects = server.feed(ev.StoreFailed("version 0 is damaged: start with --from-version 3"))
    assert effects == [Finish("version 0 is damaged: start with --from-version 3", EXIT_DAMAGED)]
    assert server.machine.next_deadline() is None
    assert not server.machine.ended


def test_a_repair_is_reported(make_server):
    """An operator should replace a failing disk."""
    (note,) = make_server().feed(ev.DamageRepaired("version 3 was damaged"))
    assert (note.text, note.level, note.facts) == (
        "version 3 was damaged",
        "warning",
        {"alarm": "damage"},
    )


def test_at_the_second_differing_digest_the_version_is_verified(make_server, look):
    """One may be a client's memory; two may be the parameter server's disk."""
    server = make_server()
    server.begin("a", "b")
    effects = server.hold("a", 0, "other")
    assert [one.facts for one in alarms(effects)] == [{"alarm": "digest", "client": "a"}]
    assert look.only(effects, do.VerifyVersion) == []
    effects = server.hold("b", 0, "another")
    assert look.only(effects, do.VerifyVersion) == [do.VerifyVersion(0)]
    assert look.only(server.hold("a", 0, "other"), do.VerifyVersion) == [], "once is enough"


def test_the_verdict_names_the_side(make_server):
    """An operator must know on which side the damage is."""
    server = make_server()
    server.begin("a", "b")
    for _ in range(2):
        server.hold("b", 0, "other")
    (note,) = server.feed(ev.VersionVerified(0, intact=True))
    assert (
        "version 0 is intact at the parameter server, byte by byte, so the damage is at b:"
        in note.text
    )
    assert note.facts == {"alarm": "verdict"}
    (note,) = server.feed(ev.VersionVerified(0, intact=False))
    assert "damaged at the parameter server, not at b" in note.text


def test_wrong_digests_of_a_client_are_one_line_a_minute(make_server, look):
    """It gets the version in full each time, but a log must not grow by what one client sends."""
    server = make_server().begin("a", "b")
    texts = []
    for number in range(353):
        effects = server.feed(ev.VersionHeld("a", 0, f"{number:032x}"), 0.05)
        assert look.only(effects, do.SendVersion) == [do.SendVersion("a", "full", 0)]
        texts += [one.text for one in alarms(effects)]
    assert len(texts) == 1
    assert len(alarms(server.hold("b", 0, "f" * 32))) == 1, "each client has its own"
    (last,) = alarms(server.feed(ev.VersionHeld("a", 0, "e" * 32), 60.0))
    assert last.text.endswith("it gets the version in full (and 352 more were not printed)")


def test_the_memory_of_differing_digests_is_bounded(make_server):
    """A client may have bad memory for months."""
    server = make_server()
    server.begin("a")
    for version in range(1, 40):
        server.hold("a", version - 1, "other")
        server.committed(version)
    assert len(server.machine.serving._differing) < 12
