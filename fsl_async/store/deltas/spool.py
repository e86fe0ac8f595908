"""Spool: coded deltas on disk, from their first chunk until no kept version can need them.

    spool/client@incarnation@base@sequence.frames
        being received, pending, or merged in a version above the oldest kept; where a rule uses
        deltas again, also the newest merged one of each client (fsl_async.store.book.latest_book)
    quarantine/client@incarnation@base@sequence.frames
        not finite, or quarantined later; the newest are kept for inspection
    sums/base.frames
        of a secure sum, or one that came by a channel: the mean that the next version is made of,
        as long as a replay may need it

A file in spool/ means nothing by itself: the ledger decides whether its delta was acknowledged. A
crash before the ledger line leaves a file that recovery removes, and the client, which keeps a
delta until it is acknowledged, offers it again.

Frames arrive in order. Each is checked on arrival, as the kind of the run's deltas defines
(fsl_async.store.deltas.delta_kind), and only one is decoded at a time. An interrupted delta resumes
at `next_chunk`, as long as the process runs.

Sketches of deltas: a sample of each, to find clients that train the same batches. NumPy only.

A sketch has the weights of a delta at fixed places of the flat vector, the same for all deltas of a
run, taken while frames are checked: neither a pass of its own nor memory beyond 16 KiB a client.

Deltas of two clients are alike where the cosine of their sketches is above ALIKE and either above
SAME, or the two are twice as close as the median pair of the round. Independent
clients agree too, early in a run and with large batches, but then all do, and not to SAME: see
docs/adr/0141.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, evolve

from fsl_async.roles.names import NAME
from fsl_async.roles.sync.delta import ORDER, DeltaKey
from fsl_async.store.disk.chunk_files import (
    FrameReader,
    FrameWriter,
    check_frame_file,
    first_bytes,
    frame_places,
)
from fsl_async.store.errors import FrameRefused, StoreError
from fsl_codecs import SEEDS_MAGIC, SeedsFrame

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike, Files
    from fsl_async.roles.sync.delta import Delta, StoredDelta
    from fsl_async.store.book.records import Received
    from fsl_async.store.deltas.delta_kind import DeltaKind
    from fsl_async.store.model.manifest import Manifest


PLACES = 4096
ALIKE = 0.9
SAME = 0.98
LEAST_VALUES = 64.0
"""Values that a sketch must be of in effect, (sum x^2)^2 / sum x^4: fewer are alike by chance."""

LEAST_FOR_OPPOSITE = 3
"""Clients among which one may be opposite to the rest."""

MOST_CLIENTS = 1024
"""Sketches that are kept; the oldest one goes first."""


class Sketches:
    """Sketches of each client's newest delta that is in no version yet."""

    def __init__(self) -> None:
        self._places = np.empty(0, np.int64)
        self._found: dict[str, tuple[DeltaKey, NDArray[np.float32]]] = {}

    def take(
        self, manifest: Manifest, key: DeltaKey, index: int, values: NDArray[np.float32]
    ) -> None:
        """Take what chunk `index` of a delta has at the places; nothing of buffers."""
        if manifest.is_buffer(index):
            return
        if not len(self._places):
            rng = np.random.default_rng(manifest.weights)
            drawn = rng.integers(manifest.weights, size=PLACES)
            all_of_it = manifest.weights <= PLACES
            self._places = np.arange(manifest.weights) if all_of_it else np.unique(drawn)
        known, sketch = self._found.get(key.client, (None, None))
        if sketch is None or known != key:
            sketch = np.zeros(len(self._places), np.float32)
            self._found.pop(key.client, None)
            self._found[key.client] = key, sketch
            if len(self._found) > MOST_CLIENTS:
                del self._found[next(iter(self._found))]
        start, stop = manifest.chunk_range(index)
        first, last = np.searchsorted(self._places, (start, stop))
        sketch[first:last] = values[self._places[first:last] - start]

    def compare(self, merged: Iterable[DeltaKey]) -> tuple[dict[str, float], str]:
        """Forget deltas that are merged now, and compare them.

        Returns "client/client" -> cosine of those alike, and the client that is opposite to the
        rest, or empty.
        """
        taken = [one for key in merged if (one := self._pop(key)) is not None]
        usable = sorted((name, sketch) for name, sketch in taken if _is_usable(sketch))
        if len(usable) < 2:
            return {}, ""
        rows = np.array([sketch for _, sketch in usable], np.float64)  # squares leave fp32
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        first, second = np.triu_indices(len(rows), 1)
        products = rows @ rows.T
        cosines = products[first, second]
        near = (cosines > SAME) | (1.0 - cosines < 0.5 * (1.0 - np.median(cosines)))
        alike = {
            f"{usable[first[pair]][0]}/{usable[second[pair]][0]}": round(float(cosines[pair]), 4)
            for pair in np.flatnonzero(near & (cosines > ALIKE))
        }
        turned = opposite(products)
        return alike, "" if turned is None else usable[turned][0]

    def _pop(self, key: DeltaKey) -> tuple[str, NDArray[np.float32]] | None:
        known, sketch = self._found.get(key.client, (None, None))
        if sketch is None or known != key:
            return None
        del self._found[key.client]
        return key.client, sketch


