"""Many light clients in one process, for benchmarks of the parameter server.

Real, the production code: each client's session, credit and streams (`DialerEndpoint` over
`ZmqDialer`, real sockets), its decisions (`ClientMachine`) and the shell that carries them out
(`ClientShell`), with its own name, incarnation and delta keys.

Shared or left out, because 24 clients with three or four vectors of the model's size do not fit
into one machine:
  * No client trains. A snapshot is answered at once: with work when the benchmark orders it, else
    "nothing trained" (the parameter server then closes its round without a version).
  * All send the same delta. It was coded before, each chunk once, and is only read.
  * The first client is complete on the way down: it decodes every update, adds it to its base and
    hashes the result, so that the announced digest is checked. The others receive all their bytes
    through the same sockets and streams, and keep a CRC-32 of them; it is compared with the first
    client's, whose digest they report.
  * The first client publishes version 0, the second fetches it in full; the others announce that
    they hold version 0 already, as after a lost connection.
All run on one event loop, with one worker thread for the first client and another one for all the
others.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from attrs import Factory, define, field
from numpy.typing import NDArray

import fsl_transport as tp
from fsl_async.learn.client.exchange import FetchKind
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.runtime import ThreadWorker
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.machine import Event, Note
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.version_sync import Held
from fsl_async.store.disk.chunk_files import (
    DIGEST_CHARACTERS,
    chunk_digest,
    digest_of,
    vector_digest,
)
from fsl_async.store.errors import LearnerError
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec, decode_into, encode
from fsl_transport.zmq.link import ZmqDialer

TOKENS = 100_000
STEPS = 100
STEP_DEVIATION = 1e-3
WEIGHT_DEVIATION = 0.02


@define
class SharedModel:
    """What the clients share: the weights, and one coded delta."""

    manifest: Manifest
    spec: CodecSpec
    base: NDArray[np.float32] = field(init=False)
    delta: list[bytes] = Factory(list)
    crcs: dict[int, int] = Factory(dict)
    """CRC-32s of each version's update, as the first client received it."""

    def __attrs_post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.base = rng.standard_normal(self.manifest.values, np.float32)
        self.base *= np.float32(WEIGHT_DEVIATION)
        for index in range(self.manifest.chunks):
            values = rng.standard_normal(self.manifest.chunk_values(index), np.float32)
            self.delta.append(encode(values * np.float32(STEP_DEVIATION), self.spec))

    @property
    def delta_bytes(self) -> int:
        """Coded bytes of the delta."""
        return sum(map(len, self.delta))


class LightLearner:
    """The learner's port for one client; `complete` is the one that decodes."""

    def __init__(self, client: LightClient, model: SharedModel, *, complete: bool) -> None:
        self.manifest: Manifest | None = model.manifest
        self.global_digest = ""
        self.base_version = -1
        self.crc = 0
        self.bytes_down = 0
        self._client = client
        self._model = model
        self._complete = complete
        self._kind = ""
        self._digests: list[bytes] = []
        self._scratch = np.empty(model.manifest.longest_chunk, np.float32)

    # --- loop thread

    def request_snapshot(self, sequence: int, *, hold: bool = False) -> None:
        """Answer at once, with work when there is some; there is no thread to hold."""
        work, self._client.work = self._client.work, False
        done = (TOKENS, STEPS) if work else (0, 0)
        self._client.answered_at = time.monotonic()
        self._client.feed_soon(ev.Snapshotted(sequence, self.base_version, *done))
        self._client.changed()

    def begin_round(self, sequence: int, number: int) -> None:
        """Rounds of a client are for split learning only."""
        raise NotImplementedError

    def count_steps(self, steps: int) -> None:
        """No step is trained."""

    def resume(self) -> None:
        """No thread is held."""

    def request_rebase(self, version: int, digest: str, *, discard: bool = False) -> None:
        """There is no model to move."""
        self._client.held = version
        self._client.feed_soon(ev.Rebased(version))
        self._client.changed()

    def drop_delta(self, sequence: int) -> None:
        """Do nothing: all clients share the delta."""

    def scalars_frame(self, sequence: int) -> bytes | None:
        """Return None: deltas are vectors."""
        return None

    def delta_frames(self, sequence: int) -> int:
        """Return the chunks of the model."""
        return self._model.manifest.chunks

    def begin_fetch(self, kind: FetchKind, version: int) -> None:
        """Get ready."""
        self._kind, self.crc = kind, 0
        self._digests = []

    def stop(self) -> None:
        """Nothing to do: no client trains."""

    def refuse(self, code: str, text: str) -> None:
        """End the benchmark."""
        self._client.problems.append(f"refused: {text}")
        self._client.changed()

    # --- worker thread

    def encode_initial(self, index: int) -> bytes:
        """Code a chunk of the weights."""
        start, stop = self._model.manifest.chunk_range(index)
        return encode(self._model.base[start:stop], CodecSpec(format="fp32"))

    def adopt_initial(self) -> str:
        """Return the digest of version 0."""
        self.base_version = 0
        return digest_of(self._model.base)

    def encode_delta(self, sequence: int, index: int) -> bytes:
        """Return the shared chunk."""
        return self._model.delta[index]

    def finish_encoding(self, sequence: int) -> None:
        """Nothing to do: the delta is coded."""

    def put_fetch(self, version: int, index: int, frame: bytes) -> None:
        """Add to the CRC; the complete client applies the chunk and hashes what comes out."""
        self.crc = zlib.crc32(frame, self.crc)
        self.bytes_down += len(frame)
        if self._complete and self._kind == "update":
            start, stop = self._model.manifest.chunk_range(index)
            values, part = self._scratch[: stop - start], self._model.base[start:stop]
            decode_into(frame, values)
            np.add(part, values, out=part)
            self._digests.append(chunk_digest(part))

    def finish_fetch(self, version: int) -> str:
        """Return the digest: computed, or the announced one where only bytes are compared."""
        if self._complete and self._kind == "full":
            raise LearnerError("the complete client follows updates only")
        self.base_version = version
        if self._complete:
            self._model.crcs[version] = self.crc
            return vector_digest(self._digests)[:DIGEST_CHARACTERS]
        return self._client.machine.version_sync.latest.digest


