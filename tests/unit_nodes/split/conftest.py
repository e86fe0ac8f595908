"""Complete runs in one process: real sockets on loopback, real threads.

Also small data sets of every kind.
"""

import json
import struct
import threading

import attrs
import numpy as np
import pytest

from fsl_async.config.address import parse
from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.ps import node as node_ps
from fsl_async.nodes.split_server import node as node_server
from fsl_async.process.stopper import Stopper

EVERYTHING = SitePolicy(frozenset(KINDS))


@pytest.fixture(autouse=True)
def _alone(one_thread):
    """Run every test of this folder with one thread."""


class Nodes:
    """A run in threads of this process.

    A parameter server, a split server if the method has one, and clients.
    """

    def __init__(
        self,
        config,
        run_dir,
        *,
        names=("site-a", "site-b"),
        data=None,
        own=None,
        task=None,
        apart=False,
        keys=None,
        policy=EVERYTHING,
    ):
        self.task = task
        self.policy = policy  # of all clients
        self.keys = keys  # of all nodes of the run
        self.config, self.run_dir, self.names, self.apart = config, run_dir, names, apart
        self.data, self.own = data or {}, own or {}
        self.lines, self.summaries, self.errors = [], {}, {}
        self.address = None
        self.listening = threading.Event()
        self.stop = Stopper()

    def serve(self):
        """Run the parameter server and the split server to their end."""
        rest = {"log": self.lines.append, "stop": self.stop, "keys": self.keys}
        if self.config.split.method in {"none", "fedavg"}:

            def announce(address):
                self.address = address
                self.listening.set()

            self.run_dir.mkdir(parents=True, exist_ok=True)
            return node_ps.serve(
                self.config, self.run_dir, from_version=None, announce=announce, **rest
            )

        def announce_both(role, address):
            if role == "ps":
                announce(address)

        def announce(address):
            self.address = address
            self.listening.set()

        return node_server.serve(
            self.config, self.run_dir, with_ps=True, announce=announce_both, **rest
        )

    def serve_apart(self):
        """Run the split server alone to its end."""

        def announce(role, address):
            self.split_address = address
            self.listening.set()

        return node_server.serve(
            self.config,
            self.run_dir / "split",
            with_ps=False,
            announce=announce,
            log=self.lines.append,
            stop=self.stop,
            keys=self.keys,
        )

    def serve_ps(self):
        """Run the parameter server alone to its end."""
        split = attrs.evolve(self.config.split, server=self.with_key(self.split_address))

        def announce(address):
            self.address = address
            self.listening.set()

        (self.run_dir / "ps").mkdir(parents=True)
        return node_ps.serve(
            attrs.evolve(self.config, split=split),
            self.run_dir / "ps",
            from_version=None,
            announce=announce,
            log=self.lines.append,
            stop=self.stop,
            keys=self.keys,
        )

    def with_key(self, address):
        """As a person pastes it."""
        if self.keys is None:
            return address
        return attrs.evolve(parse(address), key=self.keys.pair().public).fsl

    def client(self, name):
        """Run one client to its end."""
        options = ClientOptions(
            self.with_key(self.address),
            name,
            self.task,
            self.data.get(name, self.config.data.path or None),
            **self.own.get(name, {}),
            keys=self.keys,
            policy=self.policy,
        )
        return joining.join_run(options, stop=Stopper(), log=self.lines.append)

    def _start(self, name, job):
        def work():
            try:
                self.summaries[name] = job()
            except BaseException as error:  # noqa: BLE001 - shown by the test
                self.errors[name] = error
            finally:
                self.listening.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def play(self, *, failing=False):
        """Run all nodes to the end; failing: until a node raises, which is kept in `errors`."""
        servers = [self._start("server", self.serve_apart if self.apart else self.serve)]
        assert self.listening.wait(30), self.lines
        if self.apart:
            self.listening.clear()
            servers.append(self._start("ps", self.serve_ps))
            assert self.listening.wait(30), self.lines
        clients = []
        for name in self.names if self.address else ():
            clients.append(self._start(name, lambda name=name: self.client(name)))
            # shards go by the order of arrival
            while not any(f"as {name}" in line for line in self.lines) and not self.errors:
                clients[-1].join(0.02)
        if failing:
            for thread in clients:
                thread.join(30)
            self.stop.request(hard=True)
        for thread in (*clients, *servers):
            thread.join(60)
        assert not any(thread.is_alive() for thread in (*clients, *servers)), "\n".join(self.lines)
        assert failing or not self.errors, (self.errors, self.lines)
        return self


@pytest.fixture
def nodes(tmp_path):
    """(config, ...) -> a run that has ended."""

    def play(config, *, failing=False, **rest):
        return Nodes(config, tmp_path / "run", **rest).play(failing=failing)

    return play


@pytest.fixture
def configured():
    """(table.key=value ...) -> a configuration of a small, fast run."""

    def make(*more, clients=2):
        sets = {
            "listen.address": "tcp://127.0.0.1:0",
            "split.listen": "tcp://127.0.0.1:0",
            "data.holdout": 0.0,
            "sync.clients": clients,
            "sync.min_clients": clients,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 5.0,
            "model.layers": 2,
            "model.width": 32,
            "model.heads": 2,
            "model.context": 16,
            "train.batch": 4,
            "train.threads": 1,
            "train.device": "cpu",
            "run.rounds": 1,
            "split.samples": 10,
            "split.upload_every": 2,
            "split.align_every": 1,
            "split.align_passes": 2,
            "split.up": "fp32",
            "split.down": "fp32",
        }
        return load(None, [*(f"{key}={json.dumps(value)}" for key, value in sets.items()), *more])

    return make


@pytest.fixture
def text(tmp_path):
    """A file of text."""
    path = tmp_path / "text.txt"
    chance = np.random.default_rng(0)
    path.write_bytes(bytes(chance.integers(97, 107, 6000, dtype=np.uint8)))
    return path


def idx(path, values):
    """Write an idx file of bytes."""
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())


@pytest.fixture
def images(tmp_path):
    """(samples, side, classes) -> a folder in MNIST's layout."""

    def make(samples=60, side=8, classes=10, name="mnist"):
        folder = tmp_path / name
        folder.mkdir()
        chance = np.random.default_rng(1)
        idx(folder / "train-images-idx3-ubyte", chance.integers(0, 256, (samples, side, side)))
        idx(folder / "train-labels-idx1-ubyte", np.arange(samples) % classes)
        return folder

    return make
