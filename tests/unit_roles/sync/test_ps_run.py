"""The parameter server from its first client to its end: publishing, rounds, members, deltas."""

from deltas import key

from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    Done,
    EndSession,
    Note,
    Send,
    StreamLost,
)
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps import Phase


def test_first_client_publishes_second_fetches(server, look):
    """The start of a run."""
    assert server.hello("a") == [do.Admit("a", 1, 0), do.Welcome("a", 0)]
    assert look.sent(server.attach("a"), "a") == [msg.Publish()]
    assert look.sent(server.join("b")) == []
    assert server.receive(msg.InitialMeta("f"), "b", "s") == [
        DeclineStream("b", "s", "not the publisher")
    ]
    assert server.receive(msg.InitialMeta("f"), "a", "s") == [do.ReceiveInitial("a", "s")]
    assert server.receive(msg.Fetch(-1, ""), "b") == [], "there is no version yet"
    effects = server.committed(0)
    assert look.sent(effects, "a") == look.sent(effects, "b") == [msg.Announce(0, "d0")]
    assert server.receive(msg.Fetch(-1, ""), "b") == [do.SendVersion("b", "full", 0)]
    late = server.receive(msg.InitialMeta("f"), "b", "s")
    assert look.sent(late, "b") == [msg.Announce(0, "d0")], "its weights are not used"
    assert look.sent(server.join("c")) == [msg.Announce(0, "d0")]


def test_publisher_that_reconnects_does_not_delay_the_others(server, look):
    """Another attached client is asked at once, in case the publisher never attaches again."""
    server.join("a")
    server.join("b")
    effects = server.hello("a", 2)
    assert look.sent(effects, "b") == [msg.Publish()]
    assert server.left("a", 1) == [], "the end of the old incarnation does not end the new one"
    assert "a" in server.machine.members


def test_initial_weights_that_cannot_be_written(make_server, look):
    """A disk stays full for a while: the next try is after a pause, with another client."""
    server = make_server(every_s=100.0)
    server.join("a")
    server.join("b")
    effects = server.feed(Done(do.ReceiveInitial("a", ""), "disk full"))
    assert "next try in 10 s" in look.notes(effects)
    assert look.sent(effects) == look.sent(server.join("c")) == []
    assert look.sent(server.fire(), "b") == [msg.Publish()]
    server.feed(StreamLost("b", "initial:b/1", "broken"))
    assert look.sent(server.fire(), "a") == [msg.Publish()]
    assert look.only(server.feed(StreamLost("b", "x", "y")), Send) == []
    assert look.sent(server.left("a"), "c") == [msg.Publish()]
    server.feed(StreamLost("c", "initial:c/1", "broken"))
    server.left("b")
    server.left("c")
    assert server.fire() == [], "no client is left"
    server.feed(Done(do.ReceiveInitial("a", ""), "disk full"))
    server.fire()
    assert look.sent(server.join("a", 2)) == [msg.Publish()]


def test_a_failed_write_of_a_version_that_exists(server):
    """A second publisher may fail after the first one's weights are durable."""
    server.begin("a")
    assert server.feed(Done(do.ReceiveInitial("a", ""), "exists")) == []
    server.feed(StreamLost("a", "initial:a/1", "late"))
    assert server.machine.phase is Phase.READY


def test_timer_calls_and_all_answer(server, look):
    """A round without faults."""
    server.begin("a", "b")
    effects = server.fire()
    assert server.now == 600.0
    assert look.sent(effects, "a") == look.sent(effects, "b") == [msg.Call(0)]
    offered = server.offer(key("a"))
    assert [type(effect) for effect in offered] == [do.ReceiveDelta]
    effects = server.store(key("a"), after_s=5.0)
    assert look.sent(effects) == [msg.Accepted(key("a"))]
    assert server.receive(msg.Skip(7, "of another round"), "b") == []
    effects = server.receive(msg.Skip(0, "nothing"), "b")
    assert "1 of 2 called clients sent a delta, all have answered" in look.notes(effects)
    (commit,) = look.only(effects, do.Commit)
    assert (commit.version, [one.key for one in commit.merged]) == (1, [key("a")])
    effects = server.committed(1)
    assert look.sent(effects) == [msg.Announce(1, "d1")] * 2
    assert server.machine.tokens_total == 8
    server.fire()
    assert server.now == 1200.0, "every_s after the last call"