class LightClient:
    """One client. `held`: the version it holds. `work`: whether its next snapshot has a delta."""

    def __init__(
        self,
        name: str,
        model: SharedModel,
        changed: Callable[[], None],
        *,
        complete: bool,
        worker: ThreadWorker,
        server: str,
        learner: type[LightLearner] = LightLearner,
    ) -> None:
        self.name = name
        self.held = -1
        self.work = False
        self.answered_at = 0.0
        self.changed = changed
        self.problems: list[str] = []
        self._loop = asyncio.get_running_loop()
        self.machine = ClientMachine(name, time.time_ns())
        self.learner = learner(self, model, complete=complete)
        self.link = ZmqDialer(server, name)
        self._shell = ClientShell(
            self.machine,
            cast("Any", self.learner),
            self._dialer,
            worker=worker,
            scheduler=self._loop,
            journal=TraceHash(),
            say=self._say,
            finished=lambda _: None,
            welcomed=lambda _: None,
            end_training=lambda _: None,
        )
        self._manifest = model.manifest

    def _dialer(self, take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
        self._endpoint = tp.DialerEndpoint(
            self.link,
            self._loop,
            tp.TransportSettings(),
            take,
            self.name,
            incarnation=self.machine.incarnation,
        )
        return self._endpoint

    def start(self, held: Held | None = None) -> None:
        """Dial. `held`: announce that this version is here already."""
        self._shell.node.feed(ev.Attached(self._manifest.fingerprint, self._manifest.values))
        if held is not None:
            self.learner.base_version = held.version
            self._shell.node.feed(ev.BaseReplaced(held.version, held.digest))
        self._shell.dial()

    def feed_soon(self, event: Event) -> None:
        """Pass an event to the machine once the current one is handled."""
        self._loop.call_soon(self._shell.node.feed, event)

    async def close(self) -> None:
        """Close the connection."""
        self._shell.node.close()
        await self._endpoint.aclose()

    def _say(self, note: Note) -> None:
        if note.level != "info":
            self.problems.append(note.text)
            self.changed()


class Crowd:
    """All clients of one benchmark, and their rounds."""

    def __init__(
        self,
        model: SharedModel,
        server: str,
        clients: int,
        every_s: float,
        learner: type[LightLearner] = LightLearner,
    ) -> None:
        self.model = model
        self.every_s = every_s
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._workers = [ThreadWorker(loop, name) for name in ("first", "others")]
        self.clients = [
            LightClient(
                f"client-{index:02}",
                model,
                self._changed.set,
                complete=index == 0,
                worker=self._workers[min(index, 1)],
                server=server,
                learner=learner,
            )
            for index in range(clients)
        ]

    async def start(self) -> float | None:
        """Publish, fetch, join. Returns the seconds of the second client's full fetch, or None."""
        first, *others = self.clients
        first.start()
        await self._until(lambda: first.held == 0)
        joined_s = None
        if others:
            begun = time.monotonic()
            others[0].start()
            await self._until(lambda: others[0].held == 0)
            joined_s = time.monotonic() - begun
        for client in others[1:]:
            client.start(first.machine.base)
        await self._until(lambda: all(client.held == 0 for client in self.clients))
        return joined_s

    async def sync(self, version: int) -> None:
        """Give every client work for the next call, and wait until all hold `version`.

        Between rounds the parameter server goes on calling, and every client answers that it
        trained nothing. Work is given out right after all have answered the same call, so that the
        next one finds all of them with work.
        """
        begun = time.monotonic()

        def in_step() -> bool:
            times = [client.answered_at for client in self.clients]
            return min(times) > begun and max(times) - min(times) < self.every_s / 2

        await self._until(in_step)
        for client in self.clients:
            client.work = True
        await self._until(lambda: all(client.held >= version for client in self.clients))
        crc = self.model.crcs[version]
        for client in self.clients:
            if client.learner.crc != crc or client.held != version:
                raise RuntimeError(f"{client.name} did not follow to version {version}")

    async def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            await client.close()
        for worker in self._workers:
            worker.close()

    async def _until(self, true: Callable[[], Any]) -> None:
        while not true():
            for client in self.clients:
                if client.problems:
                    raise RuntimeError(f"{client.name}: {client.problems[0]}")
            self._changed.clear()
            await self._changed.wait()
