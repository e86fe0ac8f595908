"""A module as one flat vector: its content, and the arithmetic of a rebase."""

import importlib.util
import re

import numpy as np
import pytest
import torch
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client import buffers
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.store.model.frozen_tensors import frozen_difference, frozen_tensors, setting
from fsl_async.store.model.manifest import Manifest


class Tied(nn.Module):
    """A tied head, a batch norm with an integer counter, and a table outside the state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.middle = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.ones(2), persistent=False)


def flat(weights):
    out = np.full(weights.manifest.values, np.nan, np.float32)
    assert weights.copy_out(out)
    return out


def test_manifest_has_tied_tensors_once_and_only_floating_persistent_state():
    """Clients derive the same vector from one model, and a tied weight moves once."""
    manifest = ModelWeights(Tied()).manifest
    assert [(t.name, t.shape, t.offset, t.is_buffer) for t in manifest.tensors] == [
        ("embedding.weight", (7, 3), 0, False),
        ("middle.weight", (3,), 21, False),
        ("middle.bias", (3,), 24, False),
        ("head.bias", (7,), 27, False),
        ("middle.running_mean", (3,), 34, True),
        ("middle.running_var", (3,), 37, True),
    ]
    assert (manifest.values, manifest.weights, manifest.chunks) == (40, 34, 2)


def test_buffers_are_exchanged_as_the_run_says():
    """With `none` they are no part of the run, also where a pattern matches them."""
    for exchange in (None, ["middle.*"]):
        manifest = ModelWeights(Tied(), exchange, buffers="none").manifest
        assert not any(one.is_buffer for one in manifest.tensors)
    local = ModelWeights(Tied(), buffers="local").manifest
    assert local == ModelWeights(Tied()).manifest


@pytest.mark.parametrize(("kind", "expected"), [("average", 7.0), ("local", 2.0)])
def test_a_rebase_takes_buffers_as_they_are_or_leaves_them(kind, expected):
    """A difference of variances, added to another variance, may be negative."""
    model = Tied()
    weights = ModelWeights(model, buffers=kind)
    base = flat(weights)
    new = base + 1
    new[34:] = 7.0
    model.middle.running_var.fill_(2.0)
    weights.rebase(new, base)
    assert model.middle.running_var.tolist() == [expected] * 3
    assert np.array_equal(flat(weights)[:34], new[:34])
    model.middle.running_var.fill_(2.0)
    weights.take(new)
    assert model.middle.running_var.tolist() == [expected] * 3
    weights.copy_in(new)
    assert model.middle.running_var.tolist() == [7.0] * 3, "an evaluation needs the version's"


def test_manifest_can_be_made_on_the_meta_device_and_ignores_compilation():
    """Sizes are planned without memory, and a compiled client joins a run of plain ones."""
    with torch.device("meta"):
        meta = ModelWeights(Tied()).manifest
    assert meta.fingerprint == ModelWeights(Tied()).manifest.fingerprint
    wrapped = nn.Module()
    wrapped._orig_mod = Tied()
    assert ModelWeights(wrapped).manifest == meta


def test_copy_in_undoes_copy_out_for_any_layout(monkeypatch):
    """Transposed, empty and scalar tensors, and those larger than a piece, keep their places."""
    monkeypatch.setattr(buffers, "PIECE_VALUES", 5)
    model = nn.Module()
    model.large = nn.Parameter(torch.randn(4, 3))
    model.turned = nn.Parameter(torch.randn(4, 3).t())
    model.empty = nn.Parameter(torch.randn(0, 2))
    model.scalar = nn.Parameter(torch.randn(()))
    weights = ModelWeights(model)
    before = flat(weights)
    expected = [w.detach().contiguous().view(-1) for w in model.parameters()]
    np.testing.assert_array_equal(before, torch.cat(expected).numpy())
    weights.copy_in(before * 2)
    np.testing.assert_array_equal(flat(weights), before * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_narrow_weights_that_do_not_train_send_nothing(dtype):
    """Rounding to bf16 counted as work: versions moved back to its grid at learning rate 0."""
    model = nn.Linear(8, 8).to(dtype)
    kept = model.weight.detach().clone()
    weights = ModelWeights(model)
    weights.copy_in(flat(weights))
    assert torch.equal(model.weight.float(), kept.float())
    base = np.random.default_rng(0).normal(size=72, scale=0.3).astype(np.float32)
    weights.take(base)
    assert torch.equal(
        model.weight.float(), torch.from_numpy(base[:64]).to(dtype).view(8, 8).float()
    )
    assert np.array_equal(flat(weights), base), "the delta is zero to the bit"
    before = base
    for step in range(1, 30):  # outer steps below half a unit in the last place
        new = base + np.float32(step * 1e-5)
        weights.rebase(new, before)
        before = new
        assert np.array_equal(flat(weights), new)
    saved = weights.saved()
    weights.copy_in(base * 2)
    weights.restore(saved)
    assert np.array_equal(flat(weights), before)


def test_narrow_weights_may_get_another_form_after_attach():
    """A model in bf16 moved to channels_last was a traceback, and one to fp32 sent old rounding."""
    model = nn.Conv2d(4, 4, 3).to(torch.bfloat16)
    weights = ModelWeights(model)
    base = np.random.default_rng(0).normal(size=148).astype(np.float32)
    weights.take(base)
    model.to(memory_format=torch.channels_last)
    assert np.array_equal(flat(weights), base)
    weights.rebase(base + 1, base)
    model.to(memory_format=torch.contiguous_format).float()
    assert np.array_equal(flat(weights), base + 1)
    weights.rebase(base, base + 1)
    assert np.array_equal(flat(weights), base)


def test_work_on_narrow_weights_is_what_the_optimizer_did():
    """What it added is the delta, whatever the base was before rounding."""
    model = nn.Linear(8, 8, bias=False).bfloat16()
    weights = ModelWeights(model)
    base = np.random.default_rng(0).normal(size=64, scale=0.3).astype(np.float32)
    weights.take(base)
    before = model.weight.detach().float().clone()
    with torch.no_grad():
        model.weight += 0.25
    work = (model.weight.detach().float() - before).view(-1).numpy()
    assert np.allclose(flat(weights) - base, work, atol=1e-7)
    new = base + np.float32(1e-5)
    weights.rebase(new, base)
    assert np.allclose(flat(weights) - new, work, atol=1e-7), "it is still unsent"


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rebase_is_computed_in_fp32_in_the_stated_order(monkeypatch, scale):
    """Clients that trained nothing since get equal weights to the bit."""
    monkeypatch.setattr(buffers, "PIECE_VALUES", 7)
    torch.manual_seed(0)
    model = nn.Linear(9, 5)
    weights = ModelWeights(model)
    reference = flat(weights)
    new = np.random.default_rng(0).normal(size=reference.shape, scale=scale).astype(np.float32)
    with torch.no_grad():
        model.weight[0] += 0.25
    now = flat(weights)
    weights.rebase(new, reference)
    np.testing.assert_array_equal(flat(weights), new + (now - reference))
    np.testing.assert_array_equal(flat(weights)[9:], new[9:])


def test_rebase_of_bf16_rounds_once_at_the_end():
    """Differences in bf16 would lose most of a step's work."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    weights = ModelWeights(model)
    weights.copy_in(np.array([1.0], np.float32))
    weights.rebase(np.array([2.0], np.float32), np.array([1.0 - 2.0**-9], np.float32))
    assert model.weight.item() == torch.tensor(2.0 + 2.0**-9).bfloat16().item()
    weights.copy_in(np.array([1.0], np.float32))
    weights.rebase(np.array([0.0], np.float32), np.array([1.0 - 2.0**-9], np.float32))
    assert model.weight.item() == 2.0**-9


