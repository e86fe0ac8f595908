"""Trains what a row of `quality.py` measures, with the production learner, store and codec.

Real: the built-in training function (`fsl_async.learn.client.pretrain.train`) under `fed`, the
exchange (snapshot, coded delta, update, rebase), the Store (spool, accumulator, outer step,
checkpoint), codec, outer optimizer, weighting, and the run's progress that schedules follow. Not
real, so that a row is fast and the same for the same seed: there is no network and there are no
processes, and a sync comes every so many steps of a client instead of by the clock; a round counts
as one second. The clients train one after another, in lockstep, and none trains while a delta
travels. That is the schedule of DiLoCo (Douillard et al., arXiv:2311.08105).
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, SupportsFloat, cast

import attrs
import torch
from quality_groups import Groups
from quality_spec import PROTOCOL, Spec, code_digest

from fsl_async.config.settings_training import InnerOptimizer, TrainConfig
from fsl_async.files.files import Files
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.ports import Orders
from fsl_async.learn.client.schedule import RunClock
from fsl_async.learn.client.training import Training
from fsl_async.learn.data.corpus import Corpus, windows
from fsl_async.learn.models.gpt import GPT
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.events import Attached, Snapshotted
from fsl_async.roles.sync.progress import RunLimits, RunProgress
from fsl_async.roles.sync.weighting import weighting_named
from fsl_async.store.rules.aggregation import rule_named
from fsl_async.store.rules.outer import OPTIMIZERS
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import MEAN, WEIGHTS, Checkpoints

EVALUATED_BYTES = 1 << 17
CURVE_BYTES = 1 << 15
CURVE_POINTS = 12


def silent(_: str) -> None:
    """Drop the task's own evaluation, on fewer bytes; this script reports its own."""


def held_out_loss(model: GPT, spec: Spec, limit_bytes: int = EVALUATED_BYTES) -> float:
    """Nats per byte on held-out text."""
    corpus = pretrain.open_corpus(spec.tables(), model.config.context)
    limit_bytes = min(limit_bytes, 1024 * spec.total_steps)  # a smoke test needs less
    return round(pretrain.evaluate(model, corpus, limit_bytes=limit_bytes), 5)


