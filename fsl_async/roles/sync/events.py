"""Events of the machines of pretraining besides messages, as frozen values.

A shell turns a finished disk write or a step of the training thread into an event, and a machine
answers with effects (`fsl_async.roles.sync.effects`). Times are seconds of the caller's
monotonic clock; names are peer names; digests are hexadecimal text.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from fsl_async.roles.machine import Event
from fsl_async.roles.messages import Message
from fsl_async.roles.sync.delta import TRAIN, DeltaKey, MergedDelta, Outcome, StoredDelta
from fsl_async.roles.sync.progress import Decay, RunLimits
from fsl_async.roles.sync.roster import Answers

# --- both roles -----------------------------------------------------------------------------------


@frozen
class Preempting(Event, tag="preempting"):
    """This process will be ended by `source` at `deadline` (None: unknown).

    Signals, Slurm and spot markets all become this event (`fsl_async.process.notices`). A later one
    counts if its deadline is earlier.
    """

    deadline: float | None
    source: str


@frozen
class TransfersChecked(Event, tag="transfers_checked"):
    """Answers CheckTransfers: peers whose streams began, advanced or ended since the last check."""

    advanced: tuple[str, ...]


@frozen
class HeartbeatReceived(Event, tag="heartbeat_received"):
    """A heartbeat: step, tokens, loss, loop lag. Steps decide about paces (`roles.sync.pacing`)."""

    peer: str
    payload: dict[str, Any]


# --- parameter server -----------------------------------------------------------------------------


@frozen
class DecayAsked(Event, tag="decay_asked"):
    """Let learning rates fall from now on, and end the run after `more`.

    more: rounds, tokens or seconds from now on; none: at the planned end.
    """

    more: RunLimits = field(factory=RunLimits)


@frozen
class Recovered(Event, tag="recovered"):
    """The state on disk at start: newest valid version (-1: none), and the outcome of each
    delta.
    """

    version: int
    digest: str
    digests: dict[int, str] = field(factory=dict)
    """Version -> digest, of the newest versions."""
    pending: tuple[StoredDelta, ...] = ()
    """Acknowledged deltas that are not merged, in the order of acknowledgement."""
    settled: dict[DeltaKey, Outcome] = field(factory=dict)
    """Outcomes of other keys, "merged" or "quarantined": the newest ones, and each client's newest.
    """
    tokens_total: int = 0
    served_s: float = 0.0
    """How long earlier processes have served the run, in seconds."""
    since_version_s: float = 0.0
    """Age of the newest version in seconds by the wall clock; 0: unknown."""
    usual: tuple[StoredDelta, ...] = ()
    """The newest merged deltas, oldest first, for the running medians of norms and tokens."""
    arrivals: tuple[str, ...] = ()
    """Clients of the last merged deltas, oldest first."""
    decay: Decay | None = None
    """The last one that was asked for."""
    held: tuple[StoredDelta, ...] = ()
    """Deltas held back that may be released."""
    leases: dict[str, int] = field(factory=dict)
    """Client -> data shard."""
    provisional: frozenset[str] = frozenset()
    """Clients whose lease is provisional."""
    incarnations: dict[str, int] = field(factory=dict)
    """Client -> its newest incarnation."""
    run: str = ""
    """The run's name; empty before it has one."""
    began_s: float = 0.0
    """How much of `served_s` was before version 0."""
    global_version: int = -1
    """The newest version that is the weights of all groups, to the bit; -1: none."""
    global_base: str = ""
    """As in VersionCommitted."""
    global_versions: int = 0
    """How many versions after version 0 are "global" or "late"."""
    newest_global: tuple[int, ...] = ()
    """The newest of those."""
    void: dict[int, str] = field(factory=dict)
    """Version -> digest, of the newest ones that rollbacks of the operator made void."""
    lost: tuple[str, ...] = ()
    """One line about each acknowledged delta that this start found to be lost."""
    sum: Answers | None = None
    """The newest secure sum that was to be opened: its set and its survivors."""
    latest: tuple[MergedDelta, ...] = ()
    """The newest merged delta of each client, as it was merged, where a rule uses it again."""


@frozen
class ClientHello(Event, tag="client_hello"):
    """A client opens a session. run: empty if it is new; version, shard: -1 for none."""

    peer: str
    incarnation: int
    run: str
    version: int
    digest: str
    shard: int = -1
    duty: str = TRAIN
    """The client's duty in the run."""


