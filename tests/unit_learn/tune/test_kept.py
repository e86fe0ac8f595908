"""Frozen parts of a model are computed once a batch, and never when that would change a result."""

import importlib.util
import weakref

import pytest
import torch
from torch import nn

from fsl_async.learn.tune.zeroth import KeptOutputs


class Block(nn.Module):
    """A linear layer that counts its calls."""

    def __init__(self, *, frozen=True, in_place=False):
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(not frozen)
        self.calls, self.in_place = 0, in_place

    def forward(self, values, mask=None):
        """A line through the values, times the mask."""
        self.calls += 1
        if self.in_place:
            values += 1
        found = self.linear(values) * (1 if mask is None else mask)
        self.made = weakref.ref(found)
        return found


class Chain(nn.Module):
    """Blocks one after another; a mask is made anew in each call, as transformers do."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 2)

    def forward(self, values):
        """All blocks."""
        mask = torch.ones(4)
        for block in self.blocks:
            values = block(values, mask=mask)
        return self.head(values)


def trained(model):
    """The weights that `losses` sets."""
    return [one for one in model.parameters() if one.requires_grad]


def losses(model, batches, repeats=3):
    """Outputs for each batch at changed weights of whatever trains."""
    found = []
    for batch in batches:
        for repeat in range(repeats):
            for one in model.parameters():
                if one.requires_grad:
                    nn.init.constant_(one, 0.1 * (repeat + 1))
            found.append(model(batch).clone())
    return found


def kept_losses(model, batches):
    found = []
    with torch.no_grad(), KeptOutputs(model, trained(model)) as kept:
        for batch in batches:
            kept.forget()
            found += losses(model, [batch])
    return found


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(2)]


def calls(model):
    return [block.calls for block in model.blocks]


def both(model):
    """Outputs with and without keeping, and the calls of each block with it."""
    with torch.no_grad():
        plain = losses(model, batches())
    for block in model.blocks:
        block.calls = 0
    kept = kept_losses(model, batches())
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))
    return calls(model)


def test_blocks_below_the_first_that_trains_are_computed_once_a_batch():
    """Those above it are computed each time, though they are frozen too."""
    assert both(Chain(Block(), Block(), Block(frozen=False), Block())) == [2, 2, 6, 6]
    assert both(Chain(Block(), Block())) == [2, 2]  # only the head trains


def test_a_weight_that_needs_no_gradient_and_is_set_is_not_frozen():
    """Rules that train one factor at a time let the other rest, and zeroth order moves both."""
    model = Chain(Block(), Block(), Block())
    factor = model.blocks[1].linear.weight
    with torch.no_grad(), KeptOutputs(model, [factor.view(-1)[2:5]]):
        first = model(batches()[0])
        factor += 1
        assert not torch.equal(model(batches()[0]), first)
    assert calls(model) == [1, 2, 2]


def test_what_varies_is_not_kept():
    """The memory of a step is that of the outputs of a few blocks."""
    model = Chain(Block(), Block(frozen=False), Block())
    with torch.no_grad(), KeptOutputs(model, trained(model)):
        losses(model, batches()[:1])
        assert [block.made() is None for block in model.blocks] == [False, True, True]


def test_a_block_is_computed_again_when_another_one_has_written_to_its_output():
    """Some architectures add in place."""
    model = Chain(Block(), Block(in_place=True, frozen=False))
    with torch.no_grad():
        plain = losses(model, [one.clone() for one in batches()])
    kept = kept_losses(model, [one.clone() for one in batches()])
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))


def test_only_modules_of_frozen_weights_take_part_and_they_are_as_before():
    model = Chain(Block(), Block(frozen=False))
    with KeptOutputs(model, trained(model)):
        assert "forward" in model.blocks[0].__dict__
        assert "forward" not in model.blocks[1].__dict__
        assert "forward" in model.blocks[0].__dict__
    assert "forward" not in model.blocks[0].__dict__
    mine = model.blocks[0].forward
    model.blocks[0].forward = mine  # as other libraries wrap it
    with KeptOutputs(model, trained(model)):
        assert model.blocks[0].__dict__["forward"] is not mine
    assert model.blocks[0].__dict__["forward"] is mine


def test_inputs_that_are_no_values_are_never_the_same():
    """A cache that a block fills looks the same before and after."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1).requires_grad_(False)
            self.calls = 0

        def forward(self, cache):
            self.calls += 1
            return torch.tensor(cache.value)

    class Cache:
        value = 1.0

    reads, cache = Reads(), Cache()
    model = nn.Sequential(reads)
    with torch.no_grad(), KeptOutputs(model, trained(model)):
        assert model(cache).item() == 1.0
        cache.value = 2.0
        assert model(cache).item() == 2.0


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_real_architecture_computes_its_frozen_blocks_once(tmp_path, kind):
    """The blocks of transformers' own code get masks and positions that are made anew each time."""
    import tiny_base

    from fsl_async.config.settings_tuning import TuneConfig
    from fsl_async.learn.tune.base import load_base
    from fsl_async.learn.tune.objectives import objective_of
    from fsl_async.learn.tune.records import Records
    from fsl_async.learn.tune.tokens import tokenize

    folder = getattr(tiny_base, f"write_{kind}")(tmp_path / "base")
    base = load_base(folder, "classify", labels=("no", "yes"))
    base.model.eval().requires_grad_(False)
    base.model.get_parameter(base.drawn[0]).requires_grad_(True)
    path = tmp_path / "a.csv"
    path.write_text("text,label\na film,yes\na longer film,no\n")
    labels = ("no", "yes")
    records = Records(str(path), "classify", labels)
    tokens = tokenize(records, base.tokenizer, "classify", context=16, labels=labels)
    batch = next(tokens.batches(2))
    objective = objective_of(TuneConfig(method="zeroth", objective="classify", labels="no,yes"))
    trunk = base.model.base_model
    layer = next(
        one for one in trunk.modules() if type(one).__name__.endswith(("Layer", "DecoderLayer"))
    )
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        before = objective.loss(base.model, batch).loss
        calls.clear()
        with KeptOutputs(base.model, trained(base.model)):
            found = [objective.loss(base.model, batch).loss for _ in range(3)]
    assert [one.item() for one in found] == [before.item()] * 3
    assert len(calls) == 1
