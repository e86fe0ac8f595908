"""Private gradients: clipped by record, with the planned noise, within the budget.

Skipped without the extras `dp` and `hf`, but for what needs neither.
"""

import importlib.util
import math
import os
import stat
from statistics import NormalDist

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import nn
from torch.nn import functional

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError, PrivacyError, TaskError, describe
from fsl_async.files import files
from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.models import hf
from fsl_async.learn.models.adapters import Adapters
from fsl_async.learn.tune.privacy import (
    Budget,
    Privacy,
    Spent,
    epsilon_of,
    gaussians,
    noise_for,
    poisson_sample,
)
from fsl_async.roles.sync.delta import FACTS
from fsl_async.store.rules.adapters import adapter_rule_named

needs_opacus = pytest.mark.skipif(
    not importlib.util.find_spec("opacus"), reason="needs the extra dp (opacus)"
)
needs_both = pytest.mark.skipif(
    not (importlib.util.find_spec("opacus") and importlib.util.find_spec("peft")),
    reason="needs the extras dp and hf (opacus, peft)",
)
RECORDS, BATCH, CLIP = 12, 4, 0.5


def seeded(seed=0):
    """Bytes for tests, the same in each run."""
    return np.random.default_rng(seed).bytes


# --- samples and noise ---


def test_each_record_is_drawn_independently_with_the_rate():
    """What the accountant supposes: sizes of batches are binomial, and pairs are uncorrelated."""
    entropy = seeded()
    drawn = np.zeros((4000, 20))
    for row in drawn:
        row[poisson_sample(20, 0.3, entropy)] = 1
    deviation = math.sqrt(0.21 / 4000)
    assert np.abs(drawn.mean(0) - 0.3).max() < 4.5 * deviation
    assert drawn.sum(1).var() == pytest.approx(20 * 0.21, rel=0.15)
    correlations = np.corrcoef(drawn.T) - np.eye(20)
    assert np.abs(correlations).max() < 4.5 / math.sqrt(4000)
    assert (drawn.sum(1) == 0).any()


def test_with_a_rate_of_one_every_record_is_drawn():
    """A site with fewer records than a batch trains on all of them."""
    assert poisson_sample(5, 1.0, lambda n: b"\xff" * n).tolist() == [0, 1, 2, 3, 4]


def test_noise_has_the_standard_distribution():
    """Mean, variance, kurtosis and quantiles of 200,000 values, and no correlation of neighbors."""
    drawn = gaussians(200_001, seeded(1))
    assert drawn.shape == (200_001,)
    assert abs(drawn.mean()) < 0.01
    assert drawn.var() == pytest.approx(1.0, abs=0.015)
    assert (drawn**4).mean() == pytest.approx(3.0, abs=0.1)
    for share in (0.01, 0.25, 0.5, 0.9, 0.999):
        below = (drawn < NormalDist().inv_cdf(share)).mean()
        assert below == pytest.approx(share, abs=4.5 * math.sqrt(share * (1 - share) / 200_001))
    half = len(drawn) // 2
    assert abs(np.corrcoef(drawn[:half], drawn[half : 2 * half])[0, 1]) < 0.015


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_extreme_bytes_give_finite_noise(byte):
    """The logarithm of 0 would be infinite noise."""
    assert np.isfinite(gaussians(7, lambda n: byte * n)).all()


# --- accounting ---


def planned(**more):
    return Spent(run="run", client="a", **more)


def spent_after(tmp_path, noise, rate, steps, *, delta=1e-5, epsilon=100.0):
    wanted = planned(epsilon=epsilon, delta=delta, sample_rate=rate, steps=steps)
    budget = Budget(tmp_path, wanted, lambda _: noise)
    for _ in range(steps):
        budget.charge()
    return budget.spent


def exact_epsilon(mu, delta):
    """Of a Gaussian mechanism of sensitivity mu and deviation 1 (Balle and Wang 2018)."""

    def delta_at(epsilon):
        normal = NormalDist().cdf
        return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)

    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


