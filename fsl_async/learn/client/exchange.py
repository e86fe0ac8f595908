"""The exchange side of a client: vectors, an outbox of deltas, an inbox of versions. NumPy only.

Three threads come here. The training thread (snapshots and rebases, through `ports.ExchangePort`),
the loop thread (the runtime: it asks and never waits), and a worker thread (it codes, decodes,
hashes).

Vectors, all fp32 on the CPU, each the size of the model:
    base       Theta_v, what the parameter server holds, to the bit
    reference  r, from where unsent work is measured: the last snapshot with what coding has lost
               of its delta, or the base the model was moved onto
    spare      the one that is free, kept for the next snapshot
    global     in a run of several groups, the newest weights of all of them that came here: their
               next version leads from those, not from the base
Only the coding of its own delta writes a vector while something refers to it. So between syncs, and
in the usual order (snapshot, send, fetch, rebase), there are two of them besides the model; three
while a full version is fetched, or when a second snapshot is taken before the first is coded.
Groups cost one more: the global weights, which are the base until the next version. On top of them
come coded chunks: of a delta until drop_delta, of an update until finish_fetch.

The arithmetic, with theta the model's weights:
    snapshot   u = theta;  delta = r - u, or u itself where the run exchanges full weights
               (docs/adr/0045);  r <- u;  of buffers u itself in every run, coded without loss
    coding     sent = decode(encode(delta));  r <- r + (delta - sent), chunk by chunk, in the
               snapshot's own vector; not of full weights
    rebase     theta <- Theta_new + (theta - r);  r <- Theta_new
A round of zeroth order has scalars for a delta (fsl_async.store.deltas.seed_step) and no snapshot:
r stays, and the next rebase takes Theta_new as it is, since the version replaces the round's steps.

Unsent work is r - theta. A snapshot hands it to a delta; what coding loses of that is unsent again
(error feedback as in 1-bit SGD, Seide et al. 2014, but kept in the client's weights instead of a
vector: docs/adr/0172); a rebase leaves it as it is: it does not depend on the version that others
hold. So in any order of snapshots and rebases everything trained is in exactly one delta or still
unsent: sent + kept = trained, as fp32 adds them. A delta is coded after the ones before it, and all
are coded before the model moves, since each is measured from what coding has left. Two things are
lost, and both are meant to be: a delta that is declined or dropped is not sent again (its work was
measured from a base that the run does not accept; under masks it must not be in a second sum), and
a rebase with `discard`, or one of weights that are no longer finite, takes Theta_new as it is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np

from fsl_async.errors import TaskError
from fsl_async.learn.client.delta_coder import LOSSLESS, DeltaCoder, Lost
from fsl_async.learn.client.fetching import Fetch, Replay
from fsl_async.learn.client.ports import (
    NO_VERSION,
    Move,
    Moved,
    RebaseOrder,
    RoundOrder,
    SnapshotOrder,
    TrainingPort,
    Vector,
    Work,
)
from fsl_async.roles.messages import MAX_BYTES
from fsl_async.roles.sync.delta import UNSENT
from fsl_async.roles.sync.events import Attached, PaceReached, Rebased, Snapshotted
from fsl_async.secure.masking import Masking
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.errors import LearnerError
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec, encode, encode_seeds, is_seeds, new_vector

if TYPE_CHECKING:
    from fsl_async.roles.machine import Event
    from fsl_async.store.deltas.seed_step import Directions

FetchKind = Literal["update", "seeds", "full", "global", "global_full"]


@attrs.define(eq=False)
class _Delta:
    minuend: Vector | None
    subtrahend: Vector | None
    """The snapshot; None where that is the minuend."""
    coded: list[bytes | None]
    missing: int
    lost: float = 0.0
    """Sum of the squares of what coding has lost so far, and of what was coded."""
    of: float = 0.0
    scalars: Vector | None = None
    """The delta of a round of zeroth order that is to be masked."""
    is_dropped: bool = False
    """Forget it once it is coded."""

    def difference(self, start: int, stop: int) -> Vector:
        """Values of a delta that is to be masked: of a range, or all scalars."""
        if self.scalars is not None:
            return self.scalars.ravel()
        assert self.minuend is not None
        assert self.subtrahend is not None
        made: Vector = self.minuend[start:stop] - self.subtrahend[start:stop]
        return made


class Exchange:
    """The client's weights as the network sees them; see above for threads, memory, arithmetic.

    training: carries out what is asked of the model. coder: how deltas are coded.
    on_event: called from the training thread with Attached, PaceReached, Snapshotted and Rebased;
    thread-safe.
    allocate: makes a vector of so many values; in shared memory where training is another process.
    """

    def __init__(
        self,
        training: TrainingPort,
        coder: DeltaCoder | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
        *,
        allocate: Callable[[int], Vector] = new_vector,
    ) -> None:
        self.coder = coder or DeltaCoder()
        self.pool = ChunkPool(1)
        self.directions: Directions | None = None
        """Of the run, where clients may send scalars."""
        self.only_scalars = False
        """Whether versions are scalars too, and all deltas."""
        self.masking: Masking | None = None
        """Masks deltas in a run with secure sums."""
        self.manifest: Manifest | None = None
        self.version = NO_VERSION  # what the model was last moved onto
        self._training = training
        self._on_event = on_event
        self._allocate = allocate

        # _lock guards the fields below and is held for moments only. _moving is held by the thread
        # that reads or writes the base at length (the training thread's rebase, the worker's
        # finish_fetch); the loop thread never takes it.
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        self._base: Vector | None = None
        self._base_version = NO_VERSION
        self._base_digest = ""
        self._global: Vector | None = None
        self._global_digest = ""
        self._model_digest = ""  # of the base the model was last moved onto
        self._reference: Vector | None = None
        self._carries = True  # whether unsent work can be carried over to a new base
        self._spare: Vector | None = None
        self._deltas: dict[int, _Delta] = {}
        self._fetch: Fetch | Replay | None = None
        self._coding = threading.Lock()  # held while a delta's chunk is coded
        self._unsent: float | None = None  # of the delta coded last: what it lacks, in its norms

    def configure(
        self,
        spec: CodecSpec,
        *,
        keeps_error: bool,
        whole: bool,
        threads: int | None = None,
        directions: Directions | None = None,
        only_scalars: bool = False,
        is_secure: bool = False,
    ) -> None:
        """Code deltas so from the next chunk on; see `DeltaCoder`. threads: to decode with.

        directions: of the run, where clients may send scalars; only_scalars: where all do, and
        versions are scalars too. is_secure: deltas are coded under masks (`masking`).
        """
        if self.masking is None and is_secure:
            self.masking = Masking()
        self.directions, self.only_scalars = directions, only_scalars
        self.coder.spec, self.coder.keeps_error, self.coder.whole = spec, keeps_error, whole
        if threads is not None:
            self.pool.threads = threads

    # --- training thread ---

    def free_vector(self, values: int) -> Vector:
        """A vector that nothing else refers to, with any content."""
        with self._lock:
            return self._free_vector(values)

    def attach(self, manifest: Manifest, own: Vector) -> None:
        """Exchange a model of this manifest, whose first weights are `own`."""
        if self.masking is not None and manifest.weights < manifest.values:
            raise TaskError(
                "tune.secure masks weights, and this model has buffers, which are sent as they are:"
                " choose a model without, or tune.secure = false"
            )
        with self._lock:
            self.manifest = manifest
            self._base = self._reference = own
        self._on_event(Attached(manifest.fingerprint, manifest.values))

    def put_snapshot(self, sequence: int, snapshot: Vector | None, work: Work) -> None:
        """Take a snapshot for delta `sequence`; from here on only its coding writes the vector.

        None: the delta is `work.scalars`. Raises TaskError where these are not those of a round.
        """
        moved, facts = True, dict(work.facts)
        if self.masking is not None and not work.finite:
            # Under masks the parameter server could not find it.
            work = attrs.evolve(work, tokens=0)
            with self._lock:
                self._deltas[sequence] = _Delta(None, None, [], 0)
                self._carries = False
                self._release(snapshot)
        elif snapshot is None and self.masking is not None:
            self._checked_scalars(work.scalars)
            with self._lock:
                self._deltas[sequence] = _Delta(None, None, [None], 1, scalars=work.scalars)
                self._carries = False
        elif snapshot is None:
            frame = self._seeds_frame(work.scalars)
            with self._lock:
                self._deltas[sequence] = _Delta(None, None, [frame], 0)
                self._carries = False
        elif self.only_scalars:  # what was trained without scalars cannot be sent
            work = attrs.evolve(work, tokens=0)
            with self._lock:
                self._deltas[sequence] = _Delta(None, None, [], 0)
                self._carries = False
                self._release(snapshot)
        else:
            before = self._reference  # only this thread replaces it
            assert before is not None
            moved = not work.steps or self._has_moved(before, snapshot)
            self._put_vectors(sequence, snapshot, is_finite=work.finite)
            if self._unsent is not None and math.isfinite(self._unsent):
                facts[UNSENT] = round(self._unsent, 4)
        self._on_event(
            Snapshotted(
                sequence,
                self.version,
                work.tokens,
                work.steps,
                dict(work.metrics),
                facts,
                moved,
            )
        )

    def _put_vectors(self, sequence: int, snapshot: Vector, *, is_finite: bool) -> None:
        with self._lock:
            assert self._reference is not None
            chunks = self.delta_chunks
            delta = _Delta(self._reference, snapshot, [None] * chunks, chunks)
            if self.coder.whole:
                delta.minuend, delta.subtrahend = snapshot, None
            self._deltas[sequence] = delta
            before, self._reference = self._reference, snapshot
            self._carries = is_finite
            self._release(before)

    def _seeds_frame(self, scalars: Vector | None) -> bytes:
        self._checked_scalars(scalars)
        assert scalars is not None
        return encode_seeds(self.version, scalars[None])

    def _checked_scalars(self, scalars: Vector | None) -> None:
        run = self.directions
        if self.masking is not None and not self.only_scalars:
            raise TaskError("tune.secure adds up weights, not scalars: leave out --order zeroth")
        if run is None or scalars is None:
            raise TaskError("this run takes no scalars of zeroth order: see tune.method")
        if scalars.shape != (run.steps, run.probes) or scalars.dtype != np.float32:
            raise TaskError(
                f"a round of zeroth order has {run.steps} x {run.probes} fp32 scalars"
                f" (tune.zo_steps, tune.zo_probes), not {scalars.shape} of {scalars.dtype}"
            )

    def reach_pace(self) -> None:
        """Report that progress is to be sent."""
        self._on_event(PaceReached())

    def rebase(self, move: Callable[[Move], Moved], *, discard: bool) -> None:
        """Call `move` once while nothing writes the base, and not if the base is incomplete."""
        if not discard:
            self._finish_deltas()
        with self._moving:
            with self._lock:
                wanted = self._next_move(discard=discard)
                digest = self._base_digest
            if wanted is None:
                return  # the base was lost since; a full fetch and another order will come
            moved = move(wanted)
            with self._lock:
                self.version, self._model_digest = wanted.version, digest
                is_new = wanted.how != "stay" or moved.taken
                if is_new and wanted.base is not wanted.reference:
                    self._reference = wanted.base
                    self._release(wanted.reference)
                if is_new:
                    self._carries = True
                if wanted.how == "take":
                    self._forget_unsent()
        self._on_event(Rebased(wanted.version, moved.dropped_tokens))

    def restart(self, move: Callable[[Move], Moved]) -> bool:
        """Training has begun anew, in other processes: have it take the base as it is.

        Unsent work is lost. No event reports the move: the run has not changed. False where there
        is no complete base; the next rebase moves the model.
        """
        with self._moving:
            with self._lock:
                base, reference, version = self._base, self._reference, self._base_version
                digest = self._base_digest
            if base is None or reference is None or NO_VERSION in (version, self.version):
                return False
            move(Move(version, "take", base, reference))
            with self._lock:
                self.version, self._model_digest = version, digest
                self._reference, self._carries = base, True
                self._release(reference)
                self._forget_unsent()
        return True

    def read_base(self, read: Callable[[Vector], None]) -> int:
        """Call `read` with the base, which nothing writes meanwhile; returns its version.

        NO_VERSION: the base is incomplete, and `read` was not called.
        """
        with self._moving:
            with self._lock:
                base, version = self._base, self._base_version
            if base is not None and version != NO_VERSION:
                read(base)
        return version

    def use_base(self, use: Callable[[Vector, int], None]) -> bool:
        """Call `use` with the base and its version; False, and no call, if it is incomplete."""
        with self._moving:
            with self._lock:
                base, version = self._base, self._base_version
            if base is None or version == NO_VERSION:
                return False
            use(base, version)
        return True

    def _next_move(self, *, discard: bool) -> Move | None:
        base, reference, version = self._base, self._reference, self._base_version
        if version == NO_VERSION:
            return None
        assert base is not None
        assert reference is not None
        how: Literal["take", "move", "stay"] = "move"
        if self.version == NO_VERSION:  # where its own weights became version 0, it is there
            how = "stay" if base is reference else "take"
        elif discard or not self._carries:
            how = "take"
        elif (version, self._base_digest) == (self.version, self._model_digest):
            how = "stay"  # moving would take out the work that is on its way
        return Move(version, how, base, reference)

    # --- loop thread: never waits ---

    def request_snapshot(self, sequence: int, *, hold: bool = False) -> None:
        """Ask for delta `sequence`. The next fed.step answers Snapshotted, once if asked twice.

        hold: that step does not return before `resume` or `stop`, but goes on to answer what is
        asked.

        Raises LearnerError before the first Rebased: there is no version to measure from.
        """
        with self._lock:
            if self.version == NO_VERSION:
                raise LearnerError("no snapshot before the model is on a version of the run")
            if sequence in self._deltas:
                return
        self._training.ask(SnapshotOrder(sequence, hold))

    def begin_round(self, sequence: int, number: int) -> None:
        """Have round `number` trained for delta `sequence`. Answers Snapshotted and holds."""
        self._training.ask(RoundOrder(sequence, number))

    def count_steps(self, steps: int) -> None:
        """Have PaceReached reported `steps` steps after each snapshot; 0: not."""
        self._training.count_steps(steps)

    def resume(self) -> None:
        """Let training go on after a snapshot that holds it; harmless when none does."""
        self._training.resume()

    def request_rebase(self, version: int, digest: str, *, discard: bool = False) -> None:
        """Have the model moved onto the base, which is `version` with `digest`. Answers Rebased.

        If a later version has reached the base until then, the model moves onto that one and
        Rebased names it. discard: take the base as it is, dropping what was trained since the last
        snapshot. Raises LearnerError.
        """
        with self._lock:
            if (version, digest) != (self._base_version, self._base_digest):
                raise LearnerError(
                    f"asked to rebase onto version {version} ({digest}), but the base is version"
                    f" {self._base_version} ({self._base_digest or 'no digest'}): fetch it again in"
                    " full"
                )
        self._training.ask(RebaseOrder(discard))

    def stop(self) -> None:
        """fed.step returns False from now on; what was asked before is still answered."""
        self._training.stop()

    def refuse(self, code: str, text: str) -> None:
        """The parameter server refuses this model: fed.attach raises RefusedError(text, code)."""
        self._training.refuse(code, text)

    @property
    def delta_chunks(self) -> int:
        """Chunks of a delta, an update or a full version."""
        return self._known_manifest().chunks

    def delta_frames(self, sequence: int) -> int:
        """Frames of a delta: one for scalars, else its chunks."""
        with self._lock:
            delta = self._deltas.get(sequence)
        return self.delta_chunks if delta is None else len(delta.coded)

    def scalars_frame(self, sequence: int) -> bytes | None:
        """The only frame of a delta of scalars that fits into a message; else None."""
        with self._lock:
            delta = self._deltas.get(sequence)
        if delta is None or delta.missing or len(delta.coded) != 1:
            return None
        frame = delta.coded[0]
        fits = frame is not None and is_seeds(frame) and len(frame) <= MAX_BYTES
        return frame if fits else None

    def drop_delta(self, sequence: int) -> None:
        """Forget a delta: acknowledged, or declined (then its work is not sent again). One without
        masks in a run with secure sums is coded before, as nothing.
        """
        with self._lock:
            delta = self._deltas.get(sequence)
            if delta is not None and delta.missing and self._is_coded_as_nothing(sequence):
                delta.is_dropped = True
            else:
                self._forget_delta(sequence)

    @property
    def global_digest(self) -> str:
        """The digest of the global weights that are kept; empty: there are none."""
        with self._lock:
            return self._global_digest

    def begin_fetch(
        self,
        kind: FetchKind,
        version: int,
    ) -> None:
        """Get ready for the chunks of `version`; an unfinished fetch is given up. kind: as in
        `roles.sync.messages.VersionMeta`.

        Raises LearnerError for an update that does not follow the base, or without the global
        weights that it follows, and for scalars in a run without.
        """
        with self._lock:
            self._fetch = None
            if kind == "seeds":
                self._fetch = self._replay(version)
                return
            if kind == "update" and self._base_version != version - 1:
                raise LearnerError(
                    f"update to version {version} does not follow base version"
                    f" {self._base_version}: fetch it in full"
                )
            manifest = self._known_manifest()
            if kind == "global" and self._global is None:
                raise LearnerError(
                    f"version {version} follows global weights that are not here: fetch it in full"
                )
            if kind == "update":
                self._fetch = Fetch(manifest, version, base=self._base)
            elif kind == "global":
                self._fetch = Fetch(manifest, version, base=self._global, is_global=True)
            else:
                # Allocating is cheap here: the pages of a new vector come when they are first
                # written, in the worker.
                target = self._free_vector(manifest.values)
                is_global = kind == "global_full"
                self._fetch = Fetch(manifest, version, target=target, is_global=is_global)

    def _replay(self, version: int) -> Replay:
        base, since, manifest = self._base, self._base_version, self._known_manifest()
        if self.directions is None or base is None or not 0 <= since < version:
            raise LearnerError(
                f"scalars to version {version} do not follow base version {since}: fetch it in full"
            )
        return Replay(
            manifest,
            version,
            base=base,
            since=since,
            target=self._free_vector(manifest.values),
            seed=self.directions.seed,
            pool=self.pool,
        )

    # --- worker thread ---

    def encode_initial(self, index: int) -> bytes:
        """Chunk `index` of the model's own weights, an fp32 frame. Before a version is fetched."""
        with self._lock:
            base = self._base
        if base is None:
            raise LearnerError("no model is attached")
        start, stop = self._known_manifest().chunk_range(index)
        return encode(base[start:stop], LOSSLESS)

    def adopt_initial(self) -> str:
        """The model's own weights are version 0. Returns their digest; next comes a rebase."""
        with self._moving:
            with self._lock:
                fresh = self.version == self._base_version == NO_VERSION
                if self._base is None or not fresh:
                    raise LearnerError(
                        "own weights cannot become version 0: the base is version"
                        f" {self._base_version}"
                    )
                base = self._base
            digest = digest_of(base, self.pool.each, weights=self._known_manifest().weights)
            with self._lock:
                self._base_version, self._base_digest = 0, digest
        return digest

    def encode_delta(self, sequence: int, index: int) -> bytes:
        """Chunk `index` of delta `sequence`, coded once and kept: sent again it is the same bytes.

        Raises LearnerError for a delta that was dropped.
        """
        with self._coding:
            frame = self._coded(sequence, index)
        if frame is None:
            raise LearnerError(f"delta {sequence} is not here (dropped, or never taken)")
        return frame

    def _coded(self, sequence: int, index: int) -> bytes | None:
        """With _coding held: see `encode_delta`. None: the delta is not here, or not any more."""
        with self._lock:
            delta = self._deltas.get(sequence)
            if delta is None:
                return None
            coded = delta.coded[index]
            if coded is not None:
                return coded
            minuend, subtrahend = delta.minuend, delta.subtrahend
            before = [
                number
                for number, other in self._deltas.items()
                if other.subtrahend is minuend is not None and other.coded[index] is None
            ]
        for number in before:  # its coding writes what this one is measured from
            self._coded(number, index)
        start, stop = self._known_manifest().chunk_range(index)
        frame, lost = self._frame_of(sequence, index, delta)
        with self._lock:
            # Dropped meanwhile, its vectors may have another use: the frame is no good.
            if self._deltas.get(sequence) is not delta:
                return None
            if lost is not None:
                assert subtrahend is not None
                subtrahend[start:stop] += lost.values
                delta.lost += lost.square
                delta.of += lost.of
            delta.coded[index] = frame
            delta.missing -= 1
            if not delta.missing:
                self._uncouple(delta)
                self._unsent = math.sqrt(delta.lost / delta.of) if delta.of else None
                if delta.is_dropped:
                    self._forget_delta(sequence)
        return frame

    def _frame_of(self, sequence: int, index: int, delta: _Delta) -> tuple[bytes, Lost | None]:
        """Code a chunk. Returns its frame, and what is to be kept that it lacks."""
        manifest, minuend, subtrahend = self._known_manifest(), delta.minuend, delta.subtrahend
        start, stop = manifest.chunk_range(index)
        if self.masking is not None:
            difference = delta.difference(start, stop)
            frame, values = self.masking.encode(sequence, index, difference)
            squares = (float(np.dot(one, one)) for one in (values, difference))
            return frame, None if subtrahend is None else Lost(values, *squares)
        assert minuend is not None, "scalars are coded when they come, or under masks"
        if manifest.is_buffer(index):
            snapshot = minuend if subtrahend is None else subtrahend
            return encode(snapshot[start:stop], LOSSLESS), None
        return self.coder.encode(minuend, subtrahend, start, stop)

    def _finish_deltas(self) -> None:
        """Code what is left of all deltas."""
        with self._lock:
            unfinished = [sequence for sequence, delta in self._deltas.items() if delta.missing]
        for sequence in unfinished:
            self.finish_encoding(sequence)

    def finish_encoding(self, sequence: int) -> None:
        """Code what is left of a delta, which frees its vectors. Does nothing for a dropped one."""
        for index in range(self.delta_frames(sequence)):
            with self._coding:
                if self._coded(sequence, index) is None:
                    return

    def put_fetch(self, version: int, index: int, frame: bytes) -> None:
        """Take one chunk of the version being fetched; the same chunk twice is ignored.

        Raises LearnerError for a frame that is damaged or of a wrong size, or that belongs to no
        fetch.
        """
        with self._lock:
            fetch = self._fetch
            if fetch is None or fetch.version != version:
                raise LearnerError(f"version {version} is not being fetched")
        # It reads the base without a lock: only finish_fetch changes that, in this same thread.
        fetch.put(index, frame)

    def finish_fetch(self, version: int) -> str:
        """Make the base Theta_version and return its digest; the model moves at the next rebase.

        Raises LearnerError where chunks are missing; the base is then untouched and the fetch goes
        on.
        """
        # Coding frees their vectors: less memory, and most often an update in place.
        self._finish_deltas()
        with self._moving:
            with self._lock:
                fetch = self._fetch
                if fetch is None or fetch.version != version:
                    raise LearnerError(f"version {version} is not being fetched")
                if fetch.missing:
                    raise LearnerError(
                        f"version {version} lacks {fetch.missing} of {fetch.chunks} chunks"
                    )
                old, kept = self._base, self._global
                assert old is not None
                # An update is applied where it leads from, if nothing else refers to that vector.
                origin = old
                if fetch.is_global:
                    origin = old if kept is None else kept
                    self._global, self._global_digest = None, ""
                if fetch.target is not None:
                    new = fetch.target
                elif self._is_shared(origin):
                    new = self._free_vector(len(old))
                else:
                    new = origin
                self._fetch = None
                # Should a decode fail against all expectation, the base is known to be unknown.
                self._base, self._base_version, self._base_digest = new, NO_VERSION, ""
            fetch.write_to(new, self.pool)
            with self._lock:
                self._base_version, self._base_digest = version, fetch.digest
                if fetch.is_global:
                    self._global, self._global_digest = new, fetch.digest
                    self._release(kept)
                self._release(old)
        return fetch.digest

    # --- with _lock held, or on values that do not change ---

    def _free_vector(self, values: int) -> Vector:
        vector, self._spare = self._spare, None
        return self._allocate(values) if vector is None else vector

    def _is_shared(self, vector: Vector) -> bool:
        return (
            vector is self._reference
            or vector is self._global
            or any(
                vector is delta.minuend or vector is delta.subtrahend
                for delta in self._deltas.values()
            )
        )

    def _release(self, vector: Vector | None) -> None:
        """Keep `vector` for the next snapshot if nothing refers to it any more."""
        if vector is not None and vector is not self._base and not self._is_shared(vector):
            self._spare = vector

    def _is_coded_as_nothing(self, sequence: int) -> bool:
        return self.masking is not None and not self.masking.has_masks(sequence)

    def _forget_delta(self, sequence: int) -> None:
        delta = self._deltas.pop(sequence, None)
        if self.masking is not None:
            self.masking.drop(sequence)
        if delta is not None:
            self._uncouple(delta)

    def _uncouple(self, delta: _Delta) -> None:
        minuend, subtrahend = delta.minuend, delta.subtrahend
        delta.minuend = delta.subtrahend = None
        self._release(minuend)
        self._release(subtrahend)

    def _has_moved(self, before: Vector, after: Vector) -> bool:
        """Whether any weight was trained; true where there are none, but buffers only.

        Stops at the first chunk that was, most often the first one.
        """
        manifest = self._known_manifest()
        ranges = [manifest.chunk_range(index) for index in range(manifest.chunks)]
        weights = [one for one in ranges if one[0] < manifest.weights]
        return not weights or any(self.coder.is_new(before, after, *one) for one in weights)

    def _forget_unsent(self) -> None:
        self._unsent = None
        self.coder.forget()

    def _known_manifest(self) -> Manifest:
        if self.manifest is None:
            raise LearnerError("no model is attached")
        return self.manifest
