"""Cuts of models: the parts give the complete model, and have their published sizes; auxiliary
models: the three kinds, their shapes, and errors for those that do not fit.
"""

import copy

import pytest
import torch
from torch import nn

from fsl_async.accounting.sizes import PublishedAccounting
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models import gpt
from fsl_async.learn.models.cuts import (
    AuxiliaryError,
    CutError,
    build_auxiliary,
    cuts_of,
    in_one,
    split,
)
from fsl_async.learn.models.families import resnet18, small_cnn
from fsl_async.learn.models.forward import Batch, call
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.learn.split.build import counted

PUBLISHED = PublishedAccounting()
SMALL = GPTConfig(layers=3, width=16, heads=2, context=12)


def picture(side=32, count=2):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def test_resnet18_weighs_what_was_published():
    """x_c, x_s, x_a and activations of FSL-SAGE's CIFAR-10 experiment, in bytes.

    All traffic figures follow from them.
    """
    halves = split(resnet18(10), "layer2")
    net = build_auxiliary("blocks:1", halves, Batch(picture(), torch.zeros(2).long()))
    assert PUBLISHED.weights(counted([halves.client])).payload == 2_740_048
    assert PUBLISHED.weights(counted([halves.server])).payload == 42_025_080
    assert PUBLISHED.weights(counted([net])).payload == 8_419_408
    assert call(halves.client, picture(), None).shape[1:] == (128, 4, 4)
    linear = build_auxiliary("linear", halves, Batch(picture(), torch.zeros(2).long()))
    assert PUBLISHED.weights(counted([linear])).payload == 4 * (128 * 10 + 10)
    # The wire carries fp32 values; batch norm's ten int64 counters stay local.
    assert 4 * ModelWeights(halves.client).layout.values == 2_740_048 - 10 * 8


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (resnet18(10), picture()),
        (small_cnn(), picture()),
        (GPT(SMALL), torch.randint(0, 256, (2, 12))),
    ],
    ids=["resnet18", "small_cnn", "gpt"],
)
def test_parts_give_the_outputs_of_the_complete_model_at_every_cut(model, example):
    """A cut does not change the model."""
    model = model.eval()
    with torch.no_grad():
        wanted = model(example)
        for number, cut in enumerate(cuts_of(model)):
            assert torch.equal(split(copy.deepcopy(model), cut).run(example), wanted)
            for later in cuts_of(model)[number + 1 :]:
                halves = split(copy.deepcopy(model), cut, later)
                assert torch.equal(halves.run(example), wanted)
                assert (halves.cut, halves.tail_cut) == (cut, later)


def test_a_cut_is_a_name_or_a_number():
    """Papers name layers; plain sequences have no names."""
    model = resnet18(10)
    assert cuts_of(model)[:6] == ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2")
    by_name = split(model, "layer2").client.state_dict()
    assert by_name.keys() == split(model, 5).client.state_dict().keys()
    assert "layer2.1.bn2.running_var" in by_name
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    assert len(split(plain, "1").client) == 2


def test_small_cnn_and_resnet_depend_on_their_seed_alone():
    """Every site builds the same start; the user's generator is untouched."""
    for build in (small_cnn, resnet18):
        state = torch.get_rng_state()
        first = build(seed=4).state_dict()
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        second = build(seed=4).state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not torch.equal(first["conv1.weight"], build(seed=5).state_dict()["conv1.weight"])
    assert small_cnn(7, side=28, channels=1)(torch.zeros(1, 1, 28, 28)).shape == (1, 7)


@pytest.mark.parametrize("tail", [None, 2])
def test_a_node_builds_its_part_of_a_gpt_without_the_rest(tail):
    """A client that cannot hold the model does not build it; with the same seed its part is the
    same.
    """
    whole = split(GPT(SMALL, seed=7), 1, tail)
    mine = gpt.build(SMALL, seed=7, blocks={0} if tail is None else {0, 2}, ends=True)
    client = split(mine, 1, tail)
    servers = gpt.build(SMALL, seed=7, blocks={1, 2} if tail is None else {1}, ends=tail is None)
    server = split(servers, 1, tail)
    pairs = [
        (client.client, whole.client),
        (client.tail, whole.tail),
        (server.server, whole.server),
    ]
    for found, wanted in pairs:
        if wanted is not None:
            theirs = wanted.state_dict()
            assert found.state_dict().keys() == theirs.keys()
            assert all(torch.equal(v, theirs[name]) for name, v in found.state_dict().items())
            assert not any(buffer.is_meta for buffer in found.buffers())
    assert all(weight.is_meta for weight in client.server.blocks.parameters())
    assert all(weight.is_meta for weight in server.client.parameters()) == (tail is not None)
    if tail is not None:
        assert client.tail.head is client.client.embedding


def test_weights_tied_within_the_server_stay_tied():
    """Only ties across the cut are cut."""
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), shared)
    halves = split(model, 1)
    # Modules that are shared are one object, so the client's must not have been changed either.
    assert halves.client[0].weight is shared.weight
    server = [child for child in halves.server if isinstance(child, nn.Linear)]
    assert server[0].weight is server[1].weight
    assert server[0].weight is not shared.weight


