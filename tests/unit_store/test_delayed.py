"""Delayed Nesterov: the momentum moves once in `delay` deltas, however many make a version."""

import json

import numpy as np
import pytest

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.checkpoint import GATHERED
from fsl_async.store.outer import Delay, OuterSettings, desired_change
from fsl_codecs import CodecSpec

N = 4
DELAYED = OuterSettings("delayed-nesterov", 0.7, 0.9, delay=N)


def noise(manifest, seed):
    return np.random.default_rng(seed).standard_normal(manifest.values).astype(np.float32)


def play(make_run, name, groups, outer=DELAYED, **options):
    """Merge deltas 0, 1, ... in versions of so many; returns the run.

    All are computed from version 0, so that they are the same in any grouping.
    """
    run = make_run(name, codec_down=CodecSpec("fp32"), outer=outer, keep_versions=99, **options)
    run.start()
    deltas = iter(range(sum(groups)))
    for size in groups:
        keys = []
        for index in (next(deltas) for _ in range(size)):
            keys.append(DeltaKey(f"c{index % N}", 1, 0, index + 1))
            run.send(keys[-1], noise(run.manifest, 50 + index))
        run.commit(*keys)
    return run


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("groups", [[1] * 2 * N, [2] * N, [3, 1, 1, 3]])
def test_any_grouping_leads_to_the_same_weights(make_run, groups, resident):
    """N versions of one delta, one of N, and mixed ones: the same end point to rounding."""
    whole = play(make_run, "whole", [N, N], OuterSettings("nesterov", 0.7, 0.9))
    run = play(make_run, "parts", groups, resident=resident)
    expected = whole.weights(2)
    error = np.abs(run.weights(len(groups)) - expected) / np.abs(expected).max()
    assert error.max() < 1e-6
    per_arrival = play(make_run, "bad", groups, OuterSettings("nesterov", 0.7, 0.9))
    other = np.abs(per_arrival.weights(len(groups)) - expected).max()
    assert other > 0.1, "momentum that moves with every version is another optimizer"


def test_more_deltas_than_the_delay(make_run):
    """The momentum moves by their mean, and the next count begins at zero."""
    run = play(make_run, "run", [3, 3, 2])
    assert [one.delay.count for one in run.store.records[1:]] == [3, 6, 2]
    assert [one.delay.is_over for one in run.store.records[1:]] == [False, True, False]
    assert [one.delay.share for one in run.store.records[1:]] == [0.75, 0.75, 0.5]


@pytest.mark.parametrize("resident", [False, True])
def test_it_survives_a_restart(make_run, resident):
    """The vector and the count are in the checkpoint."""
    groups = [1, 1, 1, 1, 1]
    through = play(make_run, "through", groups)
    run = play(make_run, "run", groups[:3], resident=resident, snapshot_thread=False)
    run.open()
    for index in (3, 4):
        key = DeltaKey(f"c{index % N}", 1, 0, index + 1)
        run.send(key, noise(run.manifest, 50 + index))
        run.commit(key)
    assert np.array_equal(run.weights(5), through.weights(5))
    manifest = json.loads((run.root / "checkpoints/v00000003/manifest.json").read_text())
    text = json.dumps(manifest)
    assert GATHERED in text
    assert '"count": 3' in text


def test_without_momentum_nothing_is_gathered():
    """It is then plain descent by a part of the average."""
    settings = OuterSettings("delayed-nesterov", 0.5, 0.0, delay=4)
    assert not settings.gathers
    delay = settings.delayed(None, deltas=2, worth=2.0)
    change, zeros = np.full(3, 8.0, np.float32), np.zeros(3, np.float32)
    step = settings.step(1, 1.0, 9.0, delay)
    desired_change(change, zeros, zeros, step, keeps_momentum=settings.has_momentum)
    assert change.tolist() == [-2.0] * 3


def test_several_deltas_of_a_client():
    """They count as deltas, and by what the average is worth."""
    assert DELAYED.delayed(Delay(N, 1.0, 1), deltas=2, worth=1.0) == Delay(N, 1.0, 3)
    assert DELAYED.delayed(Delay(N, 1.0, N), deltas=2, worth=1.0) == Delay(N, 1.0, 2)
    assert OuterSettings().delayed(None, deltas=2, worth=1.0) is None