@needs_opacus
@pytest.mark.parametrize(("noise", "steps"), [(4.0, 1), (8.0, 30), (2.0, 3)])
def test_epsilon_without_sampling_is_the_closed_form(tmp_path, noise, steps):
    """Renyi divergence of Gaussians is a steps / (2 noise^2); the exact value is a bit below."""
    found = epsilon_of(spent_after(tmp_path, noise, 1.0, steps))
    orders = np.linspace(1.01, 200, 200_000)
    closed = (
        orders * steps / (2 * noise**2)
        + np.log1p(-1 / orders)
        - (math.log(1e-5) + np.log(orders)) / (orders - 1)
    ).min()
    assert found == pytest.approx(closed, rel=0.01)
    exact = exact_epsilon(math.sqrt(steps) / noise, 1e-5)
    assert exact < found < 1.25 * exact


@needs_opacus
def test_epsilon_of_sampled_steps_is_the_binomial_sum(tmp_path):
    """At whole orders the divergence of a sampled Gaussian is a finite sum (Mironov 2019)."""
    noise, rate, steps, delta = 1.1, 0.02, 300, 1e-5
    best = math.inf
    for order in range(2, 64):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + k * math.log(rate) + (order - k) * math.log1p(-rate) + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        divergence = steps * float(np.logaddexp.reduce(terms)) / (order - 1)
        slack = math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, divergence + slack)
    found = epsilon_of(spent_after(tmp_path, noise, rate, steps, delta=delta))
    assert found == pytest.approx(best, rel=0.01)


