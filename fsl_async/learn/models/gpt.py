"""A GPT in plain torch: the model of the built-in pretraining task.

Choices, and what they cost:
  * Bytes are tokens (vocabulary 256) unless the run has a tokenizer: none to agree upon between
    sites, losses comparable over any data. Price: sequences are about four times as long.
  * Pre-norm with RMSNorm (Zhang & Sennrich, arXiv:1910.07467) and rotary positions (Su et al.,
    arXiv:2104.09864): nothing depends on the context length but a table that is computed, so the
    manifest does not either.
  * Head tied to the embedding: at width 96 an untied head would be a twentieth of the model.
  * Squared ReLU (So et al., arXiv:2109.08668) instead of GELU: as good, and cheaper without a GPU.
  * Weights in fp32, bf16 by autocast only. A delta is a difference of weights: bf16 weights
    would lose every update smaller than 1/256 of the weight it changes.

Shape suffixes: B batch, S window (context + 1), T context, V vocabulary, C width, H heads, D
channels per head.

`part` cuts it: embedding and blocks | blocks | blocks, norm and head. Each part computes its
rotary table for itself, and masks are causal, so nothing but the residual stream crosses a cut.
Padding sits at the end, where no real position can see it; lengths are therefore not needed here.
"""

# ruff: noqa: N803, N806 - shapes are suffixes

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from fsl_async.config.presets import SIZES
from fsl_async.errors import TaskError

Tables = Mapping[str, Mapping[str, Any]]
"""A run's configuration as plain tables, as `fed.config` has it."""

VOCABULARY = 256
ROTARY_BASE = 10_000.0


@attrs.frozen(slots=True)
class GPTConfig:
    """Sizes of a GPT.

    `width` must be a multiple of `heads`, and `width / heads` even (rotary pairs).
    """

    layers: int
    width: int
    heads: int
    context: int
    dropout: float = 0.0
    vocabulary: int = VOCABULARY

    def __attrs_post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}: give at least 1")
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"model.width {self.width} does not split into {self.heads} heads of even size"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}: give a share in [0, 1)")


PRESETS = {
    name: GPTConfig(sizes.layers, sizes.width, sizes.heads, sizes.context)
    for name, sizes in SIZES.items()
}


def gpt_config(tables: Tables) -> GPTConfig:
    """Read [model]: a preset, and sizes that are not 0 in its place. Raises TaskError."""
    given = tables.get("model", {})
    preset = given.get("preset", "0.5m")
    if preset not in PRESETS:
        raise TaskError(f"model.preset {preset!r} does not exist: use one of {', '.join(PRESETS)}")
    names = ("layers", "width", "heads", "context", "vocabulary")
    changed = {name: given[name] for name in names if given.get(name)}
    try:
        return attrs.evolve(PRESETS[preset], **changed)
    except ValueError as error:
        raise TaskError(str(error)) from error


class Linear(nn.Linear):
    """No bias, and no initialization of its own.

    Torch's draws from the global generator, then we overwrite it.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Left to GPT.__init__, which knows the depth and the seed."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return x_BTC, normalized over its channels."""
        return F.rms_norm(x_BTC, self.weight.shape, self.weight.to(x_BTC.dtype), eps=1e-6)


