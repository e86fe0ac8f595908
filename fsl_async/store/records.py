"""Records: what the store tells and is told, as frozen values, and their form in the ledger. Pure.

A delta is known by its key from the moment it is acknowledged: it is accepted (spooled, not merged yet), merged (part of a
version) or quarantined (kept aside, never merged).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from attrs import asdict, field, fields_dict, frozen, validators

from fsl_async.roles.names import NAME
from fsl_async.roles.sync.events import DeltaKey
from fsl_async.store.aggregation import Mean, Rule
from fsl_async.store.errors import FrameRefused
from fsl_async.store.outer import OuterSettings
from fsl_codecs import CodecSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_async.store.manifest import Manifest

Outcome = Literal["accepted", "merged", "quarantined"]

MAX_METRICS = 64
MAX_METRIC_NAME = 64

_FILE_SUFFIX = ".frames"


def file_name(key: DeltaKey) -> str:
    """`client@incarnation@base@sequence.frames`; FrameRefused when the key is unfit for a file name."""
    numbers = (key.incarnation, key.base, key.sequence)
    if not NAME.fullmatch(key.client) or not all(0 <= n < 2**63 for n in numbers):
        raise FrameRefused(f"delta key {key.text[:120]!a} is not one this server can store")
    return key.text.replace("/", "@") + _FILE_SUFFIX


def key_of_file(name: str) -> DeltaKey | None:
    """The key that `file_name` turned into `name`, or None for any other file."""
    if not name.endswith(_FILE_SUFFIX):
        return None
    try:
        return DeltaKey.parse(name.removesuffix(_FILE_SUFFIX).replace("@", "/"))
    except ValueError:
        return None


def _clean_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """At most MAX_METRICS numbers with short names; what is not finite becomes None, as JSON has no NaN."""
    clean: dict[str, float | None] = {}
    for name, value in list(metrics.items())[:MAX_METRICS]:
        number = float(value) if isinstance(value, int | float) else math.nan
        clean[str(name)[:MAX_METRIC_NAME]] = number if math.isfinite(number) else None
    return clean


_count = validators.and_(validators.instance_of(int), validators.ge(0))


@frozen
class DeltaMeta:
    """What a client says about a delta besides its key and its values."""

    tokens: int = field(validator=_count)
    steps: int = field(validator=_count)
    base_digest: str = ""
    round: int = 0
    metrics: Mapping[str, float | None] = field(factory=dict, converter=_clean_metrics)


@frozen
class AcceptedDelta:
    """A delta that is acknowledged: complete, finite, spooled, synced and in the ledger."""

    key: DeltaKey
    tokens: int
    steps: int
    round: int
    base_digest: str
    bytes: int
    """Length of the spool file."""
    norm: float
    """Euclidean norm of the decoded delta."""
    sha256: str
    """Of the spool file."""
    metrics: Mapping[str, float | None] = field(factory=dict)

    def to_fact(self) -> dict[str, Any]:
        """Members of the ledger line."""
        return {**asdict(self, recurse=False), "key": self.key.text}

    @classmethod
    def from_fact(cls, fact: Mapping[str, Any]) -> Self:
        """Read `to_fact` back, ignoring other members."""
        members = {name: fact[name] for name in fields_dict(cls) if name in fact}
        return cls(**{**members, "key": DeltaKey.parse(fact["key"])})


@frozen
class SpoolResult:
    """The end of a spooled delta. `problem` says why it is in quarantine; `known` that it was stored before."""

    key: DeltaKey
    bytes: int
    norm: float
    finite: bool
    problem: str | None = None
    known: Outcome | None = None


class Merged(Protocol):
    """What a commit must know of each delta that it merges; `fsl_async.roles.sync.effects.MergedDelta` is one, `MergedDelta` another."""

    @property
    def key(self) -> DeltaKey:
        """Which delta."""

    @property
    def weight(self) -> float:
        """The factor with which it was accumulated."""

    @property
    def staleness(self) -> int:
        """Versions committed since its base."""

    @property
    def tokens(self) -> int:
        """What the role counted for it."""


@frozen
class MergedDelta:
    """A delta that a commit merges: the weight it was accumulated with, and what the role counted for it."""

    key: DeltaKey
    weight: float
    staleness: int
    tokens: int


@frozen
class MergedEntry:
    """A delta that a version holds, as the version's record lists it."""

    key: DeltaKey
    tokens: int
    steps: int
    staleness: int
    weight: float
    norm: float

    @property
    def client(self) -> str:
        """Who computed it."""
        return self.key.client

    @property
    def base(self) -> int:
        """The version it was computed from."""
        return self.key.base


