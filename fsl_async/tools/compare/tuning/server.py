"""The parameter server of a comparison, a process of its own, so that its memory is its own.

    python -m fsl_async.tools.compare.tuning.server server JSON    {"choices", "method", "folder",
                                                                    "listen"}

Does not import torch: versions are scored by the process that started this one. Each is reported
when it is durable, and announced to clients after a line "scored". How a process reports and is
ended: `fsl_async.tools.compare.processes`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import attrs

from fsl_async.files.private_files import make_folder
from fsl_async.nodes.ps import node
from fsl_async.process.heap import keep_freed_blocks
from fsl_async.process.memory import peak_bytes
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.processes import Emit, leave, play
from fsl_async.tools.compare.tuning.choices import TuningChoices


def main(arguments: list[str]) -> int:
    """Run the parameter server; see the module."""
    given = json.loads(arguments[1])
    scored = threading.Semaphore(0)
    ended = threading.Event()

    def hear(line: str) -> None:
        if not line:
            ended.set()
        scored.release()

    def job(emit: Emit, stop: Stopper) -> None:
        choices = TuningChoices.from_dict(given["choices"])
        config, folder = choices.config(given["method"]), Path(given["folder"])
        listen = attrs.evolve(config.listen, address=given["listen"]["ps"], insecure=True)

        def committed(version: int) -> None:
            emit({"event": "memory", "bytes": peak_bytes()})
            if choices.is_scored(version) and not ended.is_set():
                emit({"event": "committed", "version": version, "at": time.monotonic()})
                scored.acquire()

        make_folder(folder)
        node.serve(
            attrs.evolve(config, listen=listen),
            folder,
            from_version=None,
            announce=lambda at: emit({"event": "listening", "role": "ps", "address": at}),
            log=lambda text: emit({"event": "line", "text": text}),
            stop=stop,
            after_commit=committed,
        )
        emit({"event": "memory", "bytes": peak_bytes()})

    keep_freed_blocks()  # as the command does
    return play(job, hear)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
