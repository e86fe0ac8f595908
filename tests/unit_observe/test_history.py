"""What a journal shows over time: rounds with gaps, timelines, the open round, bounds."""

import math

import pytest
from facts import RoundFact, VersionFact, call_of, client_line, line_of, version_of

from fsl_async.observe import history as room
from fsl_async.observe.history import (
    MAX_BUCKETS,
    Course,
    History,
    RoundSeries,
    Samples,
    Timeline,
    as_dict,
    of_client,
    plain,
)
from fsl_async.observe.run_state import RunState

STARTED = {"role": "ps", "run": "r", "every_s": 10.0, "quorum": 0.5, "grace": [4.0, 1.0, 60.0]}


class Journal:
    """A run and its history, fed with lines."""

    def __init__(self):
        self.course = Course()
        self.run, self.history = self.course.state, self.course.history
        self.add(0.0, "node_started", **STARTED)
        self.asked, self.losses, self.tokens = [], {}, 0

    def add(self, t, kind, **fields):
        """Feed a line."""
        self.course.apply({"t": t, "type": kind, **fields})

    def fact(self, t, fact):
        """Feed a fact."""
        self.course.apply(line_of(fact, t))

    def client(self, t, *given, **more):
        """Feed the fact of a client."""
        self.course.apply(client_line(t, *given, **more))

    def join(self, t, *names):
        """Clients join."""
        for name in names:
            self.client(t, name, "joining", begins=True)
            self.client(t, name, "training", max(self.run.ps.version, 0))

    def call(self, t, number, *names):
        """A round begins."""
        self.asked = list(names)
        self.fact(t, call_of(number, names, t))

    def delta(self, t, name, number, loss, sequence=1):
        """A delta comes."""
        key = f"{name}/1/{number}/{sequence}"
        delta = {"key": key, "tokens": 10, "steps": 1, "round": number, "metrics": {"loss": loss}}
        self.client(t - 0.5, name, "sending", number)
        self.add(t - 0.5, "delta_meta", peer=name, delta=delta)
        self.client(t, name, "training", number)
        self.add(t, "delta_stored", peer=name, stored={"delta": delta, "bytes": 7})
        self.losses[name], self.tokens = loss, self.tokens + 10

    def commit(self, t, version):
        """The round makes a version, of the deltas since the last one."""
        losses, self.losses = self.losses, {}
        late = tuple(name for name in self.asked if name not in losses)
        loss = sum(losses.values()) / len(losses) if losses else None
        given = {"tokens": self.tokens, "loss": loss, "cosine": 0.25}
        self.fact(t, version_of(version, losses, **given))
        self.fact(t, RoundFact("ready", number=version - 1, late=late))


@pytest.fixture
def journal():
    made = Journal()
    made.run.ps.values = 100
    made.fact(1.0, VersionFact(0, "d0", 0))
    made.join(2.0, "a", "b", "c")
    return made


def test_losses_by_client_and_round_have_gaps_where_nothing_came(journal):
    for number in range(3):
        t = 10.0 * (number + 1)
        journal.call(t, number, "a", "b", "c")
        journal.delta(t + 1, "a", number, 5.0 - number, number + 1)
        if number != 1:
            journal.delta(t + 2, "b", number, 4.0 - number, number + 1)
        journal.commit(t + 3, number + 1)
    series = journal.history.rounds
    assert series.rounds() == [0, 1, 2]
    assert plain(series.clients["a"]["loss"]) == [5.0, 4.0, 3.0]
    assert plain(series.clients["b"]["loss"]) == [4.0, None, 2.0]
    assert plain(series.clients["b"]["coded"]) == [7.0, None, 7.0]
    assert plain(series.clients["b"]["raw"]) == [400.0, None, 400.0]
    assert plain(series.run["tokens"]) == [20.0, 30.0, 50.0]
    assert plain(series.run["loss"]) == [4.5, 4.0, 2.5]
    assert plain(series.run["merged"]) == [2.0, 1.0, 2.0]
    assert list(series.run["t"]) == [13.0, 23.0, 33.0]
    assert "c" not in series.clients


