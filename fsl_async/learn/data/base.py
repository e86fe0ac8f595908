"""What every data set is, and the checks that all readers share."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsl_async.errors import DataError

__all__ = [
    "MAX_CLASSES",
    "MAX_UNPACKED_BYTES",
    "AnyArray",
    "DataError",
    "Dataset",
    "Indices",
    "cannot_read",
    "check_finite",
    "check_gaps",
    "check_labels",
    "checked_split",
    "file_bytes",
]

AnyArray = npt.NDArray[np.generic]
Indices = npt.NDArray[np.int64]

MAX_UNPACKED_BYTES = 4 << 30
"""What cannot be mapped (compressed files) is held in memory, up to this."""

MAX_CLASSES = 1 << 20

_PIECE_VALUES = 1 << 20


class Dataset(ABC):
    """Samples that can be read by index, and their labels.

    name: for messages. samples: how many. sample_shape: of one, -1 where it varies. dtype: of the values as read.
    classes: labels lie in [0, classes); 0 without labels. guessed: nobody has said how many there are, it is what the largest label asks for. labels: int64 (samples,), in memory, or None.
    Not thread-safe: use one per thread.
    """

    def __init__(
        self,
        name: str,
        samples: int,
        *,
        sample_shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        labels: npt.NDArray[np.int64] | None,
        classes: int,
        guessed: bool = False,
    ) -> None:
        if samples < 1:
            raise DataError(f"data {name!r} holds no samples")
        self.name = name
        self.samples = samples
        self.sample_shape = sample_shape
        self.dtype = np.dtype(dtype)
        self.labels = labels
        self.classes = classes
        self.guessed = guessed

    @abstractmethod
    def _take(self, indices: Indices) -> AnyArray:
        """Read samples that exist, in that order: (len(indices), *sample_shape) of dtype, a copy."""

    def read(self, indices: npt.ArrayLike) -> AnyArray:
        """Read samples by index, in that order: (n, *sample_shape), native byte order, a copy. IndexError for one that does not exist."""
        return self._take(self._checked(indices))

    def rows(self, indices: npt.ArrayLike) -> list[AnyArray]:
        """Read samples one by one, for data sets whose samples differ in length."""
        return list(self.read(indices))

    def label_counts(self) -> tuple[int, ...]:
        """How many samples each class has: what the server needs to know to partition. DataError without labels."""
        if self.labels is None:
            raise DataError(f"data {self.name!r} has no labels to count")
        return tuple(np.bincount(self.labels, minlength=self.classes).tolist())

    @property
    def fingerprint(self) -> str:
        """32 hex characters over shape, number and labels: sites that hold other data, or the same in another order, disagree.

        Values are not read: it is a check against mistakes, not against malice.
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


def check_labels(
    labels: npt.NDArray[np.int64], classes: int | None, place: Callable[[int], str]
) -> int:
    """How many classes there are: those given, or as many as the largest label asks for.

    Raises DataError for the first label outside [0, classes); `place` says where label i stands, for instance "x.bin, byte 3073".
    """
    most = MAX_CLASSES if classes is None else classes
    wrong = np.flatnonzero((labels < 0) | (labels >= most))
    if wrong.size:
        first = int(wrong[0])
        raise DataError(f"{place(first)}: label {labels[first]} is not in 0 ... {most - 1}")
    return int(labels.max()) + 1 if classes is None and labels.size else most


def check_gaps(data: Dataset) -> None:
    """Raise DataError where labels leave a class without any sample: one wrong label would make hundreds of classes.

    Where somebody has said how many classes there are, it is nothing unusual.
    """
    if data.labels is None or not data.guessed:
        return
    counts = np.asarray(data.label_counts())
    missing = int(np.argmin(counts > 0))
    if counts[missing]:
        return
    beyond = int(np.argmax(data.labels > missing))
    raise DataError(
        f"data {data.name!r}: sample {beyond} has label {data.labels[beyond]}, and no sample has label {missing}: if that is right, say how many"
        " classes there are with data.classes"
    )


def check_finite(values: AnyArray, place: Callable[[int, tuple[int, ...]], str]) -> None:
    """Raise DataError for the first NaN or infinity; `place` says where value `index` of the flat array stands, its index as a tuple too.

    Reads all of it once, in pieces: one bad sample would spoil a model after days.
    """
    if values.dtype.kind not in "fc" or not values.size:
        return
    row = max(1, values[0].size)
    step = max(1, _PIECE_VALUES // row)
    for start in range(0, len(values), step):
        piece = values[start : start + step]
        finite = np.isfinite(piece)
        if finite.all():
            continue
        inside = np.unravel_index(int(np.argmin(finite)), piece.shape)
        index = (start + int(inside[0]), *(int(each) for each in inside[1:]))
        flat = int(np.ravel_multi_index(index, values.shape))
        raise DataError(
            f"{place(flat, index)}: the value is {piece[inside]}, and nothing can be learned from it"
        )


def checked_split(split: str) -> str:
    """Return the split, "train" or "test"; DataError for anything else."""
    if split not in {"train", "test"}:
        raise DataError(f"split {split[:80]!r}: use train or test")
    return split


def file_bytes(path: Path) -> int:
    """Size of a file that opens; DataError otherwise."""
    try:
        with path.open("rb") as stream:
            return stream.seek(0, 2)
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> DataError:
    """Name the file and the system's reason."""
    return DataError(f"cannot read data {str(path)!r} ({error.strerror or error})")
