"""The model's parts alone: late gradients, random numbers, checkpoints, the flat vector,
refusals.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from split_lockstep import start
from split_stand_ins import RunAlone
from torch import nn

from fsl_async.config.settings_training import SplitConfig
from fsl_async.errors import ConfigError
from fsl_async.learn.client import meter as meters
from fsl_async.learn.models.cuts import CutError, in_one, split
from fsl_async.learn.models.forward import Batch, derived_seed
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.learn.split import weights
from fsl_async.learn.split.build import client_part
from fsl_async.learn.split.model_parts import (
    AlignSettings,
    ClientPart,
    ClientPartOptions,
    OptimizerSpec,
    ServerPart,
    ServerPartOptions,
)
from fsl_async.learn.split.remote import SplitTraining
from fsl_async.learn.split.server_training import SplitServer
from fsl_async.learn.split.smashed import IGNORED, ModelPartMisused, Smashed, SmashedRefused
from fsl_async.learn.split.weights import evaluate
from fsl_async.nodes.client.training_watch import HangWatch, Hung
from fsl_async.roles.split.methods import METHODS, method_of
from fsl_async.roles.split.methods.base import Activations, Position

ADAM = OptimizerSpec("adamw", 1e-2)


def net(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(dropout),
        nn.Linear(8, 7),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(7, 4),
    )


def batches(count, seed=0, size=5):
    rng = torch.Generator().manual_seed(seed)
    return [
        Batch(torch.randn(size, 6, generator=rng), torch.randint(0, 4, (size,), generator=rng))
        for _ in range(count)
    ]


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def run_of(name, *, dropout=0.0, seed=0, names="ab", every=2):
    halves = in_one(net(dropout)) if name == "fedavg" else split(net(dropout), 2)
    torch.manual_seed(2)
    extra = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Dropout(dropout), nn.Linear(5, 4))
    settings = ServerPartOptions(ADAM, seed=seed, align=AlignSettings(2, 12, 5))
    return start(
        method_of(SplitConfig(method=name, upload_every=every, align_every=1)),
        halves,
        names,
        ADAM,
        auxiliary=extra,
        seed=seed,
        server=settings,
    )


def states(run):
    found = {}
    for site, client in run.clients.items():
        for part in filter(None, (client.model, client.auxiliary)):
            found |= {f"{site} {k}": v.clone() for k, v in part.state_dict().items()}
    if run.server is not None:
        found |= {f"server {k}": v for k, v in run.server.state().items()}
        for site in run.server.clients:
            found |= {f"for {site} {k}": v for k, v in run.server.state(site).items()}
    return found


def test_a_gradient_that_comes_late_is_that_of_the_weights_it_was_asked_with():
    """With two batches in flight the weights move in between; a graph through moved weights would
    be wrong or an error.
    """
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(body)
    spec = OptimizerSpec("sgd", 0.1)
    client = ClientPart(body, ClientPartOptions(spec, in_flight=2))
    made = batches(4)
    gradients = [torch.randn(5, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    # by hand: the update of batch n uses the weights before the update of batch n - 1
    past = [copy.deepcopy(plain)]
    open_steps = [client.forward(made[0])]
    for number in range(4):
        if number < 3:
            open_steps.append(client.forward(made[number + 1]))
        client.apply(open_steps[number], gradients[number])
        asked = past[max(0, number - 1)]
        asked.zero_grad()
        asked(made[number].inputs).backward(gradients[number])
        with torch.no_grad():
            for weight, old in zip(plain.parameters(), asked.parameters(), strict=True):
                weight.sub_(0.1 * old.grad)
        past.append(copy.deepcopy(plain))
    for found, wanted in zip(body.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_only_so_many_steps_are_open():
    """Each open step holds activations and a copy of the weights."""
    client = ClientPart(net()[:3], ClientPartOptions(ADAM, in_flight=2))
    first, *_ = [client.forward(batch) for batch in batches(2)]
    with pytest.raises(ModelPartMisused, match="2 steps are open at this client, 2 may be"):
        client.forward(batches(1)[0])
    client.drop(first)
    client.forward(batches(1)[0])


@pytest.mark.parametrize("tail", [None, 4])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_one_step_is_the_same_with_and_without_copies(tail, in_flight):
    """Stashed weights save time and are no other method."""
    halves = split(net(), 2, tail)
    server = ServerPart(copy.deepcopy(halves.server), ServerPartOptions(ADAM))
    client = ClientPart(
        halves.client, ClientPartOptions(ADAM, in_flight=in_flight), tail=halves.tail
    )
    plain = net()
    steps = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for batch in batches(3):
        steps.zero_grad()
        F.cross_entropy(plain(batch.inputs), batch.labels).backward()
        steps.step()
        pending = client.forward(batch)
        if tail is None:
            result = server.step(pending.smashed, wants_gradient=True)
            client.apply(pending, result.gradient)
        else:
            waiting = server.forward(pending.without_labels)
            gradient = client.tail_step(pending, waiting.features)
            client.apply(pending, server.backward(waiting, gradient))
    parts = [halves.client, server.model] + ([halves.tail] if tail else [])
    found = [value for part in parts for value in part.state_dict().values()]
    assert all(
        torch.allclose(a, b, rtol=1e-6, atol=0)
        for a, b in zip(found, plain.state_dict().values(), strict=True)
    )


def test_a_u_shape_that_was_overtaken_computes_again():
    """Another client's step moves x_s between features and their gradient; the old graph would be
    wrong.
    """
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh())
    plain = copy.deepcopy(model)
    spec = OptimizerSpec("sgd", 0.1)
    server = ServerPart(model, ServerPartOptions(spec))
    z = [torch.randn(5, 8), torch.randn(5, 8)]
    g = [torch.randn(5, 7), torch.randn(5, 7)]
    first, second = (server.forward(Smashed(values, None)) for values in z)
    found = [server.backward(second, g[1]), server.backward(first, g[0])]
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in (1, 0):
        steps.zero_grad()
        given = z[number].clone().requires_grad_()
        plain(given).backward(g[number])
        steps.step()
        assert torch.allclose(found[1 - number], given.grad)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b)
    assert server.updates == 2


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_run_with_dropout(name):
    """A run is repeatable whatever else drew random numbers; another seed gives another run."""
    results = []
    for seed, disturbance in ((1, 0), (1, 5), (2, 0)):
        run = run_of(name, dropout=0.5, seed=seed)
        for number in range(2):
            torch.rand(disturbance)
            run.round({"a": batches(3, number), "b": batches(2, 9 + number)})
        results.append(states(run))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_every_step_client_and_part_has_dropout_of_its_own():
    """The same mask at every step would train a part of the net only."""
    body = nn.Dropout(0.5)
    body.weight = nn.Parameter(torch.ones(()))
    ones = Batch(torch.ones(1, 64), torch.zeros(1).long())
    masks = []
    for name in "ab":
        client = ClientPart(copy.deepcopy(body), ClientPartOptions(ADAM, name=name, in_flight=4))
        masks += [client.forward(ones).values for _ in range(2)]
    server = ServerPart(copy.deepcopy(body), ServerPartOptions(ADAM), "a")
    masks += [server.forward(Smashed(torch.ones(1, 64), None)).features for _ in range(2)]
    assert all(not torch.equal(a, b) for number, a in enumerate(masks) for b in masks[number + 1 :])
    assert derived_seed(1, "a", 2) != derived_seed(1, "a2")
    assert 0 <= derived_seed(1) < 2**63


@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_where_it_was_saved(name):
    """A restored split server trains on as if it had not been killed."""
    first, second = (run_of(name, dropout=0.5, seed=4) for _ in range(2))
    first.round({"a": batches(3, 1), "b": batches(2, 2)})
    saved = states(first)
    second.clients = copy.deepcopy(first.clients)
    if second.server is not None:
        second.server.restore(first.server.state())
        for site in first.server.clients:
            second.server.restore(first.server.state(site), site)
    second.rounds, second._turn = first.rounds, first._turn
    assert same(states(second), saved)
    for run in (first, second):
        run.round({"a": batches(3, 3), "b": batches(3, 4)})
    assert same(states(first), states(second))


def test_a_state_of_another_model_is_refused():
    """Nothing of it is loaded."""
    state = ServerPart(net()[:3], ServerPartOptions(ADAM)).state()
    other = ServerPart(nn.Sequential(nn.Linear(6, 9)), ServerPartOptions(ADAM))
    with pytest.raises(ModelPartMisused, match="saved server is of another model"):
        other.restore(state)
    with pytest.raises(ModelPartMisused, match="3 values for a part that exchanges 80"):
        ClientPart(nn.Sequential(nn.Linear(7, 10)), ClientPartOptions(ADAM)).load(
            np.zeros(3, np.float32)
        )


@pytest.mark.parametrize(
    ("smashed", "message"),
    [
        (
            Smashed(torch.zeros(2, 9), torch.zeros(2).long()),
            r"shape \(9,\) per sample, the cut has",
        ),
        (Smashed(torch.full((2, 8), float("nan")), torch.zeros(2).long()), "not finite"),
        (Smashed(torch.zeros(0, 8), torch.zeros(0).long()), "empty"),
        (Smashed(torch.zeros(2, 8), torch.zeros(3).long()), "3 labels for 2 samples"),
        (Smashed(torch.zeros(2, 8), torch.tensor([0, 4])), r"int64 in 0 \.\.\. 3, or -100"),
        (Smashed(torch.zeros(2, 8), torch.tensor([0, -1])), r"int64 in 0 \.\.\. 3"),
        (Smashed(torch.zeros(2, 8), torch.zeros(2)), "int64"),
        (Smashed(torch.zeros(2, 8), torch.zeros(2).long(), torch.ones(2).long()), "lengths"),
        (Smashed(torch.zeros(2, 8), None), "without labels"),
    ],
)
def test_what_a_client_sends_is_checked_before_anything_moves(smashed, message):
    """One bad client cannot damage the common model or stop a GPU."""
    half = ServerPart(net()[2:], ServerPartOptions(ADAM, shape=(8,), classes=4))
    before = copy.deepcopy(half.state())
    with pytest.raises(SmashedRefused, match=message):
        half.step(smashed, wants_gradient=True)
    assert same(before, half.state())
    half.step(Smashed(torch.zeros(2, 8), torch.tensor([3, IGNORED])), wants_gradient=False)


def test_what_is_refused_is_not_kept_for_alignment():
    """It would spoil every later target."""
    run = run_of("fsl-sage")
    bad = Activations(Smashed(torch.full((2, 8), torch.inf), torch.zeros(2).long()), False)
    with pytest.raises(SmashedRefused):
        run.method.serve(run.server, "a", bad)
    assert run.server.alignment("a").samples == 0


def test_lengths_are_checked():
    """A mask from wrong lengths would give NaN in attention."""
    half = ServerPart(nn.Linear(3, 4), ServerPartOptions(ADAM, shape=(-1, 3)))
    for lengths in ([0, 2], [1, 6], [1]):
        with pytest.raises(SmashedRefused, match=r"lengths must be one per sample, in 1 \.\.\. 5"):
            half.forward(Smashed(torch.zeros(2, 5, 3), None, torch.tensor(lengths)))
    with pytest.raises(SmashedRefused, match="for no open step"):
        SplitServer(nn.Linear(3, 4), ServerPartOptions()).backward("a", torch.zeros(1))
    pending = half.forward(Smashed(torch.zeros(2, 5, 3), None))
    for bad in (torch.zeros(2, 5, 3), torch.full((2, 5, 4), float("inf"))):
        with pytest.raises(SmashedRefused, match="another shape or is not finite"):
            half.backward(pending, bad)
    assert half.updates == 0


def test_misuse_is_named():
    """Our own mistakes differ from a peer's."""
    client = ClientPart(net()[:3], ClientPartOptions(ADAM))
    pending = client.forward(batches(1)[0])
    with pytest.raises(ModelPartMisused, match=r"shape \(1,\) for activations of \(5, 8\)"):
        client.apply(pending, torch.zeros(1))
    with pytest.raises(ModelPartMisused, match="has no tail"):
        client.tail_step(pending, torch.zeros(1))
    with pytest.raises(ModelPartMisused, match="no auxiliary model"):
        client.auxiliary_step(pending)
    with pytest.raises(ModelPartMisused, match="no part 'auxiliary'"):
        client.export("auxiliary")
    with pytest.raises(ModelPartMisused, match="shares"):
        weights.average([], [])


