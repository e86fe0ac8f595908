"""Defines the errors and exit codes, maps exceptions to messages, and names this program in them.

    FslError                       the user can act on it: the message has a cause and a remedy
    ├── UsageError                 the command line is wrong
    ├── ConfigError                a TOML file or a --set has a wrong key, type or value
    ├── AddressError               an address cannot be read or used
    ├── KeysError                  a key or the list is missing, damaged or open to others
    ├── DataError                  a data path is missing, unreadable or too short
    │   └── TooShortError          it is readable, and too short for the run's context
    ├── TaskError                  a --task file has no such function, or misuses `fed`
    │   └── TaskRaisedError        the task's own code raised; exit code 1
    ├── PrivacyError               a site's privacy budget is used up, or its file is damaged
    ├── RunDirError                a run directory is missing, damaged or of another run
    ├── NotAllowedError            a run needs data that the site's policy does not allow
    ├── RefusedError               the parameter server refuses this client
    └── StopError                  no fault: the node had to end before its work was done
        ├── PreemptedError         by SIGTERM; requests a relaunch
        └── InterruptedByUserError by Ctrl-C

Exit codes, the same for every command:

    0    done
    1    a bug: an unexpected exception of this program or, as the message then says, of the user's
         task. Not 2, because a task may fail by its GPU or data loader, and a launcher should try
         again a few times. Of `demo`, `sim` and `doctor` also: a check failed
    2    bad input, usage or environment; the same command line fails again
    64   preempted, or a relaunch is requested: a launcher should start the node again
    130  interrupted (Ctrl-C)
"""

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, TextIO

_NO_HOME = "determine home directory"
"""Part of pathlib's message for a ~user that does not exist, and for ~ without a home folder."""


class ExitCode(IntEnum):
    """Exit codes of a process; see the table above."""

    DONE = 0
    BUG = 1
    BAD_INPUT = 2
    RELAUNCH = 64
    INTERRUPTED = 130


class FslError(Exception):
    """An error that the user can act on. `message` is one line with cause and remedy."""

    default_code = ExitCode.BAD_INPUT

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = int(self.default_code if exit_code is None else exit_code)


class UsageError(FslError):
    """The command line is wrong."""


