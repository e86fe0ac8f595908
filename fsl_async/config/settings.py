"""Defines every table and key of the run's configuration: default, help line and check. Pure.

One frozen class per TOML table; exchange, data, model, train and split are in
`fsl_async.config.settings_training`, tune in `settings_tuning`. `fsl_async.config.load` reads and
writes them. To add a setting, add one field: `fsl-node init`, `--set`, `--dry-run` and error
messages read attrs metadata. A value outside its range raises `SettingError`, also when a class is
made in Python.
"""

# ruff: noqa: RUF009 - `setting` makes an attrs field, not a shared default

from __future__ import annotations

import ipaddress
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import evolve, frozen

from fsl_async.config.address import Address, parse, parse_listen
from fsl_async.config.rules import (
    Format,
    SettingError,
    may_be_name,
    must_be_directory,
    must_be_name,
    must_be_step,
    setting,
    span,
)
from fsl_async.config.settings_training import (
    DataConfig,
    ExchangeConfig,
    ModelConfig,
    SplitConfig,
    TrainConfig,
)
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import AddressError
from fsl_async.roles.groups.messages import LEAST_PIECE_VALUES, PIECE_VALUES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_codecs import CodecSpec
    from fsl_transport import TransportSettings

Weighting = Literal["auto", "batch", "tokens", "uniform", "fednova", "anarchic", "arrivals"]
Optimizer = Literal["growing", "nesterov", "average"] | str  # noqa: PYI051
Aggregation = Literal["mean", "trimmed", "median", "multi-krum", "latest"] | str  # noqa: PYI051
Channel = Literal["none", "air"] | str  # noqa: PYI051
"""All three are one of these, or file.py:Class."""
Trigger = Literal["auto", "clock", "rounds", "turns", "sequential", "buffer"]

USUAL_STALENESS, BUFFERED_STALENESS = 4, 20
BLOCK_VALUES = 128
"""Values that share one scale, in formats that have scales."""

FINE_STEP = 0.088
"""A step of uniform in root mean squares, whose error is that of e4m3: for what is not a change
that many rounds and clients average."""
MANY_ROUNDS, SHORT_STEP = 60, 0.25
"""A run of fewer rounds has a clearly worse model than training in one place (docs/QUALITY.md), and
the errors of a step of 1 do not average out: those of the second one do."""

_LEAST_SHARE_OF_PERIOD = 0.02
"""Least time between two versions, in sync.every_s: each writes files of the model's size."""
_LEAST_RETRY_CAP_S = 10.0
_PIECE_S = 0.5


@frozen(kw_only=True)
class RunConfig:
    """The run's name, directory, seed and end."""

    name: str = setting("run", "the run's name", must_be_name)
    directory: str = setting(
        "runs/{name}", "where checkpoints, ledger and journal are kept", must_be_directory
    )
    seed: int = setting(
        0,
        "makes weights, data order and fault injection repeatable",
        span(least=0, most=2**62),
        fixed=True,
    )
    rounds: int = setting(0, "end after this many syncs; 0 = no limit", span(least=0))
    tokens: int = setting(0, "end after this many merged tokens; 0 = no limit", span(least=0))
    seconds: float = setting(
        0.0, "end after this many seconds of serving, over all starts; 0 = no limit", span(least=0)
    )


def check_listen(key: str, text: str) -> None:
    """Raise SettingError unless `text` is an address to listen at."""
    try:
        parse_listen(text)
    except AddressError as error:
        raise SettingError(key, error.message) from None


@frozen(kw_only=True)
class ListenConfig:
    """Where the parameter server listens."""

    address: str = setting("tcp://127.0.0.1:7100", "host:port to listen at; port 0 = any free one")
    insecure: bool = setting(
        False, "accept an unencrypted listen address that other machines can reach"
    )

    def __attrs_post_init__(self) -> None:
        check_listen("listen.address", self.address)


