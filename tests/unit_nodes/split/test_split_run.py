"""Complete runs of split learning in one process.

Real sockets on loopback, real threads, a parameter server, a split server, clients.
"""

import threading

import numpy as np
import pytest
import torch
from split_lockstep import start

from fsl_async.config.load import load, to_dict
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.config.split_rules import split_method
from fsl_async.errors import ConfigError
from fsl_async.learn.client.pretrain import open_corpus
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split import build, samples, weights
from fsl_async.learn.split.server import ServerSettings
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.split_server import node as node_server
from fsl_async.process.stopper import Stopper
from fsl_async.tools.evaluation import load_last

NAMES = ("site-a", "site-b")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    chance = np.random.default_rng(0)
    path.write_bytes(bytes(chance.integers(97, 107, 6000, dtype=np.uint8)))
    return path


def settings(text, *more, clients=2):
    sets = [
        "listen.address=tcp://127.0.0.1:0",
        "split.listen=tcp://127.0.0.1:0",
        f"data.path={text}",
        f"data.shards={clients}",
        "data.holdout=0.0",
        f"sync.clients={clients}",
        f"sync.min_clients={clients}",
        "session.heartbeat_every_s=0.5",
        "session.expire_after_s=5.0",
        "model.preset=0.5m",
        "model.layers=2",
        "model.width=32",
        "model.heads=2",
        "model.context=16",
        "train.batch=4",
        "train.threads=1",
        "train.device=cpu",
        "split.samples=10",
        "split.upload_every=2",
        "split.align_every=1",
        "split.align_passes=3",
        "split.up=fp32",
        "split.down=fp32",
        *more,
    ]
    return load(None, sets)


class Run:
    """A run in threads of this process."""

    def __init__(self, config, run_dir, names=NAMES):
        self.config, self.run_dir, self.names = config, run_dir, names
        self.lines, self.summaries, self.errors = [], {}, {}
        self.address = None
        self.listening = threading.Event()
        self.stop = Stopper()

    def announce(self, role, address):
        """Record its address."""
        if role == "ps":
            self.address = address
            self.listening.set()

    def in_thread(self, name, job):
        """Start a node."""

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

    def client(self, name):
        """Run one client to its end."""
        everything = SitePolicy(frozenset(KINDS))
        options = ClientOptions(self.address, name, data=self.config.data.path, policy=everything)
        return joining.join_run(options, stop=Stopper(), log=self.lines.append)

    def play(self):
        """Run all nodes to the end."""
        threads = [
            self.in_thread(
                "server",
                lambda: node_server.serve(
                    self.config,
                    self.run_dir,
                    with_ps=True,
                    announce=self.announce,
                    log=self.lines.append,
                    stop=self.stop,
                ),
            )
        ]
        assert self.listening.wait(30), self.lines
        if self.address:
            for name in self.names:
                threads.append(self.in_thread(name, lambda name=name: self.client(name)))
                # shards depend on the order of hellos
                while not any(f"as {name}" in line for line in self.lines) and not self.errors:
                    threads[-1].join(0.02)
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "\n".join(self.lines)
        assert not self.errors, (self.errors, self.lines)
        return self


def oracle(config, rounds):
    """The same computation in one process, from the same parts, seeds and batches."""
    parts = build.build_parts(config, at_client=False)
    method = split_method(config)
    server, *_ = build.build_server(config, torch.device("cpu"))
    found = start(
        method,
        parts.model,
        NAMES,
        build.optimizer_of(config),
        auxiliary=parts.auxiliary,
        auxiliary_optimizer=build.client_options(config).auxiliary_optimizer,
        seed=config.run.seed,
        server=ServerSettings(
            build.optimizer_of(config), seed=config.run.seed, align=server.settings.align
        ),
    )
    tables = to_dict(config)
    corpus = open_corpus(tables, config.model.context)
    for number in range(rounds):
        found.round(
            {
                name: [
                    Batch(*each)
                    for each in samples.batches(
                        corpus,
                        corpus.shard(shard, len(NAMES)),
                        config,
                        shard,
                        # in a relay every turn is a round of its own
                        number * len(NAMES) + shard if method.sequential else number,
                    )
                ]
                for shard, name in enumerate(NAMES)
            }
        )
    return found


def apart(found, wanted):
    """Largest relative difference of any weight."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    differing = found != wanted
    if not differing.any():
        return 0.0
    with np.errstate(divide="ignore"):
        return float(np.max(np.abs(found - wanted)[differing] / np.abs(wanted)[differing]))


def x_server(run_dir):
    """The split server's checkpoint: the common part, and the parts of each client."""
    disk = ServerDisk(run_dir / "server")
    state = disk.recover()
    disk.close()
    return state


def under(prefix, state):
    return {
        name.removeprefix(prefix): tensor.numpy()
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("method", ["sl", "splitfed-v1", "splitfed-v2", "cse-fsl", "fsl-sage"])
def test_a_run_in_lockstep_is_the_computation_in_one_process(method, text, tmp_path):
    """The network must not change the result: the same calls in the same order."""
    rounds = 4 if method == "sl" else 3  # a round of a relay is one client's turn
    config = settings(
        text,
        f"split.method={method}",
        "split.mode=lockstep",
        "split.optimizer=sgd",
        "train.learning_rate=0.1",
        f"run.rounds={rounds}",
    )
    Run(config, tmp_path / "run").play()
    wanted = oracle(config, rounds // 2 if method == "sl" else rounds)
    found = x_server(tmp_path / "run")
    common = under("server/", wanted.server.state())
    kept = under("server/", found.common)
    assert max(apart(kept[name], tensor) for name, tensor in common.items()) <= 1e-6
    client = wanted.clients[NAMES[-1]]
    body = client.part("client")
    if method == "cse-fsl":
        body = torch.nn.ModuleDict({"client": body, "auxiliary": client.part("auxiliary")})
    expected = weights.export(body)
    loaded = weights.weights_of(body)
    record = load_last(tmp_path / "run" / "ps", loaded)
    assert record.version == rounds
    assert apart(weights.export(body), expected) <= 1e-6


def test_labels_stay_at_home_in_a_u_shape(text, tmp_path):
    """A step crosses the cut twice without labels, and equals the computation in one process."""
    config = settings(
        text,
        "split.method=splitfed-v2",
        "split.mode=lockstep",
        "split.labels_at_home=true",
        "split.optimizer=sgd",
        "train.learning_rate=0.1",
        "run.rounds=2",
    )
    run = Run(config, tmp_path / "run").play()
    wanted = under("server/", oracle(config, 2).server.state())
    kept = under("server/", x_server(tmp_path / "run").common)
    assert max(apart(kept[name], tensor) for name, tensor in wanted.items()) <= 1e-6
    assert "labels up" not in run.summaries["server"].traffic["payload"]


def test_a_split_server_listens_on_loopback_by_default(tmp_path):
    """Its port is as open as the parameter server's."""
    overrides = [
        "split.method=splitfed-v2",
        "split.listen=0.0.0.0:7301",
        "listen.address=127.0.0.1:0",
    ]
    with pytest.raises(ConfigError, match=r"split\.listen: .*--insecure"):
        node_server.serve(
            load(None, overrides),
            tmp_path,
            with_ps=True,
            announce=lambda *_: None,
            log=lambda _: None,
            stop=Stopper(),
        )
