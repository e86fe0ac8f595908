"""Plays a scenario: starts its processes, watches them, injects its faults, ends the run.

It has the means of an operator with two terminals: it launches `fsl-node` processes by the
supervisor, which launches them again after a crash, reads the servers' journals and sends signals.

    servers    each when it is due; the others' clock starts with the first
    clients    each as soon as its server listens
    faults     each when it is due
    the end    SIGINT to the servers: one last round, all clients get it and end; earlier where
               clients die of one error again and again, or where servers end by themselves
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsl_async.cluster.supervisor import ChildExited, ChildStarted, Deaths, Supervisor
from fsl_async.errors import ExitCode, FslError, UsageError
from fsl_async.files.files import make_folder
from fsl_async.observe.clients import News
from fsl_async.observe.journal import JournalReader
from fsl_async.tools.chaos.report import KILL, Recovery
from fsl_async.tools.demo.scenario import Played, Scenario

if TYPE_CHECKING:
    from fsl_async.observe.run_state import RunState
    from fsl_async.tools.demo.scenario import Stage


def make_run_dir(run_dir: Path | None, say: Callable[[str], None]) -> Path:
    """Create `run_dir`, or a new folder below runs/; where that cannot be written, a temporary one.

    say: takes a line about a temporary one. Raises UsageError when `run_dir` cannot be created.
    """
    if run_dir is not None:
        if (run_dir / "ledger.jsonl").exists():
            raise UsageError(f"--run-dir {run_dir} holds a run already; give a new directory")
        try:
            make_folder(run_dir)
        except OSError as error:
            raise UsageError(f"--run-dir {run_dir}: {error.strerror}") from None
        return run_dir.resolve()
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    for number in range(100):
        chosen = Path("runs") / (f"{name}-{number}" if number else name)
        try:
            make_folder(chosen, exist_ok=False)
        except FileExistsError:
            continue
        except OSError:
            break
        return chosen
    made = Path(tempfile.mkdtemp(prefix="fsl-demo-"))
    say(f"cannot write here, so the run is kept in {made}")
    return made


HOLD_S = 2.0
"""How long a news line is held back: the journal, up to a second late, may have earlier ones."""

_TICK_S = 0.1


class Runner:
    """Plays one scenario; call `play`. show: takes the state of the first server, and news."""

    def __init__(
        self,
        scenario: Scenario,
        stage: Stage,
        show: Callable[[RunState, Sequence[News]], None],
    ) -> None:
        self.scenario = scenario
        self.played = Played(scenario, created=stage.begun)
        self._readers = {
            node.name: JournalReader(node.run_dir / node.journal) for node in scenario.servers
        }
        self._stop, self._show = stage.stop, show
        self._waiting = list(scenario.nodes)
        self._due = list(scenario.faults)
        self._listens_by: dict[str, float] = {}
        self._news: list[News] = []
        self._deaths = Deaths()
        self._ended: set[str] = set()
        self._refused: FslError | None = None
        self._ending = self._over = False

    async def play(self) -> Played:
        """Play it to its end; no child process remains.

        Raises FslError for a user's mistake, and where nodes died instead of training.
        """
        played = self.played
        children = Supervisor(
            log_path=self.scenario.chosen.run_dir / self.scenario.log,
            on_line=self._line,
            on_change=self._changed,
            rules=self.scenario.rules,
        )
        async with children:
            try:
                await self._run(children)
            finally:
                self._over = True
                if not self._may_continue():
                    await children.stop(grace_s=0.0)
        if self._refused is not None:
            raise self._refused
        played.problems += self._deaths.lines()
        if self._deaths and not self.scenario.is_begun(played) and not self._stop.requested:
            raise FslError("; ".join(played.problems), ExitCode.BUG)
        return played

    # --- the schedule ---

    async def _run(self, children: Supervisor) -> None:
        scenario, played = self.scenario, self.played
        played.begun = time.time()
        for state in played.states.values():
            state.node.started_at = played.begun  # one clock for lines, summary and journals
        while self._may_continue() and not (
            scenario.is_over(played) or self._is_hopeless() or self._ended.issuperset(self._readers)
        ):
            self._start_nodes(children)
            late = [name for name, limit in self._listens_by.items() if time.time() > limit]
            if late:
                limit = f"{scenario.listen_s:g} s"
                played.problems.append(f"{_what(late[0])} did not listen within {limit}")
                break
            await self._tick()
            self._inject(children)
        await self._end(children)
        self._read_journals(hold_s=0.0)

    def _start_nodes(self, children: Supervisor) -> None:
        """Start the nodes that are due."""
        places, addresses = self.scenario.chosen.places, self.played.addresses
        for node in list(self._waiting):
            address = addresses.get(node.at, "")
            if node.role == "client" and address:
                address = places.dialed(node.name, address)
            elif node.role != "client" and node.when(self.played):
                self._listens_by[node.name] = time.time() + self.scenario.listen_s
            else:
                continue
            self._waiting.remove(node)
            children.start(node.child(places, address))

    def _inject(self, children: Supervisor) -> None:
        for fault in [one for one in self._due if one.when(self.played)]:
            begun = time.time()
            done = fault.what(children, fault.whom)
            if done:
                self._due.remove(fault)
                self.played.faults.append(Recovery(KILL, fault.whom, begun))
                self._report("killed", done, fault.whom)

    def _is_hopeless(self) -> bool:
        """Whether the clients of a server only die, each of one error."""
        teams: dict[str, list[str]] = {}
        for node in self.scenario.clients:
            teams.setdefault(node.at, []).append(node.name)
        return any(map(self._deaths.are_hopeless, teams.values()))

    async def _end(self, children: Supervisor) -> None:
        self._ending = True
        if self._stop.requested and not self.scenario.drain_s:
            return
        begun = [node.name for node in self.scenario.nodes if node not in self._waiting]
        servers = [name for name in self._readers if name in begun]
        goes_on = not self._ended.issuperset(servers) and not self._is_hopeless()
        if goes_on and not self._stop.requested:
            self._report("ending", "the time is over: one last round, then all nodes end")
        # A machine that starts torch slowly does the last round slowly, too.
        drain_s = self.scenario.drain_s + (self.played.joined_s or 0.0)
        stops = asyncio.gather(
            *(children.stop_child(name, drain_s, signal.SIGINT) for name in servers)
        )
        await self._until(stops.done, drain_s + 1.0)
        if not self._stop.hard:
            await stops
            is_empty = lambda: all(children.pid(name) is None for name in begun)  # noqa: E731
            await self._until(is_empty, self.scenario.leave_s)
            self.played.late = [name for name in begun if children.pid(name) is not None]
        await children.stop(0.0 if self._stop.hard else 3.0)
        await stops

    # --- the journals ---

    def _may_continue(self) -> bool:
        return not self._stop.requested and self._refused is None

    async def _until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        """Wait until `is_done()`, at most `limit_s`, or until an error or the user ends it.

        The user's first request is that of a drained end, where the scenario has one.
        """
        deadline = time.monotonic() + limit_s
        while not is_done() and time.monotonic() < deadline and self._refused is None:
            if self._stop.hard or (self._stop.requested and not self.scenario.drain_s):
                break
            await self._tick()

    async def _tick(self) -> None:
        await asyncio.sleep(_TICK_S)
        self._read_journals()

    def _read_journals(self, hold_s: float = HOLD_S) -> None:
        """Read new lines of the journals and show the news, in order of time."""
        played = self.played
        for name, reader in self._readers.items():
            state = played.states[name]
            with contextlib.suppress(FileNotFoundError):
                for line in reader.read():
                    self._news += [
                        one for one in state.apply(line) if self.scenario.shows(name, one)
                    ]
                    self.scenario.sees(name, line)
                    for fault in played.faults:
                        fault.see(line, state)
        if played.joined_s is None and played.state.ps.version >= 0:
            played.joined_s = played.elapsed()
        now = time.time()
        self._news.sort(key=lambda one: one.t)
        ripe = [one for one in self._news if one.t <= now - hold_s]
        self._show(played.state, ripe)
        self._news = self._news[len(ripe) :]

    def _report(self, kind: str, text: str, about: str = "", level: str = "info") -> None:
        news = News(time.time(), kind, text, about, level)
        self.played.state.news.append(news)
        self._news.append(news)

    # --- the children ---

    def _line(self, name: str, line: str) -> None:
        record: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "listening":
            role = record.get("role", "ps")
            address = self.scenario.chosen.places.listening(role, str(record.get("address")))
            if role == "ps":
                self.played.addresses[name] = address
                self._listens_by.pop(name, None)
            return
        back = self.scenario.reads(self.played, name, line)
        if back:
            self._report("caught up", back, name)
        if record and "event" not in record:
            self.played.printed.setdefault(name, []).append(record)

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        name = change.name
        if isinstance(change, ChildStarted):
            if change.launch > 1:
                self.played.launched[name] = round(self.played.elapsed(), 1)
                text = f"the supervisor launched {name} again (process {change.pid})"
                self._report("launched", text, name)
            return
        if change.relaunch_in_s is None:
            self._ended.add(name)
        if self._stop.requested or self._over:
            return
        failure = self.scenario.fails(change)
        if failure is not None:
            self._refused = self._refused or failure
            return
        if not self._ending:
            self._died(change)
        elif name in self._readers and change.code == -signal.SIGKILL:
            text = f"{_what(name)} did not end after the last round, and was killed"
            self.played.problems.append(text)

    def _died(self, change: ChildExited) -> None:
        """A node ended during the run. A fault is no death, nor is another's SIGKILL to a client:
        the supervisor launches it again.
        """
        name, is_server = change.name, change.name in self._readers
        was_killed = change.code == -signal.SIGKILL and not (
            is_server and self.played.fault(name) is None
        )
        if change.code == ExitCode.DONE or was_killed:
            return
        if is_server and self.played.fault(name) is not None and change.relaunch_in_s is not None:
            self._deaths.add(change)  # it may fail at its relaunch, and be launched once more
        elif change.code == ExitCode.BAD_INPUT:
            # A new launch would fail again: the child's error line is the scenario's error.
            error = change.error or f"{name} ended ({change.why})"
            self._refused = self._refused or FslError(error)
        elif is_server:
            text = f"{_what(name)} ended too early ({change.why}): {change.error}"
            self._refused = FslError(text, ExitCode.BUG)
        else:
            self._deaths.add(change)
            self.played.lost += [name] if name in self._ended else []
            text = f"{name} ended ({change.why}): {change.error}"
            self._report("crashed", text, name, "warning")


def _what(server: str) -> str:
    """A server's name in sentences."""
    return "the parameter server" if server == "server" else server
