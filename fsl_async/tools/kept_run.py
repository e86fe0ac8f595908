"""Reads versions of a run from a parameter server's directory, while it runs or later. No torch."""

from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from fsl_async.config.fixed import read_settings
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import RunDirError
from fsl_async.files.files import Files
from fsl_async.store.book.records import VersionRecord
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.recovery.run_directory import read_manifest
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import Checkpoints


@frozen
class Loaded:
    """A version in memory. of: what `vector`, float32, is: "weights" or "mean"."""

    record: VersionRecord
    of: str
    vector: NDArray[np.float32]


class KeptRun:
    """The versions of a run, and what it fixes.

    manifest: of the exchanged tensors. Raises RunDirError.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._files = Files()
        self._checkpoints = Checkpoints(self._files, run_dir)
        if not self.versions():
            raise RunDirError(f"{run_dir} has no version yet: wait for the first client's weights")
        try:
            self.manifest: Manifest = read_manifest(self._files, run_dir)
        except StoreError as error:
            raise RunDirError(str(error)) from None

    def versions(self) -> list[int]:
        """The versions that are kept, oldest first."""
        return self._checkpoints.versions()

    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings that the run fixes, as tables. Raises RunDirError."""
        tables = read_settings(self.run_dir)
        if tables is None:
            raise RunDirError(f"{self.run_dir} has no settings.json: its run has made no version")
        return tables

    def tuning(self) -> TuneConfig:
        """How the run tunes, by the settings that it fixes. Raises RunDirError."""
        given = self.settings().get("tune", {})
        try:
            return TuneConfig(**given)
        except (TypeError, ValueError) as error:
            raise RunDirError(f"{self.run_dir} is of another release: {error}") from None

    def load(self, version: int, of: str = "weights") -> Loaded | None:
        """Read a version; None if it was removed meanwhile, or has no mean.

        of: "weights" or "mean", of the run's late versions. Raises RunDirError for damage.
        """
        try:
            read = read_version(self._files, self._checkpoints, version, self.manifest)
        except (Damage, OSError) as error:
            if not self._checkpoints.path(version).exists():
                return None
            raise RunDirError(f"{self.run_dir}: version {version}: {error}") from None
        vector = read.weights if of == "weights" else read.mean
        return None if vector is None else Loaded(read.record, of, vector)

    def chosen(self, version: int | None) -> Loaded:
        """Read a version, or the newest one. Raises RunDirError where it is not kept."""
        have = self.versions()
        for number in reversed(have) if version is None else [version] if version in have else []:
            found = self.load(number)
            if found is not None:
                return found
        if version is None:
            raise RunDirError(f"{self.run_dir}: all versions were removed while they were read")
        raise RunDirError(f"{self.run_dir} does not keep version {version}; it has {have}")

    def named(self, loaded: Loaded) -> dict[str, NDArray[np.float32]]:
        """The tensors of a version by name, float32; they share its memory."""
        return {
            one.name: loaded.vector[one.offset : one.offset + one.values].reshape(one.shape)
            for one in self.manifest.tensors
        }
