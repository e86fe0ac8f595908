"""Heads of classifiers of many families: they train whole, travel, and are exported.

Skipped without the extra `hf`.
"""

import importlib.util

import pytest
import torch
from torch import nn

from fsl_async.errors import ConfigError
from fsl_async.learn.models.targets import adapted_layers, is_head, without_adapters

if not importlib.util.find_spec("peft"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import peft
import tiny_base
import transformers
from tuned_runs import adapted, make_run, make_versions

from fsl_async.config.load import load
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.loops import hand_over
from fsl_async.learn.models.adapters import heads_of, tied_layers, trunk_of
from fsl_async.learn.models.hf import has_marks
from fsl_async.learn.tune.base import base_facts, load_base, quiet
from fsl_async.learn.tune.base_files import planned
from fsl_async.tools.export_models import write_merged
from fsl_async.tools.exports import write_adapters
from fsl_async.tools.kept_run import KeptRun

TWO_LAYERS = [
    "classifier.dense.weight", "classifier.dense.bias",
    "classifier.out_proj.weight", "classifier.out_proj.bias",
]  # fmt: skip
HEADS = {
    "bert": ["classifier.weight", "classifier.bias"],
    "distilbert": [
        "pre_classifier.weight", "pre_classifier.bias", "classifier.weight", "classifier.bias",
    ],
    "deberta-v2": [
        "pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias",
    ],
    "bart": [
        "classification_head.dense.weight", "classification_head.dense.bias",
        "classification_head.out_proj.weight", "classification_head.out_proj.bias",
    ],
    "gpt2": ["score.weight"],
    "llama": ["score.weight"],
    "roberta": TWO_LAYERS,
    "electra": TWO_LAYERS,
}  # fmt: skip
LORA = {"method": "lora", "rank": 4}
LABELS = ("no", "maybe", "yes")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: tiny_base.write_kind(folder / kind, kind) for kind in tiny_base.SIZES}


def classifier(folder):
    """As a script loads it, with a new head."""
    with quiet():
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            str(folder), num_labels=len(LABELS), pad_token_id=0
        )


def rows():
    """Token ids (3, 8), each row with the end that BART looks for."""
    found = torch.arange(5, 29).reshape(3, 8)
    found[:, -1] = tiny_base.END
    return found


def outputs(model):
    with torch.no_grad():
        return model.eval()(input_ids=rows()).logits


