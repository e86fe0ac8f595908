"""A parameter server's production shell and machine with stand-ins around them."""

from pathlib import Path

import numpy as np
from configs import config_of, guard_of

import fsl_transport as tp
from fsl_async.config.settings_training import DataConfig
from fsl_async.files.memory_files import MemoryDisk, MemoryFiles
from fsl_async.nodes.ps.shell import ParameterServerShell, Surroundings
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps import Merging, ParameterServerMachine
from fsl_async.roles.sync.weighting import TokensWeighting
from fsl_async.store.errors import StoreError
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_async.tools.sim.training import MANIFEST
from fsl_codecs import CodecSpec, encode

RUN_DIR = Path("/run")
FP32 = CodecSpec("fp32")


def store_on(disk, **settings):
    """A store on a disk in memory; the process that had it before is dead."""
    if hasattr(disk, "newest"):
        disk.newest.die()
    disk.newest = MemoryFiles(disk)
    return Store(
        RUN_DIR,
        StoreSettings(keep_versions=2, **settings),
        files=disk.newest,
        later=lambda write: write(),
    )


def publish(store, manifest=MANIFEST):
    """Make version 0, of zeros."""
    store.begin_initial(manifest)
    for index in range(manifest.chunks):
        start, stop = manifest.chunk_range(index)
        store.write_initial(index, encode(np.zeros(stop - start, np.float32), FP32))
    return store.finish_initial()


class Endpoint:
    """Records the shell's calls of the transport."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))

    def last(self, name):
        """The newest call of that name."""
        return next(call for call in reversed(self.calls) if call[0] == name)


class AtOnce:
    """A worker that runs jobs at once."""

    def close(self):
        """There are no waiting jobs."""

    def submit(self, job, done, failed):
        """Run the job and report its result."""
        try:
            made = job()
        except StoreError as error:
            failed(error)
        else:
            done(made)


class Later(AtOnce):
    """A worker that runs jobs at `work`."""

    def __init__(self):
        self.jobs = []

    def submit(self, job, done, failed):
        """Keep the job."""
        self.jobs.append(lambda: done(job()))

    def work(self):
        """Run the waiting jobs."""
        while self.jobs:
            self.jobs.pop(0)()


class Server:
    """A parameter server's shell with stand-ins."""

    def __init__(self, disk=None, shards=2, worker=None, store=None, **settings):
        self.disk = disk or MemoryDisk()
        self.endpoint = Endpoint()
        self.notes = []
        self.ends = []
        self.scheduler = tp.VirtualScheduler()
        self.store = store or store_on(self.disk)
        data = DataConfig(shards=shards, sharding="disjoint" if shards else "local")
        self.shell = ParameterServerShell(
            ParameterServerMachine(
                config_of("sync", trigger="clock", data=data, guard=guard_of(), **settings),
                Merging(),
                TokensWeighting(),
                "run",
            ),
            Surroundings(
                store=self.store,
                worker=worker or AtOnce(),
                scheduler=self.scheduler,
                journal=TraceHash(),
                listener=lambda _: self.endpoint,
                say=lambda note: self.notes.append(note.text),
                finished=lambda effect: self.ends.append(effect.reason),
            ),
        )
        self.shell.start(self.store.recover())

    @property
    def leases(self):
        """Client -> its shard, by the ledger."""
        return dict(self.store._open.run.book.leases)

    def hello(self, name, incarnation=1, shard=-1):
        """Feed a client's hello; returns the shard in its welcome, or the text of the refusal."""
        body = {"run": "", "version": -1, "digest": "", "shard": shard}
        self.shell.on_transport(tp.HelloReceived(name, incarnation, body, "client"))
        answer = next(c for c in reversed(self.endpoint.calls) if c[0] in {"welcome", "refuse"})
        return answer[2]["shard"] if answer[0] == "welcome" else answer[3]

    def attach(self, name, manifest=MANIFEST):
        """Feed a client's model."""
        wire, frozen = manifest.to_wire(), manifest.frozen_to_wire()
        body = msg.to_wire(msg.Attach(manifest.fingerprint, wire, frozen))
        self.shell.on_transport(tp.MessageReceived(name, body))

    def leave(self, name, incarnation=1):
        """End a client's session."""
        self.shell.on_transport(tp.PeerDown(name, incarnation, "bye"))
