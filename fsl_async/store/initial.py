"""Initial weights: version 0 while the publishing client sends it.

Its frames must be fp32, which is lossless: the publishing client then already holds version 0, to
the bit. The values go straight into the version's weights file; momentum and residual of version 0
are zeros, so they have no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.checkpoint import WEIGHTS, VersionWriter
from fsl_async.store.chunk_pool import ChunkPool
from fsl_async.store.delta_kind import decode_checked
from fsl_async.store.errors import FrameRefused
from fsl_async.store.manifest import CHUNK_VALUES
from fsl_async.store.records import VersionRecord
from fsl_codecs import info

if TYPE_CHECKING:
    from fsl_async.files.files import BytesLike, Files
    from fsl_async.store.checkpoint import Checkpoint, Checkpoints
    from fsl_async.store.manifest import Manifest


class InitialWeights:
    """Version 0 in progress. Always close it. Methods raise OSError unchanged."""

    def __init__(self, files: Files, checkpoints: Checkpoints, manifest: Manifest) -> None:
        self.manifest = manifest
        self.next_chunk = 0
        self._scratch = np.empty(CHUNK_VALUES, dtype=np.float32)
        self._writer = VersionWriter(files, checkpoints, 0, manifest)
        try:
            self._weights = self._writer.flat(WEIGHTS)
        except BaseException:
            self._writer.close()
            raise

    def write(self, index: int, frame: BytesLike) -> None:
        """Check a frame and write its values; a repeated one is ignored. Raises FrameRefused."""
        if index < self.next_chunk:
            return
        if index > self.next_chunk:
            raise FrameRefused(f"chunk {index} of version 0 came before {self.next_chunk}")
        values = decode_checked(frame, index, self.manifest, self._scratch)
        coding = info(frame).format
        if coding != "fp32":
            raise FrameRefused(f"chunk {index} of version 0 is coded in {coding}, not in fp32")
        finite = np.isfinite(values)
        if not finite.all():
            position = self.manifest.chunk_range(index)[0] + int(np.argmin(finite))
            name = self.manifest.tensor_at(position)
            raise FrameRefused(f"the initial weights hold NaN or infinity in tensor {name!r}")
        self._weights.append(values)
        self.next_chunk += 1

    def publish(self, generation: int) -> Checkpoint:
        """Make version 0 exist, durably."""
        stored = self._writer.seal(ChunkPool())
        record = VersionRecord(
            version=0,
            digest=self._weights.digest,
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
