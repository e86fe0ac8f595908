# ruff: noqa: D102 - the methods of the stand-ins are those of the ports
"""A reduction over several parameter servers, after an average; a stand-in doubles it."""

import numpy as np
import pytest
from attrs import define, field
from deltas import delta_of, merged_of

import fsl_transport as tp
from fsl_async.nodes.ps.store_jobs import StoreJobs
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.manifest import Manifest
from fsl_async.store.outer import OuterSettings
from fsl_async.store.records import Committed, StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, decode, encode

FP32 = CodecSpec("fp32")
MANIFEST = Manifest.from_shapes([("w", (30,))])
A, B = (DeltaKey(name, 1, 0, 1) for name in "ab")


class AtOnce:
    """A worker that runs jobs at once."""

    def submit(self, job, done, failed):
        try:
            result = job()
        except Exception as error:  # noqa: BLE001 - as the real one
            failed(error)
        else:
            done(result)

    def close(self):
        pass


@define
class Doubling:
    """A reduction of two parameter servers with the same average, finished by the test."""

    waiting: list = field(factory=list)

    def reduce(self, average, done, failed):
        doubled = average.through(lambda chunks: (2 * chunk for chunk in chunks))
        self.waiting.append((lambda: done(doubled), failed))


@pytest.fixture
def store(tmp_path):
    """A store at version 0 with weights of zero; its outer step subtracts the average."""
    made = Store(tmp_path / "run", StoreSettings(2, FP32, OuterSettings("average")))
    made.recover()
    made.begin_initial(MANIFEST)
    made.write_initial(0, encode(np.zeros(30, np.float32), FP32))
    made.finish_initial()
    yield made
    made.close()


def accumulate(store, key, value):
    store.spool_begin(delta_of(key))
    store.spool_write(key, 0, encode(np.full(30, value, np.float32), FP32))
    store.spool_finish(key)
    store.accumulate(key, 1.0)


def weights(store):
    return decode(store.read_full(store.version, 0))


def jobs_of(store, reduction=None, say=lambda _: None):
    events = []
    feed = lambda event, cause=None: events.append(event)  # noqa: E731
    jobs = StoreJobs(
        store,
        AtOnce(),
        feed,
        shards=1,
        scheduler=tp.VirtualScheduler(),
        say=say,
        reduction=reduction,
    )
    return jobs, events


def test_a_version_is_made_from_the_reduced_average(store):
    """Deltas during the reduction are in the version after."""
    reduction = Doubling()
    jobs, events = jobs_of(store, reduction)
    accumulate(store, A, 3.0)
    jobs.average(do.Average(1, (merged_of(A),), 1.0), 1)
    jobs.reduce(do.Reduce(1), 2)
    accumulate(store, B, 5.0)
    assert events == []
    reduction.waiting[0][0]()
    assert events == [ev.Reduced(1)]
    jobs.commit(do.Commit(1), 3)
    assert isinstance(events[-1], ev.VersionCommitted)
    assert np.array_equal(weights(store), np.full(30, -6.0))
    assert store.accumulated == {B: 1.0}
    jobs.average(do.Average(2, (merged_of(B, staleness=1),), 1.0), 4)
    jobs.commit(do.Commit(2), 5)
    assert np.array_equal(weights(store), np.full(30, -11.0)), "and without a reduction"


def test_a_reduction_that_fails_is_a_commit_that_fails(store):
    """Nothing is lost: the next try merges the same deltas and later ones."""
    reduction = Doubling()
    jobs, events = jobs_of(store, reduction)
    accumulate(store, A, 3.0)
    jobs.average(do.Average(1, (merged_of(A),), 1.0), 1)
    jobs.reduce(do.Reduce(1), 2)
    accumulate(store, B, 5.0)
    reduction.waiting[0][1](OSError("the other parameter server is away"))
    assert events == [ev.CommitFailed(1, "the other parameter server is away")]
    jobs.average(do.Average(1, (merged_of(A), merged_of(B)), 0.5), 3)
    jobs.commit(do.Commit(1), 4)
    assert np.array_equal(weights(store), np.full(30, -4.0))


def test_an_average_that_fails_is_reported_once(store):
    """Its Commit follows at once and must not make a version or a second report."""
    jobs, events = jobs_of(store, Doubling())
    accumulate(store, A, 3.0)
    jobs.average(do.Average(1, (merged_of(A, 7.0),), 1.0), 1)
    jobs.reduce(do.Reduce(1), 2)
    jobs.commit(do.Commit(1), 3)
    assert [type(event) for event in events] == [ev.CommitFailed]
    assert store.version == 0


def test_a_delta_that_counts_nothing_is_told(store):
    """The version's line counts its client as merged."""
    said = []
    jobs, events = jobs_of(store, say=said.append)
    jobs.committed(Committed(3, "d3", 1, 1, 0.5, late=(DeltaKey("a", 1, 1, 4),)), 0.0, 1)
    (note,) = said
    assert note.level == "warning"
    assert note.text.startswith("delta a/1/1/4 is left out of version 3: it was stored too late")
    assert isinstance(events[-1], ev.VersionCommitted)
