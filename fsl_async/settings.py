"""Settings: every table and key of the run's configuration, with its default, its help line and its check.

One frozen class per TOML table; `fsl_async.config` reads and writes them. To add a setting, add one field here: `fsl-node init`,
`--set`, `--dry-run` and the error messages know it from then on. Help lines and checks live in attrs metadata, so nothing is
said twice. A value outside its range raises `SettingError`, also when a class is made in Python.
Pure: no file is opened and nothing is looked up.
"""

# ruff: noqa: RUF009 - `setting` makes an attrs field, not a shared default

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
from attrs import frozen

from fsl_async.address import parse_listen
from fsl_async.errors import AddressError
from fsl_async.setting_rules import (
    SettingError,
    is_own,
    must_be_counts,
    must_be_device,
    must_be_directory,
    must_be_family,
    must_be_fingerprint,
    must_be_name,
    must_be_power_of_two,
    must_be_shape,
    must_be_sizes,
    must_be_task,
    setting,
    show,
    span,
    table_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_codecs import CodecSpec

Format = Literal["fp32", "bf16", "e4m3", "e5m2", "uniform"]
Weighting = Literal["tokens", "uniform", "fednova"]
Optimizer = Literal["nesterov", "average"]
Aggregation = Literal["mean", "trimmed", "median", "multi-krum"]
Sharding = Literal["disjoint", "local"]
Trigger = Literal["clock", "rounds", "turns", "relay"]
SplitMethod = Literal["none", "sl", "splitfed-v1", "splitfed-v2", "cse-fsl", "fsl-sage", "fedavg"]
SplitOptimizer = Literal["adamw", "adam", "sgd"]
PartitionKind = Literal["iid", "dirichlet"]
SplitMode = Literal["free", "lockstep"]
# The keys of fsl_async.presets.SIZES, named again for type checkers.
Preset = Literal["0.5m", "1m", "3m", "10m", "50m", "124m", "350m", "1b"]

# The largest chunk that the transport takes must fit into the credit window (`fsl_transport.TransportSettings.chunk_limit_bytes`).
_SMALLEST_WINDOW_BYTES = 2 << 20
_LARGEST_WINDOW_BYTES = 64 << 20


@frozen(kw_only=True)
class RunConfig:
    """What this run is called, where it is kept and when it ends."""

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
    """Raise SettingError unless this is an address to listen at."""
    try:
        parse_listen(text)
    except AddressError as error:
        raise SettingError(key, error.message) from None


@frozen(kw_only=True)
class ListenConfig:
    """Where the parameter server is reached."""

    address: str = setting("tcp://127.0.0.1:7100", "host:port to listen at; port 0 = any free one")
    insecure: bool = setting(
        False, "do not encrypt where other machines can reach the listen address"
    )

    def __attrs_post_init__(self) -> None:
        check_listen("listen.address", self.address)


@frozen(kw_only=True)
class SyncConfig:
    """When deltas are collected and how they count."""

    trigger: Trigger = setting(
        "clock",
        "clock (call all every every_s) | rounds (all train a round, then merge) | turns (one after another) | "
        "relay (one per version, each from the weights of the one before)",
    )
    every_s: float = setting(600.0, "seconds from one sync to the next", span(above=0))
    round_cap_s: float = setting(
        3600.0,
        "wait this long for a called client; not with trigger = clock",
        span(above=0, most=86_400 * 7),
    )
    quorum: float = setting(
        0.5, "part of the called clients that must answer before a merge", span(above=0, most=1)
    )
    grace_mad_factor: float = setting(
        4.0,
        "after the quorum, wait until median + this x MAD of earlier arrival times",
        span(least=0),
    )
    grace_min_s: float = setting(1.0, "wait at least this long after the quorum", span(least=0))
    first_grace_s: float = setting(
        60.0, "wait after the quorum while there are no earlier arrival times", span(least=0)
    )
    weighting: Weighting = setting(
        "tokens", "a delta's weight: tokens | uniform | fednova (many steps count no more)"
    )
    max_staleness: int = setting(
        4, "refuse deltas whose base is more than this many versions old", span(least=0)
    )
    staleness_exponent: float = setting(
        0.5, "a delta s versions old weighs 1 / (1 + s)^this", span(least=0, most=16)
    )
    clients: int = setting(3, "planned number of clients", span(least=1, most=100_000))
    min_clients: int = setting(
        1, "the first sync waits for this many clients", span(least=1, most=100_000)
    )

    def __attrs_post_init__(self) -> None:
        if self.min_clients > self.clients:
            raise SettingError(
                "sync.min_clients",
                f"must be at most sync.clients ({self.clients}), got {self.min_clients}",
            )


@frozen(kw_only=True)
class GuardConfig:
    """What a client may be wrong, or lie, about; each rule is off at 0."""

    clip_norm: float = setting(
        0.0, "a delta counts as one of at most this L2 norm; 0 = never", span(least=0)
    )
    clip_median: float = setting(
        0.0, "... or of at most this x the median norm of the last 64; 0 = never", span(least=0)
    )
    outlier_median: float = setting(
        0.0,
        "quarantine deltas whose norm is above this x the median of the last 64; 0 = never",
        span(least=0),
    )
    least: int = setting(
        5, "deltas that must have been accepted before medians count", span(least=1, most=64)
    )
    release: bool = setting(
        False, "look at what outlier_median kept out again after each version, until it is stale"
    )
    max_tokens_per_s: float = setting(
        0.0,
        "of a delta no more tokens count than this x the seconds since the client's last; 0 = all",
        span(least=0),
    )
    max_tokens_median: float = setting(
        0.0,
        "of a delta no more tokens count than this x the median of the last 64; 0 = all",
        span(least=0),
    )

    @property
    def looks_at_norms(self) -> bool:
        """Whether any rule is about values."""
        return bool(self.clip_norm or self.clip_median or self.outlier_median)


@frozen(kw_only=True)
class OuterConfig:
    """The outer optimiser: how merged deltas change the shared weights (DiLoCo, arXiv 2311.08105)."""

    optimizer: Optimizer = setting(
        "nesterov",
        "nesterov (SGD with Nesterov momentum) | average (add the mean delta as it is)",
        fixed=True,
    )
    learning_rate: float = setting(
        0.7, "outer learning rate; unused by average", span(above=0, most=10)
    )
    momentum: float = setting(0.9, "outer momentum; unused by average", span(least=0, most=0.9999))
    aggregation: Aggregation = setting(
        "mean",
        "how deltas become one: mean (by sync.weighting) | trimmed | median | multi-krum (these count each client once)",
    )
    byzantine: int = setting(
        1,
        "clients that may send anything: trimmed and median need 2 x this + 1 clients, multi-krum 2 x this + 3",
        span(least=0, most=10_000),
    )


@frozen(kw_only=True)
class CodecConfig:
    """How weights travel."""

    up: Format = setting(
        "uniform", "from clients to the server: fp32 | bf16 | e4m3 | e5m2 | uniform"
    )
    down: Format = setting(
        "uniform", "from the server to clients: fp32 | bf16 | e4m3 | e5m2 | uniform"
    )
    block_values: int = setting(
        128, "values that share one scale, for e4m3, e5m2 and uniform", must_be_power_of_two
    )
    fineness: int = setting(
        14,
        "of uniform: the step is 2^(-fineness/4) of a block's root mean square; 14 errs as much as e4m3",
        span(least=0, most=40),
    )
    threads: int = setting(
        2, "threads of each node that decode chunks at the same time", span(least=1, most=256)
    )
    feedback_up: bool = setting(
        False,
        "error feedback at clients: what coding loses of a delta is added to the next (4 bytes a parameter); "
        "the server always does so with its updates",
    )

    @property
    def spec_up(self) -> CodecSpec:
        """How deltas are coded."""
        return self._spec(self.up)

    @property
    def spec_down(self) -> CodecSpec:
        """How updates are coded."""
        return self._spec(self.down)

    def _spec(self, name: Format) -> CodecSpec:
        from fsl_codecs import CodecSpec

        return CodecSpec(format=name, block_values=self.block_values, fineness=self.fineness)


@frozen(kw_only=True)
class SessionConfig:
    """When a silent peer counts as gone."""

    heartbeat_every_s: float = setting(
        5.0, "seconds between heartbeats", span(least=0.05, most=3600)
    )
    expire_after_s: float = setting(
        20.0, "seconds of silence after which a peer is gone", span(least=0.1, most=86_400)
    )

    def __attrs_post_init__(self) -> None:
        if self.expire_after_s < 2 * self.heartbeat_every_s:
            raise SettingError(
                "session.expire_after_s",
                f"must be at least twice session.heartbeat_every_s ({self.heartbeat_every_s}), got {self.expire_after_s}",
            )


@frozen(kw_only=True)
class TransferConfig:
    """How large transfers are paced."""

    window_bytes: int = setting(
        4 << 20,
        "bytes under way for each stream before the receiver must answer",
        span(least=_SMALLEST_WINDOW_BYTES, most=_LARGEST_WINDOW_BYTES),
    )
    window_limit_bytes: int = setting(
        64 << 20,
        "what that grows to on a line that is long and fast; a limit of memory",
        span(least=_SMALLEST_WINDOW_BYTES, most=_LARGEST_WINDOW_BYTES),
    )
    stripes_first: int = setting(
        1,
        "connections for bulk that a link begins with; more are found by measuring",
        span(least=1, most=64),
    )
    stripes_limit: int = setting(
        64,
        "connections for bulk of a link at the most; the same as stripes_first: so many",
        span(least=1, most=64),
    )
    stall_s: float = setting(
        10.0, "ask again when no byte has come for this long", span(least=0.05, most=86_400)
    )
    drain_cap_s: float = setting(
        3600.0,
        "at the end, wait no longer than this for transfers that advance",
        span(least=0, most=86_400),
    )

    def __attrs_post_init__(self) -> None:
        if self.window_limit_bytes < self.window_bytes:
            raise SettingError(
                "transfer.window_limit_bytes",
                f"must not be below transfer.window_bytes ({self.window_bytes}), got {self.window_limit_bytes}",
            )
        if self.stripes_first > self.stripes_limit:
            raise SettingError(
                "transfer.stripes_first",
                f"must not be above transfer.stripes_limit ({self.stripes_limit}), got {self.stripes_first}",
            )


@frozen(kw_only=True)
class DataConfig:
    """What the built-in task trains on."""

    path: str = setting(
        "", "a file or directory of text; empty = the source of Python's standard library"
    )
    shards: int = setting(
        0, "parts the data is cut into; 0 = sync.clients", span(least=0, most=100_000)
    )
    sharding: Sharding = setting(
        "disjoint",
        "disjoint (each client its own part) | local (each client all of its own data)",
        fixed=True,
    )
    holdout: float = setting(
        0.02, "last part of the data, kept for evaluation", span(least=0, most=0.5), fixed=True
    )
    partition: PartitionKind = setting(
        "iid",
        "with sharding = disjoint, of data sets of samples: iid | dirichlet (by class); from run.seed, the same everywhere",
        fixed=True,
    )
    alpha: float = setting(
        1.0,
        "of dirichlet: small gives clients few classes, large tends to iid",
        span(above=0, most=1e6),
        fixed=True,
    )
    sample_shape: str = setting(
        "",
        "of one sample as models see it, like 3x32x32; empty = of data.path at the server",
        must_be_shape,
    )
    classes: int = setting(
        0,
        "labels are below this, of text tokens; 0 = of data.path at the server, 256 for text",
        span(least=0, most=1 << 20),
    )
    label_counts: str = setting(
        "",
        "samples of each class, like 500,500: a site with others stops; empty = of data.path at the server",
        must_be_counts,
    )
    fingerprint: str = setting(
        "",
        "of the data set: a site with another stops; empty = of data.path at the server",
        must_be_fingerprint,
    )


@frozen(kw_only=True)
class ModelConfig:
    """The model: the built-in byte-level GPT, or with a split.method others too."""

    family: str = setting(
        "gpt",
        "gpt (built in) | with split.method: resnet18 | small-cnn | gpt2 | llama | qwen2 | qwen3 | opt (extra hf) | file.py:function",
        must_be_family,
        fixed=True,
    )
    sizes: str = setting(
        "",
        "further sizes of a family other than gpt, by their names there, like ffn_dim=256, vocab_size=500",
        must_be_sizes,
        fixed=True,
    )

    preset: Preset = setting(
        "3m", "parameters: 0.5m | 1m | 3m | 10m | 50m | 124m | 350m | 1b", fixed=True
    )
    layers: int = setting(
        0, "transformer blocks; 0 = from the preset", span(least=0, most=1024), fixed=True
    )
    width: int = setting(
        0,
        "width of the residual stream; 0 = from the preset",
        span(least=0, most=65_536),
        fixed=True,
    )
    heads: int = setting(
        0, "attention heads; 0 = from the preset", span(least=0, most=1024), fixed=True
    )
    context: int = setting(
        0, "bytes seen at once; 0 = from the preset", span(least=0, most=1 << 20), fixed=True
    )

    def __attrs_post_init__(self) -> None:
        if self.width and self.heads and self.width % self.heads:
            raise SettingError(
                "model.width", f"must be a multiple of model.heads ({self.heads}), got {self.width}"
            )


@frozen(kw_only=True)
class TrainConfig:
    """The inner training loop of the built-in task."""

    batch: int = setting(16, "sequences in a step", span(least=1, most=1 << 20))
    learning_rate: float = setting(1e-3, "AdamW's learning rate", span(above=0, most=10))
    weight_decay: float = setting(0.1, "AdamW's weight decay", span(least=0, most=10))
    warmup_steps: int = setting(
        20, "steps over which the learning rate rises from 0", span(least=0, most=1 << 30)
    )
    decay_steps: int = setting(
        0,
        "step at which the learning rate has fallen to a tenth, by a cosine; 0 = never",
        span(least=0, most=1 << 30),
    )
    clip_norm: float = setting(1.0, "gradient norm is clipped to this; 0 = never", span(least=0))
    threads: int = setting(
        0,
        "torch's threads in a client; 0 = OMP_NUM_THREADS, else all its cores (--threads at a client overrides it)",
        span(least=0, most=4096),
    )
    hang_factor: float = setting(
        20.0,
        "a step that takes this x the median step, and train.hang_least_s, hangs; 0 = never",
        span(least=0, most=1e6),
    )
    hang_least_s: float = setting(
        120.0, "no step hangs before this many seconds", span(least=0.1, most=86_400 * 7)
    )
    hang_restart: bool = setting(
        False,
        "a client whose training hangs ends with exit code 64, for its launcher to start again",
    )
    device: str = setting("auto", "auto | cpu | cuda | cuda:N | mps", must_be_device)
    task: str = setting("", "file.py:function with your own loop; empty = built in", must_be_task)


@frozen(kw_only=True)
class CheckpointConfig:
    """What is kept on the parameter server's disk."""

    keep_versions: int = setting(3, "newest versions that are kept", span(least=1, most=1_000_000))


@frozen(kw_only=True)
class SplitConfig:
    """Split learning: the lower part of the model at the clients, the rest at a split server (--role server)."""

    method: SplitMethod = setting(
        "none",
        "none (no split) | sl | splitfed-v1 | splitfed-v2 | cse-fsl | fsl-sage | fedavg (whole models, by rounds)",
        fixed=True,
    )
    mode: SplitMode = setting(
        "free",
        "free (everyone at their own pace) | lockstep (one after another, as in one process)",
    )
    cut: str = setting(
        "",
        "language models: blocks in front of the cut; others: the last child in front of it; empty = 1, layer2, pool1, 0",
        fixed=True,
    )
    labels_at_home: bool = setting(
        False, "U-shape, sl and splitfed only: norm and head at the clients too", fixed=True
    )
    auxiliary: str = setting(
        "blocks:1",
        "auxiliary model of cse-fsl and fsl-sage: linear | blocks:N | file.py:function",
        fixed=True,
    )
    lora_client: int = setting(
        0,
        "rank of LoRA adapters (extra hf) at the clients: nothing else trains there and is sent; 0 = all weights",
        span(least=0, most=4096),
        fixed=True,
    )
    lora_server: int = setting(
        0,
        "the same at the split server: nothing else trains there and is kept; 0 = all weights",
        span(least=0, most=4096),
        fixed=True,
    )
    lora_alpha: float = setting(
        16.0, "adapters count this / rank", span(above=0, most=1e6), fixed=True
    )
    server: str = setting(
        "",
        "host:port, or fsl://host:port?key=..., where clients reach the split server; empty = where it listens",
    )
    listen: str = setting("tcp://127.0.0.1:7101", "host:port where the split server listens")
    optimizer: SplitOptimizer = setting(
        "adamw", "of both halves, at train.learning_rate: adamw | adam | sgd"
    )
    samples: int = setting(
        128,
        "samples of a client in a round; 0 = all that it has, once",
        span(least=0, most=1 << 40),
    )
    upload_every: int = setting(
        5, "cse-fsl, fsl-sage: steps from one upload to the next", span(least=1, most=1 << 30)
    )
    align_every: int = setting(
        10, "fsl-sage: rounds from one alignment to the next", span(least=1, most=1 << 30)
    )
    align_passes: int = setting(
        20, "fsl-sage: passes over the buffer in an alignment", span(least=1, most=1 << 20)
    )
    align_rate: float = setting(
        1e-3, "fsl-sage: learning rate of an alignment", span(above=0, most=10)
    )
    buffer_samples: int = setting(
        256, "fsl-sage: newest samples kept of each client", span(least=1, most=1 << 30)
    )
    up: Format = setting("bf16", "activations: fp32 | bf16 | e4m3 | e5m2 | uniform")
    down: Format = setting("bf16", "gradients: fp32 | bf16 | e4m3 | e5m2 | uniform")
    models: Format = setting(
        "fp32",
        "client-side and auxiliary models; fp32 sends them as they are, others as coded differences",
        fixed=True,
    )
    in_flight: int = setting(
        2, "uploads of a client under way; lockstep has 1", span(least=1, most=64)
    )
    checkpoint_every: int = setting(
        100, "uploads between checkpoints of the split server", span(least=1, most=1 << 30)
    )
    max_stale_rounds: int = setting(
        1, "decline uploads that are more rounds behind", span(least=0, most=1 << 20)
    )
    alone_s: float = setting(
        3600.0,
        "a split server ends after so long without clients and without the parameter server; 0 = never",
        span(least=0.0, most=1e8),
    )

    @property
    def is_on(self) -> bool:
        """Whether this is a run by rounds with (or compared to) a split server."""
        return self.method != "none"

    @property
    def sends_whole(self) -> bool:
        """Whether clients send their weights as they are, and not what a round changed of them (docs/adr/0045)."""
        return self.is_on and self.models == "fp32"

    def __attrs_post_init__(self) -> None:
        with_gradients = {"none", "sl", "splitfed-v1", "splitfed-v2"}
        if self.labels_at_home and self.method not in with_gradients:
            raise SettingError(
                "split.labels_at_home", f"{self.method} needs labels at the split server"
            )
        if self.auxiliary != "linear" and not (
            is_own(self.auxiliary) or re.fullmatch(r"blocks:[1-9][0-9]{0,3}", self.auxiliary)
        ):
            raise SettingError(
                "split.auxiliary",
                f"must be linear, blocks:N or file.py:function, got {show(self.auxiliary)}",
            )


@frozen(kw_only=True)
class Config:
    """The whole configuration of a run."""

    run: RunConfig = attrs.field(factory=RunConfig)
    listen: ListenConfig = attrs.field(factory=ListenConfig)
    sync: SyncConfig = attrs.field(factory=SyncConfig)
    guard: GuardConfig = attrs.field(factory=GuardConfig)
    outer: OuterConfig = attrs.field(factory=OuterConfig)
    codec: CodecConfig = attrs.field(factory=CodecConfig)
    session: SessionConfig = attrs.field(factory=SessionConfig)
    transfer: TransferConfig = attrs.field(factory=TransferConfig)
    data: DataConfig = attrs.field(factory=DataConfig)
    model: ModelConfig = attrs.field(factory=ModelConfig)
    train: TrainConfig = attrs.field(factory=TrainConfig)
    checkpoint: CheckpointConfig = attrs.field(factory=CheckpointConfig)
    split: SplitConfig = attrs.field(factory=SplitConfig)

    @property
    def run_dir(self) -> Path:
        """Where this run is kept, `run.directory` with `{name}` filled in."""
        return Path(self.run.directory.replace("{name}", self.run.name))

    @property
    def shards(self) -> int:
        """Into how many parts the data is cut."""
        return self.data.shards or self.sync.clients


_TABLES = (
    RunConfig, ListenConfig, SyncConfig, GuardConfig, OuterConfig, CodecConfig, SessionConfig, TransferConfig, DataConfig, ModelConfig,
    TrainConfig, CheckpointConfig, SplitConfig,
)  # fmt: skip
TABLES: Mapping[str, type] = {table_name(table): table for table in _TABLES}
"""The class of each TOML table."""