def test_a_delta_weighs_by_the_versions_since_its_base(server, look):
    """One that is stored during a merge is a version older at the next."""
    server.begin("a", "b", "c")
    for version, age in ((0, 0), (1, 1), (2, 0)):
        server.fire()
        late, fresh = key("a", version, version - age), key("b", version, version)
        for one in (late, fresh):
            server.offer(one)
            server.store(one)
        skipped = server.receive(msg.Skip(version, "nothing"), "c")
        found = {one.key: one.weight for one in look.only(skipped, do.Commit)[0].merged}
        assert found == {fresh: 8.0, late: 8.0 * (1 + age) ** -0.5}
        server.offer(key("c", version, version))
        server.committed(version + 1)
        server.store(key("c", version, version))
        ((later,), _) = server.machine.deltas.begin_merge()
        assert later.weight == 8.0 * 2**-0.5
        server.machine.deltas.abandon_merge()
        del server.machine.deltas.pending[later.key]


def test_grace_computed_from_earlier_rounds(server):
    """After three arrivals the fixed minute is replaced."""
    server.begin("a", "b", "c", "d")
    for version in range(2):
        server.fire()
        for name in "abcd":
            server.store(key(name, version + 1, version), after_s=2.0)
        server.committed(version + 1)
    server.fire()
    server.store(key("a", 9, 2), after_s=4.0)
    server.store(key("b", 9, 2))
    assert server.machine.next_deadline() == 1800.0 + 4.0 + 4 * 2.0


def test_same_incarnation_is_called_again(server, look):
    """Its call may be lost with the session, and its progress is still there."""
    server.begin("a", "b", "c")
    server.fire()
    server.left("b")
    server.hello("b")
    assert server.machine.round.missing() == ["a", "c"], "not expected before it is attached"
    assert look.sent(server.attach("b")) == [msg.Announce(0, "d0"), msg.Call(0)]
    assert server.machine.round.missing() == ["a", "b", "c"]


def test_too_few_clients(make_server, look):
    """It is reported, and the next try is a period later."""
    server = make_server(min_clients=2, every_s=10.0)
    server.begin("a")
    effects = server.fire()
    assert "no round: 1 client is here, 2 are needed" in look.notes(effects)
    assert server.machine.next_deadline() == 20.0
    server.join("b")
    assert look.sent(server.fire(), "b") == [msg.Call(0)]


def test_all_leave_and_all_skip(server, look):
    """A round without a delta closes without a version, and the next one opens in time."""
    server.begin("a")
    server.fire()
    assert "closes without a new version" in look.notes(server.left("a"))
    server.join("a", 2)
    server.fire()
    effects = server.receive(msg.Skip(0, "nothing"), "a")
    assert look.only(effects, do.Commit) == []
    assert (server.machine.phase, server.machine.next_deadline()) == (Phase.READY, 1800.0)


def test_stays_open_without_quorum_and_recalls_clients_that_skipped(make_server, look):
    """The round must not wait for clients that hang only."""
    server = make_server(every_s=100.0)
    server.begin("a", "hung", "hung2")
    server.fire()
    server.receive(msg.Skip(0, "nothing"), "a")
    effects = server.fire()
    assert server.now == 195.0
    assert "round 0 stays open: 0 of 3 called clients sent a delta, 2 needed" in look.notes(effects)
    assert look.sent(effects) == [msg.Call(0)]
    server.store(key("a"))
    effects = server.fire()
    assert "no quorum after 195.0 s" in look.notes(effects)
    assert len(look.only(effects, do.Commit)) == 1, "clients that hang must not stop the others"


def test_a_failing_disk_is_tried_less_and_less_often(server, look):
    """The same line must not fill the log."""
    server.begin("a")
    server.fire()
    server.store(key("a"))
    waits = []
    for _ in range(8):
        server.feed(Done(do.Commit(1, (), 1.0), "no space"))
        waits.append(server.machine.next_deadline() - server.now)
        server.fire()
    assert waits == sorted(waits)
    assert (waits[1], waits[-1]) == (2 * waits[0], 600.0)


