"""The interface of all data sets, and the checks that their readers share."""

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsl_async.errors import DataError
from fsl_async.process.program import to_install

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
