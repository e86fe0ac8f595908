"""Buffers of a model: averaged plainly, coded without loss, never outside of what clients have."""

from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve
from deltas import merged_of

from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.deltas.delta_kind import Dense, FullWeights, Mixed
from fsl_async.store.deltas.seed_step import Directions
from fsl_async.store.errors import FrameRefused
from fsl_async.store.merge.merge import Round, SumMerge
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.aggregation import RULES
from fsl_async.store.rules.outer import OPTIMIZERS, Average
from fsl_async.store.settings import StoreSettings
from fsl_async.store.vectors.read_version import read_version
from fsl_codecs import CodecSpec, encode, encode_seeds

MODEL = Manifest.from_shapes([("w", (20, 10))], [("mean", (5,)), ("var", (5,))])
COARSE = CodecSpec("uniform")
OUTER = ("growing", "nesterov", "average")


def noise(seed):
    return np.random.default_rng(seed).standard_normal(MODEL.weights).astype(np.float32)


def started(make_run, name="run", **options):
    run = make_run(name, manifest=MODEL, codec_down=COARSE, keep_versions=20, **options)
    run.open()
    run.store.begin_initial(MODEL)
    first = np.concatenate([noise(0), np.full(5, 0.1), np.full(5, 1e4)])
    run.store.write_initial(0, encode(first[:200].astype(np.float32), CodecSpec("fp32")))
    run.store.write_initial(1, encode(first[200:].astype(np.float32), CodecSpec("fp32")))
    run.store.finish_initial()
    return run


def merge(run, version, buffers, tokens=(10.0, 30.0)):
    """A round of clients with these buffers; returns those of the version."""
    keys = [DeltaKey(f"c{i}", 1, version - 1, version) for i in range(len(buffers))]
    for number, (key, values) in enumerate(zip(keys, buffers, strict=True)):
        vector = np.concatenate([noise(100 * version + number), values])
        run.send(key, vector.astype(np.float32), tokens=int(tokens[number]), spec=COARSE)
    members = [
        merged_of(key, weight, tokens=int(weight))
        for key, weight in zip(keys, tokens, strict=False)
    ]
    run.store.commit(version, members, 1 / sum(tokens))
    return run.weights(version)[200:]


@pytest.mark.parametrize("optimizer", OUTER)
def test_a_version_has_the_weighted_mean_of_its_clients(make_run, optimizer):
    """Under momentum a variance that falls from 1e4 to 1 became negative, and outputs NaN."""
    run = started(make_run, outer=OPTIMIZERS[optimizer]())
    low, high = np.float32([1e-9, 1, 2, 3, 4] * 2), np.float32([3e-9, 5, 6, 7, 8] * 2)
    expected = (10.0 * low.astype(np.float64) + 30.0 * high) / 40.0
    for version in range(1, 8):
        found = merge(run, version, [low, high])
        assert np.array_equal(found, expected.astype(np.float32))
    record = run.store._open.run.kept.get(7).record
    assert 1 < record.average_norm < 40, "buffers are no part of the change"


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (FullWeights(), "mean"),
        (Mixed(Directions(0, 2, 2, 1e-3)), "mean"),
        *((Dense(), rule) for rule in RULES),
    ],
)
def test_equal_buffers_stay_as_they_are(make_run, kind, rule):
    """A table of positions must not wander by roundings in thousands of versions."""
    options = {"kind": kind, "rule": RULES[rule](), "reuse": 4 * (rule == "latest")}
    run = started(make_run, outer=Average(), **options)
    table = np.float32([1 / 3, 1e-30, 3e38, -0.1, 7e-6] * 2)
    tokens = (10.0, 30.0, 7.0, 1.0, 3.0)
    for version in range(1, 5):
        assert np.array_equal(merge(run, version, [table] * 5, tokens), table)


def test_a_run_reads_them_back_after_a_restart_and_from_its_changes(make_run):
    """An export reads a version that is not whole by its coded changes."""
    run = started(make_run, snapshot_every=100, snapshot_every_s=1e9)
    for version in (1, 2, 3):
        merge(run, version, [np.arange(10.0) * version, np.arange(10.0)])
    expected, digest = run.weights(3), run.store.digest
    opened = run.store._open
    found = read_version(Files(), opened.run.checkpoints, 3, MODEL)
    assert np.array_equal(found.weights, expected)
    assert found.mean is None or np.array_equal(found.mean[200:], expected[200:])
    run.open()
    assert run.store.digest == digest
    assert np.array_equal(run.weights(3), expected)


def test_a_delta_of_buffers_alone_has_a_norm():
    """With a norm of 0 it has no weight, and a run of buffers alone stood still."""
    only = Manifest.from_shapes([], [("mean", (2,))])
    checked = Dense().check(only, 0, encode(np.float32([3, 4]), CodecSpec("fp32")))
    assert checked.squared_norm == 25.0


def test_a_delta_must_code_them_without_loss(make_run):
    """A quantized variance may be negative; the refusal names the chunk."""
    run = started(make_run)
    with pytest.raises(FrameRefused, match="chunk 1 holds buffers and is coded in uniform"):
        Dense().check(MODEL, 1, encode(np.ones(10, np.float32), COARSE))
    assert np.isnan(
        Dense()
        .check(MODEL, 1, encode(np.full(10, np.nan, np.float32), CodecSpec("fp32")))
        .squared_norm
    )
    assert run.store.version == 0


def test_a_rule_chooses_clients_by_their_weights_alone(make_run):
    """A site of brighter images is no attacker: its statistics are far from the others'."""
    run = started(make_run, rule=RULES["multi-krum"](), outer=Average())
    keys = [DeltaKey(f"c{number}", 1, 0, 1) for number in range(5)]
    for number, key in enumerate(keys):
        values = np.concatenate([np.full(200, 1e-3), np.full(10, 1e3 * number)])
        run.send(key, values.astype(np.float32), tokens=1)
    merge, weights = run.store._open.merging._merge, dict.fromkeys(keys, 1.0)
    assert not merge._squared_distances([[key] for key in keys], weights).any()


@pytest.mark.parametrize(("dense", "seeds"), [(1e-3, 1.0), (1.0, 1e-3), (1.0, 1.0)])
def test_clips_of_a_mixed_round_leave_the_mean_of_buffers(dense, seeds):
    """Scalars have none, so their weights are no part of it, whatever their clips are."""
    kind = Mixed(Directions(0, 2, 2, 1e-3))
    settings = StoreSettings(kind=kind, outer=Average())
    lossless, of_seeds, of_dense = CodecSpec("fp32"), DeltaKey("s", 1, 0, 1), DeltaKey("d", 1, 0, 1)
    values = (noise(1), np.full(10, 0.5, np.float32))
    frames = {
        of_seeds: [encode_seeds(0, np.ones((1, 2, 2), np.float32))],
        of_dense: [encode(one, lossless) for one in values],
    }
    spool = SimpleNamespace(
        reader=lambda key, _: SimpleNamespace(frame=lambda index: frames[key][index])
    )
    merge = SumMerge(MODEL, spool, None, settings)
    merged = [
        evolve(merged_of(key, 5.0 * clip), clip=clip)
        for key, clip in ((of_seeds, seeds), (of_dense, dense))
    ]
    *_, fill = merge.average(Round(1, merged, 0.1, (), {}), None).chunks
    assert fill(np.empty(10, np.float32)) == pytest.approx(0.5, rel=1e-6)
