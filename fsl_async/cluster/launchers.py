"""Launchers: start a client on some machine. One small interface, three kinds; the launch file
assigns them to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Supervisor
from fsl_async.errors import one_line, printable

ASK_S = 60.0
"""So long a launcher's program may take; `sbatch` on a busy cluster takes seconds."""

_ONCE = RestartRules(budget=0)
_MOST_BYTES = 1 << 16
_FILE_BYTES = 1 << 20
_TOLD_BYTES = 4096
"""Of the end of what a program complained; 300 characters of it are told."""
_LOOK_EVERY_S = 0.1
_STATES = "PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING"
"""Of jobs that may still be a client's. Said, because what squeue lists by itself has changed from
release to release.
"""


class LaunchError(Exception):
    """A client could not be launched; the message says why, in one line."""


class LeftAloneError(Exception):
    """A client was not launched because somebody else brings it back; the message says who, in one
    line.
    """


class Launcher(Protocol):
    """Starts clients. Used on the loop's thread."""

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Start a client by the words of its rule; returns what was started, for people. Raises
        LaunchError and LeftAloneError.
        """
        ...

    async def close(self) -> None:
        """The run is over: take back what was asked for and has not begun."""
        ...


class LocalLauncher:
    """Child processes of this one. When to launch again is decided by who asks, so the supervisor
    here launches once.
    """

    def __init__(
        self, log_path: Path | None = None, exited: Callable[[str, int], None] = lambda *_: None
    ) -> None:
        """exited: called with a client and its exit code when its process ended by itself."""
        self._log_path = log_path
        self._exited = exited
        self._ending: set[str] = set()
        self._supervisor: Supervisor | None = None  # its log is a file, made for the first child
        self._mine: set[str] = set()

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Start a child; one of that name that is still here is stuck, and ended first."""
        if self._supervisor is None:
            self._supervisor = Supervisor(
                log_path=self._log_path, rules=_ONCE, on_change=self._changed
            )
        if client in self._mine:
            self._ending.add(client)
            await self._supervisor.stop_child(client, grace_s=2.0)
            self._ending.discard(client)
        self._mine.add(client)
        try:
            self._supervisor.start(Child(client, tuple(words)))
        except ValueError as error:
            raise LaunchError(str(error)) from None
        return f"a process of this machine: {words[0]}"

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildExited) and change.name not in self._ending:
            self._exited(change.name, change.code)

    async def close(self) -> None:
        """End the children; those whose run is over end by themselves in that time."""
        self._ending |= self._mine
        if self._supervisor is not None:
            await self._supervisor.stop(grace_s=10.0)


class SlurmLauncher:
    """Jobs of Slurm, named fsl-CLIENT, also those that others submitted: bin/fsl-node.sbatch makes
    the client's name of the job's.

    A client that has a job, waiting, running or suspended, is Slurm's to bring back, for instance
    by --requeue. Of one that is completing nobody can say whether it goes back into the queue: it
    is looked at again later.
    """

    def __init__(self) -> None:
        self._jobs: list[str] = []

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Submit a job, unless there is one. A job that is completing is a LaunchError."""
        job_name = f"fsl-{client}"
        look = ("squeue", "--noheader", "--me", f"--name={job_name}", f"--states={_STATES}")
        listed = await ask((*look, "--format=%i %T"))
        jobs = [printable(line.strip()) for line in listed.splitlines() if line.strip()]
        staying = [job for job in jobs if not job.endswith(" COMPLETING")]
        if staying:
            raise LeftAloneError(f"Slurm has job {'; '.join(staying)[:200]} for it")
        if jobs:
            raise LaunchError(f"Slurm has job {jobs[0][:80]} for it, which may be requeued")
        said = await ask(("sbatch", "--parsable", f"--job-name={job_name}", *words))
        job = said.strip().split("\n")[-1].split(";")[0]
        if not job.isdecimal():
            raise LaunchError(f"sbatch answered {said.strip()[:80]!r}, no job number")
        self._jobs.append(job)
        return f"Slurm job {job}"

    async def close(self) -> None:
        """Cancel jobs that still wait for their turn: they would dial a server that is gone."""
        if self._jobs:
            with contextlib.suppress(LaunchError):
                await ask(("scancel", "--state=PENDING", *self._jobs))
            self._jobs.clear()


class CommandLauncher:
    """Any program, such as ssh, that exits 0 once the client is started."""

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Run it to its end."""
        await ask(words)
        return f"done by {words[0]}"

    async def close(self) -> None:
        """Nothing to take back."""


class _Said:
    """What a program writes into a file: the last 64 KiB of it, however much it is. `open_file` is
    empty, and for this only.
    """

    def __init__(self, open_file: IO[bytes]) -> None:
        self._file = open_file.fileno()
        self._cut = b""
        # Or who has written much goes on behind the hole that cutting leaves.
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)

    def bound(self) -> None:
        """Cut the file where it has become large; what comes between reading and cutting is
        lost.
        """
        if os.fstat(self._file).st_size > _FILE_BYTES:
            self._cut = self.end()
            os.ftruncate(self._file, 0)

    def end(self) -> bytes:
        """Return the last bytes."""
        size = os.fstat(self._file).st_size
        read = os.pread(self._file, _MOST_BYTES, max(0, size - _MOST_BYTES))
        return (self._cut + read)[-_MOST_BYTES:]


async def _start(words: Sequence[str], out: IO[bytes], err: IO[bytes]) -> Process:
    """Start a program in a session of its own. Cancelled while it starts, it is ended, with what it
    has started by then. Raises OSError.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            process = await starting
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        raise


async def ask(words: Sequence[str], limit_s: float = ASK_S) -> str:
    """Run a program to its end and return the end of what it printed; raises LaunchError unless it
    exits 0 within `limit_s`.

    One that does not end in time ends with all that it has started (but what has a session of its
    own): a client that it got so far would be a second one beside that of the next attempt. It
    writes into files: a pipe ends when the last one who has it ends, and what it leaves running in
    the background may have it (under uvloop always, by a descriptor of a higher number); a client
    that was started so would die by SIGPIPE with this process. The files are cut while it runs.
    They are not cut any more when it has ended: who leaves something running that prints much
    should send that elsewhere, or it takes space in the folder for temporary files until it ends.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as files:
        try:
            out_file = files.enter_context(tempfile.TemporaryFile())
            err_file = files.enter_context(tempfile.TemporaryFile())
            out, err = _Said(out_file), _Said(err_file)
            process = await _start(words, out_file, err_file)
        except OSError as error:
            raise LaunchError(f"cannot run {words[0]}: {error.strerror or error}") from None
        ended = asyncio.ensure_future(process.wait())
        give_up_at = loop.time() + limit_s
        try:
            while not ended.done():
                left_s = give_up_at - loop.time()
                if left_s <= 0:
                    raise LaunchError(f"{words[0]} did not end within {limit_s:g} s")
                await asyncio.wait({ended}, timeout=min(left_s, _LOOK_EVERY_S))
                out.bound()
                err.bound()
        finally:
            if process.returncode is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)  # its session, with what it has started
                except ProcessLookupError:
                    pass
                except PermissionError:  # somebody else's, as of sudo: it is left to itself
                    ended.cancel()
            await asyncio.wait({ended})
        printed, complained = out.end(), err.end()
    if process.returncode:
        told = one_line((complained or printed)[-_TOLD_BYTES:].decode(errors="replace"))[-300:]
        raise LaunchError(f"{words[0]} exited with {process.returncode}: {told or 'no word'}")
    return printed.decode(errors="replace")
