"""Data sets of samples and labels, and readers of files of arrays: MNIST, CIFAR, NumPy archives.


idx: a head of big-endian numbers, 00 00 type dimensions (u8 each) and each dimension (u32), then
the values, row-major. Plain files are mapped, gzip files are read into memory.
http://yann.lecun.com/exdb/mnist/, "The IDX file format".

CIFAR: records of a label and 3 x 32 x 32 bytes (red, green, blue planes), mapped. CIFAR-10 has
data_batch_*.bin and test_batch.bin; CIFAR-100 train.bin and test.bin, with a coarse label before
the fine one, which is used. https://www.cs.toronto.edu/~kriz/cifar.html.

.npz: two arrays by their names (`PAIRS`), read into memory by NumPy, which refuses pickles.
"""

import gzip
import hashlib
import importlib
import json
import lzma
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from fsl_async.errors import DataError, one_line, to_install

AnyArray = npt.NDArray[np.generic]
Indices = npt.NDArray[np.int64]

MAX_CLASSES = 1 << 20


class Dataset(ABC):
    """Samples that can be read by index, and their labels.

    name: for messages.
    samples: their number.
    sample_shape: shape of one sample; -1 where a dimension varies.
    dtype: of the values as read.
    labels: int64 (samples,), in memory, or None.
    classes: labels are in [0, classes); 0 without labels.
    inferred: `classes` follows from the largest label, because neither files nor caller gave it.

    Not thread-safe: use one object per thread.
    """

    def __init__(
        self,
        name: str,
        samples: int,
        *,
        sample_shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        labels: AnyArray | None = None,
        classes: int | None = None,
    ) -> None:
        """labels: an integer for each sample. classes: None for the largest label plus one.

        Raises DataError for no samples, and for labels that are others.
        """
        if samples < 1 or 0 in sample_shape:
            raise DataError(f"data {name!r} holds no samples")
        self.name = name
        self.samples = samples
        self.sample_shape = sample_shape
        self.dtype = np.dtype(dtype).newbyteorder("=")
        self.labels: npt.NDArray[np.int64] | None = None
        self.classes = 0
        self.inferred = labels is not None and classes is None
        if labels is not None:
            if labels.dtype.kind not in "ui" or labels.size != len(labels):
                raise DataError(
                    f"data {name!r}: labels must be integers, one for each sample, not"
                    f" {labels.dtype} {labels.shape}"
                )
            if labels.size != samples:
                raise DataError(f"data {name!r} holds {samples} samples, but {labels.size} labels")
            self.labels = known = labels.reshape(-1).astype(np.int64)
            most = MAX_CLASSES if classes is None else classes
            wrong = np.flatnonzero((known < 0) | (known >= most))
            if wrong.size:
                raise DataError(
                    f"data {name!r}, sample {wrong[0]}: label {known[wrong[0]]} is not in"
                    f" 0 ... {most - 1}"
                )
            self.classes = int(known.max()) + 1 if classes is None else classes

    @abstractmethod
    def _take(self, indices: Indices) -> AnyArray:
        """Read valid indices, in their order: (len(indices), *sample_shape) of dtype, a copy."""

    def read(self, indices: npt.ArrayLike) -> AnyArray:
        """Read samples by index, in that order: (n, *sample_shape), native byte order, a copy.

        Raises IndexError for an index out of range.
        """
        return self._take(self._checked(indices))

    def rows(self, indices: npt.ArrayLike) -> list[AnyArray]:
        """Read samples one by one, for data sets whose samples differ in length."""
        return list(self.read(indices))

    def label_counts(self) -> tuple[int, ...]:
        """Samples of each class; a partition needs no more. Raises DataError without labels."""
        if self.labels is None:
            raise DataError(f"data {self.name!r} has no labels to count")
        return tuple(np.bincount(self.labels, minlength=self.classes).tolist())

    @property
    def fingerprint(self) -> str:
        """32 hex characters over shape, number and labels.

        Sites with other data, or the same data in another order, have another fingerprint. Values
        are not read: the check is against mistakes, not against malice.
        """
        digest = hashlib.sha256(f"{self.samples}/{self.sample_shape}/{self.classes}/".encode())
        if self.labels is not None:
            digest.update(self.labels.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()[:32]

    def _checked(self, indices: npt.ArrayLike) -> Indices:
        found = np.asarray(indices, dtype=np.int64).reshape(-1)
        if found.size and not 0 <= found.min() <= found.max() < self.samples:
            raise IndexError(f"samples {found.min()}..{found.max()} of {self.samples}")
        return found


def check_gaps(data: Dataset) -> None:
    """Raise DataError for a class without samples, where the number of classes was inferred.

    A single wrong label would otherwise make hundreds of classes. Where the number was given, an
    empty class is usual.
    """
    if data.labels is None or not data.inferred:
        return
    counts = np.asarray(data.label_counts())
    missing = int(np.argmin(counts > 0))
    if counts[missing]:
        return
    beyond = int(np.argmax(data.labels > missing))
    raise DataError(
        f"data {data.name!r}: sample {beyond} has label {data.labels[beyond]}, and no sample has"
        f" label {missing}: if that is right, set the number of classes with data.classes"
    )


def json_object(data: bytes) -> dict[str, Any] | None:
    """Parse an object of JSON; None where `data` are something else, or damaged."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def file_bytes(path: Path) -> int:
    """Size of a file; raises DataError where it cannot be opened."""
    try:
        with path.open("rb") as stream:
            return stream.seek(0, 2)
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> DataError:
    """An error that names the file and the system's reason."""
    return DataError(f"cannot read data {str(path)!r} ({error.strerror or error})")


def extra(module: str, what: str) -> Any:
    """Import a module of an extra; DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(f"{what} needs {package}: {to_install('datasets')}") from None


_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_IDX_NAME = re.compile(r"[-.]idx\d-ubyte(\.gz)?$|\.idx(\.gz)?$")
_IDX_STEMS = {"train": ("train",), "test": ("t10k", "test")}

_IMAGE_SHAPE = (3, 32, 32)
_CIFAR = {
    ("data_batch_*.bin", "test_batch.bin"): (10, 1),
    ("train.bin", "test.bin"): (100, 2),
}
"""Names of the files of train and test: number of classes, bytes before an image."""

_NAMES = (("x_{}", "y_{}"), ("X_{}", "y_{}"), ("{}_images", "{}_labels"), ("{}_data", "{}_labels"))
ONLY_PAIRS = (("x", "y"), ("X", "y"), ("images", "labels"), ("data", "labels"), ("data", "targets"))
"""Names in archives of one split, which counts as "train"."""
PAIRS = {
    split: tuple((x.format(split), y.format(split)) for x, y in _NAMES) + more
    for split, more in (("train", ONLY_PAIRS), ("test", ()))
}
"""Names of the arrays of samples and of labels in an archive."""

_PIECE_VALUES = 1 << 20
_DAMAGE = (
    ValueError,
    KeyError,
    EOFError,
    NotImplementedError,  # a compression that zipfile lacks
    RuntimeError,  # encrypted
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    lzma.LZMAError,
    zlib.error,
)


class Arrays(Dataset):
    """Samples in one array after another, each (n, *sample_shape) of the same numbers.

    labels, classes: as of `Dataset`. Raises DataError, also for the first NaN or infinity.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[AnyArray],
        labels: AnyArray | None = None,
        classes: int | None = None,
    ) -> None:
        first = parts[0]
        if not first.ndim or first.dtype.kind not in "uifb":
            raise DataError(f"data {name!r} holds {first.dtype} {first.shape}, not numbers by row")
        self._parts = parts
        # Index of each part's first sample; the last entry is the number of samples.
        self._starts = np.cumsum([0, *map(len, parts)])
        super().__init__(
            name,
            int(self._starts[-1]),
            sample_shape=first.shape[1:],
            dtype=first.dtype,
            labels=labels,
            classes=classes,
        )
        if first.dtype.kind == "f":
            self._check_finite()

    def _check_finite(self) -> None:
        """Read everything once, in pieces: one bad sample would spoil a model after days."""
        for part, start in zip(self._parts, self._starts, strict=False):
            step = max(1, _PIECE_VALUES // max(1, part[0].size))
            for at in range(0, len(part), step):
                piece = part[at : at + step]
                for inside in np.argwhere(~np.isfinite(piece))[:1]:
                    index = ", ".join(map(str, (start + at + inside[0], *inside[1:])))
                    raise DataError(
                        f"data {self.name!r}, sample [{index}]: the value is"
                        f" {piece[tuple(inside)]}, which no model can train on"
                    )

    def _take(self, indices: Indices) -> AnyArray:
        out = np.empty((len(indices), *self.sample_shape), self.dtype)
        part_of = np.searchsorted(self._starts, indices, side="right") - 1
        for part in np.unique(part_of):
            here = np.flatnonzero(part_of == part)
            out[here] = self._parts[part][indices[here] - self._starts[part]]
        return out


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what readers raise into a DataError with the file's name."""
    try:
        yield
    except _DAMAGE as error:
        raise DataError(
            f"data {str(path)!r} is damaged or of another kind ({one_line(str(error))[:200]})"
        ) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def open_idx(path: Path, *, split: str = "train", classes: int | None = None) -> Arrays:
    """Open a pair of files; `path` is their folder or one of them.

    In a folder they are called train-images-idx3-ubyte and so on, also with .gz.
    Raises DataError.
    """
    folder, stems = path, _IDX_STEMS[split]
    if not path.is_dir():
        folder, stems = path.parent, (re.split("images|labels", path.name)[0],)
    files = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    named = [one for one in files if is_idx_name(one.name) and one.name.startswith(stems)]
    pair = {"labels" in one.name: one for one in (*named, *([path] if folder != path else []))}
    if len(pair) < 2 and folder == path:
        raise DataError(
            f"{str(path)!r} has no {split} files:"
            f" {stems[0]}-images-idx3-ubyte and {stems[0]}-labels-idx1-ubyte"
        )
    if len(pair) < 2:
        lacks = "images" if True in pair else "labels"
        raise DataError(f"{str(path)!r}: the file with its {lacks} is not in the same folder")
    values, labels = read_idx(pair[False]), read_idx(pair[True])
    if values.ndim < 2:
        raise DataError(f"data {str(pair[False])!r}: samples need at least two dimensions")
    return Arrays(str(pair[False]), [values], labels, classes)


def is_idx_name(name: str) -> bool:
    """Whether a file has a name like those of MNIST."""
    return _IDX_NAME.search(name) is not None


def read_idx(path: Path) -> AnyArray:
    """Read one idx file: a read-only map, or an array in memory for gzip. Raises DataError."""
    with _reading(path):
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            head = stream.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
                raise ValueError(f"{head.hex(' ') or 'nothing'} is no idx head")
            dtype, offset = np.dtype(_IDX_TYPES[head[2]]), 4 + 4 * head[3]
            shape = np.frombuffer(stream.read(offset - 4), ">u4").tolist()
            if packed:
                found: AnyArray = np.frombuffer(stream.read(), dtype)
            else:
                found = np.memmap(path, dtype, "r", offset=offset)
        return found.reshape(shape)


def is_cifar_folder(folder: Path) -> bool:
    """Whether the folder has files of CIFAR-10 or CIFAR-100."""
    return any(next(folder.glob(pattern), None) for pair in _CIFAR for pattern in pair)


def open_cifar(folder: Path, *, split: str = "train", classes: int | None = None) -> Arrays:
    """Open a folder of CIFAR: images uint8 (3, 32, 32), from any number of files.

    classes: of no effect, because the kind of files tells them.

    Raises DataError.
    """
    at = split == "test"
    kinds = ((sorted(folder.glob(pair[at])), how) for pair, how in _CIFAR.items())
    files, (classes, before) = next((kind for kind in kinds if kind[0]), ([], (0, 0)))
    if not files:
        if (folder / "data_batch_1").exists() or (folder / "train").is_file():
            raise DataError(
                f"{str(folder)!r} holds the Python version, which is pickled:"
                " get the binary version (data_batch_1.bin)"
            )
        wanted = " or ".join(pair[at] for pair in _CIFAR)
        raise DataError(f"{str(folder)!r} has no {split} files: {wanted}")
    width = before + int(np.prod(_IMAGE_SHAPE))
    records = []
    for path in files:
        with _reading(path):
            records.append(np.memmap(path, np.uint8, "r").reshape(-1, width))
    images = [each[:, before:].reshape(-1, *_IMAGE_SHAPE) for each in records]
    labels = np.concatenate([each[:, before - 1] for each in records])
    return Arrays(str(folder), images, labels, classes)


def open_npz(path: Path, *, split: str = "train", classes: int | None = None) -> Arrays:
    """Open samples and labels of a NumPy archive. Raises DataError."""
    pairs = PAIRS[split]
    with _reading(path), path.open("rb") as raw, NpzFile(raw, allow_pickle=False) as archive:
        pair = next((pair for pair in pairs if set(pair) <= set(archive.files)), None)
        if pair is None:
            names = ", ".join(sorted(archive.files))[:200] or "no arrays"
            wanted = ", ".join(f"{x} and {y}" for x, y in pairs)
            raise DataError(f"{str(path)!r} holds {names}; for {split} it needs one of: {wanted}")
        # What is no array comes as bytes.
        values, labels = map(np.asarray, (archive[pair[0]], archive[pair[1]]))
    return Arrays(str(path), [values], labels, classes)
