"""The state of a run from its journal, written by the real writer with real events."""

import pytest
from deltas import delta_of, stored_of
from facts import FactWriter, RoundFact, VersionFact, call_of, version_of

from fsl_async.observe.clients import ClientState
from fsl_async.observe.journal import JournalReader, JournalWriter
from fsl_async.observe.journal_lines import as_fields
from fsl_async.observe.rounds import site_lines
from fsl_async.observe.run_state import RunState
from fsl_async.observe.table import client_lines, header
from fsl_async.roles.machine import ClientLeft, Finish, Note, Offered, Received, Refuse, Send
from fsl_async.roles.phrasing import figure
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey

VALUES = 1000


class Recorder:
    """Writes a journal with a clock that the test sets, and reads it back into states."""

    def __init__(self, path):
        self.path = path
        self.t = 1000.0
        self.tokens = 0
        self.writer = JournalWriter(path, clock=lambda: self.t)
        self.facts = FactWriter(self.writer)

    def write(self, *items, after=0.0):
        """Write events, effects and facts, `after` seconds later."""
        self.t += after
        self.facts.write(items, self.t)

    def note(self, name, **fields):
        """Write a note of the shell."""
        self.writer.note(name, self.t, **fields)

    def state(self):
        """Return a state from the complete journal, and all its news."""
        self.writer.flush()
        state, news = RunState(), []
        for line in JournalReader(self.path).read():
            news += state.apply(line)
        return state, news


@pytest.fixture
def run(tmp_path):
    recorder = Recorder(tmp_path / "journal.jsonl")
    recorder.note(
        "node_started", role="ps", run="r-1", address="tcp://h:1", pid=7, host="h", every_s=10.0
    )
    recorder.write(VersionFact(-1, "", 0, "disk"))
    yield recorder
    recorder.writer.close()


def join(run, name, incarnation, version=0):
    """Write a client's hello and its fetch of `version`."""
    run.write(
        ev.ClientHello(name, incarnation, "", -1, ""),
        ev.ModelAttached(name, "f", VALUES, None),
        Received(name, msg.Fetch(-1, "")),
        ev.VersionSent(name, "full", version, 2500),
        Received(name, msg.Holding(version, "d")),
    )


def begin(run, *names):
    """Write version 0, which the clients hold."""
    run.write(VersionFact(0, "d0", 0), RoundFact("ready", next_at=run.t + 11.0), after=1.0)
    for name in names:
        join(run, name, 5)


def stored(name, base, sequence, *, tokens=100, problem=None, number=None, metrics=None):
    """Write an arrived delta."""
    key, number = DeltaKey(name, 5, base, sequence), base if number is None else number
    stored = stored_of(key, size=800, tokens=tokens, number=number, metrics=metrics)
    first = ev.DeltaStored(name, stored, problem)
    if problem is not None:
        return [first, Send(name, msg.Declined(key, "quarantined", problem))]
    return [first, Send(name, msg.Accepted(key))]


def round_of(run, number, called, answered, gone=(), *, sequence=None, metrics=None):
    """Write a complete round: called, answered, merged `seconds` later."""
    called_at = run.t
    run.write(call_of(number, called, called_at))
    for name in gone:
        run.write(ClientLeft(name, 5, "expired"))
    for name in answered:
        run.write(*stored(name, number, sequence or number + 1, metrics=metrics))
    here = [name for name in called if name not in gone]
    made(run, number + 1, *answered, called=len(called), alive=len(here), asked=len(called),
         late=tuple(name for name in here if name not in answered), left=tuple(gone),
         loss=(metrics or {}).get("loss"), after=2.0)  # fmt: skip
    run.write(RoundFact("ready", next_at=called_at + 10.0, number=number))


def made(run, version, *names, gained=100, after=0.0, **more):
    """Write the version of a delta of each of these clients."""
    run.tokens += gained * len(names)
    more = {"tokens": run.tokens, "gained": gained * len(names)} | more
    run.write(version_of(version, names, **more), after=after)


