"""Errors: one tree, the exit codes, and the one function that turns an exception into both.

    FslError                   an error the user can act on; the message says what to do
    ├── UsageError             the command line makes no sense
    ├── ConfigError            a TOML file or a --set has a wrong key, type or value
    ├── AddressError           an address cannot be parsed or cannot be used
    ├── KeysError              a key or the allow-list is missing, damaged or open to others
    ├── DataError              a data path is missing, unreadable or too short
    │   └── TooShortError          it is readable, and too short for the run's context
    ├── TaskError              a --task file has no such function, or misuses `fed`
    │   └── TaskRaisedError        the task's own code raised; exits 1, like any program
    ├── RunDirError            a run directory is missing, damaged or of another run
    ├── NotAllowedError        a run needs data that this site's policy keeps here
    ├── RefusedError           the parameter server refuses this client
    └── StopError              not a fault: the node was asked to end before its work was done
        ├── PreemptedError         by SIGTERM; asks to be launched again
        └── InterruptedByUserError by Ctrl-C

Exit codes, the same for every command:

    0    done
    1    a bug: an unexpected exception of this program or (then the line says so) of the user's own
         task. Not 2, because an exception of a task may be the GPU's or the data loader's, and a
         launcher should try again a few times. `demo`, `sim` and `doctor` exit 1 too when a check
         fails
    2    bad input, usage or environment; running the same line again fails again
    64   preempted, or asked to be launched again: a launcher should do that
    130  interrupted (Ctrl-C)
"""

from __future__ import annotations

import errno
import json
import traceback
from enum import IntEnum
from typing import TYPE_CHECKING, TextIO

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable


_NO_HOME = "determine home directory"
"""What pathlib says of ~somebody who is not there, and of ~ where nobody says what that is."""


class ExitCode(IntEnum):
    """What the process tells its launcher; see the table above."""

    DONE = 0
    BUG = 1
    BAD_INPUT = 2
    RELAUNCH = 64
    INTERRUPTED = 130


class FslError(Exception):
    """Something the user can act on. `message` is one line: what happened, to whom, and what to
    do.
    """

    default_code = ExitCode.BAD_INPUT

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = int(self.default_code if exit_code is None else exit_code)


class UsageError(FslError):
    """The command line does not make sense."""


class ConfigError(FslError):
    """A configuration file or override has a wrong key, type or value.

    `key` is the dotted name of the first wrong setting, or empty when the whole file is at fault.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class AddressError(FslError):
    """An address cannot be read or cannot be used."""


class KeysError(FslError):
    """A key or the list of keys is missing, damaged or open to others."""


class DataError(FslError):
    """A data path is missing, unreadable or too short."""


class TooShortError(DataError):
    """Text is too short for the context that it was opened for; `bytes` is its length."""

    def __init__(self, message: str, length: int) -> None:
        super().__init__(message)
        self.bytes = length


class TaskError(FslError):
    """A --task file has no such function, or misuses `fed`."""


class TaskRaisedError(TaskError):
    """The task's own code raised. `trace` is the traceback from its first frame on, without this
    program's frames.
    """

    default_code = ExitCode.BUG

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class RunDirError(FslError):
    """A run directory is missing, damaged or of another run."""


class NotAllowedError(FslError):
    """A run needs data of this site sent that the site's policy (`fsl_async.config.site_policy`)
    does not let out.
    """


class RefusedError(FslError):
    """The parameter server will not have this client. `code` is its machine-readable reason."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class StopError(FslError):
    """Not a fault: the node was asked to end before its work was done."""


class PreemptedError(StopError):
    """The machine or the scheduler wants the process gone; a launcher should start it again."""

    default_code = ExitCode.RELAUNCH


class InterruptedByUserError(StopError):
    """Somebody pressed Ctrl-C."""

    default_code = ExitCode.INTERRUPTED


_DISK_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: "make room and try again",
    errno.EDQUOT: "make room in the quota and try again",
    errno.EROFS: "that file system is read-only: choose another --run-dir",
    errno.EACCES: "it is not writable: check its permissions, or choose another --run-dir",
    errno.EPERM: "it is not writable: check its permissions, or choose another --run-dir",
    errno.ENOENT: "nothing can be created there: check the path, or choose another --run-dir",
    errno.ENOTDIR: "a part of the path is no folder: check it, or choose another --run-dir",
    errno.EMFILE: "raise the limit of open files and try again",
    errno.ENFILE: "raise the system's limit of open files and try again",
}


