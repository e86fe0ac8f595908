"""Runs the methods one after the other: starts the nodes, collects their reports, ends them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsl_async.errors import StopError, TaskError
from fsl_async.files.private_files import make_folder
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare import nodes
from fsl_async.tools.compare.choices import Choices
from fsl_async.tools.compare.outcome import Gathered, Outcome, is_reached
from fsl_async.tools.compare.places import Loopback

START_S = 120.0
END_S = 30.0
"""Seconds that nodes have to end after the parameter server's end, or after they were asked to
end.
"""
_LOOK_S = 0.2


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
        role: str,
        given: Mapping[str, Any],
    ) -> None:
        """Run `job` in a thread, or with a `prefix` a process of `role` with `given`."""
        if prefix is None:
            target = lambda: self._here(job)  # noqa: E731
        else:
            argv = [
                *prefix,
                sys.executable,
                "-P",
                "-m",
                "fsl_async.tools.compare.nodes",
                role,
                json.dumps(given),
            ]
            make_folder(self._folder)
            with (self._folder / f"{self.name}.err").open("wb") as err:
                self._process = subprocess.Popen(  # noqa: S603 - ourselves
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
                )
            target = self._there
        self._thread = threading.Thread(target=target, name=self.name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def drain(self) -> None:
        """Ask for an orderly end."""
        self._stopper.request(reason=nodes.DRAINED)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write("drain\n")
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
        assert process.stdout is not None
        for line in process.stdout:
            record: dict[str, Any] = (
                json.loads(line) if line.startswith("{") else {"event": "line", "text": line}
            )
            if record.get("event") == "error":
                self.error = TaskError(str(record["text"]), int(record["exit_code"]))
            self._put(record)
        if process.wait() and self.error is None:
            self.error = TaskError(f"{self.name} ended with {process.returncode}")
        self._put({"event": "ended", "node": self.name})


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
        run = _Run(self, method, places)
        try:
            return run.play()
        finally:
            run.end()
            places.close()


class _Run:
    """One method's nodes."""

    def __init__(self, contest: Comparison, method: str, places: Loopback) -> None:
        self.choices, self.method, self.places = contest.choices, method, places
        self.folder = contest.folder / method
        self.gathered = Gathered(self.choices.turns(method))
        self._say, self._stop = contest._say, contest._stop  # noqa: SLF001 - one class in two parts
        self._queue: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._nodes: list[_Node] = []
        self._joined: set[str] = set()
        self._address = ""
        self._is_draining = False
        self.problem = ""

    def play(self) -> Outcome:
        """See Comparison.run."""
        choices, listen = self.choices, self.places.listen()
        self._start(
            "server",
            lambda emit, stop: nodes.serve(choices, self.method, self.folder, emit, stop, listen),
            {
                "choices": choices.as_dict(),
                "method": self.method,
                "folder": str(self.folder),
                "listen": listen,
            },
        )
        self._until(lambda: bool(self._address), "the parameter server did not listen")
        for name in choices.names:  # one by one: shards go by the order of arrival
            self._start(
                name,
                lambda emit, stop, name=name: nodes.join(  # type: ignore[misc]
                    self._address, name, emit, stop, data=choices.data
                ),
                {"address": self._address, "name": name, "data": choices.data},
            )
            self._until(lambda name=name: name in self._joined, f"{name} did not join")  # type: ignore[misc]
        self._until(lambda: not self._nodes[0].is_running, "", limit_s=None)
        self._until(lambda: not any(n.is_running for n in self._nodes), "", limit_s=END_S)
        return Outcome(self.method, self.gathered.points(), choices.target, self.problem)

    def end(self) -> None:
        """End all nodes."""
        for node in self._nodes:
            if node.is_running:
                node.stop()
        deadline = time.monotonic() + END_S
        for node in self._nodes:
            node.join(deadline)

    def _start(
        self, name: str, job: Callable[[nodes.Emit, Stopper], None], given: Mapping[str, Any]
    ) -> None:
        node = _Node(name, self._queue.put, self.folder)
        self._nodes.append(node)
        role = "server" if name == "server" else "client"
        node.start(lambda stop: job(self._queue.put, stop), self.places.prefix(name), role, given)

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
                self._take(self._queue.get(timeout=_LOOK_S))
            except queue.Empty:
                continue

    def _take_all(self) -> None:
        while True:
            try:
                self._take(self._queue.get_nowait())
            except queue.Empty:
                return

    def _take(self, record: Mapping[str, Any]) -> None:
        if self.gathered.take(record):
            if record["event"] == "scored":
                self._scored(record)
        elif record["event"] == "listening":
            reached = self.places.listening(record["role"], record["address"])
            if record["role"] == "ps":
                self._address = reached
        elif record["event"] == "joined":
            self._joined.add(str(record["client"]))
        elif record["event"] == "failed":
            self.problem = str(record["text"])

    def _scored(self, record: Mapping[str, Any]) -> None:
        points = self.gathered.points()
        at = int(record["version"]) // self.gathered.turns
        point = next(p for p in points if p.round == at)
        self._say(
            f"{self.method}: round {point.round} of {self.choices.rounds}, accuracy "
            f"{point.accuracy:.1%},"
            f" {point.bytes / 1e6:,.2f} MB, {point.seconds:,.1f} s"
        )
        reached = is_reached(self.choices.target, float(record["accuracy"]))
        if reached and self.choices.stops_at_target and not self._is_draining:
            self._is_draining = True
            self._nodes[0].drain()