def test_a_round_is_counted_from_call_to_version(run):
    """Rounds, tokens, participation, bytes and deltas."""
    begin(run, "a", "b")
    round_of(run, 0, ["a", "b"], ["a", "b"])
    state, _ = run.state()
    assert (state.node.run, state.ps.rounds, state.ps.version, state.ps.digest) == (
        "r-1",
        1,
        1,
        "d1",
    )
    assert (state.ps.tokens, state.ps.deltas_merged, state.ps.pending) == (200, 2, 0)
    assert (state.ps.participation, state.ps.participation_alive) == (1.0, 1.0)
    assert (state.ps.up.raw, state.ps.up.sent) == (2 * 4 * VALUES, 1600)
    assert (state.ps.bytes_raw, state.ps.bytes_sent) == (4 * 4 * VALUES, 1600 + 5000)
    assert state.ps.ratio == pytest.approx(16000 / 6600)
    assert state.clients["a"].deltas_merged == 1
    assert state.node.phase == "ready"


def test_the_next_sync_is_by_the_clock_of_the_last_call(run):
    """An operator plans maintenance by it; the rule is the machine's."""
    begin(run, "a")
    assert run.state()[0].ps.next_sync_at == 1001.0 + 10.0
    run.write(after=10.0)
    round_of(run, 0, ["a"], ["a"])
    assert run.state()[0].ps.next_sync_at == 1011.0 + 10.0


def test_a_client_that_left_is_called_and_not_alive(run):
    """The two participations differ by absent clients: a dead site differs from a slow one."""
    begin(run, "a", "b")
    round_of(run, 0, ["a", "b"], ["a"], gone=["b"])
    state, _ = run.state()
    assert (state.ps.participation, state.ps.participation_alive) == (0.5, 1.0)
    assert (
        state.clients["b"].words(state.node.last_t + 12.0)
        == "gone for 14 s (no message came from it)"
    )


def test_a_relaunch_is_a_higher_incarnation_and_caught_up_is_holding_the_current_version(run):
    """The demo shows and checks these moments."""
    begin(run, "a", "b")
    run.write(
        ev.HeartbeatReceived("b", {"step": 9, "tokens": 900, "loss": 5.0, "tokens_per_s": 50.0})
    )
    round_of(run, 0, ["a", "b"], ["a"], gone=["b"])
    run.write(ev.ClientHello("b", 6, "", -1, ""), after=1.0)
    assert run.state()[0].clients["b"].words(run.t) == "catching up"
    join(run, "b", 6, version=0)
    assert not any(one.kind == "caught up" for one in run.state()[1])
    run.write(Received("b", msg.Holding(1, "d1")))
    run.write(ev.HeartbeatReceived("b", {"step": 2, "tokens": 200, "loss": 3.0}))
    state, news = run.state()
    assert [one.kind for one in news if one.client == "b"] == [
        "joined",
        "gone",
        "relaunched",
        "caught up",
    ]
    client = state.clients["b"]
    assert (client.relaunches, state.relaunches, client.incarnations) == (1, 1, 2)
    assert (client.step, client.tokens, client.version) == (2, 1100, 1)


def test_news_of_an_earlier_incarnation_does_not_end_the_present_one(run):
    """The old process's session expires after its successor's hello."""
    begin(run, "a")
    join(run, "a", 6)
    run.write(ClientLeft("a", 5, "superseded"))
    assert run.state()[0].clients["a"].doing == "training"


def test_losses_are_means_over_first_incarnations(run):
    """A relaunched client starts from trained weights, so its losses are not first losses."""
    begin(run, "a", "b")
    for name, loss in (("a", 5.0), ("a", 4.0)):
        run.write(ev.HeartbeatReceived(name, {"loss": loss}))
    join(run, "b", 6)
    run.write(
        ev.HeartbeatReceived("b", {"loss": 2.0}), ev.HeartbeatReceived("b", {"loss": float("nan")})
    )
    state, _ = run.state()
    assert (state.loss_first, state.loss_last) == (5.0, 3.0)


def test_refused_quarantined_and_later_are_told_apart(run):
    """The code "later" is a request to send again, not a refusal."""
    begin(run, "a")
    key = DeltaKey("a", 5, 0, 1)
    run.write(*stored("a", 0, 1, problem="NaN"))
    run.write(
        Send("a", msg.Declined(key, "stale", "x")), Send("a", msg.Declined(key, "later", "x"))
    )
    state, _ = run.state()
    client = state.clients["a"]
    assert (client.deltas_quarantined, client.deltas_refused, state.ps.pending) == (1, 1, 0)


