"""Plays the kinds of run against today's production code.

The only file here that calls the machine, the shell and the store: when their interfaces change,
this file follows, and `kinds.py`, the directories and the digests stay.

`Server` is a production parameter server (machine, shell, store) whose clients are this file: they
hold each version that is announced and send the deltas of `kinds.py`.
"""

from __future__ import annotations

import hashlib
import json
import threading

import numpy as np
import torch
from attrs import evolve
from click.testing import CliRunner
from kinds import ALWAYS, CLIENTS, LAST, LEFT, PENDING, STEPS, TOKENS, delta_values, numbers

import fsl_transport as tp
from fsl_async.commands import sim
from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.files.files import Files
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.nodes.ps.aggregation import merging_of, weighting_of
from fsl_async.nodes.ps.node import store_settings_of
from fsl_async.nodes.ps.shell import ParameterServerShell, Surroundings
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.groups.events import Decision
from fsl_async.roles.split.events import ClientProgress, SplitProgress
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import RANK, Delta, DeltaKey
from fsl_async.roles.sync.messages import delta_stream
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode, encode_seeds

NOON = 1_800_000_000.0
DAY_S = 86_400.0
FP32 = CodecSpec(format="fp32")


class AtOnce:
    """A worker that runs jobs at once, and lets their errors out."""

    def submit(self, job, done, failed):
        """Run a job."""
        done(job())


class Quiet(Files):
    """A disk that does not wait for the hardware."""

    def sync(self, descriptor):
        """Do nothing."""


class Deadly(Quiet):
    """A disk that ends the process right after version LEFT exists, before the ledger has its line.

    No checkpoint after version 0 becomes whole, so that a start has to replay all versions.
    """

    def write(self, descriptor, data, offset):
        """Write, unless this is the thread of checkpoints."""
        if threading.current_thread().name == "snapshot":
            raise OSError(28, "No space left on device")
        super().write(descriptor, data, offset)

    def rename(self, source, target):
        """Rename; the rename of a version's folder is its commit."""
        super().rename(source, target)
        if target.name == f"v{LEFT:08d}":
            raise SystemExit("killed")


