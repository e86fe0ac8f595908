"""How a role's dealings look on the wire: hello, welcome and stream names. Pure.

Everything read here comes from a peer: each field is checked, and what does not fit raises MessageError.
"""

from __future__ import annotations

from typing import Any, TypeVar

from attrs import frozen

from fsl_async.messages import MAX_TEXT, MessageError

T = TypeVar("T", int, str)


def _take(body: dict[str, Any], name: str, kind: type[T]) -> T:
    value = body.get(name)
    if type(value) is not kind:
        raise MessageError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise MessageError(f"{name} is longer than {MAX_TEXT} characters")
    return value


def _take_tables(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise MessageError(f"{name} is {type(value).__name__}, not a map")
    return value


@frozen
class Hello:
    """What a client says first: the run it is in ("" = none yet), the version it holds and its data shard (-1 = none)."""

    run: str
    version: int
    digest: str
    shard: int

    def to_wire(self) -> dict[str, Any]:
        """Return the plain map."""
        held = {"version": self.version, "digest": self.digest, "shard": self.shard}
        return {"run": self.run, **held}

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> Hello:
        """Read a peer's hello; raises MessageError."""
        run, digest = _take(body, "run", str), _take(body, "digest", str)
        return cls(run, _take(body, "version", int), digest, _take(body, "shard", int))


@frozen
class Welcome:
    """What the server answers: the run, this client's data shard, and the run's whole configuration."""

    run: str
    shard: int
    shards: int
    config: dict[str, Any]

    def to_wire(self) -> dict[str, Any]:
        """Return the plain map."""
        return {"run": self.run, "shard": self.shard, "shards": self.shards, "config": self.config}

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> Welcome:
        """Read the server's welcome; raises MessageError."""
        shard, shards = _take(body, "shard", int), _take(body, "shards", int)
        if not 0 <= shard < shards:
            raise MessageError(f"shard {shard} of {shards} does not exist")
        return cls(
            _take(body, "run", str),
            shard,
            shards,
            _take_tables(body, "config"),
        )


def delta_stream(key: str) -> str:
    """Name of the stream that carries a delta."""
    return f"delta:{key}"


def initial_stream(client: str, incarnation: int) -> str:
    """Name of the stream that carries a client's initial weights."""
    return f"initial:{client}/{incarnation}"


def version_stream(kind: str, version: int) -> str:
    """Name of the stream that leads to a version; kind is "update" or "full"."""
    return f"{kind}:{version}"


_EARLY_CHUNKS = 4
_CHUNK_BYTES = 1 << 19
"""Of a chunk of fp32, rather more than it has."""


def early_bytes(chunks: int) -> int:
    """How much of a model may go before it is asked for: all of a small one, whose round trips would take longer than itself; nothing of a large one."""
    return chunks * _CHUNK_BYTES if chunks <= _EARLY_CHUNKS else 0