def test_a_loss_that_is_no_number_is_a_gap(journal):
    for loss in ("nan", None, float("inf")):
        journal.call(10.0, 0, "a")
        journal.delta(11.0, "a", 0, loss, 1)
    assert plain(journal.history.rounds.clients["a"]["loss"]) == [None]


def test_a_timeline_shows_training_sending_late_gone_and_relaunched(journal):
    journal.call(10.0, 0, "a", "b", "c")
    journal.delta(11.0, "a", 0, 5.0)
    journal.delta(12.0, "b", 0, 5.0)
    journal.commit(13.0, 1)
    assert journal.run.ps.late == ("c",)
    journal.delta(20.0, "c", 0, 5.0)
    journal.fact(20.0, RoundFact("ready", number=0))
    journal.client(25.0, "c", "gone", why="expired")
    journal.add(30.0, "relaunch", what="launched", client="c")
    journal.client(31.0, "c", "joining", incarnation=2, begins=True, in_run=True)
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
    assert journal.run.ps.late == ()


def test_the_open_round_has_the_times_of_the_journal(journal):
    """A fact has those of its process's clock."""
    fact = call_of(3, "abc", 5.0, quorum_at=6.0, closes_at=9.0)
    journal.course.apply(line_of(fact, 7.0) | {"t": 1007.0})
    window = journal.run.ps.window()
    assert (window["called_at"], window["quorum_at"], window["closes_at"]) == (1005, 1006, 1009)
    assert (window["open"], window["waited_for"], window["waiting"]) == (True, ("a", "b", "c"), 3)


def test_a_new_segment_in_an_open_round_changes_nothing(journal):
    from fsl_async.observe.segments import Total

    journal.call(10.0, 0, "a", "b", "c")
    journal.delta(11.0, "a", 0, 5.0)
    before, line = journal.run.ps.window(), journal.history.timelines["a"]
    journal.add(12.0, "so_far", **Total(journal.course).as_fields())
    assert journal.run.ps.window() == before
    assert journal.history.timelines["a"] is line, "a page's cursor knows it"
    journal.delta(13.0, "b", 0, 5.0)
    journal.commit(14.0, 1)
    assert journal.run.ps.late == ("c",)


def test_a_rollback_removes_the_void_rounds(journal):
    for number in range(4):
        journal.delta(10.0 * number, "a", number, 5.0, number + 1)
        journal.commit(10.0 * number + 1, number + 1)
    journal.fact(50.0, VersionFact(2, "d2", 20, "disk"))
    assert journal.history.rounds.rounds() == [0, 1]


def test_a_restart_keeps_the_deltas_of_the_open_round(journal):
    journal.delta(10.0, "a", 0, 5.0)
    journal.commit(11.0, 1)
    journal.delta(20.0, "a", 1, 4.0, 2)
    journal.add(30.0, "node_started", **STARTED)
    journal.fact(30.5, VersionFact(1, "d", 10, "disk"))
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


def test_only_what_changed_is_given_out_again():
    series = RoundSeries()
    for number in range(5):
        series.add("a", number, loss=1.0)
    clock = as_dict(series)["clock"]
    assert as_dict(series, clock)["rounds"] == []
    series.add("a", 3, loss=3.0)  # a late delta
    found = as_dict(series, clock)
    assert (found["begin"], found["rounds"]) == (3, [3, 4])
    assert of_client(series, "a", 3)["loss"] == [2.0, 1.0]


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
        line = client_line(1.0, f"p{number}", "joining", begins=True)
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
    made.fact(0.5, VersionFact(0, "d0", 0))
    delta = {"key": "a/1/0/1", "tokens": 1, "steps": 1, "round": 0}
    delta["metrics"] = {"eval_loss": 2.5, "eval_version": 0}
    made.add(1.0, "delta_meta", peer="a", delta=delta)
    assert [(one.version, one.loss) for one in made.run.ps.evaluations] == [(0, 2.5)]
    for upload, loss in enumerate((2.0, 4.0)):
        made.add(2.0, "upload_trained", key=f"a/1/0/{upload}", loss=loss, problem=None)
    made.add(3.0, "round_done", peer="a", round=0, samples=16, errors={})
    assert plain(made.history.rounds.clients["a"]["loss"]) == [3.0]
    assert plain(made.history.rounds.run["tokens"]) == [16.0]