class ReferenceFed(LocalFed):
    """LocalFed that evaluates on the way.

    In mode "parallel" a step takes the batches of all clients; alone, of unequal texts, those of
    one after another.
    """

    def __init__(self, spec: Spec) -> None:
        name = "client-0" if spec.mode == "parallel" else "alone"
        device = torch.device(spec.device)
        context = ClientContext(name, spec.seed, device, config=spec.tables(), log=silent)
        self.spec = spec
        self.all_steps = spec.total_steps // (spec.clients if spec.mode == "parallel" else 1)
        super().__init__(context, steps=self.all_steps)
        self.curve: list[tuple[int, float]] = []

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """Count a step; evaluate at a twelfth of the run, and so on."""
        running = super().step(tokens=tokens, metrics=metrics)
        done = len(self.history)
        if done * CURVE_POINTS // self.all_steps > (done - 1) * CURVE_POINTS // self.all_steps:
            assert isinstance(self.model, GPT)
            loss = held_out_loss(self.model, self.spec, CURVE_BYTES)
            self.curve.append((done * self.spec.total_steps // self.all_steps, loss))
        return running

    def shard(
        self, data: Any, *, batch: int | None = None, context: int | None = None
    ) -> Iterator[Any]:
        """Draw the windows of all clients, of one after another where they train alone."""
        if self.spec.mode == "alone" and self.spec.text == "code":
            return super().shard(data, batch=batch, context=context)
        assert isinstance(data, Corpus)
        assert batch is not None
        drawn = [self._windows_of(index, data.window_bytes - 1, batch) for index in self._sites]

        def endless() -> Iterator[torch.Tensor]:
            while self.running:
                turn = len(self.history) % len(drawn)
                taken = drawn if self.spec.mode == "parallel" else drawn[turn : turn + 1]
                batch_BS = torch.cat([torch.from_numpy(next(one)) for one in taken])  # noqa: N806
                yield batch_BS.to(self.device).long()

        return endless()

    @property
    def _sites(self) -> range:
        return range(self.spec.clients)

    def _windows_of(self, index: int, context: int, batch: int) -> Iterator[Any]:
        """The windows that client `index` would draw."""
        tables = self.spec.tables(index)
        corpus = pretrain.open_corpus(tables, context)
        local = tables["data"]["sharding"] == "local"
        span = corpus.shard(*((0, 1) if local else (index, self.spec.clients)))
        return windows(corpus, span, batch=batch, seed=self.seed, name=f"client-{index}")


def run_reference(spec: Spec) -> dict[str, Any]:
    """Train in one process without synchronization."""
    fed = ReferenceFed(spec)
    pretrain.train(fed)
    assert isinstance(fed.model, GPT)
    return {"eval_loss": held_out_loss(fed.model, spec), "curve": fed.curve}


class LockstepFed(Fed):
    """Fed of one client: after its steps of a round it takes a snapshot and waits."""

    def __init__(self, client: Client, context: ClientContext) -> None:
        super().__init__(client.training, context)
        self._client = client

    def attach(self, model: torch.nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """Keep the model for the evaluation, then attach."""
        self._client.model = model
        super().attach(model, exchange=exchange)

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """Count a step; at the end of a round synchronize."""
        client = self._client
        client.done += 1
        due = client.done == client.every
        if due:
            client.sequence += 1
            client.learner.request_snapshot(client.sequence)
        running = super().step(tokens=tokens, metrics=metrics)
        if due:
            client.done = 0
            client.pause()
            running = client.training.attend()
        return running


class Client:
    """One client: the built-in task in its own thread, in turns with the coordinator."""

    def __init__(self, index: int, spec: Spec, server: Server) -> None:
        self.name = f"client-{index}"
        self.every = spec.steps[index]
        orders = Orders()
        coder = DeltaCoder(spec.codec.spec_up)
        self.learner = Exchange(orders, coder, self._take)
        self.training = Training(orders, self.learner)
        self.training.clock = RunClock(lambda: server.now + self.done / self.every)
        self.model: torch.nn.Module | None = None
        self.sequence = 0
        self.done = 0
        """Steps in this round."""
        self.held: list[tuple[Delta, list[bytes]]] = []
        """Coded deltas that have not reached the parameter server."""
        self.taken: Snapshotted | None = None
        self._server = server
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._context = ClientContext(
            self.name,
            spec.seed,
            torch.device(spec.device),
            config=spec.tables(index),
            shard_index=index,
            shard_count=spec.clients,
            log=silent,
        )
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Coordinator: let it train until its next snapshot (or its end)."""
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Training thread: let the coordinator go on, and wait."""
        self._paused.release()
        self._go.acquire()

    def join(self) -> None:
        """Coordinator: end it."""
        self.learner.stop()
        self.turn()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            pretrain.train(LockstepFed(self, self._context))
        except BaseException as error:  # noqa: BLE001 - handed to the coordinator, which raises it
            self._error = error
        self._paused.release()

    def _take(self, event: Event) -> None:
        if isinstance(event, Attached):
            self._server.welcome(self)
        elif isinstance(event, Snapshotted):
            self.taken = event


class Server:
    """The store, the run's progress, and the messages of the two roles, without a network."""

    def __init__(self, run_dir: Path, spec: Spec) -> None:
        inner = cast("InnerOptimizer", spec.inner)
        outer = OPTIMIZERS[spec.outer](spec.outer_learning_rate, spec.momentum)
        rule = rule_named(spec.aggregation)
        settings = StoreSettings(1, codec_down=spec.codec.spec_down, outer=outer, rule=rule)
        self.store = Store(run_dir, settings)
        self.store.recover()
        self.weighting = weighting_named("uniform" if rule.by_rows else spec.weighting)
        rounds = spec.rounds if spec.planned else 0
        train = TrainConfig(optimizer=inner, decay_share=spec.decay_share)
        self.progress = RunProgress(RunLimits(rounds), train.decays_from, 1.0)
        self.now = 0.0
        """Seconds of the run; a round takes one."""
        self.bytes_up = 0
        self.bytes_down = 0
        self.cosines: list[float] = []
        """Mean cosine between two clients' deltas, of each round with several."""

    def welcome(self, client: Client) -> None:
        """Take the first client's weights as version 0 and give them to the others."""
        store, learner = self.store, client.learner
        manifest = learner.manifest
        assert manifest is not None
        if store.version < 0:
            store.begin_initial(manifest)
            for index in range(manifest.chunks):
                store.write_initial(index, learner.encode_initial(index))
            digest = store.finish_initial().digest
            same = learner.adopt_initial() == digest
            self.progress.recovered(0, 0, 0.0, self.now)
        else:
            learner.begin_fetch("full", store.version)
            for index in range(manifest.chunks):
                learner.put_fetch(
                    store.version, index, store.read_full(store.version, index) or b""
                )
            digest = learner.finish_fetch(store.version)
            same = digest == store.digest
        assert same, "a client's version is not the parameter server's"
        client.training.clock.announced(self.progress.position(self.now))
        learner.request_rebase(store.version, digest)

    def merge(self, clients: list[Client], stale: int) -> None:
        """One round: deltas up, outer step, update down. stale: rounds the last one is late."""
        store, version = self.store, self.store.version
        merged = []
        for client in clients:
            late = stale if client is clients[-1] else 0
            self._code(client, version)
            if len(client.held) <= late:
                continue
            delta, frames = client.held.pop(0)
            store.spool_begin(delta)
            for index, frame in enumerate(frames):
                store.spool_write(delta.key, index, frame)
            result = store.spool_finish(delta.key)
            assert result.problem is None, result.problem
            weight = self.weighting.weight(delta, version - delta.key.base)
            merged.append(MergedDelta(delta, version - delta.key.base, weight))
        tokens = sum(one.delta.tokens for one in merged)
        self.now += 1.0
        position = self.progress.with_version(version + 1, tokens, self.now)
        made = store.commit(version + 1, merged, self.weighting.scale(merged), position)
        self.progress.committed(made.version, tokens, self.now)
        self.bytes_down += made.bytes_update
        if made.cosine is not None:
            self.cosines.append(made.cosine)
        for client in clients:
            self.give(client, "update")

    def give(self, client: Client, kind: Literal["update", "full"]) -> None:
        """Give a client the newest version."""
        store, learner = self.store, client.learner
        read = store.read_update if kind == "update" else store.read_full
        learner.begin_fetch(kind, store.version)
        for index in range(store.manifest.chunks):
            learner.put_fetch(store.version, index, read(store.version, index) or b"")
        digest = learner.finish_fetch(store.version)
        assert digest == store.digest, f"{client.name} is not at the parameter server's version"
        client.training.clock.announced(self.progress.position(self.now))
        learner.request_rebase(store.version, digest)

    def adopted(self, clients: list[Client]) -> None:
        """The newest version is of the weights of all groups."""
        self.progress.committed(self.store.version, 0, self.now, is_global=True)
        for client in clients:
            self.give(client, "full")

    def _code(self, client: Client, version: int) -> None:
        """Code the delta of a client's snapshot."""
        taken = client.taken
        assert taken is not None
        key = DeltaKey(client.name, 1, version, taken.sequence)
        delta = Delta(key, self.store.digest, taken.tokens, taken.steps)
        frames = [
            client.learner.encode_delta(taken.sequence, index)
            for index in range(self.store.manifest.chunks)
        ]
        self.bytes_up += sum(map(len, frames))
        client.held.append((delta, frames))
        client.learner.drop_delta(taken.sequence)


def run_clients(spec: Spec) -> dict[str, Any]:
    """Train with clients in lockstep, and evaluate the versions of the first group."""
    rounds = spec.rounds
    curve: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory(prefix="quality-") as made:
        folders = [Path(made, str(number)) for number in range(spec.groups)]
        for one in folders:
            one.mkdir()
        servers = [Server(one, spec) for one in folders]
        joined = spec.clients - spec.late_joiner
        members = joined // spec.groups
        groups = [
            [Client(number * members + index, spec, server) for index in range(members)]
            for number, server in enumerate(servers)
        ]
        clients, server, folder = groups[0], servers[0], folders[0]
        watched = clients[1 if spec.dies else 0]
        joined_groups = Groups(
            [one.store for one in servers], spec.codec.spec_global, spec.group_momentum
        )
        tokens = 0
        for number in range(rounds):
            if spec.late_joiner and number == rounds // 2:
                clients.append(Client(joined, spec, server))
            if spec.dies and number == rounds * 3 // 4:
                del clients[0]
            for mine in groups:
                for client in mine:
                    client.turn()
            if spec.groups > 1 and number == 0:
                joined_groups.begin()
            for group, mine in zip(servers, groups, strict=True):
                group.merge(mine, spec.stale)
            if spec.groups > 1 and ((number + 1) % spec.global_every == 0 or number == rounds - 1):
                joined_groups.average()
                for group, mine in zip(servers, groups, strict=True):
                    group.adopted(mine)
            tokens = sum(one.store.tokens_total for one in servers)
            if (number + 1) * CURVE_POINTS // rounds > number * CURVE_POINTS // rounds:
                steps = round((number + 1) / rounds * spec.total_steps)
                loss = _version_loss(folder, server.store, watched, spec)
                assert loss is not None
                curve.append((steps, loss))
        mean_loss = _version_loss(folder, server.store, watched, spec, MEAN)
        for mine in groups:
            for client in mine:
                client.join()  # answers the last rebase first
        values = server.store.manifest.values
        for group in servers:
            group.store.close()
    assert isinstance(watched.model, GPT)
    coded = values * rounds
    bytes_up = sum(one.bytes_up for one in servers)
    return {
        "eval_loss": held_out_loss(watched.model, spec),
        **({} if mean_loss is None else {"mean_loss": mean_loss}),
        "curve": curve,
        "rounds": rounds,
        "tokens": tokens,
        "parameters": values,
        "cosines": _by_tenths(server.cosines),
        "bits_up": round(8 * bytes_up / (coded * spec.clients), 4),
        "bits_down": round(8 * server.bytes_down / coded, 4),
    }


def _by_tenths(values: Sequence[float]) -> list[float]:
    """Medians of the tenths of a run."""
    edges = [len(values) * tenth // 10 for tenth in range(11)]
    parts = [values[start:stop] for start, stop in pairwise(edges)]
    return [round(statistics.median(part), 4) for part in parts if part]


def _version_loss(
    run_dir: Path, store: Store, client: Client, spec: Spec, name: str = WEIGHTS
) -> float | None:
    """Held-out loss of the store's version, or of the mean beside it, in a model of its own."""
    assert isinstance(client.model, GPT)
    files = Files()
    read = read_version(files, Checkpoints(files, run_dir), store.version, store.manifest)
    vector = read.weights if name == WEIGHTS else read.mean
    if vector is None:
        return None
    copy = GPT(client.model.config).to(spec.device)
    ModelWeights(copy).copy_in(vector)
    return held_out_loss(copy, spec, CURVE_BYTES if name == WEIGHTS else EVALUATED_BYTES)


def measure(spec: Spec) -> dict[str, Any]:
    """Run one row."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    found = run_clients(spec) if spec.mode == "clients" else run_reference(spec)
    seconds = round(time.perf_counter() - begun, 1)
    head = {"bench": "quality", "protocol": PROTOCOL, "code": code_digest(spec.mode)}
    made_with = {"torch": torch.__version__, "processor": processor(spec.device)}
    return {**head, "spec": attrs.asdict(spec), **found, "seconds": seconds, **made_with}


def processor(device: str) -> str:
    """The name of what computed a row."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def check() -> dict[str, Any]:
    """Check that one averaged client in fp32 agrees with one process on the same batches."""
    # In mode "parallel" one client's batches are those of client-0.
    lone = run_reference(Spec(seed=0, mode="parallel", steps=(1,), total_steps=60))
    averaged = Spec(seed=0, steps=(20,), total_steps=60, format="fp32", outer="average")
    synced = run_clients(averaged)["eval_loss"]
    losses = {"alone": lone["eval_loss"], "one_client_averaged": synced}
    return {
        "bench": "quality",
        "check": "one client, averaging, fp32",
        **losses,
        "difference": round(synced - lone["eval_loss"], 5),
    }