def test_replaced_buffers_are_found_again():
    """`module.to(...)` and user code replace buffers."""
    model = Tied()
    weights = ModelWeights(model)
    model.middle.running_mean = torch.full((3,), 5.0)
    assert flat(weights)[34:37].tolist() == [5, 5, 5]
    model.head.bias = nn.Parameter(torch.zeros(8))
    with pytest.raises(TaskError, match=r"head.bias had shape \(7,\)"):
        flat(weights)


class Tuned(nn.Module):
    """A frozen base with a part that trains, and a batch norm."""

    def __init__(self, base=1.0):
        super().__init__()
        self.base = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)
        nn.init.constant_(self.base.weight, base)
        nn.init.zeros_(self.base.bias)
        self.base.requires_grad_(requires_grad=False)


def names(weights):
    return [tensor.name for tensor in weights.manifest.tensors]


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (
            None,  # a frozen base is a hundred times the size of its adapters
            "norm.weight norm.bias head.weight head.bias norm.running_mean norm.running_var",
        ),
        (["head.*"], "head.weight head.bias"),  # a site may keep its head or its batch norm,
        (["base.bias", "*.bias"], "base.bias norm.bias head.bias"),  # or exchange frozen weights
    ],
)
def test_what_trains_and_buffers_are_exchanged_or_what_patterns_name(exchange, expected):
    """What is exchanged, in the order of the vector."""
    assert names(ModelWeights(Tuned(), exchange)) == expected.split()


