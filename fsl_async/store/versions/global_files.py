"""Global files: cuts, results of reductions and global weights, as flat files beside a run.

    run_dir/global/
        g00000003.00000007.safetensors           G_3, as attempt 7 made it; G_0 is of attempt 0
        update-00000003.00000007.frames          the coded update from G_2 to it, for clients
        residual-00000003.00000007.safetensors   at the coordinator: what coding has lost so far
        cut-00000003.safetensors                 the weights that the group offers in round 3
        tmp-...                                  incomplete

A file has its name once it is complete and durable: written under its temporary name, synced,
renamed, and the folder synced. Whether it counts is in the ledger (`groups_state`). A result is
complete once its weights have their name; its other files get theirs before. Others are removed at
a start and after each adoption.
"""

from __future__ import annotations

import re
from contextlib import closing
from typing import TYPE_CHECKING

from fsl_async.store.disk.chunk_files import (
    DIGEST_CHARACTERS,
    FlatWriter,
    chunk_digest,
    chunks_of,
    misfit,
    vector_digest,
)
from fsl_async.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from fsl_async.files.files import Files
    from fsl_async.store.model.manifest import Manifest

GLOBAL_FOLDER = "global"
KINDS = {
    "weights": "g{:08d}.{:08d}.safetensors",
    "update": "update-{:08d}.{:08d}.frames",
    "residual": "residual-{:08d}.{:08d}.safetensors",
    "cut": "cut-{:08d}.safetensors",
    "sum": "tmp-sum-{:08d}.{:08d}.safetensors",
}
"""Kind of a file -> its name, with the round and the attempt. A sum is never complete."""
_RESULT = re.compile(r"g(\d{8,})\.(\d{8,})\.safetensors")
_BESIDE = re.compile(r"(?:update|residual)-(\d{8,}\.\d{8,})\.(?:frames|safetensors)")
_CUT = re.compile(r"cut-(\d{8,})\.safetensors")


class GlobalFiles:
    """The folder `global` of one run directory. Methods raise OSError unchanged."""

    def __init__(self, files: Files, run_dir: Path) -> None:
        self._files = files
        self.directory = run_dir / GLOBAL_FOLDER

    def make_directory(self) -> None:
        """Create the folder, durably."""
        self._files.make_directory(self.directory)
        self._files.sync_directory(self.directory.parent)

    def path(self, kind: str, number: int, attempt: int = 0) -> Path:
        """Return the path of a file, existing or not. kind: see `KINDS`."""
        return self.directory / KINDS[kind].format(number, attempt)

    def exists(self, path: Path) -> bool:
        """Whether a file of the folder is complete."""
        return path.name in self._files.names(self.directory)

    def temporary(self, path: Path) -> Path:
        """Return the path of a file while it is incomplete."""
        return path.with_name(f"tmp-{path.name}")

    def write(self, path: Path, chunks: Iterable[NDArray[np.float32]], manifest: Manifest) -> str:
        """Write a file; return the digest of its vector."""
        with closing(FlatWriter(self._files, self.temporary(path), manifest)) as writer:
            for values in chunks:
                writer.append(values)
            writer.sync()
            digest = writer.digest
        self.publish(path)
        return digest

    def publish(self, path: Path) -> None:
        """Give a complete and synced file its name, durably."""
        self._files.rename(self.temporary(path), path)
        self._files.sync_directory(self.directory)

    def discard(self, path: Path) -> None:
        """Remove the incomplete form of a file, if there is one."""
        temporary = self.temporary(path)
        if self.exists(temporary):
            self._files.remove(temporary)

    def digest(self, path: Path, manifest: Manifest) -> str:
        """Read a file and return the digest of its vector; empty if it is no such file."""
        try:
            return vector_digest(map(chunk_digest, self.chunks(path, manifest)))[:DIGEST_CHARACTERS]
        except StoreError:
            return ""

    def chunks(
        self, path: Path, manifest: Manifest, first: int = 0
    ) -> Generator[NDArray[np.float32]]:
        """Yield the chunks of a file from `first` on, each valid until the next.

        StoreError: it is missing, or not of this model.
        """
        if not self.exists(path):
            raise StoreError(f"{path.name} is missing")
        with self._files.opened(path) as descriptor:
            if misfit(self._files, descriptor, manifest):
                raise StoreError(f"{path.name} is not of this model")
            yield from chunks_of(self._files, descriptor, manifest, first)

    def is_of(self, path: Path, manifest: Manifest) -> bool:
        """Whether a file is here and has the size and the header of a model."""
        if not self.exists(path):
            return False
        with self._files.opened(path) as descriptor:
            return misfit(self._files, descriptor, manifest) is None

    def clean(self, keep: Iterable[Path], results_of: int) -> None:
        """Remove all files but `keep`, and the newest result for G_`results_of`.

        The update and the residual of global weights stay with them.
        """
        wanted = {path.name for path in keep}
        names = self._files.names(self.directory)
        found = ((name, _RESULT.fullmatch(name)) for name in names)
        results = [name for name, match in found if match and int(match[1]) == results_of]
        wanted |= set(sorted(results)[-1:])
        for name in names:
            beside = _BESIDE.fullmatch(name)
            if beside is not None and f"g{beside[1]}.safetensors" in wanted:
                continue
            is_ours = beside or _RESULT.fullmatch(name) or _CUT.fullmatch(name)
            if (is_ours or name.startswith("tmp-")) and name not in wanted:
                self._files.remove(self.directory / name)
