"""A node of a comparison as a process of its own. Does not import torch.

Each report is a line of JSON on standard output. A line "drain" on standard input asks for an
orderly end, the end of standard input for an immediate one; other lines are the node's own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fsl_async.errors import FslError, StopError
from fsl_async.process.stopper import Stopper

DRAINED = "the target is reached"
Emit = Callable[[Mapping[str, Any]], None]


def play(job: Callable[[Emit, Stopper], None], hear: Callable[[str], None] = lambda _: None) -> int:
    """Run `job` to its end; returns the exit code. An FslError is reported in one line.

    hear: is called with each line of standard input that is the node's own, and with "" at its end.
    """
    stop = Stopper()
    lock = threading.Lock()

    def emit(record: Mapping[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()

    def watch() -> None:
        for line in sys.stdin:
            if line.strip() == "drain":
                stop.request(reason=DRAINED)
            else:
                hear(line.strip())
        # also when the process that started this one has ended
        stop.request(hard=True, reason="asked to stop")
        hear("")

    threading.Thread(target=watch, daemon=True).start()
    try:
        job(emit, stop)
    except StopError:
        return 0
    except FslError as error:
        emit({"event": "error", "text": error.message, "exit_code": error.exit_code})
        return error.exit_code
    return 0


def leave(code: int) -> NoReturn:
    """End the process.

    Not by sys.exit: a thread still reads standard input, and Python's shutdown would wait for it.
    """
    sys.stdout.flush()
    os._exit(code)