class ConfigError(FslError):
    """A configuration file or override has a wrong key, type or value.

    `key` is the dotted name of the first wrong setting, or empty when the whole file is at fault.
    `lines` has a line for each wrong setting; `message` is all of them.
    """

    def __init__(self, message: str, key: str = "", lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.lines = tuple(lines)


class AddressError(FslError):
    """An address cannot be read or cannot be used."""


class KeysError(FslError):
    """A key or the list of keys is missing, damaged or open to others."""


class DataError(FslError):
    """A data path is missing, unreadable or too short."""


class TooShortError(DataError):
    """Text is too short for the run's context. `bytes` is its length."""

    def __init__(self, message: str, length: int) -> None:
        super().__init__(message)
        self.bytes = length


class TaskError(FslError):
    """A --task file has no such function, or misuses `fed`."""


class TaskRaisedError(TaskError):
    """The task's own code raised. `trace` is the traceback from the task's first frame on."""

    default_code = ExitCode.BUG

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class PrivacyError(FslError):
    """A site's privacy budget (`learn.tune.privacy`) is used up, unknown or impossible."""


class RunDirError(FslError):
    """A run directory is missing, damaged or of another run."""


class NotAllowedError(FslError):
    """A run needs data that the site's policy (`fsl_async.config.site_policy`) does not allow."""


class RefusedError(FslError):
    """The parameter server refuses this client. `code` is its machine-readable reason."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class StopError(FslError):
    """No fault: the node had to end before its work was done."""


class PreemptedError(StopError):
    """The machine or the scheduler ends the process; a launcher should start it again."""

    default_code = ExitCode.RELAUNCH


class InterruptedByUserError(StopError):
    """The user pressed Ctrl-C."""

    default_code = ExitCode.INTERRUPTED


_DISK_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: "make room and try again",
    errno.EDQUOT: "make room in the quota and try again",
    errno.EROFS: "that file system is read-only: choose another --run-dir",
    errno.EACCES: "it is not writable: check its permissions, or choose another --run-dir",
    errno.EPERM: "it is not writable: check its permissions, or choose another --run-dir",
    errno.ENOENT: "nothing can be created there: check the path, or choose another --run-dir",
    errno.EEXIST: "a file has that name: choose another --run-dir",
    errno.ENOTDIR: "a part of the path is no folder: check it, or choose another --run-dir",
    errno.EMFILE: "raise the limit of open files and try again",
    errno.ENFILE: "raise the system's limit of open files and try again",
}


def disk_advice(error: OSError) -> str:
    """Return a remedy for an error of the disk, or an empty text."""
    return _DISK_ADVICE.get(error.errno, "")


def disk_words(error: OSError, *, advised: bool = True) -> str:
    """Describe an error of the disk: the system's message, the file, and the remedy."""
    message = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    advice = disk_advice(error) if advised else ""
    return one_line(f"{message}{where}") + (f"; {advice}" if advice else "")


class Report(NamedTuple):
    """An exception as it is shown to the user.

    No attrs class: `--help` imports this file, and attrs would take a third of its time.
    """

    kind: str
    message: str
    exit_code: int
    lines: tuple[str, ...] = ()
    """The message in several lines, where it has them."""

    def as_json(self) -> str:
        """Return one JSON object on one line."""
        return json.dumps({"error": self.message, "kind": self.kind, "exit_code": self.exit_code})


def printable(text: str) -> str:
    """Escape control characters and line breaks, by `fsl_transport.text`.

    The transport is imported only if there is something to escape, for a fast --help.
    """
    if text.isprintable():
        return text
    from fsl_transport import text as texts

    return texts.printable(text)


def one_line(text: str) -> str:
    """Join the lines of `text` by semicolons and make it printable."""
    parts = (line.strip() for line in text.splitlines())
    return printable("; ".join(part for part in parts if part))


def describe(error: BaseException) -> Report:
    """Map any exception to a message and an exit code.

    An OSError is the environment's (no space, no permission, port in use): code 2, with the
    system's message. An unexpected exception is a bug: code 1.
    """
    kind = type(error).__name__
    if isinstance(error, FslError):
        lines = error.lines if isinstance(error, ConfigError) else ()
        return Report(kind, one_line(error.message), error.exit_code, tuple(map(printable, lines)))
    if isinstance(error, KeyboardInterrupt):
        return Report("InterruptedByUserError", "interrupted", ExitCode.INTERRUPTED)
    if isinstance(error, OSError):
        return Report(kind, _operating_system_line(error), ExitCode.BAD_INPUT)
    if isinstance(error, MemoryError) or _is_torch_out_of_memory(error):
        return Report(kind, "out of memory; use a smaller model or batch", ExitCode.BAD_INPUT)
    if isinstance(error, RuntimeError) and _NO_HOME in str(error):
        return Report(
            kind,
            "a path begins with ~, or is by default in the home folder, and the system has no such"
            " folder: give the complete path, or set HOME",
            ExitCode.BAD_INPUT,
        )
    found = one_line(str(error)) or "no message"
    advice = "this is a bug in fsl-async; run again with --debug for the traceback"
    return Report(kind, f"unexpected {kind}: {found} ({advice})", ExitCode.BUG)


def _is_torch_out_of_memory(error: BaseException) -> bool:
    """Whether torch is out of memory, by class name (GPU) or text (CPU). Imports nothing."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )


def _operating_system_line(error: OSError) -> str:
    message = error.strerror or one_line(str(error)) or type(error).__name__
    name = error.filename
    if name is None:
        return message
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    advice = disk_advice(error).replace("another --run-dir", "another")  # any option's path
    return one_line(f"{name}: {message}") + (f"; {advice}" if advice else "")


def report(
    error: BaseException,
    *,
    as_json: bool,
    debug: bool,
    out: TextIO,
    err: TextIO,
    translate: Callable[[BaseException], Report | None] = lambda _: None,
) -> int:
    """Print `error` and return the exit code. The last thing that `main` does.

    Plain: one line on `err`, `error: ...`, or `stopped: ...` for exit codes 64 and 130; of a
    configuration one for each wrong setting. With `as_json`: one object on `out`. With `debug` also
    the traceback, on `err`; of an exception in a user's task it has the task's frames only.
    translate: maps more exceptions (click's, which this file does not import).
    """
    found = translate(error) or describe(error)
    if debug:
        if isinstance(error, TaskRaisedError):
            err.write(error.trace)
        else:
            import traceback

            err.write("".join(traceback.format_exception(error)))
    if as_json:
        out.write(found.as_json() + "\n")
        out.flush()
    else:
        stopped = found.exit_code in {ExitCode.INTERRUPTED, ExitCode.RELAUNCH}
        begin = "stopped" if stopped else "error"
        err.writelines(f"{begin}: {line}\n" for line in found.lines or (found.message,))
    err.flush()
    return found.exit_code


PROGRAM = "fsl-node"
CALLED_AS = "FSL_NODE_CALLED_AS"
"""Set by `bin/fsl-node` of a clone, which is not on PATH."""
STAMP = ".fsl-installed"
"""File in an environment that `bin/fsl-node` of a clone made: what it has installed there."""


def program() -> str:
    """Return `fsl-node`, or the path by which it was called, quoted for a shell."""
    return shlex.quote(os.environ.get(CALLED_AS) or _script() or PROGRAM)


def to_install(extras: str) -> str:
    """Return the line that installs extras here, such as "hf" or "hf,gguf".

    The environment of a clone is installed by `bin/fsl-node`, with pinned versions.
    """
    if not (Path(sys.prefix) / STAMP).is_file():
        return f"pip install 'fsl-async[{extras}]'"
    called = os.environ.get(CALLED_AS) or "bin/fsl-node"
    return f"FSL_EXTRAS={extras} {shlex.quote(called)} --version"


def _script() -> str:
    """Return the script's path if PATH does not lead to it (an environment is not activated)."""
    import shutil

    given = sys.argv[0] if sys.argv else ""
    if Path(given).name != PROGRAM or shutil.which(PROGRAM) == given:
        return ""
    return given


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def has_benchmarks() -> bool:
    """Let this process import the modules of benchmarks/, after all others.

    Returns False where this package was installed without the repository.
    """
    if not (BENCHMARKS / "netlab").is_dir():
        return False
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return True


def need_benchmarks(what: str) -> None:
    """Do the same. Raises UsageError, which begins with `what`, without the repository."""
    if not has_benchmarks():
        raise UsageError(
            f"{what} needs benchmarks/ of a clone of the repository, which an installed wheel does"
            " not have; use bin/fsl-node in a clone"
        )
