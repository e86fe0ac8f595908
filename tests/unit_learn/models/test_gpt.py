"""The built-in model: sizes, repeatability, causality."""

import pytest
import torch

from fsl_async.learn.models.gpt import GPT, PRESETS, GPTConfig, rotary_table, rotate

SMALL = GPTConfig(layers=2, width=16, heads=2, context=12)
UNITS = {"m": 1e6, "b": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_about_the_parameters_of_their_name(name):
    """Users plan memory and traffic by the name."""
    with torch.device("meta"):
        found = sum(weight.numel() for weight in GPT(PRESETS[name]).parameters())
    assert found == pytest.approx(float(name[:-1]) * UNITS[name[-1]], rel=0.1)


def test_initial_weights_depend_on_the_seed_and_nothing_else():
    """The client that publishes version 0 can publish it again; users' generators are untouched."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = GPT(SMALL, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = GPT(SMALL, seed=5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding"], GPT(SMALL, seed=6).state_dict()["embedding"])
    assert "cos_TD" not in first


def test_a_logit_depends_on_earlier_bytes_only():
    """A leak of the target gives low losses and a useless model."""
    torch.manual_seed(0)
    model = GPT(SMALL)
    window = torch.randint(0, 256, (1, 12))
    changed = window.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        first, second = model(window), model(changed)
        assert torch.equal(first[:, :7], second[:, :7])
        assert not torch.allclose(first[:, 7:], second[:, 7:])
    assert first.shape == (1, 12, 256)
    assert first.dtype == torch.float32


def test_rotated_queries_and_keys_see_only_their_distance():
    """With rotary positions, what is learned at one place holds at every other."""
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)
    table = rotary_table(20, 8)
    scores = rotate(query.expand(20, 8), *table) @ rotate(key.expand(20, 8), *table).T
    for distance in (0, 3, 11):
        along = scores.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-5)
    assert scores[:, 0].std() > 0.1


def test_dropout_acts_in_training_only():
    """Evaluation gives the same number twice."""
    model = GPT(GPTConfig(layers=1, width=16, heads=2, context=12, dropout=0.5))
    window = torch.arange(13)[None]
    assert model.loss(window).item() != model.loss(window).item()
    model.eval()
    assert model.loss(window).item() == model.loss(window).item()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"layers": 0}, r"model.layers is 0"),
        ({"heads": 3}, "does not split into 3 heads"),
        ({"width": 6, "heads": 2}, "even size"),
        ({"dropout": 1.0}, r"model.dropout is 1.0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, text):
    """Otherwise torch reports shapes, deep in a forward pass."""
    with pytest.raises(ValueError, match=text):
        GPTConfig(**({"layers": 1, "width": 16, "heads": 2, "context": 8} | sizes))
