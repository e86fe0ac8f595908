"""Events: everything that can happen to a role machine, as frozen values.

A shell turns what the world does (a message, a finished disk write, a step of the training thread) into one of
these, and a machine in `fsl_async.roles` answers with effects (`fsl_async.roles.sync.effects`). Times are seconds of the
caller's monotonic clock; names are peer names; digests are hexadecimal text. Nothing here touches the world.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import Delta, DeltaKey, StoredDelta

# --- both roles -------------------------------------------------------------------------------------------


@frozen
class Preempting(Event, tag="preempting"):
    """This process will be ended by others at `deadline` (None: they did not say when); `source` says who they are.

    Signals, Slurm and spot markets all become this one event (`fsl_async.process.notices`). A later one counts if its deadline is nearer.
    """

    deadline: float | None
    source: str


@frozen
class SendVersionFailed(Event, tag="send_version_failed"):
    """A client does not take a version that was offered, or reading it failed; it asks again when it wants it."""

    peer: str
    version: int


@frozen
class TransfersChecked(Event, tag="transfers_checked"):
    """The answer to CheckTransfers: the peers whose streams, either way, began, moved or ended since the last look."""

    advanced: tuple[str, ...]


@frozen
class HeartbeatReceived(Event, tag="heartbeat_received"):
    """A heartbeat with its small payload: step, tokens, loss, loop lag. It changes no decision; the journal keeps it."""

    peer: str
    payload: dict[str, Any]


# --- parameter server -------------------------------------------------------------------------------------


@frozen
class Recovered(Event, tag="recovered"):
    """What the disk holds at start: the newest good version (-1: none yet), and what became of every delta."""

    version: int
    digest: str
    digests: dict[int, str] = field(factory=dict)
    """Version -> digest, of the versions that are kept."""
    pending: tuple[StoredDelta, ...] = ()
    """Acknowledged and not merged, in the order of acknowledgement."""
    settled: dict[DeltaKey, str] = field(factory=dict)
    """All other known keys: "merged" or "quarantined"."""
    tokens_total: int = 0
    served_s: float = 0.0
    """How long the processes before this one have served the run, in seconds."""
    since_version_s: float = 0.0
    """How old the newest version is, in seconds by the wall clock; 0 where that is not known."""
    usual: tuple[StoredDelta, ...] = ()
    """The newest merged deltas, oldest first: norms and token counts are compared with theirs."""
    held: tuple[StoredDelta, ...] = ()
    """Kept out of the run, to be looked at again."""
    leases: dict[str, int] = field(factory=dict)
    """Client -> data shard."""
    loans: frozenset[str] = frozenset()
    """Of the leases, the provisional ones."""
    incarnations: dict[str, int] = field(factory=dict)
    """Client -> its newest incarnation."""
    run: str = ""
    """The run's name; empty before it has one."""


@frozen
class ClientHello(Event, tag="client_hello"):
    """A client says hello. It holds nothing of a run yet where `run` is empty; `version` and `shard` are -1 for none."""

    peer: str
    incarnation: int
    run: str
    version: int
    digest: str
    shard: int = -1


@frozen
class Admitted(Event, tag="admitted"):
    """What Admit writes is on disk; with a `problem` it is not."""

    peer: str
    incarnation: int
    problem: str | None = None


@frozen
class ModelAttached(Event, tag="model_attached"):
    """A client has built its model. `difference` names the first tensor that differs from the run's, or is None."""

    peer: str
    fingerprint: str
    values: int
    difference: str | None


@frozen
class ShardKept(Event, tag="shard_kept"):
    """What KeepShard writes is on disk; with a `problem` it is not."""

    peer: str
    incarnation: int
    problem: str | None = None


@frozen
class FetchAsked(Event, tag="fetch_asked"):
    """A client that holds `version` with `digest` (-1: nothing) asks for what leads to the current version."""

    peer: str
    version: int
    digest: str


@frozen
class VersionHeld(Event, tag="version_held"):
    """A client trains on `version` and computed `digest` over it."""

    peer: str
    version: int
    digest: str


@frozen
class RoundSkipped(Event, tag="round_skipped"):
    """A client has nothing to send for this round (it trained no token since its last snapshot)."""

    peer: str
    round: int
    reason: str


@frozen
class InitialOffered(Event, tag="initial_offered"):
    """The publishing client offers its initial weights as a stream."""

    peer: str
    stream: str


@frozen
class DeltaOffered(Event, tag="delta_offered"):
    """A client offers a delta as a stream."""

    peer: str
    stream: str
    delta: Delta


