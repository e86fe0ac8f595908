"""Federated tuning in one process and a few lines: what a run of nodes must compute.

Sites train one after the other from the version's factors; a version is made by the rule's `merge`,
module by module, or by the weighted mean. No codec, no network, no files.
"""

import numpy as np
import torch

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models.adapters import Adapters
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import tokenize
from fsl_async.store.adapters import Current, Draw, Factors, adapter_modules, adapter_rule_named
from fsl_async.store.adapters import Site as Trained

RATE = 1e-2


class Site:
    """One site: its model, its records, its optimizer."""

    def __init__(self, name, folder, data, tune, *, rank, seed, batch):
        self.name, self.tune, self.batch = name, tune, batch
        self.rule = adapter_rule_named(tune.rule)
        base = load_base(folder, tune.objective, labels=tune.label_names, seed=seed)
        records = Records(data, tune.objective, tune.label_names)
        tokens = tokenize(
            records,
            base.tokenizer,
            tune.objective,
            context=min(tune.context, base.context or tune.context),
            trained_on=tune.trained_on,
            labels=tune.label_names,
        )
        self.rank = rank
        self.model = base.model.train()
        self.adapters = Adapters(
            self.model, tune, self.rule, seed=seed, heads=base.drawn, site_rank=rank
        )
        self.weights = ModelWeights(self.model, self.adapters.view)
        self.objective = objective_of(tune)
        self.batches = tokens.shuffled(batch, seed=seed, name=name)
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self):
        return torch.optim.AdamW(self.adapters.trained(), lr=RATE, weight_decay=0.0)

    def vector(self):
        """Its weights."""
        found = np.empty(self.weights.layout.values, np.float32)
        self.weights.copy_out(found)
        return found

    def train_round(self, version, vector, steps):
        """Return its weights after a round from `vector`, and the tokens that it trained."""
        self.weights.copy_in(vector)
        self.adapters.begin_version(version)
        if self.rule.changes_basis:
            self.optimizer = self._new_optimizer()
        tokens = 0
        trained = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for _ in range(steps):
            loss, count, _ = self.objective.loss(self.model, next(self.batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            tokens += count
        return self.vector(), tokens


def mean_of(vectors, tokens):
    """The weighted mean, float64."""
    shares = np.array(tokens, np.float64) / sum(tokens)
    return sum(share * vector for share, vector in zip(shares, vectors, strict=True))


def tuned(**settings):
    """The table [tune] of a run."""
    return TuneConfig(method="lora", **settings)


class Products:
    """Merges by a product rule, module by module, and keeps what it owes."""

    def __init__(self, manifest, tune, seed):
        self._rule, self._scale, self._seed = adapter_rule_named(tune.rule), tune.scale, seed
        self._layout = adapter_modules(manifest, self._rule)
        self._owed = {}

    def merge(self, version, weights, trained, ranks):
        """Return the version after `weights`: trained is (weights, tokens) of each site."""
        vectors, tokens = zip(*trained, strict=True)
        shares = np.array(tokens, np.float64) / sum(tokens)
        new = mean_of(vectors, tokens)
        for module in self._layout.modules:
            made = self._rule.merge(
                Current(_factors(module, weights), None, self._owed.get(module.name)),
                [
                    Trained(share, rank, _factors(module, vector))
                    for share, rank, vector in zip(shares, ranks, vectors, strict=True)
                ],
                self._scale,
                Draw(self._seed, version, module.index),
            )
            self._owed[module.name] = made.owed
            for spec, values in ((module.a, made.factors.a), (module.b, made.factors.b)):
                new[spec.offset :][: spec.values] = values.ravel()
            if module.patch is not None:
                spec = module.patch
                dense = made.patch.b.T @ made.patch.a
                before = weights[spec.offset :][: spec.values]
                new[spec.offset :][: spec.values] = before + dense.ravel()
        return new.astype(np.float32)


def dense_products(manifest, vector):
    """All products of a vector of factors, float64, one after the other."""
    found = (_factors(module, vector) for module in adapter_modules(manifest).modules)
    return np.concatenate([(one.b.T @ one.a).ravel() for one in found])


def _factors(module, vector):
    return Factors(
        *(
            vector[spec.offset :][: spec.values].reshape(spec.shape).astype(np.float64)
            for spec in (module.a, module.b)
        )
    )
