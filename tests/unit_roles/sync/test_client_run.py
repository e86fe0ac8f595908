"""A client from its first dial on: joining, versions, deltas, and lost sessions and streams."""

from deltas import delta_of

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import (
    SERVER,
    DeclineStream,
    Done,
    DrainAsked,
    Finish,
    HelloRefused,
    Note,
    Send,
    SessionLost,
    StreamLost,
    TrainingEnded,
)
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.progress import RunPosition


def test_first_client_publishes_and_adopts_its_own_weights(client, look):
    """The client's weights are version 0, so it fetches nothing."""
    assert client.feed(ev.Attached("f", 10)) == []
    assert client.welcome() == [do.SendManifest()]
    assert client.receive(msg.Publish()) == [do.OfferInitial()]
    assert client.announce(0) == [do.ReplaceBase(0, is_own=True)]
    assert client.replaced(0) == [do.Rebase(0)]
    assert look.sent(client.rebased(0)) == [msg.Holding(0, "d0")]


def test_initial_weights_that_could_not_be_written_are_those_of_another_client(client, look):
    """The disk was full when they came, and another client was asked: no alarm, and no pause."""
    client.feed(ev.Attached("f", 10))
    client.welcome()
    client.receive(msg.Publish())
    assert client.announce(0, "d-other") == [do.ReplaceBase(0, is_own=True)]
    assert look.sent(client.replaced(0)) == [msg.Fetch(-1, "")]
    assert client.notes[-1] == Note("another client published the initial weights")


def test_a_run_that_has_gone_back_to_before_version_0_ends_its_clients(client):
    """A copy of the run directory from then: a client that holds a version publishes nothing, so
    the run would wait for ever. Started again, it does.
    """
    client.ready(2)
    client.receive(msg.Publish())
    shutdown = client.machine.shutdown
    text = "gone back to before version 0, and this client holds version 2: start it again"
    assert text in (shutdown.reason or "")
    assert shutdown.exit_code == ExitCode.BAD_INPUT


def test_a_model_that_is_attached_after_the_welcome(client):
    """Building a model takes minutes, during which the session exists."""
    assert client.welcome() == []
    assert client.receive(msg.Publish()) == []
    assert client.announce(3) == []
    assert client.feed(ev.Attached("f", 10)) == [do.SendManifest()]
    assert client.announce(3) == [Send(SERVER, msg.Fetch(-1, ""))]


def test_call_snapshot_offer_acknowledge(client, look):
    """A round without faults."""
    client.ready()
    assert client.call(0) == [do.TakeSnapshot(1)]
    assert client.call(0) == [], "it is being answered"
    key = client.key(1)
    assert client.snapshot(1, 0) == [do.OfferDelta(delta_of(key, 8, base_digest="d0"))]
    assert client.call(0) == [], "its delta is outstanding"
    assert client.acknowledge(client.key(9)) == []
    assert client.acknowledge(key) == [do.DropDelta(1)]
    assert client.machine.tokens_acknowledged == 8
    assert client.acknowledge(key) == []
    assert client.call(0) == [do.TakeSnapshot(2)], "a second round of that number is another round"


def test_nothing_trained_is_reported(client, look):
    """A snapshot without tokens gives no delta, and the round must not wait for one."""
    client.ready()
    client.call(0)
    effects = client.snapshot(1, 0, tokens=0)
    assert effects[0] == do.DropDelta(1)
    assert look.sent(effects)[0].round == 0
    assert "2 steps were reported with tokens=0" in look.notes(effects)
    client.call(0)
    client.lose()
    assert client.snapshot(2, 0, steps=0) == [do.DropDelta(2)]
    client.welcome()
    client.call(0)
    assert "tokens=0" not in look.notes(client.snapshot(3, 0, tokens=0)), "once"


def test_progress_is_reported(client):
    """Without notes an operator cannot distinguish a client that trains from one that hangs."""
    client.feed(ev.Attached("f", 10))
    client.welcome()
    client.receive(msg.Publish())
    client.announce(0)
    client.replaced(0)
    client.rebased(0)
    client.announce(1)
    client.follow(1)
    client.lose()
    client.welcome()
    client.welcome()
    assert [note.text for note in client.notes] == [
        "joined run run-1 as a, part 1 of 4",
        "published the initial weights",
        "version 1",
        "the parameter server is back",
    ]
    assert client.notes[2].facts == {"version": 1}, "to which the node adds metrics"