def disk_advice(error: OSError) -> str:
    """What to do about an error of the disk, in a few words; empty where its own words are all
    there is to say.
    """
    return _DISK_ADVICE.get(error.errno, "")


def disk_words(error: OSError, *, advised: bool = True) -> str:
    """The system's words, the file in brackets, and behind a semicolon what to do."""
    words = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    advice = disk_advice(error) if advised else ""
    return one_line(f"{words}{where}") + (f"; {advice}" if advice else "")


@frozen
class Report:
    """An exception as the user meets it."""

    kind: str
    message: str
    exit_code: int

    def as_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps({"error": self.message, "kind": self.kind, "exit_code": self.exit_code})


def printable(text: str) -> str:
    """Escape what would disturb a terminal or break the line, by `fsl_transport.text`.

    For what is loaded before the transport, which is imported only where there is something to
    escape: --help does not wait for it.
    """
    if text.isprintable():
        return text
    from fsl_transport import text as texts

    return texts.printable(text)


def one_line(text: str) -> str:
    """Join the lines of `text` and make it printable, so that an error stays one line in logs."""
    parts = (line.strip() for line in text.splitlines())
    return printable("; ".join(part for part in parts if part))


def describe(error: BaseException) -> Report:
    """Map any exception to what the user is told and the exit code.

    OSError is the environment's (no space, no permission, port in use), so it exits 2 with the
    system's own words; what is not expected at all is a bug and exits 1.
    """
    kind = type(error).__name__
    if isinstance(error, FslError):
        return Report(kind, one_line(error.message), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Report("InterruptedByUserError", "interrupted", ExitCode.INTERRUPTED)
    if isinstance(error, OSError):
        return Report(kind, _operating_system_line(error), ExitCode.BAD_INPUT)
    if isinstance(error, MemoryError) or _is_torchs(error):
        return Report(kind, "out of memory; use a smaller model or batch", ExitCode.BAD_INPUT)
    if isinstance(error, RuntimeError) and _NO_HOME in str(error):
        return Report(
            kind,
            "a path begins with ~, or is by default in the home folder, and the system knows no "
            "such folder: give the whole path, or set HOME",
            ExitCode.BAD_INPUT,
        )
    found = one_line(str(error)) or "no message"
    advice = "this is a bug in fsl-async; run again with --debug for the traceback"
    return Report(kind, f"unexpected {kind}: {found} ({advice})", ExitCode.BUG)


def _is_torchs(error: BaseException) -> bool:
    """Whether torch found no memory, which it says in classes of its own: on a GPU by a name, on
    the CPU by a text. Imports nothing.
    """
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )


def _operating_system_line(error: OSError) -> str:
    words = error.strerror or one_line(str(error)) or type(error).__name__
    name = error.filename
    if name is None:
        return words
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    return one_line(f"{name}: {words}")


def report(
    error: BaseException,
    *,
    as_json: bool,
    debug: bool,
    out: TextIO,
    err: TextIO,
    translate: Callable[[BaseException], Report | None] = lambda _: None,
) -> int:
    """Tell the user about `error` and return the exit code. The last thing `main` does.

    Plain: one line on `err`, `error: ...`, or `stopped: ...` for exit codes 64 and 130. With
    `as_json`: one object on `out`, where a program that asked for JSON reads its results. The
    traceback appears only with `debug`, on `err`. `translate` may know more exceptions (click's,
    which this file does not import). Of an exception in a user's task the traceback shows the
    task's frames.
    """
    told = translate(error) or describe(error)
    if debug:
        if isinstance(error, TaskRaisedError):
            err.write(error.trace)
        else:
            err.write("".join(traceback.format_exception(error)))
    if as_json:
        out.write(told.as_json() + "\n")
        out.flush()
    else:
        stopped = told.exit_code in {ExitCode.INTERRUPTED, ExitCode.RELAUNCH}
        err.write(f"{'stopped' if stopped else 'error'}: {told.message}\n")
    err.flush()
    return told.exit_code
