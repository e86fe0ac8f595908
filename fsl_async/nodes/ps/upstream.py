"""A summing relay: the parameter server of a cell, which is one client of a run.

It takes the deltas of its clients, adds them up, and sends the mean as its own delta; the version
that comes back is the next one of the cell. So the path upstream carries the bytes of one client,
however many there are in the cell, as the base station of a radio cell does.

Both sides are production code: the cell is served by `fsl_async.nodes.ps`, with `UpstreamMerge` for
its merge, and `LoopSide` is the client. In between is `Cell`: the parameter server's store calls
it as `Upstream`, in its own thread, and the exchange side of the client asks it for snapshots as it
would ask a training thread. What coding loses of a mean stays in `Cell` and goes into the next one.

A delta of the cell is merged upstream at most once. Its facts tell which round of the cell it is of
and of which version (as a position in data), and a relay that starts again gets them back with its
welcome: a mean that was acknowledged is not sent again.
"""

from __future__ import annotations

import threading
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from fsl_async.config.load import with_settings
from fsl_async.errors import ConfigError
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.meter import Meter
from fsl_async.learn.client.ports import (
    NO_VERSION,
    Moved,
    Orders,
    RebaseOrder,
    SnapshotOrder,
    Work,
)
from fsl_async.learn.client.schedule import RunClock
from fsl_async.nodes.client.client_node import LoopSide
from fsl_async.nodes.client.parts import ClientParts
from fsl_async.roles.machine import TrainingEnded
from fsl_async.roles.sync.delta import BALANCE, POSITION
from fsl_async.store.errors import StoreError
from fsl_async.store.merge.merge_upstream import Returned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsl_async.config.settings import Config
    from fsl_async.learn.client.ports import Move, RoundOrder, Vector
    from fsl_async.nodes.client.parts import ClientOptions
    from fsl_async.process.stopper import Stopper
    from fsl_async.roles.machine import Event
    from fsl_async.roles.sync.delta import Delta
    from fsl_async.store.merge.merge_upstream import CellRound
    from fsl_async.store.model.manifest import Manifest

_SOURCE, _ROUND = POSITION[:2]
CELL_RULES = ("fedit", "ffa")
"""Rules of adapters that do not depend on a version's number, which a cell counts for itself."""
LOOK_S = 0.5