def rotary_table(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, fp32 (context, size / 2), of pair d's angle at position t."""
    speed_D = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle_TD = torch.outer(torch.arange(context, dtype=torch.float32), speed_D)
    return angle_TD.cos(), angle_TD.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn channel pairs (d, d + D/2) of queries or keys by their position."""
    left, right = x_BHTD.chunk(2, dim=-1)
    turned = (left * cos_TD - right * sin_TD, right * cos_TD + left * sin_TD)
    return torch.cat(turned, dim=-1).to(x_BHTD.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) ** 2, element by element."""
    return F.relu(x).square()


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = squared_relu
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.width)
        self.attention_in = Linear(config.width, 3 * config.width)
        self.attention_out = Linear(config.width, config.width)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp_in = Linear(config.width, 4 * config.width)
        self.mlp_out = Linear(4 * config.width, config.width)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Return the residual stream x_BTC with what this block read and thought added."""
        B, T, C = x_BTC.shape
        dropout = self.dropout if self.training else 0.0
        mixed_B3HTD = self.attention_in(self.attention_norm(x_BTC)).view(
            B, T, 3, self.heads, C // self.heads
        )
        q_BHTD, k_BHTD, v_BHTD = mixed_B3HTD.permute(2, 0, 3, 1, 4).unbind(0)
        read_BHTD = F.scaled_dot_product_attention(
            rotate(q_BHTD, cos_TD, sin_TD),
            rotate(k_BHTD, cos_TD, sin_TD),
            v_BHTD,
            dropout_p=dropout,
            is_causal=True,
        )
        read_BTC = self.attention_out(read_BHTD.transpose(1, 2).reshape(B, T, C))
        x_BTC = x_BTC + F.dropout(read_BTC, dropout)
        thought_BTC = self.mlp_out(self.activation(self.mlp_in(self.mlp_norm(x_BTC))))
        return x_BTC + F.dropout(thought_BTC, dropout)


class GPT(nn.Module):
    """Logits over the next byte. The same config and seed give the same weights on every machine.

    Initialized from a generator of its own, on the CPU, so that neither the device nor what the
    program drew before matters. Projections into the residual stream are scaled down by the number
    of them (GPT-2), so that the stream's variance does not grow with depth.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        cos_TD, sin_TD = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("cos_TD", cos_TD, persistent=False)
        self.register_buffer("sin_TD", sin_TD, persistent=False)
        if not self.embedding.is_meta:
            self._initialize(torch.Generator().manual_seed(seed))

    def _initialize(self, rng: torch.Generator) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = initial_deviation(name, weight.shape[1], self.config.layers)
                nn.init.normal_(weight, std=std, generator=rng)

    def forward(self, byte_BT: Tensor) -> Tensor:
        """byte_BT: int64 in [0, vocabulary), T <= context. Returns logits_BTV in fp32."""
        T = byte_BT.shape[1]
        cos_TD, sin_TD = self.cos_TD[:T], self.sin_TD[:T]  # type: ignore[index]
        x_BTC = F.embedding(byte_BT, self.embedding)
        for block in self.blocks:
            x_BTC = block(x_BTC, cos_TD, sin_TD)
        return F.linear(self.norm(x_BTC), self.embedding).float()

    def loss(self, window_BS: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte.

        window_BS: int64, S <= context + 1; each byte after the first is predicted.
        """
        logits_BTV = self(window_BS[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), window_BS[:, 1:].flatten())


def initial_deviation(name: str, inputs: int, layers: int) -> float:
    """Standard deviation that the matrix called `name`, with `inputs` columns, is drawn with.

    The draws are in the order of names.
    """
    if name == "embedding":
        # Tied head: logits of a normalized stream have a deviation of 0.02 sqrt(width), so the
        # first loss is close to ln(256) = 5.55 whatever the width up to some thousands.
        return 0.02
    deep = name.endswith("_out.weight")
    return float(inputs**-0.5 / (math.sqrt(2 * layers) if deep else 1.0))


class GPTPart(nn.Module):
    """Some blocks of a GPT; the first part has the embedding, the last one norm and head.

    Weights have the names they have in the uncut model; the head, which there is the embedding, is
    called `head`.
    """

    def __init__(
        self,
        config: GPTConfig,
        blocks: dict[str, nn.Module],
        embedding: nn.Parameter | None,
        norm: nn.Module | None,
        head: nn.Parameter | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Parameter | None
        self.head: nn.Parameter | None
        self.register_parameter("embedding", embedding)
        self.blocks = nn.ModuleDict(blocks)
        self.norm: nn.Module | None = norm
        self.register_parameter("head", head)
        cos_TD, sin_TD = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("cos_TD", cos_TD, persistent=False)
        self.register_buffer("sin_TD", sin_TD, persistent=False)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x: int64 (B, T) if this part has the embedding, else the stream (B, T, C).

        Returns the stream or fp32 logits (B, T, V).
        """
        if self.embedding is not None:
            x = F.embedding(x, self.embedding)
        T = x.shape[1]
        cos_TD, sin_TD = self.cos_TD[:T], self.sin_TD[:T]  # type: ignore[index]
        for block in self.blocks.values():
            x = block(x, cos_TD, sin_TD)
        if self.norm is not None and self.head is not None:
            return F.linear(self.norm(x), self.head).float()
        return x

    def first_blocks(self, count: int) -> "GPTPart":
        """A part of the same weights: only the first `count` blocks, then norm and head.

        For auxiliary models.
        """
        blocks = dict(itertools.islice(self.blocks.items(), count))
        return GPTPart(self.config, blocks, self.embedding, self.norm, self.head)


def build(config: GPTConfig, *, seed: int, blocks: Collection[int], ends: bool) -> GPT:
    """The model GPT(config, seed=seed), of which only some weights take memory.

    For a node that holds a part of it.

    There are the blocks with the numbers `blocks` and, with `ends`, the embedding (which is the
    head) and the last norm; the others are on torch's meta device. Cut it with `cuts.split` as if
    it were whole. Never more memory than that and one matrix.
    """
    with torch.device("meta"):
        model = GPT(config)
    rng = torch.Generator().manual_seed(seed)
    for name, weight in list(model.named_parameters()):
        drawn = torch.ones(weight.shape)
        if weight.dim() == 2:  # drawn in any case, so that those after it come out the same
            std = initial_deviation(name, weight.shape[1], config.layers)
            nn.init.normal_(drawn, std=std, generator=rng)
        place, _, last = name.rpartition(".")
        number = place.split(".")[1] if place.startswith("blocks.") else ""
        if int(number) in blocks if number else ends:
            model.get_submodule(place).register_parameter(last, nn.Parameter(drawn))
    return model


def layers(model: GPT) -> int:
    """How many blocks it has."""
    return len(model.blocks)


def part(model: GPT, start: int, stop: int, *, first: bool, last: bool) -> nn.Module:
    """The blocks from `start` to `stop`; first and last: with the ends of the model."""
    return GPTPart(
        model.config,
        {str(index): model.blocks[index] for index in range(start, stop)},
        model.embedding if first else None,
        model.norm if last else None,
        model.embedding if last else None,
    )
