"""The helper itself: it imports torch, then passes frames between the PS and one child at a time.

One thread, because it forks. When standard input ends, because the parameter server has ended in
whatever way, it kills its child and ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from fsl_async.nodes.reduction_helper.pipes import Frames, pack, write_all

_READ_BYTES = 1 << 16


class Parent:
    """Passes frames on. `serve` returns when the parameter server has closed the pipe."""

    def __init__(self, commands: int, reports: int) -> None:
        self._commands, self._reports = commands, reports
        self._child = 0
        self._attempt = 0
        self._line: socket.socket | None = None

    def serve(self) -> None:
        """Serve until the commands end."""
        incoming, outgoing = Frames(), Frames()
        while True:
            sources = [self._commands] + ([] if self._line is None else [self._line.fileno()])
            ready, _, _ = select.select(sources, [], [])
            if self._commands in ready:
                data = os.read(self._commands, _READ_BYTES)
                if not data:
                    self._kill()
                    return
                for frame in incoming.add(data):
                    if frame["do"] == "reduce":
                        outgoing = Frames()
                    self._command(frame)
                continue
            if self._line is not None:
                try:
                    data = self._line.recv(_READ_BYTES)
                except ConnectionError:  # it was killed with frames unread
                    data = b""
                for frame in outgoing.add(data):
                    self._report(frame)
                if not data:
                    self._ended()

    def _command(self, frame: dict[str, Any]) -> None:
        match frame["do"]:
            case "reduce":
                self._kill()
                self._fork(frame)
            case "address" if self._line is not None and frame["attempt"] == self._attempt:
                with suppress(OSError):  # the child has ended; its end comes next
                    self._line.sendall(pack(frame))
            case "kill":
                self._kill()

    def _fork(self, job: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self._attempt = int(job["attempt"])
        child = os.fork()
        if child:
            theirs.close()
            self._child, self._line = child, ours
            return
        code = 1
        try:
            ours.close()
            os.close(self._commands)
            os.close(self._reports)
            from fsl_async.nodes.reduction_helper.reduction import run

            code = run(job, theirs)
        finally:
            os._exit(code)

    def _report(self, frame: dict[str, Any]) -> None:
        write_all(self._reports, pack({**frame, "attempt": self._attempt}))
        if frame["is"] in {"done", "failed"}:
            self._kill()

    def _ended(self) -> None:
        """Report a child that ended without a report."""
        if self._child:
            _, status = os.waitpid(self._child, 0)
            self._child = 0
            why = os.waitstatus_to_exitcode(status)
            self._report({"is": "failed", "reason": f"its process ended ({why})"})

    def _kill(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0


def main() -> None:
    """Import torch, report "ready", and serve on standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the PS
    commands, reports = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a library prints is no frame
    import torch.distributed  # noqa: F401 - a child needs it

    write_all(reports, pack({"is": "ready"}))
    try:
        Parent(commands, reports).serve()
    except BrokenPipeError:
        sys.exit(0)
