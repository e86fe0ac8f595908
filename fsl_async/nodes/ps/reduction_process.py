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
from attrs import asdict, frozen

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
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        """Watches the process of the next reduction, or of the one under way."""
        self._tasks: set[asyncio.Task[None]] = set()
        """This one, and those of processes that are ending."""
        self._waiting: list[bytes] = []
        """For a process that is being started."""
        self._attempt = 0
        """The one under way; 0: none."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process of the next reduction, or of the one under way; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a process, if none waits for its job."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(self._task)
            self._task.add_done_callback(self._tasks.discard)

    def reduce(self, job: ReductionJob) -> None:
        """Begin a reduction; ends in `on_done` or `on_failed`, unless it is killed."""
        self._attempt = job.attempt
        self.start()
        self._send(asdict(job, value_serializer=_plain))

    def address(self, key: str, blob: bytes) -> None:
        """Give the reduction the address of another rank."""
        if self._attempt:
            self._send({"key": key, "blob": blob})

    def kill(self) -> None:
        """End the reduction, if one is under way."""
        self._waiting.clear()
        if self._attempt and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._replace()
        self._attempt = 0

    def _send(self, frame: dict[str, Any]) -> None:
        data = msgpack.packb(frame)
        if self._process is None:
            self._waiting.append(data)
            return
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def _replace(self) -> None:
        """Start the process of the next reduction. The last one ends by itself."""
        self._process = self._task = None
        self.start()

    async def _run(self) -> None:
        """Start a process and read its reports until it ends."""
        task = self._task
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "fsl_async.nodes.reduction_helper",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD},
            )
        except OSError as error:
            self._task = None
            self._waiting.clear()
            self._end(self._on_failed, f"its process cannot be started: {error.strerror}")
            return
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.writelines(self._waiting)
        self._waiting.clear()
        frames = msgpack.Unpacker()
        try:
            while data := await process.stdout.read(_READ_BYTES):
                frames.feed(data)
                for frame in frames:
                    if self._task is task:
                        self._take(frame)
        except BaseException:  # the parameter server ends
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        code = await process.wait()
        if self._task is not task:
            return
        if self._attempt:
            self._replace()
            self._end(self._on_failed, f"its process ended ({code})")
        else:  # it had no job, and another one may end as this one
            self._process = self._task = None

    def _take(self, frame: dict[str, Any]) -> None:
        match frame:
            case {"key": str(key), "blob": bytes(blob)}:
                self._on_address(self._attempt, key, blob)
            case {"done": True}:
                self._replace()
                self._end(self._on_done)
            case {"reason": str(reason)}:
                self._replace()
                self._end(self._on_failed, reason)

    def _end(self, callback: Callable[..., None], *reason: str) -> None:
        attempt, self._attempt = self._attempt, 0
        if attempt:
            callback(attempt, *reason)

    async def aclose(self) -> None:
        """End all processes."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
