"""Tuning by nodes in one process, over real sockets, against one process without a network."""

import importlib.util

import numpy as np
import pytest
from node_runs import (
    BATCH,
    ROUNDS,
    SEED,
    STEPS,
    TUNE,
    TUNED,
    config_of,
    play,
    versions_of,
    write_data,
)

from fsl_async.store.rules.adapters import RULES

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
IN_CI = ("fedit", "fedex", "bank")
"""A mean of factors, a patch, and products in a basis of their own."""


@pytest.mark.parametrize(
    "rule", [one if one in IN_CI else pytest.param(one, marks=pytest.mark.sweep) for one in RULES]
)
def test_a_run_of_nodes_computes_what_one_process_does(tmp_path, base, rule):
    """Each version to 1e-6 from the one before, through codec, spool, ledger and sockets.

    The bytes are those of the plan.
    """
    from tune_reference import Products, Site, dense_products, mean_of, tuned

    data = write_data(tmp_path, a=9, b=5)  # not equally many
    settings = {**TUNED, "tune.rule": rule, "codec.up": "fp32", "codec.down": "fp32"}
    unequal = RULES[rule].unequal_ranks
    ranks = {"a": 4, "b": 2 if unequal else 4}
    clients = {
        name: {"data": str(path), "base": str(base), "rank": ranks[name]}
        for name, path in data.items()
    }
    summaries = play(config_of(settings, 2), tmp_path / "run", clients).summaries
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
