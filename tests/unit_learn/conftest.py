"""Fixtures for tests of split learning: one thread, small data, a measure of differences of
weights.
"""

import queue
import threading

import numpy as np
import pytest
import torch

from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.smashed import IGNORED


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass


@pytest.fixture
def difference():
    """Return the largest relative difference of any weight.

    Weights far below their tensor's typical size count relative to `least` of that size.
    """

    def measure(found, wanted, least=1e-3):
        assert found.keys() == wanted.keys()
        worst = 0.0
        for name, tensor in wanted.items():
            a, b = np.asarray(found[name], np.float64), np.asarray(tensor, np.float64)
            assert a.shape == b.shape, name
            scale = np.abs(b) + least * np.sqrt(np.mean(b * b)) + 1e-30
            worst = max(worst, float(np.max(np.abs(a - b) / scale)))
        return worst

    return measure


@pytest.fixture
def images():
    """Make batches of random images, name -> round -> batches: unequal clients, a smaller last
    batch.
    """

    def make(*, names="abc", rounds=3, batches=3, size=6, side=8, classes=4, seed=0):
        rng = torch.Generator().manual_seed(seed)
        found = {}
        for index, name in enumerate(names):
            found[name] = []
            for _ in range(rounds):
                made = []
                for number in range(batches):
                    n = size - (1 if number == batches - 1 and index == 1 else 0)
                    x = torch.randn(n, 3, side, side, generator=rng)
                    y = torch.randint(0, classes, (n,), generator=rng)
                    made.append(Batch(x, y))
                found[name].append(made)
        return found

    return make


@pytest.fixture
def texts():
    """Make batches of random tokens, name -> round -> batches, labeled with the next token; some
    labels are ignored.
    """

    def make(*, names="abc", rounds=3, batches=3, size=3, context=7, vocabulary=20, seed=0):
        rng = torch.Generator().manual_seed(seed)
        found = {}
        for name in names:
            found[name] = []
            for _ in range(rounds):
                made = []
                for _ in range(batches):
                    window = torch.randint(0, vocabulary, (size, context + 1), generator=rng)
                    labels = window[:, 1:].clone()
                    labels[torch.rand(labels.shape, generator=rng) < 0.2] = IGNORED
                    labels[:, 0] = window[:, 1]
                    made.append(Batch(window[:, :-1].contiguous(), labels))
                found[name].append(made)
        return found

    return make


@pytest.fixture
def in_thread():
    """Run a function in a thread; returns a function that waits for its result or raises its
    error.
    """

    def start(work):
        answer = queue.Queue()

        def run():
            try:
                answer.put((work(), None))
            except Exception as error:  # noqa: BLE001
                answer.put((None, error))

        thread = threading.Thread(target=run)
        thread.start()

        def wait():
            result, error = answer.get(timeout=20)
            thread.join(20)
            if error is not None:
                raise error
            return result

        return wait

    return start
