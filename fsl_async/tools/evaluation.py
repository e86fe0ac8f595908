"""The loss of a run's last checkpoint on held-out text. Imports torch, so import it late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from fsl_async.errors import RunDirError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.pretrain import evaluate, open_corpus
from fsl_async.learn.models.gpt import GPT, Tables, gpt_config
from fsl_async.store.checkpoint import WEIGHTS, Checkpoint, Checkpoints, open_flat
from fsl_async.store.errors import Damage
from fsl_async.store.files import Files

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.store.manifest import Manifest

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
    checkpoint = load_last(run_dir, ModelWeights(model))
    corpus = open_corpus(tables, config.context)
    loss = evaluate(model, corpus, limit_bytes=EVALUATED_BYTES)
    return Evaluated(checkpoint.record.version, checkpoint.record.digest, loss)


def load_last(run_dir: Path, weights: ModelWeights) -> Checkpoint:
    """Verify and load the newest checkpoint of a parameter server. Raises RunDirError."""
    files = Files()
    checkpoints = Checkpoints(files, run_dir)
    versions = checkpoints.versions()
    if not versions:
        raise RunDirError(f"{run_dir} has no checkpoint to evaluate")
    try:
        checkpoint = checkpoints.verify(versions[-1], weights.manifest)
        vector = read_vector(files, checkpoint, WEIGHTS, weights.manifest)
    except Damage as damage:
        raise RunDirError(f"{run_dir}: version {versions[-1]} is damaged: {damage}") from None
    assert vector is not None, "every version has weights"
    weights.copy_in(vector)
    return checkpoint


def read_vector(
    files: Files, checkpoint: Checkpoint, name: str, manifest: Manifest
) -> NDArray[np.float32] | None:
    """Read a vector of a version, float32 (manifest.values,); None where the version has none.

    Raises Damage, OSError.
    """
    reader = open_flat(files, checkpoint, name, manifest)
    if reader is None:
        return None
    vector = np.empty(manifest.values, np.float32)
    try:
        for index in range(manifest.chunks):
            start, stop = manifest.chunk_range(index)
            reader.read_into(index, vector[start:stop])
    finally:
        reader.close()
    return vector