@pytest.mark.parametrize(
    ("cut", "tail", "message"),
    [
        ("layer9", None, "Sequential has no cut 'layer9'; cuts that exist: conv1, bn1, relu"),
        ("fc", None, "no cut 'fc'"),
        (11, None, "no cut '11'"),
        (-1, None, "no cut '-1'"),
        ("layer2", "layer2", "no tail cut 'layer2' behind 'layer2'; cuts that exist: layer3, lay"),
        ("layer2", "conv1", "no tail cut 'conv1'"),
        ("flatten", "flatten", "cuts that exist: none"),
    ],
)
def test_a_cut_that_does_not_exist_is_one_line_with_those_that_do(cut, tail, message):
    """The error lists the cuts that exist."""
    with pytest.raises(CutError, match=message) as raised:
        split(resnet18(10), cut, tail)
    assert "\n" not in raised.value.message
    assert raised.value.exit_code == 2


def test_a_gpt_names_its_cuts_and_its_tail_cuts():
    """Numbers of blocks; the head alone may be the tail."""
    with pytest.raises(CutError, match=r"GPT has no cut '3'; cuts that exist: 0, 1, 2$"):
        split(GPT(SMALL), 3)
    with pytest.raises(CutError, match=r"no tail cut '1' behind '1'; cuts that exist: 2, 3$"):
        split(GPT(SMALL), 1, 1)
    with pytest.raises(CutError, match=r"a Linear cannot be cut: give an nn\.Sequential"):
        cuts_of(nn.Linear(1, 1))


PICTURES = Batch(torch.randn(2, 3, 32, 32), torch.zeros(2).long())
TEXT = Batch(torch.randint(0, 256, (2, 6)), torch.zeros(2, 6).long())


def cnn():
    return split(small_cnn(5), "pool1")


def cut_gpt():
    return split(GPT(GPTConfig(layers=3, width=16, heads=2, context=12)), 1)


@pytest.mark.parametrize("kind", ["linear", "blocks:1", "blocks:2"])
@pytest.mark.parametrize("make", [cnn, cut_gpt])
def test_auxiliary_models_give_outputs_of_the_servers_shape(kind, make):
    """They stand in for the split server."""
    halves, batch = make(), PICTURES if make is cnn else TEXT
    before = {name: value.clone() for name, value in halves.server.state_dict().items()}
    net = build_auxiliary(kind, halves, batch, seed=1)
    values = call(halves.client, batch.inputs, None)
    assert call(net, values, None).shape == halves.run(batch.inputs).shape
    assert net.training
    assert not {id(w) for w in net.parameters()} & {id(w) for w in halves.server.parameters()}
    assert all(torch.equal(before[name], v) for name, v in halves.server.state_dict().items())
    again = build_auxiliary(kind, halves, batch, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_blocks_start_with_the_servers_weights():
    """The first estimates of the split server's gradient are then good."""
    halves = cut_gpt()
    net = build_auxiliary("blocks:2", halves, TEXT)
    assert list(net.blocks) == ["1", "2"]
    assert torch.equal(net.blocks["1"].mlp_in.weight, halves.server.blocks["1"].mlp_in.weight)
    convolution = build_auxiliary("blocks:1", cnn(), PICTURES)
    assert torch.equal(convolution.conv2.weight, cnn().server.conv2.weight)
    assert [name for name, _ in convolution.named_children()][-1] == "auxiliary_head"


OWN = """
from torch import nn

def fits(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], outputs))

def narrow(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], outputs - 1))

def flat(shape, outputs):
    return nn.Linear(7, outputs)

def none(shape, outputs):
    return 3

def raises(shape, outputs):
    raise RuntimeError("no\\nluck")

class Cut(nn.Module):
    def forward(self, x):
        return nn.functional.linear(x.detach().flatten(1), nn.Parameter(x.new_zeros(5, 4096)))

def still(shape, outputs):
    return Cut()

def one(shape):
    return None
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "own.py:narrow",
            r"gives \(2, 4\) for a batch where the split server's part gives \(2, 5\)",
        ),
        ("own.py:flat", r"cannot take activations of shape \(2, 16, 16, 16\)"),
        ("own.py:none", "gave a int, not a module"),
        ("own.py:raises", "raised RuntimeError: no; luck"),
        ("own.py:still", "passes no gradient"),
        ("own.py:one", "must take 2 arguments, shape, outputs"),
        ("own.py:missing", "auxiliary model '.*' has no function|has no function 'missing'"),
        ("blocks:3", "has blocks:1 to blocks:2"),
        ("blocks:0", "has blocks:1 to blocks:2"),
        ("blocks:x", "has blocks:1 to blocks:2"),
        ("tiny", "'tiny' is unknown: linear, blocks:N, file.py:function"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(kind, message, tmp_path):
    """Wrong shapes are found before a run begins."""
    (tmp_path / "own.py").write_text(OWN)
    kind = f"{tmp_path}/{kind}" if "own.py" in kind else kind
    with pytest.raises(AuxiliaryError, match=message) as raised:
        build_auxiliary(kind, cnn(), PICTURES)
    assert "\n" not in raised.value.message
    assert raised.value.exit_code == 2


def test_parts_without_outputs_at_the_server_have_none():
    """In a U-shape the labels are at the client, and FedAvg has no split server to stand in for."""
    with pytest.raises(AuxiliaryError, match="server's part that ends in the outputs"):
        build_auxiliary("linear", split(small_cnn(), 2, 5), PICTURES)
    with pytest.raises(AuxiliaryError, match="server's part that ends in the outputs"):
        build_auxiliary("linear", in_one(small_cnn()), PICTURES)
    last = split(small_cnn(), "relu3")
    with pytest.raises(AuxiliaryError, match="no blocks besides its head"):
        build_auxiliary("blocks:1", last, PICTURES)