def test_a_restarted_server_goes_on_in_the_same_journal(run):
    """Version and tokens come from the disk; clients are away until their hello."""
    begin(run, "a")
    round_of(run, 0, ["a"], ["a"])
    run.write(*stored("a", 1, 2, tokens=70))
    run.note(
        "node_started", role="ps", run="r-1", address="tcp://h:2", pid=8, host="h", every_s=10.0
    )
    run.write(VersionFact(1, "d1", 100, "disk"), RoundFact("ready", 1))
    state, news = run.state()
    assert (
        state.node.starts,
        state.node.pid,
        state.ps.version,
        state.ps.tokens,
        state.ps.pending,
    ) == (
        2,
        8,
        1,
        100,
        1,
    )
    assert state.clients["a"].doing == "gone"
    assert "start 2" in [one.text for one in news if one.kind == "server"][-1]
    run.write(ev.ClientHello("a", 5, "r-1", 1, "d1"), Received("a", msg.Holding(1, "d1")))
    made(run, 2, "a", gained=70)
    state, news = run.state()
    assert (state.ps.tokens, state.relaunches, state.clients["a"].deltas_merged) == (170, 0, 2)
    assert any(one.kind == "caught up" for one in news)


def news_texts(run, kind):
    """Return the texts of one kind of news."""
    return [one.text for one in run.state()[1] if one.kind == kind]


def test_a_merged_round_is_one_line_with_all_figures(run):
    """One line holds all figures of a merged round."""
    begin(run, "a", "b", "c", "d")
    run.write(ev.HeartbeatReceived("a", {"loss": 2.0}), ev.HeartbeatReceived("b", {"loss": 9.0}))
    run.write(*stored("a", 0, 1))
    given = {"asked": 4, "in_time": 1, "needed": 2, "late": ("b",), "nothing": ("d",)}
    made(run, 1, "a", left=("c",), **given)
    assert news_texts(run, "version")[-1] == (
        "version 1: 1 of 4 called clients merged (2 needed), late: b, nothing to merge from: d,"
        " left: c; loss 2.000 (running mean); "
        "100 tokens (+100); 20.0 kB as 10.8 kB (1.9x)"
    )
    run.write(*stored("b", 0, 1, tokens=30), *stored("a", 1, 2))
    given = {"asked": 3, "in_time": 1, "needed": 2, "late": ("b", "d"), "gained": 65}
    made(run, 2, "a", "b", earlier=1, earlier_of=("b",), **given)
    assert news_texts(run, "version")[-1] == (
        "version 2: 1 of 3 called clients merged (2 needed), late: b, d, and 1 delta of earlier"
        " rounds, from b; loss 5.500 (running mean); "
        "230 tokens (+130); 8.0 kB as 1.6 kB (5.0x)"
    )
    run.write(Note("round 0: merged", facts={"round": 0, "called": 4, "answered": 1}))
    assert news_texts(run, "note") == [], "the line says what the machine's own note says"


def test_versions_of_clients_that_send_by_themselves(run):
    """No client was called, so none is counted as such."""
    begin(run, "a", "b")
    made(run, 1, "a", "b", asked=0, called=0, answered=0)
    assert news_texts(run, "version")[-1].startswith("version 1: 2 deltas merged, from a, b;")
    assert run.state()[0].ps.participation is None


def test_joins_and_leaves_have_the_number_of_clients(run):
    """Lines about a joining or leaving client have the number of clients."""
    begin(run, "a", "b")
    run.write(ClientLeft("a", 5, "expired"), ev.ClientHello("a", 5, "r-1", 0, "d0"))
    run.write(ev.ClientHello("b", 6, "", -1, ""), ClientLeft("b", 6, "bye"))
    run.write(ClientLeft("a", 5, "protocol", "wrong-form"))
    assert [one.text for one in run.state()[1] if one.client] == [
        "a joins, 1 client connected",
        "b joins, 2 clients connected",
        "a left: no message came from it, 1 client connected",
        "a is connected again, 2 clients connected",
        "b is back as a new process (relaunch 1), 2 clients connected",
        "b left: it ended its session, 1 client connected",
        "a left: it broke the protocol: wrong-form, 0 clients connected",
    ]