@frozen(kw_only=True)
class SyncConfig:
    """When deltas are collected and how they count."""

    trigger: Trigger = setting(
        "auto",
        "auto (clock; rounds with tune.method; with split.method as it needs) | clock (call all"
        " every every_s) | rounds (all train a round, then merge) | turns (one after"
        " another) | sequential (one per version, each from the weights of the one before) | buffer"
        " (no rounds: clients send by themselves, every few deltas make a version)",
    )
    every_s: float = setting(600.0, "seconds from one sync to the next", span(above=0))
    buffer: int = setting(
        0,
        "of buffer: deltas that make a version, or fewer after every_s; 0 = half of sync.clients,"
        " at least 2",
        span(least=0, most=100_000),
    )
    pace: Literal["run", "speed", "own"] = setting(
        "run",
        "of buffer: when a client sends: run (by local_steps, or every_s) | speed (a slow client"
        " after fewer local_steps, in proportion: DyLU, arXiv 2401.09135) | own (when its task"
        " calls fed.send; the built-in fine-tuning after 1 to tune.steps steps by chance)",
    )
    local_steps: int = setting(
        0, "of buffer: steps from one delta of a client to the next; 0 = by every_s", span(least=0)
    )
    round_cap_s: float = setting(
        3600.0,
        "wait this long for a called client; not with trigger = clock",
        span(above=0, most=86_400 * 7),
    )
    quorum: float = setting(
        0.5, "part of the called clients that must answer before a merge", span(above=0, most=1)
    )
    weighting: Weighting = setting(
        "auto",
        "a delta's weight: auto (batch, or tokens for full weights) | batch (tokens a step) |"
        " tokens | uniform | fednova (tokens a step; many steps count no more) | anarchic"
        " (a client's mean step; for fed.send) | arrivals (the fewer deltas a client has sent of"
        " late, the more each counts, up to 3 times)",
    )
    max_staleness: int = setting(
        -1,
        "refuse deltas whose base is more than this many versions old, and use none again"
        " (outer.aggregation = latest); -1 = 4, with buffer 20",
        span(least=-1),
    )
    clients: int = setting(3, "planned number of clients", span(least=1, most=100_000))
    min_clients: int = setting(
        1, "the first sync waits for this many clients", span(least=1, most=100_000)
    )

    @property
    def buffer_size(self) -> int:
        """Deltas that make a version, with trigger = buffer."""
        return self.buffer or max(2, (self.clients + 1) // 2)

    @property
    def staleness_limit(self) -> int:
        """Versions that the base of a delta may be old."""
        if self.max_staleness >= 0:
            return self.max_staleness
        return BUFFERED_STALENESS if self.trigger == "buffer" else USUAL_STALENESS

    @property
    def version_gap_s(self) -> float:
        """Seconds from one version to the next at least, with trigger = buffer."""
        return _LEAST_SHARE_OF_PERIOD * self.every_s

    @property
    def grace_min_s(self) -> float:
        """Seconds that a round waits after its quorum at least."""
        return min(1.0, 0.06 * self.every_s)

    @property
    def first_grace_s(self) -> float:
        """Seconds that a round waits after its quorum while there are no earlier arrival times."""
        return min(60.0, 0.4 * self.every_s)

    @property
    def send_every_s(self) -> float:
        """Seconds after which a client sends by itself, with trigger = buffer; 0: not by time."""
        return self.every_s if self.pace == "run" and not self.local_steps else 0.0

    @property
    def retry_s(self) -> float:
        """The first wait before a failed write is tried again."""
        return min(30.0, 0.1 * self.every_s)

    @property
    def retry_cap_s(self) -> float:
        """The longest wait between two tries: after the operator made space, at most one sync."""
        return max(self.every_s, _LEAST_RETRY_CAP_S)

    def __attrs_post_init__(self) -> None:
        if self.min_clients > self.clients:
            raise SettingError(
                "sync.min_clients",
                f"must be at most sync.clients ({self.clients}), got {self.min_clients}",
            )


@frozen(kw_only=True)
class GuardConfig:
    """Protection against wrong or malicious deltas; each rule is off at 0.

    Medians have one value of each client.
    """

    clip_norm: float = setting(
        0.0, "a delta counts as one of at most this L2 norm; 0 = never", span(least=0)
    )
    clip_median: float = setting(
        1.5,
        "... or of at most this x the median of its version, as if of as many steps; 0 = never",
        span(least=0),
    )
    outlier_median: float = setting(
        0.0,
        "quarantine deltas whose norm is above this x the median of the clients' newest; 0 = never",
        span(least=0),
    )
    release: bool = setting(
        False, "check quarantined deltas again after each version, until they are too stale"
    )
    max_tokens_per_s: float = setting(
        0.0,
        "a delta's tokens count up to this x the seconds since the client's last; 0 = all",
        span(least=0),
    )
    max_tokens_median: float = setting(
        10.0,
        "a delta's tokens, and those of its steps, count up to this x the median of the clients'"
        " newest; 0 = all",
        span(least=0),
    )
    max_share: float = setting(
        0.33,
        "of three clients or more one has at most this share of a version's weights, or 1.5 x an"
        " equal share; 0 = any",
        span(least=0, most=1),
    )
    evaluator: str = setting(
        "",
        "name of the client that tries each delta of a round on records of its own and trains"
        " nothing (--evaluate); deltas that hurt get weight 0; empty = none",
        may_be_name,
    )
    evaluator_alone: float = setting(
        0.1,
        "a delta hurts that alone raises the evaluator's loss by more than this share, unless the"
        " mean of the round is worse without it",
        span(least=0),
    )
    evaluator_left_out: float = setting(
        0.01,
        "... or without which the mean of the round has a loss lower by more than this share",
        span(least=0),
    )
    evaluator_grace_s: float = setting(
        60.0,
        "how long a round waits for the evaluator; deltas without a score count",
        span(above=0),
    )


@frozen(kw_only=True)
class OuterConfig:
    """The outer optimizer: how merged deltas change the weights (DiLoCo, arXiv 2311.08105)."""

    optimizer: Optimizer = setting(
        "growing",
        "growing (momentum that grows from 0 to outer.momentum, and fades out with learning rates"
        " of a planned run) | nesterov (SGD with Nesterov momentum) | average (add the mean delta)"
        " | file.py:Class (your own, docs/OWN_RULES.md)",
        fixed=True,
    )
    learning_rate: float = setting(0.7, "outer learning rate of nesterov", span(above=0, most=10))
    momentum: float = setting(0.9, "outer momentum; unused by average", span(least=0, most=0.9999))
    aggregation: Aggregation = setting(
        "mean",
        "how deltas are aggregated: mean (by sync.weighting) | trimmed | median | multi-krum"
        " (these three count each client once) | latest (of buffer: the mean over all clients of"
        " the newest delta of each, new or not; AFA-CS) | file.py:Class (your own,"
        " docs/OWN_RULES.md)",
    )
    byzantine: int = setting(
        1,
        "clients that may send anything: trimmed and median need 2 x this + 1 clients, multi-krum"
        " 2 x this + 3",
        span(least=0, most=10_000),
    )
    channel: Channel = setting(
        "none",
        "how deltas reach the parameter server: none (each by itself) | air (a simulated radio"
        " channel adds them up) | file.py:Class (your own); docs/guides/over-the-air.md",
    )


@frozen(kw_only=True)
class AirConfig:
    """The simulated radio channel of outer.channel = air (docs/guides/over-the-air.md)."""

    snr_db: float = setting(
        10.0, "a site's largest power over that of the noise, in dB", span(least=-40, most=200)
    )
    rician_k: float = setting(
        0.0,
        "strength of the direct path, in that of all scattered ones: 0 = Rayleigh fading, 1e6 = no"
        " fading",
        span(least=0, most=1e6),
    )
    gain_floor: float = setting(
        0.1,
        "a site does not send in a round whose path has a gain below this; 1 is the mean gain",
        span(above=0, most=1),
    )
    estimate_error: float = setting(
        0.0,
        "error of a site's estimate of its path, in root mean squares of a path: 0.1 is good",
        span(least=0, most=1),
    )
    timing_error: float = setting(
        0.0, "largest error of a site's timing, in symbols", span(least=0, most=0.5)
    )
    power: Literal["peak", "mean"] = setting(
        "peak", "what is limited: peak (the power of every round) | mean (its mean over rounds)"
    )


@frozen(kw_only=True)
class CodecConfig:
    """How deltas and updates are coded."""

    up: Format = setting(
        "uniform", "from clients to the parameter server: fp32 | bf16 | e4m3 | e5m2 | uniform"
    )
    down: Format = setting(
        "uniform", "from the parameter server to clients: fp32 | bf16 | e4m3 | e5m2 | uniform"
    )
    up_step: float = setting(
        0.0,
        "step of uniform in deltas, in root mean squares of a block, 0.05 to 4; 0 = by the run: 1"
        f" in pretraining without an end or of {MANY_ROUNDS} planned rounds and more, {SHORT_STEP}"
        f" of fewer, else {FINE_STEP}",
        must_be_step,
    )
    down_step: float = setting(0.0, "the same of versions", must_be_step)
    threads: int = setting(
        2,
        "threads of each node that decode chunks; at the parameter server they also write versions",
        span(least=1, most=256),
    )

    @property
    def spec_up(self) -> CodecSpec:
        """The coding of deltas."""
        return self._spec(self.up, self.up_step)

    @property
    def spec_down(self) -> CodecSpec:
        """The coding of updates."""
        return self._spec(self.down, self.down_step)

    @property
    def spec_global(self) -> CodecSpec:
        """The coding of groups' global weights. There are few: errors do not average out."""
        return self._spec(self.down, min(self.down_step or FINE_STEP, SHORT_STEP))

    def _spec(self, name: Format, step: float) -> CodecSpec:
        from fsl_codecs import CodecSpec

        quarters = round(-4 * math.log2(step or FINE_STEP))
        return CodecSpec(format=name, block_values=BLOCK_VALUES, step_log2=quarters)


@frozen(kw_only=True)
class SessionConfig:
    """When a silent peer counts as gone."""

    heartbeat_every_s: float = setting(
        5.0, "seconds between heartbeats", span(least=0.05, most=3600)
    )
    expire_after_s: float = setting(
        20.0, "seconds of silence after which a peer is gone", span(least=0.1, most=86_400)
    )

    @property
    def drain_s(self) -> float:
        """Wait at the end for a session, and for clients to reconnect after a restart."""
        return max(2 * self.heartbeat_every_s, 5.0)

    @property
    def reoffer_s(self) -> float:
        """After that, an upload that failed is offered again, and a lost server dialed again."""
        return min(5.0, self.expire_after_s)

    def __attrs_post_init__(self) -> None:
        if self.expire_after_s < 2 * self.heartbeat_every_s:
            raise SettingError(
                "session.expire_after_s",
                f"must be at least twice session.heartbeat_every_s ({self.heartbeat_every_s}),"
                f" got {self.expire_after_s}",
            )


@frozen(kw_only=True)
class TransferConfig:
    """How large transfers are paced."""

    window_limit_bytes: int = setting(
        64 << 20,
        "the largest credit of a stream, bytes sent and not yet written, which limits memory; it"
        " begins with 4.2 MB and grows to twice the path's bandwidth-delay product",
        span(least=4 << 20, most=64 << 20),
    )
    stripes_limit: int = setting(
        64,
        "at most this many bulk connections of a link; measurements decide how many",
        span(least=1, most=64),
    )


@frozen(kw_only=True)
class StoreConfig:
    """Versions that the parameter server keeps, in memory and on disk."""

    keep_versions: int = setting(3, "newest versions that are kept", span(least=1, most=1_000_000))
    resident: bool = setting(
        True,
        "keep the newest version in memory, 3.4 models (4.4 without a planned end), if there is as"
        " much; else, and with false, map it from scratch files in the run directory",
    )


_ROSTER = "north=fsl://10.0.0.1:7100?key=..., south=fsl://10.0.0.2:7100?key=..."


def roster_of(text: str) -> dict[str, Address]:
    """Parse a roster into an ordered map from name to address.

    Raises SettingError if it is malformed.
    """
    found: dict[str, Address] = {}
    for entry in text.split(",") if text.strip() else ():
        name, separator, address = entry.strip().partition("=")
        if not separator or must_be_name(name):
            raise SettingError(
                "groups.roster", f"must be like {_ROSTER}, got {entry.strip()[:80]!r}"
            )
        if name in found:
            raise SettingError("groups.roster", f"names {name} twice")
        try:
            found[name] = parse(address)
        except AddressError as error:
            raise SettingError("groups.roster", f"{name}: {error.message}") from None
    if len(found) == 1:
        raise SettingError("groups.roster", "must have two parameter servers or more, or be empty")
    return found


def must_be_ip(value: Any) -> str | None:
    """Check an address of this machine, or nothing."""
    try:
        is_one = not value or not ipaddress.ip_address(value).is_unspecified
    except ValueError:
        is_one = False
    return None if is_one else "must be an IP address of this machine, like 10.0.0.1"


@frozen(kw_only=True)
class GroupsConfig:
    """Groups: parameter servers that average what their groups gained, now and then."""

    roster: str = setting(
        "",
        "parameter servers as NAME=ADDRESS, separated by commas, the same text at each; run.name is"
        " the one that this is, and the first one coordinates; empty: this one alone",
    )
    every: int = setting(
        6,
        "versions of the fastest group from one global round to the next",
        span(least=1),
    )
    bind: str = setting(
        "",
        "IP address at which the reduction listens, on free ports; empty: that of listen.address",
        must_be_ip,
    )
    insecure: bool = setting(
        False, "reduce over a public address, without encryption; a VPN is better"
    )
    hold_s: float = setting(
        120.0,
        "wait with merges at most this long for a global round under way",
        span(above=0, most=86_400),
    )
    bytes_per_s: float = setting(0.0, "limit of a reduction's rate; 0: none", span(least=0))

    @property
    def servers(self) -> dict[str, Address]:
        """The roster, in order."""
        return roster_of(self.roster)

    @property
    def coordinator(self) -> str:
        """The name of the first parameter server."""
        return next(iter(self.servers))

    @property
    def grace_s(self) -> float:
        """Seconds that a global round waits for the contributions of other groups."""
        return self.hold_s / 12

    @property
    def piece_values(self) -> int:
        """Values that are reduced in one call: with a limit of the rate, in about `_PIECE_S`."""
        wanted = int(self.bytes_per_s / 4 * _PIECE_S) if self.bytes_per_s else PIECE_VALUES
        return min(max(wanted, LEAST_PIECE_VALUES), PIECE_VALUES)

    @property
    def is_on(self) -> bool:
        """Whether there are other parameter servers."""
        return bool(self.roster.strip())

    def __attrs_post_init__(self) -> None:
        roster_of(self.roster)


@frozen(kw_only=True)
class Config:
    """The whole configuration of a run."""

    run: RunConfig = attrs.field(factory=RunConfig)
    listen: ListenConfig = attrs.field(factory=ListenConfig)
    sync: SyncConfig = attrs.field(factory=SyncConfig)
    guard: GuardConfig = attrs.field(factory=GuardConfig)
    outer: OuterConfig = attrs.field(factory=OuterConfig)
    air: AirConfig = attrs.field(factory=AirConfig)
    codec: CodecConfig = attrs.field(factory=CodecConfig)
    session: SessionConfig = attrs.field(factory=SessionConfig)
    transfer: TransferConfig = attrs.field(factory=TransferConfig)
    exchange: ExchangeConfig = attrs.field(factory=ExchangeConfig)
    data: DataConfig = attrs.field(factory=DataConfig)
    model: ModelConfig = attrs.field(factory=ModelConfig)
    train: TrainConfig = attrs.field(factory=TrainConfig)
    store: StoreConfig = attrs.field(factory=StoreConfig)
    split: SplitConfig = attrs.field(factory=SplitConfig)
    tune: TuneConfig = attrs.field(factory=TuneConfig)
    groups: GroupsConfig = attrs.field(factory=GroupsConfig)

    @property
    def run_dir(self) -> Path:
        """The run directory: `run.directory` with `{name}` filled in."""
        return Path(self.run.directory.replace("{name}", self.run.name))

    @property
    def leads(self) -> bool:
        """Whether this parameter server is alone, or the first of its roster."""
        return not self.groups.is_on or self.groups.coordinator == self.run.name

    def transport(self, max_connections: int | None = None) -> TransportSettings:
        """Return the transport's settings. max_connections: of a listener."""
        from fsl_transport import TransportSettings

        made = TransportSettings(**attrs.asdict(self.session), **attrs.asdict(self.transfer))
        return made if max_connections is None else evolve(made, max_connections=max_connections)

    @property
    def shards(self) -> int:
        """The number of parts into which the data is divided; 0 where each client has its own."""
        if self.data.sharding == "local":
            return 0
        return self.data.shards or self.sync.clients


TABLES: Mapping[str, type] = {
    name: type(table) for name, table in attrs.asdict(Config(), recurse=False).items()
}
"""The class of each TOML table."""
