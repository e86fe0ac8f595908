"""The node of a gang in a test, without a network: it is its own parameter server."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from ports import free_ports

from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.gang.link import listener
from fsl_async.nodes.client.gang_shell import GangShell
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.sync.events import Attached, PaceReached, Rebased, Snapshotted
from fsl_async.store.disk.chunk_files import digest_of
from fsl_codecs import CodecSpec, decode, encode

PROGRAM = Path(__file__).with_name("gang_program.py")
FP32 = CodecSpec(format="fp32")
RATE = np.float32(0.7)
LIMIT_S = 240.0


class GangNode:
    """A node with the ranks of `gang_program`.

    versions: the vector of each version, float32. machines: on which the ranks believe to be.
    """

    def __init__(
        self, folder, ranks, how="fsdp", optimizer="adamw", does="evaluates", *, machines=1
    ):
        self.folder, self.ranks, self.machines = folder, ranks, machines
        self.arguments = (how, optimizer, does)
        self.said, self.events, self.versions = [], [], []
        self.shell = GangShell(self.said.append)
        self.exchange = Exchange(
            self.shell, DeltaCoder(FP32), self.events.append, allocate=self.shell.slots.allocate
        )
        self.name = f"fsl-test-{os.getpid()}-{id(self)}"
        self.listening = listener(self.name)
        self.shell.connect(self.exchange, self.listening, lambda: False, TraceHash())
        self.shell.welcomed(b"")
        self.processes = []
        self.sequence = 0

    def start(self, generation=0):
        """Start the ranks, as torchrun does."""
        port = free_ports(1)[0]
        for rank in range(self.ranks):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % (self.ranks // self.machines)),
                "LOCAL_WORLD_SIZE": str(self.ranks // self.machines),
                "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(generation),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            argv = [sys.executable, PROGRAM, self.name, self.folder, *self.arguments]
            self.processes.append(subprocess.Popen(argv, env=environment))

    def until(self, holds):
        """Serve the ranks until something holds."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, (self.said, self.shell.failure, self.events)
            if self.shell.has_work:
                self.shell.carry_out()
            else:
                self.shell.turn()

    def event(self, kind):
        """Wait for the next event of the exchange side, which must be of this kind.

        A pace that was reached is left out, unless it is waited for.
        """
        found = PaceReached()
        while isinstance(found, PaceReached):
            self.until(lambda: self.events)
            found = self.events.pop(0)
            if kind is PaceReached:
                break
        assert isinstance(found, kind), found
        return found

    def begin(self):
        """Take the ranks' weights as version 0."""
        self.event(Attached)
        digest = self.exchange.adopt_initial()
        base = self.exchange._base
        self.versions.append(base.copy())
        self.move(digest)

    def move(self, digest):
        """Have the ranks move onto the newest version."""
        self.exchange.request_rebase(len(self.versions) - 1, digest)
        found = self.event(Rebased)
        assert found.version == len(self.versions) - 1

    def delta(self, *, hold=False):
        """Ask for a delta; returns the event and the vector. hold: the ranks wait afterwards."""
        self.sequence += 1
        self.exchange.request_snapshot(self.sequence, hold=hold)
        found = self.event(Snapshotted)
        if not found.tokens and not hold:
            self.exchange.drop_delta(self.sequence)
            return found, None
        chunks = range(self.exchange.manifest.chunks)
        frames = [self.exchange.encode_delta(self.sequence, index) for index in chunks]
        self.exchange.drop_delta(self.sequence)
        return found, np.concatenate([decode(frame) for frame in frames])

    def merge(self, delta):
        """Make the next version, and have the ranks move onto it."""
        update = -RATE * delta
        self.fetch("update", self.versions[-1] + update, update)

    def fetch(self, kind, weights, sent):
        """Fetch the next version, as these values are sent, and have the ranks move onto it."""
        version = len(self.versions)
        self.versions.append(weights)
        self.exchange.begin_fetch(kind, version)
        for index in range(self.exchange.manifest.chunks):
            start, stop = self.exchange.manifest.chunk_range(index)
            self.exchange.put_fetch(version, index, encode(sent[start:stop], FP32))
        digest = self.exchange.finish_fetch(version)
        assert digest == digest_of(weights)
        self.move(digest)

    def steps(self, count):
        """Let the ranks train until they have made so many steps in all."""
        self.until(lambda: self.shell.meter.steps >= count)

    def end(self):
        """End training; returns what each rank has written."""
        self.shell.stop()
        self.until(lambda: self.shell.all_ended)
        self.shell.release(30.0)
        for process in self.processes:
            assert process.wait(60) == 0
        found = []
        for rank in range(self.ranks):
            place = Path(self.folder) / f"rank{rank}"
            found.append(
                {**json.loads(place.with_suffix(".json").read_text()), **np.load(f"{place}.npz")}
            )
        return found

    def close(self):
        """End what is left."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.shell.close()
        self.listening.close()
