"""The planner's built-in shapes against real modules."""

import pytest
import torch

from fsl_async.accounting.sizes import Part, label_width
from fsl_async.config.presets import SIZES, Sizes
from fsl_async.learn.models.cuts import build_auxiliary, split
from fsl_async.learn.models.families import resnet18
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.models.gpt import GPT, PRESETS, GPTConfig
from fsl_async.plan.shapes import find_shapes, gpt


def counted(*modules):
    """Parameters, floating buffers and integer buffers of modules, tied ones once."""
    parameters = {id(w): w.numel() for m in modules for w in m.parameters()}
    buffers = [
        b for m in modules for n, b in m.state_dict().items() if n not in dict(m.named_parameters())
    ]
    return (
        sum(parameters.values()),
        sum(b.numel() for b in buffers if b.is_floating_point()),
        sum(b.numel() for b in buffers if not b.is_floating_point()),
    )


def kept_values(module, inputs, weights):
    """fp32 values that a forward pass keeps for the backward pass, each storage once."""
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


def same(part, *modules):
    return (part.parameters, part.buffers, part.counters) == counted(*modules)


@pytest.mark.parametrize("name", ["0.5m", "3m"])
@pytest.mark.parametrize("cut", ["0", "2"])
def test_gpt_parts_have_the_values_of_the_real_ones(name, cut):
    """A formula becomes wrong when the module changes."""
    with torch.device("meta"):
        model = GPT(PRESETS[name])
    found = find_shapes(f"gpt-{name}", cut)
    assert same(found.whole, model)
    parts = split(model, cut)
    assert same(found.client, parts.client)
    assert same(found.server, parts.server)
    assert same(found.auxiliary, parts.server.first_blocks(1))
    with torch.device("meta"):
        u_shaped = split(GPT(PRESETS[name]), cut, PRESETS[name].layers)
    assert same(found.client + found.tail, u_shaped.client, u_shaped.tail)
    context, width = PRESETS[name].context, PRESETS[name].width
    assert found.cut_values == found.tail_values == context * width
    assert found.label_bytes == context


def test_a_gpt_keeps_the_values_of_the_rule():
    """The memory estimate needs it; torch's fused attention keeps no context-by-context matrix."""
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


@pytest.mark.parametrize("cut", ["layer1", "layer2", "layer3"])
def test_resnet_parts_have_the_values_of_the_real_ones(cut):
    """Values of each part, the cut's shape and kept values are exact at every cut."""
    found = find_shapes("resnet18-cifar100", cut)
    batch = 2
    images, labels = torch.rand(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)
    parts = split(resnet18(100), cut)
    client, server = parts.client, parts.server
    assert same(found.whole, client, server)
    assert same(found.client, client)
    assert same(found.server, server)
    auxiliary = build_auxiliary("blocks:1", parts, Batch(images, labels))
    assert same(found.auxiliary, auxiliary)
    assert same(found.tail, server.fc)
    crossing = client(images).detach()
    assert crossing.numel() == batch * found.cut_values
    assert server.fc.in_features == found.tail_values
    # The next module keeps a part's output, and the loss keeps the logits. Batch norms also keep
    # two values a channel for any batch, as many as they have running statistics.
    kept = kept_values(client, (images,), client.state_dict().values())
    assert kept == batch * found.client.activations + found.client.buffers
    kept = kept_values(server, (crossing,), server.state_dict().values())
    expected = found.server.activations + found.cut_values - 100
    assert kept == batch * expected + found.server.buffers


def test_every_preset_can_be_planned_and_labels_take_the_fewest_bytes():
    """New presets need no change here; labels take the smallest integer of their classes."""
    for name in SIZES:
        assert find_shapes(name) == find_shapes(f"gpt-{name}", "1")
    assert [label_width(classes) for classes in (2, 256, 257, 65_536, 65_537)] == [1, 1, 2, 2, 4]