def opposite(products: NDArray[np.float64]) -> int | None:
    """The one of unit vectors that points away from the sum of the others, which agree; or None.

    products: (n, n), of each with each.
    """
    if len(products) < LEAST_FOR_OPPOSITE:
        return None
    to_rest = products.sum(axis=1) - np.diag(products)
    worst = int(np.argmin(to_rest))
    among_rest = np.delete(to_rest - products[:, worst], worst)
    return worst if to_rest[worst] < 0.0 < among_rest.min() else None


def _is_usable(sketch: NDArray[np.float32]) -> bool:
    squares = np.square(sketch, dtype=np.float64)
    most = float(squares.max(initial=0.0))
    if not 0.0 < most < np.inf:
        return False
    squares /= most
    return float(squares.sum() ** 2 / np.square(squares).sum()) >= LEAST_VALUES


_FILE_SUFFIX = ".frames"


@functools.lru_cache(4096)
def file_name(key: DeltaKey) -> str:
    """Return `client@incarnation@base@sequence.frames`; FrameRefused when the key is invalid."""
    numbers = (key.incarnation, key.base, key.sequence)
    if not NAME.fullmatch(key.client) or not all(0 <= n < 2**63 for n in numbers):
        raise FrameRefused(f"delta key {key.text[:120]!a} cannot be a file name here")
    return key.text.replace("/", "@") + _FILE_SUFFIX


def key_of_file(name: str) -> DeltaKey | None:
    """Return the key whose `file_name` is `name`, or None for any other file."""
    if not name.endswith(_FILE_SUFFIX):
        return None
    try:
        return DeltaKey.parse(name.removesuffix(_FILE_SUFFIX).replace("@", "/"))
    except ValueError:
        return None


_GONE = ".gone"
MOST_OF_CLIENT, MOST_FILES, MOST_BYTES = 16, 256, 4 << 30
"""Limits of the quarantine, without held deltas: enough to see how a client went wrong, and what a
disk has room for that holds the run."""


@define
class Part:
    """A delta that is being received, or is complete and waits for its ledger line."""

    writer: FrameWriter
    delta: Delta
    squared_norm: float = 0.0
    durable: bool = False
    is_seeds: bool = False
    """Whether it is one frame of scalars."""

    @property
    def norm(self) -> float:
        """Euclidean norm of what has arrived; not finite when a value is not finite."""
        return math.sqrt(self.squared_norm)


