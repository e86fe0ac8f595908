"""Runs child processes on this machine, collects their output, relaunches them after crashes.

This is the asyncio shell around `restarts`, one task for each child. Every child leads its own
process group: Ctrl-C in the terminal reaches only the supervisor, which then stops the children in
order, and a killed child's own children are killed with it. On Linux children die with the
supervisor, even when SIGKILL ends it: a short trampoline sets PR_SET_PDEATHSIG (prctl(2)) and then
executes the child's program. The signal is sent when the *thread* that launched the child ends, so
the loop should run in the main thread.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self, TextIO

from attrs import field, frozen

from fsl_async.cluster.restarts import ALIKE, End, RestartRules, Restarts, State, Wait
from fsl_async.errors import ExitCode, one_line
from fsl_async.files.files import make_folder, opener

_MAX_LINE_BYTES = 1 << 16
_MAX_SHOWN = 500
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(print(f"error: {sys.argv[2]}: {error.strerror}", file=sys.stderr) or 2)
"""


@frozen
class Child:
    """A program to run. `env` is added to this process's environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(factory=dict)
    cwd: Path | None = None


@frozen
class ChildStarted:
    """A child process runs. `launch` counts from 1."""

    name: str
    pid: int
    launch: int


@frozen
class ChildExited:
    """A child process exited.

    code: negative for a signal.
    seconds: how long it ran.
    relaunch_in_s: None when it is not launched again.
    why: the exit code or signal in words, and why it is not launched again.
    error: its last error line without "error:"; without one the last line that it printed, if it
        failed by itself. In one line, at most `_MAX_SHOWN` characters.
    """

    name: str
    code: int
    seconds: float
    relaunch_in_s: float | None
    why: str
    error: str = ""


class _Running:
    """A child's task and its present process."""

    def __init__(self, child: Child, rules: RestartRules) -> None:
        self.child = child
        self.machine = Restarts(rules)
        self.task: asyncio.Task[int] | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.stop = asyncio.Event()
        self.last_line = self.last_error = ""