class Server:
    """A parameter server on a run directory, and its clients."""

    def __init__(self, run_dir, kind, files=None):
        self.kind, self.run_dir = kind, run_dir
        self.config = config = with_implied(load(None, [*ALWAYS, *kind.settings]))
        self.manifest = Manifest.from_shapes(kind.weights, kind.buffers)
        self.scheduler = tp.VirtualScheduler()
        self.digests, self.called = {}, {}
        self.store = Store(
            run_dir, store_settings_of(config), files=files or Quiet(),
            wall_clock=lambda: NOON + self.scheduler.time(), clock=self.scheduler.time,
        )  # fmt: skip
        recovered = self.store.recover()
        self.digests.update(recovered.digests)
        self.recovered = recovered
        self.machine = ParameterServerMachine(
            config, merging_of(config), weighting_of(config), "referee"
        )
        self.shell = ParameterServerShell(
            self.machine,
            Surroundings(
                store=self.store, worker=AtOnce(), scheduler=self.scheduler, journal=TraceHash(),
                listener=lambda _: self, say=lambda _: None, finished=lambda _: None,
            ),
        )  # fmt: skip
        self.shell.start(recovered)
        for name in CLIENTS:
            hello = {"run": "", "version": -1, "digest": "", "shard": -1}
            self.shell.on_transport(tp.HelloReceived(name, 1, hello, "client"))
        for name in CLIENTS:
            wire = self.manifest.to_wire(), self.manifest.frozen_to_wire()
            self.says(name, msg.Attach(self.manifest.fingerprint, *wire))
        if kind.adopts and self.store.groups.open(coordinates=True).adopted is None:
            self.store.groups.begin()

    # --- what the shell calls of the transport ---

    def __getattr__(self, name):
        """Return a call of the transport without effect here."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None

    def transfers(self):
        """Return the transfers in progress: none."""
        return []

    def send(self, peer, body):
        """Take a message to a client, and answer it."""
        match msg.from_wire(body):
            case msg.Publish():
                spans = map(self.manifest.chunk_range, range(self.manifest.chunks))
                initial = self.initial()
                frames = [encode(initial[start:stop], FP32) for start, stop in spans]
                meta = msg.InitialMeta(self.manifest.fingerprint)
                self.stream(peer, f"initial:{peer}/1", meta, frames)
            case msg.Announce(version, digest) | msg.Scalars(version, digest):
                self.digests[version] = digest
                self.says(peer, msg.Holding(version, digest))
            case msg.Call(number) | msg.Turn(number):
                self.called[peer] = number
            case msg.Reject(_, text):
                raise AssertionError(text)

    def accept(self, peer, stream, sink, first=0):
        """Send the frames that are missing of the stream that was offered."""
        frames, most = self.offered
        for index in range(first, min(most, len(frames))):
            sink.write(index, frames[index], lambda _: None)
        if most >= len(frames):
            self.shell.on_transport(tp.StreamReceived(peer, stream))

    # --- the clients ---

    def says(self, peer, message):
        """Send a client's message."""
        self.shell.on_transport(tp.MessageReceived(peer, msg.to_wire(message)))

    def stream(self, peer, stream, meta, frames, most=1 << 30):
        """Offer a stream, and send at most so many frames."""
        self.offered = frames, most
        event = tp.StreamOffered(peer, stream, msg.to_wire(meta), len(frames))
        self.shell.on_transport(event)

    def initial(self):
        """Return version 0: no products yet, where there are adapters."""
        values = numbers(self.manifest.values, 0)
        for one in self.manifest.tensors:
            if one.name.endswith(("lora_B", "patch")):
                values[one.offset : one.offset + one.values] = 0.0
        return values

    def deliver(self, client, version, lag=0, most=1 << 30):
        """Send a client's delta for `version`; most: frames that arrive of it."""
        base = version - 1 - lag
        key = DeltaKey(client, 1, base, version)
        tokens, steps, digest = TOKENS[client], STEPS[client], self.digests.get(base, "")
        if self.kind.is_scalars:
            scalars = numbers(6, 100 * version + ord(client[0])).reshape(1, 2, 3) * 16
            if client == "odd":
                scalars[0, 1, 1] = np.nan
            frame = encode_seeds(base, scalars)
            self.says(client, msg.Measured(version, digest, tokens, steps, frame))
            return
        values = delta_values(self.kind, client, version, self.manifest.values)
        frames = []
        for index in range(self.manifest.chunks):
            start, stop = self.manifest.chunk_range(index)
            spec = FP32 if self.manifest.is_buffer(index) else self.config.codec.spec_up
            frames.append(encode(values[start:stop], spec))
        ranks = self.kind.ranks
        facts = {RANK: float(ranks[client])} if client in ranks else {}
        delta = Delta(key, digest, tokens, steps, version - 1, {}, facts)
        self.stream(client, delta_stream(key.text), msg.DeltaMeta(delta), frames, most)

    def until(self, holds):
        """Advance the clock until `holds()`."""
        while not holds():
            assert self.scheduler.run_next(), "nothing is due"
            assert self.scheduler.time() < DAY_S, "it never holds"

    def open_round(self):
        """Wait until clients are called, where they are; not one whose delta is pending."""
        if self.config.sync.trigger != "buffer":
            waiting = set(CLIENTS) - {one.key.client for one in self.recovered.pending}
            self.until(lambda: waiting <= set(self.called))
            self.recovered = evolve(self.recovered, pending=())

    def make(self, version):
        """Let the clients send what makes a version; return its digest."""
        self.open_round()
        if self.kind.adopts and version == LEFT + 1:  # so that the group merges on after its cut
            self.store.groups.take_cut(self.store.groups.state.adopted.round)
        senders = self.kind.senders(version)
        for client, lag in senders:
            self.deliver(client, version, lag)
        called, self.called = self.called, {}
        for client, number in called.items():
            if client not in dict(senders):
                self.says(client, msg.Skip(number, "nothing new"))
        self.until(lambda: self.store.version == version)
        assert self.digests[version] == self.store.digest
        return self.store.digest

    def leave_pending(self):
        """Leave a delta acknowledged, another half sent, and the cut of a global round."""
        self.open_round()
        if self.kind.adopts:
            self.store.groups.take_cut(self.store.groups.state.adopted.round)
        self.deliver(PENDING[0], LEFT + 1)
        if not self.kind.is_scalars:
            self.deliver(PENDING[1], LEFT + 1, most=1)

    def adopt(self, version):
        """Reduce a global round of this one group, in NumPy, and make its result the version."""
        groups = self.store.groups
        number = groups.state.adopted.round
        cut = groups.take_cut(number)
        groups.keep_attempt(number, number + 1)
        job = groups.begin_result(number + 1)
        flat = {name: np.fromfile(job[name], "<f4", offset=job["skip"])
                for name in ("base", "cut", "residual") if job[name] is not None}  # fmt: skip
        total = flat["base"] - flat["cut"] - flat.get("residual", np.float32(0))
        job["out"].write_bytes(job["base"].read_bytes()[: job["skip"]] + total.tobytes())
        digest = groups.finish_result(number + 1, self.config.codec.spec_down)
        groups.keep_decision(number + 1, number + 1, digest, {"first": (cut.begin, cut.end)})
        decision = Decision(number + 1, number + 1, digest, groups.state.adopted.run)
        made = self.store.adopt_global(decision, counted=True)
        assert made.version == version
        return made.digest

    def close(self):
        """End the process in order: the newest version is whole on disk."""
        self.store.finish_snapshot()
        self.store.close()


