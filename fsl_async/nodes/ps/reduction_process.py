"""Starts, feeds and kills the processes that add up what groups gained. Never imports torch.

Each reduction of a global round has a process (`fsl_async.nodes.reduction_helper`). Importing torch
takes seconds, so the first one is started at the first poll, and the next one as soon as a
reduction has ended, however it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
from attrs import asdict, define, field, frozen

_READ_BYTES = 1 << 16
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@frozen
class ReductionJob:
    """One reduction, for `fsl_async.nodes.reduction_helper`."""

    attempt: int
    rank: int
    weights: tuple[float, ...]
    piece_values: int
    base: Path
    cut: Path
    out: Path
    skip: int
    values: int
    host: str
    timeout_s: float
    bytes_per_s: float = 0.0
    residual: Path | None = None
    """What coding has lost of global weights; None: nothing, or another rank adds it."""


def _plain(_: object, __: object, value: object) -> object:
    """Return a value as msgpack takes it: a path as text, no path as empty text."""
    if value is None:
        return ""
    return str(value) if isinstance(value, Path) else value


@define(eq=False)
class _Helper:
    """One process. waiting: what is sent to it once it is started."""

    process: asyncio.subprocess.Process | None = None
    is_killed: bool = False
    waiting: list[bytes] = field(factory=list)

    def send(self, frame: dict[str, Any]) -> None:
        self.waiting.append(msgpack.packb(frame))
        self.flush()

    def flush(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.writelines(self.waiting)
            self.waiting.clear()

    def kill(self) -> None:
        self.is_killed = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class ReductionProcess:
    """The reductions of one parameter server. All methods belong to the loop's thread.

    on_address: takes attempt, key and blob, for the other ranks. on_done: takes an attempt.
    on_failed: takes an attempt and the reason.
    """

    def __init__(
        self,
        on_address: Callable[[int, str, bytes], None],
        on_done: Callable[[int], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        self._on_address, self._on_done, self._on_failed = on_address, on_done, on_failed
        self._attempt = 0
        self._current: _Helper | None = None
        """The process of the attempt under way."""
        self._next: _Helper | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process of the reduction under way; None: there is none."""
        helper = self._current
        return None if helper is None or helper.process is None else helper.process.pid

    def start(self) -> None:
        """Start the process of the next reduction, if there is none."""
        if self._next is None and not self._is_closed:
            self._next = _Helper()
            task = asyncio.get_running_loop().create_task(self._run(self._next))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def reduce(self, job: ReductionJob) -> None:
        """Begin a reduction; ends in `on_done` or `on_failed`, unless it is killed."""
        self.kill()
        self.start()
        self._attempt, self._current, self._next = job.attempt, self._next, None
        if self._current is not None:
            self._current.send(asdict(job, value_serializer=_plain))

    def address(self, key: str, blob: bytes) -> None:
        """Give the reduction the address of another rank."""
        if self._current is not None:
            self._current.send({"key": key, "blob": blob})

    def kill(self) -> None:
        """End the reduction, if one is under way."""
        if self._current is not None:
            self._current.kill()
            self._current = None
            self.start()

    async def _run(self, helper: _Helper) -> None:
        """Start a process and read its reports until it ends."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "fsl_async.nodes.reduction_helper",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C in a terminal is for the parameter server
            )
        except OSError as error:
            self._ended(helper, f"its process cannot be started: {error.strerror}")
            return
        helper.process = process
        assert process.stdout is not None
        try:
            if helper.is_killed:
                helper.kill()
            helper.flush()
            frames = msgpack.Unpacker()
            while data := await process.stdout.read(_READ_BYTES):
                frames.feed(data)
                for frame in frames:
                    self._take(helper, frame)
        except BaseException:  # the parameter server ends
            helper.kill()
            await process.wait()
            raise
        self._ended(helper, f"its process ended ({await process.wait()})")

    def _take(self, helper: _Helper, frame: dict[str, Any]) -> None:
        if helper is not self._current:
            return
        match frame:
            case {"key": str(key), "blob": bytes(blob)}:
                self._on_address(self._attempt, key, blob)
            case {"done": True}:
                self._current = None
                self.start()
                self._on_done(self._attempt)
            case {"reason": str(reason)}:
                self._ended(helper, reason)

    def _ended(self, helper: _Helper, reason: str) -> None:
        if helper is self._next:  # its successor may end the same way, so there is none
            self._next = None
        if helper is self._current:
            self._current = None
            self.start()
            self._on_failed(self._attempt, reason)

    async def aclose(self) -> None:
        """End all processes."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
