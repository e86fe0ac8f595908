"""What differs with the model on a GPU: copies across devices, and the built-in task."""

import copy

import numpy as np
import pytest
import torch
from client_sides import Sides

from fsl_async.learn.client import pretrain
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.context import ClientContext, choose_device
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SMALL = GPTConfig(layers=2, width=64, heads=4, context=32)


def vector(weights):
    out = np.full(weights.manifest.values, np.nan, np.float32)
    assert weights.copy_out(out)
    return out


@pytest.fixture
def config(tmp_path):
    line = b"line %d of a text that is easy to learn\n"
    (tmp_path / "text.txt").write_bytes(b"".join(line % (i % 10) for i in range(600)))
    return {
        "model": {"preset": "0.5m", "layers": 2, "width": 64, "heads": 2, "context": 32},
        "data": {"path": str(tmp_path / "text.txt"), "holdout": 0.02},
        "train": {"batch": 8, "warmup_steps": 5},
    }


def context(config, log=lambda _: None):
    return ClientContext("alice", device=choose_device("auto"), config=config, log=log)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vector_and_a_rebase_have_the_bits_of_the_cpu(dtype):
    """Clients with and without a GPU are in one run, and digests are compared."""
    here = GPT(SMALL).to(dtype)
    there = copy.deepcopy(here).to("cuda")
    old = vector(ModelWeights(here))
    assert np.array_equal(old, vector(ModelWeights(there)))
    new = old + np.random.default_rng(0).normal(0, 1e-2, old.size).astype(np.float32)
    reference = old * np.float32(0.999)
    for model in (here, there):
        ModelWeights(model).rebase(new, reference)
    assert np.array_equal(vector(ModelWeights(here)), vector(ModelWeights(there)))
    saved = ModelWeights(there).saved()
    ModelWeights(there).copy_in(new)
    ModelWeights(there).restore(saved)
    assert np.array_equal(vector(ModelWeights(here)), vector(ModelWeights(there)))


def test_the_built_in_task_learns_on_the_gpu(config):
    """With Muon, bf16 products and the schedule; only the weights' device differs."""
    lines = []
    fed = LocalFed(context(config, lines.append), steps=60)
    pretrain.train(fed)
    assert {weight.device.type for weight in fed.model.parameters()} == {"cuda"}
    assert fed.history[-1][1]["loss"] < 2.0
    assert lines[0].startswith("eval_loss ")


def test_a_version_reaches_a_model_on_the_gpu(config):
    """Snapshot, full fetch and rebase while the built-in task trains."""
    sides = Sides(publishes=True)
    learner = sides.exchange
    fed = Fed(sides.training, context(config))
    real_step, real_attach = fed.step, fed.attach
    models, seen = [], {}

    def attach(model, **options):
        real_attach(model, **options)
        models.append(model)
        seen[0] = vector(ModelWeights(model))

    def step(**fields):
        again = real_step(**fields)
        done = sides.training.meter.steps
        seen[done] = vector(ModelWeights(models[0]))
        if done == 3:
            learner.begin_fetch("full", 1)
            learner.put_fetch(1, 0, learner.encode_initial(0))
            learner.request_rebase(1, learner.finish_fetch(1), discard=True)
        if done == 6:
            learner.stop()
        return again

    fed.step, fed.attach = step, attach
    pretrain.train(fed)
    assert learner.version == 1
    assert not np.array_equal(seen[3], seen[0])
    assert np.array_equal(seen[4], seen[0])
