"""Where training and the network meet: snapshots, coded deltas, fetched versions, rebases.

Three threads come here. The training thread (user code, inside fed.attach and fed.step), the loop thread
(the runtime: it may ask, it must never wait), and a worker thread (it codes, decodes, hashes).

Vectors, all fp32 on the CPU, each the size of the model:
    base       Theta_v, what the parameter server holds, to the bit
    reference  r, from where unsent work is measured: the last snapshot, or the base the model was rebased onto
    spare      the one that is free, kept for the next snapshot
    residual   with error feedback, the coder's: what coding has lost of the deltas so far
A vector is never written while somebody refers to it. So between syncs, and in the usual order (snapshot, send, fetch,
rebase), there are two of them besides the model; three while a full version is fetched, or when a second snapshot
is taken before the first is coded. On top of them come coded chunks: a delta until drop_delta, an update until finish_fetch.

The arithmetic, with theta the model's weights:
    snapshot   u = theta;  delta = r - u, or u itself where the run exchanges whole weights (docs/adr/0045);  r <- u
    rebase     theta <- Theta_new + (theta - r);  r <- Theta_new
Unsent work is r - theta. A snapshot hands it to a delta and leaves none; a rebase leaves it as it is: it is
untouched by what version the others are at. So in any order of snapshots and rebases everything trained is in exactly one
delta or still unsent. Two things leave the books, and both are meant to: a delta that is declined or dropped is not
sent again (its work was measured from a base that nobody wants), and a rebase with `discard`, or one of
weights that are no longer finite, takes Theta_new as it is.

Precision: with fp32 weights a rebase rounds once per weight. With bf16 weights theta - r carries the rounding of
Theta_new to bf16 into the next delta; keep fp32 weights and use autocast.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import attrs
from torch import nn

from fsl_async.errors import ExitCode, RefusedError, TaskError
from fsl_async.learn.client.buffers import ModelWeights, Vector
from fsl_async.learn.client.delta_coder import LOSSLESS, DeltaCoder
from fsl_async.learn.client.fetching import Fetch
from fsl_async.learn.client.meter import Meter
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.events import Attached, Rebased, Snapshotted
from fsl_async.store.chunk_pool import ChunkPool
from fsl_async.store.errors import LearnerError
from fsl_async.store.manifest import Manifest, digest_of
from fsl_codecs import encode, new_vector

NO_VERSION = -1


class RunFinishedError(TaskError):
    """The run has ended: before this client got its weights, or the training function goes on although fed.step said so."""

    default_code = ExitCode.DONE


@attrs.define(eq=False)
class _Delta:
    minuend: Vector | None
    subtrahend: Vector | None
    coded: list[bytes | None]
    missing: int


@attrs.frozen
class _SnapshotAsked:
    sequence: int
    hold: bool = False


@attrs.frozen
class _RoundAsked:
    sequence: int
    number: int


@attrs.frozen
class _RebaseAsked:
    version: int
    discard: bool


class Learner:
    """The client's weights. See the module's docstring for threads, memory and arithmetic.

    coder: how deltas are coded; may be replaced until the first delta is coded.
    on_event: called from the training thread with Attached, Snapshotted and Rebased; must be thread-safe.
    """

    def __init__(
        self,
        coder: DeltaCoder | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.coder = coder or DeltaCoder()
        self.pool = ChunkPool()
        self.on_event = on_event
        self.manifest: Manifest | None = None
        self.version = NO_VERSION  # what the model was last rebased onto
        # The one thing fed.step looks at when nothing is wanted. True until a model is attached, so that
        # a step before that ends in attend(), which complains.
        self.attention = True
        self.meter = Meter()

        # _lock guards the fields below and is held for moments only. _moving is held by whoever reads or writes the base at
        # length (the training thread's rebase, the worker's finish_fetch); the loop thread never takes it.
        self._lock = threading.Lock()
        self._asked = threading.Condition(self._lock)
        self._moving = threading.Lock()
        self._weights: ModelWeights | None = None
        self._requests: deque[_SnapshotAsked | _RebaseAsked | _RoundAsked] = deque()
        self._by_rounds = False  # the training function waits for rounds, in next_round
        self._round: _RoundAsked | None = None  # the one that it trains
        self._refusal: tuple[str, str] | None = None
        self._stopped = False
        self._holding = False  # the training thread waits in attend() until resume() or stop()
        self._base: Vector | None = None
        self._base_version = NO_VERSION
        self._base_digest = ""
        self._model_digest = ""  # of the base the model was last moved onto
        self._reference: Vector | None = None
        self._reference_finite = True
        self._spare: Vector | None = None
        self._deltas: dict[int, _Delta] = {}
        self._fetch: Fetch | None = None
        self._coding = threading.Lock()  # held by whoever codes a delta's chunk

    # --- training thread --------------------------------------------------------------------------------------

    def attach(self, module: nn.Module) -> None:
        """Take the model, and wait until its weights are a version of the run.

        Raises TaskError (nothing to exchange, attached before, not finite), RefusedError (the parameter server
        will not have this model), RunFinishedError (stopped while waiting).
        """
        if self._weights is not None:
            raise TaskError("fed.attach was called twice: attach one model, once")
        weights = ModelWeights(module)
        own = new_vector(weights.manifest.values)
        if not weights.copy_out(own):
            raise TaskError(
                "the model has NaN or infinite weights at fed.attach: check its initialisation"
            )
        with self._lock:
            self._weights = weights
            self.manifest = weights.manifest
            self._base = self._reference = own
            self.attention = self._stopped
        self.on_event(Attached(weights.manifest.fingerprint, weights.manifest.values))
        while self.version == NO_VERSION:
            with self._asked:
                self._asked.wait_for(lambda: self.attention or self._refusal is not None)
                if self._refusal is not None:
                    raise RefusedError(self._refusal[1], self._refusal[0])
                if self._stopped and not self._requests:
                    raise RunFinishedError("the run ended before this client got its weights")
            self.attend()

    def attend(self) -> bool:
        """Answer what was asked, in the order it was asked. Returns False once stopped. Raises TaskError without a model.

        After a snapshot that was asked for with `hold` it waits for more, until `resume` or `stop`.
        """
        if self._weights is None:
            raise TaskError("fed.step came before fed.attach(model): attach the model first")
        while True:
            with self._asked:
                while self._holding and not (self._requests or self._stopped):
                    self._asked.wait()
                if not self._requests or self._round_is_next:
                    self.attention = self._stopped
                    return not self._stopped
                request = self._requests.popleft()
            match request:
                case _RebaseAsked(_, discard):
                    self._rebase(discard)
                case _SnapshotAsked(sequence, hold):
                    self._snapshot(sequence, hold=hold)
                case _RoundAsked(sequence):  # a training function that knows no rounds: one step
                    self._snapshot(sequence, hold=True)

    @property
    def _round_is_next(self) -> bool:
        """With the lock held: the next request begins a round, which only next_round answers."""
        return (
            self._by_rounds and bool(self._requests) and isinstance(self._requests[0], _RoundAsked)
        )

    def expect_rounds(self) -> None:
        """The training function will ask for rounds by `next_round`. To be said before `attach`."""
        self._by_rounds = True

    def next_round(self) -> int | None:
        """Wait until this client is called to train a round, answering what is asked meanwhile; None once stopped."""
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._requests or self._stopped)
                if self._stopped:
                    return None
                if self._round_is_next:
                    asked = self._requests.popleft()
                    assert isinstance(asked, _RoundAsked)
                    self._round = asked
                    return asked.number
            self.attend()

    def end_round(self) -> bool:
        """Copy the weights for the round's delta and wait for what comes of it. Returns False once stopped."""
        asked, self._round = self._round, None
        if asked is not None:
            self._snapshot(asked.sequence, hold=True)
        return self.attend()

    def attend_for(self, seconds: float) -> None:
        """Answer what is asked within `seconds`, for a training function that is back; returns after the first answer."""
        self._by_rounds = False
        if (
            self._round is not None
        ):  # it came back in the middle of a round, which nobody wants half of
            self.meter.forget()
            self.end_round()
            return
        with self._asked:
            self._asked.wait_for(lambda: bool(self._requests), seconds)
            asked = bool(self._requests)
        if asked:
            self.attend()

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        begun = time.monotonic()
        assert self._weights is not None
        assert self._reference is not None
        with self._lock:
            snapshot = self._free_vector()
        finite = self._weights.copy_out(snapshot)
        tokens, steps, metrics = self.meter.take()
        with self._lock:
            chunks = self.delta_chunks
            delta = _Delta(self._reference, snapshot, [None] * chunks, chunks)
            if self.coder.whole:
                delta.minuend, delta.subtrahend = snapshot, None
            self._deltas[sequence] = delta
            before, self._reference, self._reference_finite = self._reference, snapshot, finite
            self._release(before)
            self._holding = hold
        if not finite:
            # Sent all the same: the parameter server puts it in quarantine, where somebody can look at it.
            metrics["nonfinite"] = 1.0
        metrics["snapshot_s"] = time.monotonic() - begun
        self.on_event(Snapshotted(sequence, self.version, tokens, steps, metrics))

    def _rebase(self, discard: bool) -> None:
        assert self._weights is not None
        with self._moving:
            with self._lock:
                base, version, reference = self._base, self._base_version, self._reference
                digest, finite = self._base_digest, self._reference_finite
            assert base is not None
            assert reference is not None
            dropped = 0
            if version == NO_VERSION:
                return  # the base was lost since we were asked; a full fetch and another request will come
            if self.version == NO_VERSION:
                if base is not reference:  # else the model's own weights became version 0
                    self._weights.copy_in(base)
            elif discard or not finite or not self._weights.is_finite():
                # NaN - NaN is NaN: unfinite weights cannot be rebased, and would stay so for ever
                self._weights.copy_in(base)
                dropped = self.meter.unsent_tokens
                self.meter.forget()
            elif (version, digest) == (self.version, self._model_digest):
                base = reference  # it is there already; moving would take out the work that is on its way
            else:
                self._weights.rebase(base, reference)
            with self._lock:
                self.version, self._model_digest = version, digest
                if base is not reference:
                    self._reference, self._reference_finite = base, True
                    self._release(reference)
        self.on_event(Rebased(version, dropped))

    # --- loop thread: never waits -----------------------------------------------------------------------------

    def request_snapshot(self, sequence: int, *, hold: bool = False) -> None:
        """Ask for delta `sequence`. The next fed.step answers Snapshotted. Asking twice for the same is asking once.

        hold: that step does not return before `resume` or `stop`, but goes on to answer what is asked.

        Raises LearnerError before the first Rebased: there is no version to measure from.
        """
        with self._asked:
            if self.version == NO_VERSION:
                raise LearnerError("no snapshot before the model is on a version of the run")
            if sequence in self._deltas or _SnapshotAsked(sequence, hold) in self._requests:
                return
            self._ask(_SnapshotAsked(sequence, hold))

    def begin_round(self, sequence: int, number: int) -> None:
        """Ask for round `number` to be trained; delta `sequence` comes of it. `end_round` answers Snapshotted, and is held."""
        with self._asked:
            self._ask(_RoundAsked(sequence, number))

    def resume(self) -> None:
        """Let the training thread go on that a snapshot holds; fine when none is held."""
        with self._asked:
            self._holding = False
            self._asked.notify_all()

    def request_rebase(self, version: int, digest: str, *, discard: bool = False) -> None:
        """Ask the training thread to move onto the base, which must hold `version` with `digest`. Answers Rebased.

        If a later version has reached the base until then, the model moves onto that one and Rebased names it.
        discard: take the base as it is, dropping what was trained since the last snapshot. Raises LearnerError.
        """
        with self._asked:
            if (version, digest) != (self._base_version, self._base_digest):
                raise LearnerError(
                    f"asked to rebase onto version {version} ({digest}), but the base is version {self._base_version} "
                    f"({self._base_digest or 'no digest'}): fetch it again in full"
                )
            self._ask(_RebaseAsked(version, discard))

    def stop(self) -> None:
        """fed.step returns False from now on; what was asked before is still answered."""
        with self._asked:
            self._stopped = self.attention = True
            self._asked.notify_all()

    def refuse(self, code: str, text: str) -> None:
        """The parameter server will not have this model: fed.attach raises RefusedError(text, code)."""
        with self._asked:
            self._refusal = (code, text)
            self._asked.notify_all()

    @property
    def delta_chunks(self) -> int:
        """Chunks of a delta, an update or a full version."""
        return self._known_manifest().chunks

    @property
    def stopped(self) -> bool:
        """Whether stop() was called."""
        return self._stopped

    def drop_delta(self, sequence: int) -> None:
        """Forget a delta: acknowledged, or declined (then its work is not sent again)."""
        with self._lock:
            delta = self._deltas.pop(sequence, None)
            if delta is not None:
                self._uncouple(delta)

    def begin_fetch(self, kind: Literal["update", "full"], version: int) -> None:
        """Get ready for the chunks of `version`; an unfinished fetch is given up.

        Raises LearnerError for an update that does not follow the base.
        """
        with self._lock:
            self._fetch = None
            if kind == "update" and self._base_version in (NO_VERSION, version):
                raise LearnerError(
                    f"version {version} as an update needs version {version - 1}: fetch it in full"
                )
            if kind == "update" and self._base_version != version - 1:
                raise LearnerError(
                    f"update to version {version} does not follow base version {self._base_version}: fetch it in full"
                )
            manifest = self._known_manifest()
            if kind == "update":
                self._fetch = Fetch(manifest, version, base=self._base)
            else:
                # Allocating is cheap here: the pages of a new vector come when they are first written, in the worker.
                self._fetch = Fetch(manifest, version, target=self._free_vector())

    # --- worker thread ----------------------------------------------------------------------------------------

    def encode_initial(self, index: int) -> bytes:
        """Chunk `index` of the attached model's weights, as an fp32 frame. Before any version is fetched."""
        with self._lock:
            base = self._base
        if base is None:
            raise LearnerError("no model is attached")
        return encode(self._chunk(base, index), LOSSLESS)

    def adopt_initial(self) -> str:
        """The attached model's own weights are version 0. Returns their digest; request_rebase(0, digest) comes next."""
        with self._moving:
            with self._lock:
                fresh = self.version == self._base_version == NO_VERSION
                if self._base is None or not fresh:
                    raise LearnerError(
                        f"own weights cannot become version 0: the base is version {self._base_version}"
                    )
                base = self._base
            digest = digest_of(base)
            with self._lock:
                self._base_version, self._base_digest = 0, digest
        return digest

    def encode_delta(self, sequence: int, index: int) -> bytes:
        """Chunk `index` of delta `sequence`, coded once and then kept, so that sending again gives the same bytes.

        Raises LearnerError for a delta that was dropped.
        """
        with self._coding:
            with self._lock:
                delta = self._deltas.get(sequence)
                if delta is None:
                    raise LearnerError(f"delta {sequence} is not here (dropped, or never taken)")
                coded = delta.coded[index]
                if coded is not None:
                    return coded
                minuend, subtrahend = delta.minuend, delta.subtrahend
            assert minuend is not None
            start, stop = self._known_manifest().chunk_range(index)
            frame = self.coder.encode(minuend, subtrahend, start, stop)
            with self._lock:
                # Dropped while we computed, its vectors may have been written again: throw away what we have.
                if self._deltas.get(sequence) is not delta:
                    raise LearnerError(f"delta {sequence} was dropped while it was coded")
                delta.coded[index] = frame
                delta.missing -= 1
                if not delta.missing:
                    self._uncouple(delta)
        return frame

    def finish_encoding(self, sequence: int) -> None:
        """Code what is left of a delta, which frees its vectors. Does nothing for a dropped one."""
        for index in range(self.delta_chunks):
            with self._lock:
                if sequence not in self._deltas:
                    return
            self.encode_delta(sequence, index)

    def put_fetch(self, version: int, index: int, frame: bytes) -> None:
        """Take one chunk of the version being fetched. Raises LearnerError for a frame that is damaged or of a wrong
        size, or that belongs to no fetch; the same chunk twice is ignored.
        """
        with self._lock:
            fetch = self._fetch
            if fetch is None or fetch.version != version:
                raise LearnerError(f"version {version} is not being fetched")
        # It reads the base without a lock: only finish_fetch changes that, in this same thread.
        fetch.put(index, frame)

    def finish_fetch(self, version: int) -> str:
        """Make the base Theta_version and return its digest. The model itself moves when request_rebase is answered.

        Raises LearnerError where chunks are missing; the base is then untouched and the fetch goes on.
        """
        with self._lock:
            unfinished = [sequence for sequence, delta in self._deltas.items() if delta.missing]
        for (
            sequence
        ) in unfinished:  # frees their vectors: less memory, and most often an update in place
            self.finish_encoding(sequence)
        with self._moving:
            with self._lock:
                fetch = self._fetch
                if fetch is None or fetch.version != version:
                    raise LearnerError(f"version {version} is not being fetched")
                if fetch.missing:
                    raise LearnerError(
                        f"version {version} lacks {fetch.missing} of {fetch.chunks} chunks"
                    )
                old = self._base
                assert old is not None
                if fetch.target is not None:
                    new = fetch.target
                elif self._is_shared(old):
                    new = self._free_vector()
                else:
                    new = old
                self._fetch = None
                # should a decode fail against all expectation, the base is known to be unknown
                self._base, self._base_version, self._base_digest = new, NO_VERSION, ""
            fetch.write_to(new, self.pool)
            with self._lock:
                self._base_version, self._base_digest = version, fetch.digest
                self._release(old)
        return fetch.digest

    # --- with _lock held, or on values that do not change -----------------------------------------------------

    def _ask(self, request: _SnapshotAsked | _RebaseAsked | _RoundAsked) -> None:
        self._requests.append(request)
        self.attention = True
        self._asked.notify_all()

    def _free_vector(self) -> Vector:
        vector, self._spare = self._spare, None
        return new_vector(self._known_manifest().values) if vector is None else vector

    def _is_shared(self, vector: Vector) -> bool:
        return vector is self._reference or any(
            vector is delta.minuend or vector is delta.subtrahend for delta in self._deltas.values()
        )

    def _release(self, vector: Vector | None) -> None:
        """Keep `vector` for the next snapshot if nobody refers to it any more and none is kept yet."""
        if vector is not None and vector is not self._base and not self._is_shared(vector):
            self._spare = vector

    def _uncouple(self, delta: _Delta) -> None:
        minuend, subtrahend = delta.minuend, delta.subtrahend
        delta.minuend = delta.subtrahend = None
        self._release(minuend)
        self._release(subtrahend)

    def _known_manifest(self) -> Manifest:
        if self.manifest is None:
            raise LearnerError("no model is attached")
        return self.manifest

    def _chunk(self, vector: Vector, index: int) -> Vector:
        start, stop = self._known_manifest().chunk_range(index)
        return vector[start:stop]
