"""Losses of fine-tuning against closed forms, and what they leave untouched."""

import importlib.util
import json
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsl_async.config.settings_tuning import TuneConfig

if not importlib.util.find_spec("peft"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import tiny_base

from fsl_async.learn.models.adapters import adapters_off, apply_lora
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.objectives import Classify, Dpo, Lm, base, objective_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import tokenize

LABELS = ("no", "yes")


def tokens(tmp_path, rows, objective="lm"):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = objective == "classify"
    tokenizer = tiny_base.tokenizer(encoder=encoder)
    read = Records(path, objective, LABELS)
    return tokenize(read, tokenizer, objective, context=64, labels=LABELS)


class Favors(nn.Module):
    """Favors one token everywhere: its logit is `logit`, those of all others are 0."""

    def __init__(self, token, logit, classes=tiny_base.VOCABULARY):
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(float(logit)))
        self.token, self.classes = token, classes
        self.is_off = False
        self.calls = []

    def forward(self, input_ids, attention_mask, **_):
        """Logits as of transformers."""
        self.calls.append((self.training, self.is_off))
        logits = torch.zeros(*input_ids.shape, self.classes)
        logits[..., self.token] = 0.0 if self.is_off else self.logit
        return SimpleNamespace(logits=logits)

    def nats(self, token):
        """Loss of one prediction."""
        norm = math.log(self.classes - 1 + math.exp(self.logit.item()))
        return norm - (self.logit.item() if token == self.token else 0.0)


class FavorsLabel(Favors):
    """The same for labels."""

    def forward(self, input_ids, attention_mask, **more):
        """Logits of the whole text."""
        found = super().forward(input_ids, attention_mask, **more)
        return SimpleNamespace(logits=found.logits[:, 0])


class Repeats(Favors):
    """Favors the token that it is given, as the next one."""

    def forward(self, input_ids, attention_mask, **_):
        """Logits as of transformers."""
        given = nn.functional.one_hot(input_ids, self.classes)
        return SimpleNamespace(logits=given * self.logit)


@contextmanager
def off(model):
    model.is_off = True
    yield
    model.is_off = False


LETTER = tiny_base.tokenizer()("a", add_special_tokens=False)["input_ids"][0]


def test_every_trained_token_weighs_the_same(tmp_path):
    """A mean of samples' means would weigh a short completion's tokens more."""
    rows = [{"prompt": "p", "completion": "a"}, {"prompt": "pp", "completion": "aaab"}]
    data = tokens(tmp_path, rows)
    model = Favors(LETTER, 3.0)
    right, wrong = model.nats(LETTER), model.nats(0)
    # "a", end; "aaab", end
    wanted = (4 * right + 3 * wrong) / 7
    found = Lm().loss(model, data.batch([0, 1]))
    assert found.weight == 7 == data.tokens
    assert found.loss.item() == pytest.approx(wanted, rel=1e-6)
    assert found.metrics == {"loss": found.loss.item()}
    found.loss.backward()
    # d loss / d logit = p - share of the letter
    probability = math.exp(-right)
    assert model.logit.grad.item() == pytest.approx(probability - 4 / 7, rel=1e-5)
    sums = Lm().sums(model, data.batch([0, 1]))
    assert sums.counts.tolist() == [2, 5]
    assert sums.losses.tolist() == pytest.approx([right + wrong, 3 * right + 2 * wrong], rel=1e-6)
    for size in (1, 2):
        assert Lm().evaluate(model, data, size=size) == {
            "eval_loss": pytest.approx(wanted, rel=1e-6)
        }


def test_a_token_is_predicted_from_those_before_it(tmp_path):
    """Without the shift a model would learn to repeat what it is given."""
    model = Repeats(LETTER, 2.0)
    data = tokens(tmp_path, [{"text": "aab"}])
    # After begin, a, a, b come a, a, b and the end: one is a repetition.
    repeated, other = model.nats(LETTER), model.nats(0)
    found = Lm().sums(model, data.batch([0]))
    assert found.losses.tolist() == pytest.approx([repeated + 3 * other], rel=1e-6)


def test_labels(tmp_path):
    """Accuracy, loss and shares of labels, over batches of different size."""
    rows = [{"text": "x" * n, "label": n % 3 == 0} for n in range(1, 6)]
    data = tokens(tmp_path, [{**row, "label": int(row["label"])} for row in rows], "classify")
    model = FavorsLabel(0, 1.5, classes=2)
    wanted = (4 * model.nats(0) + model.nats(1)) / 5
    assert Classify(("no", "yes")).evaluate(model, data, size=2) == {
        "eval_loss": pytest.approx(wanted, rel=1e-6),
        "eval_accuracy": 0.8,
        "eval_share_no": 0.8,
        "eval_share_yes": 0.2,
    }
    found = Classify(("no", "yes")).loss(model, data.batch([2, 3]))
    assert (found.weight, found.metrics["accuracy"]) == (2, 0.5)
    assert found.loss.item() == pytest.approx((model.nats(0) + model.nats(1)) / 2, rel=1e-6)


