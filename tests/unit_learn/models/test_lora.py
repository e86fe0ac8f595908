"""LoRA on either part: only adapters train, cross the wire and are saved.

Skipped without the extra `hf`.
"""

import copy
import importlib.util

import pytest
import torch
from split_lockstep import start
from torch import nn

from fsl_async.config.settings_training import SplitConfig
from fsl_async.errors import ConfigError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models import hf
from fsl_async.learn.models.adapters import apply_lora, inject
from fsl_async.learn.models.cuts import build_auxiliary, split
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.learn.split import weights
from fsl_async.learn.split.model_parts import AlignSettings, OptimizerSpec, ServerPartOptions
from fsl_async.roles.split.methods import method_of

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")
ADAM = OptimizerSpec("adamw", 1e-2)
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}


def gpt():
    return GPT(GPTConfig(layers=3, width=16, heads=2, context=8, vocabulary=40), seed=1)


def gpt2():
    sizes = GPT2 | {"bos_token_id": 1, "eos_token_id": 2}
    return hf.build("gpt2", sizes | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0))


def batch():
    ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.roll(ids, -1, 1))


@pytest.mark.parametrize("build", [gpt, gpt2])
def test_adapters_change_nothing_at_first_and_are_all_that_trains(build):
    """A pretrained model is unchanged before the first step, and its own weights after it."""
    halves = split(build(), 1)
    with torch.no_grad():
        before = halves.run(batch().inputs)
        names = [apply_lora(part, rank=2, seed=3) for part in (halves.client, halves.server)]
        assert torch.equal(halves.run(batch().inputs), before)
    assert all("lora_" in name for each in names for name in each)
    assert not any("head" in name for name in names[1])
    manifest = ModelWeights(halves.server).manifest
    assert [tensor.name for tensor in manifest.tensors] == names[1]
    frozen = {
        name: value.detach().clone()
        for name, value in halves.server.named_parameters()
        if not value.requires_grad
    }
    run = start(method_of(SplitConfig(method="splitfed-v2")), halves, "ab", ADAM)
    losses = [run.round({"a": [batch()], "b": [batch()]})["a"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05
    now = dict(run.server.common.model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    assert any(now[name].any() for name in names[1] if "lora_B" in name)


def test_either_part_may_be_frozen():
    """A client may be too small to train more than adapters, and so may the split server."""
    for which in ("client", "server"):
        halves = split(gpt(), 1)
        apply_lora(getattr(halves, which), rank=2)
        run = start(method_of(SplitConfig(method="splitfed-v1")), halves, "ab", ADAM)
        start_sizes = run.clients["a"].export().size, run.server.common.export().size
        assert (start_sizes[0] < start_sizes[1]) == (which == "client")
        losses = [run.round({"a": [batch()], "b": [batch()]})["a"] for _ in range(4)]
        assert losses[-1] < losses[0]


def test_adapters_of_an_auxiliary_model_are_aligned_and_sent():
    """With LoRA an auxiliary model's head, its largest part, is not sent."""
    halves = split(gpt(), 1)
    net = build_auxiliary("blocks:1", halves, batch())
    for part in (halves.client, halves.server, net):
        apply_lora(part, rank=2, seed=3)
    settings = ServerPartOptions(
        ADAM, align=AlignSettings(5, optimizer=OptimizerSpec("adam", 1e-2))
    )
    run = start(
        method_of(SplitConfig(method="fsl-sage", upload_every=1, align_every=1)),
        halves,
        "a",
        ADAM,
        auxiliary=net,
        server=settings,
    )
    before = run.clients["a"].export("auxiliary")
    assert before.size < net.head.numel()
    for _ in range(2):
        run.round({"a": [batch()]})
    after = run.clients["a"].export("auxiliary")
    assert (after != before).any()
    assert (after == run.server.alignment("a").export()).all()


def test_what_is_saved_is_the_adapters_and_enough(difference):
    """Frozen weights are equal everywhere, so no checkpoint has them."""
    halves = split(gpt(), 1)
    for part in (halves.client, halves.server):
        apply_lora(part, rank=2, seed=3)
    first = start(method_of(SplitConfig(method="splitfed-v2")), halves, "a", ADAM)
    second = start(method_of(SplitConfig(method="splitfed-v2")), halves, "a", ADAM)
    first.round({"a": [batch(), batch()]})
    state = first.server.state()
    assert all("lora_" in name for name in state if name.startswith(("server/", "optimizer/")))
    second.clients = copy.deepcopy(first.clients)
    second.server.restore(state)
    for run in (first, second):
        run.round({"a": [batch()]})
    found, wanted = (dict(run.model().client.state_dict()) for run in (second, first))
    assert difference(found, wanted) == 0


def test_the_seed_decides_where_adapters_start():
    """Every site starts from the same adapters; the user's generator is untouched."""
    parts = [split(gpt(), 1).client for _ in range(3)]
    state = torch.get_rng_state()
    for part, seed in zip(parts, (3, 3, 4), strict=True):
        apply_lora(part, rank=2, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, second, other = (weights.export(part) for part in parts)
    assert (first == second).all()
    assert (first != other).any()


def test_a_part_without_linear_layers_cannot_be_adapted():
    """The error is one line."""
    with pytest.raises(ConfigError, match="no linear layers"):
        apply_lora(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConfigError, match=r"LoRA: .*nowhere") as raised:
        inject(split(gpt(), 1).client, ["nowhere"], rank=2, alpha=4.0, key="split.lora")
    assert "\n" not in raised.value.message
