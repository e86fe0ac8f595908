"""Adapters of a base: layout of what is exchanged, sites of several ranks, what trains.

Skipped without the extra `hf`.
"""

import importlib.util

import numpy as np
import pytest
import torch
from attrs import frozen

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError, TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models import hf
from fsl_async.learn.models.adapters import Adapters, adapters_off

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")
LLAMA = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}


@frozen
class AnyRule:
    """A rule as its parts are given."""

    exchanges_a: bool = True
    keeps_tail: bool = True
    changes_basis: bool = False
    has_patch: bool = False
    parity: bool = False

    def trains_a(self, version):
        """See `Rule`."""
        return self.exchanges_a and (not self.parity or version % 2 == 1)

    def trains_b(self, version):
        """See `Rule`."""
        return not self.parity or version % 2 == 0


def llama():
    return hf.build("llama", LLAMA, seed=1)


def llama_in_bf16():
    return llama().to(torch.bfloat16)


def gpt2():
    return hf.build("gpt2", GPT2 | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0))


def ids():
    return torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model(ids()).logits


def site(rank, rule=AnyRule(), build=llama, *, heads=(), layers="", seed=5, **tune):
    model = build()
    how = {"heads": heads, "layers": layers, "site_rank": rank}
    adapters = Adapters(model, TuneConfig(rank=4, scale=2.0, **tune), rule, seed=seed, **how)
    return model, adapters, ModelWeights(model, adapters.view)


def flat(weights):
    found = np.empty(weights.layout.values, np.float32)
    weights.copy_out(found)
    return found


def test_what_trains_is_fp32_in_a_base_in_bf16():
    """The first weights are those of sites with a base in fp32, and small steps are not lost."""
    sites = [site(4, build=build, full="*norm.weight") for build in (llama, llama_in_bf16)]
    model = sites[1][0]
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    vectors = [flat(weights) for _, _, weights in sites]
    assert np.array_equal(*vectors)
    moved = vectors[0] + np.float32(2**-12)
    sites[1][2].copy_in(moved)
    assert np.array_equal(flat(sites[1][2]), moved)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_bank_is_one_function_at_sites_of_any_rank(build):
    """Same fingerprint, same first weights, same outputs from the same vector, bit by bit back."""
    sites = [site(rank, build=build) for rank in (4, 3, 1)]
    base = logits(build())
    assert all(torch.equal(logits(model), base) for model, _, _ in sites)
    assert len({weights.manifest.fingerprint for _, _, weights in sites}) == 1
    vectors = [flat(weights) for _, _, weights in sites]
    assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
    bank = np.random.default_rng(0).normal(0, 0.3, len(vectors[0])).astype(np.float32)
    for _, _, weights in sites:
        weights.copy_in(bank)
        assert np.array_equal(flat(weights), bank)
    found = [logits(model) for model, _, _ in sites]
    assert (found[0] - base).abs().max() > 0.1
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=0, atol=1e-5)


def test_what_a_layer_computes_is_scale_times_b_a():
    """The layout means what the server multiplies: product = scale * stored B^T @ A."""
    model, _, weights = site(4)
    tensors = {tensor.name: tensor for tensor in weights.layout.tensors}
    bank = np.random.default_rng(1).normal(0, 0.3, weights.layout.values).astype(np.float32)
    weights.copy_in(bank)
    name = "model.layers.1.mlp.down_proj"

    def stored(factor):
        spec = tensors[f"{name}.{factor}"]
        return torch.from_numpy(bank[spec.offset :][: spec.values].reshape(spec.shape))

    layer = model.get_submodule(name)
    values = torch.randn(3, 24, generator=torch.Generator().manual_seed(2))
    wanted = values @ (layer.base_layer.weight + 2.0 * stored("lora_B").T @ stored("lora_A")).T
    torch.testing.assert_close(layer(values), wanted, rtol=1e-4, atol=1e-5)


