"""Defines the tables exchange, data, model, train and split. Pure.

The other tables are in `fsl_async.config.settings`.
"""

# ruff: noqa: RUF009 - `setting` makes an attrs field, not a shared default

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from fsl_async.config.presets import DECAY_SHARES
from fsl_async.config.rules import (
    Format,
    SettingError,
    is_own,
    must_be_betas,
    must_be_date,
    must_be_device,
    must_be_family,
    must_be_fingerprint,
    must_be_shape,
    must_be_sizes,
    must_be_task,
    setting,
    show,
    span,
)
from fsl_async.roles.split.methods import (
    ALIGNED,
    AUXILIARY,
    GRADIENTS,
    METHODS,
    WHOLE,
    names_of,
)

Buffers = Literal["average", "local", "none"]
InnerOptimizer = Literal["muon", "adamw"]
ScheduleName = Literal["wsd", "cosine", "constant"]
# The keys of fsl_async.config.presets.SIZES, named again for type checkers.
Preset = Literal["0.5m", "1m", "3m", "10m", "50m", "124m", "350m", "1b"]
if TYPE_CHECKING:
    SplitMethod = str
else:
    SplitMethod = Literal["none", *METHODS]
SplitOptimizer = Literal["adamw", "adam", "sgd"]
# The keys of fsl_async.config.presets.PUBLISHED, named again for type checkers.
SplitPreset = Literal["none", "published-fsl-sage"]


@frozen(kw_only=True)
class ExchangeConfig:
    """Decides which parts of a client's own model are exchanged."""

    buffers: Buffers = setting(
        "average",
        "statistics and constants of the model, such as those of batch norm: average (plainly) |"
        " local (each client keeps its own after it has joined) | none (no part of the run)",
        fixed=True,
    )


@frozen(kw_only=True)
class DataConfig:
    """The data of the built-in tasks."""

    source: Literal["site", "built-in"] = setting(
        "site",
        "site (each client trains on its own --data) | built-in (a client without --data trains on"
        " the source of Python's standard library)",
    )
    path: str = setting(
        "",
        "a file or directory of text, or a data set, which only this parameter server reads to"
        " describe and divide it; it is never sent to clients",
    )
    shards: int = setting(
        0, "parts into which the data is divided; 0 = sync.clients", span(least=0, most=100_000)
    )
    sharding: Literal["disjoint", "local"] = setting(
        "disjoint",
        "disjoint (each client its own part) | local (each client all of its own data)",
        fixed=True,
    )
    holdout: float = setting(
        0.02, "last part of the data, kept for evaluation", span(least=0, most=0.5), fixed=True
    )
    partition: Literal["iid", "dirichlet", "dirichlet-equal", "sorted"] = setting(
        "iid",
        "with sharding = disjoint, of data sets of samples: iid | dirichlet (each class by shares)"
        " | dirichlet-equal (each client's classes by shares, equal sizes) | sorted (two pieces"
        " of the samples in order of their classes for each client); derived from run.seed, the"
        " same at all nodes",
        fixed=True,
    )
    alpha: float = setting(
        1.0,
        "of dirichlet and dirichlet-equal: a small value gives clients few classes, a large one"
        " tends to iid",
        span(above=0, most=1e6),
        fixed=True,
    )
    flip: bool = setting(
        False, "split learning: mirror every second image, drawn from the run's seed"
    )
    crop: int = setting(
        0,
        "split learning: pad images by this many pixels, and cut out their size at a place drawn"
        " from the run's seed",
        span(least=0, most=1024),
    )
    sample_shape: str = setting(
        "",
        "shape of a model's input sample, like 3x32x32; empty = from data.path",
        must_be_shape,
    )
    classes: int = setting(
        0,
        "labels (of text: tokens) are below this; 0 = from data.path, 256 for text",
        span(least=0, most=1 << 20),
    )
    fingerprint: str = setting(
        "",
        "of the data set: a site with another one stops; empty = from data.path",
        must_be_fingerprint,
    )


