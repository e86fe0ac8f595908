"""Frozen tensors in a manifest: the first difference by name and cause, and a bounded list."""

import msgpack
import pytest

from fsl_async.store.model.frozen_tensors import MOST_LISTED, form_of, frozen_tensors
from fsl_async.store.model.manifest import Manifest

LAYERS = [(f"h.{number}.weight", "bfloat16 64x32", "a" * 16) for number in range(4)]
BASE = [*LAYERS, ("score.weight", "bfloat16 2x64", "a" * 16)]


def manifest(found):
    return Manifest(Manifest.from_shapes([("w", (3,))]).tensors, frozen_tensors(found))


def changed(form="bfloat16 64x32", digest="b" * 16):
    return [*((name, form, digest) for name, _, _ in LAYERS), BASE[-1]]


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        (
            changed("float16 64x32"),
            (
                "frozen tensor 'h.0.weight' is bfloat16 64x32 here and float16 64x32 there (4 of 5"
                " differ): load the base model in the same dtype at every client"
            ),
        ),
        (
            changed("uint8 1024x1"),
            (
                "frozen tensor 'h.0.weight' is bfloat16 64x32 here and uint8 1024x1 there (4 of 5"
                " differ): quantize the base model with the same quantizer and settings"
            ),
        ),
        (
            changed(),
            (
                "frozen tensor 'h.0.weight' (bfloat16 64x32) has digest aaaaaaaaaaaaaaaa here and"
                " bbbbbbbbbbbbbbbb there (4 of 5 differ): load the same base model at every client"
            ),
        ),
        (
            [*LAYERS, ("score.weight", "bfloat16 2x64", "b" * 16)],
            (
                "frozen tensor 'score.weight' (bfloat16 2x64) has digest aaaaaaaaaaaaaaaa here and"
                " bbbbbbbbbbbbbbbb there (1 of 5 differ): load the same base model at every client;"
                " a head or an adapter of its own must train (requires_grad)"
            ),
        ),
        (
            [*BASE, ("h.0.lora_A.mine.weight", "float32 8x32", "c" * 16)],
            (
                "frozen tensor 'h.0.lora_A.mine.weight' (float32 8x32) exists only there: load the"
                " same base model at every client; a head or an adapter of its own must train"
            ),
        ),
        (
            BASE[1:],
            "frozen tensor 'h.0.weight' (bfloat16 64x32) exists only here: load the same base",
        ),
        (
            [*BASE, ("h.0.qzeros", "int32 4x4", "c" * 16)],
            "frozen tensor 'h.0.qzeros' (int32 4x4) exists only there: quantize the base model",
        ),
        (
            [*changed("uint8 1024x1"), ("h.0.absmax", "float32 32", "c" * 16)],
            "frozen tensor 'h.0.absmax' (float32 32) exists only there: quantize the base model",
        ),
        ([], "frozen tensor 'h.0.weight' (bfloat16 64x32) exists only here: load the same base"),
    ],
)
def test_the_first_difference_is_named_with_its_cause(there, sentence):
    """Another dtype, another quantizer, a private adapter and a new head need other cures."""
    mine, theirs = manifest(BASE), manifest(there)
    assert mine.difference(theirs).startswith(sentence)
    assert mine.fingerprint != theirs.fingerprint


def test_a_dtype_alone_is_no_difference():
    """A base that is stored in bf16 may be loaded as bf16 or as fp32: its values are the same."""
    mine, theirs = manifest(BASE), manifest(changed("float32 64x32", "a" * 16))
    assert mine == theirs
    assert mine.fingerprint == theirs.fingerprint
    assert mine.difference(theirs) is None


def test_the_order_of_tensors_is_no_difference():
    """An inserted module may change the order in which a model lists what it has."""
    assert manifest(BASE) == manifest(BASE[::-1])


def test_a_great_model_is_listed_within_a_message():
    """A mixture of experts has more tensors than the 4 MiB of a control message have room for."""
    names = [f"model.layers.{number:06}{'.expert' * 30}" for number in range(46_000)]
    found = [(name, form_of("torch.bfloat16", (7168, 2048)), "a" * 16) for name in names]
    mine = manifest(found)
    assert len(mine.frozen) <= MOST_LISTED
    assert len(msgpack.packb(mine.frozen_to_wire())) < 1 << 21
    assert Manifest.from_wire(mine.to_wire(), mine.frozen_to_wire()) == mine
    found[40_000] = (*found[40_000][:2], "b" * 16)
    difference = mine.difference(manifest(found))
    assert "model.layers.0399" in difference, "its entry begins a little before it"
    assert "has digest" in difference


def test_forms_are_short_and_readable():
    """They are printed beside each other."""
    assert form_of("torch.bfloat16", (64, 32)) == "bfloat16 64x32"
    assert form_of("torch.uint8", ()) == "uint8 scalar"
