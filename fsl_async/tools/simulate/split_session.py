"""A simulated client's session with the split server, and its copies of the user's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsl_async.accounting.traffic import Traffic
from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.config.site_code import SiteCode
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.runtime import Journal, Worker
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import Event, Finish, Note
from fsl_async.tools.sim.split_processes import SplitRun
from fsl_async.tools.sim.world import ProcessClock


class SplitSession:
    """The session, as a `SplitPort` of the training thread. Opened once."""

    def __init__(
        self,
        run: SplitRun,
        clock: ProcessClock,
        welcome: Welcome,
        name: str,
        incarnation: int,
        *,
        worker: Worker,
        journal: Journal,
        say: Callable[[Note], None],
        finished: Callable[[Finish], None],
    ) -> None:
        self._run, self._clock, self._welcome = run, clock, welcome
        self._name, self._incarnation = name, incarnation
        self._worker, self._journal = worker, journal
        self._say, self._finished = say, finished
        self._shell: SplitClientShell | None = None

    # --- the training thread ---

    def open_split(self, training: Any, architecture: dict[str, str]) -> None:
        """See `SplitPort.open_split`."""
        self._clock.call_at(self._clock.time(), self._open, training, architecture)

    def post_split(self, event: Event) -> None:
        """See `SplitPort.post_split`."""
        self._clock.call_at(self._clock.time(), self._feed, event)

    # --- the scheduler's thread ---

    def end(self, event: Event) -> None:
        """Report that the run or this client's training is over."""
        if self._shell is not None:
            self._shell.node.feed(event)

    def _open(self, training: Any, architecture: dict[str, str]) -> None:
        welcome = self._welcome
        self._shell = self._run.client(
            self._name,
            self._incarnation,
            self._clock,
            training,
            facts=Facts(welcome.run, welcome.shard, architecture),
            worker=self._worker,
            traffic=Traffic(),
            journal=self._journal,
            say=self._say,
            finished=self._finished,
        )
        self._shell.dial()

    def _feed(self, event: Event) -> None:
        if self._shell is not None:
            self._shell.feed(event)


def own_code(config: Config) -> SiteCode:
    """Return the user's own models of split learning, which each site of a real run is given."""
    model, auxiliary = config.model.family, config.split.auxiliary
    return SiteCode(model if is_own(model) else None, auxiliary if is_own(auxiliary) else None)
