"""Groups store: the durable side of global rounds at one parameter server.

In a global round the parameter servers of a roster average what their groups gained since the
global weights G_k; once the coordinator has decided it, each makes a version of the result G_(k+1).
Its files are those of `global_files`.

The arithmetic, in fp32:

    exact   the version is G, to the bit: the group's cut is in G, and it merged nothing since
    late    Theta' = G + (Theta - reference)    reference: the weights of the cut, if it is in G;
                                                else the global weights before
    new     a run without weights begins with G as version 0

So every group that merged nothing between its cut and the decision holds the same weights. Momentum
stays the group's, or begins again at zero; the coding error that was not sent yet does so always.

The next global weights are made of the sum S of a reduction (`nodes.reduction_helper`), with the
same bits at all members, and of the format that is in the view:

    U = encode(-S);  G_(k+1) = G_k + decode(U);  E_(k+1) = -S - decode(U)

E_k, what coding has lost so far, is at the coordinator only: it takes it from its part of the next
sum, and it is in every sum. So the frames of U are the same at all groups, and lead clients that
hold G_k to G_(k+1). A coordinator that has lost E goes on without; nothing else depends on it.

All methods of the store belong to its thread. A call that fails has changed nothing (StoreError).
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict

from fsl_async.roles.groups.events import Cut, Decision
from fsl_async.store.book.groups_state import Adoption
from fsl_async.store.book.records import VersionRecord
from fsl_async.store.disk.chunk_files import (
    DIGEST_CHARACTERS,
    FlatWriter,
    FrameWriter,
    frame_places,
    header_for,
    read_frame,
)
from fsl_async.store.errors import StoreError, disk
from fsl_async.store.rules.outer import check_finite, squared_norm
from fsl_async.store.vectors.vectors import LOSSLESS
from fsl_async.store.versions.checkpoint import WEIGHTS, ArrivingWeights, VersionWriter
from fsl_async.store.versions.global_files import KINDS, GlobalFiles
from fsl_codecs import bound, decode_into, encode, encode_into, new_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike
    from fsl_async.roles.groups.events import GroupsRecovered
    from fsl_async.store.book.groups_state import GroupsState
    from fsl_async.store.commit.newest import Newest
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.recovery.run_directory import RunDirectory
    from fsl_async.store.vectors.vectors import Vectors
    from fsl_async.store.versions.checkpoint import Checkpoint
    from fsl_codecs import CodecSpec


class GroupsStore:
    """Cuts, results, decisions and adoptions of one open run."""

    def __init__(
        self, run: RunDirectory, read_chunk: Callable[[int, int], NDArray[np.float32] | None]
    ) -> None:
        """read_chunk: reads a chunk of a version's weights; None: they are not here."""
        self._run = run
        self._files = run.files
        self._read_chunk = read_chunk
        self._globals = GlobalFiles(run.files, run.path)
        self._receiving: tuple[Decision, ArrivingWeights] | None = None
        """The global weights that arrive as frames."""
        self._offered_model: Manifest | None = None
        self._coordinates = False
        self._places: tuple[Path, NDArray[np.int64]] | None = None

    @property
    def _state(self) -> GroupsState:
        return self._run.book.groups

    @property
    def state(self) -> GroupsRecovered:
        """The state for the machine."""
        return self._state.recovered(self._run.book.tokens_total)

    @property
    def model(self) -> Manifest | None:
        """The run's model, or that of the global weights that arrive; None: unknown."""
        return self._run.model or self._offered_model

    def open(self, *, coordinates: bool = False) -> GroupsRecovered:
        """Create the folder or remove what is not needed in it; return the state.

        Comes before the other methods, for a parameter server in a roster only. coordinates: this
        one keeps what coding has lost.
        """
        self._coordinates = coordinates
        with disk("cannot open the folder of global weights"):
            self._globals.make_directory()
            self._clean()
        return self.state

    def _clean(self) -> None:
        """Remove the files that no decision and no cut needs."""
        state = self._state
        keep = [self._path(one) for one in (state.adopted, state.decided) if one]
        keep += [self._globals.path("cut", state.cut.round)] if state.cut else []
        self._globals.clean(keep, state.adopted.round + 1 if state.adopted else 0)

    def _path(self, decision: Decision, kind: str = "weights") -> Path:
        """Return the path of decided global weights, or of the update or residual beside them."""
        return self._globals.path(kind, decision.round, decision.attempt)

    def _adopted(self) -> Adoption:
        if self._state.adopted is None:
            raise StoreError("there are no global weights")
        return self._state.adopted

    # --- from the first weights to the decision ---

    def begin(self) -> Decision:
        """Make the newest version G_0 of a run of its own; nothing if that is done."""
        book = self._run.book
        if self._state.decided is not None:
            return self._state.decided
        with disk("cannot write global weights 0"):
            path = self._globals.path("weights", 0)
            digest = self._globals.write(path, self._weights(book.version), self._run.manifest)
            # With the time: where a backup of the coordinator is restored, G_0 begins another run.
            name = f"{book.run}/{digest}/{self._run.wall_clock()!r}"
            run = hashlib.sha256(name.encode()).hexdigest()[:32]
            fact = {"version": book.version, "digest": digest, "tokens": book.tokens_total}
            self._run.record("begun", {**fact, "run": run})
        return Decision(0, 0, digest, run)

    def take_cut(self, number: int) -> Cut:
        """Make the newest version the cut of a round; the same one again, if there is one."""
        book, state = self._run.book, self._state
        if state.adopted is None or state.adopted.round != number:
            raise StoreError(f"the group is not in global round {number}")
        if state.cut is not None:
            return state.cut
        with disk(f"cannot write the cut of global round {number}"):
            path = self._globals.path("cut", number)
            digest = self._globals.write(path, self._weights(book.version), self._run.manifest)
            if digest != book.digests[book.version]:
                raise StoreError(f"version {book.version} was read with another digest, {digest}")
            cut = Cut(number, book.version, digest, state.reference, book.tokens_total)
            self._run.record("cut", asdict(cut))
        return cut

    def _weights(self, version: int) -> Iterator[NDArray[np.float32]]:
        """Yield the weights of the newest version, chunk by chunk."""
        for index in range(self._run.manifest.chunks):
            values = self._read_chunk(version, index)
            if values is None:
                raise StoreError(f"version {version} has no weights on disk")
            yield values

    def keep_attempt(self, number: int, attempt: int) -> None:
        """Record that this number of an attempt is used."""
        with disk("cannot write the attempt to the ledger"):
            self._run.record("attempt", {"round": number, "attempt": attempt})

    def keep_decision(
        self, number: int, attempt: int, digest: str, contributors: dict[str, tuple[int, int]]
    ) -> None:
        """Record that G_`number` is the result of an attempt."""
        decision = Decision(number, attempt, digest, self._adopted().run)
        if not self.has(decision):
            raise StoreError(f"the result of attempt {attempt} is not here any more")
        named = {name: list(tokens) for name, tokens in contributors.items()}
        with disk("cannot write the decision to the ledger"):
            self._run.record("global", {**asdict(decision), "contributors": named})

    # --- reductions ---

    def begin_result(self, attempt: int) -> dict[str, Any]:
        """Return what a reduction reads and writes: base, cut, residual, out, skip, values.

        Results of attempts before are removed: they are never decided any more.
        """
        held, files, manifest = self._adopted(), self._globals, self._run.manifest
        if self._state.cut is None:
            raise StoreError("there is no cut to reduce")
        base, cut = self._path(held), files.path("cut", held.round)
        with disk("cannot begin a reduction"):
            files.clean([base, cut], -1)
            residual = self._path(held, "residual")
            has_residual = self._coordinates and files.is_of(residual, manifest)
        return {
            "base": base,
            "cut": cut,
            "residual": residual if has_residual else None,
            "out": files.path("sum", held.round + 1, attempt),
            "skip": len(header_for(manifest)),
            "values": manifest.values,
        }

    def finish_result(self, attempt: int, spec: CodecSpec) -> str:
        """Make and keep the result of an attempt, whose sum is synced; return its digest.

        spec: how the update is coded, the same at all members.
        """
        before, files = self._adopted(), self._globals
        made = {kind: files.path(kind, before.round + 1, attempt) for kind in KINDS}
        # Only the coordinator keeps what coding loses, and fp32 loses nothing.
        kinds = ("residual",) if self._coordinates and spec.format != "fp32" else ()
        with disk(f"cannot keep the result of attempt {attempt}"):
            digest = self._write_result(before, made, spec, keeps_residual=bool(kinds))
            # A crash between these leaves an update without weights, which counts for nothing.
            for kind in (*kinds, "update", "weights"):
                files.publish(made[kind])
            with suppress(OSError):  # or by the next reduction
                self._files.remove(made["sum"])
        return digest

    def _write_result(
        self, before: Decision, made: dict[str, Path], spec: CodecSpec, *, keeps_residual: bool
    ) -> str:
        """Write update, weights and residual under their temporary names; return the digest."""
        manifest, files = self._run.manifest, self._globals
        longest = manifest.longest_chunk
        scratch = new_vector(longest)
        coded = memoryview(bytearray(bound(longest, spec)))
        with ExitStack() as opened:

            def flat(path: Path) -> FlatWriter:
                writer = FlatWriter(self._files, files.temporary(path), manifest)
                opened.callback(writer.close)
                return writer

            def chunks(path: Path) -> Iterator[NDArray[np.float32]]:
                return opened.enter_context(closing(files.chunks(path, manifest)))

            update = FrameWriter(self._files, files.temporary(made["update"]))
            weights = flat(made["weights"])
            lost = flat(made["residual"]) if keeps_residual else None
            sums, base = chunks(made["sum"]), chunks(self._path(before))
            for index, (change, values) in enumerate(zip(sums, base, strict=True)):
                sent = scratch[: len(change)]
                np.negative(change, out=change)
                if manifest.is_buffer(index):
                    np.add(values, change, out=values)
                    frame = memoryview(encode(values, LOSSLESS))
                    np.copyto(sent, change)
                else:
                    frame = coded[: encode_into(change, coded, spec)]
                    decode_into(frame, sent)
                    np.add(values, sent, out=values)
                check_finite(manifest, index, squared_norm(sent), values)
                update.append(frame)
                weights.append(values)
                if lost is not None:
                    np.subtract(change, sent, out=change)
                    lost.append(change)
            update.sync()
            weights.sync()
            if lost is not None:
                lost.sync()
            return weights.digest

    # --- what clients fetch ---

    @property
    def update_base(self) -> str:
        """The digest of the weights from which `read_update` leads; empty: there is no update."""
        digests, state = self._run.book.digests, self._state
        held = state.adopted
        return held.base if held and digests.get(state.version) == held.digest else ""

    def has_update(self, version: int) -> bool:
        """Whether the coded update to a version of global weights is here."""
        if self._state.version != version or not self.update_base:
            return False
        return self._globals.exists(self._path(self._adopted(), "update"))

    def read_update(self, version: int, index: int) -> bytes | None:
        """Return a frame of the update from the global weights before; None: it is not here.

        A client checks the result by its digest. Raises IndexError.
        """
        manifest = self._run.manifest
        manifest.chunk_range(index)
        if not self.has_update(version):
            return None
        held = self._adopted()
        path = self._path(held, "update")
        with disk(f"cannot read the update to global weights {held.round}"):
            if self._places is None or self._places[0] != path:
                self._places = path, frame_places(self._files, path, manifest.chunks)
            return read_frame(self._files, path, self._places[1][index])

    # --- global weights of others ---

    def has(self, decision: Decision) -> bool:
        """Whether these global weights are here. Reads all of them."""
        if self._run.model is None:
            return False
        with disk(f"cannot read global weights {decision.round}"):
            found = self._globals.digest(self._path(decision), self._run.model)
            return found == decision.digest

    def use_model(self, manifest: Manifest) -> None:
        """Take the model of global weights that will arrive, for a run without weights."""
        if self._run.model is None:
            self._offered_model = manifest

    def receive(self, decision: Decision) -> None:
        """Begin to receive global weights; what arrived before is dropped."""
        self.stop_receiving()
        manifest = self.model
        if manifest is None:
            raise StoreError("global weights came before their model")
        name = f"global weights {decision.round}"
        with disk(f"cannot write {name}"):
            path = self._globals.temporary(self._path(decision))
            weights = ArrivingWeights(name, manifest, FlatWriter(self._files, path, manifest))
            self._receiving = decision, weights

    def write_chunk(self, index: int, *frames: BytesLike) -> None:
        """Check and write chunks from `index` on, fp32 frames, in order. Repeats are ignored."""
        if self._receiving is not None:
            decision, weights = self._receiving
            with disk(f"cannot write global weights {decision.round}"):
                weights.write(index, *frames)

    def finish_receiving(self) -> None:
        """Keep the global weights that arrived. StoreError: others were decided."""
        if self._receiving is None:
            raise StoreError("no global weights are arriving")
        decision, weights = self._receiving
        name = f"global weights {decision.round}"
        try:
            with disk(f"cannot write {name}"):
                _, digest = weights.weights.sync()
                if digest[:DIGEST_CHARACTERS] != decision.digest:
                    raise StoreError(f"{name} arrived with another digest than decided")
                self._globals.publish(self._path(decision))
        finally:
            self.stop_receiving()

    def stop_receiving(self) -> None:
        """Drop global weights that are incomplete."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            decision, weights = receiving
            weights.weights.close()
            with suppress(OSError):
                self._globals.discard(self._path(decision))

    def read_chunk(self, index: int, decided: Decision) -> bytes | None:
        """Return chunk `index` of decided global weights as an fp32 frame; None: not here."""
        if self._state.decided != decided:
            return None
        with disk("cannot read global weights"):
            path, manifest = self._path(decided), self._run.manifest
            with closing(self._globals.chunks(path, manifest, index)) as chunks:
                return encode(next(chunks), LOSSLESS)

    # --- adoption ---

    def make_version(
        self, decision: Decision, newest: Newest | None, *, counted: bool, keeps_momentum: bool
    ) -> Checkpoint:
        """Make the next version of global weights; see the head of this file.

        newest: the vectors of the version before; None: there is none.
        """
        held = self._state.adopted
        with disk(f"cannot make a version of global weights {decision.round}"):
            follows = held is not None and held.round == decision.round - 1
            has_update = self._globals.exists(self._path(decision, "update"))
            base = held.digest if held and follows and has_update else ""
            adoption = Adoption(**asdict(decision), counted=counted, base=base)
            if newest is None:
                return self._make_first(adoption)
            try:
                return self._make(adoption, newest, keeps_momentum=keeps_momentum)
            except BaseException:
                if newest.vectors.version != self._run.book.version:
                    newest.recover()
                raise

    def _make_first(self, adoption: Adoption) -> Checkpoint:
        """Write version 0 of a run that begins with global weights."""
        assert self.model is not None, "its weights are here"
        self._run.write_model(self.model)
        self._run.model = self.model
        with VersionWriter(self._files, self._run.checkpoints, 0, self._run.manifest) as writer:
            weights = writer.flat(WEIGHTS)
            for values in self._globals.chunks(self._path(adoption), self._run.manifest):
                weights.append(values)
            return self._publish(adoption, writer, weights.digest)

    def _make(self, adoption: Adoption, newest: Newest, *, keeps_momentum: bool) -> Checkpoint:
        """Write the next version, with all vectors."""
        version, vectors = self._run.book.version + 1, newest.vectors
        newest.make_way(version, must_finish=False)
        writer = VersionWriter(self._files, self._run.checkpoints, version, self._run.manifest)
        with writer, closing(self._next_weights(adoption, vectors)) as weights:
            change = vectors.adopt(version, weights, keeps_state=keeps_momentum)
            for name, vector in vectors.not_zero(keeps_state=keeps_momentum).items():
                writer.write_flat(name, vector)
            before = self._run.kept.get(version - 1).record
            return self._publish(adoption, writer, change.digest, change.update_norm, before)

    def _publish(
        self,
        adoption: Adoption,
        writer: VersionWriter,
        digest: str,
        norm: float = 0.0,
        before: VersionRecord | None = None,
    ) -> Checkpoint:
        book, version = self._run.book, 0 if before is None else before.version + 1
        if self._reference(adoption) is None and digest != adoption.digest:
            raise StoreError(f"global weights {adoption.round} were altered on disk")
        stored = writer.seal(self._run.pool)
        self._run.begin_version(version)
        record = VersionRecord(
            version=version,
            digest=digest,
            parent=before.digest if before is not None else "",
            generation=book.generation,
            fingerprint=self._run.manifest.fingerprint,
            merged=(),
            scale=0.0,
            tokens_total=book.tokens_total,
            update_bytes=0,
            update_chunks=0,
            update_norm=norm,
            mean_share=before.mean_share if before is not None else 0.0,
            groups=adoption,
        )
        return writer.publish(record, stored)

    def _next_weights(self, adoption: Adoption, vectors: Vectors) -> Generator[NDArray[np.float32]]:
        """Yield the weights of the next version, chunk by chunk."""
        reference, manifest = self._reference(adoption), self._run.manifest
        with ExitStack() as opened:

            def chunks(path: Path) -> Iterator[NDArray[np.float32]]:
                return opened.enter_context(closing(self._globals.chunks(path, manifest)))

            before = None if reference is None else chunks(reference)
            for index, values in enumerate(chunks(self._path(adoption))):
                gained = None if before is None else next(before)
                if gained is not None and not manifest.is_buffer(index):
                    np.subtract(vectors.weights_chunk(index), gained, out=gained)
                    np.add(values, gained, out=values)
                yield values

    def _reference(self, adoption: Adoption) -> Path | None:
        """The file of the weights from which the group's gain counts; None: it gained nothing."""
        book, state = self._run.book, self._state
        held = state.adopted
        if held is None:
            return None
        if adoption.counted:
            if state.cut is None:
                raise StoreError("there is no cut that was counted")
            # Not its number: after a rollback that may be another version's.
            is_exact = state.cut.digest == book.digests[book.version]
            return None if is_exact else self._globals.path("cut", state.cut.round)
        is_exact = state.version == book.version and book.digests[book.version] == held.digest
        return None if is_exact else self._path(held)

    def adopted(self) -> None:
        """Remove files that are not needed after an adoption; a failure is made up for later."""
        with suppress(OSError):
            self._clean()
