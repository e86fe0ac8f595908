"""The ranks of one client (a gang) among themselves: values that all get, and parts of vectors.

A gloo group beside the task's own groups, of whatever backend they are. All ranks call `gathered`
at the same points of their work, so what they get is the same and so is what they do then.

The node is on rank 0's machine, and ranks there share its vectors. For a rank on another machine
its parts of them travel between it and rank 0 in this group: what it writes (the first weights,
snapshots) and what it reads (base and reference of a move, the base of `fed.at_version`). There a
vector is sparse memory, in which only these parts take pages. So a sync moves each shard three
times over the cluster's network, once up and twice down, and nothing is gathered. The connections
are not encrypted, as those of NCCL and of the task's gloo are not.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fsl_async.errors import TaskError, one_line
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.gang.link import NodeLostError, Place

Range = tuple[int, int]

TIMEOUT = timedelta(minutes=30)
"""One rank may evaluate or compile alone, but not for longer than that."""
APART_S = 60.0
"""How long some ranks may wait for others before a line says so; saving a model may take longer."""
UP, DOWN = 1, 2
"""Tags of parts that travel to rank 0, and from it."""
_ROW = 4096
"""Bytes of a rank's value in the first collective; larger values take a second one."""
_LENGTH = struct.Struct("<Q")
_FAILED = "failed"
"""Key in the store: the text and exit code of an error of a rank without a connection."""


