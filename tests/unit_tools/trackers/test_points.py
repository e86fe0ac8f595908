"""Points of a journal's lines, and how they reach a tracker once."""

import pytest
from tracked_run import EVERY_S, SENT, TOKENS, VALUES, TrackedRun

from fsl_async.observe.evaluations import Evaluation
from fsl_async.observe.journal import JournalReader
from fsl_async.roles.machine import Received
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.tools.trackers.catalog import Point, Points, evaluated, newest_of_each
from fsl_async.tools.trackers.outbox import BATCH, RETRY_S, Outbox


@pytest.fixture
def run(tmp_path):
    made = TrackedRun(tmp_path)
    yield made
    made.writer.close()


def points_of(run):
    run.flush()
    points = Points()
    return [one for line in JournalReader(run.writer.path).read() for one in points.apply(line)]


def test_a_version_is_a_point(run):
    """Of the moment it was made, with what is known then and nothing of earlier versions."""
    run.join("a", "b")
    run.round("a", "b")
    run.round("a", base=0, cosine=None)
    zero, one, two = points_of(run)
    assert [zero.step, one.step, two.step] == [0, 1, 2]
    assert two.t - one.t == EVERY_S
    assert "loss/mean" not in zero.values
    assert one.values["loss/mean"] == 3.0
    assert (one.values["client_loss/a"], one.values["client_loss/b"]) == (2.0, 4.0)
    assert one.values["tokens/merged"] == 2 * TOKENS
    assert one.values["bytes/up_raw"] == 2 * 4 * VALUES
    assert one.values["bytes/up_sent"] == 2 * SENT
    assert (one.values["cosine"], one.values["staleness/mean"]) == (0.5, 0.0)
    assert "cosine" not in two.values
    assert (two.values["staleness/max"], two.values["loss/mean"]) == (1.0, 1.0)
    assert two.values["participation/called"] == 1.0
    assert two.values["clients/training"] == 2.0


def test_a_client_that_is_gone_has_no_loss_and_keeps_its_tokens(run):
    """A curve then ends; it does not go on with an old value."""
    run.join("a", "b")
    run.round("a", "b")
    run.lose("b")
    run.round("a")
    last = points_of(run)[-1].values
    assert "client_loss/b" not in last
    assert last["client_tokens/b"] == TOKENS
    assert (last["clients/gone"], last["client_loss/a"]) == (1.0, 1.0)


def test_a_client_that_catches_up_has_no_loss(run):
    """Its last one is of the process that died."""
    run.join("a", "b")
    run.round("a", "b")
    run.lose("b")
    run.write(ev.ClientHello("b", 6, "", -1, ""))
    run.round("a")
    run.write(Received("b", msg.Holding(2, "d2")))
    run.round("a", "b")
    _, _, two, three = points_of(run)
    assert "client_loss/b" not in two.values
    assert "client_loss/b" in three.values


def test_tuning_and_privacy_are_series(run):
    """Ranks and epsilon come with deltas."""
    run.join("a")
    run.round("a", facts={"rank": 8.0, "epsilon": 1.5})
    last = points_of(run)[-1].values
    assert (last["client_rank/a"], last["client_epsilon/a"]) == (8.0, 1.5)


def test_a_held_out_loss_is_a_point_of_the_version_it_was_measured_on(run):
    """It comes with a delta, one round later."""
    run.join("a")
    run.round("a")
    run.round("a", metrics={"eval_loss": 1.25, "eval_version": 1})
    held = [one for one in points_of(run) if "held_out/loss" in one.values]
    assert [(one.step, one.values["held_out/loss"]) for one in held] == [(1, 1.25)]


def test_a_version_made_just_before_a_kill_is_a_point(run):
    """The journal lacks its line; the restart finds it on the disk, and knows no loss of it."""
    run.join("a")
    run.round("a")
    run.start(version=2, tokens=300)
    found = points_of(run)
    assert [one.step for one in found] == [0, 1, 2]
    assert found[-1].values["tokens/merged"] == 300
    assert "loss/mean" not in found[-1].values