def test_open_round_does_not_call_in_a_loop(make_server, look):
    """A client with nothing to send answers at once, and must not be called again at once."""
    server = make_server(every_s=100.0)
    server.begin("a", "hung", "hung2")
    server.fire()
    server.receive(msg.Skip(0, "nothing"), "a")
    assert look.sent(server.fire()) == [msg.Call(0)]
    assert look.sent(server.receive(msg.Skip(0, "nothing"), "a")) == []
    assert server.machine.next_deadline() == 295.0
    assert look.sent(server.fire()) == [msg.Call(0)]


def test_late_delta_is_merged_with_its_staleness(server, look):
    """It is measured from version 0 and merged into version 2."""
    server.begin("a", "b")
    server.fire()
    server.store(key("a"))
    server.fire()
    server.committed(1)
    effects = server.store(key("b"), number=0)
    assert look.sent(effects) == [msg.Accepted(key("b"))]
    server.fire()
    server.store(key("a", 2, 1))
    (commit,) = look.only(server.receive(msg.Skip(1, "nothing"), "b"), do.Commit)
    assert {one.key.client: one.staleness for one in commit.merged} == {"a": 0, "b": 1}


def test_refusals_answer_the_round(make_server, look):
    """A refused delta answers the round: too stale, of another lineage, or of another client."""
    server = make_server(max_staleness=0, keep_versions=1)
    server.begin("a")
    for version in range(2):
        server.fire()
        server.store(key("a", version + 1, version))
        server.committed(version + 1)
    server.join("b")
    server.fire()
    effects = server.offer(key("b", 1, 0))
    assert look.only(effects, DeclineStream)[0].reason == "stale"
    assert look.sent(effects)[0].code == "stale"
    assert server.machine.round.answered == {"b": False}
    assert look.sent(server.offer(key("a", 9, 2), base_digest="alien"))[0].code == "lineage"
    assert server.machine.phase is Phase.READY, "both have answered without a delta"
    foreign = server.offer(key("a", 9, 2), peer="b")
    assert foreign == [DeclineStream("b", "delta:a/1/2/9", "not yours")]
    assert look.only(server.offer(key("stranger")), DeclineStream)[0].reason == "not yours"


def test_a_known_key_gets_the_same_answer(server, look):
    """The acknowledgement may be lost with a session."""
    server.begin("a", "b")
    server.fire()
    server.store(key("a"))
    effects = server.offer(key("a"), number=0)
    assert look.sent(effects) == [msg.Accepted(key("a"))]
    assert look.only(effects, DeclineStream)[0].reason == "known"
    again = server.store(key("a"))
    assert look.sent(again) == [msg.Accepted(key("a"))]
    server.fire()
    server.committed(1)
    assert look.sent(server.offer(key("a"), number=0)) == [msg.Accepted(key("a"))]
    server.store(key("a"))
    assert not server.machine.deltas.pending, "it is merged once"


def test_quarantine(server, look):
    """Only the delta with NaN is excluded; offered again it is refused again."""
    server.begin("a", "b")
    server.fire()
    server.store(key("b"))
    effects = server.store(key("a"), problem="2 values are not finite")
    assert look.sent(effects, "a") == [
        msg.Declined(key("a"), "quarantined", "2 values are not finite")
    ]
    (note,) = [one for one in look.only(effects, Note) if "quarantined delta a/1/0/1" in one.text]
    assert note.facts == {"alarm": "delta", "client": "a"}
    (commit,) = look.only(effects, do.Commit)
    assert [one.key.client for one in commit.merged] == ["b"]
    assert look.sent(server.offer(key("a"), number=0))[0].code == "quarantined"
    assert look.sent(server.store(key("a")))[0].code == "quarantined"


def test_a_delta_of_a_client_that_left_counts(server, look):
    """It was complete before the session ended; the client's next offer gets the answer."""
    server.begin("a", "b")
    server.fire()
    server.left("a")
    effects = server.store(key("a"))
    assert look.sent(effects) == []
    effects = server.receive(msg.Skip(0, "nothing"), "b")
    assert [one.key for one in look.only(effects, do.Commit)[0].merged] == [key("a")]


def test_a_transfer_that_broke_off_is_asked_for_again(server, look):
    """A delta that arrived and could not be stored gets an answer, so its client goes on."""
    server.begin("a")
    server.fire()
    effects = server.feed(StreamLost("a", "delta:a/1/0/1", "disk full"))
    assert look.sent(effects) == [msg.Declined(key("a"), "later", "disk full")]
    assert look.sent(server.feed(StreamLost("gone", "delta:gone/1/0/1", "x"))) == []


