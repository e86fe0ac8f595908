"""Launchers start clients: local processes, Slurm jobs, or any command. The launch file chooses."""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from attrs import define

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Supervisor
from fsl_async.errors import one_line, printable

ASK_S = 60.0
"""Time limit of a launcher's program; `sbatch` on a busy cluster takes seconds."""

_ONCE = RestartRules(budget=0)
_MOST_BYTES = 1 << 16
_FILE_BYTES = 1 << 20
_SHOWN_BYTES = 4096
"""Bytes of the end of a failed program's output; the last 300 characters of them are shown."""
_LOOK_EVERY_S = 0.05
_LIVING = {
    "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING",
    "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
}  # fmt: skip
"""States of jobs that run a client, or will once Slurm or a person lets them."""


class LaunchError(Exception):
    """A client could not be launched; the message is the reason, in one line."""


class LeftAloneError(Exception):
    """A client was not launched because something else will; the message names it, in one line."""


class Launcher(Protocol):
    """Starts clients. For the loop's thread."""

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Start a client by the words of its rule. Return one line that describes the launch.

        Raises LaunchError and LeftAloneError.
        """

    async def close(self) -> None:
        """Withdraw, at the end of the run, what was requested and has not begun."""


@define(eq=False, slots=False)
class LocalLauncher:
    """Starts child processes of this one.

    The caller decides when to launch again, so the supervisor of this launcher never does.

    exited: called when a client's process ended by itself, with the client, its exit code and its
    last error line.
    """

    _log_path: Path | None = None
    _exited: Callable[[str, int, str], None] = lambda *_: None

    def __attrs_post_init__(self) -> None:
        self._ending: set[str] = set()
        self._supervisor: Supervisor | None = None
        self._launched: set[str] = set()

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Start a child. Ends its old process first if that still runs: it is stuck."""
        # Made late, because it creates the log file.
        if self._supervisor is None:
            self._supervisor = Supervisor(
                log_path=self._log_path, rules=_ONCE, on_change=self._changed
            )
        if client in self._launched:
            self._ending.add(client)
            await self._supervisor.stop_child(client, grace_s=2.0)
            self._ending.discard(client)
        self._launched.add(client)
        try:
            self._supervisor.start(Child(client, tuple(words)))
        except ValueError as error:
            raise LaunchError(str(error)) from None
        return f"a process of this machine: {words[0]}"

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildExited) and change.name not in self._ending:
            self._exited(change.name, change.code, change.error)

    async def close(self) -> None:
        """End the children; those whose run is over end by themselves within the grace time."""
        self._ending |= self._launched
        if self._supervisor is not None:
            await self._supervisor.stop(grace_s=10.0)