@frozen
class VersionRecord:
    """One version: what it is made of, and what leads to it. The audit trail of a run is the list of these."""

    version: int
    digest: str
    parent: str
    """Digest of the version before, or empty for version 0."""
    generation: int
    """How often the run had been rolled back when the version was made."""
    fingerprint: str
    merged: tuple[MergedEntry, ...]
    scale: float
    tokens_total: int
    """Tokens of all deltas merged up to this version."""
    update_bytes: int
    update_chunks: int
    update_norm: float
    rule: str = "mean"
    """Of aggregation. Where it is the mean, the average was `scale` times the sum of weight x delta; else see `fsl_async.store.aggregation`."""

    def to_fact(self) -> dict[str, Any]:
        """Members of the ledger line and of the version's manifest.json."""
        merged = [{**asdict(entry, recurse=False), "key": entry.key.text} for entry in self.merged]
        return {**asdict(self, recurse=False), "merged": merged}

    @classmethod
    def from_fact(cls, fact: Mapping[str, Any]) -> Self:
        """Read `to_fact` back, ignoring other members."""
        merged = tuple(
            MergedEntry(**{**entry, "key": DeltaKey.parse(entry["key"])})
            for entry in fact["merged"]
        )
        members = {name: fact[name] for name in fields_dict(cls) if name in fact}
        return cls(**{**members, "merged": merged})


@frozen
class Committed:
    """A version is durable. `notice` is one line about something that can wait (an old version not removed yet)."""

    version: int
    digest: str
    update_bytes: int
    update_chunks: int
    update_norm: float
    notice: str | None = None


@frozen
class Recovered:
    """What the run directory says at start. `version` is -1 when there is none yet, then `manifest` is None."""

    version: int
    digest: str
    manifest: Manifest | None
    pending: tuple[AcceptedDelta, ...]
    """Accepted and not merged, in the order in which they were acknowledged."""
    settled: Mapping[DeltaKey, Outcome]
    """All other known keys: "merged" or "quarantined"."""
    digests: Mapping[int, str]
    """Of the versions whose checkpoints are kept."""
    records: tuple[VersionRecord, ...]
    """Of the versions whose checkpoints are kept, oldest first."""
    leases: Mapping[str, int]
    loans: frozenset[str]
    """Of the leases, those that are not for good yet."""
    incarnations: Mapping[str, int]
    run: str
    """The run's name, or empty before `start_run`."""
    tokens_total: int
    notices: tuple[str, ...]
    """One line each about what was found and repaired."""
    served_s: float = 0.0
    """How long the processes before this one have served the run, in seconds."""
    since_version_s: float = 0.0
    """How old the newest version's line in the ledger is, in seconds by the wall clock; 0 where that says nothing."""
    usual: tuple[AcceptedDelta, ...] = ()
    """The newest merged deltas, oldest first: what norms and token counts are compared with."""
    held: tuple[AcceptedDelta, ...] = ()
    """Kept out of the run, to be looked at again."""

    @property
    def merged_keys(self) -> frozenset[DeltaKey]:
        """Every key that is part of the current version's lineage."""
        return frozenset(key for key, known in self.settled.items() if known == "merged")


@frozen
class StoreSettings:
    """How the store keeps and advances versions."""

    keep_versions: int = field(default=3, validator=validators.ge(1))
    codec_down: CodecSpec = field(factory=lambda: CodecSpec(format="uniform"))
    outer: OuterSettings = field(factory=OuterSettings)
    threads: int = field(default=1, validator=validators.ge(1))
    """That decode chunks, and write a version's files, at the same time."""
    rule: Rule = field(factory=Mean)
    """Of aggregation; of whole weights only the mean."""
    whole: bool = field(default=False)
    """Whether deltas are whole weights, whose average is the next version (docs/adr/0045); for "average" only."""

    @whole.validator
    def _check_whole(self, _: object, whole: bool) -> None:
        if whole and self.outer.optimizer != "average":
            raise ValueError("whole weights can be averaged and nothing else")
        if whole and self.rule.by_rows:
            raise ValueError(f"whole weights cannot be aggregated by {self.rule.name}")
