"""The configuration of one method's run, and the joined model on the held-out set. Imports torch.

Every node builds its parts from the configuration alone, so all methods begin with the same
weights, and a client draws the same batches under every method.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsl_async.config.load import load, parse_override
from fsl_async.config.presets import PUBLISHED
from fsl_async.config.settings import Config
from fsl_async.config.split_rules import split_method
from fsl_async.errors import UsageError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.data.facts import described, facts_of
from fsl_async.learn.split import build, lockstep, samples, weights
from fsl_async.roles.split.methods import METHODS
from fsl_async.tools.compare.choices import GPT, Choices
from fsl_async.tools.evaluation import load_last


def config_of(choices: Choices, method: str) -> Config:
    """The run's configuration. Raises ConfigError, DataError in one line."""
    wanted: dict[str, Any] = {
        "run.name": f"compare-{method}",
        "run.seed": choices.seed,
        "run.rounds": choices.versions(method),
        "listen.address": "tcp://127.0.0.1:0",
        "sync.clients": choices.clients,
        "sync.min_clients": choices.clients,
        "session.heartbeat_every_s": 1.0,
        "session.expire_after_s": 30.0,
        "store.keep_versions": 1,
        "data.path": choices.data,
        "split.method": method,
        "split.mode": choices.mode,
        "split.cut": choices.cut,
        "split.listen": "tcp://127.0.0.1:0",
        "split.optimizer": choices.optimizer,
        "split.samples": choices.samples,
        "split.upload_every": choices.upload_every,
        "split.align_every": choices.align_every,
        "split.align_passes": choices.align_passes,
        "split.align_rate": choices.align_rate,
        "split.buffer_samples": choices.buffer_samples,
        "split.up": choices.up,
        "split.down": choices.down,
        "split.models": choices.models,
        "split.in_flight": choices.in_flight,
        "split.checkpoint_every": 1 << 20,
        "codec.step_log2": choices.step_log2,
        "train.batch": choices.batch,
        "train.learning_rate": choices.learning_rate,
        "train.weight_decay": choices.weight_decay,
        "train.threads": 1,
        "train.device": "cpu",
    }
    if choices.is_text:
        wanted["model.preset"] = choices.model.removeprefix(GPT)
    else:
        wanted["model.family"] = choices.model
    if choices.sizes:
        wanted["model.sizes"] = choices.sizes
    if choices.alpha:
        wanted |= {"data.partition": "dirichlet", "data.alpha": choices.alpha}
    if METHODS[method].auxiliary != "none":
        wanted["split.auxiliary"] = choices.auxiliary
    given = _parsed(choices, wanted)
    for key in PUBLISHED.get(str(given.get("split.preset")), {}):
        if key != "split.method" and _OPTIONS.get(key) not in choices.given:
            wanted.pop(key, None)
    sets = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in wanted.items()]
    return described(load(None, [*sets, *choices.sets], _OPTIONS))


def _parsed(choices: Choices, wanted: Iterable[str]) -> dict[str, Any]:
    """Return `choices.sets` by key; raise UsageError for one that an option or `compare` makes.

    `data.partition` may be set beside --alpha.
    """
    given = dict(map(parse_override, choices.sets))
    for key in given:
        if key in wanted and key != "data.partition":
            raise UsageError(f"--set {key}: is set by {_OPTIONS.get(key, 'compare')}")
    partition = given.get("data.partition", "dirichlet")
    if choices.alpha and not str(partition).startswith("dirichlet"):
        raise UsageError(
            f"--alpha: data.partition = {partition} has no shares; leave one of them out"
        )
    return given


def used(choices: Choices, method: str) -> dict[str, Any]:
    """Return the choices by name, with the values of a preset where it has replaced them."""
    found, config = choices.as_dict(), config_of(choices, method)
    preset = dict(map(parse_override, choices.sets)).get("split.preset")
    for key in PUBLISHED.get(str(preset), {}):
        table, _, name = key.partition(".")
        choice = "model" if key == "model.family" else name
        if choice in found:
            found[choice] = getattr(getattr(config, table), name)
    return found


_OPTIONS = {
    "run.rounds": "--rounds",
    "run.seed": "--seed",
    "sync.clients": "--clients",
    "data.path": "--data",
    "data.alpha": "--alpha",
    "model.preset": "--model",
    "model.family": "--model",
    "model.sizes": "--sizes",
    "split.cut": "--cut",
    "split.method": "--methods",
    "split.mode": "--mode",
    "split.auxiliary": "--auxiliary",
    "split.optimizer": "--optimizer",
    "split.samples": "--samples",
    "split.upload_every": "--upload-every",
    "split.align_every": "--align-every",
    "split.align_passes": "--align-passes",
    "split.align_rate": "--align-rate",
    "split.buffer_samples": "--buffer-samples",
    "split.in_flight": "--in-flight",
    "split.up": "--format",
    "split.down": "--format",
    "train.batch": "--batch",
    "train.learning_rate": "--learning-rate",
    "train.weight_decay": "--weight-decay",
}
"""The option of the command by the setting that it makes."""


def check(choices: Choices, method: str) -> None:
    """Build everything once, so that errors are raised before anything is started.

    Raises FslError in one line.
    """
    config = config_of(choices, method)
    build.build_parts(config, at_client=False)
    facts = facts_of(config)
    samples.open_samples(config, facts, (0, choices.clients))
    next(iter(samples.held_out(config, facts, 1)))


class Scorer:
    """Scores each version.

    X_c of the parameter server and x_s of the split server, on held-out data.

    Called where the version is durable and no client has it yet, so that no client trains
    meanwhile. Replicas (SplitFed V1) are averaged for it with the shares of the version's own
    average.
    """

    def __init__(
        self, config: Config, ps_dir: Path, turns: int, emit: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._ps_dir, self._turns, self._emit = ps_dir, turns, emit
        self._parts = parts = build.build_parts(config, at_client=False)
        method = split_method(config)
        options = build.client_options(config)
        part = build.client_part(method, parts.model, options, parts.auxiliary)
        kept = {name: part.part(name) for name in method.averaged}
        self._client = ModelWeights(kept["client"] if len(kept) == 1 else nn.ModuleDict(kept))
        self._batches = list(samples.held_out(config, facts_of(config)))

    def __call__(
        self, version: int, server_weights: Callable[[], dict[str, Vector]] | None = None
    ) -> None:
        """Score a version; a failure is reported, not raised."""
        if version < 1 or version % self._turns:
            return
        at = time.monotonic()
        try:
            score = self._score(server_weights)
        except Exception as error:  # noqa: BLE001 - the run itself is fine
            self._emit({"event": "failed", "text": f"version {version} was not scored: {error}"})
            return
        self._emit(
            {
                "event": "scored",
                "version": version,
                "at": at,
                "seconds": time.monotonic() - at,
                "accuracy": score.accuracy,
                "loss": score.loss,
                "samples": score.count,
            }
        )

    def _score(self, server_weights: Callable[[], dict[str, Vector]] | None) -> lockstep.Score:
        record = load_last(self._ps_dir, self._client)
        server = self._parts.model.server
        if server_weights is not None and server is not None:
            found = server_weights()
            shares = {
                one.key.client: float(one.delta.tokens)
                for one in record.merged
                if one.key.client in found
            }
            vector = found[""]
            if shares:
                vector = weights.average([found[name] for name in shares], list(shares.values()))
            weights.load(server, vector)
        torch.set_num_threads(1)
        return lockstep.evaluate(self._parts.model, self._batches)
