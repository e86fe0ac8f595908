"""Trains adapters without federation, and measures them and the run on held-out records.

Training is the built-in task, with plain LoRA of the run's rank.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fsl_async.config.load import load, resolved, to_dict
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.task import train
from fsl_async.learn.tune.tokens import tokenize
from fsl_async.learn.tune.tuned import Tuned
from fsl_async.tools.kept_run import KeptRun

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


def compare(job: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Do a job. `tell` gets a record for each model: name, loss in nats a token, steps, tokens.

    job: the run's settings (overrides) and directory, the base's folder, the test's records, jobs
    with name, data and steps, and whether to measure the base and the run.
    """
    tables, kept = tables_of(job), KeptRun(Path(job["run"]))
    tune = TuneConfig(**tables["tune"])
    tuned = Tuned(Path(tune.base), tune, tables["run"]["seed"], kept.manifest)
    tested = tokenize(
        Records(job["test"], tune.objective),
        tuned.base.tokenizer,
        tune.objective,
        context=min(tune.context, tuned.base.context or tune.context),
        trained_on=tune.trained_on,
    )
    objective = objective_of(tune)

    def report(name: str, model: torch.nn.Module, **more: Any) -> None:
        loss = objective.evaluate(model, tested, size=16)["eval_loss"]
        tell({"name": name, "loss": loss, **more})

    if job["measures"]:
        with tuned.adapters.disabled():
            report("base", tuned.model, test_tokens=tested.tokens, test_records=len(tested))
        newest = kept.load(kept.versions()[-1])
        assert newest is not None
        tuned.load(newest.vector)
        report("federated", tuned.model, version=newest.record.version)
    for one in job["jobs"]:
        fed = alone(tables, one["name"], one["data"], one["steps"])
        assert fed.model is not None
        report(one["name"], fed.model, steps=one["steps"], tokens=int(fed.status()["tokens"]))