def test_an_unchanged_state_is_printed_once(run):
    """A round that stays open for an hour does not fill the screen; changes are printed."""
    begin(run, "a", "b")
    one, two = (
        f"round 0 stays open: {n} of 3 called clients sent a delta, 2 needed" for n in (0, 1)
    )
    for text in (one, one, one, two, two, one):
        run.write(Note(text, "warning"))
    assert news_texts(run, "note") == [one, two]
    run.write(ClientLeft("b", 5, "expired"), Note(one, "warning"), Note(one, "warning"))
    assert news_texts(run, "note") == [one, two, one]
    made(run, 1, "a")
    run.write(Note(one, "warning"))
    assert news_texts(run, "note") == [one, two, one, one]


def test_alarms_are_counted_and_the_newest_is_kept(run):
    """A digest that differs is one line among thousands; `status` shows it hours later."""
    begin(run, "a")
    text = "a computed digest x for version 0, which has d0"
    for _ in range(2):
        run.write(Note(text, "warning", {"alarm": "digest", "client": "a"}))
    assert news_texts(run, "alarm") == [text, text], "not taken for what goes on unchanged"
    state, _ = run.state()
    assert (state.ps.alarms, state.ps.alarm) == (2, text)
    run.write(Note("so the damage is at a", "warning", {"alarm": "verdict"}))
    state, _ = run.state()
    assert (state.ps.alarms, state.ps.alarm) == (2, "so the damage is at a")
    assert state.as_dict(0.0)["alarms"] == 2


def test_the_end_has_its_reason(run):
    """A finished run records how it ended."""
    begin(run, "a")
    run.write(Finish("limit of 3 rounds"))
    run.note("node_ended", garbage=4)
    run.write(ClientLeft("a", 5, "bye"))
    state, news = run.state()
    assert (state.node.phase, state.node.ending, state.node.ended_at, state.node.garbage) == (
        "ended",
        "limit of 3 rounds",
        1001.0,
        4,
    )
    assert state.clients["a"].doing == "done"
    assert news[-1].kind == "end"


def test_a_short_process_counts_by_its_deltas(run):
    """A client that ends before its next heartbeat has trained; a repeated offer counts once."""
    begin(run, "a")
    run.write(ev.HeartbeatReceived("a", {"step": 3, "tokens": 30}))
    for sequence in (1, 2, 2):
        key = DeltaKey("a", 5, 0, sequence)
        delta = delta_of(key, 50, 5, metrics={"loss": 3.0 - sequence})
        run.write(Offered("a", msg.DeltaMeta(delta), "s"))
    client = run.state()[0].clients["a"]
    assert (client.step, client.tokens, client.loss) == (10, 100, 1.0)
    join(run, "a", 6)
    assert run.state()[0].clients["a"].step == 0


def test_garbage_is_counted_as_it_comes(run):
    """A port scan shows while the server runs; every start counts from 0."""
    run.note("unreadable_messages", garbage=2)
    run.note("unreadable_messages", garbage=5)
    assert run.state()[0].node.garbage == 5
    run.note("node_started", role="ps", run="r-1", address="tcp://h:1", pid=8, host="h")
    run.note("unreadable_messages", garbage=1)
    run.note("node_ended", garbage=1)
    assert run.state()[0].node.garbage == 6


def test_strange_lines_change_nothing(run):
    """A journal of a newer release, or a damaged one, is still readable."""
    begin(run, "a")
    before = run.state()[0]
    for line in (
        {}, {"type": "Later"}, {"type": "holding", "peer": "a"},
        {"type": "heartbeat_received", "peer": "a", "payload": 3},
        {"type": "send", "peer": "a", "message": None},
        {"type": "node_ended", "garbage": "x", "t": "noon"},
    ):  # fmt: skip
        before.apply(line)
    assert (before.ps.version, before.clients["a"].version) == (0, 0)


def restart(run, version, digest):
    """Write the start of a new server process with this state on its disk."""
    run.note(
        "node_started", role="ps", run="r-1", address="tcp://h:2", pid=8, host="h", every_s=10.0
    )
    run.note("version_found", version=version, merged=[f"a/5/{version - 1}/{version}"])
    run.write(VersionFact(version, digest, 100, "disk"))


