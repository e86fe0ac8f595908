"""The ports of the shells: what they need from store, learner and transport, so that the simulator can bring its own."""

# ruff: noqa: D102 - where no docstring stands, the implementation has it

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import fsl_transport as tp
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.events import Recovered
from fsl_async.store.delta_kind import DeltaKind
from fsl_async.store.manifest import Manifest
from fsl_async.store.merging import Average
from fsl_async.store.records import Committed, Outcome, SpoolResult

Kind = Literal["update", "full"]


class Streams(Protocol):
    """What both shells need from the transport."""

    def send(self, peer: str, body: dict[str, Any]) -> None: ...
    def disconnect(self, peer: str, reason: str) -> None: ...
    def offer(
        self,
        peer: str,
        stream_id: str,
        meta: dict[str, Any],
        source: tp.ChunkSource,
        eager_bytes: int = 0,
    ) -> None: ...
    def accept(
        self, peer: str, stream_id: str, sink: tp.ChunkSink, next_chunk: int = 0
    ) -> None: ...
    def decline(self, peer: str, stream_id: str, reason: str) -> None: ...
    def cancel(self, peer: str, stream_id: str, reason: str) -> None: ...
    def transfers(self) -> list[tp.Transfer]: ...


class Listener(Streams, Protocol):
    """What the server's shell needs from the transport (`fsl_transport.ListenerEndpoint`)."""

    def remember(self, name: str, incarnation: int) -> None: ...
    def welcome(self, peer: str, body: dict[str, Any]) -> None: ...
    def refuse(self, peer: str, code: str, text: str) -> None: ...


class Dialer(Streams, Protocol):
    """What a client's shell needs from the transport (`fsl_transport.DialerEndpoint`)."""

    @property
    def incarnation(self) -> int: ...
    def connect(self, hello: Callable[[], dict[str, Any]]) -> None: ...


class Store(Protocol):
    """What the shell needs from the durable state (`fsl_async.store.store.Store`; the simulator has its own)."""

    def recover(self) -> Recovered:
        """Read what the disk says."""
        ...

    @property
    def kind(self) -> DeltaKind:
        """What the run's deltas are made of."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The model's tensors; StoreError before version 0."""
        ...

    def begin_initial(self, manifest: Manifest) -> None:
        """Start version 0."""
        ...

    def write_initial(self, index: int, frame: bytes) -> None:
        """Add a chunk of version 0."""
        ...

    def finish_initial(self) -> Committed:
        """Make version 0 durable."""
        ...

    def spool_begin(self, delta: Delta, weight: float | None = None) -> Outcome | None:
        """Start or continue a delta, which would now be accumulated with that weight; what became of it when it is known."""
        ...

    def spool_next_chunk(self, key: DeltaKey) -> int:
        """The first chunk that is not spooled yet."""
        ...

    def spool_write(self, key: DeltaKey, index: int, frame: bytes) -> None:
        """Add a chunk of a delta."""
        ...

    def spool_finish(self, key: DeltaKey) -> SpoolResult:
        """Check the delta, make it durable, enter it into the ledger."""
        ...

    def quarantine(self, key: DeltaKey, reason: str, *, held: bool = False) -> None:
        """Keep a durable delta out of the run."""
        ...

    def release(self, key: DeltaKey) -> None:
        """Let a held delta wait again."""
        ...

    def accumulate(self, key: DeltaKey, weight: float) -> None:
        """Add a spooled delta to the accumulator."""
        ...

    def average(self, version: int, merged: Sequence[MergedDelta], scale: float) -> Average:
        """Fix what the next version is made of, out of the accumulator."""
        ...

    def advance(self, average: Average) -> Committed:
        """Make the next version."""
        ...

    def lease(
        self, name: str, limit: int, index: int | None = None, *, loan: bool = False
    ) -> int | None:
        """Book the data shard of a client, `index` if nobody has it for good; None when all are taken."""
        ...

    def record_incarnation(self, name: str, incarnation: int) -> None:
        """Remember the newest life of a client, also after a restart."""
        ...

    def keep_from(self, version: int | None) -> None:
        """Keep a version and all after it, because somebody is fetching them."""
        ...

    def has_update(self, version: int) -> bool:
        """Whether the coded outer delta that leads to a version is kept."""
        ...

    def read_update(self, version: int, index: int) -> bytes | None:
        """A chunk of the coded outer delta that leads to a version."""
        ...

    def read_full(self, version: int, index: int) -> bytes | None:
        """A chunk of a version's weights as an fp32 frame."""
        ...

    def verify(self, version: int) -> bool:
        """Whether every byte of a version is as it was written; what is not is repaired."""
        ...


class Reduction(Protocol):
    """Reduces averages over several parameter servers. None is in production yet."""

    def reduce(
        self,
        average: Average,
        done: Callable[[Average], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call `done` with the same round's average of all servers, or `failed`, on the loop's thread. `average.through` makes it."""
        ...


class Learner(Protocol):
    """What the shell needs of learning (`learn.client.exchange.Exchange`; the simulator has its own)."""

    @property
    def manifest(self) -> Manifest | None: ...
    def request_snapshot(self, sequence: int, *, hold: bool = False) -> None: ...
    def begin_round(self, sequence: int, number: int) -> None: ...
    def resume(self) -> None: ...
    def request_rebase(self, version: int, digest: str, *, discard: bool = False) -> None: ...
    def encode_initial(self, index: int) -> bytes: ...
    def adopt_initial(self) -> str: ...
    def encode_delta(self, sequence: int, index: int) -> bytes: ...
    def finish_encoding(self, sequence: int) -> None: ...
    def drop_delta(self, sequence: int) -> None: ...
    def begin_fetch(self, kind: Kind, version: int) -> None: ...
    def put_fetch(self, version: int, index: int, frame: bytes) -> None: ...
    def finish_fetch(self, version: int) -> str: ...
    def stop(self) -> None: ...
    def refuse(self, code: str, text: str) -> None: ...
