"""Trains adapters without federation, and measures them and the run on held-out records.

Training is the built-in task, with plain LoRA of the run's rank.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fsl_async.config.load import load, resolved, to_dict
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.tune.base import Base, load_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.task import train
from fsl_async.learn.tune.tokens import Tokenized, tokenize
from fsl_async.tools.evaluation import load_last

Tables = dict[str, dict[str, Any]]


def tables_of(job: Mapping[str, Any]) -> Tables:
    """The run's configuration, with the base's folder."""
    tables = to_dict(resolved(load(None, job["overrides"])))
    tables["tune"] = {**tables["tune"], "base": job["base"]}
    return tables


def alone(tables: Tables, name: str, data: str, steps: int) -> LocalFed:
    """Train `steps` steps on the records of a file, by the built-in task."""
    rank = TuneConfig(**tables["tune"]).adapter_rank
    own = {
        **tables,
        "data": {**tables["data"], "path": data},
        # What a rule changes between versions has no meaning in one process.
        "tune": {**tables["tune"], "rule": "fedit", "rank": rank},
        # A process that knows its end trains best with a rate that falls towards it.
        "train": {**tables["train"], "schedule": "wsd"},
    }
    context = ClientContext(name, seed=tables["run"]["seed"], config=own, log=lambda _: None)
    fed = LocalFed(context, steps=steps)
    train(fed)
    return fed


def federated(tables: Tables, run_dir: str) -> tuple[torch.nn.Module, dict[str, int]]:
    """The base with the adapters of the run's newest version, its number, and its values."""
    context = ClientContext("evaluation", seed=tables["run"]["seed"], config=tables)
    fed = LocalFed(context, steps=1)
    base = _base(tables)
    fed.lora(base.model, heads=base.drawn)
    assert fed.adapters is not None
    weights = ModelWeights(base.model, fed.adapters.view)
    record = load_last(Path(run_dir), weights)
    return base.model, {"version": record.version, "values": weights.layout.values}


def _base(tables: Tables) -> Base:
    tune = TuneConfig(**tables["tune"])
    return load_base(tune.base, tune.objective, labels=tune.label_names, seed=tables["run"]["seed"])


def _test_records(tables: Tables, base: Base, path: str) -> Tokenized:
    tune = TuneConfig(**tables["tune"])
    context = min(tune.context, base.context) if base.context else tune.context
    return tokenize(
        Records(path, tune.objective),
        base.tokenizer,
        tune.objective,
        context=context,
        trained_on=tune.trained_on,
    )


def compare(job: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Do a job. `tell` gets a record for each model: name, loss in nats a token, steps, tokens.

    job: the run's settings (overrides), the base's folder, the test's records, jobs with name, data
    and steps, and perhaps the run's directory, to measure the base and the run.
    """
    tables = tables_of(job)
    base = _base(tables)
    tested = _test_records(tables, base, job["test"])
    objective = objective_of(TuneConfig(**tables["tune"]))

    def report(name: str, model: torch.nn.Module, **more: Any) -> None:
        loss = objective.evaluate(model, tested, size=16)["eval_loss"]
        tell({"name": name, "loss": loss, **more})

    if "run" in job:
        report("base", base.model, test_tokens=tested.tokens, test_records=len(tested))
        model, facts = federated(tables, job["run"])
        report("federated", model, **facts)
    for one in job["jobs"]:
        fed = alone(tables, one["name"], one["data"], one["steps"])
        assert fed.model is not None
        report(one["name"], fed.model, steps=one["steps"], tokens=int(fed.status()["tokens"]))
