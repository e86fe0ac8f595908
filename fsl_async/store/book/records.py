"""The store's records: frozen values, and their form in the ledger. Pure.

Once acknowledged, a delta is known by its key: it is accepted (spooled, not merged yet), merged
(part of a version) or quarantined (never merged). The classes of deltas are those of
`fsl_async.roles.sync.delta`; in the ledger a delta is one flat object.
"""

from __future__ import annotations

import math
import shlex
from statistics import median_low
from typing import TYPE_CHECKING, Any, Self

from attrs import asdict, evolve, fields_dict, frozen

from fsl_async.roles.sync.delta import FACTS, Delta, DeltaKey, MergedDelta, Score, StoredDelta
from fsl_async.roles.sync.progress import Decay, RunLimits
from fsl_async.roles.sync.roster import Answers, Roster
from fsl_async.store.book.groups_state import Adoption
from fsl_async.store.deltas.seed_step import SeedStep
from fsl_async.store.errors import StoreError
from fsl_async.store.rules.outer import OuterStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MAX_METRICS = 64
MAX_METRIC_NAME = 64


def _clean(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Keep at most MAX_METRICS numbers with short names.

    Values that are not finite become None, as JSON has no NaN.
    """
    clean: dict[str, float | None] = {}
    for name, value in list(metrics.items())[:MAX_METRICS]:
        number = float(value) if isinstance(value, int | float) else math.nan
        clean[str(name)[:MAX_METRIC_NAME]] = number if math.isfinite(number) else None
    return clean


def recordable(delta: Delta) -> Delta:
    """Return a delta with metrics and facts fit for the ledger.

    StoreError: its counts are invalid.
    """
    if not all(type(count) is int and count >= 0 for count in (delta.tokens, delta.steps)):
        raise StoreError(
            f"delta {delta.key.text} has {delta.tokens!r} tokens and {delta.steps!r} steps;"
            " both must be whole numbers, not negative"
        )
    facts = {name: delta.facts[name] for name in FACTS if name in delta.facts}
    return evolve(delta, metrics=_clean(delta.metrics), facts=_clean(facts))


def to_fact(stored: StoredDelta) -> dict[str, Any]:
    """Return the members of a delta's ledger line."""
    delta = stored.delta
    return {
        "key": delta.key.text,
        "tokens": delta.tokens,
        "steps": delta.steps,
        "round": delta.round,
        "base_digest": delta.base_digest,
        "bytes": stored.bytes,
        "norm": stored.norm,
        "digest": stored.digest,
        "metrics": delta.metrics,
        **({"facts": delta.facts} if delta.facts else {}),
    }


def from_fact(fact: Mapping[str, Any]) -> StoredDelta:
    """Parse the output of `to_fact`, ignoring other members."""
    delta = Delta(
        DeltaKey.parse(fact["key"]),
        fact["base_digest"],
        fact["tokens"],
        fact["steps"],
        fact["round"],
        fact["metrics"],
        fact.get("facts", {}),
    )
    return StoredDelta(delta, fact["bytes"], fact["norm"], fact["digest"])


def sum_fact(roster: Roster, survivors: Sequence[str]) -> dict[str, Any]:
    """Return the members of the ledger line of a secure sum: its set, and its survivors."""
    members = [[name, site.hex(), key.hex()] for name, site, key in roster.members]
    return {**asdict(roster), "members": members, "survivors": list(survivors)}


def answers_from(fact: Mapping[str, Any]) -> Answers:
    """Parse the output of `sum_fact`; no shares are on disk."""
    members = [[name, bytes.fromhex(a), bytes.fromhex(b)] for name, a, b in fact["members"]]
    roster = Roster(fact["round"], fact["attempt"], fact["step"], fact["bits"], members)
    return Answers(roster, tuple(fact["survivors"]), {})


@frozen
class Received:
    """A sum that a channel or a server upstream has delivered, in sums/, for a version.

    of: digest of deltas and weights. sites: in the round; senders: those that sent. rms: largest
    root mean square of a site's weighted delta. power: the largest, as a multiple of P. uses: of
    the channel, in real values. bytes, digest: of the file. upstream: number of the version that
    came from there, -1 by a channel.
    """

    version: int
    of: str
    sites: int
    senders: list[str]
    rms: float
    snr_db: float
    power: float
    uses: int
    bytes: int
    digest: str
    upstream: int = -1

    @classmethod
    def from_fact(cls, fact: Mapping[str, Any]) -> Self:
        """Parse the members of a ledger line, ignoring others."""
        return cls(**{name: fact[name] for name in fields_dict(cls)})


def decay_from(fact: Mapping[str, Any]) -> Decay:
    """Parse the members that `Store.record_decay` writes."""
    return Decay(fact["decays_from"], RunLimits(**fact["limits"]), RunLimits(**fact["planned"]))


@frozen
class VersionRecord:
    """One version: what it merged, and its parent. A run's audit trail is the list of these."""

    version: int
    digest: str
    parent: str
    """Digest of the version before; empty for version 0."""
    generation: int
    """Number of rollbacks before the version was made."""
    fingerprint: str
    merged: tuple[MergedDelta, ...]
    """Without base digests, rounds and metrics: those are in the lines with "accepted"."""
    scale: float
    tokens_total: int
    """Tokens of all deltas merged up to this version."""
    update_bytes: int
    update_chunks: int
    update_norm: float
    average_norm: float = 0.0
    """L2 norm of the average; 0 for full weights."""
    cosine: float | None = None
    """Mean cosine between two clients' deltas; see `fsl_async.roles.sync.delta`."""
    mean_share: float = 0.0
    """Share by which the mean of versions moved towards it; 0: no mean is kept."""
    learning_rate: float = 1.0
    """Learning rate of the outer step that made the version."""
    momentum: float = 0.0
    """Momentum of the outer step that made the version."""
    progress: float | None = None
    """Progress of the run with this version, 0 to 1; None where no end is planned."""
    rule: str = "mean"
    """The rule of the merge. With "mean" the average was `scale` times the sum of weight x delta.

    For the others see `fsl_async.store.rules.aggregation` and `fsl_async.store.rules.adapters`.
    """
    seeds: SeedStep | None = None
    """In a run of zeroth order: the steps that lead from the version before to this one."""
    reused: tuple[MergedDelta, ...] = ()
    """Merged by earlier versions, and a part of this one's average again (`Latest`).

    Their tokens count in the version that merged them. staleness, weight: as of this version.
    """
    groups: Adoption | None = None
    """The global weights that the version is made of, instead of deltas."""

    @property
    def made_of(self) -> str:
        """Return the deltas as the event VersionCommitted has them."""
        if self.groups is None:
            return "deltas"
        return "global" if self.groups.digest == self.digest else "late"

    @property
    def step(self) -> OuterStep:
        """The outer step that made it."""
        return OuterStep(self.learning_rate, self.momentum, self.version)

    @property
    def late(self) -> tuple[DeltaKey, ...]:
        """Deltas that a run by rounds left out, because they are of an older version."""
        older = (one for one in self.merged if not (one.weight or one.is_refused))
        return tuple(one.key for one in older if one.key.base < self.version - 1)

    def to_fact(self) -> dict[str, Any]:
        """Return the members of the ledger line and of the version's manifest.json."""
        members = {name: getattr(self, name) for name in fields_dict(type(self))}
        seeds, groups = members.pop("seeds"), members.pop("groups")
        if groups is not None:
            members["groups"] = asdict(groups)
        if seeds is not None:
            members["seeds"] = seeds.to_json()
        reused = [_entry(one) for one in members.pop("reused")]
        if reused:
            members["reused"] = reused
        return {**members, "merged": [_entry(one) for one in self.merged]}

    @classmethod
    def from_fact(cls, fact: Mapping[str, Any]) -> Self:
        """Parse the output of `to_fact`, ignoring other members."""
        merged, reused = (
            tuple(
                MergedDelta(
                    Delta(DeltaKey.parse(entry["key"]), "", entry["tokens"], entry["steps"]),
                    entry["staleness"],
                    entry["weight"],
                    entry["norm"],
                    entry.get("product_norm", 0.0),
                    entry.get("clip", 1.0),
                    Score(**entry["score"]) if "score" in entry else None,
                )
                for entry in fact.get(name, ())
            )
            for name in ("merged", "reused")
        )
        members = {name: fact[name] for name in fields_dict(cls) if name in fact}
        if "seeds" in members:
            members["seeds"] = SeedStep.from_json(members["seeds"])
        if "groups" in members:
            members["groups"] = Adoption(**members["groups"])
        return cls(**{**members, "merged": merged, "reused": reused})


def _entry(merged: MergedDelta) -> dict[str, Any]:
    """Return a delta's entry in a version's line."""
    delta = merged.delta
    work = {"key": delta.key.text, "tokens": delta.tokens, "steps": delta.steps}
    return work | {
        "staleness": merged.staleness,
        "weight": merged.weight,
        "norm": merged.norm,
        **({"product_norm": merged.product_norm} if merged.product_norm else {}),
        **({"clip": merged.clip} if merged.clip != 1.0 else {}),
        **({"score": asdict(merged.score)} if merged.score is not None else {}),
    }


DESTROYED = 1e6
"""Norm of the change to a version that is destroyed: 10^12 weights that move by 1 have this one."""


def way_out(records: Sequence[VersionRecord], pending: Sequence[StoredDelta], run_dir: str) -> str:
    """Return what to do where no version can be made. records: of the kept ones, oldest first.

    Where a version is destroyed itself, quarantine of pending deltas does not help. It names the
    client with the largest norm, and others far above the median.
    """
    bad = next((one for one in records if one.update_norm > DESTROYED), None)
    found: Sequence[StoredDelta | MergedDelta] = bad.merged if bad else pending
    deltas = sorted(found, key=lambda one: one.norm)
    if not deltas or bad is records[0]:
        return "no version that is kept is older than the damage: begin a new run"
    norms = {one.key.client: one.norm for one in deltas}
    least = min(10.0 * median_low(norms.values()), deltas[-1].norm)
    named = "".join(f" --client {client}" for client in norms if norms[client] >= least)
    command = f"fsl-node quarantine {shlex.quote(run_dir)}{named}"
    if bad is None:
        return f"stop the parameter server and type {command}, or lower the outer learning rate"
    command += f" --from-version {bad.version - 1}"
    return f"version {bad.version} is destroyed: stop the parameter server and type {command}"
