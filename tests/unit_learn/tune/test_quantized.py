"""QLoRA: adapters on a base that bitsandbytes holds in 4 or 8 bits, on its CPU backend.

Skipped without the extra `quantized`.
"""

import importlib.metadata
import importlib.util

import numpy as np
import pytest
import torch

if not (importlib.util.find_spec("bitsandbytes") and importlib.util.find_spec("peft")):
    pytest.skip("needs the extra quantized", allow_module_level=True)
if int(importlib.metadata.version("transformers").split(".")[0]) < 5:
    pytest.skip("needs transformers 5", allow_module_level=True)

import peft
import tiny_base
import transformers
from tuned_runs import adapted, logits_of, make_run, tune_of

import fsl_async.hf
from fsl_async.errors import ConfigError, TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.models.adapters import adapters_off
from fsl_async.learn.models.hf import (
    dense_weight,
    is_quantized,
    keep_packed,
    quantized_layers,
)
from fsl_async.learn.tune.base import base_facts, load_base, quiet
from fsl_async.learn.tune.base_files import planned
from fsl_async.tools.export_models import write_merged
from fsl_async.tools.exports import write_adapters
from fsl_async.tools.kept_run import KeptRun

# Blocks of 64 values, so that bitsandbytes could pack them anew in evaluation mode.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return tiny_base.write_kind(folder, "llama", auto="AutoModelForCausalLM", **SIZES)


@pytest.fixture(scope="module", params=KINDS)
def packed(request, plain, tmp_path_factory):
    """A folder as save_pretrained writes it from a quantized model, and the kind."""
    folder = tmp_path_factory.mktemp(request.param)
    with quiet():
        quantized(plain, request.param).save_pretrained(str(folder))
        transformers.AutoTokenizer.from_pretrained(str(plain)).save_pretrained(str(folder))
    return folder, request.param


def quantized(folder, kind):
    """As a script loads it, like TRL with --load_in_4bit."""
    settings = transformers.BitsAndBytesConfig(**KINDS[kind])
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), quantization_config=settings, dtype=torch.float32
        )


def local(**tune):
    tune = {"method": "lora", "rank": 4} | tune
    return LocalFed(ClientContext("a", config={"tune": tune}), steps=4)


def loss_of(model):
    ids = torch.arange(16).reshape(2, 8) * 7 + 5
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("kind", KINDS)
def test_dense_weights_are_close_to_those_that_were_quantized(plain, kind):
    """The error of a value is half a step: 1/254 of its row, and fp16's; or 0.16 of its block."""
    model, whole = quantized(plain, kind), load_base(plain, "lm").model
    layer = model.get_submodule(Q_PROJ)
    weight = whole.get_submodule(Q_PROJ).weight
    for _ in range(2):  # its scales are elsewhere after it has computed
        dense = dense_weight(layer)
        assert (dense.shape, dense.dtype) == ((64, 64), torch.float32)
        error = ((dense - weight).abs() / weight.abs().amax(1, keepdim=True)).max()
        assert error < {"nf4": 0.16, "int8": 0.005}[kind]
        loss_of(model)
    assert dense_weight(whole.get_submodule(Q_PROJ)) is weight
    assert len(list(quantized_layers(model))) == 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["fedit", "bank", "fedex"])