@needs_opacus
@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"), [(6.0, 32 / 2132, 480), (0.1, 0.01, 100), (3.0, 1.0, 20)]
)
def test_the_planned_noise_uses_the_budget_and_no_more(epsilon, rate, steps):
    """Too little noise breaks the promise, too much of it the model."""
    wanted = planned(epsilon=epsilon, delta=1e-5, sample_rate=rate, steps=steps)
    noise = noise_for(wanted)
    counts = (0, 1, steps // 2, steps - 1, steps)
    after = [epsilon_of(evolve(wanted, noise=noise, done=done)) for done in counts]
    assert after[0] == 0
    assert after == sorted(after)
    assert 0.99 * epsilon < after[-1] <= epsilon


@needs_opacus
def test_epsilon_is_never_negative(tmp_path):
    """The bound of one step with much noise and a large delta is: a server would decline it."""
    assert epsilon_of(spent_after(tmp_path, 50.0, 0.01, 1, delta=0.1)) == 0.0


@needs_opacus
def test_a_budget_that_no_noise_keeps_is_refused():
    """Instead of training with noise that only looks large."""
    wanted = planned(epsilon=1e-4, delta=1e-9, sample_rate=0.5, steps=10_000)
    with pytest.raises(PrivacyError, match=r"dp_epsilon = 0\.0001 is less than"):
        noise_for(wanted)


# --- gradients ---


class Causal(nn.Module):
    """A language model of one block, as adapters find it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.lm_head = nn.Linear(6, 11, bias=False)

    def forward(self, ids):
        """Logits of ids (N, T)."""
        hidden = self.embed(ids)
        return self.lm_head(hidden + self.down(torch.tanh(self.up(hidden))))


def adapted(rule="ffa", heads=(), site_rank=3):
    torch.manual_seed(0)
    model = Causal()
    if heads:
        model.classifier = nn.Linear(6, 2)
    tune = TuneConfig(rank=3, scale=2.0, targets="up,down")
    Adapters(model, tune, adapter_rule_named(rule), seed=0, site_rank=site_rank, heads=heads)
    with torch.no_grad():  # B of zeros has gradients all the same; A's would be zero
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    model.train()
    return model


def tokens():
    return torch.randint(0, 11, (RECORDS, 7), generator=torch.Generator().manual_seed(3))


def lm_losses(model, ids):
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1)


def class_losses(model, ids):
    hidden = model.embed(ids)
    pooled = (hidden + model.down(torch.tanh(model.up(hidden)))).mean(1)
    return functional.cross_entropy(model.classifier(pooled), ids[:, 0] % 2, reduction="none")


def pair_losses(model, ids):
    """As of preferences: two sequences for each record, side by side."""
    losses = lm_losses(model, torch.stack((ids, ids.flip(1)), 1).flatten(0, 1))
    return functional.softplus(losses[0::2] - losses[1::2])


def private(folder, model, *, noise=0.0, clip=CLIP, entropy=None, steps=5, rate=BATCH / RECORDS):
    wanted = planned(epsilon=100.0, delta=1e-5, sample_rate=rate, steps=steps)
    budget = Budget(folder, wanted, lambda _: noise)
    return Privacy(
        model, budget, clip=clip, batch=round(rate * RECORDS), entropy=entropy or seeded()
    )


def trained(model):
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


CASES = {"lm": (lm_losses, ()), "pairs": (pair_losses, ())}
CASES["classify"] = (class_losses, ("classifier.weight", "classifier.bias"))


@needs_both
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parts", [1, 3])
def test_without_noise_the_gradient_is_the_mean_of_clipped_ones(tmp_path, case, parts):
    """Each record's gradient, computed alone by plain autograd, clipped over all weights."""
    losses, heads = CASES[case]
    model, ids = adapted(heads=heads), tokens()
    wanted, norms = dict.fromkeys(trained(model), 0.0), []
    for row in range(BATCH + 1):
        alone = torch.autograd.grad(losses(model, ids[row : row + 1])[0], trained(model).values())
        norms.append(math.sqrt(sum(float((one**2).sum()) for one in alone)))
    clip = sorted(norms)[len(norms) // 2]  # some are clipped and some are not
    for row in range(BATCH + 1):
        alone = torch.autograd.grad(losses(model, ids[row : row + 1])[0], trained(model).values())
        factor = min(1.0, clip / norms[row])
        for name, one in zip(wanted, alone, strict=True):
            wanted[name] = wanted[name] + factor * one / BATCH
    privacy = private(tmp_path, model, clip=clip)
    next(privacy.batches())
    for rows in torch.arange(BATCH + 1).chunk(parts):
        privacy.accumulate(losses(model, ids[rows]))
    privacy.noise()
    for name, weight in trained(model).items():
        torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-4, atol=1e-7)
    assert set(trained(model)) == {*heads, *(n for n in trained(model) if "lora_B.site" in n)}


@needs_both
def test_a_record_moves_b_by_no_more_than_the_clip(tmp_path):
    """One of a million times the others' loss, after one step of SGD with rate 1."""
    moved = []
    for scale in (1.0, 1e6):
        model, ids = adapted(), tokens()
        weights = torch.ones(RECORDS)
        weights[0] = scale
        privacy = private(tmp_path / str(scale), model)
        optimizer = torch.optim.SGD(trained(model).values(), lr=1.0)
        before = {name: one.detach().clone() for name, one in trained(model).items()}
        next(privacy.batches())
        privacy.accumulate(weights * lm_losses(model, ids))
        privacy.noise()
        optimizer.step()
        moved.append({name: one.detach() - before[name] for name, one in trained(model).items()})
    apart = math.sqrt(sum(float(((moved[1][n] - moved[0][n]) ** 2).sum()) for n in moved[0]))
    assert apart <= 2 * CLIP / BATCH
    # Alone in its batch it moves B by exactly that, however large its loss is.
    model = adapted()
    privacy = private(tmp_path / "alone", model)
    next(privacy.batches())
    privacy.accumulate(1e6 * lm_losses(model, tokens()[:1]))
    privacy.noise()
    norm = math.sqrt(sum(float((one.grad.double() ** 2).sum()) for one in trained(model).values()))
    assert norm == pytest.approx(CLIP / BATCH, rel=1e-5)
    assert norm <= CLIP / BATCH


@needs_both
def test_a_record_that_is_not_finite_counts_as_none(tmp_path):
    """It would end the training of all sites."""
    grads = []
    for rows, factor in ((slice(0, 3), 1.0), (slice(0, 4), math.inf)):
        model = adapted()
        privacy = private(tmp_path / str(factor), model)
        next(privacy.batches())
        losses = lm_losses(model, tokens()[rows])
        privacy.accumulate(losses * torch.tensor([1.0, 1.0, 1.0, factor][: len(losses)]))
        privacy.noise()
        grads.append([one.grad for one in trained(model).values()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@needs_both
def test_noise_has_the_planned_deviation_also_in_an_empty_batch(tmp_path):
    """Noise x clip / batch in every weight, of heads too; without noise an empty step shows."""
    model = adapted(heads=("classifier.weight",))
    privacy = private(tmp_path, model, noise=3.0, entropy=seeded(5), steps=200)
    drawn = {name: [] for name in trained(model)}
    for _, _ in zip(range(200), privacy.batches(), strict=False):
        privacy.noise()
        for name, weight in trained(model).items():
            drawn[name].append(weight.grad.flatten())
    for name, all_of_it in drawn.items():
        values = torch.cat(all_of_it).double()
        assert values.std().item() == pytest.approx(3.0 * CLIP / BATCH, rel=0.06), name
        assert abs(values.mean().item()) < 5 * 3.0 * CLIP / BATCH / math.sqrt(len(values))


@needs_both
def test_gradients_without_noise_are_nowhere(tmp_path):
    """After accumulate an optimizer finds nothing, and a batch gets its noise once."""
    model = adapted()
    privacy = private(tmp_path, model)
    with pytest.raises(TaskError, match="draw records"):
        privacy.accumulate(torch.zeros(2))
    batches = privacy.batches()
    next(batches)
    privacy.accumulate(lm_losses(model, tokens()))
    assert all(one.grad is None and one.grad_sample is None for one in trained(model).values())
    next(batches)  # what was accumulated before is dropped
    privacy.noise()
    assert all(not one.grad.any() for one in trained(model).values())
    with pytest.raises(TaskError, match="its noise once"):
        privacy.noise()


@needs_both
def test_both_factors_and_batch_norm_are_refused(tmp_path):
    """Noise on both multiplies; statistics of a batch mix its records."""
    with pytest.raises(ConfigError, match=r"lora_A\.site\.weight trains"):
        private(tmp_path, adapted("fedit"))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match=r"tune\.dp_epsilon"):
        private(tmp_path, model)


@needs_both
def test_a_weight_that_is_shared_by_all_records_is_refused(tmp_path):
    """Position embeddings are looked up once for a whole batch: nothing is known by record."""

    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(7, 6)
            self.out = nn.Linear(6, 1)

        def forward(self, values):
            return self.out(values + self.places(torch.arange(7)[None])).sum((1, 2))

    model = Placed().train()
    privacy = private(tmp_path, model)
    next(privacy.batches())
    with pytest.raises((ConfigError, RuntimeError), match=r"places|by record"):
        privacy.accumulate(model(torch.randn(4, 7, 6)))


# --- with a run ---

TABLES = {
    "tune": {"method": "lora", "rule": "ffa", "steps": 4, "dp_epsilon": 3.0, "dp_clip": CLIP},
    "train": {"batch": BATCH},
    "run": {"name": "notes", "rounds": 3, "seed": 1},
}


def local(folder, tables=TABLES):
    lines = []
    context = ClientContext("site-a", config=tables, log=lines.append, privacy_folder=folder)
    return LocalFed(context), lines


@needs_both
def test_a_run_has_rounds_times_steps_and_reports_its_epsilon(tmp_path):
    """Over a relaunch: facts of deltas give epsilon to 1 %, and the thirteenth step is refused."""
    reported, made = [], 0
    for steps in (5, 99):
        model, ids = adapted(), tokens()
        fed, lines = local(tmp_path)
        privacy = Privacy.of(fed, model, RECORDS)
        optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
        noise = privacy.facts()["noise"]
        assert len(lines) == 1
        assert lines[0] == (
            "private training: epsilon 3, delta 1e-05 for each of 12 records, clip 0.5,"
            f" noise {noise:.4g}, step {made} of 12; {tmp_path}/notes@site-a.json"
        )
        try:
            for count, rows in enumerate(privacy.batches(), 1):
                if len(rows):
                    privacy.accumulate(lm_losses(model, ids[rows]))
                privacy.noise()
                optimizer.step()
                made += 1
                reported.append(privacy.facts())
                if count == steps:
                    break
        except PrivacyError as error:
            assert "used up" in error.message  # noqa: PT017
    assert made == 12
    assert set(reported[0]) <= set(FACTS)
    epsilons = [facts["epsilon"] for facts in reported]
    assert epsilons == sorted(epsilons)
    assert 2.97 < epsilons[-1] <= 3.0
    assert [facts["private_steps"] for facts in reported] == list(range(1, 13))
    for facts in (reported[0], reported[-1]):
        from opacus.accountants import PRVAccountant, RDPAccountant

        history = [(facts["noise"], facts["sample_rate"], int(facts["private_steps"]))]
        again, tighter = RDPAccountant(), PRVAccountant()
        again.history, tighter.history = history, history
        assert facts["epsilon"] == pytest.approx(again.get_epsilon(1e-5), rel=0.01)
        assert tighter.get_epsilon(1e-5) < facts["epsilon"] * 1.01


@needs_both
def test_a_private_run_without_rounds_or_folder_is_refused(tmp_path):
    """A server of another release may not have checked it."""
    tables = {**TABLES, "run": {"name": "notes"}}
    with pytest.raises(ConfigError, match=r"needs run\.rounds"):
        Privacy.of(local(tmp_path, tables)[0], adapted(), RECORDS)
    with pytest.raises(TaskError, match="folder"):
        Privacy.of(local(None)[0], adapted(), RECORDS)


@needs_both
@pytest.mark.parametrize("kind", ["causal", "classes"])
def test_it_works_with_models_of_transformers(tmp_path, kind):
    """GPT-2 (Conv1D) and BERT with a new head: the sum of two records is that of each alone."""
    transformers = pytest.importorskip("transformers")
    if kind == "causal":
        sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        model, heads = hf.build("gpt2", sizes | off | {"bos_token_id": 1, "eos_token_id": 2}), ()
    else:
        config = transformers.BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            num_labels=2,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        heads = ("classifier.weight", "classifier.bias")
    tune = TuneConfig(rank=2, scale=2.0)
    Adapters(model, tune, adapter_rule_named("ffa"), seed=0, heads=heads)
    model.train()
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(1))

    def losses(some):
        logits = model(input_ids=some, attention_mask=torch.ones_like(some)).logits
        if kind == "classes":
            return functional.cross_entropy(logits, some[:, 0] % 2, reduction="none")
        return functional.cross_entropy(logits[:, :-1].mT, some[:, 1:], reduction="none").mean(1)

    alone = [
        torch.autograd.grad(losses(ids[i : i + 1])[0], trained(model).values()) for i in (0, 1)
    ]
    privacy = private(tmp_path, model, clip=1e6)
    next(privacy.batches())
    privacy.accumulate(losses(ids))
    privacy.noise()
    assert any(one.grad.any() for one in trained(model).values())
    for (name, weight), first, second in zip(trained(model).items(), *alone, strict=True):
        torch.testing.assert_close(
            weight.grad, (first + second) / BATCH, rtol=1e-4, atol=1e-6, msg=name
        )
    privacy.close()
    assert not any(hasattr(one, "grad_sample") for one in model.parameters())


WANTED = Spent(run="notes", client="site-a", epsilon=6.0, delta=1e-5, sample_rate=0.25, steps=3)


def begun(folder, wanted=WANTED, run="notes", client="site-a", noise=0.7):
    return Budget(folder, evolve(wanted, run=run, client=client), lambda _: noise)


def test_a_relaunch_goes_on_with_the_same_noise_and_count(tmp_path):
    """Noise planned anew for what is left would give another budget."""
    first = begun(tmp_path / "privacy")
    first.charge()
    first.charge()
    again = begun(tmp_path / "privacy", noise=99.0)
    assert again.spent == first.spent
    assert (again.spent.noise, again.spent.done) == (0.7, 2)


def test_nothing_is_spent_beyond_the_plan_by_any_process(tmp_path):
    """Also where the old process of a client lives on beside the new one."""
    one, other = begun(tmp_path), begun(tmp_path)
    one.charge()
    other.charge()
    one.charge()
    for each in (one, other, begun(tmp_path)):
        with pytest.raises(PrivacyError, match="budget of run notes is used up") as caught:
            each.charge()
        assert "\n" not in caught.value.message
        assert describe(caught.value).exit_code == 2


def test_a_longer_run_does_not_get_more_steps(tmp_path):
    """run.rounds may be raised between starts; the noise was made for the first plan."""
    begun(tmp_path)
    again = begun(tmp_path, evolve(WANTED, steps=1000))
    assert again.spent.steps == 3


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sample_rate": 0.5}, "sample_rate"),
        ({"epsilon": 8.0}, "epsilon"),
        ({"delta": 0.1}, "delta"),
    ],
)
def test_other_data_or_another_budget_is_refused(tmp_path, change, name):
    """The noise does not fit them, and a server could ask for more after every restart."""
    begun(tmp_path)
    with pytest.raises(PrivacyError, match=f"planned with {name}"):
        begun(tmp_path, evolve(WANTED, **change))