class RankGroup:
    """The group, as one rank sees it. For the training thread alone.

    remote: the ranks on other machines than rank 0. on_apart: called, in another thread, where this
    rank has waited APART_S for others, with what it waits in. Raises TaskError where the ranks
    cannot find each other.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.on_apart: Callable[[str], None] = lambda _: None
        try:
            store, _, _ = next(iter(rendezvous("env://", place.rank, place.world, timeout=TIMEOUT)))
            # torchrun may keep one store for all starts of its ranks, and there a rank could find
            # the address of a dead one.
            self._store = dist.PrefixStore(  # type: ignore[attr-defined]
                f"fsl-gang/{place.generation}", store
            )
            self._group: Any = dist.ProcessGroupGloo(self._store, place.rank, place.world, TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise TaskError(
                f"the ranks of this client do not find each other ({one_line(str(error))}): start"
                " them with torchrun"
            ) from error
        is_remote = self.gathered("fsl_async.join", place.is_remote)
        self.remote = [rank for rank, found in enumerate(is_remote) if found]
        self._transfer: threading.Thread | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, to which alone the node speaks."""
        return self.place.rank == 0

    def close(self) -> None:
        """End the group, and its threads: Python aborts where one frees an array after its end."""
        if self._transfer is not None:
            self._transfer.join()
        self._group = None

    # --- values ---

    def gathered(self, where: str, mine: Any = None) -> list[Any]:
        """Return the values of all ranks, by rank: plain values, which travel as msgpack.

        where: what all of them do, for errors. Raises NodeLostError where a rank has ended, and
        TaskError where some do something else.
        """
        data: bytes = msgpack.packb([where, mine])
        rows, most = self._all_gather(data, _ROW)
        if most > _ROW:
            rows, _ = self._all_gather(data, most)
        found = [msgpack.unpackb(row) for row in rows]
        if any(place != where for place, _ in found):
            shown = "; ".join(f"rank {rank}: {place}" for rank, (place, _) in enumerate(found))
            raise TaskError(f"the ranks do different things ({shown}): each must do the same")
        return [value for _, value in found]

    def _all_gather(self, data: bytes, size: int) -> tuple[list[bytes], int]:
        """Gather so many bytes of each rank; return the values, and the bytes that all need."""
        row = np.zeros(size, np.uint8)
        framed = (_LENGTH.pack(len(data)) + data)[:size]
        row[: len(framed)] = np.frombuffer(framed, np.uint8)
        found = torch.empty(self.place.world, size, dtype=torch.uint8)
        try:
            self._group.allgather([list(found)], [torch.from_numpy(row)]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        rows = [one.tobytes() for one in found.numpy()]
        lengths = [_LENGTH.unpack_from(one)[0] for one in rows]
        values = [
            one[_LENGTH.size : _LENGTH.size + length]
            for one, length in zip(rows, lengths, strict=True)
        ]
        return values, max(lengths) + _LENGTH.size

    def all_here(self, where: str) -> None:
        """Wait for all ranks; where some come late, `on_apart` is called."""
        timer = threading.Timer(APART_S, self.on_apart, (where,))
        timer.daemon = True
        timer.start()
        try:
            self.gathered(where)
        finally:
            timer.cancel()

    # --- errors ---

    def failed(self, text: str, code: int) -> None:
        """Leave an error for the rank that has a connection with the node."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILED, msgpack.packb([text, code]))

    def failure(self) -> tuple[str, int] | None:
        """The error that some rank left."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_FAILED]):
                text, code = msgpack.unpackb(self._store.get(_FAILED))
                return text, code
        return None

    def _lost(self, error: Exception) -> NodeLostError:
        text = f"another rank of this client has ended ({one_line(str(error))})"
        return NodeLostError(text)

    # --- parts of vectors ---

    def send(self, vector: Vector, ranges: Iterable[Range], to: int, tag: int) -> list[Any]:
        """Begin to send parts of a vector, which nothing may write until they are sent."""
        return [self._group.send([part], to, tag) for part in _parts(vector, ranges)]

    def receive(self, vector: Vector, ranges: Iterable[Range], origin: int, tag: int) -> list[Any]:
        """Begin to receive parts of a vector."""
        return [self._group.recv([part], origin, tag) for part in _parts(vector, ranges)]

    def when_done(self, transfers: Sequence[Any], then: Callable[[], None] = lambda: None) -> None:
        """Call `then` in another thread once these transfers, and those before, are done.

        It is not called where one fails: a rank is lost, as the next `gathered` finds.
        """
        before = self._transfer

        def wait() -> None:
            if before is not None:
                before.join()
            with contextlib.suppress(RuntimeError, NodeLostError):
                for one in transfers:
                    one.wait()
                then()

        # No daemon: Python ends the process by SIGABRT where one is in torch at the exit.
        self._transfer = threading.Thread(target=wait, name="gang")
        self._transfer.start()


def _parts(vector: Vector, ranges: Iterable[Range]) -> Iterable[torch.Tensor]:
    return (torch.from_numpy(vector[start:stop]) for start, stop in ranges)


def check_parts(
    values: int, fingerprints: Sequence[str], writes: Sequence[Sequence[Range]]
) -> None:
    """Raise TaskError unless all ranks attach one model, and copy out each of its values once."""
    if len(set(fingerprints)) > 1:
        raise TaskError(
            "the ranks have attached different models: all must attach the same one (stages of a"
            " pipeline are not supported)"
        )
    place = uncovered([part for one in writes for part in one], values)
    if place is not None:
        raise TaskError(
            f"value {place:,} of the model is copied by no rank, or by two: shard it with"
            " fully_shard over all ranks, or hold it whole in each"
        )


def uncovered(ranges: Sequence[Range], values: int) -> int | None:
    """Return the first value that is in no range or in two; None where each is in one."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            return min(start, at)
        at = stop
    return None if at == values else min(at, values)


LARGEST = ("nonfinite", "snapshot_s", "not_finite")
"""Metrics of which the largest of the ranks counts; of others the mean."""


def joined(reports: Sequence[dict[str, float]], sums: Sequence[str] = ()) -> dict[str, float]:
    """Return what the ranks report as one: the means, or for some names the largest or the sum."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for one in reports for name in one):
        values = [float(one[name]) for one in reports if name in one]
        if name in sums:
            found[name] = sum(values)
        else:
            found[name] = max(values) if name in LARGEST else sum(values) / len(values)
    return found