def test_the_runs_adapters_train_on_a_quantized_base(plain, kind, rule):
    """Only factors travel, of the sizes of the unquantized layer; the base is frozen."""
    fed, model = local(rule=rule), quantized(plain, kind)
    packed_before = model.get_submodule(Q_PROJ).weight.clone()
    fed.lora(model)
    weights = ModelWeights(model, fed.adapters.view)
    whole = local(rule=rule)
    dense = ModelWeights(whole.lora(load_base(plain, "lm").model), whole.adapters.view)
    assert weights.layout == dense.layout
    first = np.empty(weights.layout.values, np.float32)
    weights.copy_out(first)
    same = np.empty_like(first)
    dense.copy_out(same)
    assert np.array_equal(first, same)
    optimizer = torch.optim.AdamW(fed.adapters.trained(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = loss_of(model.train())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    with torch.no_grad(), adapters_off(model):
        assert loss_of(model).item() == pytest.approx(losses[0], abs=1e-6)
    base = model.get_submodule(Q_PROJ).get_base_layer()
    base = getattr(base, "base", base)
    assert is_quantized(base)
    assert torch.equal(base.weight, packed_before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_base_is_compared_by_its_packed_bytes(plain, tmp_path, kind):
    """Refused by name beside an unquantized one, or another; taken where shapes are compared."""
    other = tiny_base.write_kind(
        tmp_path / "other", "llama", auto="AutoModelForCausalLM", **SIZES, initializer_range=0.03
    )

    def manifest(model, **tune):
        fed = local(**tune)
        return ModelWeights(fed.lora(model), fed.adapters.view).manifest

    mine = manifest(quantized(plain, kind))
    assert mine == manifest(quantized(plain, kind))
    packed_names = [one.name for one in mine.frozen if one.is_quantized]
    assert len(packed_names) == 7
    whole = manifest(load_base(plain, "lm").model)
    assert "quantize the base model with the same quantizer" in mine.difference(whole)
    assert mine.difference(manifest(quantized(other, kind))).startswith("frozen tensor")
    shapes = {"base_check": "shapes"}
    assert manifest(quantized(plain, kind), **shapes) == manifest(
        load_base(plain, "lm").model, **shapes
    )


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_changes_neither_digest_nor_loss(plain, kind):
    """Bitsandbytes packs 4-bit weights anew for some processors, in evaluation mode."""
    model = quantized(plain, kind).train()
    mine = ModelWeights(model, ["model.norm.weight"]).manifest
    before = loss_of(model).item()
    with torch.no_grad():
        loss_of(model.eval())
    assert ModelWeights(model, ["model.norm.weight"]).manifest == mine
    assert loss_of(model.train()).item() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_with_adapters_of_its_own_on_a_quantized_base(plain, tmp_path, kind):
    """QLoRA as a Trainer does it: only its factors are exchanged, and train."""
    fed = local()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with quiet():
        model = peft.get_peft_model(
            peft.prepare_model_for_kbit_training(quantized(plain, kind), False), lora
        )
    row = torch.arange(8) * 7 + 5
    arguments = transformers.TrainingArguments(
        str(tmp_path), learning_rate=0.1, use_cpu=True, dataloader_pin_memory=False,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row}] * 16
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    fsl_async.hf.patch(trainer, fed=fed)
    trainer.train()
    losses = [metrics["loss"] for _, metrics in fed.history]
    assert losses[-1] < losses[0] - 0.1
    manifest = ModelWeights(model).manifest
    assert [one.shape for one in manifest.tensors] == [(4, 64), (64, 4)] * 2
    assert sum(one.is_quantized for one in manifest.frozen) == 7


def test_files_with_packed_weights_are_planned_and_loaded(plain, packed):
    """Sizes are those of the layers, and memory that of the packed weights."""
    folder, kind = packed
    facts, whole = base_facts(folder), base_facts(plain)
    assert facts.shapes == whole.shapes
    assert facts.linear == whole.linear
    assert len(facts.packed) == 7
    assert facts.bytes_at(4) < 0.7 * whole.bytes_at(4)
    assert planned(facts, tune_of(rank=4)).layers == planned(whole, tune_of(rank=4)).layers
    model = load_base(folder, "lm", device=torch.device("cpu")).model
    assert len(list(quantized_layers(model))) == 7
    assert loss_of(model.train()).item() == loss_of(quantized(plain, kind).train()).item()
    classifier = load_base(folder, "classify", labels=("no", "yes"))
    assert classifier.drawn == ("score.weight",)


def test_a_quantized_base_is_merged_dequantized(plain, packed, tmp_path):
    """What is written is an ordinary model in fp32 that computes what the run's version does."""
    folder, kind = packed
    tune = make_run(tmp_path / "run", folder, "tune.rank=4")
    run = KeptRun(tmp_path / "run")
    loaded = run.chosen(None)
    model, weights, _ = adapted(folder, tune)
    weights.copy_in(loaded.vector)
    wanted = logits_of(model)
    for name in ("merged", "adapter", "other"):
        (tmp_path / name).mkdir()
    write_merged(tmp_path / "merged", run, loaded, folder)
    write_adapters(tmp_path / "adapter", run, loaded, facts=base_facts(folder), base=str(folder))
    with quiet():
        merged = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
        again = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
        again = peft.PeftModel.from_pretrained(again, str(tmp_path / "adapter"))
    assert {one.dtype for one in merged.parameters()} == {torch.float32}
    assert not hasattr(merged.config, "quantization_config")
    # int8 also rounds the inputs of a layer, by 1/254 of the largest one.
    torch.testing.assert_close(
        logits_of(merged), wanted, rtol=0, atol={"nf4": 1e-5, "int8": 0.02}[kind]
    )
    keep_packed(again)
    torch.testing.assert_close(logits_of(again), wanted, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="is not quantized, and the run's base is quantized: gi"):
        write_merged(tmp_path / "other", run, loaded, plain)


def test_other_quantizers_are_refused_in_one_line(plain, tmp_path):
    """Their layers are not linear layers that we can read."""
    config = tmp_path / "config.json"
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = config.read_text().rstrip().removesuffix("}")
    config.write_text(f'{text}, "quantization_config": {{"quant_method": "gptq", "bits": 4}}}}')
    with pytest.raises(ConfigError, match=r"is quantized by gptq, which is not supported: give th"):
        load_base(tmp_path, "lm")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_head", [True, False])
def test_heads_of_a_quantized_base_are_whole_layers(tmp_path, kind, has_head):
    """Heads are packed like any layer, but a new one, which then has values and no scales."""
    auto = "AutoModelForSequenceClassification"
    folder = tiny_base.write_kind(tmp_path, "bert", auto=auto if has_head else "AutoModel")
    with quiet():
        model = getattr(transformers, auto).from_pretrained(
            str(folder), quantization_config=transformers.BitsAndBytesConfig(**KINDS[kind])
        )
    ids = torch.arange(4, 12)[None]
    wanted = model.eval()(ids).logits if has_head else None
    fed = LocalFed(ClientContext("a", config={"tune": {"method": "lora"}}))
    fed.lora(model)
    assert type(model.classifier) is torch.nn.Linear
    assert fed.adapters.full == ["classifier.weight", "classifier.bias"]
    found = model.eval()(ids).logits
    if has_head:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-2)
    found.sum().backward()
    assert model.classifier.weight.grad.shape == (2, tiny_base.WIDTH)


def test_a_quantized_base_that_a_rule_changes_is_not_saved(plain, tmp_path):
    """Its dense patches are in no PEFT folder, and packed weights cannot take them."""
    model = quantized(plain, "nf4")
    local(rule="flora").lora(model)
    with pytest.raises(TaskError, match="use fsl-node export --merged"):
        model.save_pretrained(tmp_path)


def test_a_packed_folder_without_a_head_classifies(tmp_path):
    """The new head is drawn from the seed, and the adapter loads where heads are left dense."""
    plain = tiny_base.write_kind(tmp_path / "plain", "distilbert", auto="AutoModel", dim=64)
    settings = transformers.BitsAndBytesConfig(**KINDS["nf4"])
    kinds, packed = transformers.AutoModelForSequenceClassification, tmp_path / "packed"
    with quiet():
        transformers.AutoModel.from_pretrained(
            str(plain), quantization_config=settings
        ).save_pretrained(str(packed))
        transformers.AutoTokenizer.from_pretrained(str(plain)).save_pretrained(str(packed))
    base = load_base(packed, "classify", labels=("a", "b", "c"), seed=3)
    assert {name.partition(".")[0] for name in base.drawn} == {"pre_classifier", "classifier"}
    model = local(objective="classify", labels="a,b,c").lora(base.model, heads=base.drawn)
    ids = torch.arange(4, 12)[None]
    model(input_ids=ids).logits.sum().backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight.sub_(0.1 * weight.grad)
    model.eval().save_pretrained(tmp_path / "adapter")
    settings.llm_int8_skip_modules = ["pre_classifier", "classifier"]
    with quiet():
        again = kinds.from_pretrained(str(plain), num_labels=3, quantization_config=settings)
        again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    torch.testing.assert_close(
        again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-3
    )