@frozen
class DeltaStored(Event, tag="delta_stored"):
    """A delta is durable; with a `problem` it lies in quarantine instead."""

    peer: str
    stored: StoredDelta
    problem: str | None


@frozen
class VersionSent(Event, tag="version_sent"):
    """A version was streamed to a client whole. It changes no decision; the journal counts its bytes."""

    peer: str
    kind: str
    version: int
    bytes_coded: int


@frozen
class Reduced(Event, tag="reduced"):
    """The average of `version` is that of all servers now."""

    version: int


@frozen
class VersionCommitted(Event, tag="version_committed"):
    """A version is durable: its checkpoint directory has been renamed into place."""

    version: int
    digest: str
    bytes_update: int
    seconds: float


@frozen
class CommitFailed(Event, tag="commit_failed"):
    """The checkpoint could not be written (disk full); the last good version and the accumulator are untouched."""

    version: int
    reason: str


@frozen
class StoreFailed(Event, tag="store_failed"):
    """The durable state cannot be used any more, and trying again does not help: damage beyond repair, or a ledger that takes no line."""

    reason: str


@frozen
class DamageRepaired(Event, tag="damage_repaired"):
    """A damaged file was found before it was used, and made again or done without; `text` is the line for the operator."""

    text: str


@frozen
class VersionVerified(Event, tag="version_verified"):
    """The end of VerifyVersion: whether every byte of the version was as it was written. What was not is repaired by now."""

    version: int
    intact: bool


# --- client -----------------------------------------------------------------------------------------------


@frozen
class Attached(Event, tag="attached"):
    """The training thread handed its model over."""

    fingerprint: str
    values: int


@frozen
class Welcomed(Event, tag="welcomed"):
    """The parameter server admitted this client to its run, in the life `incarnation` (None: the one it began with)."""

    run: str
    shard: int
    shards: int
    incarnation: int | None = None


@frozen
class PublishAsked(Event, tag="publish_asked"):
    """This client is the first: its initial weights become version 0."""


@frozen
class RoundCalled(Event, tag="round_called"):
    """The parameter server calls round `round`: send the pseudo-gradient at the next step. The `last` one ends the run."""

    round: int
    last: bool = False

    @property
    def is_turn(self) -> bool:
        """Whether a whole round is asked for, and not what is there."""
        return False


@frozen
class TurnCalled(RoundCalled, tag="turn_called"):
    """The parameter server calls this client to train round `round`, and to wait at its end for the version that comes of it."""

    @property
    def is_turn(self) -> bool:
        """A whole round."""
        return True


@frozen
class DeltaAcknowledged(Event, tag="delta_acknowledged"):
    """The delta is durable at the parameter server; it may be forgotten here."""

    key: DeltaKey


@frozen
class DeltaRefused(Event, tag="delta_refused"):
    """The delta will never be merged: too stale, of another lineage, or quarantined."""

    key: DeltaKey
    code: str
    text: str


@frozen
class VersionAnnounced(Event, tag="version_announced"):
    """Version `version` exists and has `digest`."""

    version: int
    digest: str


@frozen
class FetchOffered(Event, tag="fetch_offered"):
    """The parameter server streams `kind` ("update" or "full") of `version`."""

    stream: str
    kind: str
    version: int
    chunks: int


@frozen
class FetchReceived(Event, tag="fetch_received"):
    """All chunks of the stream are here, still coded."""

    version: int


@frozen
class BaseReplaced(Event, tag="base_replaced"):
    """The base buffer holds `version` now; `digest` was computed over it. The model itself is not rebased yet."""

    version: int
    digest: str


@frozen
class FetchFailed(Event, tag="fetch_failed"):
    """The fetched frames could not be applied."""

    version: int
    reason: str


@frozen
class Snapshotted(Event, tag="snapshotted"):
    """The training thread copied its weights for delta `sequence`; `tokens` and `steps` are since the last one."""

    sequence: int
    base: int
    tokens: int
    steps: int
    metrics: dict[str, float] = field(factory=dict)


@frozen
class EncodingFinished(Event, tag="encoding_finished"):
    """All chunks of delta `sequence` are coded, so base and snapshot may be replaced."""

    sequence: int


@frozen
class Rebased(Event, tag="rebased"):
    """The training thread moved its weights onto `version`, keeping what it trained meanwhile.

    Weights that are not finite cannot be moved: then the version is taken as it is, and `dropped_tokens` were not sent.
    """

    version: int
    dropped_tokens: int = 0