def test_rounds_of_a_split_server_are_points():
    """A round is over when the next one has begun, the last one with the run."""
    points = Points()
    lines = [
        {"type": "node_started", "t": 1.0, "role": "server"},
        *(
            {"type": "upload_trained", "t": 2.0 + n, "key": f"a/1/{n // 2}/{n}", "loss": 4.0 - n}
            for n in range(4)
        ),
        {"type": "finish", "t": 9.0},
    ]
    found = [one for line in lines for one in points.apply(line)]
    assert [one.step for one in found] == [0, 1]
    assert found[-1].values["split/loss/newest"] == 1.0


@pytest.mark.parametrize("line", [{}, {"type": "version"}, {"type": "upload_trained"}])
def test_no_line_breaks_it(line):
    """A journal may be of another release."""
    Points().apply({"t": 1.0, **line})


def test_series_of_evaluations_have_plain_names():
    """The data's name is any text."""
    one = Evaluation(3, 1.0, "mean", 0.5, "/data/My text\n(1).txt")
    assert evaluated(one, 7.0) == Point(
        3,
        7.0,
        {
            "held_out/data_My_text_1_.txt/loss_mean": 1.0,
            "held_out/data_My_text_1_.txt/perplexity_mean": one.perplexity,
            "held_out/data_My_text_1_.txt/bits_per_byte_mean": 0.5,
        },
    )
    older = Evaluation(2, 9.0, "mean", None, one.data)
    assert newest_of_each([one, older, Evaluation(1, 2.0)]) == [Evaluation(1, 2.0), one]


class Kept:
    """A tracker in memory, which may fail."""

    name, where = "Kept", ""

    def __init__(self, written=None):
        self.points, self.fails, self._written = [], 0, written or {}

    def written(self):
        """See Tracker."""
        return dict(self._written)

    def log(self, point):
        """See Tracker."""
        if self.fails:
            self.fails -= 1
            raise ConnectionError("away")
        self.points.append(point)

    def close(self):
        """See Tracker."""


def test_nothing_is_written_twice():
    """By series: a reader was killed between two of them, and a value may come late."""
    tracker = Kept({"x": 1})
    box = Outbox(tracker)
    for step in (0, 1, 2, 2):
        box.put(Point(step, 0.0, {"x": 1.0, "y": 2.0}))
    assert box.send(0.0) == ""
    assert [(p.step, sorted(p.values)) for p in tracker.points] == [
        (0, ["y"]), (1, ["y"]), (2, ["x", "y"]),
    ]  # fmt: skip


def test_points_wait_for_a_tracker_that_fails():
    """They come in order, once, when it works again; the line says how many wait."""
    tracker = Kept()
    box = Outbox(tracker)
    tracker.fails = 1
    box.put(Point(0, 0.0, {"x": 1.0}))
    box.put(Point(1, 0.0, {"x": 2.0}))
    assert "Kept takes no points (ConnectionError: away); 2 wait" in box.send(10.0)
    assert box.send(10.0 + RETRY_S / 2) == ""
    assert tracker.points == []
    assert box.send(10.0 + RETRY_S) == ""
    assert [point.step for point in tracker.points] == [0, 1]
    tracker.fails = 1
    box.put(Point(2, 0.0, {"x": 2.0}))
    assert "1 wait" in box.close(0.0)


def test_many_values_go_in_parts():
    """A server takes so many at once."""
    box = Outbox(tracker := Kept())
    box.put(Point(0, 0.0, {f"x{n}": 1.0 for n in range(BATCH + 1)}))
    box.send(0.0)
    assert [len(point.values) for point in tracker.points] == [BATCH, 1]


def test_the_two_servers_of_a_process_have_marks_of_their_own():
    """Rounds of a split server are not versions."""
    box = Outbox(Kept({"split/loss/newest": 90, "loss/mean": 4}))
    assert (box.last_step(""), box.last_step("split/")) == (4, 90)
