"""The models that a run may train, by `model.family`, and where each is cut by default.

    gpt                            built in, over bytes
    gpt2 llama qwen2 qwen3 opt     Hugging Face's, with fresh weights (hf.py); sizes as those of the
                                   built-in GPT's presets
    resnet18 small-cnn             for images (here)
    file.py:function               the user's own: function(shape, classes) -> a model that can be
                                   cut (cuts.py). shape: of one sample, (context,) for text;
                                   classes: of the labels or tokens

The same configuration gives the same weights on every node.

Networks for images are rows of named children that can be cut after any of them. `resnet18` (He et
al., arXiv:1512.03385) has the 7x7 stem and the names that torchvision uses, so its weights fit. Cut
after "layer2" it is the split that FSL-SAGE (Nair et al., arXiv:2505.23182) was published with:
2,740,048 bytes at the client, 42,025,080 at the split server (10 classes, batch norm's buffers and
counters included), 128x4x4 values per 32x32 image.

`small_cnn` trains on a CPU: two convolutions, two linear layers, no batch norm. Cut it after
"pool1" or "pool2".
"""

from collections.abc import Callable, Collection
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from fsl_async.config.presets import SIZES
from fsl_async.config.rules import LANGUAGE_FAMILIES, is_own
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError, one_line
from fsl_async.learn.data.facts import Facts, context_of
from fsl_async.learn.models import gpt, hf
from fsl_async.learn.models.cuts import CutError, cuts_of, own_module
from fsl_async.learn.models.forward import Batch, drawing
from fsl_async.learn.models.gpt import GPT, GPTConfig, gpt_config


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 convolution where size or width changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, width, H / stride, W / stride)."""
        across = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + across)


def resnet18(classes: int = 10, *, channels: int = 3, seed: int = 0) -> nn.Sequential:
    """ResNet-18: images float (N, channels, H, W) -> logits (N, classes)."""
    with drawing(torch.device("cpu"), seed, "model"):
        model = nn.Sequential()
        model.add_module("conv1", nn.Conv2d(channels, 64, 7, 2, 3, bias=False))
        model.add_module("bn1", nn.BatchNorm2d(64))
        model.add_module("relu", nn.ReLU())
        model.add_module("maxpool", nn.MaxPool2d(3, 2, 1))
        for number, width in enumerate((64, 128, 256, 512), start=1):
            inputs = width if number == 1 else width // 2
            stage = nn.Sequential(
                BasicBlock(inputs, width, 1 if number == 1 else 2), BasicBlock(width, width, 1)
            )
            model.add_module(f"layer{number}", stage)
        model.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
        model.add_module("flatten", nn.Flatten())
        model.add_module("fc", nn.Linear(512, classes))
        for part in model.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return model


def small_cnn(
    classes: int = 10, *, channels: int = 3, side: int = 32, width: int = 16, seed: int = 0
) -> nn.Sequential:
    """Two convolutions and two linear layers.

    Images float (N, channels, side, side) -> logits (N, classes).
    """
    with drawing(torch.device("cpu"), seed, "model"):
        model = nn.Sequential()
        model.add_module("conv1", nn.Conv2d(channels, width, 3, padding=1))
        model.add_module("relu1", nn.ReLU())
        model.add_module("pool1", nn.MaxPool2d(2))
        model.add_module("conv2", nn.Conv2d(width, 2 * width, 3, padding=1))
        model.add_module("relu2", nn.ReLU())
        model.add_module("pool2", nn.MaxPool2d(2))
        model.add_module("flatten", nn.Flatten())
        model.add_module("fc1", nn.Linear(2 * width * (side // 4) ** 2, 4 * width))
        model.add_module("relu3", nn.ReLU())
        model.add_module("fc2", nn.Linear(4 * width, classes))
    return model


_CUTS = {"resnet18": "layer2", "small-cnn": "pool1"}


def gpt_sizes(config: Config, facts: Facts) -> GPTConfig:
    """Sizes of the built-in GPT. Raises TaskError."""
    found = gpt_config({"model": attrs.asdict(config.model)})
    return attrs.evolve(found, vocabulary=facts.classes)


def build_model(config: Config, facts: Facts, blocks: Collection[int] | None = None) -> nn.Module:
    """The run's whole model on the CPU.

    blocks: of the built-in GPT only these and both ends take memory.

    Raises ConfigError and TaskError, each in one line: sizes that do not fit, no extra `hf`, a
    function of the user's that fails.
    """
    family, seed = config.model.family, config.run.seed
    if family == "gpt":
        sizes = gpt_sizes(config, facts)
        if blocks is not None:
            return gpt.build(sizes, seed=seed, blocks=blocks, ends=True)
        return GPT(sizes, seed=seed)
    if family in LANGUAGE_FAMILIES:
        return hf.build(family, hf_sizes(config, facts), seed=seed)
    if is_own(family):
        arguments = {"shape": facts.shape, "classes": facts.classes}
        return own_module("model", family, arguments, drawing(torch.device("cpu"), seed, "model"))
    return _images(config, facts)


def default_cut(config: Config, model: nn.Module) -> str:
    """Where to cut when the configuration does not say."""
    if config.split.cut:
        return config.split.cut
    if config.model.family in _CUTS:
        return _CUTS[config.model.family]
    return useful_cuts(model)[0] if isinstance(model, nn.Sequential) else "1"


def useful_cuts(model: nn.Module) -> list[str]:
    """The cuts that leave weights on both sides, front to back.

    Raises CutError where there are none.
    """
    places = list(cuts_of(model))
    if isinstance(model, nn.Sequential):
        heavy = [next(child.parameters(), None) is not None for child in model]
        places = [
            place
            for number, place in enumerate(places, start=1)
            if any(heavy[:number]) and any(heavy[number:])
        ]
    if not places:
        raise CutError("this model has no cut with weights on both sides")
    return places


def tail_cut(model: nn.Module) -> str:
    """In front of the last piece, which a U-shape leaves at the client.

    Norm and head of a language model, an nn.Sequential's last child.
    """
    places = cuts_of(model)
    return places[-1] if isinstance(model, nn.Sequential) else str(len(places))


def example(facts: Facts) -> Batch:
    """A batch of one sample of the right shapes and no content."""
    if facts.language:
        ids = torch.zeros(1, *facts.shape, dtype=torch.int64)
        return Batch(ids, ids)
    return Batch(torch.zeros(1, *facts.shape), torch.zeros(1, dtype=torch.int64))


def hf_sizes(config: Config, facts: Facts) -> dict[str, Any]:
    """The fields of a family's config: from [model] as for the built-in GPT, then model.sizes."""
    family, model = config.model.family, config.model
    sizes = SIZES[model.preset]
    width, heads = model.width or sizes.width, model.heads or sizes.heads
    found: dict[str, Any] = {
        "vocab_size": facts.classes,
        "num_hidden_layers": model.layers or sizes.layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "max_position_embeddings": context_of(config),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family in {"llama", "qwen2", "qwen3"}:
        found |= {"intermediate_size": 4 * width, "num_key_value_heads": heads}
    if family == "qwen3":
        found["head_dim"] = width // heads
    if family == "opt":
        found |= {"ffn_dim": 4 * width, "word_embed_proj_dim": width}
    return found | given_sizes(config)


def given_sizes(config: Config) -> dict[str, Any]:
    """`model.sizes` as names and values."""
    found: dict[str, Any] = {}
    for part in filter(None, config.model.sizes.split(",")):
        name, _, text = (piece.strip() for piece in part.partition("="))
        found[name] = _value(text)
    return found


def _value(text: str) -> bool | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _images(config: Config, facts: Facts) -> nn.Module:
    if len(facts.shape) != 3:
        raise ConfigError(
            f"{config.model.family} is for images, and samples have shape {facts.shape}",
            "model.family",
        )
    channels, side, across = facts.shape
    seed, given = config.run.seed, given_sizes(config)
    build: Callable[..., nn.Module] = resnet18
    if config.model.family == "small-cnn":
        if side != across or side < 4:
            raise ConfigError(
                f"small-cnn takes square images of 4x4 or more, not {side}x{across}", "model.family"
            )
        build, given = small_cnn, {"side": side, **given}
    try:
        return build(facts.classes, channels=channels, seed=seed, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{config.model.family} cannot be built: {one_line(str(error))}", "model.sizes"
        ) from error
