"""The process of `demo lora` that makes the base, and after the run trains without federation.

    python -m fsl_async.tools.demo.lora_work RUN_DIR BASE SEED STEPS

Imports transformers and peft once for two: its second process is a fork, and waits for its part of
the comparison. With STEPS 0 the base is there. Prints a record MADE when it is, reads ORDERS in
RUN_DIR as soon as the demo has written it, and prints what `lora_compare` does. An error is a line
that begins with "error: ", and the exit code. Needs the extra `hf`.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsl_async.errors import FslError
from fsl_async.learn.models.hf import collector_paused, extra
from fsl_async.tools.demo.lora import MADE, ORDERS, digest_of
from fsl_async.tools.demo.lora_base import make_base
from fsl_async.tools.demo.lora_compare import compare

_TICK_S = 0.1


def main(arguments: list[str]) -> None:
    """Make the base, wait for the orders, compare."""
    torch.set_num_threads(1)
    run_dir, base, seed, steps = Path(arguments[0]), arguments[1], *map(int, arguments[2:])
    with collector_paused():
        extra("peft")
        _ = extra("transformers").LlamaForCausalLM
    # A fork is safe while there is one thread. Elsewhere the second process imports on its own.
    kind: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    second = kind.Process(target=guarded, args=(_second, run_dir, os.getpid()), daemon=True)
    second.start()
    if steps:
        make_base(Path(base), seed=seed, steps=steps, say=_print)
    _print_record({"name": MADE, "digest": digest_of(Path(base))})
    compare(_order(run_dir, 0, os.getppid()), _print_record)
    second.join()
    if second.exitcode:
        raise SystemExit(second.exitcode)


def _second(run_dir: Path, parent: int) -> None:
    """Compare by the second order. parent: the process that began this one."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG, as in the supervisor: end when the parent does.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)
    compare(_order(run_dir, 1, parent), _print_record)


def _order(run_dir: Path, number: int, parent: int) -> dict[str, Any]:
    """Wait for an order of the demo. Ends this process when its parent is gone."""
    while not (run_dir / ORDERS).exists():
        time.sleep(_TICK_S)
        if os.getppid() != parent:
            raise SystemExit
    order: dict[str, Any] = json.loads((run_dir / ORDERS).read_text(encoding="utf-8"))[number]
    return order


def guarded(call: Any, *arguments: Any) -> None:
    """Call, and print an error as the demo reads it."""
    try:
        call(*arguments)
    except FslError as error:
        _print(f"error: {error.message}")
        raise SystemExit(int(error.exit_code)) from None


def _print_record(record: Mapping[str, Any]) -> None:
    _print(json.dumps(record))


def _print(line: str) -> None:
    # In one piece: the other process prints too.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
