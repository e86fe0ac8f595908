"""Reads and writes hellos, welcomes, heartbeats and names of streams. Pure.

Everything read here comes from a peer: each field is checked, and a wrong one raises MessageError.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

from attrs import define, field, frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import Category, Direction
from fsl_async.accounting.traffic import Traffic
from fsl_async.config.settings import Config
from fsl_async.nodes.runtime import Worker
from fsl_async.roles.messages import MessageError, checked_text, optional
from fsl_async.roles.sync.delta import DIGEST, POSITION, TRAIN
from fsl_async.roles.sync.events import TransfersChecked
from fsl_async.roles.sync.membership import MOST_SHARDS
from fsl_async.roles.sync.messages import DUTY, RUN
from fsl_async.secure.lattice import is_masked
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import SEEDS_HEADER_BYTES, format_of, is_seeds
from fsl_transport.text import peer_text

MAX_BEAT_ENTRIES = 64
MAX_BEAT_TEXT = 256
MAX_PROBLEM = 500


def _take(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int:
        raise MessageError(f"{name} is {type(value).__name__}, not int", "wrong-type")
    if not -1 <= value < 1 << 63:
        raise MessageError(f"{name} is out of range")
    return value


def _take_tables(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise MessageError(f"{name} is {type(value).__name__}, not a map", "wrong-type")
    return value


@frozen
class Hello:
    """A client's first message: its run ("" = none yet), version and data shard (-1 = none).

    duty: what it does in the run.
    """

    run: str
    version: int
    digest: str
    shard: int
    duty: str = TRAIN

    def to_wire(self) -> dict[str, Any]:
        """Return the plain map."""
        held = {"version": self.version, "digest": self.digest, "shard": self.shard}
        return {"run": self.run, **held, **({} if self.duty == TRAIN else {"duty": self.duty})}

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> Hello:
        """Read a peer's hello; raises MessageError."""
        run = checked_text("run", body.get("run"), optional(RUN))
        digest = checked_text("digest", body.get("digest"), optional(DIGEST))
        duty = checked_text("duty", body.get("duty", TRAIN), DUTY)
        return cls(run, _take(body, "version"), digest, _take(body, "shard"), duty)


@frozen
class Welcome:
    """The answer: the run, this client's data shard, and the run's configuration.

    shards: parts of the run's data; 0 where it is not divided.
    """

    run: str
    shard: int
    shards: int
    config: dict[str, Any]
    position: dict[str, float] = field(factory=dict)
    """Where the client's last acknowledged delta ended in its data (`delta.POSITION`)."""

    def to_wire(self) -> dict[str, Any]:
        """Return the plain map."""
        position = {"position": self.position} if self.position else {}
        part = {"shard": self.shard, "shards": self.shards}
        return {"run": self.run, **part, "config": self.config, **position}

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> Welcome:
        """Read a parameter server's welcome; raises MessageError."""
        shard, shards = _take(body, "shard"), _take(body, "shards")
        if not 0 <= shard < (shards or MOST_SHARDS):
            raise MessageError(f"shard {shard} of {shards} does not exist")
        return cls(
            checked_text("run", body.get("run"), RUN),
            shard,
            shards,
            _take_tables(body, "config"),
            position_of(body.get("position", {})),
        )


def position_of(given: object) -> dict[str, float]:
    """Read a position in the data: whole numbers from 0 on. Raises MessageError."""
    if not isinstance(given, dict):
        raise MessageError(f"position is {type(given).__name__}, not a map", "wrong-type")
    found = {name: given[name] for name in POSITION if name in given}
    for name, value in found.items():
        if type(value) not in {int, float} or not 0 <= value < 1 << 53 or value % 1:
            raise MessageError(f"position: {name} is no whole number", "wrong-type")
    return {name: float(value) for name, value in found.items()}


def beat_of(payload: dict[str, Any]) -> dict[str, Any]:
    """Read a heartbeat's payload: its first entries that are numbers, bools, None or text."""
    made: dict[str, Any] = {}
    for name, value in islice(payload.items(), MAX_BEAT_ENTRIES):
        if type(value) is str:
            made[peer_text(name, MAX_BEAT_TEXT)] = peer_text(value, MAX_BEAT_TEXT)
        elif value is None or type(value) in {int, float, bool}:
            made[peer_text(name, MAX_BEAT_TEXT)] = value
    return made


def problem_of(error: Exception) -> str:
    """The text of an error about a peer's bytes, made printable, because it may quote them."""
    return peer_text(str(error), MAX_PROBLEM)


def code_of(error: Exception) -> str:
    """The kind of violation; a stream that cannot be decoded is "bad-content"."""
    return error.code if isinstance(error, MessageError) else "bad-content"


_VIOLATION = "protocol: "


def violation(problem: str) -> str:
    """The reason in the BYE of a session whose peer has sent a message that cannot be read."""
    return f"{_VIOLATION}{problem}"


def violation_in(reason: str) -> str:
    """The problem in the reason of a BYE from `violation`; empty for any other reason."""
    return reason.removeprefix(_VIOLATION) if reason.startswith(_VIOLATION) else ""


_EARLY_CHUNKS = 4
_CHUNK_BYTES = 3 << 19
"""Upper bound of a chunk's bytes in fp32."""


def eager_bytes(chunks: int) -> int:
    """How many bytes of a model may be sent before the peer accepts: all of a small one, else none.

    For a small model, round trips take longer than the transfer.
    """
    return chunks * _CHUNK_BYTES if chunks <= _EARLY_CHUNKS else 0