def test_runs_and_clients_have_budgets_of_their_own(tmp_path):
    """As documented: they add up, and nothing here counts that."""
    begun(tmp_path).charge()
    assert begun(tmp_path, run="other").spent.done == 0
    assert begun(tmp_path, client="site-b").spent.done == 0


@pytest.mark.parametrize("run", ["../notes", "a/b", "", "a@b"])
def test_a_name_of_the_server_leads_to_no_other_file(tmp_path, run):
    """The run's name comes over the network."""
    with pytest.raises(PrivacyError, match="is no name"):
        begun(tmp_path / "privacy", run=run)
    assert not list(tmp_path.iterdir())


def test_a_name_of_dots_stays_in_the_folder(tmp_path):
    """Two dots are a name by its form."""
    assert begun(tmp_path, run="..").path.parent == tmp_path


def flipped(data):
    return data.replace(b'"done":2', b'"done":0')


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda data: data[:40], lambda _: b"", lambda data: data * 100, lambda _: b"\0" * 99],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, damage):
    """What it counted is unknown, so no step may follow: at a start, and in the middle of a run."""
    budget = begun(tmp_path)
    budget.charge()
    budget.charge()
    budget.path.write_bytes(damage(budget.path.read_bytes()))
    for use in (budget.charge, lambda: begun(tmp_path)):
        with pytest.raises(PrivacyError, match="damaged; restore it from a backup") as caught:
            use()
        assert "\n" not in caught.value.message


