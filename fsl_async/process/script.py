"""Gives a user's own script the manners of `fsl-node`: errors in one line, documented exit codes,
Ctrl-C once in good order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from fsl_async.errors import ExitCode, FslError, one_line, report
from fsl_async.process.stopper import Stopper, stop_on_signals

_standing: list[Stopper] = []
"""Of the blocks that stand."""


def current_stopper() -> Stopper:
    """That of the surrounding `clean_exit`, or a new one that nobody asks."""
    return _standing[-1] if _standing else Stopper()


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """See `fsl_async.clean_exit`."""
    stopper = Stopper()
    is_main = threading.current_thread() is threading.main_thread()
    signals = stop_on_signals(stopper, at_once=True) if is_main else contextlib.nullcontext()
    _standing.append(stopper)
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
        _standing.remove(stopper)


def _end(error: BaseException) -> None:
    """Say it in one line and end the program with its exit code."""
    if isinstance(error, FslError) and error.exit_code == ExitCode.DONE:
        sys.stdout.write(f"{one_line(error.message)}\n")
        raise SystemExit(int(ExitCode.DONE)) from None
    code = report(error, as_json=False, debug=False, out=sys.stdout, err=sys.stderr)
    raise SystemExit(code) from None
