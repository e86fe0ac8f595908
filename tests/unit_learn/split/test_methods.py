"""Every method on a small CNN with batch norm and on a small GPT, step by step against plain torch.

The plain runs below share only the models' layers with the tested code: they have their own
optimizers, loops, buffers and averages.
"""

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from split_lockstep import start, whole_state
from torch import nn

from fsl_async.config.settings_training import SplitConfig
from fsl_async.learn.models.cuts import in_one, split
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.models.gpt import GPT, GPTConfig, rotary_table
from fsl_async.learn.split.model_parts import AlignSettings, OptimizerSpec, ServerPartOptions
from fsl_async.plan.link import LinkSpec
from fsl_async.plan.methods import ALL_METHODS, PLANNED, Workload, planned_methods
from fsl_async.plan.report import make_plan
from fsl_async.plan.shapes import find_shapes
from fsl_async.roles.split import methods
from fsl_async.roles.split.methods import METHODS, method_of
from fsl_async.tools.sim.settings import SimulationSettings
from fsl_async.tools.sim.split_simulation import SplitSimulation

SHARES = {"a": 3.0, "b": 1.0, "c": 2.0}
ROUNDS, RATE, DECAY = 3, 2e-3, 0.01
UPLOAD_EVERY, ALIGN_EVERY, PASSES, BUFFER = 2, 2, 3, 9
SPEC = OptimizerSpec("adam", RATE, DECAY)
NET_RATE = 5e-3
"""Optimizer of CSE-FSL's auxiliary model, without decay."""


def away(number, site):
    """One client misses one round."""
    return number == 1 and site == "b"


def cnn():
    """Make a CNN with batch norm on both sides of the cut, and no weights whose gradient is only
    rounding.
    """
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Conv2d(6, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def cnn_auxiliary():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(6, 3, 3, 2, 1, bias=False),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


class PlainFront(nn.Module):
    """The GPT before the cut, written out."""

    def __init__(self, model, count):
        super().__init__()
        self.embedding = nn.Parameter(model.embedding.detach().clone())
        self.blocks = copy.deepcopy(model.blocks[:count])

    def forward(self, x):
        """Return the stream of bytes' hidden states."""
        x = F.embedding(x, self.embedding)
        table = rotary_table(x.shape[1], 8)
        for block in self.blocks:
            x = block(x, *table)
        return x


class PlainBack(nn.Module):
    """The GPT behind the cut, with a head that is its own."""

    def __init__(self, model, start, stop):
        super().__init__()
        self.blocks = copy.deepcopy(model.blocks[start:stop])
        self.norm = copy.deepcopy(model.norm)
        self.head = nn.Parameter(model.embedding.detach().clone())

    def forward(self, x):
        """Return the logits of a stream."""
        table = rotary_table(x.shape[1], 8)
        for block in self.blocks:
            x = block(x, *table)
        return self.norm(x) @ self.head.T


def gpt():
    return GPT(GPTConfig(layers=3, width=16, heads=2, context=7, vocabulary=20), seed=5)


def loss_of(outputs, labels):
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1))


def floats(module):
    return {k: v for k, v in module.state_dict().items() if v.is_floating_point()}


def average(modules, shares):
    """Average in float64, rounded once.

    Adam amplifies roundings, so a sum in fp32 here would differ by 1e-5.
    """
    states = [{k: v.double() for k, v in floats(module).items()} for module in modules]
    mean = {name: torch.zeros_like(value) for name, value in states[0].items()}
    for share, state in zip(shares, states, strict=True):
        for name, value in state.items():
            mean[name] += share * value
    return {name: (value / sum(shares)).float() for name, value in mean.items()}


def put(module, state):
    module.load_state_dict(state, strict=False)


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=RATE, weight_decay=DECAY)


def plain_alignment(auxiliary, optimizer, server, buffer):
    """Align in the published form: the complete buffer in one batch.

    Statistics of batch norm are restored; there is no dropout here.
    """
    z = torch.cat([each for each, _ in buffer])[-BUFFER:]
    y = torch.cat([each for _, each in buffer])[-BUFFER:]
    kept = copy.deepcopy(server.state_dict()), copy.deepcopy(auxiliary.state_dict())
    z.requires_grad_()
    target = torch.autograd.grad(loss_of(server(z), y), z)[0]
    server.load_state_dict(kept[0])
    for _ in range(PASSES):
        optimizer.zero_grad()
        estimate = torch.autograd.grad(loss_of(auxiliary(z), y), z, create_graph=True)[0]
        ((estimate - target) ** 2).sum().backward()
        optimizer.step()
    still = {k: v for k, v in kept[1].items() if "running" in k or "tracked" in k}
    auxiliary.load_state_dict(still, strict=False)