def test_other_frozen_weights_change_the_manifest():
    """Adapters trained on another base are worthless, and no other check shows it."""
    manifest = ModelWeights(Tuned()).manifest
    other = ModelWeights(Tuned(base=2.0)).manifest
    assert ModelWeights(Tuned()).manifest == manifest
    assert manifest.fingerprint != other.fingerprint
    difference = manifest.difference(other)
    assert re.match(
        r"frozen tensor 'base.weight' \(float32 2x2\) has digest \w{16} here", difference
    )
    assert "(1 of 2 differ): " in difference
    assert ModelWeights(Tuned().to(torch.bfloat16)).manifest == manifest
    # a trained weight that is not exchanged is the client's own
    heads = [ModelWeights(Tuned(), ["norm.*"]).manifest for _ in range(2)]
    assert heads[0] == heads[1]
    everything = [ModelWeights(Tuned(base), ["*"]).manifest for base in (1.0, 2.0)]
    assert everything[0] == everything[1]


def test_packed_weights_of_a_quantized_base_are_frozen_too():
    """Adapters on two different integer bases would train apart without an error."""
    models = [Tuned() for _ in range(2)]
    for number, model in enumerate(models):
        model.register_buffer("packed", torch.full((3,), number, dtype=torch.int32))
    first, second = (ModelWeights(model).manifest for model in models)
    assert first.difference(second).startswith("frozen tensor 'packed' (int32 3) has digest")
    assert "quantize the base model with the same quantizer" in first.difference(second)


def test_a_tied_weight_that_is_exchanged_is_not_frozen():
    """Under its second name too: its initial values may differ between clients."""

    def manifest(value):
        model = Tied()
        nn.init.constant_(model.embedding.weight, value)
        model.embedding.weight.requires_grad_(requires_grad=False)
        return ModelWeights(model, ["head.weight", "middle.*"]).manifest

    assert manifest(1.0) == manifest(2.0)


def test_complex_weights_are_two_real_numbers_each():
    """They trained at each client and stayed there without a word."""
    model = nn.Module()
    model.spectrum = nn.Parameter(torch.tensor([[1 + 2j, 3 - 4j]]))
    model.phase = nn.Buffer(torch.tensor([5 - 6j], dtype=torch.complex128))
    weights = ModelWeights(model)
    assert [(one.name, one.shape) for one in weights.manifest.tensors] == [
        ("spectrum", (1, 2, 2)),
        ("phase", (1, 2)),
    ]
    assert flat(weights).tolist() == [1, 2, 3, -4, 5, -6]
    weights.rebase(np.float32([2, 2, 3, -5, 7, 8]), flat(weights))
    assert model.spectrum.tolist() == [[2 + 2j, 3 - 5j]]
    assert model.phase.tolist() == [7 + 8j]


def overlapping():
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(3, 4))
    model.b = nn.Parameter(model.a.detach().t())
    return model


def with_buffer(tensor):
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    return model


