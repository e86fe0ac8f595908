"""A run of zeroth order by nodes in one process, over real sockets: bytes, and equal digests."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from node_runs import config_of, ledger_of, play

from fsl_async.accounting.traffic import CountedLink
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.tune.zeroth import probe_round, probing
from fsl_async.nodes.client import joining
from fsl_async.store.deltas.seed_step import Directions, SeedStep, keys_of
from fsl_async.store.disk.chunk_files import digest_of
from fsl_codecs import add_signs

ROUNDS = 30
SETTINGS = {
    "tune.method": "zeroth",
    "tune.zo_rate": 0.02,
    "run.rounds": ROUNDS,
    "run.seed": 5,
    "sync.quorum": 1.0,
    "train.task": "own",
}
MESSAGE = re.compile(rb"\xa1m[\xa0-\xbf]([a-z_]+)/")


def first_weights():
    # A generator of its own: the clients are threads, and torch's default one is shared.
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(40, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.15, 0.15, generator=generator)
    return model


def make_task(finals):
    """A site's training function: logistic regression from losses alone."""

    def train(fed):
        model = first_weights()
        fed.attach(model)
        weights = ModelWeights(model)
        tune = fed.config["tune"]
        run = Directions(
            fed.config["run"]["seed"], tune["zo_steps"], tune["zo_probes"], tune["zo_rate"]
        )
        generator = torch.Generator().manual_seed(len(fed.client_name) + ord(fed.client_name))
        x = torch.randn(64, 40, generator=generator)
        y = (x[:, 0] > 0).long()

        def loss_of(put):
            def loss(vector, _):
                put(vector)
                return float(torch.nn.functional.cross_entropy(model(x), y))

            return loss

        for number in fed.rounds():
            with probing(weights) as (base, put):
                scalars = probe_round(loss_of(put), base, [None], run, number=number, mu=1e-2)
            if not fed.end_round(samples=64, scalars=scalars):
                break
        vector = np.empty(weights.layout.values, np.float32)
        weights.copy_out(vector)
        finals[fed.client_name] = vector

    return train


@pytest.fixture
def sent(monkeypatch):
    """Bytes and messages that the nodes send, by name."""
    sizes, counts = Counter(), Counter()
    real = CountedLink.send

    def send(self, peer, lane, frames, *rest):
        found = MESSAGE.search(bytes(frames[0]))
        name = found[1].decode() if found else "other"
        sizes[name] += sum(len(frame) for frame in frames)
        counts[name] += 1
        return real(self, peer, lane, frames, *rest)

    monkeypatch.setattr(CountedLink, "send", send)
    return sizes, counts


def test_a_round_takes_four_messages_and_less_than_400_bytes_but_for_positions(
    tmp_path, sent, monkeypatch
):
    """And the ledger alone leads from the first weights to those of all nodes, to the bit."""
    finals = {}
    monkeypatch.setattr(joining, "load_task", lambda _: make_task(finals))
    clients = {name: {"task": "task.py:train"} for name in ("a", "b")}
    play(config_of(SETTINGS, 2), tmp_path / "run", clients)
    versions = ledger_of(tmp_path / "run", "version")
    assert versions[-1]["version"] == ROUNDS
    vector = np.empty(82, np.float32)
    ModelWeights(first_weights()).copy_out(vector)
    for line in versions[1:]:
        add_signs(vector, 0, *keys_of([SeedStep.from_json(line["seeds"])]))
        assert digest_of(vector) == line["digest"]
        assert line["update_bytes"] == 44
    assert finals["a"].tobytes() == finals["b"].tobytes() == vector.tobytes()
    accepted = ledger_of(tmp_path / "run", "accepted")
    assert all(line["facts"]["order"] == 0 and line["bytes"] == 56 for line in accepted)
    sizes, counts = sent
    rounds = 2 * ROUNDS  # of a site
    per_round = {name: sizes[name] / rounds for name in ("measured", "accepted", "turn")}
    assert all(abs(counts[name] - rounds) <= 4 for name in ("measured", "turn", "accepted"))
    assert counts["holding"] + counts["fetch"] <= 12
    # A run of few rounds announces where it is in most of them: about 120 bytes.
    scalars = 130 + 2
    assert sum(per_round.values()) + scalars < 400, per_round
    assert sizes["scalars"] / counts["scalars"] < scalars + 130
