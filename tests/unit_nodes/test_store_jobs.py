# ruff: noqa: D102 - the methods of the stand-ins are those of the ports
"""Jobs of the store: a commit that fails, and a delta that counts nothing."""

import numpy as np
import pytest
from deltas import delta_of, merged_of

import fsl_transport as tp
from fsl_async.nodes.ps.store_jobs import StoreJobs
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.deltas.spool import file_name
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.outer import Average
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode

FP32 = CodecSpec("fp32")
MANIFEST = Manifest.from_shapes([("w", (30,))])
A = DeltaKey("a", 1, 0, 1)


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


@pytest.fixture
def store(tmp_path):
    """A store at version 0 with weights of zero; its outer step subtracts the average."""
    made = Store(tmp_path / "run", StoreSettings(2, FP32, Average()))
    made.recover()
    made.begin_initial(MANIFEST)
    made.write_initial(0, encode(np.zeros(30, np.float32), FP32))
    made.finish_initial()
    yield made
    made.close()


def spool(store, key, value):
    store.spool_begin(delta_of(key))
    store.spool_write(key, 0, encode(np.full(30, value, np.float32), FP32))
    store.spool_finish(key)


def jobs_of(store, say=lambda _: None, shards=1):
    events = []
    feed = lambda event, cause=None: events.append(event)  # noqa: E731
    jobs = StoreJobs(store, AtOnce(), feed, shards=shards, scheduler=tp.VirtualScheduler(), say=say)
    return jobs, events


def test_a_commit_that_fails_is_reported_once(store):
    """The machine tries it again."""
    jobs, events = jobs_of(store)
    spool(store, A, 3.0)
    jobs.commit(do.Commit(1, (merged_of(A, -7.0),), 1.0), 1)
    assert [event.topic for event in events] == [do.Commit]
    assert store.version == 0


def test_an_acknowledged_delta_that_cannot_be_read_ends_the_process(store, tmp_path):
    """The next version would be made without it; the next start records it as lost."""
    jobs, events = jobs_of(store)
    spool(store, A, 3.0)
    path = tmp_path / "run" / "spool" / file_name(A)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    jobs.commit(do.Commit(1, (merged_of(A),), 1.0), 1)
    (event,) = events
    assert isinstance(event, ev.StoreFailed)
    assert event.reason.startswith(f"version 1 cannot be made: delta {A.text} cannot be read back")
    assert store.known(A) == "accepted"


def test_a_delta_that_counts_nothing_is_told(store):
    """The version's line counts its client as merged."""
    said = []
    jobs, events = jobs_of(store, say=said.append)
    jobs.committed(ev.VersionCommitted(3, "d3", 1, late=(DeltaKey("a", 1, 1, 4),)), 0.0, 1)
    (note,) = said
    assert note.level == "warning"
    assert note.text.startswith("delta a/1/1/4 is left out of version 3: it was stored too late")
    assert isinstance(events[-1], ev.VersionCommitted)


def test_leases_of_data_that_is_not_divided_are_on_disk(store, tmp_path):
    """Each client has one: it is a member after a restart, too."""
    jobs, _ = jobs_of(store, shards=0)
    for place, name in enumerate("abc"):
        jobs.admit(do.Admit(name, 1, place), place)
        jobs.keep_shard(do.KeepShard(name, 1), place)
    store.close()
    again = Store(tmp_path / "run", StoreSettings(2, FP32, Average()))
    found = again.recover()
    again.close()
    assert dict(found.leases) == {"a": 0, "b": 1, "c": 2}
    assert not found.provisional
