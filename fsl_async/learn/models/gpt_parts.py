"""The built-in GPT in parts: embedding and blocks | blocks | blocks, norm and head.

Each part computes its rotary table for itself, and masks are causal, so nothing but the residual
stream crosses a cut. Padding sits at the end, where no real position can see it; lengths are
therefore not needed here.
"""

# ruff: noqa: N806 - shapes are suffixes, as in gpt.py

import itertools
from collections.abc import Collection

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from fsl_async.learn.models.gpt import GPT, GPTConfig, initial_deviation, rotary_table


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
