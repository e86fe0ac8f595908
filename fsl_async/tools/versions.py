"""Evaluates the versions of a run from its directory, while it goes on or later. Imports torch.

    run_dir/evaluations.jsonl    one JSON object a line: version, tokens, of ("weights" or "mean"),
                                 data, loss, perplexity, bits_per_byte, seconds, and what else
                                 one's own function returns

The parameter server takes no part in it: it reads the checkpoints, with cores of its own.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fsl_async.errors import RunDirError, TaskError, UsageError, disk_words
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.pretrain import evaluate, is_bytes_of_text, open_corpus
from fsl_async.learn.models.gpt import GPT, Tables, gpt_config
from fsl_async.learn.user_code import load_function, own_failure
from fsl_async.observe.evaluations import EVALUATIONS
from fsl_async.store.book.records import VersionRecord
from fsl_async.store.model.manifest import Manifest
from fsl_async.tools.kept_run import KeptRun, Loaded

Measure = Callable[["NDArray[np.float32]"], Mapping[str, float]]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class VersionEvaluator:
    """Evaluates versions of one run and keeps the results.

    Attributes: data, the name of what is evaluated on; summary, a line about records, or "".

    data: text to evaluate on, by its held-out tail; None: as the run's clients without --data.
    limit_bytes: of it. own: file.py:function that takes named tensors (fp32, on the CPU) and
    returns numbers by name, among them "loss"; for runs of other models than the built-in one.
    tokenizer: of a run that has one. base: of a run that tunes one; `data` is then records, all of
    which are evaluated on. columns: of the records, as `--columns` names them.

    Raises RunDirError, TaskError, DataError.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        data: str | None,
        limit_bytes: int,
        own: str | None,
        base: Path | None = None,
        columns: str = "",
        tokenizer: str | None = None,
    ) -> None:
        self._run = KeptRun(run_dir)
        self._measure: Measure
        self.summary = ""
        if own is not None:
            self._measure, self.data = _own(own, self._run.manifest), own
        elif self._run.settings().get("tune", {}).get("method", "none") != "none":
            self._measure, self.data, self.summary = _tuned(self._run, base, data, columns)
        else:
            self._measure, self.data = _built_in(self._run, data, tokenizer, limit_bytes)

    def versions(self) -> list[int]:
        """The versions that are kept, oldest first."""
        return self._run.versions()

    def load(self, version: int, of: str = "weights") -> Loaded | None:
        """Read a version; None if it was removed meanwhile, or has no mean.

        of: "weights" or "mean", of the run's late versions. Raises RunDirError for damage.
        """
        return self._run.load(version, of)

    def evaluate(self, loaded: Loaded) -> dict[str, Any]:
        """Evaluate a version and keep the result. A loss that is not finite is None there."""
        begun = time.monotonic()
        found = {name: _finite(value) for name, value in self._measure(loaded.vector).items()}
        loss = found["loss"]
        # Of labels and preferences it would mean nothing.
        has_perplexity = loss is not None and "accuracy" not in found
        row = found | {
            "version": loaded.record.version,
            "tokens": loaded.record.tokens_total,
            "of": loaded.of,
            "data": self.data,
            "perplexity": math.exp(min(loss, 700.0))
            if loss is not None and has_perplexity
            else None,
            "seconds": round(time.monotonic() - begun, 3),
        }
        self._keep(row)
        return row

    def _keep(self, row: Mapping[str, Any]) -> None:
        path = self._run.run_dir / EVALUATIONS
        try:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunDirError(f"cannot write {path}: {disk_words(error)}") from None


