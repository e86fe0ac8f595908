"""Plays the demo: starts the processes, kills one, follows the run's journal, ends the run.

The demo has the means of an operator with two terminals: it launches `fsl-node` processes by the
supervisor, reads the run's journal and sends signals. Times are seconds after the demo's start,
which includes the start of Python and torch.

    0                  launch the parameter server, then the clients
    seconds / 3        SIGKILL to one client, once a round was merged (at 0.6 seconds in any case)
      + about 3 s      the parameter server detects it; the supervisor launches the client again
    seconds            SIGINT to the parameter server: one last round, all clients get it and end;
                       later, by at most `PATIENCE_S`, while the killed client is not back;
                       earlier on a machine so slow that the end would come too late
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import signal
import time
from typing import TYPE_CHECKING

from attrs import field, mutable

from fsl_async.cluster.deaths import Deaths
from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import ChildExited, ChildStarted, Supervisor
from fsl_async.config import address as addresses
from fsl_async.errors import ExitCode, FslError
from fsl_async.observe.clients import News
from fsl_async.observe.journal import JournalReader
from fsl_async.observe.run_state import RunState
from fsl_async.tools.chaos.links import FOLDER
from fsl_async.tools.demo.settings import SERVER, DemoNodes
from fsl_async.tools.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsl_async.observe.table import View
    from fsl_async.process.stopper import Stopper

PATIENCE_S = 8.0
SLACK_S = 15.0
"""The demo ends at most this long after `seconds`, on paths with a short round trip."""

HOLD_S = 2.0
"""How long a news line is held back: the journal, up to a second late, may have earlier ones."""

_TICK_S = 0.2
_LISTEN_S = 30.0
_DRAIN_S = 9.0
_LEAVE_S = 4.0
_END_TRIPS = 40
_RULES = RestartRules(first_wait_s=0.5, longest_wait_s=4.0, budget=4)


@mutable
class Played:
    """Events of a demo, in seconds after its start; None where one did not happen."""

    state: RunState = field(factory=RunState)
    joined_s: float | None = None
    killed_s: float | None = None
    detected_s: float | None = None
    relaunched_s: float | None = None
    caught_up_s: float | None = None
    seconds: float = 0.0
    faults: list[str] = field(factory=list)

    def blames(self, client: str) -> bool:
        """Whether a fault has the cause why a client did not train."""
        return any(client in fault for fault in self.faults)


class Demo:
    """One demo; call `play`."""

    evaluates_here = True
    """Whether this process needs torch after the run."""

    def __init__(self, settings: DemoNodes, view: View, stop: Stopper) -> None:
        self.settings = settings
        self.played = Played()
        self._view = view
        self._stop = stop
        self._begun = time.monotonic()
        self.played.state.node.started_at = time.time()  # one clock for lines, summary and journal
        self._reader = JournalReader(settings.run_dir / "journal.jsonl")
        self._news: list[News] = []
        self._address: asyncio.Future[str] | None = None
        self._deaths = Deaths()
        self._refused: FslError | None = None
        self._ending = False
        self._links: list[Proxy] = []

    async def play(self) -> Played:
        """Play it to its end; no child process remains.

        Raises FslError for a user's mistake, and where clients died instead of training.
        """
        self._address = asyncio.get_running_loop().create_future()
        log = self.settings.run_dir / "children.log"
        supervisor = Supervisor(
            log_path=log, on_line=self._line, on_change=self._changed, rules=_RULES
        )
        async with supervisor:
            try:
                await self._run(supervisor)
            finally:
                if self._stop.hard:
                    await supervisor.stop(grace_s=0.0)
                for link in self._links:
                    link.close()
        self._read_journal(hold_s=0.0)
        if self._refused is not None:
            raise self._refused
        self.played.faults += self._deaths.lines()
        if self._deaths and not self.played.state.ps.rounds and not self._stop.requested:
            raise FslError("; ".join(self.played.faults), ExitCode.BUG)
        self.played.seconds = self._elapsed()
        return self.played

    # --- the schedule ---

    async def _run(self, supervisor: Supervisor) -> None:
        settings = self.settings
        supervisor.start(settings.server())
        assert self._address is not None
        if not await self._until(self._address.done, _LISTEN_S):
            if self._may_continue():
                fault = f"the parameter server did not listen within {_LISTEN_S:g} s"
                self.played.faults.append(fault)
            return
        for name in settings.names:
            address = self._address_for(name, self._address.result())
            supervisor.start(settings.client(name, address))
        while self._may_continue() and self._elapsed() < self._stop_at():
            if self._is_hopeless():
                break
            await self._tick()
            if self.played.killed_s is None and self._is_time_to_kill():
                self._kill(supervisor)
        await self._end(supervisor)

    def _address_for(self, name: str, address: str) -> str:
        """The address that a client dials: the parameter server's, or a proxy's."""
        if not self.settings.links:
            return address
        parsed = addresses.parse(address)
        path = self.settings.run_dir / FOLDER / name
        self._links.append(Proxy((parsed.host, parsed.port), follow=path))
        return self._links[-1].address

    def _is_time_to_kill(self) -> bool:
        state, settings = self.played.state, self.settings
        victim = state.clients.get(settings.victim)
        if victim is None or victim.version < 0 or not victim.connected:
            return False
        merged = state.ps.rounds >= 1 or self._elapsed() > 0.6 * settings.seconds
        return self._elapsed() >= settings.kill_after_s and merged

    def _kill(self, supervisor: Supervisor) -> None:
        name = self.settings.victim
        pid = supervisor.pid(name)
        if supervisor.kill(name):
            self.played.killed_s = self._elapsed()
            self._report("killed", f"SIGKILL to {name} (process {pid})", name)

    def _stop_at(self) -> float:
        """When to call the last round; the end takes a little longer than a start of torch."""
        played, seconds = self.played, self.settings.seconds
        start_s = played.joined_s if played.joined_s is not None else self._elapsed()
        slack_s = SLACK_S + self._extra_s
        latest = seconds + slack_s - (4.0 + 0.7 * min(start_s, SLACK_S))
        if played.killed_s is not None and played.caught_up_s is None:
            return min(seconds + PATIENCE_S + self._extra_s, max(latest, 0.9 * seconds))
        return min(seconds, max(latest, 0.75 * seconds))

    @property
    def _extra_s(self) -> float:
        """Time that the end may take longer on a path with a long round trip."""
        return _END_TRIPS * self.settings.late_s

    def _is_hopeless(self) -> bool:
        """Whether clients only die, each of one error."""
        return self._deaths.are_hopeless(self.settings.names)

    async def _end(self, supervisor: Supervisor) -> None:
        self._ending = True
        trains = not self._stop.requested and not self._is_hopeless()
        if trains:
            self._report("ending", "the time is over: one last round, then all nodes end")
        loading = None
        if self.evaluates_here and trains:
            # Load it while the nodes finish; the evaluation needs it next.
            loading = asyncio.create_task(asyncio.to_thread(importlib.import_module, "torch"))
        # A machine that starts torch slowly does the last round slowly, too.
        drain_s = _DRAIN_S + self._extra_s + (self.played.joined_s or 0.0)
        stopping = asyncio.create_task(supervisor.stop_child(SERVER, drain_s, signal.SIGINT))
        await self._until(stopping.done, drain_s + 1.0)
        if not self._stop.hard:
            await stopping
            clients = self.settings.names
            await self._until(
                lambda: all(supervisor.pid(name) is None for name in clients), _LEAVE_S
            )
        await supervisor.stop(grace_s=0.0 if self._stop.hard else 3.0)
        if not stopping.done():
            await stopping
        if loading is not None:
            await loading

    # --- the journal ---

    def _may_continue(self) -> bool:
        return not self._stop.requested and self._refused is None

    async def _until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `is_done()`; False after `limit_s`, or when the user or an error ends it."""
        deadline = time.monotonic() + limit_s
        while not is_done():
            if time.monotonic() >= deadline or self._stop.hard or self._refused is not None:
                return is_done()
            if self._stop.requested and not self._ending:
                return False
            await self._tick()
        return True

    async def _tick(self) -> None:
        await asyncio.sleep(_TICK_S)
        self._read_journal()

    def _read_journal(self, hold_s: float = HOLD_S) -> None:
        """Read new lines of the journal and show the news, in order of time."""
        played = self.played
        with contextlib.suppress(FileNotFoundError):
            for line in self._reader.read():
                for news in played.state.apply(line):
                    self._record(news)
                    self._news.append(news)
        now = time.time()
        self._news.sort(key=lambda one: one.t)
        ripe = [one for one in self._news if one.t <= now - hold_s]
        self._view.update(played.state, ripe, now)
        self._news = self._news[len(ripe) :]

    def _record(self, news: News) -> None:
        played = self.played
        when_s = news.t - played.state.node.started_at
        if news.kind == "version" and played.joined_s is None:
            played.joined_s = when_s
        if news.client != self.settings.victim or played.killed_s is None:
            return
        if news.kind == "gone" and played.detected_s is None:
            played.detected_s = when_s
        elif news.kind == "relaunched" and played.relaunched_s is None:
            # The new process's hello ends the old session, if it has not expired before.
            played.detected_s = played.detected_s or when_s
            played.relaunched_s = when_s
        elif news.kind == "caught up" and played.relaunched_s is not None:
            played.caught_up_s = played.caught_up_s or when_s

    def _report(self, kind: str, text: str, client: str = "", level: str = "info") -> None:
        news = News(time.time(), kind, text, client, level)
        self.played.state.news.append(news)
        self._news.append(news)

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    # --- the children ---

    def _line(self, name: str, line: str) -> None:
        if name != SERVER or self._address is None or self._address.done():
            return
        try:
            record = json.loads(line)
        except ValueError:
            return
        if isinstance(record, dict) and record.get("event") == "listening":
            self._address.set_result(str(record["address"]))

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildStarted):
            if change.launch > 1:
                text = f"the supervisor launched {change.name} again (process {change.pid})"
                self._report("launched", text, change.name)
            return
        if self._ending or self._stop.requested:
            was_killed = change.code == -signal.SIGKILL and not self._stop.requested
            if change.name == SERVER and was_killed:
                self.played.faults.append(
                    "the parameter server did not end after the last round, and was killed"
                )
            return
        if change.code == ExitCode.BAD_INPUT:
            # A new launch would fail again: the child's error line is the demo's error.
            self._refused = self._refused or FslError(
                change.error or f"{change.name} ended ({change.why})"
            )
        elif change.name == SERVER:
            self._refused = FslError(
                f"the parameter server ended too early ({change.why}): {change.error}",
                ExitCode.BUG,
            )
        elif change.code != -9:
            self._deaths.add(change)
            text = f"{change.name} ended ({change.why}): {change.error}"
            self._report("crashed", text, change.name, "warning")
