"""Buffers that follow from weights: spectral norm after a merge, batch norm measured anew."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.statistics import SpectralNorms, recalibrate


def old_kind(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return spectral_norm(layer)


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, old_kind])
def test_spectral_norm_divides_by_the_norm_of_the_merged_weights(wrap):
    """The mean of unit vectors had a norm of 0.53, and eval() divided by 0.29 of the true value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), wrap(nn.Conv2d(3, 5, 2)), wrap(nn.Linear(8, 9)))
    weights = ModelWeights(model)
    norms = SpectralNorms(model, weights.layout)
    base = np.zeros(weights.layout.values, np.float32)
    weights.copy_out(base)
    rng = np.random.default_rng(0)
    base[: weights.layout.weights] += rng.normal(size=weights.layout.weights)
    base[weights.layout.weights :] *= 0.5  # what a mean of different unit vectors is like
    weights.take(base)
    norms.restore()
    model.eval()
    for layer, inputs in ((model[1], torch.zeros(1, 3, 2, 2)), (model[2], torch.zeros(1, 8))):
        layer(inputs)  # the older kind computes its weight here
        matrix = layer.weight.detach().flatten(1)
        assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1.0, abs=0.02)
    sent = np.zeros_like(base)
    model.train()
    model[2](torch.randn(2, 8))  # training moves vectors of its own
    weights.copy_out(sent)
    norms.write_to(sent)
    other = np.zeros_like(base)
    weights.take(base)
    norms.restore()
    weights.copy_out(other)
    assert np.array_equal(sent[weights.layout.weights :], other[weights.layout.weights :])
    units = [one for one in weights.layout.tensors if one.is_buffer]
    assert len(units) == 4
    for one in units:
        unit = sent[one.offset : one.offset + one.values]
        assert np.linalg.norm(unit) == pytest.approx(1.0, abs=1e-5)


def test_vectors_that_are_not_exchanged_stay_the_clients_own():
    """A list of patterns may leave them out."""
    model = parametrizations.spectral_norm(nn.Linear(3, 3))
    weights = ModelWeights(model, ["parametrizations.weight.original"])
    norms = SpectralNorms(model, weights.layout)
    before = model.parametrizations.weight[0]._u.clone()
    norms.restore()
    norms.write_to(np.zeros(9, np.float32))
    assert torch.equal(model.parametrizations.weight[0]._u, before)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 2))


def test_recalibrate_measures_the_mean_over_batches():
    """As torch.optim.swa_utils.update_bn, which knows tensors and pairs only."""
    batches = [torch.randn(16, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    model, expected = network().eval(), network()
    torch.optim.swa_utils.update_bn(batches, expected)
    assert recalibrate(model, [batches[0], (batches[1], 7), {"input": batches[2]}]) == 3
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(model[1], name), getattr(expected[1], name))
    assert model[1].momentum == 0.1
    assert model[1].num_batches_tracked == 0, "it counts batches that trained"
    assert not any(part.training for part in model.modules())


def test_recalibrate_leaves_a_model_as_it_was_after_an_error():
    """Half of a measurement is worse than none."""
    model = network()
    model[1].running_var.fill_(3.0)
    for batches, says in (([], "no batches"), ([torch.ones(2, 5)], None)):
        with pytest.raises(TaskError if says else RuntimeError, match=says):
            recalibrate(model, batches)
        assert model[1].running_var.tolist() == [3.0] * 8
        assert model[1].momentum == 0.1
    with pytest.raises(TaskError, match="no batch norm"):
        recalibrate(nn.Linear(2, 2), [])