def test_a_version_made_before_the_kill_and_not_journaled_counts(run):
    """A server may die between making a version and journaling it: `status` counts it."""
    begin(run, "a")
    round_of(run, 0, ["a"], ["a"])
    run.write(*stored("a", 1, 2, tokens=70))
    restart(run, 2, "d2")
    state, news = run.state()
    assert (state.ps.version, state.ps.deltas_merged, state.clients["a"].deltas_merged) == (2, 2, 2)
    assert "version 2 was made before the restart, of 1 delta" in [one.text for one in news]
    restart(run, 2, "d2")  # printed once
    assert run.state()[0].ps.deltas_merged == 2


def test_deltas_from_before_a_restart_are_in_the_line(run):
    """A version's line counts all its deltas, also those of the process before."""
    begin(run, "a", "b")
    made(run, 1, *"aaaabbbb", before=6, in_time=2, asked=2)
    state, news = run.state()
    line = [one.text for one in news if one.kind == "version"][-1]
    assert "2 of 2 called clients merged" in line
    assert "8 deltas in all, 6 of them stored before the restart" in line
    assert state.ps.deltas_merged == 8


def test_the_loss_of_a_version_is_the_mean_of_its_round_and_says_so(run):
    """Running means of clients and means of rounds differ, so each has a label."""
    begin(run, "a")
    run.write(ev.HeartbeatReceived("a", {"step": 1, "loss": 9.0}))
    offer(run, "a", 1, loss=2.5)
    round_of(run, 0, ["a"], ["a"], metrics={"loss": 2.5})
    state, _ = run.state()
    assert "loss 2.500 (mean over the round)" in news_texts(run, "version")[-1]
    assert state.clients["a"].loss == 9.0
    state.clients["a"].saw_loss(4.2e-5)
    assert " 4.2e-05 " in client_lines(state, 0.0)[1]


def test_a_small_loss_has_the_digits_that_count():
    """A model that has learned its data had a loss of 0.000 in every round."""
    shown = [figure(loss) for loss in (0.0, 4.2e-5, 0.012345, 0.1, 2.3456, 1234.5, -0.002)]
    assert shown == ["0.000", "4.2e-05", "0.0123", "0.100", "2.346", "1234.500", "-0.002"]
    assert (figure(4.2e-5, 4), figure(1.5, 4)) == ("4.2e-05", "1.5000")


def offer(run, name, sequence, **metrics):
    """Write a client's offer of its next delta."""
    key = DeltaKey(name, 5, 0, sequence)
    delta = delta_of(key, 8, 1, number=sequence, metrics=metrics)
    run.write(Offered(name, msg.DeltaMeta(delta), "s"))


def test_a_loss_that_is_not_finite_is_reported_when_it_begins_and_ends(run):
    """The weights may stay finite, so the loss is reported by itself."""
    begin(run, "a", "b")
    run.write(ev.HeartbeatReceived("a", {"step": 1, "loss": 2.5}))
    offer(run, "a", 1, loss=float("nan"))
    run.write(ev.HeartbeatReceived("a", {"step": 2, "loss": float("nan")}))
    run.write(ev.HeartbeatReceived("a", {"step": 3, "loss": 2.0}))
    offer(run, "a", 2, loss=float("inf"))
    offer(run, "b", 1, loss=2.0)
    assert news_texts(run, "trains badly") == ["a trains badly: its loss is nan"]
    assert news_texts(run, "trains well") == []
    state, _ = run.state()
    assert [state.clients[name].trouble for name in "ab"] == ["its loss is inf", ""]
    title, first, _ = client_lines(state, run.t)
    assert first.split()[title.split().index("loss")] == "inf"
    offer(run, "a", 3, loss=1.5)
    assert news_texts(run, "trains well") == ["a trains well again"]
    run.write(ev.HeartbeatReceived("a", {"step": 9, "loss": float("-inf")}))
    assert news_texts(run, "trains badly")[1:] == ["a trains badly: its loss is -inf"]
    run.write(ev.ClientHello("a", 6, "r-1", 0, "d0"))
    state, _ = run.state()
    assert state.clients["a"].trouble == "", "another process"


