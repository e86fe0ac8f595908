"""The middle of a summing relay: which means go upstream, and what the cell's next version is."""

import numpy as np
import pytest

from fsl_async.config.load import load
from fsl_async.errors import ConfigError
from fsl_async.learn.client.ports import Move, RebaseOrder, RoundOrder
from fsl_async.nodes.ps.upstream import Cell, cell_config
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.store.errors import StoreError
from fsl_async.store.merge.merge_upstream import CellRound
from fsl_async.store.model.manifest import Manifest

MANIFEST = Manifest.from_shapes([("w", (3,))])
FIRST = np.array([1, 2, 3], np.float32)
MEAN = np.array([0.5, 0, -0.5], np.float32)


class Exchange:
    """An exchange side without a network. versions: weights of those still to come."""

    def __init__(self, cell, version, *weights):
        self.cell, self.version, self.weights = cell, version, list(weights)
        self.sent, self.reference = [], FIRST
        self.answers = True

    def free_vector(self, values):
        """An empty vector."""
        return np.empty(values, np.float32)

    def attach(self, manifest, own):
        """The run has a version, which comes next."""
        self.cell.orders.ask(RebaseOrder(discard=False))

    def rebase(self, move, *, discard):
        """Move onto the next version; its round begins."""
        base = np.array(self.weights.pop(0), np.float32)
        move(Move(self.version, "move", base, self.reference))
        self.version, self.reference = self.version + 1, base
        self.cell.orders.ask(RoundOrder(self.version, self.version - 1))

    def put_snapshot(self, sequence, snapshot, work):
        """Take a mean; the version that it is in comes next."""
        self.sent.append((snapshot.copy(), work))
        self.reference = snapshot
        self.next_version()

    def next_version(self):
        """The server upstream has made a version."""
        if self.answers:
            self.cell.orders.ask(RebaseOrder(discard=False))


def cell_of(version, *weights, position=None):
    """A cell that has joined at `version`, the first of `weights`."""
    cell = Cell(lambda _: None)
    cell.exchange_side = Exchange(cell, version, *weights)
    cell.position = position or {}
    assert cell.begin(MANIFEST, FIRST).tolist() == weights[0]
    return cell, cell.exchange_side


def round_of(version, base, source=-1):
    """A round of two clients."""
    deltas = [
        Delta(DeltaKey(name, 1, version - 1, 1), "", tokens, steps)
        for name, tokens, steps in (("a", 30, 2), ("b", 50, 4))
    ]
    return CellRound(version, source, np.array(base, np.float32), MEAN, deltas)


def test_a_mean_goes_upstream_with_the_work_of_all_and_the_next_version_comes_back():
    """Two rounds: the second one begins where the server upstream is then."""
    cell, upstream = cell_of(7, [1, 2, 3], [4, 4, 4], [5, 5, 5])
    found = cell.exchange(round_of(1, [1, 2, 3]))
    assert (found.weights.tolist(), found.version, found.is_sent) == ([4, 4, 4], 8, True)
    snapshot, work = upstream.sent[0]
    assert snapshot.tolist() == [0.5, 2, 3.5]
    assert (work.tokens, work.steps) == (80, 3)
    assert work.facts == {"data_epoch": 7, "data_at": 1}
    found = cell.exchange(round_of(2, [4, 4, 4], source=8))
    assert (found.version, found.is_sent) == (9, True)
    assert upstream.sent[1][0].tolist() == [3.5, 4, 4.5]


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_mean_that_was_acknowledged_before_a_start_is_not_sent_again(is_merged):
    """Whether the server upstream has made its version meanwhile, or makes it now."""
    versions = [[4, 4, 4]] if is_merged else [[1, 2, 3], [4, 4, 4]]
    first = 8 if is_merged else 7
    position = {"data_at": 3.0, "data_epoch": 7.0}
    cell, upstream = cell_of(first, *versions, position=position)
    if not is_merged:
        upstream.next_version()
    found = cell.exchange(round_of(3, [1, 2, 3], source=7))
    assert (found.weights.tolist(), found.version, found.is_sent) == ([4, 4, 4], 8, True)
    assert upstream.sent == []


def test_a_round_that_is_tried_again_is_sent_once():
    """The cell's disk was full when the next version had come."""
    cell, upstream = cell_of(7, [1, 2, 3], [4, 4, 4])
    for _ in range(2):
        found = cell.exchange(round_of(1, [1, 2, 3], source=7))
        assert (found.version, found.is_sent) == (8, True)
    assert len(upstream.sent) == 1


def test_a_mean_of_a_version_that_was_replaced_is_not_sent():
    """It came too late, as a late client's delta does."""
    cell, upstream = cell_of(9, [4, 4, 4])
    found = cell.exchange(round_of(2, [1, 2, 3], source=8))
    assert (found.weights.tolist(), found.version, found.is_sent) == ([4, 4, 4], 9, False)
    assert upstream.sent == []


def test_a_position_without_a_version_is_a_round_that_was_not_merged():
    """A server upstream may send anything."""
    cell, _ = cell_of(7, [1, 2, 3], [4, 4, 4], position={"data_at": 1.0})
    cell.exchange_side.next_version()
    assert cell.exchange(round_of(1, [1, 2, 3], source=7)).version == 8


def test_a_relay_that_leaves_stops_waiting():
    """Its round is pending, and goes on after the next start."""
    cell, upstream = cell_of(7, [1, 2, 3])
    upstream.answers, cell.is_leaving = False, True
    with pytest.raises(StoreError, match="this relay is leaving"):
        cell.exchange(round_of(1, [1, 2, 3], source=7))


@pytest.mark.parametrize(
    "setting",
    ["sync.trigger=clock", "outer.aggregation=median", "tune.method=zeroth", "tune.secure=true"],
)
def test_a_run_that_cannot_be_added_up_is_refused(setting):
    """The line names the setting."""
    run = load(None, ["sync.trigger=rounds", setting])
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        cell_config(run, [])


def test_a_cell_has_clients_and_guards_of_its_own():
    """Its versions are the sums that come back, whatever the run's optimizer is."""
    run = load(None, ["sync.trigger=rounds", "sync.clients=3", "outer.optimizer=nesterov"])
    made = cell_config(run, ["sync.clients=100", "guard.clip_norm=2"])
    assert (made.sync.clients, made.guard.clip_norm, made.outer.optimizer) == (100, 2, "average")
