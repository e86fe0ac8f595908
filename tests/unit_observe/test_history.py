"""What a journal shows over time: rounds with gaps, timelines, the open round, bounds."""

import json
import math

import pytest

from fsl_async.observe import history as room
from fsl_async.observe.history import Course, History, Samples, Timeline
from fsl_async.observe.round_series import MAX_BUCKETS, RoundSeries, of_client, plain
from fsl_async.observe.run_state import RunState

STARTED = {"role": "ps", "run": "r", "every_s": 10.0, "quorum": 0.5, "grace": [4.0, 1.0, 60.0]}


class Journal:
    """A run and its history, fed with lines."""

    def __init__(self):
        self.course = Course()
        self.run, self.history = self.course.state, self.course.history
        self.add(0.0, "node_started", **STARTED)

    def add(self, t, kind, **fields):
        """Feed a line."""
        self.course.apply({"t": t, "type": kind, **fields})

    def join(self, t, *names):
        """Clients join."""
        for name in names:
            self.add(t, "client_hello", peer=name, incarnation=1, run="")
            self.add(t, "version_held", peer=name, version=max(self.run.ps.version, 0))

    def call(self, t, number, *names):
        """A round begins."""
        for name in names:
            self.add(t, "send", peer=name, message={"type": "call/1", "round": number})

    def delta(self, t, name, number, loss, sequence=1):
        """A delta comes."""
        key = f"{name}/1/{number}/{sequence}"
        delta = {"key": key, "tokens": 10, "steps": 1, "round": number, "metrics": {"loss": loss}}
        self.add(t - 0.5, "delta_offered", peer=name, delta=delta)
        self.add(t, "delta_stored", peer=name, stored={"delta": delta, "bytes": 7})

    def commit(self, t, version):
        """The round makes a version."""
        self.add(t, "commit", version=version)
        self.add(t, "version_committed", version=version, digest="d", cosine=0.25)


@pytest.fixture
def journal():
    made = Journal()
    made.run.ps.values = 100
    made.add(1.0, "version_committed", version=0, digest="d0")
    made.join(2.0, "a", "b", "c")
    return made


def test_a_loss_that_is_no_number_is_a_gap(journal):
    for loss in ("nan", None, float("inf")):
        journal.call(10.0, 0, "a")
        journal.delta(11.0, "a", 0, loss, 1)
    assert plain(journal.history.rounds.clients["a"]["loss"]) == [None]


def test_a_timeline_shows_training_sending_late_gone_and_relaunched(journal):
    journal.call(10.0, 0, "a", "b", "c")
    journal.delta(11.0, "a", 0, 5.0)
    assert journal.run.ps.window.waited_for() == ["b", "c"]
    journal.delta(12.0, "b", 0, 5.0)
    journal.commit(13.0, 1)
    assert journal.run.ps.window.late == {"c"}
    journal.delta(20.0, "c", 0, 5.0)
    journal.add(25.0, "client_left", peer="c", incarnation=1, reason="expired")
    journal.add(30.0, "relaunch", what="launched", client="c")
    journal.add(31.0, "client_hello", peer="c", incarnation=2, run="r")
    assert journal.history.timelines["c"].segments() == [
        (2.0, "training"),
        (13.0, "late"),
        (19.5, "sending"),
        (20.0, "training"),
        (25.0, "gone"),
        (31.0, "fetching"),
    ]
    marks = list(journal.history.timelines["c"].marks)
    assert marks == [(2.0, "joined"), (30.0, "launched"), (31.0, "relaunched")]
    journal.add(40.0, "node_ended")
    assert journal.history.timelines["a"].state == "done"
    assert journal.run.ps.window.late == set()


