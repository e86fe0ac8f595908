"""One reduction, in a child of the helper: a ring all-reduce of what the groups gained.

For each piece of values, on every rank, in fp32:

    D = base - cut            what this group gained, with the sign of a pseudo-gradient
    V = weight * D            at the coordinator minus what coding has lost of the rounds before
    out = sum of V            by gloo's ring, over all ranks in the order of the view

The parameter server makes the next global weights of it (`fsl_async.store.commit.groups_store`).
The sum is bit-equal on all ranks, and depends on the number of ranks, their order and the size of
pieces (measured); all three are in the view. The inputs are mapped and not changed.

Addresses of the ranks are exchanged by `MessageStore`, a torch store that is fed with messages, so
there is no store server with a port of its own. gloo connects all pairs of ranks; it neither
encrypts nor authenticates (docs/SECURITY.md).
"""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from fsl_async.nodes.reduction_helper.pipes import Frames, pack

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_READ_BYTES = 1 << 16
MEET_S = 60.0
"""How long to wait for the others' addresses at least: their helpers may still import torch."""
_MAX_REASON = 300


class MessageStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store of torch.distributed whose keys come and go as frames."""

    def __init__(self, line: socket.socket, timeout_s: float) -> None:
        super().__init__()
        self._line = line
        self._frames = Frames()
        self._timeout_s = max(timeout_s, MEET_S)
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value, and send it to the other ranks."""
        blob = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = blob
        self._line.sendall(pack({"is": "address", "key": key, "blob": blob}))

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
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._line.recv(_READ_BYTES)
            except TimeoutError:
                raise RuntimeError(f"no address from {len(missing)} other members") from None
            if not data:
                raise RuntimeError("the helper has ended")
            for frame in self._frames.add(data):
                self._values[frame["key"]] = frame["blob"]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are here."""
        return all(key in self._values for key in keys)


class Pace:
    """Waits so that at most `bytes_per_s` are reduced; 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._begun = time.monotonic()
        self._bytes = 0

    def add(self, count: int) -> None:
        """Wait after so many bytes more."""
        self._bytes += count
        if self._bytes_per_s:
            due = self._begun + self._bytes / self._bytes_per_s
            time.sleep(max(0.0, due - time.monotonic()))


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
    """Write the result of a job (`pipes`) to its `out`, synced.

    Raises RuntimeError (gloo, not finite) and OSError.
    """
    group = _group(job, store)
    values, skip, piece = job["values"], job["skip"], job["piece_values"]
    weight = np.float32(job["weights"][job["rank"]])
    base, cut = _mapped(job["base"], skip, values), _mapped(job["cut"], skip, values)
    residual = _mapped(job["residual"], skip, values) if job["residual"] else None
    # One buffer: memory that is touched first costs more than the reduction.
    buffer = torch.empty(min(piece, values), dtype=torch.float32)
    pace = Pace(job["bytes_per_s"])
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    with open(job["base"], "rb") as head, open(job["out"], "xb", buffering=0) as out:  # noqa: PTH123
        os.fchmod(out.fileno(), 0o600)
        out.write(head.read(skip))
        for begin in range(0, values, piece):
            end = min(values, begin + piece)
            part = buffer[: end - begin]
            room = part.numpy()
            np.subtract(base[begin:end], cut[begin:end], out=room)
            np.multiply(room, weight, out=room)
            if residual is not None:
                np.subtract(room, residual[begin:end], out=room)
            group.allreduce([part], options).wait()
            if not np.isfinite(room).all():
                raise RuntimeError("the sum is not finite: a group has diverged")
            view = room.data.cast("B")
            while view:
                view = view[out.write(view) :]
            pace.add(room.nbytes)
        os.fsync(out.fileno())


def reason_of(text: str) -> str:
    """An error of gloo in one line, without its place in gloo's source and its advice."""
    line = " ".join(text.split())
    line = re.sub(r"^(\[\S*\.cc:\d+\] )+", "", line)
    return line.partition(" This is typically caused by")[0][:_MAX_REASON]


def run(job: dict[str, Any], line: socket.socket) -> int:
    """Reduce, and report on `line`; returns the exit code."""
    torch.set_num_threads(1)
    try:
        reduce_files(job, MessageStore(line, job["timeout_s"]))
    except Exception as error:  # noqa: BLE001 - any error is the reason of a failed attempt
        reason = reason_of(str(error)) or type(error).__name__
        line.sendall(pack({"is": "failed", "reason": reason}))
        return 1
    line.sendall(pack({"is": "done"}))
    return 0
