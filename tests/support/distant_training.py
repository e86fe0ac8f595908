"""An exchange side whose training side is another process. Run as a program: prints "ok", or fails.

The training process has the model and NumPy. It shares the vectors, which are anonymous shared
memory, and otherwise sends and receives small values over a pipe.
"""

import mmap
import multiprocessing
import queue
import sys
import threading

import numpy as np

from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import Moved, RebaseOrder, Work
from fsl_async.roles.sync.events import Attached, Rebased, Snapshotted
from fsl_async.store.digest import digest_of
from fsl_async.store.manifest import CHUNK_VALUES, Manifest
from fsl_codecs import CodecSpec, decode, encode

VALUES = CHUNK_VALUES + 3
MANIFEST = Manifest.from_shapes([("w", (VALUES,))])
FP32 = CodecSpec(format="fp32")
SLOTS = [np.frombuffer(mmap.mmap(-1, 4 * VALUES), np.float32) for _ in range(3)]


def train(pipe):
    """Run the training process: a vector of weights to which each step adds 1."""
    theta = np.full(VALUES, 5.0, np.float32)
    while True:
        match pipe.recv():
            case "copy", slot:
                SLOTS[slot][:] = theta
            case "take", base, _:
                theta[:] = SLOTS[base]
            case "move", base, reference:
                theta[:] = SLOTS[base] + (theta - SLOTS[reference])
            case ("end",):
                return
        theta += np.float32(1.0)  # one step of training
        pipe.send(True)


class Distant:
    """A TrainingPort whose thread sends orders, one by one, to the process with the model."""

    def __init__(self, pipe):
        self._pipe = pipe
        self._orders = queue.SimpleQueue()

    # ruff: noqa: D102 - `TrainingPort` has the docstrings
    def ask(self, order):
        self._orders.put(order)

    def resume(self):
        pass

    def stop(self):
        self._orders.put(None)

    def refuse(self, code, text):
        raise AssertionError(text)

    def run(self, exchange):
        """Attach the model, then carry out orders until stopped."""
        own = exchange.free_vector(VALUES)
        self._request("copy", own)
        exchange.attach(MANIFEST, own)
        while (order := self._orders.get()) is not None:
            if isinstance(order, RebaseOrder):
                exchange.rebase(self._move, discard=order.discard)
            else:
                snapshot = exchange.free_vector(VALUES)
                self._request("copy", snapshot)
                work = Work(tokens=7, steps=1, metrics={"loss": 2.0}, finite=True)
                exchange.put_snapshot(order.sequence, snapshot, work)
        self._pipe.send(("end",))

    def _move(self, move):
        if move.how != "stay":
            self._request(move.how, move.base, move.reference)
        return Moved(taken=move.how == "take")

    def _request(self, what, *vectors):
        self._pipe.send((what, *(index_of(vector) for vector in vectors)))
        assert self._pipe.recv()


def index_of(vector):
    return next(index for index, slot in enumerate(SLOTS) if slot is vector)


def main():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=train, args=(there,))
    process.start()
    free, events = list(SLOTS), queue.Queue()
    training = Distant(here)
    exchange = Exchange(training, DeltaCoder(FP32), events.put, allocate=lambda _: free.pop())
    thread = threading.Thread(target=training.run, args=(exchange,))
    thread.start()

    def event(kind):
        found = events.get(timeout=20)
        assert isinstance(found, kind), found
        return found

    event(Attached)
    base = np.full(VALUES, 5.0, np.float32)
    assert exchange.adopt_initial() == digest_of(base)
    exchange.request_rebase(0, digest_of(base))
    event(Rebased)
    for version in (1, 2, 3):
        exchange.request_snapshot(version)
        assert event(Snapshotted) == Snapshotted(version, version - 1, 7, 1, {"loss": 2.0})
        frames = [exchange.encode_delta(version, index) for index in range(MANIFEST.chunks)]
        delta = np.concatenate([decode(frame) for frame in frames])
        # Between two snapshots lie two steps: after the last copy, and after the last rebase.
        assert (delta == (-1.0 if version == 1 else -2.0)).all(), delta
        exchange.drop_delta(version)
        update = np.float32(-0.5) * delta  # others moved the other way
        base += update
        exchange.begin_fetch("update", version)
        for index in range(MANIFEST.chunks):
            start, stop = MANIFEST.chunk_range(index)
            exchange.put_fetch(version, index, encode(update[start:stop], FP32))
        digest = exchange.finish_fetch(version)
        assert digest == digest_of(base)
        exchange.request_rebase(version, digest)
        assert event(Rebased) == Rebased(version)
    exchange.stop()
    thread.join()
    process.join()
    assert process.exitcode == 0
    assert "torch" not in sys.modules
    print("ok")  # noqa: T201


if __name__ == "__main__":
    main()
