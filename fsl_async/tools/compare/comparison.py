"""Runs the methods one after the other: starts the nodes, collects their reports, ends them."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fsl_async.config.rules import is_own
from fsl_async.errors import StopError, TaskError, one_line
from fsl_async.files.private_files import make_folder
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare import nodes
from fsl_async.tools.compare.choices import Choices
from fsl_async.tools.compare.outcome import Gathered, Outcome, Point, is_reached
from fsl_async.tools.compare.places import Loopback
from fsl_async.tools.compare.processes import DRAINED, Emit

START_S = 120.0
END_S = 30.0
"""Seconds that nodes have to end after the parameter server's end, or after they were asked to
end.
"""
_LOOK_S = 0.2
_NODES = "fsl_async.tools.compare.nodes"


class _Node:
    """A node in a thread of this process, or in its own process started with a place's prefix."""

    def __init__(self, name: str, put: Callable[[Mapping[str, Any]], None], folder: Path) -> None:
        self.name = name
        self._folder = folder
        self.error: BaseException | None = None
        self._put = put
        self._stopper = Stopper()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread

    def start(
        self,
        job: Callable[[Stopper], None],
        prefix: tuple[str, ...] | None,
        words: tuple[str, str],
        given: Mapping[str, Any],
    ) -> None:
        """Run `job` in a thread, or with a `prefix` a process of `words`, (module, role)."""
        if prefix is None:
            target = lambda: self._here(job)  # noqa: E731
        else:
            argv = [
                *prefix,
                sys.executable,
                "-P",
                "-m",
                *words,
                json.dumps(given),
            ]
            make_folder(self._folder)
            with (self._folder / f"{self.name}.err").open("wb") as err:
                self._process = subprocess.Popen(  # noqa: S603 - ourselves
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                    process_group=0,  # a terminal's Ctrl-C is this process's, which ends the nodes
                )
            target = self._there
        self._thread = threading.Thread(target=target, name=self.name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def drain(self) -> None:
        """Ask for an orderly end."""
        self._stopper.request(reason=DRAINED)
        self.tell("drain")

    def tell(self, line: str) -> None:
        """Send a process a line; nothing where it is none, or has ended."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()

    def stop(self) -> None:
        """Ask for an immediate end."""
        self._stopper.request(hard=True, reason="asked to stop")
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def join(self, deadline: float) -> None:
        """Wait for the node's end; kill a process that does not end."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is not None and self._thread.is_alive():
            self._process.kill()
            self._thread.join(5.0)

    def _here(self, job: Callable[[Stopper], None]) -> None:
        try:
            job(self._stopper)
        except StopError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            self.error = error
        self._put({"event": "ended", "node": self.name})

    def _there(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            record: dict[str, Any] = (
                json.loads(line) if line.startswith("{") else {"event": "line", "text": line}
            )
            if record.get("event") == "error":
                self.error = TaskError(str(record["text"]), int(record["exit_code"]))
            self._put(record)
        if process.wait() and self.error is None:
            self.error = TaskError(self._verdict(process.returncode))
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not read
                pipe.close()
        self._put({"event": "ended", "node": self.name})

    def _verdict(self, code: int) -> str:
        """How the process ended, with the last line of its standard error."""
        path = self._folder / f"{self.name}.err"
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = f": {one_line(lines[-1])}" if lines else ""
        return f"{self.name} ended with {code}{said}; all that it wrote: {path}"


class Compared(Protocol):
    """What is common to the runs of a comparison."""

    @property
    def names(self) -> tuple[str, ...]:
        """The clients."""

    @property
    def rounds(self) -> int:
        """Rounds of each run."""

    @property
    def stops_at_target(self) -> bool:
        """Whether a run ends at the target."""

    def turns(self, method: str) -> int:
        """Versions of a round."""


class Comparison:
    """Compares methods, one `run` after the other. `say` is called with lines for people."""

    def __init__(
        self,
        choices: Choices,
        folder: Path,
        make_places: Callable[[], Loopback],
        *,
        say: Callable[[str], None],
        stop: Stopper,
    ) -> None:
        self.choices, self.folder = choices, folder
        self._make_places, self._say, self._stop = make_places, say, stop

    def run(self, method: str) -> Outcome:
        """Run a method to its last round or to the target. Raises the error of a node that failed,
        and the stopper's.
        """
        places = self._make_places()
        run = SplitRun(
            self.choices, method, self.folder / method, places, say=self._say, stop=self._stop
        )
        with contextlib.closing(places), contextlib.closing(run):
            run.play()
            points = run.gathered.points()
            return Outcome(method, points, self.choices.target, run.problem)


class Run:
    """One method's nodes."""

    end_s = END_S

    def __init__(
        self,
        compared: Compared,
        method: str,
        folder: Path,
        places: Loopback,
        *,
        say: Callable[[str], None],
        stop: Stopper,
    ) -> None:
        self.method, self.places, self.folder = method, places, folder
        self.gathered = Gathered(compared.turns(method))
        self.problem = ""
        self.address = ""
        """Where clients reach the parameter server."""
        self._compared, self._say, self._stop = compared, say, stop
        self._queue: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._nodes: list[_Node] = []
        self._joined: set[str] = set()
        self._unsaid: list[int] = []
        """Versions that are scored, whose line is not printed."""
        self._is_draining = False

    def start_server(self) -> None:
        """Start the parameter server, and other servers that the method needs."""
        raise NotImplementedError

    def start_client(self, name: str) -> None:
        """Start a client."""
        raise NotImplementedError

    def line(self, point: Point) -> str:
        """Of a point, for people."""
        raise NotImplementedError

    def is_at_target(self, point: Point) -> bool:
        """Whether a run may stop here."""
        raise NotImplementedError

    def play(self) -> None:
        """Run the nodes to their end. Raises the error of one that failed, and the stopper's."""
        self.start_server()
        self._until(lambda: bool(self.address), "the parameter server did not listen")
        for name in self._compared.names:  # one by one: shards go by the order of arrival
            self.start_client(name)
            self._until(lambda name=name: name in self._joined, f"{name} did not join")  # type: ignore[misc]
        self._until(lambda: not self._nodes[0].is_running, "", limit_s=None)
        self._until(lambda: not any(n.is_running for n in self._nodes), "", limit_s=self.end_s)
        self._say_rounds(())

    def close(self) -> None:
        """End all nodes."""
        for node in self._nodes:
            if node.is_running:
                node.stop()
        deadline = time.monotonic() + END_S
        for node in self._nodes:
            node.join(deadline)

    def start(
        self,
        name: str,
        words: tuple[str, str],
        job: Callable[[Emit, Stopper], None],
        given: Mapping[str, Any],
        prefix: tuple[str, ...] | None,
    ) -> None:
        """Start a node, as `_Node.start` does. The first one is the parameter server."""
        node = _Node(name, self._queue.put, self.folder)
        self._nodes.append(node)
        node.start(lambda stop: job(self._queue.put, stop), prefix, words, given)

    def tell_server(self, line: str) -> None:
        """Send the parameter server a line, where it is a process."""
        self._nodes[0].tell(line)

    def _until(
        self, ready: Callable[[], bool], problem: str, *, limit_s: float | None = START_S
    ) -> None:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            self._take_all()
            for node in self._nodes:
                if node.error is not None:
                    raise node.error
            if ready():
                self._take_all()
                return
            if self._stop.requested:
                raise self._stop.error(f"the comparison was ended by {self._stop.reason}")
            if deadline is not None and time.monotonic() > deadline:
                if problem:
                    raise TaskError(f"{self.method}: {problem} within {limit_s:.0f} s")
                self.problem = self.problem or "not every node ended by itself"
                return
            try:
                self.take(self._queue.get(timeout=_LOOK_S))
            except queue.Empty:
                continue

    def _take_all(self) -> None:
        while True:
            try:
                self.take(self._queue.get_nowait())
            except queue.Empty:
                return

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a report of a node."""
        if self.gathered.take(record):
            if record["event"] == "scored":
                self._scored(record)
            self._say_rounds(self._compared.names)
        elif record["event"] == "listening":
            reached = self.places.listening(record["role"], record["address"])
            if record["role"] == "ps":
                self.address = reached
        elif record["event"] == "joined":
            self._joined.add(str(record["client"]))
        elif record["event"] == "failed":
            self.problem = str(record["text"])
        else:
            self.took(record)

    def took(self, record: Mapping[str, Any]) -> None:
        """Take a report that only this kind of run has."""

    def _scored(self, record: Mapping[str, Any]) -> None:
        point = self._point(int(record["version"]))
        self._unsaid.append(int(record["version"]))
        if self._compared.stops_at_target and self.is_at_target(point) and not self._is_draining:
            self._is_draining = True
            self._nodes[0].drain()

    def _point(self, version: int) -> Point:
        at = version // self.gathered.turns
        return next(p for p in self.gathered.points() if p.round == at)

    def _say_rounds(self, clients: Iterable[str]) -> None:
        """Print the lines of the rounds that all `clients` have reported, oldest first."""
        while self._unsaid and self.gathered.is_complete(self._unsaid[0], clients):
            point = self._point(self._unsaid.pop(0))
            self._say(
                f"{self.method}: round {point.round} of {self._compared.rounds}, {self.line(point)}"
            )


class SplitRun(Run):
    """The nodes of a method of split learning."""

    def __init__(self, choices: Choices, *more: Any, **rest: Any) -> None:
        super().__init__(choices, *more, **rest)
        self._choices = choices

    def start_server(self) -> None:
        """Start the parameter server, and the split server in its loop."""
        choices, listen = self._choices, self.places.listen()
        given = {
            "choices": choices.as_dict(),
            "method": self.method,
            "folder": str(self.folder),
            "listen": listen,
        }

        def job(emit: Emit, stop: Stopper) -> None:
            nodes.serve(choices, self.method, self.folder, emit, stop, listen)

        self.start("server", (_NODES, "server"), job, given, self.places.prefix("server"))

    def start_client(self, name: str) -> None:
        """Start a client on its part of the data."""
        choices = self._choices
        own = {"model": choices.model, "auxiliary": choices.auxiliary}
        code = {key: value for key, value in own.items() if is_own(value)}
        given: dict[str, Any] = {"address": self.address, "name": name, "data": choices.data}

        def job(emit: Emit, stop: Stopper) -> None:
            nodes.join(self.address, name, emit, stop, data=choices.data, code=code)

        given["code"] = code
        self.start(name, (_NODES, "client"), job, given, self.places.prefix(name))

    def line(self, point: Point) -> str:
        """Accuracy and costs so far."""
        return f"accuracy {point.accuracy:.1%}, {point.bytes / 1e6:,.2f} MB, {point.seconds:,.1f} s"

    def is_at_target(self, point: Point) -> bool:
        """Whether the accuracy is that of the target."""
        return point.accuracy is not None and is_reached(self._choices.target, point.accuracy)