@frozen
class ModelAttached(Event, tag="model_attached"):
    """A client has built its model. difference: the first tensor unlike the run's, or None."""

    peer: str
    fingerprint: str
    values: int
    difference: str | None


@frozen
class DeltaStored(Event, tag="delta_stored"):
    """A delta is durable; with a `problem` it is quarantined, and its norm is 0."""

    peer: str
    stored: StoredDelta
    problem: str | None = None


@frozen
class VersionSent(Event, tag="version_sent"):
    """A version was completely sent to a client, in this many bytes.

    is_lost: the client declined it, or reading it failed; the client asks again if it needs it.
    """

    peer: str
    kind: str
    version: int
    bytes_coded: int
    is_lost: bool = False


@frozen
class VersionCommitted(Event, tag="version_committed"):
    """A version is durable: its checkpoint directory has been renamed into place.

    seconds: since it was asked for.
    """

    version: int
    digest: str
    bytes_update: int
    seconds: float = 0.0
    cosine: float | None = None
    """How far the merged deltas agree (`fsl_async.roles.sync.delta.mean_cosine`)."""
    product_norms: dict[str, float] = field(factory=dict)
    """By client: how far it moved the products of adapters."""
    made_of: str = "deltas"
    """Or "global": it is the weights of all groups, to the bit; "late": those, and what this group
    merged since.
    """
    global_base: str = ""
    """Digest of the global weights from which a coded update leads to a "global" one; or empty."""
    alike: dict[str, float] = field(factory=dict)
    """"client/client" -> cosine, of those whose deltas in it are almost the same."""
    opposite: str = ""
    """The client whose delta in it is opposite to the rest; or empty."""
    late: tuple[DeltaKey, ...] = ()
    """Deltas without a part in it: stored after a version that they were not computed from."""
    notice: str = ""
    """One line on cleanup that failed and is retried later; or empty."""


@frozen
class SumOpened(Event, tag="sum_opened"):
    """The mean of a secure sum is on disk. rms: of its values that are not zero.

    problem: why it could not be opened; empty: it is.
    """

    rms: float
    problem: str = ""


@frozen
class StoreFailed(Event, tag="store_failed"):
    """The durable state is unusable for good: damage beyond repair, or an unwritable ledger."""

    reason: str


@frozen
class DamageRepaired(Event, tag="damage_repaired"):
    """A damaged file was found before use, and rebuilt or left out. text: for the operator."""

    text: str


# --- client ---------------------------------------------------------------------------------------


@frozen
class Attached(Event, tag="attached"):
    """The training thread attached its model."""

    fingerprint: str
    values: int


@frozen
class Welcomed(Event, tag="welcomed"):
    """The parameter server admitted this client to its run. incarnation: None if unchanged."""

    run: str
    shard: int
    shards: int
    incarnation: int | None = None


@frozen
class Scored(Event, tag="scored"):
    """The training thread scored deltas: loss, alone and left_out of each, as in `delta.Score`.

    Empty: the model was on another version, or a delta could not be decoded.
    """

    version: int
    found: dict[DeltaKey, tuple[float, float, float]]


@frozen
class TaskSays(Event, tag="task_says"):
    """The training thread has a message for the parameter server, which may be lost."""

    message: Message


@frozen
class PaceReached(Event, tag="pace_reached"):
    """The steps of the pace are trained, or the training function asks to send its progress."""


@frozen
class BaseReplaced(Event, tag="base_replaced"):
    """The base buffer holds `version` and has `digest`. The model is not rebased yet.

    global_digest: of the global weights that are kept besides; empty: none.
    """

    version: int
    digest: str
    global_digest: str = ""


@frozen
class Snapshotted(Event, tag="snapshotted"):
    """The training thread copied its weights for delta `sequence`.

    tokens, steps: since the last snapshot. moved: whether any exchanged weight has changed.
    """

    sequence: int
    base: int
    tokens: int
    steps: int
    metrics: dict[str, float] = field(factory=dict)
    facts: dict[str, float] = field(factory=dict)
    moved: bool = True


@frozen
class Rebased(Event, tag="rebased"):
    """The training thread moved its weights to `version`, keeping its progress since the snapshot.

    Weights that are not finite are replaced by the version instead, and `dropped_tokens` are lost.
    """

    version: int
    dropped_tokens: int = 0