def test_disk_full_at_commit_is_retried_with_later_deltas(make_server, look):
    """Nothing is lost, and versions are still made one at a time."""
    server = make_server(every_s=100.0)
    server.begin("a", "b")
    server.fire()
    server.store(key("a"))
    server.fire()
    assert server.machine.phase is Phase.MERGING
    effects = server.store(key("b"), number=0)
    assert look.only(effects, do.Commit) == [], "one version at a time"
    effects = server.feed(Done(do.Commit(1, (), 1.0), "no space left"))
    assert "no space left; nothing is lost; it is tried again within 100 s" in look.notes(effects)
    (commit,) = look.only(server.fire(), do.Commit)
    assert [one.key.client for one in commit.merged] == ["a", "b"]


def test_updates_for_neighbours_full_versions_for_the_others(make_server, look):
    """An update needs a known digest of this run."""
    server = make_server(keep_versions=2)
    server.begin("a")
    for version in range(3):
        server.fire()
        server.store(key("a", version + 1, version))
        server.committed(version + 1)

    def asked(version, digest):
        return server.receive(msg.Fetch(version, digest), "a")

    assert asked(2, "d2") == [do.SendVersion("a", "update", 3)]
    assert asked(1, "d1") == [do.SendVersion("a", "update", 2)]
    assert asked(0, "d0") == [do.SendVersion("a", "update", 1)], (
        "the shell sends 3 in full if update 1 is deleted"
    )
    assert asked(2, "alien") == asked(9, "d9") == [do.SendVersion("a", "full", 3)]
    assert look.sent(asked(3, "d3")) == [msg.Announce(3, "d3")]
    assert server.receive(msg.Fetch(2, "d2"), "stranger") == []


def test_a_differing_digest_is_answered_with_the_full_version(server, look):
    """All clients that hold a version must hold the same bits."""
    server.begin("a")
    effects = server.hold("a", 0, "other")
    assert look.only(effects, do.SendVersion) == [do.SendVersion("a", "full", 0)]
    assert "computed digest other for version 0, which has d0" in look.notes(effects)
    assert server.hold("stranger", 0) == []
    assert server.hold("a", 77) == [], "that version is unknown"


def test_hellos_that_are_refused(server, look):
    """A client of another run must not bring its versions along."""
    (refusal,) = server.hello("a", run="other")
    assert (refusal.code, "restart the client" in refusal.text) == ("run", True)
    assert look.only(server.hello("a", run="run-1"), do.Welcome)


def test_another_model_is_rejected_and_not_waited_for(server, look):
    """The text names the tensor; a client that changes its model leaves the round too."""
    server.begin("a", "b")
    server.fire()
    server.store(key("a"))
    effects = server.attach("b", difference="head.weight is (3, 4) there and (3, 5) here")
    (reject,) = look.sent(effects, "b")
    assert (reject.code, "head.weight" in reject.text) == ("model", True)
    assert "b" not in server.machine.members
    assert len(look.only(effects, do.Commit)) == 1
    assert look.only(server.attach("b"), EndSession)[0].peer == "b"


def gone(server, peer, **how):
    """The texts of the notes when a client says goodbye."""
    event = ClientLeft(peer, 1, how.pop("reason", "bye"), **how)
    return "\n".join(one.text for one in server.feed(event) if isinstance(one, Note))


def test_a_run_whose_clients_are_all_done_tells_its_operator(make_server):
    """A script's own `max_iters` ends it, and the parameter server waits for ever."""
    words = "and this run waits for clients"
    server = make_server().begin("a", "b")
    assert words not in gone(server, "a")
    text = gone(server, "b", why="the training function returned")
    assert "all clients have left, b last (the training function returned)" in text
    assert f"{words} without end" in text
    server.join("a")
    assert words not in gone(server, "a", returns=True), "it is launched again"
    server.join("a")
    assert words not in gone(server, "a", reason="expired"), "it may be back"
    limited = make_server(seconds=60.0).begin("a")
    assert f"{words} until its limit of time" in gone(limited, "a")
    empty = make_server()
    empty.join("a")
    assert words not in gone(empty, "a"), "there is no model yet"