def test_parts_that_a_method_cannot_use_are_refused():
    """One line, before a run begins."""
    with pytest.raises(CutError, match="sl needs a model that is cut"):
        start(method_of(SplitConfig(method="sl")), in_one(net()), "a", ADAM)
    with pytest.raises(CutError, match="do not cut it"):
        start(method_of(SplitConfig(method="fedavg")), split(net(), 2), "a", ADAM)
    with pytest.raises(CutError, match="it has no U-shape"):
        start(method_of(SplitConfig(method="fsl-sage")), split(net(), 2, 4), "a", ADAM)
    with pytest.raises(ConfigError, match="cse-fsl needs an auxiliary model"):
        start(method_of(SplitConfig(method="cse-fsl")), split(net(), 2), "a", ADAM)


def test_averages_take_shares_of_those_present():
    """An absent client does not pull the model towards zero."""
    one, two = np.float32([1, 10]), np.float32([4, 40])
    assert weights.average([one, two], [1, 3]).tolist() == [3.25, 32.5]
    assert weights.average([one], [0.2]).tolist() == [1, 10]


def test_a_client_that_comes_late_starts_from_the_average():
    """SplitFed V1's replicas are made at a client's first upload."""
    run = run_of("splitfed-v1", names="abc")
    run.round({"a": batches(2), "b": batches(2, 1)})
    server = run.server
    assert np.array_equal(server.part("c").export(), server.common.export())
    assert np.array_equal(server.part("a").export(), server.part("b").export())
    assert not np.array_equal(server.common.export(), weights.export(split(net(), 2).server))


