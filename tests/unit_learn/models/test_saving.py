"""Adapted models, saved and loaded back by plain torch, transformers and peft."""

import copy
import io
import json

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from fsl_async.errors import TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.loops import hand_over
from fsl_async.learn.models.adapters import Patched, adapters_off

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft
IDS = torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(0))


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
        )
    )  # fmt: skip


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=9))


def roberta():
    return RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=16, num_labels=3,
        )
    )  # fmt: skip


class Own(nn.Module):
    """A model that is not of transformers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Sequential(nn.Linear(8, 8, bias=False))

    def forward(self, values):  # noqa: D102
        return self.last(self.norm(self.first(values)))


def base_of(build, folder=None):
    """A base, from a folder if one is given."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = build()
    if folder is not None:
        made.save_pretrained(folder)
        made = type(made).from_pretrained(folder)
    return made.eval()


def adapted(model, *, rule="fedit", site_rank=None, **tune):
    """The model with adapters that have been trained."""
    fed = LocalFed(
        ClientContext("a", config={"tune": {"method": "lora", "rank": 4, "rule": rule, **tune}})
    )
    if site_rank is None:
        hand_over(fed, model)
    else:
        fed.lora(model, site_rank=site_rank)
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name or weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=drawn) / 4)
        for part in model.modules():
            if isinstance(part, Patched):
                part.patch.normal_(generator=drawn).div_(4)
    return fed


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def check_same(model, wanted):
    torch.testing.assert_close(logits(model.eval()), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", [llama, gpt2, roberta])
@pytest.mark.parametrize(
    "how",
    [{}, {"site_rank": 3, "rule": "bank"}, {"site_rank": 3, "rule": "hetlora"}],
    ids=["whole", "tail", "cut"],
)
def test_a_saved_folder_is_the_same_function_in_peft_and_transformers(build, how, tmp_path):
    """It had peft's names of adapters that only this package knows, and loaded as random ones."""
    model = base_of(build, tmp_path / "base")
    before = logits(model)
    if how and build is roberta:
        how = how | {"full": "classifier.*"}
    fed = adapted(model, **how)
    wanted = logits(model)
    assert (wanted - before).abs().max() > 0.1
    model.save_pretrained(tmp_path / "saved")
    assert {one.name for one in (tmp_path / "saved").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors"
    }  # fmt: skip
    check_same(peft.PeftModel.from_pretrained(base_of(build), tmp_path / "saved"), wanted)
    auto = AutoModelForSequenceClassification if build is roberta else AutoModelForCausalLM
    check_same(auto.from_pretrained(tmp_path / "saved"), wanted)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["r"] == fed.adapters.site_rank + (how.get("rule") == "bank")
    assert config["lora_alpha"] == config["r"] * fed.adapters.scale
    assert config["target_modules"] == list(fed.adapters.layers)
    assert config["modules_to_save"] == (["classifier"] if build is roberta else None)


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("rule", ["fedit", "bank", "hetlora", "fedex"])
def test_a_state_dict_is_that_of_the_base_with_merged_weights(build, rule):
    """Also what optimizers, gradients and the run see of the model stays as it was."""
    model, plain = base_of(build), base_of(build)
    order = list(plain.state_dict())
    adapted(model, rule=rule, site_rank=3 if rule in {"bank", "hetlora"} else None)
    names = [name for name, _ in model.named_parameters()]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert list(found) == order
    plain.load_state_dict(found, strict=True)
    check_same(plain, logits(model))
    assert [name for name, _ in model.named_parameters()] == names
    with adapters_off(model):
        plain.load_state_dict(model.state_dict())
        check_same(plain, logits(model))
    if rule == "fedit":
        check_same(base_of(build), logits(plain))


def test_a_model_of_ones_own_and_its_copies():
    """`fed.lora` in a loop of one's own, wrapped and copied models, a part of a model."""
    model, plain = base_of(Own), base_of(Own)
    values = torch.randn(4, 8)
    adapted(model, targets="first,0")
    with torch.no_grad():
        wanted = model(values)
    for held in (model, copy.deepcopy(model)):
        plain.load_state_dict(held.state_dict(), strict=True)
        with torch.no_grad():
            torch.testing.assert_close(plain(values), wanted, rtol=0, atol=1e-5)
    outer = nn.ModuleDict({"inner": model})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in plain.state_dict()]
    assert list(model.last.state_dict()) == ["0.weight"]
    assert all(name in plain.state_dict()._metadata for name in model.state_dict()._metadata)
    outer.half()
    assert model.state_dict()["first.weight"].dtype == torch.float16


