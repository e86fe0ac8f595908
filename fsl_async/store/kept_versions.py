"""Kept versions: what clients fetch and the next version is computed from.

Every chunk is checked before it is used. Damage is reported in one line and repaired from intact
files (fsl_async.store.repair). If the repair fails:

    update.bin of any version            that version is served in full
    a file of an older version           that version is not served any more
    a file of the newest version         CheckpointDamaged: it is neither served nor built upon
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.errors import disk_words
from fsl_async.store.checkpoint import MEAN, UPDATE, WEIGHTS, open_flat
from fsl_async.store.digest import check_chunk
from fsl_async.store.errors import CheckpointDamaged, Damage, StoreError
from fsl_async.store.frame_file import frame_places, read_frame
from fsl_async.store.repair import mean_lost, update_lost
from fsl_codecs import CodecSpec, bound, encode_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from fsl_async.store.checkpoint import Checkpoint
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.records import VersionRecord
    from fsl_async.store.repair import Repairer
    from fsl_async.store.vectors import Vectors

_LOSSLESS = CodecSpec(format="fp32")


def _lossless(values: NDArray[np.float32]) -> bytes:
    coded = bytearray(bound(len(values), _LOSSLESS))
    return bytes(memoryview(coded)[: encode_into(values, coded, _LOSSLESS)])


@contextmanager
def disk(doing: str) -> Iterator[None]:
    """Turn OSError into a StoreError of one line that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{doing}: {disk_words(error)}") from error


class KeptVersions:
    """The kept checkpoints, by version."""

    def __init__(self, repairer: Repairer, kept: Iterable[Checkpoint]) -> None:
        self.vectors: Vectors | None = None
        """The newest version in memory, if the store keeps it there."""
        self._held: tuple[int, Sequence[bytes]] = (-1, ())
        self._repairer = repairer
        self._files = repairer.files
        self._kept = {checkpoint.record.version: checkpoint for checkpoint in kept}
        self._update_places: dict[int, NDArray[np.int64]] = {}

    @property
    def records(self) -> tuple[VersionRecord, ...]:
        """The records of all of them, oldest first."""
        return tuple(self._kept[version].record for version in sorted(self._kept))

    @property
    def all(self) -> list[Checkpoint]:
        """All of them, oldest first."""
        return [self._kept[version] for version in sorted(self._kept)]

    def report(self, line: str) -> None:
        """Report damage, or what it costs."""
        self._repairer.report(line)

    def get(self, version: int) -> Checkpoint:
        """Return one of them. Raises KeyError."""
        return self._kept[version]

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a new version."""
        self._kept[checkpoint.record.version] = checkpoint

    def drop_below(self, oldest: int) -> None:
        """Drop versions below `oldest`, which are removed from disk next."""
        for version in [version for version in self._kept if version < oldest]:
            self._drop(version)

    def _drop(self, version: int) -> None:
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
        manifest.chunk_range(index)
        held = self.update_in_memory(version, index)
        if held is not None:
            return held
        may_repair = True
        while self.has_update(version):
            with disk(f"cannot read the update of version {version}"):
                try:
                    return self._update_frame(version, index, manifest)
                except Damage as damage:
                    self._update_places.pop(version, None)
                    if not (may_repair and self._repairer.repair(version, damage, manifest)):
                        self._kept[version] = self._kept[version].without([UPDATE])
                        self._repairer.report(update_lost(version, damage))
            may_repair = False
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

    def read_full(self, version: int, index: int, manifest: Manifest) -> bytes | None:
        """Return chunk `index` of a version's weights as an fp32 frame; None if it is not kept.

        Raises IndexError, CheckpointDamaged.
        """
        values = np.empty(manifest.chunk_values(index), dtype=np.float32)
        vectors, may_repair = self.vectors, True
        if vectors is not None and vectors.version == version:
            return _lossless(vectors.weights_chunk(index))
        while version in self._kept and self._kept[version].is_whole:
            with disk(f"cannot read version {version}"):
                try:
                    self._read_weights(version, index, values, manifest)
                except Damage as damage:
                    if not (may_repair and self._repairer.repair(version, damage, manifest)):
                        self._give_up(version, damage, manifest)
                    may_repair = False
                    continue
            return _lossless(values)
        return None

    def _read_weights(
        self, version: int, index: int, values: NDArray[np.float32], manifest: Manifest
    ) -> None:
        reader = open_flat(self._files, self._kept[version], WEIGHTS, manifest)
        assert reader is not None, "every version has weights"
        try:
            reader.read_into(index, values)
        finally:
            reader.close()

    def _give_up(self, version: int, damage: Damage, manifest: Manifest) -> None:
        """Drop an older version that cannot be repaired. CheckpointDamaged: it is the newest."""
        if version == max(self._kept):
            raise self._repairer.checkpoints.damaged(version, damage, manifest) from damage
        self._drop(version)
        self._repairer.report(f"version {version} is damaged: {damage}; it is not served any more")

    def repair_newest(self, damage: Damage, manifest: Manifest) -> None:
        """Repair a file of the newest version. Raises CheckpointDamaged."""
        newest = max(self._kept)
        if self._repairer.repair(newest, damage, manifest):
            return
        if damage.file != MEAN:
            self._give_up(newest, damage, manifest)
        self._kept[newest] = self._kept[newest].without([MEAN])
        self._repairer.report(mean_lost(newest, damage))

    def verify(self, version: int, manifest: Manifest) -> bool:
        """Read every byte of a version and repair damage; return whether there was none.

        CheckpointDamaged: the newest version cannot be repaired.
        """
        if version not in self._kept:
            return False
        with disk(f"cannot read version {version}"):
            try:
                self._repairer.checkpoints.verify(version, manifest)
            except Damage as damage:
                try:
                    self._kept[version] = self._repairer.verified(version, manifest)
                except CheckpointDamaged:
                    self._give_up(version, damage, manifest)
                return False
        return True
