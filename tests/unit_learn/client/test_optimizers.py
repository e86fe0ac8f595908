"""Inner optimizers: which weights Muon steps, the rates, and one interface for both."""

import copy

import pytest
import torch
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client.optimizers import (
    Muon,
    MuonAdamW,
    adamw_rate_of,
    build_optimizer,
    hidden_matrices,
)
from fsl_async.learn.models.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=64, heads=4, context=16)


def names_in(model, optimizer):
    """The names of the weights in each group."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return [{names[id(w)] for w in group["params"]} for group in optimizer.param_groups]


def test_adamw_alone_has_every_weight():
    """`train.optimizer = "adamw"`, with a rate of one's own."""
    model = GPT(SMALL)
    optimizer = build_optimizer(model, {"optimizer": "adamw", "learning_rate": 5e-4})
    assert isinstance(optimizer, torch.optim.AdamW)
    decayed, kept = names_in(model, optimizer)
    assert len(decayed) + len(kept) == len(list(model.parameters()))
    assert {group["lr"] for group in optimizer.param_groups} == {5e-4}


def test_the_rate_of_adamw_falls_with_the_root_of_the_width():
    """The rule of the docs; 64 is the width that it was measured at."""
    wide = [nn.Parameter(torch.empty(4 * 256, 256)), nn.Parameter(torch.empty(64, 64))]
    assert adamw_rate_of(wide, beside_muon=True) == pytest.approx(4e-3)
    assert adamw_rate_of(wide, beside_muon=False) == pytest.approx(1.5e-3)
    assert adamw_rate_of([], beside_muon=True) == pytest.approx(8e-3)


def test_embeddings_and_heads_are_no_hidden_matrices():
    """Muon equalizes directions; the rows of an embedding are separate words."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 4)
            self.hidden = nn.Linear(4, 4)
            self.lm_head = nn.Linear(4, 10, bias=False)
            self.tied = nn.Linear(4, 10, bias=False)
            self.tied.weight = self.words.weight
            self.multihead = nn.Linear(4, 4)

    assert hidden_matrices(Model()) == {"hidden.weight", "multihead.weight"}


def test_one_can_say_which_weights_are_matrices():
    """Names differ between models."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    optimizer = build_optimizer(model, {}, is_matrix=lambda name, _: name.startswith("a"))
    assert names_in(model, optimizer) == [{"a.weight"}, {"b.weight"}, {"a.bias", "b.bias"}]


def stepped(optimizer, model, seed):
    """A step with gradients of a seed."""
    rng = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=rng)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", ["state", "copy"])
def test_a_saved_or_copied_optimizer_continues_to_the_bit(way):
    """Users save and load them, libraries copy them; a scheduler still reaches both parts."""
    first, second = GPT(SMALL), GPT(SMALL)
    one, other = build_optimizer(first, {}), build_optimizer(second, {})
    stepped(one, first, 1)
    if way == "copy":
        second, other = copy.deepcopy((first, one))
        assert names_in(second, other) == names_in(first, one)
    else:
        second.load_state_dict(first.state_dict())
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer in (one, other):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    stepped(one, first, 2)
    stepped(other, second, 2)
    assert isinstance(other, MuonAdamW)
    assert {group["lr"] for part in other.parts for group in part.param_groups} == {0.0035, 4e-3}
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_it_steps_as_the_two_optimizers_do():
    """It adds nothing of its own."""
    model, plain = GPT(SMALL), GPT(SMALL)
    optimizer = build_optimizer(model, {})
    named = dict(plain.named_parameters())
    matrices = [w for n, w in named.items() if "blocks" in n and w.dim() == 2]
    rest = [w for w in named.values() if w.dim() == 1]
    parts = [
        Muon(matrices, lr=0.007, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW([named["embedding"]], lr=8e-3, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW(rest, lr=8e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for seed in (1, 2):
        stepped(optimizer, model, seed)
        rng = torch.Generator().manual_seed(seed)
        for weight in plain.parameters():
            weight.grad = torch.randn(weight.shape, generator=rng)
        for part in parts:
            part.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_torchs_to_the_bit(dtype):
    """Sites with a torch that lacks Muon take the steps of the others."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(48, 16), (16, 48), (32, 32)]
    ours = [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in shapes]
    torchs = copy.deepcopy(ours)
    rules = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
    pair = Muon(ours, **rules), torch.optim.Muon(torchs, **rules)
    for _ in range(3):
        for mine, theirs in zip(ours, torchs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=rng).to(dtype)
            theirs.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for mine, theirs in zip(ours, torchs, strict=True):
        assert torch.equal(mine, theirs)


def test_a_group_that_nothing_would_step_is_refused():
    """Unfrozen later, its weights would never move."""
    optimizer = build_optimizer(GPT(SMALL), {})
    with pytest.raises(TaskError, match="takes no further groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
