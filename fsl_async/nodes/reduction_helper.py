"""One reduction of a global round, in a process of its own: the parameter server has no torch.

    python -m fsl_async.nodes.reduction_helper      takes one job, reports, and ends

In a global round the parameter servers of several groups average what their groups gained. The sum
is a ring all-reduce of torch.distributed, in its own process because a waiting all-reduce cannot be
woken, and because gloo may end its process. For each piece of values, on every rank, in fp32:

    D = base - cut            what this group gained, with the sign of a pseudo-gradient
    V = weight * D            at the coordinator minus what coding has lost of the rounds before
    out = sum of V            by gloo's ring, over all ranks in the order of the view

The parameter server makes the next global weights of it (`fsl_async.store.commit.groups_store`).
The sum is bit-equal on all ranks, and depends on the number of ranks, their order and the size of
pieces (measured); all three are in the view. The inputs are mapped and not changed.

Standard input and output carry maps in msgpack:

    in     the job: rank, weights (one for each rank), piece_values, base, cut, residual (or empty),
           out (paths), skip (bytes before the values in each file), values, host (to bind),
           timeout_s, bytes_per_s (0: no limit); then key, blob: the address of another rank
    out    key, blob: the address of this rank, for the others; then either done: the result is at
           `out`, complete and synced; or reason: why there is none

The process ends with its input, because the parameter server has ended then. So no store server
with a port of its own is needed for the addresses (`MessageStore`). gloo connects all pairs of
ranks; it neither encrypts nor authenticates (docs/SECURITY.md).
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_READ_BYTES = 1 << 16
MEET_S = 60.0
"""How long to wait for the others' addresses at least: their helpers may still import torch."""
_MAX_REASON = 300


class MessageStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store of torch.distributed whose keys come and go as messages."""

    def __init__(
        self,
        arriving: queue.SimpleQueue[dict[str, Any]],
        send: Callable[[dict[str, Any]], None],
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._arriving, self._send = arriving, send
        self._timeout_s = max(timeout_s, MEET_S)
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value, and send it to the other ranks."""
        blob = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = blob
        self._send({"key": key, "blob": blob})

    def get(self, key: str) -> bytes:
        """Return a value; wait for it. Raises RuntimeError after the timeout."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all `keys`. Raises RuntimeError after the timeout."""
        # gloo asks with the timeout of its collectives.
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + max(seconds, self._timeout_s)
        while missing := [key for key in keys if key not in self._values]:
            try:
                frame = self._arriving.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"no address from {len(missing)} other members") from None
            self._values[frame["key"]] = frame["blob"]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are here."""
        return all(key in self._values for key in keys)


def _mapped(path: Path | str, skip: int, values: int) -> NDArray[np.float32]:
    mapped: NDArray[np.float32] = np.memmap(path, "<f4", "r", skip, (values,))
    return mapped


def _group(job: dict[str, Any], store: Any) -> Any:
    """Connect all ranks. A device bound to `host`, so that no host name is looked up."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - there is no public name
    options._devices = [gloo.create_device(hostname=job["host"])]  # noqa: SLF001
    options._timeout = timedelta(seconds=job["timeout_s"])  # noqa: SLF001
    return gloo(store, job["rank"], len(job["weights"]), options)


def reduce_files(job: dict[str, Any], store: Any) -> None:
    """Write the result of a job to its `out`, synced, at most `bytes_per_s` of it a second.

    Raises RuntimeError (gloo, not finite) and OSError.
    """
    group = _group(job, store)
    values, skip, piece = job["values"], job["skip"], job["piece_values"]
    weight = np.float32(job["weights"][job["rank"]])
    base, cut = _mapped(job["base"], skip, values), _mapped(job["cut"], skip, values)
    residual = _mapped(job["residual"], skip, values) if job["residual"] else None
    # One buffer: memory that is touched first costs more than the reduction.
    buffer = torch.empty(min(piece, values), dtype=torch.float32)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    begun = time.monotonic()
    with open(job["base"], "rb") as head, open(job["out"], "xb", buffering=0) as out:  # noqa: PTH123
        os.fchmod(out.fileno(), 0o600)
        out.write(head.read(skip))
        for begin in range(0, values, piece):
            end = min(values, begin + piece)
            part = buffer[: end - begin]
            scratch = part.numpy()
            np.subtract(base[begin:end], cut[begin:end], out=scratch)
            np.multiply(scratch, weight, out=scratch)
            if residual is not None:
                np.subtract(scratch, residual[begin:end], out=scratch)
            group.allreduce([part], options).wait()
            if not np.isfinite(scratch).all():
                raise RuntimeError("the sum is not finite: a group has diverged")
            _write_all(out.fileno(), scratch.data.cast("B"))
            if job["bytes_per_s"]:
                due = begun + end * scratch.itemsize / job["bytes_per_s"]
                time.sleep(max(0.0, due - time.monotonic()))
        os.fsync(out.fileno())


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def reason_of(text: str) -> str:
    """An error of gloo in one line, without its place in gloo's source and its advice."""
    line = " ".join(text.split())
    line = re.sub(r"^(\[\S*\.cc:\d+\] )+", "", line)
    return line.partition(" This is typically caused by")[0][:_MAX_REASON]


def _receive(arriving: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take what arrives on standard input, and end the process with it."""
    frames = msgpack.Unpacker()
    while data := os.read(0, _READ_BYTES):
        frames.feed(data)
        for frame in frames:
            arriving.put(frame)
    os._exit(0)


def main() -> None:
    """Take one job from standard input, reduce, and report on standard output."""
    reports = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no report
    torch.set_num_threads(1)
    arriving: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(arriving,), daemon=True).start()

    def send(frame: dict[str, Any]) -> None:
        _write_all(reports, msgpack.packb(frame))

    job = arriving.get()
    try:
        reduce_files(job, MessageStore(arriving, send, job["timeout_s"]))
        send({"done": True})
    except Exception as error:  # noqa: BLE001 - any error is the reason of a failed attempt
        send({"reason": reason_of(str(error)) or type(error).__name__})
    os._exit(0)  # gloo may wait for other ranks where it is ended in order


if __name__ == "__main__":
    main()
