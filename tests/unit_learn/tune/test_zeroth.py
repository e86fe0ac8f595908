"""Projected gradients of a round, and steps along directions, against closed forms."""

import importlib.util
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.tune.zeroth import KeptOutputs, add_steps, add_unpacked, probe_round, probing
from fsl_async.store.deltas.seed_step import Directions
from fsl_codecs import add_signs, direction_keys

VALUES = 300
RUN = Directions(seed=11, steps=3, probes=4, rate=0.05)


def signs(number, k, p):
    keys = direction_keys(RUN.seed, number, 1, RUN.steps, RUN.probes)
    values = np.zeros(VALUES, np.float32)
    add_signs(values, 0, keys[None, RUN.probes * k + p], np.ones(1, np.float32))
    return values.astype(np.float64)


def vector(seed):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(VALUES).astype("f4"))


# --- directions ---


@pytest.mark.parametrize("count", [1, 63, 64, 65, 10_007])
def test_torchs_operations_and_the_codec_give_the_same_bits(count, monkeypatch):
    monkeypatch.setattr("fsl_async.learn.tune.zeroth._PIECE_WORDS", 3)
    generator = np.random.default_rng(count)
    values = generator.standard_normal(count).astype(np.float32)
    keys = direction_keys(3, 5, 1, 2, 3)
    steps = generator.standard_normal(6).astype(np.float32) * np.float32(1e-3)
    by_codec, by_torch = torch.from_numpy(values.copy()), torch.from_numpy(values.copy())
    add_steps(by_codec, keys, steps)
    add_unpacked(by_torch, keys, steps)
    assert by_codec.numpy().tobytes() == by_torch.numpy().tobytes()
    add_signs(values, 0, keys, steps)
    assert by_codec.numpy().tobytes() == values.tobytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_holds_the_same_bits():
    values = np.random.default_rng(1).standard_normal(5_000_001).astype(np.float32)
    keys, steps = direction_keys(3, 5, 1, 1, 3), np.array([1e-3, -2e-5, 3e-7], np.float32)
    there = torch.from_numpy(values.copy()).cuda()
    add_steps(there, keys, steps)
    add_signs(values, 0, keys, steps)
    assert there.cpu().numpy().tobytes() == values.tobytes()


# --- projected gradients ---


def test_the_projected_gradient_of_a_linear_loss_is_its_slope_along_each_direction():
    """Central differences are exact for it, wherever the weights are."""
    slope = vector(2).double()

    def loss(weights, batch):
        return float(slope @ weights.double()) * batch

    found = probe_round(loss, vector(1), [1.0, 2.0, -1.0], RUN, number=7, mu=1e-2)
    for k, batch in enumerate([1.0, 2.0, -1.0]):
        for p in range(RUN.probes):
            exact = batch * float(signs(7, k, p) @ slope.numpy())
            assert found[k, p] == pytest.approx(exact, rel=1e-3, abs=1e-3)


def test_later_steps_are_measured_from_weights_that_have_moved():
    """Of a quadratic loss: its gradient at w is w, and central differences are exact."""

    def loss(weights, _):
        return 0.5 * float(weights.double() @ weights.double())

    start = vector(1)
    found = probe_round(loss, start, [None] * 3, RUN, number=0, mu=1e-2)
    local = start.double().numpy()
    for k in range(RUN.steps):
        exact = [float(signs(0, k, p) @ local) for p in range(RUN.probes)]
        assert found[k] == pytest.approx(exact, rel=1e-3, abs=1e-3)
        for p in range(RUN.probes):
            local = local - signs(0, k, p) * RUN.rate * exact[p] / RUN.probes


def test_probing_writes_no_weight_of_the_caller():
    start = vector(1)
    before = start.numpy().tobytes()
    seen = []
    probe_round(lambda w, _: seen.append(w.clone()) or 1.0, start, [0] * 3, RUN, number=0, mu=1e-3)
    assert start.numpy().tobytes() == before
    above = start.numpy() + signs(0, 0, 0).astype(np.float32) * np.float32(1e-3)
    below = start.numpy() - signs(0, 0, 0).astype(np.float32) * np.float32(1e-3)
    assert seen[0].numpy().tobytes() == above.tobytes()
    assert seen[1].numpy().tobytes() == below.tobytes(), "from the base, not from the other copy"


# --- a model ---


class Model(nn.Module):
    """A frozen layer, dropout, and a head that trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 6).requires_grad_(requires_grad=False)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        """Return logits."""
        return self.head(self.dropout(torch.relu(self.frozen(x))))


def test_a_models_projected_gradient_is_that_of_backpropagation():
    model = Model()
    weights = ModelWeights(model)
    x, y = torch.randn(20, 4), torch.arange(20) % 2

    def measure():
        return nn.functional.cross_entropy(model(x), y)

    model.eval()
    measure().backward()
    gradient = torch.cat([w.grad.view(-1) for w in model.head.parameters()]).double().numpy()
    model.train()
    model.frozen.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = Directions(seed=1, steps=1, probes=6, rate=0.1)
    with probing(weights) as (base, put):

        def loss(vector, _):
            put(vector)
            return float(measure())

        found = probe_round(loss, base, [None], run, number=2, mu=1e-3)
    for p, key in enumerate(direction_keys(1, 2, 1, 1, 6)):
        direction = np.zeros(len(gradient), np.float32)
        add_signs(direction, 0, key[None], np.ones(1, np.float32))
        assert found[0, p] == pytest.approx(float(direction @ gradient), abs=2e-3)
    assert model.training
    assert model.dropout.training
    assert not model.frozen.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_model_is_as_before_after_an_error():
    model = Model()
    before = model.head.weight.detach().clone()

    def fail():
        with probing(ModelWeights(model)) as (base, put):
            put(base + 1)
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    assert torch.equal(model.head.weight, before)
    assert model.training


def test_weights_in_which_steps_would_vanish_are_refused():
    model = Model().bfloat16()
    with pytest.raises(TaskError, match="fp32"), probing(ModelWeights(model)):
        pass


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
