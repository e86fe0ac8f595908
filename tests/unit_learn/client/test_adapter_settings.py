"""Settings of a script's own adapters are part of what clients must have alike.

Skipped without the extra `hf`.
"""

import importlib.util

import pytest

from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.store.model.frozen_tensors import frozen_difference, frozen_tensors, setting
from fsl_async.store.model.manifest import Manifest

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