def test_evaluation_counts_what_has_labels_and_changes_nothing():
    """Accuracy and loss as reported are over tokens that count."""
    model = GPT(GPTConfig(layers=2, width=16, heads=2, context=6, vocabulary=9, dropout=0.5))
    halves = split(model.train(), 1)
    x = torch.randint(0, 9, (4, 6))
    labels = torch.randint(0, 9, (4, 6))
    labels[:2, 3:] = IGNORED
    score = evaluate(halves, [Batch(x[:1], labels[:1]), Batch(x[1:], labels[1:])])
    model.eval()
    logits = model(x)
    assert score.loss == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item(), rel=1e-5
    )
    assert score.count == 18
    assert score.accuracy == pytest.approx(((logits.argmax(-1) == labels).sum() / 18).item())
    assert halves.client.training
    assert halves.server.training


def test_a_step_reports_its_loss_and_samples():
    """Progress and metrics use them."""
    for name in METHODS:
        run = run_of(name)
        report = run.step("a", batches(1)[0], Position(0, 0))
        assert report.samples == 5
        assert 0.5 < report.loss < 4


@pytest.mark.parametrize("name", ["fedavg", "cse-fsl", "fsl-sage"])
def test_a_last_batch_of_one_sample_is_left_out_where_batch_norm_cannot_train_on_it(name):
    """As with 33 images in batches of 32."""
    halves = in_one(net()) if name == "fedavg" else split(net(), 0)
    extra = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
    one = method_of(SplitConfig(method=name))
    training = SplitTraining(
        client_part(one, halves, ClientPartOptions(ADAM), extra), one, RunAlone(), classes=4
    )
    training.begin_round(0)
    training.settle_upload((0, 0, 0), None, waits=False)
    for batch in [*batches(2, size=5), *batches(2, size=1), *batches(1, size=2)]:
        training.install(training.part.export("auxiliary")) if name == "fsl-sage" else None
        training.train_batch(batch.inputs, batch.labels)
    assert (training._samples, training._step) == (12, 5)
    assert training._run.meter.report()["left_out"] == 2, "heartbeats tell"
    broken = batches(1, size=2)[0]
    with pytest.raises(RuntimeError):
        training.train_batch(broken.inputs[:, :3], broken.labels)


