"""A whole run of a method of split learning in one process: the reference for runs over a network.

Clients come in their order, each with all its batches, one crossing at a time. In their lockstep
mode such runs make the same calls in the same order, so weights agree to float tolerance.
"""

import copy

import attrs
import numpy as np
import torch

from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.data.facts import facts_of
from fsl_async.learn.models.cuts import CutModel
from fsl_async.learn.models.gpt import GPTPart
from fsl_async.learn.models.hf import HFPart
from fsl_async.learn.split import build, weights
from fsl_async.learn.split.build import client_part, split_server
from fsl_async.learn.split.model_parts import ClientPartOptions, ServerPartOptions
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.smashed import cross_entropy
from fsl_async.learn.split.task import open_samples
from fsl_async.roles.split.methods.base import Position
from fsl_async.tools.versions import load_last


class Lockstep:
    """m clients, a split server if the method has one, and the average at the end of each round."""

    def __init__(self, method, clients, server, shares=None):
        self.method, self.clients, self.server = method, dict(clients), server
        self.rounds = 0
        self._shares = shares or dict.fromkeys(clients, 1.0)
        self._turn = None  # the client that had x_c last, where they take turns

    def round(self, batches):
        """One round of the clients in `batches` (in the run's order); the others are away.

        Returns their mean losses.
        """
        present = [name for name in self.clients if name in batches]
        losses = {name: self._visit(name, batches[name]) for name in present}
        shares = {name: self._shares[name] for name in present}
        if present:
            for part in () if self.method.sequential else self.method.averaged:
                exported = [self.clients[name].export(part) for name in present]
                vector = weights.average(exported, list(shares.values()))
                for client in self.clients.values():
                    client.load(vector, part)
            if self.server is not None:
                self.method.end_round(self.server, shares)
        self.rounds += 1
        return losses

    def step(self, name, batch, at):
        """One local step of one client, with all its crossings."""
        self.clients[name].begin_round(at.round)
        if self.server is not None:
            self.server.part(name).begin_round(at.round)
        steps = self.method.local_step(self.clients[name], batch, at)
        answer = None
        while True:
            try:
                crossing = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self.method.serve(self.server, name, crossing)

    def model(self):
        """The model to evaluate: x_c (of the last client where they take turns) and x_s."""
        name = self._turn if self.method.sequential and self._turn else next(iter(self.clients))
        front = self.clients[name].model
        server = None if self.server is None else self.server.common.model
        return CutModel(front.body, server, front.tail)

    def _visit(self, name, batches):
        client = self.clients[name]
        if self.method.sequential and self._turn not in (None, name):
            client.load(self.clients[self._turn].export())
        reports = [
            self.step(name, batch, Position(self.rounds, number))
            for number, batch in enumerate(batches)
        ]
        self._turn = name
        samples = sum(report.samples for report in reports)
        return sum(report.loss * report.samples for report in reports) / max(1, samples)


def copies(model):
    """Parts of their own with the same weights; ties between client and tail are kept."""
    client, server, tail = copy.deepcopy((model.client, model.server, model.tail))
    return attrs.evolve(model, client=client, server=server, tail=tail)


def whole_state(model):
    """The weights of a cut model under the names that the uncut one has for them."""
    found, offset = {}, 0
    for part in filter(None, (model.client, model.server, model.tail)):
        for name, value in part.state_dict().items():
            if isinstance(part, HFPart):
                name = _whole_name(part._family, name, offset)  # noqa: PLW2901
            found[name] = value
        offset += len(part.layers) if isinstance(part, HFPart) else 0
    if isinstance(model.tail, GPTPart):
        del found["head"]  # it is the embedding
    return found


def _whole_name(family, name, offset):
    if name.startswith("head."):
        return f"lm_{name}"
    blocks = f"trunk.{family.layers}."
    if name.startswith(blocks):
        number, _, rest = name.removeprefix(blocks).partition(".")
        name = f"{blocks}{int(number) + offset}.{rest}"
    return family.trunk + name.removeprefix("trunk")


def start(
    method,
    model,
    names,
    optimizer,
    *,
    auxiliary=None,
    auxiliary_optimizer=None,
    loss=cross_entropy,
    seed=0,
    server=None,
    shares=None,
):
    """A run whose clients and server start from copies of the same parts and auxiliary model.

    auxiliary_optimizer: None for one as `optimizer`.
    """
    options = ClientPartOptions(
        optimizer, loss, seed, auxiliary_optimizer=auxiliary_optimizer or optimizer
    )

    def client(name):
        own = attrs.evolve(options, name=name)
        return client_part(method, copies(model), own, copy.deepcopy(auxiliary))

    split = None
    if method.has_server:
        settings = server or ServerPartOptions(optimizer, loss, seed)
        split = split_server(method, copies(model), settings, copy.deepcopy(auxiliary))
    return Lockstep(method, {name: client(name) for name in names}, split, shares)


def oracle(config, names=("site-a", "site-b")):
    """The computation of a run in one process, from the same parts, seeds and batches."""
    parts = build.build_parts(config, at_client=False)
    server, method, *_ = build.build_server(config, torch.device("cpu"))
    found = start(
        method,
        parts.model,
        names,
        build.optimizer_of(config),
        auxiliary=parts.auxiliary,
        auxiliary_optimizer=build.client_options(config).auxiliary_optimizer,
        seed=config.run.seed,
        server=ServerPartOptions(
            build.optimizer_of(config),
            build.loss_of(config),
            config.run.seed,
            align=server.settings.align,
        ),
        loss=build.loss_of(config),
        shares=dict.fromkeys(names, config.split.samples),
    )
    facts = facts_of(config)
    own = [open_samples(config, facts, (shard, len(names))) for shard in range(len(names))]
    # In a relay every turn of a client is a round of its own.
    turns = len(names) if method.sequential else 1
    for number in range(config.run.rounds // turns):
        numbers = [number * turns + (shard if turns > 1 else 0) for shard in range(len(names))]
        drawn = [list(one.round(at)) for one, at in zip(own, numbers, strict=True)]
        found.round(dict(zip(names, drawn, strict=True)))
    return found


def kept(run):
    """The common part of the split server's checkpoint on disk: named tensors."""
    disk = ServerDisk(run.run_dir / "server")
    state = disk.recover()
    disk.close()
    return state.common


def check_equal(run, config, rtol=1e-4, atol=1e-5):
    """Both parts equal those of the computation in one process. Returns the split server's."""
    wanted = oracle(config, run.names)
    common = {k: v for k, v in wanted.server.state().items() if k.startswith("server/")}
    found = kept(run)
    for name, tensor in common.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol)
    client = wanted.clients[run.names[-1]]
    parts = {name: client.part(name) for name in wanted.method.averaged}
    body = parts["client"] if len(parts) == 1 else torch.nn.ModuleDict(parts)
    expected = weights.export(body)
    record = load_last(run.run_dir / "ps", ModelWeights(body))
    assert record.version == config.run.rounds
    np.testing.assert_allclose(weights.export(body), expected, rtol=rtol, atol=atol)
    return found