def test_a_site_moves_its_own_rows_only_and_a_cut_tail_is_silent():
    """After optimizer steps the rows beyond a site's rank are the same bits."""
    for rule in (AnyRule(), AnyRule(keeps_tail=False)):
        model, adapters, weights = site(3, rule)
        bank = np.random.default_rng(3).normal(0, 0.3, weights.layout.values).astype(np.float32)
        weights.copy_in(bank)
        without = bank.copy()
        tails = np.zeros(len(bank), bool)
        for spec in weights.layout.tensors:
            rows = spec.shape[1]
            tails[spec.offset + 3 * rows : spec.offset + 4 * rows] = True
        without[tails] = 0.0
        full_model, _, full = site(4)
        full.copy_in(bank if rule.keeps_tail else without)
        torch.testing.assert_close(logits(model), logits(full_model), rtol=0, atol=1e-5)
        optimizer = torch.optim.AdamW(adapters.trained(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            model(ids(), labels=ids()).loss.backward()
            optimizer.step()
        moved = flat(weights) != bank
        assert not moved[tails].any()
        assert moved[~tails].mean() > 0.99


def test_a_rule_decides_what_trains_from_a_version():
    """The other factor keeps its bits, whatever the optimizer holds of it."""
    model, adapters, weights = site(4, AnyRule(parity=True))
    optimizer = torch.optim.AdamW(adapters.trained(), lr=0.1)
    is_a = np.concatenate(
        [np.full(spec.values, "lora_A" in spec.name) for spec in weights.layout.tensors]
    )
    for version in (0, 1, 2):
        before = flat(weights)
        adapters.begin_version(version)
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = flat(weights) != before
        assert moved[is_a].any() == (version == 1)
        assert moved[~is_a].any() == (version != 1)


def test_a_frozen_factor_is_part_of_the_base():
    """Sites that freeze A must have the same one: it is in the digest, not in the vector."""
    first, again, other = (
        site(4, AnyRule(exchanges_a=False), seed=seed)[2].manifest for seed in (5, 5, 6)
    )
    assert {spec.name.rpartition(".")[2] for spec in first.tensors} == {"lora_B"}
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_dense_patch_is_exchanged_and_computed_with():
    """A version may change the base: then all sites compute with the change."""
    for build in (llama, gpt2):
        model, _, weights = site(4, AnyRule(has_patch=True), build)
        vector = flat(weights)
        spec = next(one for one in weights.layout.tensors if one.name.endswith(".patch"))
        patch = np.random.default_rng(4).normal(0, 0.3, spec.shape).astype(np.float32)
        vector[spec.offset :][: spec.values] = patch.ravel()
        weights.copy_in(vector)
        plain = build()
        layer = plain.get_submodule(spec.name.removesuffix(".patch"))
        with torch.no_grad():
            is_transposed = type(layer).__name__ == "Conv1D"
            layer.weight += torch.from_numpy(patch.T if is_transposed else patch)
        torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)


def test_without_adapters_the_model_is_its_base():
    """The reference of preference training; what trains is as before afterwards."""
    model, _, weights = site(3)
    weights.copy_in(np.full(weights.layout.values, 0.2, np.float32))
    trains = [weight.requires_grad for weight in model.parameters()]
    with adapters_off(model):
        assert torch.equal(logits(model), logits(llama()))
    assert not torch.equal(logits(model), logits(llama()))
    assert [weight.requires_grad for weight in model.parameters()] == trains


def test_sites_choose_blocks_and_runs_choose_layers_and_whole_weights():
    """Names, patterns and numbers of blocks; each mistake is one line."""
    _, adapters, weights = site(4, layers="0,2", targets="q_proj,v_proj")
    assert len(weights.layout.tensors) == 2 * 2 * 3
    assert len(adapters.trained()) == 2 * 2 * 2
    _, adapters, weights = site(4, full="model.norm.*", targets="q_proj", heads=["lm_head.weight"])
    assert [spec.name for spec in weights.layout.tensors[-2:]] == [
        "model.norm.weight",
        "lm_head.weight",
    ]
    for spec, kind, words in (
        ({"targets": "qproj"}, ConfigError, "no linear layer qproj; .*: down_proj, "),
        ({"full": "norn.*"}, ConfigError, "no weight of the base matches norn"),
        ({"layers": "7"}, ConfigError, "no adapted layer is in these blocks"),
        ({"layers": "one"}, TaskError, "write numbers of blocks like 0-2,5"),
    ):
        with pytest.raises(kind, match=words):
            site(4, **spec)
