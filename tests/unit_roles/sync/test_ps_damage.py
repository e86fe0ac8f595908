"""Decisions of the parameter server when its disk or a client's memory is damaged."""

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import Done, Finish, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey


def alarms(effects):
    return [one for one in effects if isinstance(one, Note) and "alarm" in one.facts]


def test_damage_beyond_repair_ends_this_process_and_not_the_run(make_server, look):
    """A commit must not be tried forever; clients wait for the next start and do not leave."""
    server = make_server(every_s=4.0)
    server.begin("a")
    server.fire()
    server.store(DeltaKey("a", 1, 0, 1))
    effects = server.feed(ev.StoreFailed("version 0 is damaged: start with --from-version 3"))
    assert effects == [
        Finish("version 0 is damaged: start with --from-version 3", ExitCode.BAD_INPUT)
    ]
    assert server.machine.next_deadline() is None
    assert not server.machine.ended


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
    (note,) = server.feed(Done(do.VerifyVersion(0)))
    assert (
        "version 0 is intact at the parameter server, byte by byte, so the damage is at b:"
        in note.text
    )
    assert note.facts == {"alarm": "verdict"}
    (note,) = server.feed(Done(do.VerifyVersion(0), "damaged"))
    assert "damaged at the parameter server, not at b" in note.text


def test_a_lost_delta_is_an_alarm(make_server):
    """An acknowledged delta is never lost silently."""
    server = make_server()
    effects = server.recover(3, "d3", lost=("acknowledged delta a/1/2/3 is lost",))
    (alarm,) = alarms(effects)
    assert (alarm.text, alarm.facts) == ("acknowledged delta a/1/2/3 is lost", {"alarm": "lost"})


def restored(make_server, **more):
    """A parameter server that is at version 3, of 30 tokens, again."""
    server = make_server()
    digests = {version: f"d{version}" for version in range(4)}
    server.recover(3, "d3", digests=digests, tokens_total=30, **more)
    return server


def hello(server, peer, version, digest=""):
    effects = server.feed(ev.ClientHello(peer, 1, "run-1", version, digest or f"d{version}"))
    return [one for one in effects if isinstance(one, Note)]


def test_versions_that_only_clients_hold_are_an_alarm(make_server):
    """The run directory was restored from an older copy, and the work since is gone."""
    server = restored(make_server)
    assert hello(server, "new", -1) == hello(server, "behind", 2) == []
    (alarm,) = hello(server, "a", 8)
    assert alarm.text == (
        "a holds a version that this run lacks: versions 4 to 8 are gone, with about 50 tokens;"
        " the parameter server was started from an older copy of its run directory"
    )
    assert alarm.facts == {"alarm": "rollback", "gone": 5, "client": "a"}


def test_a_version_is_reported_once_and_a_client_too(make_server):
    """A thousand clients are one line, and one that lies about its version is one."""
    server = restored(make_server)
    assert len(hello(server, "a", 8)) == 1
    assert hello(server, "b", 8) == hello(server, "a", 10**15) == []
    (alarm,) = hello(server, "c", 4)
    assert "version 4 is gone" in alarm.text


def test_a_version_of_another_lineage_is_an_alarm(make_server):
    """The parameter server has made a version of that number since it was restored."""
    (alarm,) = hello(restored(make_server), "a", 3, "other")
    assert "lacks: version 3 is gone" in alarm.text
    assert alarm.facts["gone"] == 1


def test_a_rollback_of_the_operator_is_no_alarm(make_server):
    """The ledger has it, with the digest of each version that it made void."""
    server = restored(make_server, void={7: "d7", 8: "d8"})
    (note,) = hello(server, "a", 8)
    assert note.text.endswith("the rollback with --from-version is on record")
    assert (note.level, note.facts) == ("info", {})
    (alarm,) = hello(server, "b", 7, "other")
    assert alarm.facts["alarm"] == "rollback"


def test_wrong_digests_of_a_client_are_one_line_a_minute(make_server, look):
    """It gets the version in full each time, but a log must not grow by what one client sends."""
    server = make_server().begin("a", "b")
    texts = []
    for number in range(353):
        effects = server.receive(msg.Holding(0, f"{number:032x}"), "a", after_s=0.05)
        assert look.only(effects, do.SendVersion) == [do.SendVersion("a", "full", 0)]
        texts += [one.text for one in alarms(effects)]
    assert len(texts) == 1
    assert len(alarms(server.hold("b", 0, "f" * 32))) == 1, "each client has its own"
    (last,) = alarms(server.receive(msg.Holding(0, "e" * 32), "a", after_s=60.0))
    assert last.text.endswith("it gets the version in full (and 352 more were not printed)")


def test_the_memory_of_differing_digests_is_bounded(make_server):
    """A client may have bad memory for months."""
    server = make_server()
    server.begin("a")
    for version in range(1, 40):
        server.hold("a", version - 1, "other")
        server.committed(version)
    assert len(server.machine.serving._differing) < 12
