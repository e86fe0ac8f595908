"""Mixtures of experts: which layers get adapters, the line about the others, and the plan.

Skipped without the extra `hf`.
"""

import importlib.util

import pytest

from fsl_async.errors import ConfigError
from fsl_async.learn.models.targets import adapted_layers, is_head, without_adapters

needs_hf = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")

BLOCK = "model.layers.0.mlp"
LINEAR = [
    "model.layers.0.self_attn.q_proj", f"{BLOCK}.gate", f"{BLOCK}.shared_expert_gate",
    f"{BLOCK}.shared_expert.up_proj", f"{BLOCK}.experts.0.up_proj", f"{BLOCK}.experts.1.up_proj",
    "lm_head",
]  # fmt: skip
WEIGHTS = {f"{name}.weight": (4, 4) for name in LINEAR} | {"model.embed_tokens.weight": (9, 4)}


def chosen(*targets, **more):
    return adapted_layers(LINEAR, WEIGHTS, trunk="model", targets=targets, **more)


def test_experts_routers_heads_and_tied_layers_get_no_adapters():
    """By default they are left out; a target that only they have is refused with the reason."""
    assert chosen() == [LINEAR[0], LINEAR[3]]
    assert chosen("up_proj") == [LINEAR[3]]
    assert chosen("none") == []
    assert chosen(tied={LINEAR[0]: "x"}) == [LINEAR[3]]
    assert chosen(whole=[f"{LINEAR[3]}.weight"]) == [LINEAR[0]]
    for target, more, words in (
        ("gate", {}, f"{BLOCK}.gate cannot have an adapter: it chooses experts; .*: q_proj, up_pr"),
        ("lm_head", {}, "lm_head cannot have an adapter: it is a head: tune.full can name it"),
        ("q_proj", {"tied": {LINEAR[0]: "x.weight"}}, "it shares its weight with x.weight"),
        ("q_proj", {"whole": [f"{LINEAR[0]}.weight"]}, "it trains whole"),
        ("k_proj", {}, "the base has no linear layer k_proj"),
    ):
        with pytest.raises(ConfigError, match=words):
            chosen(target, **more)


def test_what_gets_no_adapter_is_named_in_one_line():
    """Blocks and experts are one name; embeddings, heads and what trains whole are not named."""
    line = without_adapters(WEIGHTS, trunk="model", adapted=chosen(), whole=[])
    assert line == (
        "no adapters on model.layers.*.mlp.gate, model.layers.*.mlp.shared_expert_gate,"
        " model.layers.*.mlp.experts.*.up_proj: they are experts, choose experts, or are no linear"
        " layers"
    )
    named = {"trunk": "model", "adapted": chosen("q_proj"), "targets": ["q_proj"]}
    assert without_adapters(WEIGHTS, **named) == ""
    assert "experts.*.up_proj" in without_adapters(WEIGHTS, **named | {"targets": ["up_proj"]})


def test_a_head_is_outside_the_trunk_or_has_its_name():
    """A classifier of two layers gets no adapters in its first one."""
    names = ("classifier.dense", "classifier.out_proj", "score", "lm_head")
    assert all(is_head(name, trunk) for name in names for trunk in ("", "model"))
    assert is_head("pooler.dense", "deberta")
    assert not is_head("model.layers.0.self_attn.head_proj", "")
    assert not is_head("bert.pooler.dense", "bert")


@needs_hf
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("targets", ["", "q_proj,v_proj"])
def test_the_plan_counts_what_a_mixture_of_experts_exchanges(tmp_path, kind, targets):
    """Its files hold each expert's matrices; the loaded model holds all experts in one weight."""
    import tiny_base

    from fsl_async.config.settings_tuning import TuneConfig
    from fsl_async.learn.client.buffers import ModelWeights
    from fsl_async.learn.client.fed import LocalFed
    from fsl_async.learn.client.fed_base import ClientContext
    from fsl_async.learn.tune.base import base_facts, load_base
    from fsl_async.learn.tune.base_files import planned

    folder = tiny_base.write_kind(tmp_path, kind, auto="AutoModelForCausalLM")
    tune = {"method": "lora", "rank": 8, "targets": targets}
    fed, lines = LocalFed(ClientContext("a", config={"tune": tune})), []
    fed.log = lines.append
    model = fed.lora(load_base(folder, "lm").model)
    values = ModelWeights(model, fed.adapters.view).layout.values
    found = planned(base_facts(folder), TuneConfig(**tune))
    assert 8 * sum(one.inputs + one.outputs for one in found.layers) == values
    assert {one.name for one in found.layers} == {
        one.name.rpartition(".")[0] for one in fed.adapters.view.tensors
    }
    # Attention, width 32: 4 layers; a shared expert: 3 more.
    layers = {"mixtral": 4, "qwen2_moe": 7}[kind] if not targets else 2
    assert values == 8 * layers * 64
    assert [bool(lines), bool(found.left_out)] == [not targets] * 2
    if lines:
        assert "experts" in lines[0]
        assert lines[0].startswith("no adapters on model.layers.*.")
