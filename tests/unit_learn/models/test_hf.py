"""Hugging Face models in parts: the same logits, only hidden states across the cut.

Skipped without the extra `hf`.
"""

import copy
import gc
import importlib.util
import re

import pytest
import torch
from split_lockstep import copies, start, whole_state

from fsl_async.config.settings_training import SplitConfig
from fsl_async.errors import ConfigError, to_install
from fsl_async.learn.models import hf
from fsl_async.learn.models.cuts import CutError, cuts_of, split
from fsl_async.learn.models.forward import Batch, call
from fsl_async.learn.split.model_parts import OptimizerSpec
from fsl_async.learn.split.smashed import IGNORED
from fsl_async.roles.split.methods import method_of

needs_hf = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="needs the extra hf"
)

COMMON = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROTARY = COMMON | {"intermediate_size": 24, "num_key_value_heads": 1}
MODELS = {
    "gpt2": (
        "gpt2",
        {
            "vocab_size": 40,
            "n_embd": 16,
            "n_layer": 3,
            "n_head": 2,
            "n_positions": 16,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama": ("llama", ROTARY),
    "llama tied": ("llama", ROTARY | {"tie_word_embeddings": True}),
    "qwen2 sliding": (
        "qwen2",
        ROTARY | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", ROTARY | {"head_dim": 8, "tie_word_embeddings": True}),
    "opt": ("opt", COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "opt projected": (
        "opt",
        COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
}


def build(name, **changes):
    family, sizes = MODELS[name]
    try:
        return hf.build(family, sizes | changes, seed=3)
    except ConfigError as error:
        if "install a newer one" in error.message:
            pytest.skip(error.message)
        raise


def tokens(batch=3, length=9):
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(1))


@needs_hf
@pytest.mark.parametrize("name", MODELS)
def test_parts_give_the_logits_of_the_uncut_model(name):
    """Positions, masks, windows and projections are made once, in the right part, at every cut."""
    model = build(name).eval()
    ids = tokens()
    lengths = torch.tensor([9, 4, 7])
    mask = (torch.arange(9) < lengths[:, None]).long()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        masked = model(input_ids=ids, attention_mask=mask).logits
        assert cuts_of(model) == ("0", "1", "2")
        for cut, tail in [(0, None), (1, None), (2, None), (1, 2), (1, 3), (2, 3)]:
            halves = split(copy.deepcopy(model), cut, tail)
            assert torch.equal(halves.run(ids), plain)
            assert torch.equal(halves.run(ids, lengths), masked)
            crossing = call(halves.client, ids, lengths)
            assert crossing.shape == (3, 9, 16)
            assert sum(len(part.layers) for part in (halves.client, halves.server)) == (tail or 3)
            assert "past_key_values" not in str(type(crossing))


@needs_hf
@pytest.mark.parametrize("name", MODELS)
def test_padding_that_is_not_sent_changes_nothing(name):
    """Padded positions are not sent, and the split server fills in zeros; other positions are
    unaffected.
    """
    model = build(name).eval()
    halves = split(model, 1)
    ids, lengths = tokens(), torch.tensor([9, 4, 7])
    real = torch.arange(9) < lengths[:, None]
    values = call(halves.client, ids, lengths)
    stripped = torch.where(real[..., None], values, 0.0).detach().requires_grad_()
    outputs = call(halves.server, stripped, lengths)
    wanted = call(halves.server, values, lengths)
    assert torch.allclose(outputs[real], wanted[real], atol=1e-6)
    outputs[real].square().sum().backward()
    assert not stripped.grad[~real].any()


@needs_hf
@pytest.mark.parametrize("name", ["gpt2", "llama tied", "opt"])
def test_tied_heads_are_the_servers_own_unless_the_client_has_the_tail(name):
    """A tie across the cut would send the largest matrix at every step."""
    halves = split(build(name), 1)
    embedding = halves.client.trunk.get_input_embeddings().weight
    assert halves.server.head.weight is not embedding
    assert torch.equal(halves.server.head.weight, embedding)
    home = split(build(name), 1, 3)
    assert home.tail.head.weight is home.client.trunk.get_input_embeddings().weight
    own = copies(home)
    assert own.tail.head.weight is own.client.trunk.get_input_embeddings().weight
    assert own.tail.head.weight is not home.tail.head.weight


@needs_hf
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_part_holds_what_it_does_not_use(name):
    """Split learning of language models is for clients with little memory."""
    model = build(name, tie_word_embeddings=False)
    total = sum(weight.numel() for weight in model.parameters())
    halves = split(model, 1)
    parts = [sum(w.numel() for w in part.parameters()) for part in (halves.client, halves.server)]
    assert sum(parts) == total


@needs_hf
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt projected"])
def test_the_joined_state_fits_the_uncut_model(name):
    """Weights trained in parts can be saved as a model of their family."""
    model = build(name, tie_word_embeddings=False)
    halves = split(copy.deepcopy(model), 1, 2)
    with torch.no_grad():
        for weight in halves.server.parameters():
            weight.add_(0.25)
    model.load_state_dict(whole_state(halves))
    ids = tokens()
    with torch.no_grad():
        model.eval()
        for part in (halves.client, halves.server, halves.tail):
            part.eval()
        assert torch.equal(halves.run(ids), model(input_ids=ids).logits)


@needs_hf
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2 sliding", "qwen3", "opt"])
def test_one_client_trains_as_the_uncut_model_does(name, difference):
    """Gradients through the cut: a detached position or a second norm could pass a test of
    logits.
    """
    model = build(name, tie_word_embeddings=False).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    ids = tokens(4, 8)
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = IGNORED
    uncut = copy.deepcopy(model)
    _still(uncut)
    optimizer = torch.optim.AdamW(uncut.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        logits = uncut(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    _still(model)
    run = start(
        method_of(SplitConfig(method="splitfed-v2")),
        split(model, 1),
        "a",
        OptimizerSpec("adamw", 1e-3),
    )
    for _ in range(3):
        run.round({"a": [Batch(ids, labels)]})
    # keys' biases have no gradient except rounding, which Adam amplifies
    kept = {k: v for k, v in whole_state(run.model()).items() if "k_proj.bias" not in k}
    wanted = {k: v for k, v in uncut.state_dict().items() if "k_proj.bias" not in k}
    if name == "gpt2":
        kept, wanted = (
            {k: v for k, v in each.items() if "c_attn.bias" not in k} for each in (kept, wanted)
        )
    assert difference(kept, wanted) <= 1e-5


def _still(model):
    """Disable dropout in training mode: families read the probability in many places."""
    for part in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    model.train()


@needs_hf
def test_the_same_seed_builds_the_same_model():
    """Sites that share only the config start from the same weights; the user's generator is
    untouched.
    """
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = build("llama"), build("llama")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert not torch.equal(first.lm_head.weight, hf.build("llama", ROTARY, seed=4).lm_head.weight)


@needs_hf
def test_a_cut_or_a_family_that_does_not_exist_is_one_line():
    """The error lists the ones that exist."""
    with pytest.raises(CutError, match=r"'3'; cuts that exist: 0, 1, 2$"):
        split(build("llama"), 3)
    with pytest.raises(ConfigError, match="'bert' is unknown: gpt2, llama, qwen2, qwen3, opt"):
        hf.build("bert", {})
    with pytest.raises(ConfigError, match=r"gpt2 cannot be built: .*") as raised:
        hf.build("gpt2", {"n_embd": 15, "n_head": 2})
    assert "\n" not in raised.value.message
    with pytest.raises(ConfigError, match="llama cannot be built: "):
        hf.build("llama", ROTARY | {"hidden_size": "x"})
    with pytest.raises(ConfigError, match="llama has no size 'hiden_size'"):
        hf.build("llama", ROTARY | {"hiden_size": 16})


@needs_hf
def test_a_family_that_transformers_lacks_is_one_line(monkeypatch):
    """Qwen3 came with transformers 4.51; older ones have no such model."""
    monkeypatch.setattr("transformers.__version__", "4.49.0")
    monkeypatch.setitem(hf.FAMILIES, "qwen9", hf.FAMILIES["qwen3"])
    with pytest.raises(ConfigError, match=r"^transformers 4\.49\.0 lacks qwen9: install a newer"):
        hf.build("qwen9", {})


@needs_hf
@pytest.mark.parametrize(("version", "name"), [("4.55.4", "torch_dtype"), ("4.56.0", "dtype")])
def test_a_dtype_goes_by_the_name_of_its_time(monkeypatch, version, name):
    """A client lives beside the transformers that its user has."""
    monkeypatch.setattr("transformers.__version__", version)
    assert hf.dtype_argument(torch.bfloat16) == {name: torch.bfloat16}


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch):
    """The base install has no transformers."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=re.escape(to_install("hf"))):
        hf.build("gpt2", {})


def test_the_collector_is_paused_and_runs_again():
    """A process whose collector stayed off would grow; one that its user has off must keep that."""
    with hf.collector_paused():
        assert not gc.isenabled()
        with hf.collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ConfigError):
        hf.extra("no_such_module")
    assert gc.isenabled()
