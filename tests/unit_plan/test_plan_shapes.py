"""The planner's shapes against real modules: the planner itself never builds one."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from fsl_async.learn.gpt import GPT, PRESETS, GPTConfig
from fsl_async.plan.shapes import Part, find_shapes, gpt, label_width
from fsl_async.presets import SIZES, Sizes


def counted(*modules):
    """Parameters, floating buffers and integer buffers of modules, tied ones once."""
    parameters = {id(w): w.numel() for m in modules for w in m.parameters()}
    state = [b for m in modules for b in m.state_dict().values()]
    known = {w.data_ptr() for m in modules for w in m.parameters()}
    buffers = [b for b in state if b.data_ptr() not in known]
    return (
        sum(parameters.values()),
        sum(b.numel() for b in buffers if b.is_floating_point()),
        sum(b.numel() for b in buffers if not b.is_floating_point()),
    )


def kept_values(module, inputs, weights):
    """fp32 values that one forward pass of `module` keeps for the backward pass, each piece of memory once."""
    own = {w.untyped_storage().data_ptr() for w in weights}
    sizes, alive = {}, []

    def keep(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    return sum(sizes.values()) / 4


@pytest.mark.parametrize("name", ["0.5m", "3m"])
@pytest.mark.parametrize("before", [1, 3])
def test_gpt_halves_have_the_parameters_of_the_real_one(name, before):
    """A formula of somebody else's module goes wrong the day that module changes."""
    with torch.device("meta"):
        model = GPT(PRESETS[name])
    found = find_shapes(f"gpt-{name}", str(before))
    blocks = [sum(w.numel() for w in block.parameters()) for block in model.blocks]
    table, norm = model.embedding.numel(), sum(w.numel() for w in model.norm.parameters())
    assert found.client == Part(table + sum(blocks[:before]), activations=found.client.activations)
    assert found.server.parameters == sum(blocks[before:]) + norm + table
    assert found.whole.parameters == sum(w.numel() for w in model.parameters())
    assert found.auxiliary.parameters == blocks[0] + norm + table
    assert found.tail.parameters == norm + table
    context, width = PRESETS[name].context, PRESETS[name].width
    assert found.cut_values == found.tail_values == context * width
    assert found.label_bytes == context


def test_a_gpt_keeps_what_the_rule_says():
    """The memory estimate rests on it. Blocks keep no matrix of context by context: torch's fused attention."""
    sizes = Sizes(layers=3, width=64, heads=4, context=96)
    model = GPT(GPTConfig(sizes.layers, sizes.width, sizes.heads, sizes.context))
    batch = 2
    window = torch.randint(0, 256, (batch, sizes.context + 1))
    kept = kept_values(model.loss, (window,), [*model.parameters(), model.cos_TD, model.sin_TD])
    found = gpt("x", sizes, "1")
    assert found.client + found.server == Part(
        found.whole.parameters + model.embedding.numel(), activations=found.whole.activations
    )
    assert kept == pytest.approx(batch * found.whole.activations, rel=0.03)


class Basic(nn.Module):
    """A basic block of ResNet-18, written from the paper."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.shortcut = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):  # noqa: D102
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def resnet(classes):
    """Stem, four stages, head: six modules."""
    widths = [64, 64, 128, 256, 512]
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    stages = [
        nn.Sequential(Basic(a, b, 2 if b > a else 1), Basic(b, b, 1)) for a, b in pairwise(widths)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    return [stem, *stages, head]


@pytest.mark.parametrize(("cut", "index"), [("layer1", 2), ("layer2", 3), ("layer3", 4)])
def test_resnet_halves_have_the_values_of_a_real_one(cut, index):
    """Parameters, running statistics, counters, the cut's shape and what is kept, at every cut that is offered."""
    parts = resnet(100)
    found = find_shapes("resnet18-cifar100", cut)
    for part, modules in ((found.client, parts[:index]), (found.server, parts[index:])):
        assert (part.parameters, part.buffers, part.counters) == counted(*modules)
    assert (found.tail.parameters, found.tail.buffers) == counted(parts[-1])[:2]
    client, server = nn.Sequential(*parts[:index]), nn.Sequential(*parts[index:])
    batch = 4
    images = torch.rand(batch, 3, 32, 32)
    crossing = client(images).detach()
    assert crossing.numel() == batch * found.cut_values
    # What a half puts out is kept by whoever reads it next, and the loss reads the logits. Batch norms also keep two values a
    # channel, whatever the batch, as many as they have running statistics.
    kept = kept_values(client, (images,), client.state_dict().values())
    assert kept == batch * found.client.activations + found.client.buffers
    kept = kept_values(server, (crossing,), server.state_dict().values())
    expected = found.server.activations + found.cut_values - 100
    assert kept == batch * expected + found.server.buffers


def test_every_preset_can_be_planned_and_labels_take_the_fewest_bytes():
    """New presets must not need a change here; labels are sent as the smallest integer that holds the classes."""
    for name in SIZES:
        assert find_shapes(name) == find_shapes(f"gpt-{name}", "1")
    assert [label_width(classes) for classes in (2, 256, 257, 65_536, 65_537)] == [1, 1, 2, 2, 4]
