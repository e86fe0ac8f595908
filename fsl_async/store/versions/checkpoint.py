"""Checkpoints: one folder per version, which appears complete in one step, or not at all.

A version without its vectors is complete too, while those before it and the deltas that it merged
are there; it becomes whole later (fsl_async.store.commit.snapshots).

    checkpoints/v00000012/
        weights.safetensors     Theta, opens in the safetensors library
        momentum.safetensors    or others that the outer optimizer names; absent in version 0
                                (zeros)
        residual.safetensors    the coding error not yet sent; absent when there is none (zeros)
        mean.safetensors        mean of versions, of late ones above all, in a run without
                                a planned end
        owed.safetensors        factors of what a rule of adapters could not fit into their rank;
                                absent when there is none (zeros)
        update.bin              the coded change from version 11, as clients receive it
                                (fsl_async.store.disk.chunk_files)
        manifest.json           with a checksum: the version's record, and length, digest and chunk
                                checksums of every file; written last

It is committed and removed as fsl_async.store.disk.folders says. Versions that a rollback made void
are renamed to "rolled-back-<generation>-v00000012" and never removed here.

Initial weights: version 0 while the publishing client sends it.

Its frames must be fp32, which is lossless: the publishing client then already holds version 0, to
the bit. The values go straight into the version's weights file; momentum and residual of version 0
are zeros, so they have no file.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import asdict, evolve, frozen

from fsl_async.store.book.records import VersionRecord
from fsl_async.store.deltas.delta_kind import decode_checked
from fsl_async.store.disk.chunk_files import (
    DIGEST_CHARACTERS,
    FlatReader,
    FlatWriter,
    FrameWriter,
    check_flat_file,
    check_frame_file,
)
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.disk.folders import MANIFEST, NumberedFolders
from fsl_async.store.errors import CheckpointDamaged, Damage, FrameRefused
from fsl_codecs import info

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike, Files
    from fsl_async.store.model.manifest import Manifest


_FLAT = ".safetensors"
WEIGHTS = f"weights{_FLAT}"
RESIDUAL = f"residual{_FLAT}"
MEAN = f"mean{_FLAT}"
OWED = f"owed{_FLAT}"
UPDATE = "update.bin"

FORMAT = 4
"""Format 1 had no chunk checksums, format 2 SHA-256 and CRC-32 (docs/adr/0102)."""


@frozen
class StoredFile:
    """Length of a file in bytes, and its digest: of a flat file, that of the vector."""

    bytes: int
    digest: str
    checks: str
    """The checksum of each chunk, or of each frame in update.bin."""


@frozen
class Checkpoint:
    """A version's folder as its manifest.json describes it."""

    record: VersionRecord
    files: Mapping[str, StoredFile]
    path: Path

    @property
    def is_whole(self) -> bool:
        """Whether its vectors are on disk: it can be built upon without those before it."""
        return WEIGHTS in self.files

    def without(self, names: Collection[str]) -> Self:
        """Return a copy without these files."""
        kept = {name: stored for name, stored in self.files.items() if name not in names}
        return evolve(self, files=kept)


class Checkpoints(NumberedFolders):
    """The folder of all versions. Methods raise OSError unchanged."""

    def __init__(self, files: Files, run_dir: Path) -> None:
        super().__init__(files, run_dir / "checkpoints", "v", FORMAT)

    versions = NumberedFolders.numbers

    def is_whole(self, version: int) -> bool:
        """Whether there is that version, with its vectors."""
        try:
            return self.load(version).is_whole
        except (Damage, OSError):
            return False

    def load(self, version: int) -> Checkpoint:
        """Read a version's manifest.json.

        Damage: it is missing, altered, or describes another version.
        """
        members = self.read_manifest(version)
        if members["version"] != version:
            raise Damage(MANIFEST, f"is that of version {members['version']}")
        stored = {name: StoredFile(**entry) for name, entry in members["files"].items()}
        return Checkpoint(VersionRecord.from_fact(members), stored, self.path(version))

    def verify(
        self,
        version: int,
        manifest: Manifest,
        without: Collection[str] = (),
        *,
        with_vectors: bool = True,
    ) -> Checkpoint:
        """Load a version and compare every file with its digest, reading it in pieces.

        without: files known to be damaged, left out of the result. with_vectors: or the coded
        change alone. Damage names the first damaged file.
        """
        checkpoint = self.load(version).without(without)
        record = checkpoint.record
        if record.fingerprint != manifest.fingerprint:
            raise Damage(MANIFEST, "is of a model with other tensors")
        weights = checkpoint.files.get(WEIGHTS)
        if weights is not None and weights.digest[:DIGEST_CHARACTERS] != record.digest:
            raise Damage(MANIFEST, "contradicts itself about the weights")
        for name, stored in checkpoint.files.items():
            path = checkpoint.path / name
            if is_flat(name) and not with_vectors:
                continue
            if is_flat(name):
                problem = check_flat_file(self._files, path, manifest, stored.bytes, stored.digest)
            else:
                problem = check_frame_file(self._files, path, stored.bytes, stored.digest)
            if problem:
                raise Damage(name, problem)
        return checkpoint

    def damaged(self, version: int, damage: Damage, manifest: Manifest) -> CheckpointDamaged:
        """Return the error for a damaged version; it names the newest intact version below."""
        for candidate in reversed(self.versions()):
            if candidate < version:
                with suppress(Damage, OSError):
                    self.verify(candidate, manifest)
                    return CheckpointDamaged(version, damage.file, candidate, damage.reason)
        return CheckpointDamaged(version, damage.file, None, damage.reason)

    def rename_void(self, version: int, generation: int) -> str:
        """Rename a void version's folder; return the new name.

        If a power cut undoes that, recovery repeats it.
        """
        name = f"rolled-back-{generation}-{self.path(version).name}"
        self._files.rename(self.path(version), self.directory / name)
        return name


