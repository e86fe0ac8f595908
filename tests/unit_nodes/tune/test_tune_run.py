"""Tuning by nodes in one process, over real sockets, against one process without a network."""

import importlib.util
import json
import threading

import numpy as np
import pytest

from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.files.files import Files
from fsl_async.process.stopper import Stopper
from fsl_async.store.rules.adapters import RULES
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import Checkpoints

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
ROUNDS, STEPS, BATCH, SEED = 3, 4, 2, 7
TUNE = {"rank": 4, "targets": "q_proj,v_proj", "context": 24, "steps": STEPS}
SETTINGS = {
    "tune.method": "lora",
    **{f"tune.{key}": value for key, value in TUNE.items()},
    "run.seed": SEED,
    "run.rounds": ROUNDS,
    "sync.trigger": "rounds",
    "sync.clients": 2,
    "sync.min_clients": 2,
    "sync.quorum": 1.0,
    "train.batch": BATCH,
    "train.learning_rate": 1e-2,
    "train.schedule": "constant",
    "train.warmup_steps": 0,
    "train.threads": 1,
    "train.device": "cpu",
    "data.holdout": 0.0,
    "codec.up": "fp32",
    "codec.down": "fp32",
    "listen.address": "tcp://127.0.0.1:0",
}
IN_CI = ("fedit", "fedex", "bank")
"""A mean of factors, a patch, and products in a basis of their own."""
WORDS = {"a": "the film was a joy to watch and ", "b": "a dull plot that never ends; "}


@pytest.fixture
def base(tmp_path):
    from tiny_base import write_llama

    return write_llama(tmp_path / "base")


@pytest.fixture
def data(tmp_path):
    """Records of two sites, not equally many."""
    found = {}
    for name, rows in (("a", 9), ("b", 5)):
        found[name] = tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"text": f"{WORDS[name]}{number}"}) for number in range(rows)]
        found[name].write_text("\n".join(lines) + "\n")
    return found


def run(config, run_dir, base, data, ranks):
    """Run the nodes to the end; returns the summaries of the clients."""
    from fsl_async.nodes.client import joining
    from fsl_async.nodes.client.parts import ClientOptions
    from fsl_async.nodes.ps import node as node_ps

    run_dir.mkdir()
    listening, address, errors, summaries = threading.Event(), [], [], {}

    def guarded(work):
        def wrapped():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by the test
                errors.append(error)
                listening.set()

        return threading.Thread(target=wrapped, daemon=True)

    def announce(at):
        address.append(at)
        listening.set()

    def serve():
        node_ps.serve(
            config, run_dir, from_version=None, announce=announce, log=print, stop=Stopper()
        )

    def client(name):
        options = ClientOptions(
            address[0],
            name,
            data=str(data[name]),
            policy=SitePolicy(frozenset(KINDS)),
            base=str(base),
            rank=ranks[name],
        )
        summaries[name] = joining.join_run(options, stop=Stopper(), log=print)

    threads = [guarded(serve)]
    threads[0].start()
    listening.wait(30)
    if not errors:
        threads += [guarded(lambda name=name: client(name)) for name in data]
        for thread in threads[1:]:
            thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return summaries


def versions_of(run_dir, manifest):
    checkpoints = Checkpoints(Files(), run_dir)
    return {
        version: read_version(Files(), checkpoints, version, manifest).weights
        for version in checkpoints.versions()
    }


@pytest.mark.parametrize(
    "rule", [one if one in IN_CI else pytest.param(one, marks=pytest.mark.sweep) for one in RULES]
)
def test_a_run_of_nodes_computes_what_one_process_does(tmp_path, base, data, rule):
    """Each version to 1e-6 from the one before, through codec, spool, ledger and sockets.

    The bytes are those of the plan.
    """
    from tune_reference import Products, Site, dense_products, mean_of, tuned

    settings = {**SETTINGS, "tune.rule": rule, "store.keep_versions": ROUNDS + 1}
    config = load(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    unequal = RULES[rule].unequal_ranks
    ranks = {"a": 4, "b": 2 if unequal else 4}
    summaries = run(config, tmp_path / "run", base, data, ranks)
    tune = tuned(rule=rule, **TUNE)
    sites = [
        Site(name, base, data[name], tune, rank=ranks[name], seed=SEED, batch=BATCH)
        for name in data
    ]
    manifest = sites[0].weights.manifest
    found = versions_of(tmp_path / "run", manifest)
    assert np.array_equal(found[0], sites[0].vector())
    merges = RULES[rule].merges_products
    products = Products(manifest, tune, SEED) if merges else None
    for version in range(ROUNDS):
        # From the run's own version: Adam's first steps would enlarge a difference in the last bit.
        weights = found[version]
        trained = [site.train_round(version, weights, STEPS) for site in sites]
        if products is None:
            wanted = mean_of(*zip(*trained, strict=True)).astype(np.float32)
        else:
            wanted = products.merge(version + 1, weights, trained, list(ranks.values()))
        made, expected = found[version + 1], wanted
        if RULES[rule].changes_basis:
            # A direction of small weight is sensitive to the last bit of fp32; products are not.
            made, expected = (dense_products(manifest, vector) for vector in (made, expected))
        np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)
    assert np.abs(found[ROUNDS] - found[0]).max() > 1e-2
    # Version 0 goes up from one client and down to the other.
    syncs = 4 * manifest.values * (2 * ROUNDS + 1)
    for direction in ("up", "down"):
        counted = sum(one.traffic["payload"][f"adapters {direction}"] for one in summaries.values())
        assert counted == syncs
