"""Starts, feeds and kills the helper that adds up what groups gained. Never imports torch.

The helper is `fsl_async.nodes.reduction_helper`; its frames are described in its `pipes`. It is
started at the first poll, because importing torch takes seconds, and kept. If it dies, the attempt
fails, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from attrs import asdict, frozen

from fsl_async.nodes.reduction_helper.pipes import Frames, pack

_READ_BYTES = 1 << 16
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@frozen
class ReductionJob:
    """One reduction, for `pipes`."""

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
    """The helper of one parameter server. All methods belong to the loop's thread.

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
        self._starting: asyncio.Task[None] | None = None
        self._waiting: list[bytes] = []
        self._attempt = 0
        """The one under way; 0: none."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The helper's process; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the helper, if it does not run."""
        if self._starting is None and not self._is_closed:
            self._starting = asyncio.get_running_loop().create_task(self._run())

    def reduce(self, job: ReductionJob) -> None:
        """Begin a reduction; ends in `on_done` or `on_failed`, unless it is killed."""
        self._attempt = job.attempt
        self.start()
        self._send({"do": "reduce", **asdict(job, value_serializer=_plain)})

    def address(self, key: str, blob: bytes) -> None:
        """Give the reduction the address of another rank."""
        self._send({"do": "address", "attempt": self._attempt, "key": key, "blob": blob})

    def kill(self) -> None:
        """End the reduction; the helper stays."""
        self._attempt = 0
        self._send({"do": "kill"})

    def _send(self, frame: dict[str, object]) -> None:
        data = pack(frame)
        if self._process is None:
            self._waiting.append(data)
            return
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def _run(self) -> None:
        """Start the helper and read its frames until it ends."""
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
            self._starting = None
            self._fail(f"the helper cannot be started: {error.strerror}")
            return
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.writelines(self._waiting)
        self._waiting.clear()
        frames = Frames()
        try:
            while data := await process.stdout.read(_READ_BYTES):
                for frame in frames.add(data):
                    self._take(frame)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            self._process = self._starting = None
        if not self._is_closed:
            self._fail("the helper ended")

    def _take(self, frame: dict[str, object]) -> None:
        if frame["is"] == "ready" or frame["attempt"] != self._attempt or not self._attempt:
            return
        match frame:
            case {"is": "address", "key": str(key), "blob": bytes(blob)}:
                self._on_address(self._attempt, key, blob)
            case {"is": "done"}:
                attempt, self._attempt = self._attempt, 0
                self._on_done(attempt)
            case {"is": "failed", "reason": str(reason)}:
                self._fail(reason)

    def _fail(self, reason: str) -> None:
        attempt, self._attempt = self._attempt, 0
        if attempt:
            self._on_failed(attempt, reason)

    async def aclose(self) -> None:
        """End the helper, and its child with it."""
        self._is_closed = True
        task = self._starting
        if task is None:
            return
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # it kills its child, and ends
            _, late = await asyncio.wait([task], timeout=2.0)
            if not late:
                return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