def test_skipped_steps_are_reported_though_the_loss_is_finite(run):
    """The built-in task skips steps whose gradients are not finite, without end."""
    begin(run, "a")
    run.write(ev.HeartbeatReceived("a", {"step": 9, "loss": 6.0, "skipped": 0.05}))
    offer(run, "a", 1, loss=6.0, skipped=0.2)
    assert news_texts(run, "trains badly") == []
    offer(run, "a", 2, loss=9e4, skipped=1.0)
    (line,) = news_texts(run, "trains badly")
    assert line == "a trains badly: it skips most of its steps, as their gradients are not finite"
    offer(run, "a", 3, loss=6.0, skipped=0.0)
    assert news_texts(run, "trains well") == ["a trains well again"]


def test_a_version_of_losses_that_are_not_finite_does_not_show_an_old_one(run):
    """Its line does not have the running mean from before."""
    begin(run, "a")
    run.write(ev.HeartbeatReceived("a", {"step": 1, "loss": 2.5}))
    offer(run, "a", 1, loss=float("nan"))
    round_of(run, 0, ["a"], ["a"])
    (line,) = [text for text in news_texts(run, "version") if text.startswith("version 1")]
    assert "no finite loss" in line
    assert "2.5" not in line


def test_a_site_that_keeps_its_losses_reports_that_they_are_not_finite(run):
    """It reveals nothing about the data, and a failed training is visible."""
    begin(run, "a")
    run.write(ev.HeartbeatReceived("a", {"step": 9, "not_finite": 1}))
    offer(run, "a", 1)
    assert news_texts(run, "trains badly") == [
        "a trains badly: its loss is not finite, or its steps are skipped"
    ]
    assert news_texts(run, "trains well") == []
    run.write(ev.HeartbeatReceived("a", {"step": 12}))
    assert news_texts(run, "trains well") == ["a trains well again"]


def delta_with(name, metrics, *, number, sequence):
    """A delta's offer with metrics."""
    delta = delta_of(DeltaKey(name, 5, number, sequence), number=number, metrics=metrics)
    return Offered(name, msg.DeltaMeta(delta), f"delta:{delta.key.text}")


def test_held_out_losses_and_agreement_are_kept_and_shown(run):
    """An operator sees from them whether training together works."""
    begin(run, "a", "b")
    metrics = {"loss": 2.0, "eval_loss": 1.75, "eval_version": 0.0, "eval_bits_per_byte": 2.52}
    run.write(delta_with("a", metrics, number=0, sequence=1))
    made(run, 1, "a", cosine=0.25, after=2.0)
    state, news = run.state()
    assert [(one.version, one.loss) for one in state.ps.evaluations] == [(0, 1.75)]
    assert list(state.ps.cosines) == [0.25]
    line = next(one.text for one in news if one.kind == "version" and "version 1" in one.text)
    assert "held-out loss 1.750 at version 0" in line
    found = state.as_dict(2000.0)
    assert found["evaluations"][0]["bits_per_byte"] == 2.52
    assert found["cosines"] == [0.25]


@pytest.mark.parametrize(("reported", "kept"), [(0.75, 0.75), (1.5, None), ("x", None)])
def test_a_held_out_loss_of_labels_has_its_accuracy(run, reported, kept):
    """Without it the loss would be shown as one of tokens, with a perplexity."""
    begin(run, "a")
    metrics = {"eval_loss": 0.5, "eval_version": 0.0, "eval_accuracy": reported}
    run.write(delta_with("a", metrics, number=0, sequence=1))
    (found,) = run.state()[0].ps.evaluations
    assert found.accuracy == kept


def test_changes_that_cancel_each_other_are_one_line_of_advice(run):
    """Once, and not while deltas agree a little, as they do at the end of healthy runs."""
    begin(run, "a")
    for version in range(1, 31):
        cosine = -0.03 if version <= 12 else -0.15
        made(run, version, "a", cosine=cosine, after=2.0)
    _, news = run.state()
    (advice,) = [one.text for one in news if one.kind == "advice"]
    assert "cancel each other (median cosine" in advice
    assert "opposite" not in advice


def test_the_client_that_is_opposite_to_the_rest_is_named_in_the_advice(run):
    """If it is so in most rounds: one round may be so by chance."""
    begin(run, "a")
    for version in range(1, 11):
        made(run, version, "a", cosine=-0.3, opposite="liar" if version % 3 else "a")
    (advice,) = [one.text for one in run.state()[1] if one.kind == "advice"]
    assert "over 10 rounds): liar's are opposite to the rest: sync more often" in advice


