"""FSL-SAGE's alignment against a double backward, its scale, its buffer, its side effects."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fsl_async.learn.split.alignment import Alignment
from fsl_async.learn.split.model_parts import (
    AlignSettings,
    OptimizerSpec,
    ServerPart,
    ServerPartOptions,
)
from fsl_async.learn.split.smashed import IGNORED, ModelPartMisused, Smashed, cross_entropy

SGD = OptimizerSpec("sgd", 0.5)


def dense(seed=0, inner=7):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, inner), nn.Tanh(), nn.Linear(inner, 4))


def server_of(model):
    return ServerPart(model, ServerPartOptions(OptimizerSpec("adam", 1e-3)))


def smashed(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return Smashed(
        torch.randn(count, 6, generator=rng), torch.randint(0, 4, (count,), generator=rng)
    )


def by_hand(auxiliary, server, batches, passes, rate=0.5):
    """Take the objective's gradient by functional derivatives instead of a kept graph."""
    names = [name for name, _ in auxiliary.named_parameters()]
    values = [weight.detach().clone() for weight in auxiliary.parameters()]

    def input_gradient(model, weights, z, y):
        def loss(inner):
            logits = torch.func.functional_call(model, dict(weights), inner)
            return F.nll_loss(logits.log_softmax(-1), y)

        return torch.func.grad(loss)(z)

    fixed = {name: weight.detach() for name, weight in server.named_parameters()}
    targets = [input_gradient(server, fixed, z, y) for z, y in batches]
    for _ in range(passes):
        for (z, y), target in zip(batches, targets, strict=True):

            def objective(*weights, z=z, y=y, target=target):
                named = zip(names, weights, strict=True)
                return ((input_gradient(auxiliary, dict(named), z, y) - target) ** 2).sum()

            grads = torch.func.grad(objective, tuple(range(len(values))))(*values)
            values = [value - rate * grad for value, grad in zip(values, grads, strict=True)]
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("size", [9, 4])
def test_alignment_is_gradient_descent_on_the_squared_difference(size, difference):
    """Against functional derivatives; the last minibatch of 4 of 9 has another size and the same
    scale.
    """
    server, net = dense(1), dense(2)
    parts = [smashed(5, 1), smashed(4, 2)]
    z = torch.cat([part.values for part in parts]).split(size)
    y = torch.cat([part.labels for part in parts]).split(size)
    wanted = by_hand(net, server, list(zip(z, y, strict=True)), passes=4)
    alignment = Alignment(net, AlignSettings(4, 100, size, SGD))
    for part in parts:
        alignment.remember(part)
    errors = alignment.align(server_of(server))
    found = {name: weight.detach() for name, weight in net.named_parameters()}
    assert difference(found, wanted) <= 1e-5
    assert 0 < errors[-1] < errors[0]


def noisy(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4)
    )


def test_one_sample_that_is_left_over_is_not_alone_where_there_is_batch_norm():
    """Batch norm cannot take a last minibatch of one, as with a buffer of 9 in minibatches of 4."""
    found = []
    for size in (4, 5):
        torch.manual_seed(3)
        alignment = Alignment(noisy(2), AlignSettings(1, 100, size, SGD))
        parts = smashed(9, 5)
        alignment.remember(parts.part(0, 8))
        alignment.remember(parts.part(8, 9))
        alignment.align(server_of(noisy(1)))
        found.append([one.samples for one in alignment._minibatches(server_of(noisy(1)))])
    assert found == [[4, 5], [5, 4]]


def test_alignment_leaves_the_server_as_it_was():
    """The published code changes batch norm's statistics, and so the split server's predictions."""
    model, net = noisy(1), noisy(2)
    half = server_of(model)
    half.step(smashed(8), wants_gradient=False)
    before = {name: value.clone() for name, value in half.state().items()}
    running = net[1].running_mean.clone()
    rng = torch.get_rng_state()
    alignment = Alignment(net, AlignSettings(3, 100, 8, SGD))
    alignment.remember(smashed(8, 5))
    alignment.align(half)
    after = half.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(net[1].running_mean, running)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(part.training for part in (*model.modules(), *net.modules()))
    assert all(norm.track_running_stats for norm in (model[1], net[1]))


def test_targets_normalize_by_the_batch_and_have_no_dropout():
    """They are those of the training step whose gradient is estimated, without its noise."""
    model = noisy(1)
    half = server_of(model)
    part = smashed(8)
    plain = copy.deepcopy(model)
    plain[2] = nn.Identity()
    z = part.values.clone().requires_grad_()
    wanted = torch.autograd.grad(F.cross_entropy(plain.train()(z), part.labels), z)[0]
    assert torch.equal(half.gradient_at(part), wanted)
    assert not torch.allclose(
        wanted, torch.autograd.grad(F.cross_entropy(plain.eval()(z), part.labels), z)[0]
    )