def test_merged_values_are_not_loaded_into_adapters():
    """With strict=False they were left out, and the model stayed as it was without a word."""
    model = base_of(llama)
    adapted(model)
    state, before = model.state_dict(), logits(model)
    for target, saved in ((model, state), (model.model, model.model.state_dict())):
        with pytest.raises(TaskError, match="load it before"):
            target.load_state_dict({name: 2 * one for name, one in saved.items()}, strict=False)
        assert torch.equal(logits(model), before)
    kept = {name: one.clone() for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for name in kept:
            model.get_parameter(name).zero_()
    model.load_state_dict(kept, strict=False)
    assert torch.equal(logits(model), before)


def test_what_adapters_cannot_hold_is_saved_merged(tmp_path):
    """A rule that changes the base, a tied weight and a part of a module that train whole."""
    for number, how in enumerate(
        (
            {"rule": "fedex"},
            {"full": "model.embed_tokens.weight"},
            {"targets": "none", "full": "*norm*"},
        )
    ):
        model = base_of(llama, tmp_path / "base")
        adapted(model, **how)
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        assert not (folder / "adapter_config.json").exists()
        check_same(AutoModelForCausalLM.from_pretrained(folder), logits(model))


def test_a_module_whose_name_is_the_end_of_another_is_saved_merged(tmp_path):
    """Peft takes DistilBERT's pre_classifier for its classifier."""
    sizes = {"vocab_size": 40, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}
    kind = DistilBertForSequenceClassification
    model = base_of(lambda: kind(DistilBertConfig(max_position_embeddings=16, **sizes)))
    fed = LocalFed(ClientContext("a", config={"tune": {"method": "lora", "rank": 4}}))
    fed.lora(model, heads=["classifier.weight", "classifier.bias"])
    model.save_pretrained(tmp_path)
    check_same(AutoModelForSequenceClassification.from_pretrained(tmp_path), logits(model))


def test_a_folder_is_saved_into_again(tmp_path):
    """Transformers adds the adapters of a folder to the whole model in it."""
    llama().save_pretrained(tmp_path / "one")  # of another training
    model = base_of(llama)
    adapted(model)
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / name)
        check_same(AutoModelForCausalLM.from_pretrained(tmp_path / name), logits(model))
    model.save_pretrained(tmp_path / "two", state_dict=model.state_dict())
    check_same(AutoModelForCausalLM.from_pretrained(tmp_path / "two"), logits(model))
    model.save_pretrained(tmp_path / "three", is_main_process=False)
    assert not (tmp_path / "three").exists()


def test_a_base_without_a_folder_is_beside_its_adapters(tmp_path):
    """Also one whose embedding is not that of its folder any more."""
    model = base_of(gpt2)
    adapted(model)
    model.save_pretrained(tmp_path / "drawn")
    check_same(AutoModelForCausalLM.from_pretrained(tmp_path / "drawn"), logits(model))
    check_same(peft.PeftModel.from_pretrained(base_of(gpt2), tmp_path / "drawn"), logits(model))
    model = base_of(gpt2, tmp_path / "base")
    model.resize_token_embeddings(44)
    adapted(model)
    model.save_pretrained(tmp_path / "resized")
    check_same(AutoModelForCausalLM.from_pretrained(tmp_path / "resized"), logits(model))


def test_a_quantized_base_is_not_merged():
    """Packed weights would be added to as numbers."""
    model = base_of(Own)
    adapted(model, targets="first")
    packed = type("Params4bit", (nn.Parameter,), {})  # the name of bitsandbytes' class
    weight = packed(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    model.first.base_layer.weight = weight
    with pytest.raises(TaskError, match="save the adapters alone"):
        model.state_dict()