def test_what_is_clipped_is_counted_and_a_delta_that_is_far_is_named(run):
    """In `status`, page and trackers; named once until it is near again."""
    begin(run, "a", "b", "c", "far")
    norms = {"a": 1.0, "b": 1.0, "c": 1.0, "far": 9.0}
    for version in (1, 2):
        made(run, version, *norms, norms=norms, clipped={"far": 1}, after=2.0)
    state, news = run.state()
    assert state.clients["far"].deltas_clipped == 2
    assert state.clients["a"].deltas_clipped == 0
    assert site_lines([state.clients["far"]]) == ["far: 2 deltas counted as shorter"]
    far = [one.text for one in news if one.kind == "moves far"]
    assert far == ["far moves the weights 3 times as far as the median site or more"]


def test_an_evaluators_decisions_are_in_the_status(run):
    """From the fact of each version."""
    begin(run, "a", "b")
    for version in range(1, 7):
        made(run, version, "a", "b", scored={"a": False, "b": True}, after=2.0)
    state, news = run.state()
    assert [client.refused for client in state.clients.values()] == [0, 6]
    (line,) = [one for one in news if one.kind == "refused"]
    assert (line.client, line.level) == ("b", "warning")


def test_a_site_that_an_evaluator_refuses_is_named():
    """Once when it is refused in five of ten rounds; its share of used rounds is shown."""
    client = ClientState("a")
    lines = [client.saw_score(is_refused=number % 2 > 0) for number in range(12)]
    assert [number for number, line in enumerate(lines) if line] == [9]
    assert "in 5 of the last 10 rounds" in lines[9]
    assert site_lines([client]) == ["a: used in 6 of 12 scored rounds, often refused of late"]
    for _ in range(10):
        assert not client.saw_score(is_refused=False)
    assert site_lines([client]) == ["a: used in 16 of 22 scored rounds"]


@pytest.mark.parametrize(
    ("loss", "version"),
    [
        (1e300, 0.0),
        (-1.0, 0.0),
        (float("inf"), 0.0),
        ("x", 0.0),
        (2.0, 5.0),
        (2.0, 1e300),
        (2.0, -1.0),
        (2.0, float("inf")),
        (2.0, float("nan")),
    ],
)
def test_an_evaluation_that_cannot_be_is_left_out(run, loss, version):
    """A hostile client may report any number; the state, a status and a live view stay whole."""
    begin(run, "a")
    event = delta_with("a", {"eval_loss": loss, "eval_version": version}, number=0, sequence=1)
    run.write(event)
    state, _ = run.state()
    assert not state.ps.evaluations
    assert state.lines_odd == 0
    live = RunState()
    live.apply({"t": 1.0, "type": "delta_meta", **as_fields(event)})
    assert not live.ps.evaluations


def test_a_refused_client_is_not_in_the_table(run):
    """It stayed there as "joining" to the end of the run. One that took part before is gone."""
    begin(run, "a")
    offer(run, "a", 1)
    run.write(ClientLeft("a", 5, "bye"))
    for name in ("a", "b"):
        run.write(ev.ClientHello(name, 6, "", -1, ""))
        run.write(Refuse(name, "shards", "no part of the data is left"))
        run.write(ClientLeft(name, 6, "bye"))
    run.write(ev.ClientHello("c", 6, "", -1, ""), Send("c", msg.Reject("model", "another model")))
    run.write(ClientLeft("c", 6, "bye"))
    state, news = run.state()
    assert list(state.clients) == ["a"]
    assert state.clients["a"].words(2000.0).endswith("(refused)")
    assert "refused b: no part of the data is left" in [one.text for one in news]


def test_a_round_of_split_learning_counts_samples(run):
    """Three clients had trained 64 windows each, and the line had "192 tokens"."""
    run.note("node_started", role="ps", run="r", address="a", counts="samples")
    begin(run, "a")
    round_of(run, 0, ["a"], ["a"])
    state, _ = run.state()
    assert "; 100 samples (+100); " in news_texts(run, "version")[-1]
    assert ", 100 samples merged, " in header(state)
    assert "samples/s" in client_lines(state, 0.0)[0]
    assert state.as_dict(0.0)["counts"] == "samples"