def test_a_file_that_was_removed_or_is_old_gives_no_steps_back(tmp_path):
    """A process that has counted more than the file keeps its count."""
    budget = begun(tmp_path)
    old = budget.path.read_bytes()
    budget.charge()
    budget.charge()
    budget.path.write_bytes(old)
    budget.charge()
    assert budget.spent.done == 3
    budget.path.unlink()
    with pytest.raises(PrivacyError, match="is gone"):
        budget.charge()


def test_the_file_is_private(tmp_path):
    """How often a site trains on its records is its own affair."""
    before = os.umask(0)
    try:
        budget = begun(tmp_path / "new" / "privacy")
    finally:
        os.umask(before)
    assert stat.S_IMODE(budget.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(budget.path.parent.stat().st_mode) == 0o700


class KilledError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("syncs", range(4))
def test_a_kill_at_any_point_overcounts_by_one_step_at_most(tmp_path, monkeypatch, syncs):
    """A step may be counted and not made, never made and not counted."""
    budget = begun(tmp_path)
    budget.charge()
    calls = []

    def fsync(_):
        calls.append(budget.path.read_bytes())
        if len(calls) > syncs:
            raise KilledError

    monkeypatch.setattr(files.os, "fsync", fsync)
    made = 1 + _charged_before_the_kill(budget)
    monkeypatch.undo()
    counted = begun(tmp_path).spent.done
    assert made <= counted <= made + 1
    assert (made, counted) == [(1, 1), (1, 2), (2, 2), (2, 3)][syncs]


def test_a_count_is_synced_before_and_after_its_rename(tmp_path, monkeypatch):
    """Otherwise a power cut leaves an empty file, or the old count after the step was made."""
    budget = begun(tmp_path)
    order = []
    monkeypatch.setattr(files.os, "fsync", lambda _: order.append(_done(budget.path)))
    budget.charge()
    assert order == [0, 1]


def _charged_before_the_kill(budget):
    for made in range(2):
        try:
            budget.charge()
        except KilledError:
            return made
    pytest.fail("there was no kill")


def _done(path):
    return from_checksummed(path.read_bytes().strip())["done"]
