"""Language models that read the tokens that come later are refused.

Skipped without the extra `hf`.
"""

import importlib.util

import pytest
import torch

from fsl_async.errors import ConfigError
from fsl_async.learn.models.hf import check_causal

if not importlib.util.find_spec("peft"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import peft
import tiny_base
import transformers

from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.loops import hand_over
from fsl_async.learn.tune.base import quiet


def language_model(kind, dtype=torch.float32, auto="AutoModelForCausalLM", **more):
    config = transformers.AutoConfig.for_model(kind, vocab_size=60, **tiny_base.SIZES[kind] | more)
    return getattr(transformers, auto).from_config(config).to(dtype)


def said_of(model):
    lines = []
    check_causal(model, lines.append)
    return lines


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_an_encoder_is_no_language_model(kind):
    """Its loss would fall without anything being learned; as a decoder it is one."""
    with pytest.raises(ConfigError, match=rf"a {kind} model \(\w+\) reads the tokens"):
        said_of(language_model(kind))
    assert not said_of(language_model(kind, is_decoder=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bart", "mixtral", "qwen2_moe"])
def test_decoders_are(kind, dtype):
    """Also in bf16, whose rounding must not count, and in whatever mode the model is."""
    model = language_model(kind, dtype)
    assert not said_of(model.train())
    assert model.training


def test_a_model_that_needs_more_than_tokens_is_named():
    """A model that cannot be checked is taken, with a line in the log."""

    class Blind(transformers.LlamaForCausalLM):
        def forward(self, pixels, **_):
            raise AssertionError

    config = transformers.LlamaConfig(vocab_size=60, **tiny_base.SIZES["llama"])
    assert said_of(Blind(config))[0].startswith("not checked that Blind is causal: ")


@pytest.mark.parametrize("has_adapters", [False, True])
def test_scripts_are_checked_in_runs_that_tune(has_adapters):
    """With the run's adapters, and with adapters of the script's own."""
    model = language_model("bert")
    if has_adapters:
        lora = peft.LoraConfig(target_modules=["query"], task_type="CAUSAL_LM")
        with quiet():
            model = peft.get_peft_model(model, lora)
    for method in ("none", "lora"):
        fed = LocalFed(ClientContext("a", config={"tune": {"method": method}}))
        if method == "none":
            hand_over(fed, model)
        else:
            with pytest.raises(ConfigError, match="reads the tokens"):
                hand_over(fed, model)