def local(**tune):
    return LocalFed(ClientContext("a", config={"tune": LORA | tune}), steps=1)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_trains_whole_and_is_exported(bases, tmp_path, kind):
    """What a version computes is what plain peft and transformers load, as often as they do."""
    folder, out = bases[kind], [tmp_path / "adapter", tmp_path / "merged"]
    tune = make_run(
        tmp_path / "run", folder, 'tune.objective="classify"', 'tune.labels="no,maybe,yes"',
        "tune.rank=4",
    )  # fmt: skip
    run = KeptRun(tmp_path / "run")
    loaded = run.chosen(None)
    for one in out:
        one.mkdir()
    write_adapters(out[0], run, loaded, facts=base_facts(folder), base=str(folder))
    write_merged(out[1], run, loaded, folder)
    model, weights, base = adapted(folder, tune)
    heads = [one.name for one in weights.layout.tensors if "lora_" not in one.name]
    assert sorted(heads) == sorted(HEADS[kind])
    assert set(base.drawn) == set(heads)
    weights.copy_in(loaded.vector)
    wanted = outputs(model)
    assert wanted.shape == (3, len(LABELS))
    for _ in range(2):
        with quiet():
            found = [
                peft.PeftModel.from_pretrained(classifier(folder), str(out[0])),
                transformers.AutoModelForSequenceClassification.from_pretrained(str(out[1])),
            ]
        for one in found:
            torch.testing.assert_close(outputs(one), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_a_classifier_of_a_script_is_exported(bases, tmp_path, kind):
    """The objective of a run is of the built-in task: a script's run may have the default one."""
    fed, model = local(), classifier(bases[kind])
    hand_over(fed, model)
    weights = ModelWeights(model, fed.adapters.view)
    tune = [f"tune.{key}={value}" for key, value in fed.config["tune"].items()]
    make_versions(tmp_path / "run", weights, load(None, tune))
    run = KeptRun(tmp_path / "run")
    loaded = run.chosen(None)
    (tmp_path / "adapter").mkdir()
    write_adapters(tmp_path / "adapter", run, loaded, base=str(bases[kind]))
    weights.copy_in(loaded.vector)
    with quiet():
        found = peft.PeftModel.from_pretrained(classifier(bases[kind]), str(tmp_path / "adapter"))
    torch.testing.assert_close(outputs(found), outputs(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_a_script_gets_the_same_heads_as_the_command_line(bases, kind):
    """A model that a Trainer has loaded: its head trains whole, and one step moves all of it."""
    config = transformers.AutoConfig.from_pretrained(str(bases[kind]))
    with torch.device("meta"):
        built = transformers.AutoModelForSequenceClassification.from_config(config)
    assert heads_of(built) == HEADS[kind], "without the marks of transformers 5, too"
    fed, model = local(), classifier(bases[kind])
    hand_over(fed, model)
    weights = ModelWeights(model, fed.adapters.view)
    assert [one.name for one in weights.layout.tensors if "lora_" not in one.name] == HEADS[kind]
    before = {name: model.get_parameter(name).clone() for name in HEADS[kind]}
    optimizer = torch.optim.SGD(fed.adapters.trained(), lr=1.0)
    model.train()(input_ids=rows(), labels=torch.tensor([0, 1, 2])).loss.backward()
    optimizer.step()
    assert all(not torch.equal(model.get_parameter(name), old) for name, old in before.items())


@pytest.mark.parametrize("kind", [*HEADS, "mpnet", "albert"])
@pytest.mark.parametrize("targets", ["", "none"])
def test_the_plan_counts_the_heads_of_each_family(bases, kind, targets):
    """A pooler that the classifier of a family does not use gets no adapters."""
    fed = local(objective="classify", labels="no,maybe,yes", targets=targets)
    tune = fed.config["tune"]
    model = fed.lora(classifier(bases[kind]))
    found = planned(base_facts(bases[kind]), TuneConfig(**tune))
    weights = ModelWeights(model, fed.adapters.view).layout.weights
    assert 4 * sum(one.inputs + one.outputs for one in found.layers) + found.full == weights


def test_what_the_files_lack_is_a_head(tmp_path):
    """BERT trained on masked words has no pooler; a classifier reads it."""
    folder = tiny_base.write_kind(tmp_path / "bert", "bert", auto="AutoModelForMaskedLM")
    wanted = ["bert.pooler.dense.weight", "bert.pooler.dense.bias", *HEADS["bert"]]
    base = load_base(folder, "classify", labels=LABELS)
    assert set(base.drawn) == set(wanted)
    fed = local(objective="classify", labels="no,maybe,yes")
    model = fed.lora(base.model, heads=base.drawn)
    names = [one.name for one in fed.adapters.view.tensors]
    assert names[-4:] == wanted
    assert "bert.pooler.dense.lora_A" not in names
    tune = TuneConfig(**fed.config["tune"])
    found = planned(base_facts(folder), tune)
    weights = ModelWeights(model, fed.adapters.view).layout.weights
    assert 4 * sum(one.inputs + one.outputs for one in found.layers) + found.full == weights
    if has_marks():  # transformers 5 tells it of a model that a script has loaded
        assert heads_of(classifier(folder)) == wanted


def test_the_head_of_a_language_model_is_not_new(bases, tmp_path):
    """It was pretrained with the trunk, whether it is tied or not, and resized or not."""
    folder = tiny_base.write_kind(tmp_path / "lm", "llama", auto="AutoModelForCausalLM")
    with quiet():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
        loaded.resize_token_embeddings(tiny_base.VOCABULARY + 4)
    assert heads_of(loaded) == []
    for auto, kind in (("AutoModelForCausalLM", "llama"), ("AutoModelForMaskedLM", "roberta")):
        for ties in (True, False):
            made = transformers.AutoConfig.from_pretrained(
                str(bases[kind]), tie_word_embeddings=ties
            )
            assert heads_of(getattr(transformers, auto).from_config(made)) == []


def test_a_module_around_a_model_has_its_head_outside():
    """Scripts often write the head themselves."""
    bert = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model("bert", vocab_size=9, **tiny_base.SIZES["bert"])
    )
    model = nn.ModuleDict({"encoder": bert, "verdict": nn.Linear(tiny_base.WIDTH, 2)})
    assert trunk_of(model) == "encoder"
    assert heads_of(model) == ["verdict.weight", "verdict.bias"]
    plain = nn.ModuleDict({"body": nn.Linear(4, 4), "classifier": nn.Linear(4, 2)})
    assert (trunk_of(plain), heads_of(plain)) == ("", ["classifier.weight", "classifier.bias"])


def test_a_tied_layer_gets_no_adapter(bases):
    """Merged, its adapter would change the embedding too."""
    found = transformers.AutoConfig.from_pretrained(str(bases["roberta"]), is_decoder=True)
    model = transformers.AutoModelForCausalLM.from_config(found)
    assert tied_layers(model, ["lm_head.decoder", "lm_head.dense"]) == {
        "lm_head.decoder": "roberta.embeddings.word_embeddings.weight"
    }
    with pytest.raises(ConfigError, match=r"decoder cannot have an adapter: it shares .*word_emb"):
        local(targets="decoder").lora(model)
    fed = local()
    fed.lora(model)
    assert not [one.name for one in fed.adapters.view.tensors if one.name.startswith("lm_head")]


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
    from fsl_async.learn.client.context import ClientContext
    from fsl_async.learn.client.local_fed import LocalFed
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