def play(run_dir, kind, last, files=None):
    """Open a run directory and make versions up to `last`.

    Return the open server, what the start found besides weights, and each version's digest.
    """
    server = Server(run_dir, kind, files)
    found, digests = facts_of(server.recovered), {server.store.version: server.store.digest}
    while server.store.version < last:
        version = server.store.version + 1
        if version not in kind.adopts:
            digests[version] = server.make(version)
            continue
        digests[version] = server.adopt(version)
        server.close()  # a group's machine gets its global weights from the member's machine
        server = Server(run_dir, kind, files)
    return server, found, {str(version): digest for version, digest in digests.items()}


def facts_of(recovered):
    """Return what a start found besides weights, as JSON has it."""
    return {
        "version": recovered.version,
        "tokens": recovered.tokens_total,
        "pending": [one.key.text for one in recovered.pending],
        "settled": {key.text: outcome for key, outcome in sorted(recovered.settled.items())},
        "leases": dict(recovered.leases),
        "global": [recovered.global_version, recovered.global_versions],
    }


def ended(server, run_dir):
    """Close a server; return a digest of each vector of its newest version, by the file's name."""
    server.close()
    folder, size = run_dir / "checkpoints" / f"v{LAST:08d}", 4 * server.manifest.values
    return {
        path.stem: hashlib.sha256(path.read_bytes()[-size:]).hexdigest()[:32]
        for path in sorted(folder.glob("*.safetensors"))
    }


# --- the split server ---


def upload(step):
    """Return the key of an upload: two clients in turn."""
    return UploadKey("ab"[step % 2], 7, step // 4, step // 2)


def play_split_server(folder, last, *, kills=False):
    """Open a split server's folder and train uploads up to number `last`, with a checkpoint after
    each two.

    kills: ends in the middle of a checkpoint and of a line. Return what the start found.
    """
    disk = ServerDisk(folder, Quiet())
    state = disk.recover()
    before = state.recovered
    found = {
        "book": before.progress.to_plain(),
        "lost": [key.text for key in before.lost],
        "auxiliary": dict(before.auxiliary_seen),
        "tensors": {"common": tensors_digest(state.common or {})}
        | {name: tensors_digest(tensors) for name, tensors in state.clients},
    }
    for key in before.lost:
        disk.append("upload", key=key.text, outcome="dropped", reason="the server died")
    for uploads in range(before.progress.uploads + 1, last + 1):
        disk.append("upload", key=upload(uploads - 1).text, outcome="trained", reason="")
        if uploads % 2:
            continue
        disk.append("auxiliary", client="a", version=uploads)
        clients = {
            name: ClientProgress(7, upload(uploads - 2 + place), uploads // 4, uploads)
            for place, name in enumerate("ab")
        }
        book = SplitProgress("referee", uploads // 4, uploads // 8, uploads, clients)
        tensors = [(name, split_tensors(uploads, ord(name))) for name in "ab"]
        seal = disk.stage(book, split_tensors(uploads, 0), tensors)
        if kills and uploads == last:
            break
        seal()
    disk.close()
    if kills:
        with (folder / "ledger.jsonl").open("ab") as ledger:
            ledger.write(b'{"key": "a/7/')
    return found


def split_tensors(uploads, seed):
    """Return tensors of a checkpoint: weights, and a counter."""
    weights = torch.from_numpy(numbers(30, 1000 * uploads + seed)).reshape(5, 6)
    return {"server/w": weights, "steps": torch.tensor(uploads)}


def tensors_digest(tensors):
    """Return a digest of tensors by their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)};".encode())
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()[:32]


# --- the simulator ---


def simulate(arguments):
    """Run `fsl-node sim`; return its trace's hash and the counts that outlast names of events."""
    result = CliRunner().invoke(sim.command, [*arguments.split(), "--json"], standalone_mode=False)
    report = json.loads(result.stdout)
    names = ("rounds", "tokens", "deltas_merged", "deltas_lost", "deltas_doubled", "relaunches",
             "invariant_violations", "faults_by_kind", "split", "tune", "groups")  # fmt: skip
    counts = {name: report[name] for name in names if report[name] is not None}
    return report["trace_sha256"], counts