def _built_in(
    run: KeptRun, data: str | None, tokenizer: str | None, limit_bytes: int
) -> tuple[Measure, str]:
    """Loss of the built-in model on held-out text, and the name of the text."""
    tables = run.settings()
    model_table = tables.get("model", {})
    if model_table.get("family", "gpt") != "gpt":
        raise TaskError(
            f"this run trains {model_table['family']}: give --task file.py:function, which takes"
            " the weights by name and returns {'loss': ...}"
        )
    if data is not None:
        tables["data"] = {**tables.get("data", {}), "path": data}
    if tokenizer is not None:
        tables["data"] = {**tables.get("data", {}), "tokenizer": tokenizer}
    config = gpt_config(tables)
    model = GPT(config)
    weights = ModelWeights(model)
    if weights.manifest.fingerprint != run.manifest.fingerprint:
        raise TaskError(
            "this run trains another model than the built-in one: give --task file.py:function,"
            " which takes the weights by name and returns {'loss': ...}"
        )
    named = str(tables.get("data", {}).get("path") or "the source of Python's library")
    if not is_bytes_of_text(tables):
        return _of_tokens(model, weights, tables, limit_bytes), named
    corpus = open_corpus(tables, config.context)

    def measure(vector: NDArray[np.float32]) -> Mapping[str, float]:
        weights.copy_in(vector)
        loss = evaluate(model, corpus, limit_bytes=limit_bytes)
        return {"loss": loss, "bits_per_byte": loss / math.log(2.0)}

    return measure, named


def _of_tokens(model: GPT, weights: ModelWeights, tables: Tables, limit_bytes: int) -> Measure:
    """Loss on held-out texts by the run's tokens."""
    from fsl_async.learn.client.token_data import measured_tokens, open_held_out

    source, coder = open_held_out(tables)

    def measure(vector: NDArray[np.float32]) -> Mapping[str, float]:
        weights.copy_in(vector)
        found = measured_tokens(model, source, coder, limit_bytes)
        return {name.removeprefix("eval_"): value for name, value in found.items()}

    return measure


def _tuned(
    run: KeptRun, base: Path | None, data: str | None, columns: str
) -> tuple[Measure, str, str]:
    """Metrics of a tuned base on records, the records' name, and a line about them."""
    if base is None or data is None:
        raise UsageError(
            "this run tunes a base model: give --base MODEL, and --data RECORDS to evaluate on"
        )
    from fsl_async.learn.tune.base import Tuned
    from fsl_async.learn.tune.objectives import objective_of
    from fsl_async.learn.tune.records import Records
    from fsl_async.learn.tune.tokens import tokenize

    tune = run.tuning()
    records = Records(data, tune.objective, tune.label_names, columns=columns)
    tuned = Tuned(base, tune, int(run.settings()["run"]["seed"]), run.manifest)
    context = min(tune.context, tuned.base.context or tune.context)
    tokens = tokenize(
        records,
        tuned.base.tokenizer,
        tune.objective,
        context=context,
        trained_on=tune.trained_on,
        labels=tune.label_names,
    )
    objective = objective_of(tune)

    def measure(vector: NDArray[np.float32]) -> Mapping[str, float]:
        tuned.load(vector)
        found = objective.evaluate(tuned.model, tokens)
        return {name.removeprefix("eval_"): value for name, value in found.items()}

    return measure, data, tokens.summary


def _own(text: str, manifest: Manifest) -> Measure:
    """What the user's function returns for the weights."""
    function = load_function("task", text, ("weights",))

    def measure(vector: NDArray[np.float32]) -> Mapping[str, float]:
        flat = torch.from_numpy(vector)
        named = {
            one.name: flat[one.offset : one.offset + one.values].view(one.shape)
            for one in manifest.tensors
        }
        try:
            found: Any = function(named)
        except Exception as error:  # noqa: BLE001 - of the user's code; others go on
            raise own_failure(error) or error from None
        try:
            return {"loss": float(found["loss"])} | {str(k): float(v) for k, v in found.items()}
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            raise TaskError(
                f"task {text!r} must return numbers by name, among them 'loss'"
            ) from None

    return measure


def load_last(run_dir: Path, weights: ModelWeights) -> VersionRecord:
    """Load the newest version of a parameter server, and check it. Raises RunDirError."""
    run = KeptRun(run_dir)
    if run.manifest.tensors != weights.manifest.tensors:
        raise RunDirError(f"{run_dir} holds the versions of another model")
    read = run.chosen(None)
    weights.copy_in(read.vector)
    return read.record