def plain(name, front, back, auxiliary, data):
    """Return the clients' fronts, the back to evaluate, and the auxiliary models after three
    rounds.
    """
    fronts = {site: copy.deepcopy(front) for site in SHARES}
    backs = {site: copy.deepcopy(back) for site in SHARES}
    nets = {site: copy.deepcopy(auxiliary) for site in SHARES}
    teachers = {site: copy.deepcopy(auxiliary) for site in SHARES}
    one = copy.deepcopy(back)
    front_steps = {site: adam(fronts[site]) for site in SHARES}
    back_steps = {site: adam(backs[site]) for site in SHARES}
    net_steps = {
        site: torch.optim.Adam(nets[site].parameters(), lr=NET_RATE)
        for site in SHARES
        if name == "cse-fsl"
    }
    teacher_steps = {
        site: torch.optim.Adam(teachers[site].parameters(), lr=1e-3) for site in SHARES
    }
    one_steps = adam(one)
    buffers = {site: [] for site in SHARES}
    last = None
    for number in range(ROUNDS):
        present = [site for site in SHARES if not away(number, site)]
        for site in present:
            if name == "sl" and last is not None:
                put(fronts[site], floats(fronts[last]))
            for step, batch in enumerate(data[site][number]):
                x, y = batch.inputs, batch.labels
                front_steps[site].zero_grad()
                z = fronts[site](x)
                if name in {"sl", "splitfed-v1", "splitfed-v2", "fedavg"}:
                    shared = name in {"sl", "splitfed-v2"}
                    top, top_steps = (one, one_steps) if shared else (backs[site], back_steps[site])
                    top_steps.zero_grad()
                    loss_of(top(z), y).backward()
                    top_steps.step()
                    front_steps[site].step()
                    continue
                sent = z.detach()
                if step % UPLOAD_EVERY == 0:
                    one_steps.zero_grad()
                    loss_of(one(sent), y).backward()
                    one_steps.step()
                    buffers[site].append((sent, y))
                if name == "fsl-sage" and step == 0 and number % ALIGN_EVERY == 0:
                    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                        plain_alignment(teachers[site], teacher_steps[site], one, buffers[site])
                    put(nets[site], floats(teachers[site]))
                if name == "fsl-sage":
                    statistics = copy.deepcopy(nets[site].state_dict())
                    g = torch.autograd.grad(loss_of(nets[site](sent.requires_grad_()), y), sent)[0]
                    nets[site].load_state_dict(statistics)
                    z.backward(g)
                else:
                    net_steps[site].zero_grad()
                    loss_of(nets[site](z), y).backward()
                    net_steps[site].step()
                front_steps[site].step()
            last = site
        shares = [SHARES[site] for site in present]
        groups = {
            "sl": [],
            "splitfed-v1": [fronts, backs],
            "fedavg": [fronts, backs],
            "splitfed-v2": [fronts],
            "cse-fsl": [fronts, nets],
            "fsl-sage": [fronts],
        }[name]
        for group in groups:
            mean = average([group[site] for site in present], shares)
            for module in group.values():
                put(module, mean)
    return fronts, backs["a"] if name in {"splitfed-v1", "fedavg"} else one, nets


def flat(modules):
    """Return the tensors in order: the two sides name their weights differently."""
    found = [floats(module).values() for module in modules]
    return dict(enumerate(itertools.chain.from_iterable(found)))


def lockstep(name, halves, auxiliary, data, **settings):
    run = start(
        method_of(SplitConfig(method=name, upload_every=UPLOAD_EVERY, align_every=ALIGN_EVERY)),
        halves,
        SHARES,
        SPEC,
        auxiliary=auxiliary,
        auxiliary_optimizer=OptimizerSpec("adam", NET_RATE),
        server=ServerPartOptions(
            SPEC, align=AlignSettings(PASSES, BUFFER, BUFFER, OptimizerSpec("adam", 1e-3))
        ),
        shares=SHARES,
        **settings,
    )
    for number in range(ROUNDS):
        run.round({site: data[site][number] for site in SHARES if not away(number, site)})
    return run


def compare(name, run, wanted, difference):
    fronts, back, nets = wanted
    if name == "fedavg":
        bodies = [client.model.body for client in run.clients.values()]
        wanted = [nn.Sequential(fronts[site], back) for site in SHARES]
        return difference(flat(bodies), flat(wanted))
    got = [client.model.body for client in run.clients.values()] + [run.server.common.model]
    wanted = [*fronts.values(), back]
    if name in {"cse-fsl", "fsl-sage"}:
        got += [client.auxiliary for client in run.clients.values()]
        wanted += nets.values()
    return difference(flat(got), flat(wanted))