class Spool:
    """The two folders. Every method that touches them raises OSError unchanged."""

    def __init__(self, files: Files, run_dir: Path, kind: DeltaKind) -> None:
        self._files = files
        self._kind = kind
        self._directory = run_dir / "spool"
        self._quarantine = run_dir / "quarantine"
        self._sums = run_dir / "sums"
        self._parts: dict[DeltaKey, Part] = {}
        self.sketches = Sketches()

    def make_directories(self) -> None:
        """Create both folders; their names are durable once the run directory is synced."""
        self._files.make_directory(self._directory)
        self._files.make_directory(self._quarantine)

    def restore(self) -> bool:
        """Create spool/ again if another program removed it; return whether it did."""
        if is_gone := self._directory.name not in self._files.names(self._directory.parent):
            self.make_directories()
            self._files.sync_directory(self._directory.parent)
        return is_gone

    # --- receiving ---

    def begin(self, delta: Delta) -> None:
        """Start to receive a delta, or resume the same one."""
        key = delta.key
        part = self._parts.get(key)
        path = self._directory / file_name(key)
        if part is not None and part.delta == delta and self._files.exists(path):
            return
        self._parts.pop(key, None)  # creating the writer empties the file
        self._parts[key] = Part(FrameWriter(self._files, path), delta)

    def part(self, key: DeltaKey) -> Part:
        """Return the delta that is being received; StoreError when it was not begun."""
        if key not in self._parts:
            raise StoreError(f"delta {key.text} was not begun; call spool_begin first")
        return self._parts[key]

    def next_chunk(self, key: DeltaKey) -> int:
        """Return the chunk that `write` expects next; 0 for a delta that was not begun."""
        part = self._parts.get(key)
        return part.writer.frames if part else 0

    def write(
        self, key: DeltaKey, first: int, frames: Sequence[BytesLike], manifest: Manifest
    ) -> None:
        """Check and append frames. Repeats are ignored."""
        part = self.part(key)
        if first > part.writer.frames:
            raise FrameRefused(
                f"chunk {first} of delta {key.text} came before chunk {part.writer.frames}"
            )
        new = frames[part.writer.frames - first :]
        squared_norm, is_seeds = part.squared_norm, part.is_seeds
        for index, frame in enumerate(new, part.writer.frames):
            try:
                checked = self._kind.check(manifest, index, frame)
            except FrameRefused as error:
                raise FrameRefused(f"delta {key.text}: {error}") from error
            if checked.base not in (None, key.base):
                raise FrameRefused(f"delta {key.text} is a frame of round {checked.base}")
            if is_seeds:
                raise FrameRefused(f"delta {key.text}: {index} is past the only frame of seeds")
            is_seeds = isinstance(checked.content, SeedsFrame)
            squared_norm += checked.squared_norm
            if self._kind.comparable and not is_seeds:
                self.sketches.take(manifest, key, index, checked.content)
        part.writer.append(*new)  # it may fail, and the frames come again
        part.squared_norm, part.is_seeds = squared_norm, is_seeds

    def seal(self, key: DeltaKey, manifest: Manifest) -> Part:
        """Make a complete delta durable. If that fails, it is dropped and must be sent again.

        After a failed fsync(2) the system may have dropped what it could not write, and a second
        call would report success for lost data.
        """
        part = self.part(key)
        wanted = 1 if part.is_seeds else self._kind.frames(manifest)
        if part.writer.frames != wanted:
            raise StoreError(
                f"delta {key.text} has {part.writer.frames} of {wanted} chunks; "
                f"finish it when all have arrived"
            )
        if part.is_seeds or ORDER in part.delta.facts:
            # It decides how the delta is weighed, and whether an evaluator tries it, so what was
            # sent counts, not what was reported or left out.
            facts = {**part.delta.facts, ORDER: 0.0 if part.is_seeds else 1.0}
            part.delta = evolve(part.delta, facts=facts)
        if not part.durable:
            try:
                part.writer.sync()
                self._files.sync_directory(self._directory)
            except OSError:
                self._parts.pop(key)
                raise
            part.durable = True
        return part

    def done(self, key: DeltaKey) -> None:
        """Stop tracking a delta whose ledger line is written."""
        self._parts.pop(key, None)

    def abort(self, key: DeltaKey) -> None:
        """Drop a delta that is being received, and its file. Absent keys are ignored."""
        part = self._parts.pop(key, None)
        if part is not None:
            self._files.remove(part.writer.path)

    def abort_others(self, key: DeltaKey) -> None:
        """Drop other unfinished deltas of the client of `key`: a client sends one at a time."""
        for other in [one for one in self._parts if one.client == key.client and one != key]:
            self.abort(other)

    # --- secure sums ---

    def write_sum(self, base: int, frames: Iterable[BytesLike]) -> tuple[int, str]:
        """Make the mean of a round from version `base` durable; return bytes and digest.

        frames: of fp32.
        """
        self._files.make_directory(self._sums)
        writer = FrameWriter(self._files, self._sums / f"{base}{_FILE_SUFFIX}")
        for frame in frames:
            writer.append(frame)
        written = writer.sync()
        self._files.sync_directory(self._sums)
        self._files.sync_directory(self._sums.parent)
        return written

    def has_sum(self, base: int, received: Received) -> bool:
        """Whether this sum is what `write_sum` has written, and intact. Reads all of it."""
        path = self._sums / f"{base}{_FILE_SUFFIX}"
        return check_frame_file(self._files, path, received.bytes, received.digest) is None

    def sum_reader(self, base: int, manifest: Manifest) -> FrameReader:
        """Return a reader of what `write_sum` has written."""
        path = self._sums / f"{base}{_FILE_SUFFIX}"
        return FrameReader(self._files, path, self._kind.frames(manifest))

    # --- acknowledged deltas ---

    def reader(self, key: DeltaKey, manifest: Manifest) -> FrameReader:
        """Return a reader of the frames of a delta."""
        path = self._directory / file_name(key)
        return FrameReader(self._files, path, self._count(key, manifest))

    def _count(self, key: DeltaKey, manifest: Manifest) -> int:
        """Return how many frames a complete delta of its form has."""
        if not self._kind.has_seeds:
            return self._kind.frames(manifest)
        start = first_bytes(self._files, self._directory / file_name(key), len(SEEDS_MAGIC))
        return 1 if start == SEEDS_MAGIC else self._kind.frames(manifest)

    def holds(self, delta: StoredDelta) -> bool:
        """Whether the delta's file is in the spool; its content is not read."""
        return file_name(delta.key) in self._files.names(self._directory)

    def check(self, delta: StoredDelta) -> str | None:
        """Return what is wrong with the delta's file, or None. Reads all of it."""
        path = self._directory / file_name(delta.key)
        return check_frame_file(self._files, path, delta.bytes, delta.digest)

    def is_complete(self, key: DeltaKey, manifest: Manifest) -> bool:
        """Whether the delta's file has all of its frames; their content is not read."""
        count = self._count(key, manifest)
        try:
            frame_places(self._files, self._directory / file_name(key), count)
        except StoreError:
            return False
        return True

    def quarantine(self, key: DeltaKey, held: Collection[DeltaKey]) -> None:
        """Move the delta's file into quarantine, where files of `held` stay. May be absent."""
        name = file_name(key)
        if name in self._files.names(self._directory):
            self.make_directories()  # another program may have removed it
            self._files.rename(self._directory / name, self._quarantine / name)
            self._files.sync_directory(self._quarantine)
            self._files.sync_directory(self._directory)
            self._trim_quarantine(held)

    def _trim_quarantine(self, held: Collection[DeltaKey]) -> None:
        """Remove the oldest files above the limits, but not the newest of all."""
        names = self._files.names(self._quarantine)
        keys = [key for name in names if (key := key_of_file(name)) and key not in held]
        keys.sort(key=lambda key: (key.base, key.order), reverse=True)
        of_client: Counter[str] = Counter()
        total = 0
        for count, key in enumerate(keys):
            path = self._quarantine / file_name(key)
            total += self._files.size_at(path)
            of_client[key.client] += 1
            is_above = count >= MOST_FILES or total > MOST_BYTES
            if count and (is_above or of_client[key.client] > MOST_OF_CLIENT):
                self._files.remove(path)

    def release(self, key: DeltaKey) -> None:
        """Undo `quarantine`, durably. A file already in the spool is ignored."""
        name = file_name(key)
        if name not in self._files.names(self._directory):
            self._files.rename(self._quarantine / name, self._directory / name)
            self._files.sync_directory(self._directory)
            self._files.sync_directory(self._quarantine)

    def present(self) -> set[DeltaKey]:
        """Return the keys of all files in the spool."""
        return {key for name in self._files.names(self._directory) if (key := key_of_file(name))}

    def absent(self, keys: Collection[DeltaKey]) -> list[DeltaKey]:
        """Return those of `keys` that have no file in the spool."""
        names = set(self._files.names(self._directory))
        return [key for key in keys if file_name(key) not in names]

    def retire(self, keep: Collection[DeltaKey], oldest_base: int) -> list[Path]:
        """Take every file out of the spool that is neither in `keep` nor being received.

        oldest_base: of sums that may be needed.
        Returns them, to remove. They get other names: a delta that failed may be sent again, under
        its own, before its old file is removed.
        """
        leaving = []
        for name in self._files.names(self._directory):
            key = key_of_file(name)
            path = self._directory / name
            if key is None:
                leaving.append(path)
            elif key not in keep and key not in self._parts:
                self._files.rename(path, gone := path.with_name(name + _GONE))
                leaving.append(gone)
        if self._sums.name in self._files.names(self._sums.parent):
            for name in self._files.names(self._sums):
                base = name.removesuffix(_FILE_SUFFIX)
                if not (base.isdecimal() and int(base) >= oldest_base):
                    leaving.append(self._sums / name)
        return leaving
