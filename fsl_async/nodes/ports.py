"""The ports of the shells to store, learner and transport; the simulator has its own of each."""

# ruff: noqa: D102 - methods without a docstring have it at the implementation

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import fsl_transport as tp
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.events import Recovered
from fsl_async.roles.sync.progress import Decay, RunPosition
from fsl_async.store.delta_kind import DeltaKind
from fsl_async.store.manifest import Manifest
from fsl_async.store.merging import Average
from fsl_async.store.records import Committed, Outcome, SpoolResult

Kind = Literal["update", "seeds", "full", "global", "global_full"]


class Streams(Protocol):
    """Transport for both shells."""

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
    """Transport for a shell that accepts connections (`fsl_transport.ListenerEndpoint`)."""

    def remember(self, name: str, incarnation: int) -> None: ...
    def welcome(self, peer: str, body: dict[str, Any]) -> None: ...
    def refuse(self, peer: str, code: str, text: str) -> None: ...


class Dialer(Streams, Protocol):
    """Transport for a client's shell (`fsl_transport.DialerEndpoint`)."""

    @property
    def incarnation(self) -> int: ...
    def connect(self, hello: Callable[[], dict[str, Any]]) -> None: ...


class Store(Protocol):
    """Durable state of the parameter server (`fsl_async.store.store.Store`)."""

    def recover(self) -> Recovered:
        """Read the state on disk."""
        ...

    @property
    def kind(self) -> DeltaKind:
        """The kind of the run's deltas."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The model's tensors. Raises StoreError before version 0."""
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
        """Start or continue a delta. Returns its outcome if it has one.

        weight: of its accumulation now; None: unknown.
        """
        ...

    def spool_next_chunk(self, key: DeltaKey) -> int:
        """Index of the first chunk that is not spooled yet."""
        ...

    def spool_write(self, key: DeltaKey, index: int, frame: bytes) -> None:
        """Add a chunk of a delta."""
        ...

    def spool_finish(self, key: DeltaKey) -> SpoolResult:
        """Check the delta, make it durable, and write it to the ledger."""
        ...

    def quarantine(self, key: DeltaKey, reason: str, *, held: bool = False) -> None:
        """Exclude a durable delta from the run."""
        ...

    def release(self, key: DeltaKey) -> None:
        """Make a held delta pending again."""
        ...

    def accumulate(self, key: DeltaKey, weight: float) -> None:
        """Add a spooled delta to the accumulator."""
        ...

    def average(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition = ...,
        worth: float = ...,
    ) -> Average:
        """Take the average for the next version from the accumulator.

        position: where the run is once the version is made. worth: of how many deltas it is the
        mean; 0: of all.
        """
        ...

    def record_decay(self, decay: Decay) -> None:
        """Record that learning rates fall from now on."""
        ...

    def advance(self, average: Average) -> Committed:
        """Make the next version."""
        ...

    def lease(
        self, name: str, limit: int, index: int | None = None, *, provisional: bool = False
    ) -> int | None:
        """Lease a data shard to a client; None when all are taken.

        index: the shard wanted. provisional: another client may take it.
        """
        ...

    def record_incarnation(self, name: str, incarnation: int) -> None:
        """Record the newest incarnation of a client durably."""
        ...

    def keep_from(self, version: int | None) -> None:
        """Keep a version and all later ones, because clients fetch them; None: no client does."""
        ...

    def read_seeds(self, since: int, version: int) -> bytes | None:
        """Return a frame of all scalars from version `since` to `version`, or None."""
        ...

    def has_update(self, version: int) -> bool:
        """Whether the coded outer delta that leads to a version is kept."""
        ...

    def read_update(self, version: int, index: int) -> bytes | None:
        """A chunk of the coded outer delta that leads to a version."""
        ...

    def has_global_update(self, version: int) -> bool:
        """Whether the coded change from the global weights before is kept."""
        ...

    def read_global_update(self, version: int, index: int) -> bytes | None:
        """A coded chunk of the change from the global weights before to `version`."""
        ...

    def update_in_memory(self, version: int, index: int) -> bytes | None:
        """What `read_update` returns if that is in memory, else None. For any thread."""
        ...

    def read_full(self, version: int, index: int) -> bytes | None:
        """A chunk of a version's weights as an fp32 frame."""
        ...

    def verify(self, version: int) -> bool:
        """Whether every byte of a version is as it was written; damage is repaired."""
        ...


class Learner(Protocol):
    """Exchange of weights at a client (`learn.client.exchange.Exchange`)."""

    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def global_digest(self) -> str: ...
    def request_snapshot(self, sequence: int, *, hold: bool = False) -> None: ...
    def begin_round(self, sequence: int, number: int) -> None: ...
    def count_steps(self, steps: int) -> None: ...
    def resume(self) -> None: ...
    def request_rebase(self, version: int, digest: str, *, discard: bool = False) -> None: ...
    def encode_initial(self, index: int) -> bytes: ...
    def adopt_initial(self) -> str: ...
    def scalars_frame(self, sequence: int) -> bytes | None: ...
    def delta_frames(self, sequence: int) -> int: ...
    def encode_delta(self, sequence: int, index: int) -> bytes: ...
    def finish_encoding(self, sequence: int) -> None: ...
    def drop_delta(self, sequence: int) -> None: ...
    def begin_fetch(self, kind: Kind, version: int) -> None: ...
    def put_fetch(self, version: int, index: int, frame: bytes) -> None: ...
    def finish_fetch(self, version: int) -> str: ...
    def stop(self) -> None: ...
    def refuse(self, code: str, text: str) -> None: ...
