"""Shapes of the built-in models: values of each part of a cut model, kept and passed on. Pure.

A method's bytes and memory depend on a model only through these numbers. Built in are ResNet-18 for
32x32 images, cut as in FSL-SAGE (Nair et al., ICML 2025, arXiv:2505.23182: 7x7 stem with stride 2,
max pooling, client up to layer 2), and the presets of the built-in GPT, cut after a block. Any
other model: `fsl_async.learn.split.build`.

Values kept for the backward pass (`activations`), in fp32:
  * ResNet: each convolution keeps its input and each batch norm its own, so twice every
    convolution's output; a shortcut's once, because nothing keeps the output of its norm.
  * GPT: for each token and block 21 times the width, and one value a head: inputs and statistics of
    both norms, inputs of the four linear layers, rotated queries and keys, values, and the two
    steps of the squared ReLU. That is what torch saves.
"""

from attrs import evolve

from fsl_async.accounting.sizes import ModelShapes, Part, label_width
from fsl_async.config.presets import SIZES, Sizes
from fsl_async.errors import UsageError

RESNETS = {"resnet18-cifar10": 10, "resnet18-cifar100": 100}
"""Names, and their numbers of classes."""
RESNET_CUTS = ("layer1", "layer2", "layer3")
RESNET_DEFAULT_CUT = "layer2"
_RESNET_WIDTHS = (64, 128, 256, 512)
_RESNET_SIDES = (8, 4, 2, 1)
_RESNET_IMAGE_VALUES = 3 * 32 * 32

GPT_VOCABULARY = 256
GPT_DEFAULT_CUT = "1"
_KEPT_WIDTHS_OF_A_BLOCK = 21


def is_known(model: str) -> bool:
    """Whether `find_shapes` has this name."""
    return model in RESNETS or model.removeprefix("gpt-") in SIZES


def find_shapes(model: str, cut: str | None = None) -> ModelShapes:
    """Shapes of `model`, a built-in name, cut at `cut` or at its default.

    For any other model `fsl_async.learn.split.build` makes a `ModelShapes` from its tensors.
    Raises UsageError with the names, or the cuts, that exist.
    """
    if model in RESNETS:
        return resnet18(model, RESNETS[model], cut or RESNET_DEFAULT_CUT)
    preset = model.removeprefix("gpt-")
    if preset in SIZES:
        return gpt(f"gpt-{preset}", SIZES[preset], cut or GPT_DEFAULT_CUT)
    known = ", ".join([*RESNETS, *(f"gpt-{name}" for name in SIZES), "and what model.family takes"])
    raise UsageError(f"--model {model[:80]!r} is unknown; known: {known}")


def resnet18(name: str, classes: int, cut: str) -> ModelShapes:
    """ResNet-18 (He et al., arXiv:1512.03385) on 3x32x32 images, cut after a stage.

    The auxiliary model is the next stage and a head.
    """
    if cut not in RESNET_CUTS:
        raise UsageError(
            f"--cut {cut[:80]!r} does not exist in {name}; cuts: {', '.join(RESNET_CUTS)}"
        )
    index = RESNET_CUTS.index(cut) + 1
    stages = [_stage(number) for number in range(4)]
    client = _sum(_stem(), *stages[:index])
    tail = _head(_RESNET_WIDTHS[3], classes)
    server = _sum(*stages[index:], tail)
    return ModelShapes(
        name=name,
        cut=cut,
        client=client,
        server=server,
        whole=client + server,
        auxiliary=stages[index] + _head(_RESNET_WIDTHS[index], classes),
        tail=tail,
        cut_values=_RESNET_WIDTHS[index - 1] * _RESNET_SIDES[index - 1] ** 2,
        tail_values=_RESNET_WIDTHS[3],
        label_bytes=label_width(classes),
    )


def gpt(name: str, sizes: Sizes, cut: str) -> ModelShapes:
    """The built-in GPT with `cut` blocks at the client.

    A sample is a window of `context` tokens; its labels are the next bytes. The whole model ties
    its head to the embedding. Cut in two, the client has the embedding and the split server a head
    of its own; with the tail at the client they stay tied. The auxiliary model is one block, the
    norm and a head of its own.
    """
    if not (cut.isascii() and cut.isdecimal() and len(cut) < 10 and int(cut) < sizes.layers):
        raise UsageError(
            f"--cut {cut[:80]!r} does not exist in {name}; cuts: 0 to {sizes.layers - 1},"
            " the blocks in front of it"
        )
    before = int(cut)
    width, tokens = sizes.width, sizes.context
    block = Part(
        parameters=12 * width * width + 2 * width,
        activations=tokens * (_KEPT_WIDTHS_OF_A_BLOCK * width + sizes.heads),
    )
    embedding = Part(parameters=GPT_VOCABULARY * width)
    norm = Part(parameters=width, activations=tokens * (2 * width + GPT_VOCABULARY))
    head = embedding + norm
    client = _sum(embedding, *[block] * before)
    server = _sum(*[block] * (sizes.layers - before), head)
    return ModelShapes(
        name=name,
        cut=cut,
        client=client,
        server=server,
        whole=_sum(head, *[block] * sizes.layers),
        auxiliary=block + head,
        tail=norm,
        cut_values=tokens * width,
        tail_values=tokens * width,
        label_bytes=tokens * label_width(GPT_VOCABULARY),
    )


def _sum(*parts: Part) -> Part:
    return sum(parts, Part())


def _convolution(kernel: int, inputs: int, outputs: int, side: int, *, kept: int = 2) -> Part:
    """A convolution without bias and its batch norm; the output is outputs x side x side."""
    return Part(
        parameters=kernel * kernel * inputs * outputs + 2 * outputs,
        buffers=2 * outputs,
        counters=1,
        activations=kept * outputs * side * side,
    )


def _stem() -> Part:
    """7x7 with stride 2 (3x32x32 to 64x16x16), then 3x3 max pooling with stride 2.

    The pooling keeps 64-bit indices and its output.
    """
    first = _convolution(7, 3, _RESNET_WIDTHS[0], 16)
    pooled = 3 * _RESNET_WIDTHS[0] * _RESNET_SIDES[0] ** 2
    return evolve(first, activations=first.activations + _RESNET_IMAGE_VALUES + pooled)


def _stage(number: int) -> Part:
    """Two basic blocks; stages after the first halve the image, their shortcut is a 1x1."""
    outputs, side = _RESNET_WIDTHS[number], _RESNET_SIDES[number]
    inputs = _RESNET_WIDTHS[max(number - 1, 0)]
    later = _convolution(3, outputs, outputs, side)
    stage = _convolution(3, inputs, outputs, side) + later + later + later
    return stage if number == 0 else stage + _convolution(1, inputs, outputs, side, kept=1)


def _head(inputs: int, classes: int) -> Part:
    """Mean over the image, then a linear layer and log-softmax."""
    return Part(parameters=(inputs + 1) * classes, activations=inputs + classes)
