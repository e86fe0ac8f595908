"""The loss of a run's last checkpoint on held-out text. Imports torch, so import it late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from fsl_async.errors import RunDirError
from fsl_async.files.files import Files
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.pretrain import evaluate, open_corpus
from fsl_async.learn.models.gpt import GPT, Tables, gpt_config
from fsl_async.store.checkpoint import Checkpoints
from fsl_async.store.errors import Damage
from fsl_async.store.reading import read_version

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
    files = Files()
    checkpoints = Checkpoints(files, run_dir)
    versions = checkpoints.versions()
    if not versions:
        raise RunDirError(f"{run_dir} has no checkpoint to evaluate")
    try:
        read = read_version(files, checkpoints, versions[-1], weights.manifest)
    except Damage as damage:
        raise RunDirError(f"{run_dir}: version {versions[-1]} is damaged: {damage}") from None
    weights.copy_in(read.weights)
    return read.record