def test_the_grace_window_closes_when_the_servers_rule_says(journal):
    window = journal.run.ps.window
    for number in range(4):
        t = 100.0 * (number + 1)
        journal.call(t, number, "a", "b", "c")
        assert window.closes_at is None
        journal.delta(t + 1, "a", number, 5.0, number + 1)
        assert window.closes_at is None  # two of three are needed
        journal.delta(t + 2, "b", number, 5.0, number + 1)
        # Two arrivals are known in the first round: 60 s, but never beyond the round's 10 s.
        # Then median 1.5 s (of 1, 2, 1, 2) and 4 x MAD of 0.5 s.
        expected = {0: t + 10, 1: t + 3.5}.get(number, t + 3.5)
        assert window.closes_at == pytest.approx(expected)
        assert window.as_dict()["waited_for"] == ["c"]
        journal.commit(t + 3, number + 1)
        assert window.closes_at is None


def test_a_reader_that_begins_at_a_segment_knows_all_before_it(journal):
    from fsl_async.observe.segments import Total

    for number in range(2):
        journal.call(10.0 + 10 * number, number, "a", "b", "c")
        journal.delta(11.0 + 10 * number, "a", number, 5.0, number + 1)
        journal.delta(12.0 + 10 * number, "b", number, 4.0, number + 1)
        journal.commit(13.0 + 10 * number, number + 1)
    reader = Journal()
    reader.course = Course()
    fields = json.loads(json.dumps(Total(journal.course).as_fields(), allow_nan=False))
    reader.add(50.0, "so_far", **fields)
    reader.run, reader.history = reader.course.state, reader.course.history
    for one in (journal, reader):
        one.call(60.0, 2, "a", "b")
        one.delta(61.0, "a", 2, 5.0, 3)
    assert reader.run.ps.window.closes_at == journal.run.ps.window.closes_at == 62.0
    assert reader.run.ps.window.as_dict() == journal.run.ps.window.as_dict()
    for name in "ab":
        timelines = reader.history.timelines[name], journal.history.timelines[name]
        assert timelines[0] == timelines[1]
        series = reader.history.rounds, journal.history.rounds
        assert of_client(series[0], name, 0) == of_client(series[1], name, 0)


def test_a_rollback_removes_the_void_rounds(journal):
    for number in range(4):
        journal.delta(10.0 * number, "a", number, 5.0, number + 1)
        journal.commit(10.0 * number + 1, number + 1)
    journal.add(50.0, "recovered", version=2, digest="d2", pending=[])
    assert journal.history.rounds.rounds() == [0, 1]


def test_a_restart_keeps_the_deltas_of_the_open_round(journal):
    journal.delta(10.0, "a", 0, 5.0)
    journal.commit(11.0, 1)
    journal.delta(20.0, "a", 1, 4.0, 2)
    journal.add(30.0, "node_started", **STARTED)
    delta = {"key": "a/1/1/2", "tokens": 10, "round": 1}
    pending = [{"peer": "a", "delta": delta, "bytes": 7}]
    journal.add(30.5, "recovered", version=1, digest="d", tokens_total=10, pending=pending)
    journal.commit(31.0, 2)
    series = journal.history.rounds
    assert plain(series.clients["a"]["tokens"]) == [10.0, 10.0]
    assert plain(series.clients["a"]["coded"]) == [7.0, 7.0]


def test_bytes_over_time_are_those_of_the_status(journal):
    journal.delta(10.0, "a", 0, 5.0)
    journal.add(11.0, "version_sent", peer="a", version=1, bytes_coded=30)
    each = {"full model up": 5, "full model down": 9}
    sockets = {"up": 6, "down": 10}
    journal.add(12.0, "traffic", payload=each, coded=each, sockets=sockets, error={})
    columns, found = journal.history.bytes.columns, journal.run.as_dict(12.0)
    for direction, raw, sent in (("up", 400, 7), ("down", 400, 30)):
        assert found[f"bytes_{direction}"] == {"raw": raw, "sent": sent}
        assert columns[f"raw {direction}"][-1] == raw
        assert columns[f"coded {direction}"][-1] == sent
        assert columns[f"sockets {direction}"][-1] == sockets[direction]


