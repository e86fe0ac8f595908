"""Ends a user's script as `fsl-node` ends: errors in one line, its exit codes, Ctrl-C drains."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from fsl_async.errors import ExitCode, FslError, one_line, report
from fsl_async.process.stopper import Stopper, stop_on_signals

_stoppers: list[Stopper] = []
"""Those of the surrounding `clean_exit` blocks."""


def current_stopper() -> Stopper:
    """Return the stopper of the surrounding `clean_exit`, or a new one that is never requested."""
    return _stoppers[-1] if _stoppers else Stopper()


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """See `fsl_async.clean_exit`."""
    stopper = Stopper()
    is_main = threading.current_thread() is threading.main_thread()
    # torchrun ends its ranks by SIGTERM, also one that waits in a collective: it must end at once.
    is_rank = int(os.environ.get("WORLD_SIZE", "1")) > 1
    handles = is_main and not is_rank
    signals = stop_on_signals(stopper, at_once=True) if handles else contextlib.nullcontext()
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


def _end(error: BaseException) -> None:
    """Print the error in one line and end the program with its exit code."""
    if isinstance(error, FslError) and error.exit_code == ExitCode.DONE:
        sys.stdout.write(f"{one_line(error.message)}\n")
        raise SystemExit(int(ExitCode.DONE)) from None
    code = report(error, as_json=False, debug=False, out=sys.stdout, err=sys.stderr)
    raise SystemExit(code) from None
