"""The loss of a run's last checkpoint on held-out text. Imports torch, so import it late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from fsl_async.errors import RunDirError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.pretrain import evaluate, open_corpus
from fsl_async.learn.models.gpt import GPT, Tables, gpt_config
from fsl_async.tools.kept_run import KeptRun

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.store.records import VersionRecord

EVALUATED_BYTES = 1 << 15


@frozen
class Evaluated:
    """A checkpoint and its loss in nats per byte."""

    version: int
    digest: str
    loss: float


def evaluate_last(run_dir: Path, tables: Tables) -> Evaluated:
    """Evaluate the newest checkpoint, in the built-in model, on the held-out tail of the data.

    tables: the run's configuration ([model], [data]). The checkpoint is verified first.
    Raises RunDirError, DataError.
    """
    # On a shared machine, threads that spin for each other can cost minutes instead of a second.
    torch.set_num_threads(1)
    config = gpt_config(tables)
    model = GPT(config)
    record = load_last(run_dir, ModelWeights(model))
    corpus = open_corpus(tables, config.context)
    loss = evaluate(model, corpus, limit_bytes=EVALUATED_BYTES)
    return Evaluated(record.version, record.digest, loss)


def load_last(run_dir: Path, weights: ModelWeights) -> VersionRecord:
    """Load the newest version of a parameter server, and check it. Raises RunDirError."""
    run = KeptRun(run_dir)
    if run.manifest.tensors != weights.manifest.tensors:
        raise RunDirError(f"{run_dir} holds the versions of another model")
    read = run.chosen(None)
    weights.copy_in(read.vector)
    return read.record