class SlurmLauncher:
    """Submits Slurm jobs named fsl-CLIENT; bin/fsl-node.sbatch derives the client's name from that.

    A client with a pending, running or suspended job of that name, submitted by anyone, is left to
    Slurm (for instance to --requeue). A completing job may be requeued or not: try again later. A
    client whose newest job was cancelled is left alone, as long as Slurm remembers that job: a
    person wanted it so.
    """

    def __init__(self) -> None:
        self._jobs: list[str] = []

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Submit a job, unless the client has one. Raises LaunchError while a job is completing."""
        job_name = f"fsl-{client}"
        look = ("squeue", "--noheader", "--me", f"--name={job_name}", "--states=all")
        decide_by_jobs(await ask((*look, "--format=%i %T")))
        printed = await ask(("sbatch", "--parsable", f"--job-name={job_name}", *words))
        job = printed.strip().split("\n")[-1].split(";")[0]
        if not job.isdecimal():
            raise LaunchError(f"sbatch answered {printed.strip()[:80]!r}, no job number")
        self._jobs.append(job)
        return f"Slurm job {job}"

    async def close(self) -> None:
        """Cancel pending jobs: they would dial a parameter server that has ended."""
        if self._jobs:
            with contextlib.suppress(LaunchError):
                await ask(("scancel", "--state=PENDING", *self._jobs))
            self._jobs.clear()


def decide_by_jobs(listed: str) -> None:
    """Decide by squeue's lines `NUMBER STATE` of a client's jobs. Pure.

    Returns when a job may be submitted. Raises LeftAloneError, and LaunchError while a job is
    completing.
    """
    lines = [printable(line.strip()) for line in listed.splitlines() if line.strip()]
    jobs = [(_number(line), line, line.rpartition(" ")[2]) for line in lines]
    living = [line for _, line, state in jobs if state in _LIVING]
    if living:
        raise LeftAloneError(f"Slurm has job {'; '.join(living)[:200]} for it")
    for _, line, state in jobs:
        if state == "COMPLETING":
            raise LaunchError(f"Slurm has job {line[:80]} for it, which may be requeued")
    _, newest, state = max(jobs, default=(0, "", ""))
    if state == "CANCELLED":
        job = newest.partition(" ")[0][:40]
        raise LeftAloneError(f"its Slurm job {job} was cancelled; to have it back, submit it again")


def _number(line: str) -> int:
    """The number that a line of squeue begins with; 0 where there is none."""
    found = re.match(r"[0-9]{1,12}", line, re.ASCII)
    return int(found[0]) if found else 0


class CommandLauncher:
    """Runs any program, such as ssh, that exits with 0 once the client is started."""

    async def launch(self, client: str, words: Sequence[str]) -> str:
        """Run the program to its end."""
        await ask(words)
        return f"done by {words[0]}"

    async def close(self) -> None:
        """Do nothing: there is nothing to withdraw."""


class _OutputTail:
    """The last 64 KiB of a program's output file. `open_file`: empty, and for one program only."""

    def __init__(self, open_file: IO[bytes]) -> None:
        self._file = open_file.fileno()
        self._cut = b""
        # Without O_APPEND a program would go on at its old offset, behind a hole, after truncation.
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)

    def bound(self) -> None:
        """Truncate the file if it is large; output between reading and truncation is lost."""
        if os.fstat(self._file).st_size > _FILE_BYTES:
            self._cut = self.end()
            os.ftruncate(self._file, 0)

    def end(self) -> bytes:
        """Return the last bytes."""
        size = os.fstat(self._file).st_size
        read = os.pread(self._file, _MOST_BYTES, max(0, size - _MOST_BYTES))
        return (self._cut + read)[-_MOST_BYTES:]


async def ask(words: Sequence[str], limit_s: float = ASK_S) -> str:
    """Run a program to its end and return the end of its output.

    Raises LaunchError unless it exits with 0 within `limit_s`. At the time limit the program is
    killed with all that it has started in its session: a client that it started would be a second
    one beside that of the next attempt.

    Output goes to files. A pipe would stay open as long as a background process has inherited it
    (under uvloop always, by a higher descriptor), and a client started so would get SIGPIPE when
    this process ends. The files are truncated while the program runs, and not afterwards: a
    background process that prints much should redirect its output, or it fills the folder for
    temporary files until it ends.
    """
    with contextlib.ExitStack() as files:
        try:
            out_file = files.enter_context(tempfile.TemporaryFile())
            err_file = files.enter_context(tempfile.TemporaryFile())
            out, err = _OutputTail(out_file), _OutputTail(err_file)
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - a fork takes milliseconds
                words,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot run {words[0]}: {error.strerror or error}") from None
        give_up_at = time.monotonic() + limit_s
        try:
            while process.poll() is None:
                if time.monotonic() > give_up_at:
                    raise LaunchError(f"{words[0]} did not end within {limit_s:g} s")
                await asyncio.sleep(min(limit_s, _LOOK_EVERY_S))
                out.bound()
                err.bound()
        finally:
            if process.returncode is None:
                # A process of another user, as by sudo, cannot be killed: do not wait for it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                threading.Thread(target=process.wait, name="launcher", daemon=True).start()
        printed, errors = out.end(), err.end()
    if process.returncode:
        shown = one_line((errors or printed)[-_SHOWN_BYTES:].decode(errors="replace"))[-300:]
        raise LaunchError(f"{words[0]} exited with {process.returncode}: {shown or 'no output'}")
    return printed.decode(errors="replace")
