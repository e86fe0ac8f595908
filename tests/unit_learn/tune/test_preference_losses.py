"""Losses of preferences and of rewards, against values that TRL 1.16 and an fp64 program gave.

tests/vectors/preference_losses.json says how models and samples follow from a formula.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fsl_async.learn.tune.objectives import base as base_module
from fsl_async.learn.tune.objectives import grpo as grpo_module
from fsl_async.learn.tune.objectives.dpo import Dpo
from fsl_async.learn.tune.objectives.grpo import AnswerBatch, Grpo, advantages_of
from fsl_async.learn.tune.objectives.kto import Kto
from fsl_async.learn.tune.objectives.orpo import Orpo
from fsl_async.learn.tune.objectives.reward import Reward
from fsl_async.learn.tune.objectives.simpo import Simpo
from fsl_async.learn.tune.tokens import UNTRAINED, TokenBatch

transformers = pytest.importorskip("transformers")
KNOWN = json.loads((Path(__file__).parents[2] / "vectors/preference_losses.json").read_text())
PAIRS, EXACT, GIVEN = KNOWN["pairs"], KNOWN["own_fp64"], KNOWN["settings"]


def numbers(count, start):
    j = np.arange(1, count + 1, dtype=np.uint64)
    return ((2654435761 * j + 40503 * start) % 2**32) / 2**32 - 0.5


def llama(kind, seed=1, scale=1.0, reference=None):
    """Make the file's model: weight n by its name's place follows from n and `seed`."""
    config = transformers.LlamaConfig(**KNOWN["config"], attn_implementation="eager")
    config.num_labels = 1
    model = getattr(transformers, kind)(config).eval()
    before = dict(reference.named_parameters()) if reference is not None else {}
    with torch.no_grad():
        for n, (name, weight) in enumerate(sorted(model.named_parameters())):
            first = before.get(name, torch.full_like(weight, "norm" in name))
            drawn = torch.from_numpy(scale * numbers(weight.numel(), seed + 17 * n))
            weight.copy_((first.double() + drawn.reshape(weight.shape)).float())
    return model


class Both(nn.Module):
    """A policy and its base, which answers where adapters are off."""

    def __init__(self, policy, base):
        super().__init__()
        self.policy, self.base, self.is_off = policy, base.requires_grad_(False), False

    def forward(self, **given):
        """Answer as one of them."""
        return (self.base if self.is_off else self.policy)(**given)


@pytest.fixture
def both(monkeypatch):
    reference = llama("LlamaForCausalLM")
    policy = llama("LlamaForCausalLM", 1000, 0.3, reference)
    total = sum(weight.detach().double().abs().sum().item() for weight in policy.parameters())
    assert total == pytest.approx(KNOWN["checksum"]["policy_sum_abs"], rel=1e-6)

    @contextmanager
    def off(model):
        model.is_off = True
        yield
        model.is_off = False

    for module in (base_module, grpo_module):
        monkeypatch.setattr(module, "adapters_off", off)
    return Both(policy, reference)


def batch_of(rows, goods=None, kind=TokenBatch, samples=None, **more):
    """Pad (prompt, completion) to a batch; completions are trained."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = np.zeros((len(rows), width), np.int64)
    mask, labels = np.zeros_like(ids), np.full_like(ids, UNTRAINED)
    for row, (prompt, answer) in enumerate(rows):
        stop = len(prompt) + len(answer)
        ids[row, :stop], mask[row, :stop] = prompt + answer, 1
        labels[row, len(prompt) : stop] = answer
    return kind(ids, mask, labels, np.arange(samples or len(rows)), 0, goods=goods, **more)


def pairs():
    rows = [(one["prompt"], one[part]) for one in PAIRS for part in ("chosen", "rejected")]
    return batch_of(rows, samples=len(PAIRS))


def check(outcome, model, known, accuracy=1e-5):
    outcome.loss.backward()
    norms = [
        weight.grad.square().sum().item() for weight in model.parameters() if weight.requires_grad
    ]
    assert outcome.loss.item() == pytest.approx(known["loss"], abs=accuracy)
    assert sum(norms) ** 0.5 == pytest.approx(known["grad_norm"], rel=accuracy)


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("dpo", Dpo(GIVEN["dpo"]["beta"])),
        ("orpo", Orpo(GIVEN["orpo"]["beta"])),
        ("simpo", Simpo(GIVEN["simpo"]["beta"], GIVEN["simpo"]["gamma"])),
    ],
)
def test_losses_of_pairs_are_those_of_trl(both, name, objective):
    check(objective.loss(both, pairs()), both.policy, EXACT[name])


@pytest.mark.parametrize("name", ["kto", "kto_swapped"])
def test_losses_of_single_ratings_are_those_of_trl(both, name):
    """The batch's kl is 0 in the first case and 0.43 in the second."""
    if name == "kto_swapped":
        both.policy, both.base = both.base.requires_grad_(True), both.policy.requires_grad_(False)
    parts = [(part, one) for part in ("chosen", "rejected") for one in PAIRS]
    rows = [(one["prompt"], one[part]) for part, one in parts]
    goods = np.array([part == "chosen" for part, _ in parts], np.int64)
    check(Kto(GIVEN["kto"]["beta"]).loss(both, batch_of(rows, goods)), both.policy, EXACT[name])


def test_the_loss_of_a_reward_model_is_that_of_trl():
    model = llama("LlamaForSequenceClassification")
    check(Reward().loss(model, pairs()), model, EXACT["reward"])


def test_the_loss_of_stale_answers_is_that_of_the_formula(both):
    """The answers are of the base; some ratios are beyond the clip."""
    given = GIVEN["grpo"]
    rows = []
    for prompt in range(4):
        for answer in range(4):
            one = PAIRS[(prompt + answer) % 8]
            rows.append((PAIRS[prompt]["prompt"], one["chosen" if answer % 2 else "rejected"]))
    rewards = np.array(given["rewards"], np.float32)
    batch = batch_of(rows)
    with torch.no_grad():
        logps = base_module.token_logps(both.base, batch)[0].numpy()
    made = batch_of(
        rows, kind=AnswerBatch, advantages=advantages_of(rewards).ravel(), metrics={}, logps=logps
    )
    check(Grpo(given["kl"], 0.0).loss(both, made), both.policy, EXACT["grpo_old_is_reference"])