class VersionWriter:
    """Writes one version into its temporary folder.

    A context manager that removes the folder unless `publish` succeeded.
    """

    def __init__(
        self,
        files: Files,
        checkpoints: Checkpoints,
        version: int,
        manifest: Manifest,
    ) -> None:
        self._files = files
        self._checkpoints = checkpoints
        self._version = version
        self._manifest = manifest
        self._flat: dict[str, FlatWriter] = {}
        self._frames: dict[str, FrameWriter] = {}
        self._open = ExitStack()
        checkpoints.retract(version)
        self._path = checkpoints.begin(f"v{version:08d}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and remove the folder if it still has its temporary name."""
        self._open.close()
        with suppress(OSError):
            self._files.remove_tree(self._path)

    def flat(self, name: str) -> FlatWriter:
        """Create a flat file and return its writer."""
        writer = FlatWriter(self._files, self._path / name, self._manifest)
        self._open.callback(writer.close)
        self._flat[name] = writer
        return writer

    def write_flat(self, name: str, vector: NDArray[np.float32]) -> None:
        """Write a vector, (manifest.values,)."""
        writer = self.flat(name)
        for index in range(self._manifest.chunks):
            writer.append(vector[slice(*self._manifest.chunk_range(index))])

    def frames(self, name: str) -> FrameWriter:
        """Create a frame file and return its writer."""
        self._frames[name] = FrameWriter(self._files, self._path / name)
        return self._frames[name]

    def seal(self, pool: ChunkPool) -> dict[str, StoredFile]:
        """Make all files durable, on the threads of `pool`; return their lengths and digests."""

        def sync(writer: FlatWriter | FrameWriter) -> StoredFile:
            return StoredFile(*writer.sync(), writer.checks)

        writers = self._flat | self._frames
        return dict(zip(writers, pool.each(sync, writers.values()), strict=True))

    def publish(self, record: VersionRecord, stored: Mapping[str, StoredFile]) -> Checkpoint:
        """Write manifest.json and make the version exist, durably."""
        entries: dict[str, Any] = {name: asdict(entry) for name, entry in stored.items()}
        self._checkpoints.write_manifest(self._path, {**record.to_fact(), "files": entries})
        self._checkpoints.publish(self._version, self._path)
        return Checkpoint(record, dict(stored), self._checkpoints.path(self._version))


def flat_name(vector: str) -> str:
    """Return the file name of a vector."""
    return f"{vector}{_FLAT}"


def is_flat(name: str) -> bool:
    """Whether a file of this name has a vector."""
    return name.endswith(_FLAT)


def update_lost(version: int, damage: Damage) -> str:
    """Return the line for a coded change that is damaged."""
    return f"version {version} was damaged: {damage}; clients get that version in full"


def open_flat(
    files: Files, checkpoint: Checkpoint, name: str, manifest: Manifest
) -> FlatReader | None:
    """Return a reader of one of the version's vectors, or None when it has none (zeros).

    Raises Damage, OSError.
    """
    if name not in checkpoint.files:
        return None
    return FlatReader(files, checkpoint.path / name, manifest, checkpoint.files[name].checks)


class ArrivingWeights:
    """Weights that arrive as fp32 frames, in order, and go into a flat file as they are."""

    def __init__(self, what: str, manifest: Manifest, weights: FlatWriter) -> None:
        """what: what arrives, for messages."""
        self.manifest = manifest
        self.weights = weights
        self.next_chunk = 0
        self._what = what
        self._scratch = np.empty(manifest.longest_chunk, np.float32)

    def write(self, first: int, *frames: BytesLike) -> None:
        """Check frames and write their values; repeated ones are ignored. Raises FrameRefused."""
        for index, frame in enumerate(frames, first):
            self._write(index, frame)

    def _write(self, index: int, frame: BytesLike) -> None:
        if index < self.next_chunk:
            return
        if index > self.next_chunk:
            raise FrameRefused(f"chunk {index} of {self._what} came before {self.next_chunk}")
        values = decode_checked(frame, index, self.manifest, self._scratch)
        coding = info(frame).format
        if coding != "fp32":
            raise FrameRefused(f"chunk {index} of {self._what} is coded in {coding}, not in fp32")
        finite = np.isfinite(values)
        if not finite.all():
            position = self.manifest.chunk_range(index)[0] + int(np.argmin(finite))
            name = self.manifest.tensor_at(position)
            raise FrameRefused(f"{self._what} has NaN or infinity in tensor {name!r}")
        self.weights.append(values)
        self.next_chunk += 1


class InitialWeights(ArrivingWeights):
    """Version 0 in progress. Always close it. Methods raise OSError unchanged."""

    def __init__(self, files: Files, checkpoints: Checkpoints, manifest: Manifest) -> None:
        self._writer = VersionWriter(files, checkpoints, 0, manifest)
        try:
            super().__init__("version 0", manifest, self._writer.flat(WEIGHTS))
        except BaseException:
            self._writer.close()
            raise

    def publish(self, generation: int) -> Checkpoint:
        """Make version 0 exist, durably."""
        stored = self._writer.seal(ChunkPool())
        record = VersionRecord(
            version=0,
            digest=self.weights.digest,
            parent="",
            generation=generation,
            fingerprint=self.manifest.fingerprint,
            merged=(),
            scale=0.0,
            tokens_total=0,
            update_bytes=0,
            update_chunks=0,
            update_norm=0.0,
        )
        return self._writer.publish(record, stored)

    def close(self) -> None:
        """Close the files and remove what is not published."""
        self._writer.close()