def test_columns_are_bounded_and_gaps_survive_halving():
    series = RoundSeries()
    for number in range(3 * MAX_BUCKETS):
        series.add("a", number, loss=float(number), tokens=1)
        if number < MAX_BUCKETS:
            series.add("b", number, loss=1.0, tokens=1)
        series.close(number, t=float(number), tokens=number, merged=1)
    assert len(series) <= MAX_BUCKETS
    assert series.every == 4
    losses = plain(series.clients["a"]["loss"])
    assert losses == [4 * at + 1.5 for at in range(len(series))]
    assert plain(series.clients["b"]["loss"])[MAX_BUCKETS // 4 :] == [None] * (
        len(series) - MAX_BUCKETS // 4
    )
    assert sum(series.clients["a"]["tokens"]) == 3 * MAX_BUCKETS
    assert sum(series.run["merged"]) == 3 * MAX_BUCKETS
    assert list(series.run["t"]) == [4.0 * at + 3 for at in range(len(series))]


def test_a_far_round_costs_no_memory():
    series = RoundSeries()
    series.add("a", 0, loss=1.0)
    series.add("a", 1 << 62, loss=2.0)
    series.add("a", -1, loss=2.0)
    assert len(series) <= MAX_BUCKETS
    known = [one for one in series.clients["a"]["loss"] if not math.isnan(one)]
    assert known == [1.0, 2.0]


def test_a_timeline_is_bounded_and_its_newest_half_is_exact():
    line = Timeline()
    for at in range(5000):
        line.enter(float(at), "training" if at % 2 == 0 else "sending")
    assert len(line.begins) == len(line.states) <= room.MAX_SEGMENTS
    assert line.segments()[-100:] == [
        (float(at), "training" if at % 2 == 0 else "sending") for at in range(4900, 5000)
    ]
    assert list(line.begins) == sorted(line.begins)


def test_samples_are_bounded():
    samples = Samples()
    for at in range(5000):
        samples.add(float(at), dict.fromkeys(room.SAMPLED, float(at)))
    times = list(samples.columns["t"])
    assert len(times) <= room.MAX_SAMPLES
    assert times == sorted(set(times))
    assert times[-1] == 4999.0
    assert all(list(samples.columns[name]) == times for name in room.SAMPLED)


def test_names_from_the_network_are_bounded():
    history, run = History(), RunState()
    for number in range(1000):
        line = {"t": 1.0, "type": "client_hello", "peer": f"p{number}", "incarnation": 1}
        run.apply(line)
        history.apply(line, run)
        history.rounds.add(f"p{number}", 0, loss=1.0)
    assert len(history.timelines) == len(history.rounds.clients) == room.MAX_CLIENTS


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, {"type": "call/1"}])
@pytest.mark.parametrize("kind", sorted(name for name in dir(History) if name.startswith("_on_")))
def test_a_malformed_line_changes_nothing_and_is_no_error(kind, value):
    history, run = History(), RunState()
    fields = ("peer", "stored", "version", "message", "key", "held", "what", "connection", "round")
    line = {"t": 1.0, "type": kind.removeprefix("_on_"), **dict.fromkeys(fields, value)}
    run.apply(line)
    history.apply(line, run)
    assert history.lines == 1
    assert len(history.rounds) <= 1


def test_held_out_losses_and_uploads_of_a_split_server():
    made = Journal()
    made.add(0.5, "version_committed", version=0, digest="d0")
    delta = {"key": "a/1/0/1", "tokens": 1, "steps": 1, "round": 0}
    delta["metrics"] = {"eval_loss": 2.5, "eval_version": 0}
    made.add(1.0, "delta_offered", peer="a", delta=delta)
    assert [(one.version, one.loss) for one in made.run.ps.evaluations] == [(0, 2.5)]
    for upload, loss in enumerate((2.0, 4.0)):
        made.add(2.0, "upload_trained", key=f"a/1/0/{upload}", loss=loss, problem=None)
    made.add(3.0, "round_done_received", peer="a", round=0, samples=16, errors={})
    assert plain(made.history.rounds.clients["a"]["loss"]) == [3.0]
    assert plain(made.history.rounds.run["tokens"]) == [16.0]
