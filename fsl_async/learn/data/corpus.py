"""Byte-level text data: an index over files that are never copied, and disjoint parts of it.

A corpus is the concatenation of files in the order of their paths. A token is a byte, so sites need
no common tokenizer. Clients get contiguous, disjoint byte ranges: a range touches few files, and
parts differ as the data of institutions do.

    0 ........................................ train_bytes ........... bytes
    | shard 0 | shard 1 | ... | shard count-1 | held out from all clients  |

`evaluate` reads the tail, so a loss is never measured on bytes that a client trained on.
NumPy only: the parameter server and the command line use this file without importing torch.
"""

# ruff: noqa: N806 - shapes are suffixes

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from fsl_async.errors import DataError, TooShortError

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".asm", ".bash", ".bib", ".c", ".cc", ".cfg", ".conf", ".cpp", ".cs", ".css", ".csv", ".cu",
    ".cuh", ".f90", ".go", ".h", ".hh", ".hpp", ".hs", ".htm", ".html", ".ini", ".java", ".jl",
    ".js", ".json", ".jsonl", ".jsx", ".kt", ".log", ".lua", ".md", ".ml", ".php", ".pl", ".proto",
    ".py", ".pyi", ".pyx", ".r", ".rb", ".rs", ".rst", ".scala", ".sh", ".sql", ".srt", ".swift",
    ".tex", ".text", ".toml", ".ts", ".tsv", ".tsx", ".txt", ".vtt", ".xml", ".yaml", ".yml",
})
# fmt: on
"""Suffixes taken from a directory. A file given directly may have any suffix and content."""

SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages"})
SNIFFED_BYTES = 8192
"""A NUL among the first bytes means binary, as in git."""

OPEN_MAPS = 64
"""Open memory maps at most. Each holds a file descriptor; many systems allow 1024."""

HELD_OUT_SHARE = 0.02
HELD_OUT_WINDOWS = 4
"""Least length of the tail, so that a tiny corpus can be evaluated; not where held_out is 0."""

ByteArray = npt.NDArray[np.uint8]


@attrs.frozen(slots=True)
class Span:
    """Bytes [start, stop) of a corpus."""

    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """The length."""
        return self.stop - self.start


class Corpus:
    """All text under a path, by byte position; `Corpus.open` makes one.

    bytes: the total length. train, held_out: the two spans that it divides into.
    Not thread-safe (it caches memory maps): use one object per thread.
    """

    def __init__(
        self,
        root: Path,
        files: Iterable[tuple[str, int]],
        *,
        window_bytes: int,
        held_out: float = HELD_OUT_SHARE,
    ) -> None:
        self.root = root
        self.files = tuple(files)
        self.window_bytes = window_bytes
        # offsets[i] is the position of file i's first byte; the last entry is the end.
        self.offsets = list(accumulate((size for _, size in self.files), initial=0))
        self.bytes = self.offsets[-1]
        tail = max(int(self.bytes * held_out), HELD_OUT_WINDOWS * window_bytes) if held_out else 0
        if self.bytes < tail + window_bytes:
            text = (
                f"data {str(root)!r} has {self.bytes} bytes, but {tail + window_bytes} are needed"
                f" for a context of {window_bytes - 1} (the last {tail} are held out):"
                " give more text or a smaller model.context"
            )
            raise TooShortError(text, self.bytes)
        self.train = Span(0, self.bytes - tail)
        self.held_out = Span(self.bytes - tail, self.bytes)
        self._map = lru_cache(OPEN_MAPS)(self._open)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, context: int, held_out: float = HELD_OUT_SHARE
    ) -> "Corpus":
        """Index a file (whatever its content) or a directory (its text files, see `_text_files`).

        context: bytes of a model's input; a window is one byte longer, for the target.
        held_out: share of the bytes, at the end, that no client trains on.
        Raises DataError for a path that is missing, unreadable, empty or too short.
        """
        if context < 1:
            raise DataError(f"model.context is {context}: give at least 1 byte")
        root = Path(path).expanduser()
        try:
            if root.is_dir():
                files = list(_text_files(root))
            else:
                if root.exists() and not root.is_file():
                    raise DataError(
                        f"data {str(root)!r} is neither a file nor a directory:"
                        " point data.path at text"
                    )
                # Opening the file is the only portable test of "readable".
                with root.open("rb") as stream:
                    size = os.fstat(stream.fileno()).st_size
                files = [(root.name, size)] if size else []
        except OSError as error:
            culprit = error.filename or root
            raise DataError(
                f"cannot read data {str(culprit)!r} ({error.strerror}):"
                " check data.path and its permissions"
            ) from error
        if not files:
            what = "no text files (suffixes such as .txt .md .py)" if root.is_dir() else "no bytes"
            raise DataError(f"data {str(root)!r} holds {what}: point data.path at text")
        return cls(root, files, window_bytes=context + 1, held_out=held_out)

    @property
    def fingerprint(self) -> str:
        """32 hex characters over names and sizes: sites with other files have another one.

        Contents are not read: the check is against mistakes, not against malice, and hashing a
        terabyte before the first step would cost more than it is worth.
        """
        digest = hashlib.sha256()
        for name, size in self.files:
            digest.update(os.fsencode(name) + b"\0" + str(size).encode() + b"\n")
        return digest.hexdigest()[:32]

    def shard(self, index: int, count: int) -> Span:
        """Part `index` of the `count` equal, disjoint parts of `train`.

        Raises DataError for an index out of range, or parts shorter than one window.
        """
        if not 0 <= index < count:
            raise DataError(
                f"shard {index} of {count} does not exist:"
                " raise data.shards at the parameter server"
            )
        start, stop = (self.train.bytes * edge // count for edge in (index, index + 1))
        if stop - start < self.window_bytes:
            raise DataError(
                f"data {str(self.root)!r} cut in {count} leaves {stop - start} bytes each,"
                f" fewer than one window of {self.window_bytes}:"
                " give more text or fewer data.shards"
            )
        return Span(start, stop)

    def read_into(self, start: int, out: ByteArray) -> None:
        """Fill `out` (uint8, 1-D) with the bytes from `start` on, across file boundaries.

        Raises DataError for a file that has changed since it was indexed, IndexError past the end.
        """
        if start < 0 or start + len(out) > self.bytes:
            raise IndexError(f"bytes {start}..{start + len(out)} of a corpus of {self.bytes}")
        done = 0
        file = bisect_right(self.offsets, start) - 1
        while done < len(out):
            inside = start + done - self.offsets[file]
            taken = min(len(out) - done, self.files[file][1] - inside)
            out[done : done + taken] = self._map(file)[inside : inside + taken]
            done += taken
            file += 1

    def _open(self, file: int) -> ByteArray:
        name, size = self.files[file]
        path = self.root / name if self.root.is_dir() else self.root
        try:
            view = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # ValueError: it is empty
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"cannot read data {str(path)!r} ({reason}): keep it in place, then restart"
            ) from error
        if len(view) != size:
            raise DataError(
                f"{str(path)!r} had {size} bytes when it was indexed and has {len(view)}:"
                " do not change data during a run; restart"
            )
        return view


