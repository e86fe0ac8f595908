"""Clients that train the same batches are found by a sample of their deltas."""

import numpy as np
import pytest
from deltas import key

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.deltas.spool import Sketches
from fsl_async.store.model.manifest import CHUNK_VALUES, Manifest
from fsl_codecs import CodecSpec

VALUES = 3 * CHUNK_VALUES + 1000


def alike(**deltas):
    return compared(**deltas)[0]


def compared(**deltas):
    """Give deltas chunk by chunk, as they arrive."""
    sketches = Sketches()
    for client, values in deltas.items():
        manifest = Manifest.from_shapes([("w", (len(values),))])
        for index in range(manifest.chunks):
            start, stop = manifest.chunk_range(index)
            sketches.take(manifest, key(client), index, values[start:stop].astype(np.float32))
    return sketches.compare([key(client) for client in deltas])


def mixed(share, seed):
    """A delta of which `share` is common to all clients, in terms of a cosine."""
    common = np.random.default_rng(0).standard_normal(VALUES)
    own = np.random.default_rng(seed).standard_normal(VALUES)
    return np.sqrt(share) * common + np.sqrt(1 - share) * own


def test_the_same_delta_is_found_among_others():
    """Same seed, same batches; one trained a few steps more."""
    twin = mixed(0.6, 1)
    other = twin + 0.35 * mixed(0.0, 9)
    assert list(alike(a=twin, b=mixed(0.6, 2), c=other)) == ["a/c"]


def test_two_clients_alone_must_be_almost_equal():
    """There is no other pair to compare with, and early in a run large batches agree."""
    assert alike(a=mixed(0.96, 1), b=mixed(0.96, 2)) == {}
    twin = mixed(0.5, 1)
    assert alike(a=twin, b=twin * 1.3) == {"a/b": 1.0}


def test_independent_clients_that_agree_are_not_told():
    """All pairs agree alike: measured with a linear model, the first rounds are at 0.92."""
    assert alike(a=mixed(0.93, 1), b=mixed(0.93, 2), c=mixed(0.93, 3)) == {}


def test_all_clients_may_be_the_same():
    """Public scripts have one seed for all: then no pair stands out."""
    twin = mixed(0.3, 1)
    assert list(alike(a=twin, b=twin, c=twin)) == ["a/b", "a/c", "b/c"]


def test_few_values_are_alike_by_chance():
    """Ten values, or two with almost all of the norm, raise no alarm."""
    few = np.ones(10)
    assert alike(a=few, b=few) == {}
    spiked = np.ones(VALUES) * 1e-6
    spiked[: CHUNK_VALUES // 100] = 1.0  # a hundredth of a third of the places
    assert alike(a=spiked, b=spiked) == {}
    nothing = np.zeros(VALUES)
    assert alike(a=nothing, b=nothing) == {}


def test_the_store_reports_twins_of_a_version(make_run):
    """Deltas are coarse when they arrive, and frames of several clients are mixed."""
    run = make_run(manifest=Manifest.from_shapes([("w", (CHUNK_VALUES + 500,))]))
    run.start()
    rng = np.random.default_rng(1)
    twin, other = rng.standard_normal((2, run.manifest.values)).astype(np.float32)
    for number, deltas in enumerate([(twin, other, twin), (twin, other, -twin)]):
        keys = [DeltaKey(name, 1, number, number + 1) for name in "abc"]
        for one, delta in zip(keys, deltas, strict=True):
            run.send(one, delta, spec=CodecSpec(format="uniform"))
        made = run.commit(*keys)
        assert dict(made.alike) == ({"a/c": 1.0} if not number else {})


@pytest.mark.parametrize("length", [1.0, 1e6])
def test_one_client_that_is_opposite_to_the_rest_is_named(length):
    """A sign that is wrong, or a site whose labels are turned around; whatever its length."""
    honest = {name: mixed(0.3, seed) for seed, name in enumerate("abcd", 1)}
    assert compared(**honest)[1] == ""
    assert compared(**honest, liar=-length * mixed(0.3, 9))[1] == "liar"
    apart = {name: mixed(0.0, seed) for seed, name in enumerate("abcd", 1)}
    assert compared(**apart, turned=-mixed(0.3, 9), other=-mixed(0.3, 8))[1] != "turned"
    assert compared(a=mixed(0.3, 1), liar=-mixed(0.3, 2))[1] == "", "two are opposite to each other"
