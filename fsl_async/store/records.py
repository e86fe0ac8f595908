"""The store's records: frozen values, and their form in the ledger. Pure.

A delta is known by its key from the moment it is acknowledged: it is accepted (spooled, not merged
yet), merged (part of a version) or quarantined (kept aside, never merged). The classes of deltas
are those of `fsl_async.roles.sync.delta`; in the ledger a delta is one flat object.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Self

from attrs import evolve, field, fields_dict, frozen, validators

from fsl_async.roles.names import NAME
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta
from fsl_async.store.aggregation import Mean, Rule
from fsl_async.store.delta_kind import DeltaKind, Dense
from fsl_async.store.errors import FrameRefused, StoreError
from fsl_async.store.outer import OuterSettings
from fsl_codecs import CodecSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

Outcome = Literal["accepted", "merged", "quarantined"]

MAX_METRICS = 64
MAX_METRIC_NAME = 64

_FILE_SUFFIX = ".frames"


def file_name(key: DeltaKey) -> str:
    """`client@incarnation@base@sequence.frames`; FrameRefused when the key is unfit for a file
    name.
    """
    numbers = (key.incarnation, key.base, key.sequence)
    if not NAME.fullmatch(key.client) or not all(0 <= n < 2**63 for n in numbers):
        raise FrameRefused(f"delta key {key.text[:120]!a} cannot be a file name here")
    return key.text.replace("/", "@") + _FILE_SUFFIX


def key_of_file(name: str) -> DeltaKey | None:
    """The key that `file_name` turned into `name`, or None for any other file."""
    if not name.endswith(_FILE_SUFFIX):
        return None
    try:
        return DeltaKey.parse(name.removesuffix(_FILE_SUFFIX).replace("@", "/"))
    except ValueError:
        return None


def _clean_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """At most MAX_METRICS numbers with short names; what is not finite becomes None, as JSON has no
    NaN.
    """
    clean: dict[str, float | None] = {}
    for name, value in list(metrics.items())[:MAX_METRICS]:
        number = float(value) if isinstance(value, int | float) else math.nan
        clean[str(name)[:MAX_METRIC_NAME]] = number if math.isfinite(number) else None
    return clean


def recordable(delta: Delta) -> Delta:
    """A delta whose metrics are fit for the ledger; StoreError when its counts make no sense."""
    if not all(type(count) is int and count >= 0 for count in (delta.tokens, delta.steps)):
        raise StoreError(
            f"delta {delta.key.text} has {delta.tokens!r} tokens and {delta.steps!r} steps;"
            " both must be whole numbers, not negative"
        )
    return evolve(delta, metrics=_clean_metrics(delta.metrics))


def to_fact(stored: StoredDelta) -> dict[str, Any]:
    """Members of the ledger line of a delta."""
    delta = stored.delta
    return {
        "key": delta.key.text,
        "tokens": delta.tokens,
        "steps": delta.steps,
        "round": delta.round,
        "base_digest": delta.base_digest,
        "bytes": stored.bytes,
        "norm": stored.norm,
        "sha256": stored.sha256,
        "metrics": delta.metrics,
    }


def from_fact(fact: Mapping[str, Any]) -> StoredDelta:
    """Read `to_fact` back, ignoring other members."""
    delta = Delta(
        DeltaKey.parse(fact["key"]),
        fact["base_digest"],
        fact["tokens"],
        fact["steps"],
        fact["round"],
        fact["metrics"],
    )
    return StoredDelta(delta, fact["bytes"], fact["norm"], fact["sha256"])


@frozen
class SpoolResult:
    """The end of a spooled delta. `problem`: why it is in quarantine; its norm is then 0."""

    stored: StoredDelta
    problem: str | None = None


@frozen
class VersionRecord:
    """One version: what it is made of, and what leads to it. The audit trail of a run is the list
    of these.
    """

    version: int
    digest: str
    parent: str
    """Digest of the version before, or empty for version 0."""
    generation: int
    """How often the run had been rolled back when the version was made."""
    fingerprint: str
    merged: tuple[MergedDelta, ...]
    """Without base digests, rounds and metrics: those are in the lines in which the deltas were
    accepted.
    """
    scale: float
    tokens_total: int
    """Tokens of all deltas merged up to this version."""
    update_bytes: int
    update_chunks: int
    update_norm: float
    rule: str = "mean"
    """Of aggregation. Where it is the mean, the average was `scale` times the sum of weight x
    delta; else see `fsl_async.store.aggregation`.
    """

    def to_fact(self) -> dict[str, Any]:
        """Members of the ledger line and of the version's manifest.json."""
        members = {name: getattr(self, name) for name in fields_dict(type(self))}
        return {**members, "merged": [_entry(one) for one in self.merged]}

    @classmethod
    def from_fact(cls, fact: Mapping[str, Any]) -> Self:
        """Read `to_fact` back, ignoring other members."""
        merged = tuple(
            MergedDelta(
                Delta(DeltaKey.parse(entry["key"]), "", entry["tokens"], entry["steps"]),
                entry["staleness"],
                entry["weight"],
                entry["norm"],
            )
            for entry in fact["merged"]
        )
        members = {name: fact[name] for name in fields_dict(cls) if name in fact}
        return cls(**{**members, "merged": merged})


def _entry(merged: MergedDelta) -> dict[str, Any]:
    """A delta in a version's line."""
    delta = merged.delta
    work = {"key": delta.key.text, "tokens": delta.tokens, "steps": delta.steps}
    return work | {
        "staleness": merged.staleness,
        "weight": merged.weight,
        "norm": merged.norm,
    }


@frozen
class Committed:
    """A version is durable. `notice` is one line about something that can wait (an old version not
    removed yet).
    """

    version: int
    digest: str
    update_bytes: int
    update_chunks: int
    update_norm: float
    notice: str | None = None


@frozen
class StoreSettings:
    """How the store keeps and advances versions."""

    keep_versions: int = field(default=3, validator=validators.ge(1))
    codec_down: CodecSpec = field(factory=lambda: CodecSpec(format="uniform"))
    outer: OuterSettings = field(factory=OuterSettings)
    threads: int = field(default=1, validator=validators.ge(1))
    """That decode chunks, and write a version's files, at the same time."""
    rule: Rule = field(factory=Mean)
    """Of aggregation; of kinds that are not comparable only the mean."""
    kind: DeltaKind = field(factory=Dense)
    """What the run's deltas are made of. Of full weights the average is the next version
    (docs/adr/0045).
    """

    @kind.validator
    def _check_kind(self, _: object, kind: DeltaKind) -> None:
        if kind.is_full and self.outer.optimizer != "average":
            raise ValueError("full weights can be averaged and nothing else")
        if self.rule.by_rows and not kind.comparable:
            raise ValueError(f"{kind.name} deltas cannot be aggregated by {self.rule.name}")
