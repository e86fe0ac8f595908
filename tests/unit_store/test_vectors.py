"""Resident vectors: the same bits as versions written from disk to disk."""

import numpy as np
import pytest

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.advance import averaged
from fsl_async.store.checkpoint import (
    MEAN,
    MOMENTUM,
    RESIDUAL,
    UPDATE,
    WEIGHTS,
    open_flat,
)
from fsl_async.store.chunk_pool import ChunkPool
from fsl_async.store.errors import StoreError
from fsl_async.store.files import Files
from fsl_async.store.frame_file import each_frame
from fsl_async.store.manifest import Manifest
from fsl_async.store.outer import OuterSettings, OuterStep
from fsl_async.store.vectors import Vectors
from fsl_codecs import CodecSpec, decode

CHUNK = 20
"""A model of 16 chunks of weights, the last one shorter, and two of buffers."""

SETTINGS = {
    "default": {},
    "fp32, average": {"codec_down": CodecSpec("fp32"), "outer": OuterSettings("average")},
    "e4m3, nesterov": {"codec_down": CodecSpec("e4m3"), "outer": OuterSettings("nesterov")},
}


@pytest.fixture(params=[1, 3])
def pool(request):
    """One thread, and several."""
    made = ChunkPool(request.param)
    yield made
    made.close()


def manifest():
    return Manifest.from_shapes([("w", (30, 10)), ("b", (7,))], [("mean", (25,))])


def read(checkpoint, name, of):
    reader = open_flat(Files(), checkpoint, name, of)
    if reader is None:
        return None
    found = np.empty(of.values, np.float32)
    for index in range(of.chunks):
        reader.read_into(index, found[slice(*of.chunk_range(index))])
    reader.close()
    return found


def averages(run, record):
    """The average of a version by the deltas in its spool, chunk by chunk."""
    spool, of = run.store._open.run.spool, run.manifest
    kind = run.settings.kind
    sources = [(spool.frames(one.key, of), one.weight, one.clip) for one in record.merged]
    weight = sum(one.weight for one in record.merged)
    return averaged(of, kind.sums(of, sources), record.scale, weight)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_versions_are_those_of_the_streaming_commit(make_run, pool, settings):
    """Weights, momentum, residual, mean and the coded change, to the bit, over several versions."""
    run = make_run(manifest=manifest(), keep_versions=9, **settings)
    run.start()
    for version in (1, 2, 3, 4):
        run.round(version, "a", "b")
    kept = run.store._open.kept
    vectors, again = (Vectors(run.manifest, run.settings, pool) for _ in range(2))
    vectors.load(Files(), kept.get(0))
    again.load(Files(), kept.get(0))
    for version in (1, 2, 3, 4):
        checkpoint = kept.get(version)
        record = checkpoint.record
        step = record.step
        frames = []
        rest = (averages(run, record), step, record.mean_share)
        change = vectors.advance(version, *rest, frames.append)
        assert change.digest == record.digest
        assert change.update_bytes == record.update_bytes
        assert change.update_norm == pytest.approx(record.update_norm, rel=1e-6)
        assert change.average_norm == pytest.approx(record.average_norm, rel=1e-6)
        path = checkpoint.path / UPDATE
        assert frames == list(each_frame(Files(), path, run.manifest.chunks))
        again.repeat(version, averages(run, record), frames, step, record.mean_share)
        for one in (vectors, again):
            assert (one.version, one.digest()) == (version, record.digest)
            for name in (WEIGHTS, MOMENTUM, RESIDUAL, MEAN):
                on_disk = read(checkpoint, name, run.manifest)
                if on_disk is None:
                    assert name not in one.named
                else:
                    assert np.array_equal(one.named[name], on_disk), name


def test_a_checkpoint_in_the_middle_is_as_good_as_the_way_there(make_run, pool):
    """Recovery loads one and goes on."""
    run = make_run(manifest=manifest(), keep_versions=9)
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    checkpoint = run.store._open.kept.get(2)
    vectors = Vectors(run.manifest, run.settings, pool)
    vectors.load(Files(), checkpoint)
    assert vectors.version == 2
    for name, vector in vectors.named.items():
        assert np.array_equal(vector, read(checkpoint, name, run.manifest)), name
    vectors.load(Files(), run.store._open.kept.get(0))
    assert not vectors.momentum.any(), "version 0 has none: zeros"
    assert MEAN not in vectors.named


def test_a_change_that_is_not_finite_is_refused(make_run, pool):
    """The line names the tensor and what to do; the vectors are of no version."""
    run = make_run(manifest=manifest())
    run.start()
    vectors = Vectors(run.manifest, run.settings, pool)
    vectors.load(Files(), run.store._open.kept.get(0))
    wrong = [np.ones(run.manifest.chunk_values(i), np.float32) for i in range(run.manifest.chunks)]
    wrong[-1][0] = np.inf
    with pytest.raises(StoreError, match="not finite in tensor 'mean'"):
        vectors.advance(1, wrong, OuterStep(1.0, 0.0), 0.0, lambda _: None)
    assert vectors.version == -1


def test_a_repetition_that_breaks_off_leaves_vectors_of_no_version(make_run, pool):
    """They are neither served nor built upon."""
    run = make_run(manifest=manifest())
    run.start()
    key = DeltaKey("a", 1, 0, 1)
    run.send(key, np.ones(run.manifest.values, np.float32))
    run.commit(key)
    record = run.store.records[-1]
    vectors = Vectors(run.manifest, run.settings, pool)
    vectors.load(Files(), run.store._open.kept.get(0))

    def torn():
        yield from []
        raise OSError(5, "Input/output error")

    step = record.step
    with pytest.raises(OSError, match="Input/output"):
        vectors.repeat(1, averages(run, record), torn(), step, 0.0)
    assert vectors.version == -1
    assert len(decode(run.store.read_full(1, 0))) == 20


def test_the_coded_change_alone_gives_the_weights_and_nearly_the_momentum(make_run, pool):
    """Where a merged delta is lost: no version is lost, and training hardly notices."""
    run = make_run(manifest=manifest(), keep_versions=9)
    run.start()
    for version in (1, 2, 3):
        run.round(version, "a", "b")
    kept = run.store._open.kept
    vectors = Vectors(run.manifest, run.settings, pool)
    vectors.load(Files(), kept.get(0))
    for version in (1, 2, 3):
        checkpoint = kept.get(version)
        record = checkpoint.record
        frames = each_frame(Files(), checkpoint.path / UPDATE, run.manifest.chunks)
        step = record.step
        vectors.follow(version, frames, step, record.mean_share)
        assert vectors.digest() == record.digest
    exact = read(kept.get(3), MOMENTUM, run.manifest)
    error = np.linalg.norm(vectors.momentum - exact) / np.linalg.norm(exact)
    assert 0.0 < error < 0.2, "of the size of what coding loses"
    assert not vectors.residual.any()