def test_preferences_are_measured_from_the_reference(tmp_path, monkeypatch):
    """The margin is that of the model less that of the reference, over whole completions."""
    rows = [{"prompt": "p", "chosen": "aab", "rejected": "ba"}, {"prompt": "p", "chosen": "b",
            "rejected": "aaaa"}]  # fmt: skip
    data = tokens(tmp_path, rows, "dpo")
    model = Favors(LETTER, 2.0)
    right, wrong, other = model.nats(LETTER), model.nats(0), math.log(model.classes)
    monkeypatch.setattr(base, "adapters_off", off)
    objective = Dpo(0.1)
    # In the first sample chosen has one token more, "a"; the reference gives every token `other`.
    first = -right + other
    # In the second rejected has three tokens more; four of its five are "a", end is not.
    second = -2 * wrong + 4 * right + wrong - 3 * other
    wanted = [math.log1p(math.exp(-0.1 * margin)) for margin in (first, second)]
    found = objective.sums(model, data.batch([0, 1]))
    assert found.losses.tolist() == pytest.approx(wanted, rel=1e-5)
    assert found.hits.tolist() == [1.0, 0.0]
    assert objective.loss(model, data.batch([0, 1])).weight == 2
    assert objective.evaluate(model, data) == {
        "eval_loss": pytest.approx(sum(wanted) / 2, rel=1e-5),
        "eval_accuracy": 0.5,
    }


def test_the_reference_is_computed_once_for_a_sample(tmp_path, monkeypatch):
    """It is a fourth of the work of a step, and it must be without dropout."""
    rows = [{"prompt": "p", "chosen": "a" * n, "rejected": "b"} for n in range(1, 5)]
    data = tokens(tmp_path, rows, "dpo")
    model = Favors(LETTER, 0.0).train()
    monkeypatch.setattr(base, "adapters_off", off)
    objective = Dpo(0.1)
    objective.loss(model, data.batch([0, 1]))
    assert model.calls == [(False, True), (True, False)]
    model.calls.clear()
    found = objective.loss(model, data.batch([0, 1]))
    assert model.calls == [(True, False)]
    assert found.loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert found.metrics["accuracy"] == 0.5, "a tie: model and reference are equal"
    model.calls.clear()
    objective.loss(model, data.batch([1, 2]))
    objective.loss(model, data.batch([2, 1]))
    assert model.calls == [(False, True), (True, False), (True, False)]
    other = tokens(tmp_path, [{"prompt": "p", "chosen": "bbbbbbb", "rejected": "a"}], "dpo")
    model.calls.clear()
    objective.loss(model, other.batch([0]))
    assert (False, True) in model.calls, "row 0 of other data is another sample"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_base.write_llama(tmp_path_factory.mktemp("llama"))


def test_padding_changes_no_loss(tmp_path, llama):
    """Samples share batches with longer ones."""
    rows = [{"prompt": "abc"[:n], "completion": "hello" * n} for n in (1, 2, 3)]
    data = tokens(tmp_path, rows)
    model = load_base(llama, "lm").model
    with torch.no_grad():
        together = Lm().sums(model, data.batch([0, 1, 2])).losses
        alone = torch.cat([Lm().sums(model, data.batch([n])).losses for n in range(3)])
    assert torch.allclose(together, alone, rtol=1e-5)


def test_preference_training_raises_held_out_margins(tmp_path, llama):
    """The share of positive margins rises above one half, and the base stays what it was."""
    rows = [
        {"prompt": f"{n:02}", "chosen": "good" + "!" * (n % 3), "rejected": "bad" + "?" * (n % 2)}
        for n in range(24)
    ]
    train, held = tokens(tmp_path, rows, "dpo").split(0.25)
    model = load_base(llama, "lm").model
    batch = train.batch([0])
    ids = torch.from_numpy(batch.ids)
    before = model(input_ids=ids).logits.detach()
    apply_lora(model, rank=4, seed=1)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_B" in name)
    objective = objective_of(TuneConfig(method="lora", objective="dpo"))
    start = objective.evaluate(model, held)
    assert start["eval_accuracy"] == 0.5
    assert start["eval_loss"] == pytest.approx(math.log(2), rel=1e-6)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], 1e-2)
    batches = train.shuffled(6, seed=0, name="a")
    for _ in range(10):
        objective.loss(model, next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert objective.evaluate(model, held)["eval_accuracy"] > 0.8
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_B" in name for name in trained), "peft makes both factors train again"
    assert not torch.equal(model(input_ids=ids).logits, before)
    with adapters_off(model):
        assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.equal(model(input_ids=ids).logits, before)


def test_evaluation_leaves_modes_and_gradients(tmp_path, llama):
    """It runs between steps of training."""
    data = tokens(tmp_path, [{"text": "hello"}])
    model = load_base(llama, "lm").model.train()
    model.lm_head.eval()
    Lm().evaluate(model, data)
    assert model.training
    assert model.model.training
    assert not model.lm_head.training
    assert all(weight.grad is None for weight in model.parameters())


def test_the_settings_choose_the_objective():
    """Each name of tune.objective has its class."""
    for name, kind in (("lm", Lm), ("classify", Classify), ("dpo", Dpo)):
        assert type(objective_of(TuneConfig(objective=name, labels="a,b"))) is kind