def count_weights(
    traffic: Traffic,
    manifest: Manifest,
    direction: Direction,
    index: int,
    frame: bytes,
    *,
    config: Config,
) -> None:
    """Count a chunk of weights between a client and the parameter server.

    An auxiliary model that is averaged with the client's part (CSE-FSL) is recognized by the names
    of its tensors.
    """
    if is_seeds(frame):
        traffic.payload[Category.SCALARS, direction] += len(frame) - SEEDS_HEADER_BYTES
        traffic.coded[Category.SCALARS, direction] += len(frame)
        return
    if is_masked(frame):
        of_scalars = config.tune.method == "zeroth"
        traffic.plain(Category.SCALARS if of_scalars else Category.ADAPTERS, direction, len(frame))
        return
    category = Category.CLIENT_MODEL if config.split.has_server else Category.FULL_MODEL
    if config.tune.is_on:
        category = Category.ADAPTERS
    start, stop = manifest.chunk_range(index)
    auxiliary = 0
    if category is Category.CLIENT_MODEL:
        auxiliary = sum(
            max(0, min(stop, spec.offset + math.prod(spec.shape)) - max(start, spec.offset))
            for spec in manifest.tensors
            if spec.name.startswith("auxiliary.")
        )
    coded = round(len(frame) * auxiliary / max(stop - start, 1))
    number_format = format_of(frame)
    own = stop - start - auxiliary
    traffic.values(category, direction, number_format, own, len(frame) - coded)
    if auxiliary:
        traffic.values(Category.AUXILIARY, direction, number_format, auxiliary, coded)


AT_ONCE = 8
"""Chunks from memory that one turn of the loop may send, the next goes through the worker; and
chunks that one job of the worker takes."""


@define(eq=False, slots=False)
class Source:
    """Chunks that the worker codes, or reads from disk, as the link has room.

    make: returns a chunk; None: it is deleted. count: called with each chunk. in_memory: returns a
    chunk that is in memory. failed: called with an error of `make`.
    """

    chunks: int
    _worker: Worker
    _make: Callable[[int], bytes | None]
    _count: Callable[[int, bytes], None] = lambda _, __: None
    _in_memory: Callable[[int], bytes | None] = lambda _: None
    _failed: Callable[[Exception], None] = lambda _: None

    def __attrs_post_init__(self) -> None:
        self.bytes_coded = 0

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """Make a chunk; None when it is deleted, or that fails."""

        def done(frame: bytes | None) -> None:
            if frame is not None:
                self.bytes_coded += len(frame)
                self._count(index, frame)
            deliver(frame)

        def failed(error: Exception) -> None:
            deliver(None)
            self._failed(error)

        frame = self._in_memory(index) if (index + 1) % AT_ONCE else None
        if frame is not None:
            done(frame)
        else:
            self._worker.submit(lambda: self._make(index), done, failed)


@define(eq=False, slots=False)
class Sink:
    """Passes the chunks of one stream to the worker, in order.

    A job has all chunks that have arrived since the one before, at most AT_ONCE: handing over costs
    as much as storing a chunk of two bits a value. Chunks that are not taken end the stream.

    take: gets the first chunk's number, and the frames. problem: called with the error. count:
    called with each chunk that is taken.
    """

    _worker: Worker
    _take: Callable[..., None]
    _count: Callable[[int, bytes], None] = lambda _, __: None
    _problem: Callable[[str], None] = lambda _: None

    def __attrs_post_init__(self) -> None:
        self._arrived: deque[tuple[int, bytes, Callable[[bool], None]]] = deque()
        self._is_taking = False

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """Take a chunk in the worker, after those before it."""
        self._arrived.append((index, bytes(data), done))
        if not self._is_taking:
            self._take_arrived()

    def _take_arrived(self) -> None:
        chunks = [self._arrived.popleft() for _ in range(min(AT_ONCE, len(self._arrived)))]
        self._is_taking = bool(chunks)
        if not chunks:
            return
        first = chunks[0][0]
        frames = [frame for _, frame, _ in chunks]

        def taken(_: None) -> None:
            self._take_arrived()
            for index, frame, done in chunks:
                self._count(index, frame)
                done(True)

        def failed(error: Exception) -> None:
            self._problem(str(error))
            chunks.extend(self._arrived)
            self._arrived.clear()
            for _, _, done in chunks:
                done(False)

        self._worker.submit(lambda: self._take(first, *frames), taken, failed)


class TransferProgress:
    """Compares transfers with those at the last check; before the first check there were none."""

    def __init__(self) -> None:
        self._seen: dict[str, set[tuple[str, bool, int]]] = {}

    def look(
        self, transfers: Iterable[tp.Transfer], busy: Collection[str] = ()
    ) -> TransfersChecked:
        """The peers with a stream that began, advanced by a chunk or ended since the last check.

        busy: peers that count too, because what they sent is being stored.
        """
        now: dict[str, set[tuple[str, bool, int]]] = {}
        for transfer in transfers:
            place = (transfer.stream_id, transfer.sending, transfer.done)
            now.setdefault(transfer.peer, set()).add(place)
        before, self._seen = self._seen, now
        moved = {peer for peer in {*before, *now} if before.get(peer) != now.get(peer)}
        moved.update(busy)
        return TransfersChecked(tuple(sorted(moved)))