def test_the_hang_watch_sees_steps_of_split_learning():
    """A client whose GPU hangs within a round is reported; waiting for the split server is no
    hang.
    """
    now = [0.0]

    class Run(RunAlone):
        @property
        def running(self):
            now[0] += 1000.0  # for room in the queue
            return False

        @running.setter
        def running(self, value):
            pass

    class Meter(meters.Meter):
        def count(self, *_):
            now[0] += 2.0

    one = method_of(SplitConfig(method="cse-fsl", in_flight=1, upload_every=1))
    meter = Meter(lambda: now[0])
    training = SplitTraining(
        client_part(one, split(net(), 0), ClientPartOptions(ADAM), nn.Linear(8, 4)),
        one,
        Run(meter=meter),
        classes=4,
    )
    watch = HangWatch(5.0)
    training.begin_round(0)
    for batch in batches(6):
        now[0] += 1.0  # reading data
        training.train_batch(batch.inputs, batch.labels)
    assert now[0] > 5000.0
    assert list(meter.step_times) == [3.0] * 6
    assert watch.look(meter.step_begun, meter.step_times, now[0] + 59.0) is None
    assert watch.look(meter.step_begun, meter.step_times, now[0] + 61.0) == Hung(61.0, 3.0)
    training.end_round()
    assert meter.step_begun is None
    assert len(meter.step_times) == 6