class Supervisor:
    """Use as `async with`: leaving the block stops all children. For the loop's thread.

    `on_line(name, line)` gets every line that a child prints on standard output or error, without
    its line break; the file `log_path` gets it as `name | line`. `on_change` gets ChildStarted and
    ChildExited.
    """

    def __init__(
        self,
        *,
        log_path: Path | None = None,
        on_line: Callable[[str, str], None] = lambda _name, _line: None,
        on_change: Callable[[ChildStarted | ChildExited], None] = lambda _change: None,
        rules: RestartRules | None = None,
    ) -> None:
        self._on_line = on_line
        self._on_change = on_change
        self._rules = RestartRules() if rules is None else rules
        self._children: dict[str, _Running] = {}
        self._log: TextIO | None = None
        if log_path is not None:
            make_folder(log_path.parent)
            # Path.open takes no opener; `stop` closes the file.
            self._log = open(  # noqa: SIM115
                log_path, "a", encoding="utf-8", errors="replace", opener=opener
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self, child: Child) -> None:
        """Launch a child. Raises ValueError when one of its name has not ended."""
        known = self._children.get(child.name)
        if known is not None and known.machine.state is not State.ENDED:
            raise ValueError(f"a child {child.name!r} runs already")
        running = self._children[child.name] = _Running(child, self._rules)
        running.task = asyncio.create_task(self._run(running), name=f"child {child.name}")

    def pid(self, name: str) -> int | None:
        """Return the process id of a child, or None when it does not run."""
        process = self._children[name].process
        return None if process is None else process.pid

    def launches(self, name: str) -> int:
        """Return the number of launches of a child."""
        return self._children[name].machine.launches

    def kill(self, name: str, number: int = signal.SIGKILL) -> bool:
        """Send a signal to a child, which is relaunched as after a crash.

        Returns False when it does not run.
        """
        process = self._children[name].process
        if process is None or process.returncode is not None:
            return False
        process.send_signal(number)
        return True

    async def wait(self) -> dict[str, int]:
        """Wait until every child has ended for good; returns their last exit codes by name."""
        tasks = {name: one.task for name, one in self._children.items() if one.task is not None}
        await asyncio.gather(*tasks.values())
        return {name: task.result() for name, task in tasks.items()}

    async def stop_child(
        self, name: str, grace_s: float = 10.0, number: int = signal.SIGTERM
    ) -> None:
        """End one child for good: by `number`, and by SIGKILL after `grace_s` seconds."""
        await self._stop([self._children[name]], grace_s, number)

    async def stop(self, grace_s: float = 10.0) -> None:
        """End all children, by SIGTERM, after `grace_s` seconds by SIGKILL, and close the log.

        May be called again.
        """
        await self._stop(list(self._children.values()), grace_s)
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _stop(
        self, children: list[_Running], grace_s: float, number: int = signal.SIGTERM
    ) -> None:
        for one in children:
            one.machine.stop()
            one.stop.set()
            _signal_group(one.process, number)
        tasks = [one.task for one in children if one.task is not None]
        if not tasks:
            return
        _, overdue = await asyncio.wait(tasks, timeout=grace_s)
        while overdue:
            # Repeated, because a launch may have been under way.
            for one in children:
                _signal_group(one.process, signal.SIGKILL)
            _, overdue = await asyncio.wait(overdue, timeout=0.2)
        for task in tasks:
            # Raises a callback's error.
            task.result()

    async def _run(self, running: _Running) -> int:
        """Run one child until it has ended for good; returns its last exit code."""
        machine = running.machine
        code = int(ExitCode.DONE)
        while machine.launch(start := time.monotonic()):
            code = await self._run_once(running)
            now = time.monotonic()
            decided = machine.exited(code, now)
            self._on_change(
                ChildExited(
                    running.child.name,
                    code,
                    now - start,
                    None if isinstance(decided, End) else decided.seconds,
                    _describe(code) + (f": {decided.why}" if isinstance(decided, End) else ""),
                    running.last_error or (running.last_line if code > 0 else ""),
                )
            )
            if isinstance(decided, Wait):
                # A stop ends the machine meanwhile, which then launches no more.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(running.stop.wait(), decided.seconds)
        return code

    async def _run_once(self, running: _Running) -> int:
        """Run the process once, from launch to exit; returns its exit code."""
        child = running.child
        running.last_line = running.last_error = ""
        # With asyncio's own pipe `wait` would hang while a grandchild holds the other end.
        read_end, write_end = os.pipe()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        pump = asyncio.create_task(self._pump(running, reader), name=f"output {child.name}")
        pump.add_done_callback(lambda task: _kill_unread(task, running))
        try:
            try:
                running.process = process = await _spawn(child, write_end)
            except OSError as error:
                self._line(running, f"error: cannot start {child.argv[0]}: {error.strerror}")
                lasting = isinstance(
                    error, (FileNotFoundError, PermissionError, NotADirectoryError)
                )
                return int(ExitCode.BAD_INPUT if lasting else ExitCode.BUG)
            finally:
                os.close(write_end)
            try:
                self._on_change(ChildStarted(child.name, process.pid, running.machine.launches))
                if running.stop.is_set():
                    _signal_group(process, signal.SIGTERM)
                if pump.done():
                    _kill_unread(pump, running)
                return await process.wait()
            finally:
                _signal_group(process, signal.SIGKILL)
                if process.returncode is None:
                    await asyncio.shield(process.wait())
                running.process = None
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pump, 1.0)
            transport.close()

    async def _pump(self, running: _Running, reader: asyncio.StreamReader) -> None:
        rest = b""
        while data := await reader.read(_MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._line(running, line.decode(errors="replace").rstrip("\r"))
        if rest:
            self._line(running, rest.decode(errors="replace"))

    def _line(self, running: _Running, line: str) -> None:
        name = running.child.name
        if line.strip():
            running.last_line = one_line(line)[:_MAX_SHOWN]
            running.last_error = one_line(error_of(line))[:_MAX_SHOWN] or running.last_error
        if self._log is not None:
            # A full disk must not end the children.
            with contextlib.suppress(OSError):
                self._log.write(f"{name} | {line}\n")
                self._log.flush()
        self._on_line(name, line)


async def _spawn(child: Child, write_end: int) -> asyncio.subprocess.Process:
    argv = list(child.argv)
    env = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(child.env)
    if sys.platform == "linux":
        argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=write_end,
        stderr=write_end,
        env=env,
        cwd=child.cwd,
        start_new_session=True,
    )


def _kill_unread(pump: asyncio.Task[None], running: _Running) -> None:
    """Kill a child whose output is not read any more because `on_line` raised.

    Otherwise it would block on a full pipe for ever.
    """
    if not pump.cancelled() and pump.exception() is not None:
        _signal_group(running.process, signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process | None, number: int) -> None:
    """Send a signal to a child's process group, if it has one."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def error_of(line: str) -> str:
    """The message of a child's error line or error object; "" for any other line."""
    if line.startswith("error: "):
        return line.removeprefix("error: ")
    if not line.startswith("{"):
        return ""
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    return str(found.get("error", "")) if isinstance(found, dict) else ""


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Deaths:
    """Collects ends of child processes by their last error; false while there are none."""

    def __init__(self) -> None:
        self._names: dict[str, Counter[str]] = {}
        """Ends by error, then by child."""
        self._last: dict[str, tuple[str, int]] = {}
        """The last error of each child, and how often in a row it ended with that."""
        self._lost: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, end: ChildExited) -> None:
        """Count an end."""
        error = end.error or end.why
        self._names.setdefault(error, Counter())[end.name] += 1
        before, times = self._last.get(end.name, ("", 0))
        self._last[end.name] = error, times + 1 if error == before else 1
        if end.relaunch_in_s is None:
            self._lost.add(end.name)

    def are_hopeless(self, names: Iterable[str]) -> bool:
        """Whether each of these ended for good, or `ALIKE` times in a row with one error."""
        return all(
            name in self._lost or self._last.get(name, ("", 0))[1] >= ALIKE for name in names
        )

    def lines(self) -> list[str]:
        """A line for each error, the most frequent first: who ended, how often, with what."""
        ordered = sorted(self._names.items(), key=lambda item: -item[1].total())
        return [
            f"{', '.join(sorted(names))} ended"
            + (f" {names.total()} times" if names.total() > 1 else "")
            + f": {error}"
            for error, names in ordered
        ]