def test_a_lost_session_is_reported_in_plain_words(client, look):
    """Operators do not know the session layer's codes; before version 0 nothing trains."""
    client.welcome()
    assert look.notes(client.lose()) == "the parameter server does not answer; trying again"
    client.ready()
    effects = client.lose("reset")
    assert look.notes(effects) == ""  # the next answer may give the cause
    text = look.notes(client.welcome())
    assert text == "the parameter server restarted; training goes on"
    assert client.notes[-1].text == "the parameter server is back"
    client.lose("reset")
    assert look.notes(client.fire()) == "the parameter server restarted; training goes on"
    client.welcome()
    assert "odd" in look.notes(client.lose("odd"))


def test_a_client_whose_name_is_taken_reports_no_restart(client, look):
    """The answer to the hello gives the cause; a guess before it would be wrong."""
    client.ready()
    effects = client.lose("reset")
    effects += client.feed(HelloRefused("superseded", "another process took over as a"))
    assert look.notes(effects) == ""
    assert do.EndTraining("another process took over as a") in effects
    assert look.notes(client.fire()) == ""


def test_a_call_ends_with_its_session(client):
    """An hour-old call must not cause a delta that is too stale to be merged."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    client.call(1)
    client.lose()
    client.welcome()
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1)]


def test_a_fetch_ends_with_its_session(client, look):
    """A Fetch is answered in its session only; also if the end of a session is not reported."""
    client.ready()
    client.announce(1)
    client.lose()
    client.welcome()
    assert look.sent(client.announce(1)) == [msg.Fetch(0, "d0")]
    client.welcome()
    assert look.sent(client.announce(1)) == [msg.Fetch(0, "d0")]


def test_a_version_that_arrives_and_is_applied_offline(client, look):
    """Holding is sent in the next session."""
    client.ready()
    client.announce(1)
    client.offered(1)
    client.fetched(1)
    client.lose()
    client.replaced(1)
    assert client.rebased(1) == []
    client.welcome()
    assert look.sent(client.announce(1)) == [msg.Holding(1, "d1")]


def test_a_lost_delta_stream_is_offered_again(client):
    """It is offered after reoffer_s, and not offline."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    client.feed(StreamLost(SERVER, "delta:a/1/0/1", "x"))
    assert [type(effect) for effect in client.fire()] == [do.OfferDelta]
    assert client.now == 5.0
    client.feed(StreamLost(SERVER, "delta:a/1/0/1", "x"))
    client.lose()
    client.feed(StreamLost(SERVER, "delta:a/1/0/1", "x"))
    assert client.machine.next_deadline() is None


def test_later_is_not_never(client, look):
    """The parameter server could not store it now: the delta is kept and offered again."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    assert client.refuse(client.key(1), "later") == []
    assert [type(effect) for effect in client.fire()] == [do.OfferDelta]
    client.refuse(client.key(1), "later")
    client.acknowledge(client.key(1))
    assert client.machine.next_deadline() is None


def test_refused_delta_is_dropped_and_reported(client, look):
    """The run loses its tokens, so the operator must know."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    assert client.refuse(client.key(7)) == []
    effects = client.refuse(client.key(1))
    assert "refused a delta of 8 tokens" in look.notes(effects)
    assert effects[-1] == do.DropDelta(1)


def test_after_a_quarantined_delta_it_goes_back_to_the_base(client, look):
    """NaN weights would stay NaN otherwise."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    effects = client.refuse(client.key(1), "quarantined")
    assert "going back" in look.notes(effects)
    assert effects[-1] == do.Rebase(0, discard=True)
    client.rebased(0)
    assert client.call(1) == [do.TakeSnapshot(2)]


def test_quarantine_while_a_new_base_is_being_applied(client):
    """The rebase that follows discards too, once."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    client.announce(1)
    client.offered(1)
    assert client.fetched(1) == [do.FinishEncoding(1)]
    client.feed(Done(do.FinishEncoding(1)))
    client.refuse(client.key(1), "quarantined")
    assert client.replaced(1) == [do.Rebase(1, discard=True)]
    client.rebased(1)
    assert client.machine.discard is False


