"""Ends a user's script as `fsl-node` ends: errors in one line, its exit codes, Ctrl-C drains.

`clean_exit` is a block around all of it. Without one, `errors_in_one_line` and `leave_at_exit` do
what they can: an FslError that nothing catches ends the script with its line and its exit code, and
what was trained last is sent. Ctrl-C is then Python's KeyboardInterrupt.
"""

import atexit
import builtins
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from fsl_async.errors import ExitCode, FslError, TaskError, one_line, report
from fsl_async.process.stopper import Stopper, stop_on_signals

_OURS = str(Path(__file__).parents[1]) + os.sep
_stoppers: list[Stopper] = []
"""Stoppers of the surrounding `clean_exit` blocks."""
_printing = threading.Lock()


def current_stopper() -> Stopper:
    """Return the stopper of the surrounding `clean_exit`, or a new one that is never requested."""
    return _stoppers[-1] if _stoppers else Stopper()


def print_line(text: str) -> None:
    """Print a line by one write, so that lines of several threads do not run into one.

    Never raises: a terminal that is gone ends no training.
    """
    with _printing, contextlib.suppress(OSError, ValueError):
        out = sys.stdout  # looked up each time: a notebook replaces it
        if out is None:  # a program without a console
            return
        try:
            out.write(f"{text}\n")
        except UnicodeEncodeError:
            out.write(f"{ascii(text)[1:-1]}\n")
        out.flush()


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """See `fsl_async.clean_exit`."""
    stopper = Stopper()
    is_main = threading.current_thread() is threading.main_thread()
    # torchrun ends its ranks by SIGTERM, also one that waits in a collective: it must end at once.
    is_rank = int(os.environ.get("WORLD_SIZE", "1")) > 1
    handles = is_main and not is_rank
    ends = not _is_interactive()
    signals = (
        stop_on_signals(stopper, at_once=True, ends=ends) if handles else contextlib.nullcontext()
    )
    _stoppers.append(stopper)
    try:
        with signals:
            try:
                yield
            except (FslError, KeyboardInterrupt) as error:
                _end(stopper.error() if stopper.requested else error)
            except Exception:
                if not stopper.hard:
                    raise
            if stopper.requested:
                _end(stopper.error())
    finally:
        _stoppers.remove(stopper)


def errors_in_one_line() -> None:
    """Let an FslError that nothing catches end this script with one line and its exit code.

    Interactive sessions and notebooks stay as they are: they show errors and go on. `python -X dev`
    shows tracebacks too. Everything else is shown by the hook before.
    """
    before = sys.excepthook
    if _is_interactive() or getattr(before, "shows_one_line", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, FslError) or sys.flags.dev_mode:
            before(kind, error, trace)
            return
        _end(error)  # the exit code of a SystemExit that a hook raises is that of the process

    hook.shows_one_line = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _is_interactive() -> bool:
    return hasattr(builtins, "__IPYTHON__") or hasattr(sys, "ps1") or bool(sys.flags.interactive)


def leave_at_exit(leave: Callable[[BaseException | None], None]) -> Callable[[], None]:
    """Call `leave` when Python ends, with the exception that ends it, as a `with` block would.

    It must start no thread: Python 3.12 lets none start there. Returns a function that takes it
    back.
    """
    process, waiting = os.getpid(), [leave]

    def leaves() -> None:
        if not waiting or os.getpid() != process:  # forked, and the client is not here
            return
        error = None if _is_interactive() else getattr(sys, "last_value", None)
        try:
            waiting.pop()(error)
        except (Exception, KeyboardInterrupt) as failure:  # noqa: BLE001 - nothing else shows it
            _report(failure)  # the exit code is Python's, which has decided already

    # Before everything in `atexit`, where pyzmq and other libraries end what leaving needs. It is
    # what concurrent.futures uses.
    getattr(threading, "_register_atexit", atexit.register)(leaves)
    return waiting.clear


def _end(error: BaseException) -> None:
    """Print the error in one line and end the program with its exit code."""
    raise SystemExit(_report(error)) from None


def _report(error: BaseException) -> int:
    """Print the error in one line; returns its exit code."""
    if isinstance(error, FslError) and error.exit_code == ExitCode.DONE:
        print_line(one_line(error.message))
        return int(ExitCode.DONE)
    if isinstance(error, TaskError):
        error = TaskError(f"{error.message}{_place(error)}", error.exit_code)
    return report(error, as_json=False, debug=False, out=sys.stdout, err=sys.stderr)


def _place(error: BaseException) -> str:
    """The script's own line that an error came from: " (train.py:12)"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""
