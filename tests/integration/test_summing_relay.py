"""Summing relays: parameter servers of cells, each one client of a run."""

import signal

import numpy as np

from fsl_async.files.files import Files
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.store.recovery.run_directory import read_manifest
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import Checkpoints

TASK = """
import time, zlib
import torch

def train(fed):
    own = zlib.crc32(fed.client_name.encode()) % 1000
    torch.manual_seed(own if fed.seed else 0)   # by default each site has a model of its own
    model = torch.nn.Linear(40, 3)
    fed.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number in fed.rounds():
        chance = torch.Generator().manual_seed(100_000 * own + number)
        for _ in range(3):
            inputs = torch.randn(16, 40, generator=chance)
            ((model(inputs) - own / 1000) ** 2).mean().backward()
            optimizer.step(); optimizer.zero_grad()
        time.sleep(0.1)
        fed.end_round(samples=own)
"""
UNLIMITED = ("--set", "guard.clip_median=0")  # else a delta's limit depends on those beside it
EXACT = ("--set", "codec.up=fp32", "--set", "codec.down=fp32")
ROUNDS = {"sync__trigger": "rounds", "outer__optimizer": "average"}


def newest(run_dir):
    """Number and weights of the newest version, float32 (values,)."""
    manifest, checkpoints = read_manifest(Files(), run_dir), Checkpoints(Files(), run_dir)
    version = max(checkpoints.versions())
    return version, read_version(Files(), checkpoints, version, manifest).weights


def relay(site, name, *more):
    """Start a summing relay of two clients; returns it and its run directory."""
    run_dir = site.folder / name
    words = ("--role", "ps", "--upstream", site.address, "--name", name, "--run-dir", run_dir)
    sets = ("--set", "sync.clients=2", "--set", "sync.min_clients=2", *UNLIMITED)
    process = site.start(*words, *sets, *more, "127.0.0.1:0")
    return process, run_dir


def address_of(process):
    """Where clients reach a server."""
    return process.wait_for("listening at").split("tcp://")[1].split(",")[0]


def clients(site, names, address):
    """Start clients."""
    words = ("--role", "client", "--task", f"{site.folder / 'task.py'}:train")
    return [site.start(*words, "--name", name, address) for name in names]


def begin(site, names, **settings):
    """Start the server of a run; `names` are its clients. Returns it."""
    (site.folder / "task.py").write_text(TASK)
    site.address, site.run_dir = "127.0.0.1:0", site.folder / "-".join(names)
    members = {"sync__clients": len(names), "sync__min_clients": len(names)}
    task = ("--task", f"{site.folder / 'task.py'}:train")
    return site.server(*task, *EXACT, *UNLIMITED, **members, **ROUNDS, **settings)


def test_a_run_of_two_cells_is_the_run_of_their_clients(site):
    """Each site counts by its own samples, wherever it is."""
    sites, groups = ["a1", "a2", "b1", "b2"], {"cell-a": ["a1", "a2"], "cell-b": ["b1", "b2"]}
    server = begin(site, sites, run__rounds=5, run__seed=0)
    for process in (*clients(site, sites, site.address), server):
        assert process.end() == 0
    wanted = newest(site.run_dir)[1]

    server = begin(site, list(groups), run__rounds=5, run__seed=0)
    cells = {name: relay(site, name) for name in groups}
    started = [
        process
        for name, (cell, _) in cells.items()
        for process in clients(site, groups[name], address_of(cell))
    ]
    for process in (*started, server, *(cell for cell, _ in cells.values())):
        assert process.end() == 0
    assert audit_run(site.run_dir).merged == 10
    for run_dir in (site.run_dir, *(one for _, one in cells.values())):
        assert audit_run(run_dir).complaints() == []
        assert audit_run(run_dir).merged == 10
        version, weights = newest(run_dir)
        assert version == 5
        np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-6)


def test_a_relay_that_is_killed_goes_on_and_sends_each_round_once(site):
    """Its clients stay, and begin with the model of the run, which is not their own."""
    server = begin(site, ["solo", "cell-a"], run__rounds=40, run__seed=1)
    cell, run_dir = relay(site, "cell-a")
    at = address_of(cell)
    solo = clients(site, ["solo"], site.address)
    site.wait_until(lambda: site.ledger("version"), "version 0")
    sites = clients(site, ["a1", "a2"], at)
    for version in (4, 8, 12):
        site.wait_version(version)
        cell.kill()
        words = ("--role", "ps", "--upstream", site.address, "--name", "cell-a")
        cell = site.start(*words, "--run-dir", run_dir, "--set", "sync.clients=2", at)
        address_of(cell)
    for process in (*solo, *sites, server, cell):
        assert process.end() == 0
    for folder in (site.run_dir, run_dir):
        assert audit_run(folder).complaints() == []
    accepted = [one.get("facts", {}) for one in site.ledger("accepted")]
    rounds = [one["data_at"] for one in accepted if "data_at" in one]
    assert len(rounds) > 20
    assert len(set(rounds)) == len(rounds)
    ours, theirs = newest(run_dir)[1], newest(site.run_dir)[1]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_a_run_that_cannot_be_added_up_is_refused_in_one_line(site):
    """Before clients can connect."""
    server = begin(site, ["cell-a", "b"], tune__method="zeroth")
    cell, run_dir = relay(site, "cell-a")
    assert cell.end() == 2
    assert "that run has tune.method set, and a cell adds up" in cell.text
    assert not run_dir.exists()
    server.signal(signal.SIGTERM)
    assert server.end() == 64