def test_the_buffer_keeps_the_newest_samples():
    """It is the split server's memory per client, so it is bounded."""
    alignment = Alignment(dense(), AlignSettings(buffer_samples=7))
    parts = [smashed(5, seed) for seed in range(3)]
    for part in parts:
        alignment.remember(part)
    assert alignment.samples == 7
    kept = torch.cat([each.values for each in alignment._buffer])
    assert torch.equal(kept, torch.cat([part.values for part in parts])[-7:])
    labels = torch.cat([each.labels for each in alignment._buffer])
    assert torch.equal(labels, torch.cat([part.labels for part in parts])[-7:])
    # a cut batch must not keep the memory of the full one
    assert alignment._buffer[0].values.untyped_storage().nbytes() == 2 * 6 * 4
    alignment.remember(smashed(20, 9))
    assert alignment.samples == 7
    assert len(alignment._buffer) == 1


def test_ignored_labels_count_neither_in_targets_nor_in_estimates():
    """The published code drops the loss mask here, so that padding takes part."""
    head, net = nn.Linear(6, 5), nn.Linear(6, 5)
    z = torch.randn(2, 4, 6)
    labels = torch.randint(0, 5, (2, 4))
    labels[0, 2:] = IGNORED
    labels[1, 3] = IGNORED
    half = server_of(head)
    target = half.gradient_at(Smashed(z, labels))
    assert not target[labels == IGNORED].any()
    noise = torch.where((labels == IGNORED)[..., None], torch.randn(2, 4, 6) * 50, z)
    results = []
    for values in (z, noise):
        own = copy.deepcopy(net)
        alignment = Alignment(own, AlignSettings(3, 10, 10, SGD))
        alignment.remember(Smashed(values, labels))
        alignment.align(half)
        results.append(own.weight.detach())
    assert torch.equal(*results)
    assert not torch.equal(results[0], net.weight)


def test_sequences_of_other_lengths_are_padded_with_labels_that_ask_for_nothing(difference):
    """Padding is not sent, so the buffer is ragged. Joined, it gives what the parts give."""
    head, net = nn.Linear(6, 5), nn.Linear(6, 5)
    first = Smashed(torch.randn(2, 4, 6), torch.randint(0, 5, (2, 4)))
    second = Smashed(torch.randn(1, 2, 6), torch.randint(0, 5, (1, 2)), torch.tensor([2]))
    half = server_of(_OfSequences(head))
    own = copy.deepcopy(net)
    alignment = Alignment(_OfSequences(own), AlignSettings(2, 10, 10, SGD))
    for part in (first, second):
        alignment.remember(part)
    alignment.align(half)
    flat_z = torch.cat([first.values.flatten(0, 1), second.values[0]])
    flat_y = torch.cat([first.labels.flatten(), second.labels[0]])
    wanted = by_hand(net, head, [(flat_z, flat_y)], passes=2)
    assert difference(dict(own.state_dict()), wanted) <= 1e-5


class _OfSequences(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, values, lengths=None):
        assert lengths is not None
        return self.inner(values)


def test_an_alignment_goes_on_where_it_was_saved():
    """A restarted split server makes the same auxiliary models."""
    server = server_of(dense(1))
    settings = AlignSettings(3, 12, 5, OptimizerSpec("adam", 0.05))
    first = Alignment(dense(2), settings)
    for seed in range(3):
        first.remember(smashed(5, seed))
    first.align(server)
    second = Alignment(dense(3), settings)
    second.restore(first.state())
    for each in (first, second):
        each.remember(smashed(4, 7))
        each.align(server)
    assert first.samples == second.samples == 12
    assert torch.equal(torch.from_numpy(first.export()), torch.from_numpy(second.export()))


def test_alignment_without_data_does_nothing_and_labels_are_needed():
    """A relaunched client may ask before it has sent anything."""
    net = dense(2)
    before = copy.deepcopy(net.state_dict())
    alignment = Alignment(net, AlignSettings(3))
    assert alignment.align(server_of(dense(1))) == []
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with pytest.raises(ModelPartMisused, match="without labels"):
        alignment.remember(Smashed(torch.zeros(1, 6), None))
    assert cross_entropy(torch.zeros(1, 4), torch.zeros(1).long()).item() == pytest.approx(1.386294)
