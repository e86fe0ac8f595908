"""CIFAR-10 and CIFAR-100 in their binary layout, mapped.

    CIFAR-10     data_batch_*.bin, test_batch.bin
                 record: label (u8), then 3 x 32 x 32 bytes (red, green, blue planes)
    CIFAR-100    train.bin, test.bin
                 record: coarse label, fine label (u8 each), then the same; fine labels are used

A file may hold any number of records. Format: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsl_async.learn.data.base import (
    AnyArray,
    DataError,
    Dataset,
    Indices,
    check_labels,
    checked_split,
    file_bytes,
)

IMAGE_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
_PATTERNS = {
    ("data_batch_*.bin", "test_batch.bin"): (10, 1),
    ("train.bin", "test.bin"): (100, 2),
}


class CifarFolder(Dataset):
    """Images, uint8 (3, 32, 32). Raises DataError."""

    def __init__(self, folder: Path, *, split: str = "train") -> None:
        files, classes, label_bytes = _files(folder, checked_split(split))
        self._label_bytes = label_bytes
        self._maps = [_records(path, label_bytes + _IMAGE_BYTES) for path in files]
        # Index of each file's first sample; the last entry is the number of samples.
        self._starts = np.cumsum([0, *map(len, self._maps)])
        labels = []
        for path, records in zip(files, self._maps, strict=True):
            numbers = records[:, label_bytes - 1].astype(np.int64)
            width = records.shape[1]
            check_labels(numbers, classes, _Location(path, width, label_bytes - 1))
            labels.append(numbers)
        samples = int(self._starts[-1])
        super().__init__(
            str(folder),
            samples,
            sample_shape=IMAGE_SHAPE,
            dtype=np.uint8,
            labels=np.concatenate(labels),
            classes=classes,
        )

    def _take(self, indices: Indices) -> AnyArray:
        out = np.empty((len(indices), *IMAGE_SHAPE), np.uint8)
        file_of = np.searchsorted(self._starts, indices, side="right") - 1
        for file in np.unique(file_of):
            here = np.flatnonzero(file_of == file)
            rows = self._maps[file][indices[here] - self._starts[file]]
            out[here] = rows[:, self._label_bytes :].reshape(-1, *IMAGE_SHAPE)
        return out


def is_cifar_folder(folder: Path) -> bool:
    """Whether the folder has files of CIFAR-10 or CIFAR-100."""
    return any(next(folder.glob(pattern), None) for pair in _PATTERNS for pattern in pair)


def _files(folder: Path, split: str) -> tuple[list[Path], int, int]:
    for pair, (classes, label_bytes) in _PATTERNS.items():
        found = sorted(folder.glob(pair[split == "test"]))
        if found:
            return found, classes, label_bytes
    if (folder / "data_batch_1").exists() or (folder / "train").is_file():
        raise DataError(
            f"{str(folder)!r} holds the Python version, which is pickled:"
            " get the binary version (data_batch_1.bin)"
        )
    wanted = " or ".join(pair[split == "test"] for pair in _PATTERNS)
    raise DataError(f"{str(folder)!r} has no {split} files: {wanted}")


def _records(path: Path, width: int) -> npt.NDArray[np.uint8]:
    size = file_bytes(path)
    whole, rest = divmod(size, width)
    if rest or not whole:
        raise DataError(
            f"{str(path)!r} is short: it ends at byte {size},"
            f" {rest} bytes into record {whole} of {width} bytes"
        )
    return np.memmap(path, np.uint8, "r", shape=(whole, width))


class _Location:
    """Names label `index` of a file by its byte; `before`: bytes of a record before the label."""

    def __init__(self, path: Path, width: int, before: int) -> None:
        self.path, self.width, self.before = path, width, before

    def __call__(self, index: int) -> str:
        return f"{str(self.path)!r}, byte {index * self.width + self.before}"