def test_a_version_waits_until_the_delta_is_coded(client):
    """The base that a delta's key names must not change before the delta is coded."""
    client.ready()
    client.call(0)
    client.announce(1)
    client.offered(1)
    assert client.fetched(1) == [], "the snapshot comes first"
    effects = client.snapshot(1, 0)
    assert [type(effect) for effect in effects] == [do.OfferDelta, do.FinishEncoding]
    assert client.feed(Done(do.FinishEncoding(1))) == [do.ReplaceBase(1)]


def test_a_delta_that_is_settled_while_it_is_coded(client):
    """The worker must not lose a delta while it codes it."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    client.announce(1)
    client.offered(1)
    client.fetched(1)
    assert not [one for one in client.refuse(client.key(1)) if isinstance(one, do.DropDelta)]
    assert client.feed(Done(do.FinishEncoding(1))) == [
        do.DropDelta(1),
        do.ReplaceBase(1),
    ]


def test_digest_mismatch_is_fetched_in_full_after_a_pause(client, look):
    """A persistent fault must not move full models in a tight loop."""
    client.ready()
    client.announce(1)
    client.offered(1)
    client.fetched(1)
    effects = client.replaced(1, "wrong")
    assert "digest wrong here and d1 at the parameter server" in look.notes(effects)
    assert look.sent(effects) == []
    assert look.sent(client.fire()) == [msg.Fetch(-1, "")]
    assert look.sent(client.follow(1, "full")) == [msg.Holding(1, "d1")]


def test_a_delta_taken_between_a_bad_fetch_and_the_good_one(client):
    """It has the digest of its base, or it would be refused as of another lineage."""
    client.ready()
    client.announce(1)
    client.offered(1)
    client.fetched(1)
    client.feed(Done(do.ReplaceBase(1), "damaged"))
    client.call(1)
    assert client.snapshot(1, 0) == [
        do.OfferDelta(delta_of(client.key(1), 8, base_digest="d0", number=1))
    ]


def test_a_lost_version_stream_is_asked_for_again(client, look):
    """The parameter server may have deleted that update meanwhile."""
    client.ready()
    client.announce(1)
    client.offered(1)
    client.feed(StreamLost(SERVER, "update:1", "gone"))
    assert client.announce(1) == []
    assert look.sent(client.fire()) == [msg.Fetch(0, "d0")]
    client.feed(StreamLost(SERVER, "update:1", "gone"))
    client.offered(1)
    client.fetched(1)
    assert client.machine.next_deadline() is None, "the version has arrived"


def test_streams_that_do_not_fit_are_declined(client, look):
    """A wrong stream must not change the base."""
    assert isinstance(client.offered(0, "full")[0], DeclineStream), "no model yet"
    client.ready()
    assert isinstance(client.offered(0, "full")[0], DeclineStream), "it is here already"
    client.announce(1)
    client.announce(2)
    assert isinstance(client.offered(2)[0], DeclineStream), "it does not follow the base"
    assert look.sent(client.fire()) == [msg.Fetch(0, "d0")], "that was the answer: ask again"
    client.offered(1)
    client.fetched(1)
    assert isinstance(client.offered(1)[0], DeclineStream), "it is being applied"


def test_published_but_the_run_is_further(client, look):
    """A publisher whose first Announce is of version 1 does not adopt its own weights."""
    client.feed(ev.Attached("f", 10))
    client.welcome()
    client.receive(msg.Publish())
    assert look.sent(client.announce(1)) == [msg.Fetch(-1, "")]


def back(client, version, digest="", tokens=0):
    return client.receive(
        msg.Announce(version, digest or f"d{version}", RunPosition(tokens=tokens))
    )


def test_a_run_that_goes_back_is_reported(client, look):
    """What it trained on since is gone; the client goes back too, and reports that once."""
    client.ready(7)
    back(client, 8, tokens=80)
    client.follow(8)
    client.feed(SessionLost("reset"))
    client.welcome()
    note, fetch = back(client, 3, tokens=30)
    assert note.text == (
        "the run has gone back behind version 8: versions 4 to 8 are gone, with about 50"
        " tokens; this client goes back too"
    )
    assert note.level == "warning"
    assert fetch == Send(SERVER, msg.Fetch(8, "d8"))
    assert not any(isinstance(one, Note) for one in back(client, 3, tokens=30) + back(client, 4))


def test_another_version_of_the_same_number_is_a_rollback(client):
    """The parameter server has made it since it went back."""
    client.ready(8)
    note, _ = back(client, 8, "other")
    assert "behind version 8: version 8 is gone; this" in note.text


def test_a_site_may_refuse_to_go_back(client):
    """It ends, as the same command line without the flag would end again in this run."""
    client.ready(8)
    client.machine.version_sync.refuses_rollback = True
    (end,) = back(client, 3)
    assert isinstance(end, do.EndTraining)
    assert end.reason.endswith("this site's site.toml refuses that without --accept-rollback")
    assert client.feed(TrainingEnded(None)) == [Finish(end.reason, 2)]


def test_dropped_work_is_reported(client):
    """Tokens that no delta will contain must not vanish silently."""
    client.ready()
    effects = client.feed(ev.Rebased(client.machine.base.version, 64))
    assert isinstance(effects[0], Note)
    assert "64 tokens" in effects[0].text


def test_global_weights_that_are_kept_are_named_and_followed(client, look):
    """Until the base is lost: then nothing that may be wrong is built upon."""
    client.ready()
    assert isinstance(client.offered(3, "global")[0], DeclineStream), "there are none"
    client.announce(1)
    client.offered(1)
    client.fetched(1)
    client.feed(ev.BaseReplaced(1, "d1", "g"))
    client.rebased(1)
    assert look.sent(client.announce(3)) == [msg.Fetch(1, "d1", "g")]
    assert client.offered(3, "global") == [do.ReceiveVersion("global:3", "global", 3)]
    assert client.fetched(3) == [do.ReplaceBase(3)]
    assert look.notes(client.feed(ev.BaseReplaced(3, "other", "other")))
    assert look.sent(client.fire()) == [msg.Fetch(-1, "")]
    assert client.offered(3, "global_full") != []
    client.fetched(3)
    assert client.feed(ev.BaseReplaced(3, "d3", "d3")) == [do.Rebase(3)]
    client.rebased(3)
    assert look.sent(client.announce(4)) == [msg.Fetch(3, "d3", "d3")]


def test_after_a_delta_that_was_too_old_the_next_one_is_from_the_newest_version(client, look):
    """A first step that compiles takes a minute, and versions are fetched one after another."""
    client.ready()
    client.call(0)
    for version in range(1, 10):
        client.announce(version)
        client.call(version)
    client.offered(1)
    client.fetched(1)
    client.snapshot(1, 0)
    effects = client.refuse(client.key(1))
    assert "the next delta is measured from version 9" in look.notes(effects)
    client.feed(Done(do.FinishEncoding(1)))
    client.replaced(1)
    effects = client.rebased(1)
    assert not look.only(effects, do.TakeSnapshot), "from version 1 it would be refused again"
    assert look.sent(effects)[0] == msg.Holding(1, "d1")
    assert do.TakeSnapshot(2) in client.follow(9, "full")
    (offer,) = look.only(client.snapshot(2, 9), do.OfferDelta)
    assert offer.delta.key.base == 9


def turn(client, number, *, last=False):
    return client.receive(msg.Turn(number, last))


def test_a_round_from_beginning_to_end(client):
    """It is trained, sent, and held until its version is applied; then the next one begins."""
    client.ready()
    assert turn(client, 0) == [do.TakeSnapshot(1, True, 0)]
    assert [type(effect) for effect in client.snapshot(1, 0)] == [do.OfferDelta]
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1)]
    client.announce(1)
    assert turn(client, 1) == [], "it starts from a version that has not arrived yet"
    client.offered(1)
    client.fetched(1)
    client.replaced(1)
    effects = client.rebased(1)
    assert do.ResumeTraining() in effects
    assert effects[-1] == do.TakeSnapshot(2, True, 1)


def test_a_turn_is_repeated_in_a_new_session(client):
    """The round is trained once, stays held offline, and stays the last one."""
    client.ready()
    turn(client, 0)
    client.lose()
    client.welcome()
    client.announce(0)
    assert turn(client, 0, last=True) == []
    assert client.machine.answering.last
    client.snapshot(1, 0)
    assert not any(isinstance(effect, do.ResumeTraining) for effect in client.lose())
    assert any(isinstance(effect, do.OfferDelta) for effect in client.welcome())
    assert turn(client, 0, last=True) == [], "its delta is the answer"


def test_the_end_is_asked_for_in_a_round(client):
    """At Ctrl-C the progress is sent, and the thread is not held."""
    client.ready()
    turn(client, 0)
    client.feed(DrainAsked("Ctrl-C"))
    assert do.ResumeTraining() in client.snapshot(1, 0)
