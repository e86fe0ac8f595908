"""Kept versions: those on disk that clients fetch and recovery begins at.

Every chunk is checked before it is used. Damage is reported in one line:

    update.bin      that version is served in full
    a vector        the newest version is written again from memory; an older one is not served any
                    more
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.disk.chunk_files import check_chunk, frame_places, read_frame
from fsl_async.store.disk.folders import MANIFEST
from fsl_async.store.errors import Damage, StoreError, disk
from fsl_async.store.versions.checkpoint import UPDATE, WEIGHTS, open_flat, update_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.versions.checkpoint import Checkpoint, Checkpoints


class KeptVersions:
    """The kept checkpoints, by version. report: receives one line about each damage."""

    def __init__(
        self, files: Files, checkpoints: Checkpoints, report: Callable[[str], None]
    ) -> None:
        self._files = files
        self._checkpoints = checkpoints
        self._report = report
        self._kept: dict[int, Checkpoint] = {}
        self._held: tuple[int, Sequence[bytes]] = (-1, ())
        self._update_places: dict[int, NDArray[np.int64]] = {}

    @property
    def records(self) -> tuple[VersionRecord, ...]:
        """The records of all of them, oldest first."""
        return tuple(checkpoint.record for checkpoint in self.all)

    @property
    def all(self) -> list[Checkpoint]:
        """All of them, oldest first."""
        return [self._kept[version] for version in sorted(self._kept)]

    def get(self, version: int) -> Checkpoint:
        """Return one of them. Raises KeyError."""
        return self._kept[version]

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a new version, or one whose files have changed."""
        self._kept[checkpoint.record.version] = checkpoint

    def lose(self, version: int, *, update: bool = False) -> None:
        """Go on without a version's vectors, or its coded change, because they are damaged."""
        held = self._kept[version]
        self.add(held.without([name for name in held.files if (name == UPDATE) == update]))

    def drop_below(self, oldest: int) -> None:
        """Drop versions below `oldest`, which are removed from disk next."""
        for version in [version for version in self._kept if version < oldest]:
            del self._kept[version]
            self._update_places.pop(version, None)

    def hold_update(self, version: int, frames: Sequence[bytes]) -> None:
        """Keep the coded change to `version` in memory, and no other."""
        self._held = (version, frames)

    def update_in_memory(self, version: int, index: int) -> bytes | None:
        """Return a chunk of the change to `version` if it is in memory. For any thread."""
        held, frames = self._held
        return frames[index] if held == version and index < len(frames) else None

    def has_update(self, version: int) -> bool:
        """Whether the coded change from `version` - 1 to `version` is kept."""
        return version in self._kept and UPDATE in self._kept[version].files

    def read_update(self, version: int, index: int, manifest: Manifest) -> bytes | None:
        """Return the coded chunk `index` of the change to `version`; None if it is not kept.

        Raises IndexError.
        """
        if not 0 <= index < manifest.chunks:
            raise IndexError(f"chunk {index} of {manifest.chunks}")
        held = self.update_in_memory(version, index)
        if held is not None or not self.has_update(version):
            return held
        with disk(f"cannot read the change to version {version}"):
            try:
                return self._update_frame(version, index, manifest)
            except Damage as damage:
                self._update_places.pop(version, None)
                self.lose(version, update=True)
                self._report(update_lost(version, damage))
        return None

    def _update_frame(self, version: int, index: int, manifest: Manifest) -> bytes:
        kept = self._kept[version]
        path = kept.path / UPDATE
        try:
            if version not in self._update_places:
                self._update_places[version] = frame_places(self._files, path, manifest.chunks)
            frame = read_frame(self._files, path, self._update_places[version][index])
        except FileNotFoundError:
            raise Damage(UPDATE, "is missing") from None
        except StoreError:
            raise Damage(UPDATE, "holds an incomplete frame") from None
        check_chunk(UPDATE, kept.files[UPDATE].checks, index, frame)
        return frame

    def read_weights(
        self, version: int, index: int, manifest: Manifest
    ) -> NDArray[np.float32] | None:
        """Return chunk `index` of a version's weights; None if it is not on disk.

        Raises IndexError.
        """
        values = np.empty(manifest.chunk_values(index), dtype=np.float32)
        if version not in self._kept or not self._kept[version].is_whole:
            return None
        with disk(f"cannot read version {version}"):
            try:
                reader = open_flat(self._files, self._kept[version], WEIGHTS, manifest)
                assert reader is not None, "it is whole"
                with closing(reader):
                    reader.read_into(index, values)
            except Damage as damage:
                self.lose(version)
                self._report(
                    f"version {version} is damaged: {damage}; it is not served in full any more"
                )
                return None
        return values

    def verify(self, version: int, manifest: Manifest) -> bool:
        """Read every byte of a version; return whether all is as written. What is not is lost."""
        if version not in self._kept:
            return False
        damaged: set[str] = set()
        with disk(f"cannot read version {version}"):
            while True:
                try:
                    self._checkpoints.verify(version, manifest, damaged)
                    break
                except Damage as damage:
                    damaged.add(damage.file)
                    self._report(f"version {version} is damaged on disk: {damage}")
                    self.lose(version, update=damage.file == UPDATE)
                    if damage.file == MANIFEST:  # it is written again with the vectors
                        break
        return not damaged