@frozen(kw_only=True)
class ModelConfig:
    """The model: the built-in byte-level GPT, or with split.method others too."""

    family: str = setting(
        "gpt",
        "gpt (built in) | with split.method: resnet18 | small-cnn | gpt2 | llama | qwen2 | qwen3 |"
        " opt (extra hf) | file.py:function",
        must_be_family,
        fixed=True,
    )
    sizes: str = setting(
        "",
        "other sizes of a family other than gpt, by its names, like ffn_dim=256, vocab_size=500",
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
        0, "tokens in a window; 0 = from the preset", span(least=0, most=1 << 20), fixed=True
    )
    tokenizer: str = setting(
        "",
        "digest of the tokenizer of the built-in gpt, which every site has (--tokenizer sets it);"
        " empty = bytes are tokens",
        must_be_fingerprint,
        fixed=True,
    )
    vocabulary: int = setting(
        0,
        "tokens of the built-in gpt (--tokenizer sets it); 0 = 256, all bytes",
        span(least=0, most=1 << 22),
        fixed=True,
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
    optimizer: InnerOptimizer = setting(
        "muon", "muon (Muon for the matrices of hidden layers, AdamW for the rest) | adamw"
    )
    learning_rate: float = setting(
        0.0,
        "AdamW's peak learning rate; 0 = 0.008 x sqrt(64 / width) beside Muon, 0.003 x that root"
        " alone, 0.001 in split learning",
        span(least=0, most=10),
    )
    muon_rate: float = setting(0.0, "Muon's peak learning rate; 0 = 0.007", span(least=0, most=10))
    weight_decay: float = setting(0.1, "decay of matrices", span(least=0, most=10))
    schedule: ScheduleName = setting(
        "wsd",
        "rates by the run's progress: wsd (constant, then linear to 0.02) | cosine |"
        " constant; without run.tokens, run.rounds and run.seconds all are constant",
    )
    decay_share: float = setting(
        0.0,
        "last part of the run in which rates of wsd, and the momentum of growing, fall; 0 = 0.5"
        " with muon, 0.3 with adamw",
        span(least=0, most=1),
    )
    decay_at: str = setting(
        "",
        "date at which they begin to fall, like 2027-01-31T18:00+01:00; empty = by decay_share, or"
        " when fsl-node decay is called",
        must_be_date,
    )
    warmup_steps: int = setting(
        20,
        "steps over which a client's rate rises from 0 at the start of the run; of a client that"
        " joins later, or was relaunched, over 20: its optimizer has no moments",
        span(least=0, most=1 << 30),
    )
    clip_norm: float = setting(1.0, "gradient norm is clipped to this; 0 = never", span(least=0))
    evaluate_share: float = setting(
        0.01,
        "part of its time in which one client evaluates versions on held-out data; 0 = never",
        span(least=0, most=0.5),
    )
    threads: int = setting(
        0,
        "torch's threads in a client; 0 = OMP_NUM_THREADS, else all its cores (--threads at a"
        " client overrides it)",
        span(least=0, most=4096),
    )
    hang_least_s: float = setting(
        120.0,
        "a step hangs after 20 x the median step, and not before this time; 0 = never",
        span(least=0, most=86_400 * 7),
    )
    hang_restart: bool = setting(
        False,
        "a client whose training hangs exits with 64, so that its launcher starts it again",
    )
    device: str = setting("auto", "auto | cpu | cuda | cuda:N | mps", must_be_device)
    task: str = setting(
        "",
        "own (each client gives its --task) | file.py:function | empty = built in",
        must_be_task,
    )

    @property
    def decays_from(self) -> float:
        """Progress at which rates begin to fall; 1 where that waits for a date."""
        if self.decay_at:
            return 1.0
        return 1.0 - (self.decay_share or DECAY_SHARES[self.optimizer])


@frozen(kw_only=True)
class SplitConfig:
    """Split learning: clients hold the lower part of the model, a split server the rest."""

    method: SplitMethod = setting(
        "none",
        " | ".join(
            (
                "none (no split)",
                *names_of(lambda method: method.has_server),
                *(f"{name} (full models, by rounds)" for name in WHOLE),
            )
        ),
        fixed=True,
    )
    preset: SplitPreset = setting(
        "none",
        "settings of published runs, where no others are given: none | published-fsl-sage (images;"
        " arXiv 2505.23182)",
    )
    mode: Literal["free", "lockstep"] = setting(
        "free",
        "free (each client at its own pace) | lockstep (one after another, as in one process)",
    )
    cut: str = setting(
        "",
        "language models: blocks in front of the cut; others: the last child in front of it;"
        " empty = 1, layer2, pool1, 0",
        fixed=True,
    )
    labels_at_home: bool = setting(
        False, f"U-shape, {GRADIENTS} only: clients also have norm and head", fixed=True
    )
    auxiliary: str = setting(
        "blocks:1",
        f"auxiliary model of {AUXILIARY}: linear | blocks:N | file.py:function",
        fixed=True,
    )
    lora_client: int = setting(
        0,
        "rank of LoRA adapters (extra hf) at the clients: only they are trained and sent;"
        " 0 = all weights",
        span(least=0, most=4096),
        fixed=True,
    )
    lora_server: int = setting(
        0,
        "the same at the split server: only they are trained and kept; 0 = all weights",
        span(least=0, most=4096),
        fixed=True,
    )
    lora_alpha: float = setting(
        16.0, "adapters are scaled by this / rank", span(above=0, most=1e6), fixed=True
    )
    lora_dropout: float = setting(
        0.0, "share of an adapter's inputs that a training step leaves out", span(least=0, most=0.9)
    )
    server: str = setting(
        "",
        "host:port, or fsl://host:port?key=..., where clients reach the split server; empty = where"
        " it listens",
    )
    listen: str = setting("tcp://127.0.0.1:7101", "host:port where the split server listens")
    optimizer: SplitOptimizer = setting(
        "adamw",
        "of both parts, at train.learning_rate with train.weight_decay: adamw | adam (decay is"
        " added to gradients) | sgd",
    )
    betas: str = setting("0.9,0.95", "of adamw and adam", must_be_betas)
    momentum: float = setting(0.0, "of sgd", span(least=0, most=0.9999))
    schedule: ScheduleName = setting(
        "constant",
        "rates of both parts by the share of run.rounds that is done: constant | wsd (constant,"
        " then linear to 0.02 over the last train.decay_share) | cosine",
    )
    warmup_steps: int = setting(
        0,
        "steps over which a rate rises from 0: of the split server from the run's start, of a"
        " client from each of its starts",
        span(least=0, most=1 << 30),
    )
    label_smoothing: float = setting(
        0.0,
        "share of a label that is spread over all classes, in training and alignment",
        span(least=0, most=0.9),
    )
    samples: int = setting(
        128,
        "samples of a client in a round; 0 = all its samples, once",
        span(least=0, most=1 << 40),
    )
    upload_every: int = setting(
        5, f"{AUXILIARY}: steps from one upload to the next", span(least=1, most=1 << 30)
    )
    align_every: int = setting(
        10,
        f"{ALIGNED}: rounds from one alignment to the next; 0 = never",
        span(least=0, most=1 << 30),
    )
    align_passes: int = setting(
        20, f"{ALIGNED}: passes over the buffer in an alignment", span(least=1, most=1 << 20)
    )
    align_batch: int = setting(
        0,
        f"{ALIGNED}: samples in a step of an alignment, at most the buffer; 0 = train.batch",
        span(least=0, most=1 << 30),
    )
    align_rate: float = setting(
        1e-3, f"{ALIGNED}: learning rate of an alignment", span(above=0, most=10)
    )
    buffer_samples: int = setting(
        256, f"{ALIGNED}: newest samples kept of each client", span(least=1, most=1 << 30)
    )
    up: Format = setting("bf16", "activations: fp32 | bf16 | e4m3 | e5m2 | uniform")
    down: Format = setting("bf16", "gradients: fp32 | bf16 | e4m3 | e5m2 | uniform")
    models: Format = setting(
        "fp32",
        "client-side and auxiliary models: fp32 (weights as they are) | others (coded differences)",
        fixed=True,
    )
    in_flight: int = setting(
        2, "unanswered uploads of a client; lockstep has 1", span(least=1, most=64)
    )
    alone_s: float = setting(
        3600.0,
        "a split server ends after this time without clients and without the parameter server;"
        " 0 = never",
        span(least=0.0, most=1e8),
    )

    @property
    def lockstep(self) -> bool:
        """Whether clients train one after another, as in one process."""
        return self.mode == "lockstep"

    @property
    def is_on(self) -> bool:
        """Whether this run trains by a split method, or by the full-model one it compares to."""
        return self.method != "none"

    @property
    def has_server(self) -> bool:
        """Whether the model is cut, and a split server holds a part of it."""
        return self.is_on and METHODS[self.method].has_server

    @property
    def sends_whole(self) -> bool:
        """Whether clients send their weights instead of a round's changes (docs/adr/0045)."""
        return self.is_on and self.models == "fp32"

    def __attrs_post_init__(self) -> None:
        if self.momentum and self.optimizer != "sgd":
            raise SettingError("split.momentum", f"is of sgd, and optimizer = {self.optimizer}")
        if self.lora_dropout and not (self.lora_client or self.lora_server):
            raise SettingError("split.lora_dropout", "needs lora_client or lora_server")
        if self.labels_at_home and self.is_on and not METHODS[self.method].gradients:
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