def with_sparse_base():
    model = Tuned()
    model.base.weight = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "exchange", "says"),
    [
        (nn.ReLU, None, "cannot exchange"),
        (overlapping, None, "a and b share memory"),  # rebasing one would move the other too
        (lambda: with_buffer(torch.ones(1, 3).expand(4, 3)), None, "module: odd repeats its"),
        (lambda: with_buffer(torch.eye(3).to_sparse()), None, "module: odd is sparse_coo"),
        (
            lambda: with_buffer(torch.ones(3, dtype=torch.complex64).conj()),
            None,
            "module: odd is conjugated",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            None,
            r"0\.weight has no shape yet: run the model on one batch",
        ),
        (Tuned, ["haed.*"], r"no tensor of the model matches 'haed\.\*'"),
        (Tuned, "head.*", "must be a list of patterns"),  # one pattern a character
        (Tuned, [], "must be a list of patterns"),
        (with_sparse_base, None, r"cannot read the frozen base\.weight"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_by_name(model, exchange, says):
    """A traceback of torch, at the first sync or never, is no help."""
    with pytest.raises(TaskError, match=says) as refused:
        _ = ModelWeights(model(), exchange).manifest
    assert "\n" not in refused.value.message
    assert names(ModelWeights(with_buffer(torch.eye(3).to_sparse()), ["weight"])) == ["weight"]


def test_a_buffer_of_eight_bits_is_exchanged():
    """It can be written and read, as wider ones."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
    weights = ModelWeights(model)
    assert weights.is_finite()
    weights.take(np.full(8, 2.0, np.float32))
    assert model.scale.float().tolist() == [2.0, 2.0]


needs_hf = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")


def manifest(*, exchange=None, checks_frozen=True, modules=("q_proj",), **lora):
    import peft
    import tiny_base
    import torch
    import transformers

    from fsl_async.learn.tune.base import quiet

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=20, **tiny_base.SIZES["llama"])
    lora = peft.LoraConfig(target_modules=list(modules), **{"r": 4, "lora_alpha": 8} | lora)
    with quiet():
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    return ModelWeights(model, exchange, checks_frozen=checks_frozen).manifest


@needs_hf
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"lora_alpha": 128}, "lora_alpha is 8 here and 128 there"),
        ({"use_rslora": True}, "use_rslora is false here and true there"),
        ({"r": 8}, "r is 4 here and 8 there"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is none here and q_proj 2 there"),
        ({"bias": "lora_only"}, "bias is none here and lora_only there"),
        ({"use_dora": True}, "use_dora is false here and true there"),
        ({"modules": ["k_proj"]}, "target_modules is q_proj here and k_proj there"),
    ],
)
def test_adapters_with_other_settings_are_another_model(other, words):
    """With another alpha the same factors mean another update, and would be averaged."""
    mine, theirs = manifest(), manifest(**other)
    assert mine.fingerprint != theirs.fingerprint
    found = mine.difference(theirs)
    assert found.startswith(f"adapter default: {words}: give the adapters the same settings")
    wire = Manifest.from_wire(theirs.to_wire(), theirs.frozen_to_wire())
    assert wire == theirs
    assert mine.difference(wire) == found


@needs_hf
def test_equal_settings_are_equal_however_they_are_written():
    """Dropout is the client's own; 8 and 8.0 are one number; a base may be compared by shape."""
    mine = manifest(modules=("q_proj", "v_proj"))
    again = manifest(modules=("v_proj", "q_proj"), lora_alpha=8.0, lora_dropout=0.5)
    assert mine == again
    by_shape = manifest(checks_frozen=False)
    assert all(one.is_setting for one in by_shape.frozen)
    other = manifest(checks_frozen=False, lora_alpha=9)
    assert "lora_alpha is 8 here and 9 there" in by_shape.difference(other)


def test_settings_keep_their_names_where_tensors_share_entries():
    """A manifest has a limit; a long value is compared in full and shown in part."""
    many = [(f"t{number:05}", "float32 2", "0" * 16) for number in range(5000)]
    one, two = (setting("adapter a: layers", "x" * 300 + end) for end in "ab")
    mine, theirs = (frozen_tensors(many, [found]) for found in (one, two))
    assert len(mine) <= 2048
    assert [each.name for each in mine] == sorted(each.name for each in mine)
    assert frozen_difference(mine, theirs).startswith("adapter a: layers is xxx")
    assert Manifest.from_shapes([("w", (2,))]).difference(
        Manifest(Manifest.from_shapes([("w", (2,))]).tensors, (setting("adapter a: r", "8"),))
    ) == (
        "adapter a: r is absent here and 8 there: give the adapters the same settings at every"
        " client"
    )
