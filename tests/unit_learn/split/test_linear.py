"""Every method on a linear model, against its formulas in NumPy in float64."""

import numpy as np
import pytest
import torch
from split_lockstep import start
from torch import nn

from fsl_async.learn.models.cuts import split, whole
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.alignment import AlignSettings
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.server import ServerSettings
from fsl_async.roles.split.methods import METHODS, SplitRules, method_of

INPUTS, CUT, OUTPUTS = 5, 4, 3
RATE, MOMENTUM = 0.05, 0.5
UPLOAD_EVERY, ALIGN_EVERY, PASSES, ALIGN_RATE = 2, 2, 3, 0.02
SHARES = {"a": 3.0, "b": 2.0, "c": 1.0}
ROUNDS, BATCHES, SAMPLES = 3, 3, 4
ROUNDING = ROUNDS * BATCHES * len(SHARES) * np.finfo(np.float32).eps
"""One rounding for each batch that may follow another: sums round at the size of their terms, so it
is relative to a tensor's typical weight, also where the result is small."""


class Weight:
    """A matrix under gradient descent with momentum."""

    def __init__(self, value):
        self.value, self.speed = value.copy(), None

    def move(self, gradient, rate=RATE, momentum=MOMENTUM):
        """Do one step."""
        self.speed = gradient if self.speed is None else momentum * self.speed + gradient
        self.value = self.value - rate * self.speed


def pull_to_labels(z, weight, y):
    """Return the gradients of mean((z w - y)^2) by w and by z."""
    scale = 2 / y.size
    rest = z @ weight - y
    return scale * z.T @ rest, scale * rest @ weight.T


def align(auxiliary, server, z, y):
    """Do gradient descent on || g(A) - g(S) ||^2 with g(W) = c (z W - y) W'.

    Its derivative is 2c (z' E A + E' (z A - y)).
    """
    target = pull_to_labels(z, server, y)[1]
    scale = 2 / y.size
    for _ in range(PASSES):
        error = pull_to_labels(z, auxiliary.value, y)[1] - target
        rest = z @ auxiliary.value - y
        gradient = 2 * scale * (z.T @ error @ auxiliary.value + error.T @ rest)
        auxiliary.move(gradient, ALIGN_RATE, 0.0)


def formulas(name, c, s, a, data):
    """Return the method's name -> its weights after three rounds in which b misses the second."""
    clients = {site: Weight(c) for site in SHARES}
    ends = {site: Weight(s) for site in SHARES}  # FedAvg's upper parts, or SplitFed V1's replicas
    server = Weight(s)
    auxiliaries = {site: Weight(a) for site in SHARES}
    aligned = {site: Weight(a) for site in SHARES}
    buffers = {site: [] for site in SHARES}
    last = None
    for number in range(ROUNDS):
        present = [site for site in SHARES if not (number == 1 and site == "b")]
        for site in present:
            if name == "sl" and last:
                clients[site].value = clients[last].value
            for step, (x, y) in enumerate(data[site][number]):
                z = x @ clients[site].value
                if name in {"sl", "splitfed-v1", "splitfed-v2", "fedavg"}:
                    top = ends[site] if name in {"splitfed-v1", "fedavg"} else server
                    gradient, back = pull_to_labels(z, top.value, y)
                    top.move(gradient)
                else:
                    if step % UPLOAD_EVERY == 0:
                        server.move(pull_to_labels(z, server.value, y)[0])
                        buffers[site].append((z, y))
                    if name == "fsl-sage" and step == 0 and number % ALIGN_EVERY == 0:
                        stored = [np.concatenate(each) for each in zip(*buffers[site], strict=True)]
                        align(aligned[site], server.value, *stored)
                        auxiliaries[site].value = aligned[site].value
                    gradient, back = pull_to_labels(z, auxiliaries[site].value, y)
                    if name == "cse-fsl":
                        auxiliaries[site].move(gradient)
                clients[site].move(x.T @ back)
            last = site
        groups = {
            "sl": [],
            "splitfed-v1": [clients, ends],
            "splitfed-v2": [clients],
            "fedavg": [clients, ends],
            "cse-fsl": [clients, auxiliaries],
            "fsl-sage": [clients],
        }[name]
        total = sum(SHARES[site] for site in present)
        for group in groups:
            mean = sum(SHARES[site] / total * group[site].value for site in present)
            for weight in group.values():
                weight.value = mean
    top = ends["a"] if name in {"splitfed-v1", "fedavg"} else server
    found = {f"client {site}": clients[site].value for site in SHARES} | {"server": top.value}
    if name in {"cse-fsl", "fsl-sage"}:
        found |= {f"auxiliary {site}": auxiliaries[site].value for site in SHARES}
    return found


@pytest.mark.parametrize("name", METHODS)
def test_linear_models_move_by_the_formulas(name, difference):
    """A wrong sign, scale, order or share of a method fails here."""
    rng = np.random.default_rng(7)
    c, s, a = (
        rng.normal(size=shape) * 0.5 for shape in ((INPUTS, CUT), (CUT, OUTPUTS), (CUT, OUTPUTS))
    )
    data = {
        site: [
            [
                (rng.normal(size=(SAMPLES, INPUTS)), rng.normal(size=(SAMPLES, OUTPUTS)))
                for _ in range(BATCHES)
            ]
            for _ in range(ROUNDS)
        ]
        for site in SHARES
    }
    model = nn.Sequential(nn.Linear(INPUTS, CUT, bias=False), nn.Linear(CUT, OUTPUTS, bias=False))
    auxiliary = nn.Linear(CUT, OUTPUTS, bias=False)
    with torch.no_grad():
        for layer, value in zip([*model, auxiliary], (c, s, a), strict=True):
            layer.weight.copy_(torch.from_numpy(value.T))
    spec = OptimizerSpec("sgd", RATE, momentum=MOMENTUM)
    settings = ServerSettings(
        spec,
        nn.functional.mse_loss,
        align=AlignSettings(PASSES, optimizer=OptimizerSpec("sgd", ALIGN_RATE)),
    )
    run = start(
        method_of(SplitRules(name, upload_every=UPLOAD_EVERY, align_every=ALIGN_EVERY)),
        whole(model) if name == "fedavg" else split(model, 0),
        SHARES,
        spec,
        auxiliary=auxiliary,
        loss=nn.functional.mse_loss,
        server=settings,
        shares=SHARES,
    )
    for number in range(ROUNDS):
        run.round(
            {
                site: [
                    Batch(torch.from_numpy(x).float(), torch.from_numpy(y).float())
                    for x, y in data[site][number]
                ]
                for site in SHARES
                if not (number == 1 and site == "b")
            }
        )
    wanted = formulas(name, c, s, a, data)
    got = {}
    for site, client in run.clients.items():
        layers = [each.weight.detach().numpy().T for each in client.model.body]
        got[f"client {site}"] = layers[0]
        if name == "fedavg":
            got["server"] = layers[1]
        if client.auxiliary is not None and f"auxiliary {site}" in wanted:
            got[f"auxiliary {site}"] = client.auxiliary.weight.detach().numpy().T
    if run.server is not None:
        (layer,) = run.server.common.model
        got["server"] = layer.weight.detach().numpy().T
    assert difference(got, wanted, least=1.0) <= ROUNDING
    start_values = {"client a": c, "server": s}
    assert difference({key: wanted[key] for key in start_values}, start_values) > 1e-2