class Cell:
    """Training, as the exchange side of a client sees it: rounds of a cell. See above.

    position: round and version of the newest mean that was sent; after a start, of the newest that
    the server upstream has acknowledged.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.orders = Orders()
        self.orders.by_rounds = True
        self.meter, self.clock = Meter(), RunClock()
        self.exchange_side = Exchange(self.orders, on_event=on_event)
        self.position: dict[str, float] = {}
        self.is_leaving = False
        self._version = NO_VERSION
        self._theta = np.empty(0, np.float32)
        self._base = self._theta
        self._round: RoundOrder | None = None

    @property
    def stopped(self) -> bool:
        """Whether the run has ended, or this client's part in it."""
        return self.orders.stopped

    def begin(self, manifest: Manifest, own: Vector) -> Vector:
        """See `Upstream.begin`."""
        if self._version != NO_VERSION:  # the cell's disk failed since, and a client begins again
            if len(self._base) != manifest.values:
                raise StoreError("this model is not the one that the relay joined the run with")
            return self._base
        self._theta = own.copy()
        vector = self.exchange_side.free_vector(manifest.values)
        np.copyto(vector, own)
        self.exchange_side.attach(manifest, vector)
        self._wait(lambda: self._version != NO_VERSION)
        if self._version == NO_VERSION:
            raise StoreError("the server upstream has ended its run, or refuses this model")
        return self._base

    def exchange(self, a_round: CellRound) -> Returned:
        """See `Upstream.exchange`."""
        source = a_round.source
        self._attend()
        if source < 0 and np.array_equal(self._base, a_round.base):
            source = self._version  # version 0 of the cell has no line in its ledger
        is_sent = self.position.get(_ROUND) == a_round.version
        if is_sent:
            source = int(self.position.get(_SOURCE, source))
        else:
            self._wait(lambda: self._version != source or self._round is not None)
            if self._version == source and self._round is not None:
                self._send(self._round, a_round)
                self._round, is_sent = None, True
        self._wait(lambda: self._version > source)
        return Returned(self._base, self._version, is_sent)

    def _send(self, order: RoundOrder, a_round: CellRound) -> None:
        self._theta -= a_round.mean
        self.position = {_SOURCE: float(self._version), _ROUND: float(a_round.version)}
        work = _work_of(a_round.deltas)
        work = evolve(work, facts=work.facts | self.position)
        self.meter.count(work.tokens, None)
        self._snapshot(order.sequence, work)

    def _snapshot(self, sequence: int, work: Work) -> None:
        vector = self.exchange_side.free_vector(len(self._theta))
        np.copyto(vector, self._theta)
        self.exchange_side.put_snapshot(sequence, vector, work)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Carry out orders until something holds, or the run has ended. StoreError: it leaves."""
        self._attend()
        while not (until() or self.stopped):
            if self.is_leaving:
                raise StoreError("this relay is leaving; the round is sent after its next start")
            self.orders.wait(LOOK_S, or_stop=True)
            self._attend()

    def _attend(self) -> None:
        while True:
            self._round = self.orders.take_round() or self._round
            match self.orders.take():
                case None:
                    return
                case RebaseOrder(discard):
                    self.exchange_side.rebase(self._move, discard=discard)
                case SnapshotOrder(sequence):  # at the end, when nothing is left to send
                    self._snapshot(sequence, Work(0, 0, {}, finite=True))
                case other:
                    raise AssertionError(other)

    def _move(self, move: Move) -> Moved:
        if move.how == "take":
            np.copyto(self._theta, move.base)
        elif move.how == "move":
            self._theta += move.base - move.reference
        self._base, self._version = move.base.copy(), move.version
        return Moved(taken=move.how == "take")


def _work_of(deltas: Sequence[Delta]) -> Work:
    """Return the work of a cell: all tokens, so that it counts as its sites together would."""
    tokens, sites = sum(one.tokens for one in deltas), len({one.key.client for one in deltas})
    steps = max(1, round(sum(one.steps for one in deltas) / sites))
    found = [one.facts.get(BALANCE) for one in deltas]
    balance = [one for one in found if isinstance(one, int | float)]
    facts = {BALANCE: fmean(balance)} if balance else {}
    return Work(tokens, steps, {}, finite=True, facts=facts)


class UpstreamClient(LoopSide):
    """The client of a summing relay, as the cell's parameter server sees it. Close it."""

    training: Cell

    def __init__(
        self, options: ClientOptions, *, stop: Stopper, log: Callable[[str], None]
    ) -> None:
        self.training = cell = Cell(self._post)
        super().__init__(ClientParts(options, cell, cell.exchange_side, stop, log))
        self._thread.start()

    def wait_config(self, own: Sequence[str]) -> Config:
        """Wait for the welcome; return the settings of the cell. Raises as `wait_welcome`."""
        member = self.wait_welcome()
        self.training.position = member.welcome.position
        return cell_config(member.config, own)

    def close(self) -> None:
        """Leave the run upstream; harmless twice."""
        self._post(TrainingEnded(None))
        self.ended.wait()

    def follow(self, cell_stop: Stopper) -> None:
        """From now on, have the cell's run end with that of the server upstream."""
        stop = self._parts.stop

        def follow() -> None:
            while not (self.training.stopped or self.ended.wait(LOOK_S)):
                self.training.is_leaving = stop.requested
            self.close()
            reason = "upstream: " + ("it ended" if self.finish is None else self.finish.reason)
            if stop.requested:
                reason = stop.reason
            cell_stop.request(reason=reason, exit_code=stop.exit_code)

        threading.Thread(target=follow, name="fsl-upstream", daemon=True).start()


def cell_config(config: Config, own: Sequence[str]) -> Config:
    """Return the settings of a cell. config: of the run; own: overrides of this machine.

    Raises ConfigError for runs whose deltas cannot be added up on the way.
    """
    tune = config.tune
    wrong = {
        "sync.trigger": config.sync.trigger != "rounds",
        "outer.aggregation": config.outer.aggregation != "mean",
        "outer.channel": config.outer.channel != "none",
        "guard.evaluator": bool(config.guard.evaluator),
        "split.method": config.split.is_on,
        "tune.method": tune.method == "zeroth",
        "tune.rule": tune.method == "lora" and tune.rule not in CELL_RULES,
        "tune.secure": tune.secure,
        "tune.dp_epsilon": tune.is_private,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"--upstream: that run has {key} set, and a cell adds up deltas of runs by rounds"
                " with a plain mean (docs/guides/over-the-air.md#a-summing-relay)"
            )
    made = with_settings(config, own)
    return evolve(made, outer=evolve(made.outer, optimizer="average"))