def _text_files(root: Path) -> Iterator[tuple[str, int]]:
    """(path below root with slashes, bytes) of every text file, in the order of the paths' bytes.

    Left out: suffixes not in TEXT_SUFFIXES, hidden names, SKIPPED_DIRECTORIES, empty files, files
    with a NUL at their start, and further names (links) of a file already taken, which would put
    the same bytes into two shards. Linked directories are not entered.
    Raises OSError for a file or directory that cannot be read.
    """

    def stop(error: OSError) -> None:
        raise error

    names: list[str] = []
    for folder, folders, leaves in os.walk(root, onerror=stop):
        folders[:] = [f for f in folders if f not in SKIPPED_DIRECTORIES and not f.startswith(".")]
        below = Path(folder).relative_to(root)
        names += [
            (below / leaf).as_posix()
            for leaf in leaves
            if Path(leaf).suffix.lower() in TEXT_SUFFIXES and not leaf.startswith(".")
        ]
    taken: set[tuple[int, int]] = set()
    for name in sorted(names, key=os.fsencode):
        path = root / name
        if not path.is_file():
            continue
        with path.open("rb") as stream:
            facts = os.fstat(stream.fileno())
            identity = (facts.st_dev, facts.st_ino)
            if not facts.st_size or identity in taken or b"\0" in stream.read(SNIFFED_BYTES):
                continue
        taken.add(identity)
        yield name, facts.st_size


def windows(
    corpus: Corpus, span: Span, *, batch: int, seed: int, name: str, start: int = 0
) -> Iterator[ByteArray]:
    """Endless batches of random windows of `span`: uint8 (batch, context + 1).

    The order depends on (seed, name, span, start) only, so that a run can be repeated.
    start: the version at which the client joined. A client that is relaunched after a preemption
    continues with other windows instead of the first ones.
    """
    text = f"{seed}/{name}/{span.start}/{span.stop}/{start}"
    rng = np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))
    last = span.stop - corpus.window_bytes
    while True:
        window_BS = np.empty((batch, corpus.window_bytes), np.uint8)
        for row, position in enumerate(rng.integers(span.start, last, batch, endpoint=True)):
            corpus.read_into(int(position), window_BS[row])
        yield window_BS


def held_out_windows(corpus: Corpus, *, batch: int, limit: int) -> Iterator[ByteArray]:
    """The held-out tail in batches, uint8 (<= batch, context + 1), the same for every caller.

    At most `limit` windows, spread evenly over the tail. Adjacent windows share one byte (the last
    target of one is the first input of the next), so each byte is predicted once.
    """
    context = corpus.window_bytes - 1
    available = (corpus.held_out.bytes - 1) // context
    count = min(limit, available)
    starts = [corpus.held_out.start + i * available // count * context for i in range(count)]
    for first in range(0, count, batch):
        chosen = starts[first : first + batch]
        window_BS = np.empty((len(chosen), corpus.window_bytes), np.uint8)
        for row, position in enumerate(chosen):
            corpus.read_into(position, window_BS[row])
        yield window_BS