@pytest.mark.parametrize("name", METHODS)
def test_a_cnn_trains_as_plain_torch_trains_it(name, images, difference):
    """Batch norm, Adam's moments over rounds, unequal shares and batches, a missing client."""
    data, model = images(), cnn()
    wanted = plain(name, copy.deepcopy(model[:3]), copy.deepcopy(model[3:]), cnn_auxiliary(), data)
    halves = in_one(model) if name == "fedavg" else split(model, 2)
    run = lockstep(name, halves, cnn_auxiliary(), data)
    assert compare(name, run, wanted, difference) <= 1e-6


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedavg"])
def test_a_gpt_trains_as_plain_torch_trains_it(name, texts, difference):
    """A cut that unties head and embedding, ignored labels, attention's second derivatives."""
    data, model = texts(), gpt()
    front, back = PlainFront(model, 1), PlainBack(model, 1, 3)
    wanted = plain(name, front, back, PlainBack(model, 1, 2), data)
    halves = split(model, 1)
    auxiliary = copy.deepcopy(halves.server.first_blocks(1))
    run = lockstep(name, halves, auxiliary, data)
    assert compare(name, run, wanted, difference) <= 1e-6


@pytest.mark.parametrize("tail_cut", ["2", "3"])
@pytest.mark.parametrize("name", ["sl", "splitfed-v1", "splitfed-v2"])
def test_a_u_shaped_gpt_keeps_its_tie_and_trains_as_uncut(name, tail_cut, texts, difference):
    """Labels stay at the client and the model is tied. With one client, every method trains the
    uncut model.
    """
    data, model = texts(names="a"), gpt()
    uncut = copy.deepcopy(model)
    optimizer = adam(uncut)
    for batch in itertools.chain.from_iterable(data["a"]):
        optimizer.zero_grad()
        loss_of(uncut(batch.inputs), batch.labels).backward()
        optimizer.step()
    run = start(method_of(SplitConfig(method=name)), split(model, 1, tail_cut), "a", SPEC)
    assert len({id(weight) for weight in run.model().tail.parameters()}) > 1
    for number in range(ROUNDS):
        run.round({"a": data["a"][number]})
    found = run.model()
    assert found.tail.head is found.client.embedding
    state = whole_state(found)
    assert difference(state, uncut.state_dict()) <= 1e-6


@pytest.mark.parametrize("tail", [False, True])
def test_splitfed_v1_is_fedavg(tail, images, difference):
    """The theorem behind comparing the two, with the code of both: batch norm, clients, shares,
    moments.
    """
    data, model = images(), cnn()
    federated = lockstep("fedavg", in_one(copy.deepcopy(model)), None, data)
    parallel = lockstep("splitfed-v1", split(model, 2, 5) if tail else split(model, 2), None, data)
    parts = (parallel.model().client, parallel.model().server, parallel.model().tail)
    found = flat([part for part in parts if part is not None])
    assert difference(found, flat([federated.model().client])) <= 1e-6


def test_labels_stay_at_home_in_a_u_shape(texts):
    """The second cut is for that."""
    run = start(method_of(SplitConfig(method="splitfed-v2")), split(gpt(), 1, 2), "a", SPEC)
    steps = run.method.local_step(run.clients["a"], texts(names="a")["a"][0][0], None)
    first = steps.send(None)
    assert first.smashed.labels is None
    assert first.wants_answer
    second = steps.send(run.method.serve(run.server, "a", first))
    assert not hasattr(second, "labels")


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding-a-method.md"


def test_the_pages_example_is_a_method(monkeypatch):
    """A method written by the page trains, is planned, and is simulated."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    monkeypatch.setitem(methods.METHODS, "fsl-an", names["FslAn"])
    rules = SplitConfig(method="fsl-an", upload_every=2)
    method = method_of(rules)
    assert [step for step in range(7) if method.uploads_at(step)] == [0, 2, 4, 6]

    torch.manual_seed(0)
    model = split(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 1)
    spec = OptimizerSpec("sgd", 0.1)
    run = start(
        method, model, "ab", spec, auxiliary=nn.Linear(5, 3), server=ServerPartOptions(spec)
    )
    rng = torch.Generator().manual_seed(1)

    def batch():
        inputs = torch.randn(6, 4, generator=rng)
        return Batch(inputs, inputs[:, :3].argmax(1))

    losses = [run.round({name: [batch() for _ in range(4)] for name in "ab"}) for _ in range(30)]
    assert losses[-1]["a"] < losses[0]["a"] - 0.2
    replicas = [run.server.part(name).export() for name in "ab"]
    assert (replicas[0] == replicas[1]).all()
    assert run.server.part("a").updates == 30 * 2

    simulation = SplitSimulation(SimulationSettings(2, 0.1, 1, "mild", every_s=60.0), rules)
    simulation.run()
    assert simulation.violations == []
    assert simulation.facts()["uploads"]["trained"] > 10

    monkeypatch.setitem(ALL_METHODS, "fsl-an", planned_methods()["fsl-an"])
    planned, known = (
        make_plan(
            method=name,
            shapes=find_shapes("gpt-0.5m"),
            work=Workload(2, 4, 20, 2),
            link=LinkSpec(1e6, 0.1),
        )
        for name in ("fsl-an", "cse-fsl")
    )
    assert "fsl-an" not in PLANNED
    assert planned.flows == known.flows, "what crosses is what CSE-FSL sends"
