"""What a reader takes of a run directory: segments that a tracker lacks, and evaluations."""

import json
import time

import pytest
from tracked_run import TrackedRun

from fsl_async.observe.clients import NodeState
from fsl_async.tools.trackers.outbox import Feed, Outbox, run_name


class Kept:
    """A tracker in memory."""

    name, where = "Kept", ""

    def __init__(self, written=None):
        self.steps, self._written, self.values = [], written or {}, {}

    def written(self):
        """See Tracker."""
        return dict(self._written)

    def log(self, point):
        """See Tracker."""
        self.steps.append(point.step)
        self.values |= point.values

    def close(self):
        """See Tracker."""


@pytest.fixture
def run(tmp_path):
    made = TrackedRun(tmp_path)
    made.join("a", "b")
    yield made
    made.writer.close()


def next_segment(run):
    """Make the journal an older segment; the writer's thread does it when it has lines."""
    older = len(list(run.folder.glob("journal.*.jsonl")))
    run.writer._turns_at = 0
    run.write()
    run.writer.note("traffic", run.t, payload={}, coded={}, sockets={})
    for _ in range(200):
        if len(list(run.folder.glob("journal.*.jsonl"))) > older:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the journal has no new segment")
    run.writer._turns_at = 1 << 30


def test_older_segments_are_read_where_the_tracker_lacks_their_versions(run):
    """A new tracker of an old run has all of it; one that has most reads the newest segment."""
    run.round("a", "b")
    run.round("a", "b")
    next_segment(run)
    run.round("a", "b")
    run.flush()
    new, old = Kept(), Kept({"loss/mean": 2, "tokens/merged": 2})
    for tracker in (new, old):
        box = Outbox(tracker)
        feed = Feed(run.folder, [box], lambda box=box: box.send(0.0))
        feed.poll()
        run.flush()
    assert new.steps == [0, 1, 2, 3]
    assert old.steps == [3]
    assert old.values["tokens/merged"] == new.values["tokens/merged"] == 600


def test_a_journal_that_goes_on_in_a_new_segment_is_followed(run):
    """While it is read."""
    box = Outbox(tracker := Kept())
    feed = Feed(run.folder, [box], lambda: box.send(0.0))
    run.flush()
    feed.poll()
    run.round("a", "b")
    next_segment(run)
    run.round("a", "b")
    run.flush()
    feed.poll()
    assert tracker.steps == [0, 1, 2]


def test_what_the_command_evaluate_leaves_is_taken(run):
    """When it comes, as points of the versions that it measured."""
    run.round("a", "b")
    run.flush()
    box = Outbox(tracker := Kept())
    feed = Feed(run.folder, [box], lambda: box.send(0.0))
    feed.poll()
    assert feed.reading(up=True).evaluations == []
    rows = [
        {"version": 0, "loss": 5.0, "of": "weights", "data": "x"},
        {"version": 1, "loss": 4.0, "of": "weights", "data": "x"},
        {"version": 9, "loss": 1.0, "of": "weights", "data": "x"},  # not of this run any more
    ]
    (run.folder / "evaluations.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    feed.poll()
    feed.poll()
    assert tracker.steps == [0, 1, 0, 1]
    assert tracker.values["held_out/x/loss"] == 4.0
    (newest,) = feed.reading(up=True).evaluations
    assert (newest.version, newest.loss) == (1, 4.0)


@pytest.mark.parametrize(
    ("node", "name"),
    [
        (NodeState("ps", "run-1", "x"), "run-1"),
        (NodeState("client", "run-1", "site-a"), "run-1-site-a"),
        (NodeState(), "my-runs"),
        (NodeState("ps", ".."), "my-runs"),
        (NodeState("ps", "a/b"), "my-runs"),
        (NodeState("client", "run-1", "../x"), "my-runs"),
    ],
)
def test_names_of_folders_and_runs(tmp_path, node, name):
    """A journal may come from elsewhere: its run's name leads nowhere else."""
    assert run_name(node, tmp_path / "my runs") == name
