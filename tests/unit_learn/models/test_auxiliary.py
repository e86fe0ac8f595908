"""Auxiliary models: the three kinds, their shapes, and errors for those that do not fit."""

import pytest
import torch

from fsl_async.learn.models.cuts import AuxiliaryError, build_auxiliary, in_one, split
from fsl_async.learn.models.families import small_cnn
from fsl_async.learn.models.forward import Batch, call
from fsl_async.learn.models.gpt import GPT, GPTConfig

PICTURES = Batch(torch.randn(2, 3, 32, 32), torch.zeros(2).long())
TEXT = Batch(torch.randint(0, 256, (2, 6)), torch.zeros(2, 6).long())


def cnn():
    return split(small_cnn(5), "pool1")


def gpt():
    return split(GPT(GPTConfig(layers=3, width=16, heads=2, context=12)), 1)


@pytest.mark.parametrize("kind", ["linear", "blocks:1", "blocks:2"])
@pytest.mark.parametrize("make", [cnn, gpt])
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
    halves = gpt()
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
