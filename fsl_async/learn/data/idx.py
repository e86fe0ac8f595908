"""MNIST-format files (idx): a head of big-endian numbers, then values, row-major.

    0  0  type  dimensions (u8 each), then each dimension (u32), then the values
    type: 8 u8, 9 i8, 11 i16, 12 i32, 13 f32, 14 f64

Plain files are mapped, gzip files are unpacked into memory.
Format: http://yann.lecun.com/exdb/mnist/, "The IDX file format".
"""

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import IO, cast

import attrs
import numpy as np
import numpy.typing as npt

from fsl_async.learn.data.base import (
    MAX_UNPACKED_BYTES,
    AnyArray,
    DataError,
    Dataset,
    Indices,
    cannot_read,
    check_finite,
    check_labels,
    checked_split,
    file_bytes,
)

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_NAME = re.compile(r"[-.]idx\d-ubyte(\.gz)?$|\.idx(\.gz)?$")
_MAX_DIMENSIONS = 8
_PIECE_BYTES = 1 << 22
_STEMS = {"train": ("train",), "test": ("t10k", "test")}


@attrs.frozen(slots=True)
class IdxHead:
    """The head of a file; `offset` is the byte at which the values begin."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


class IdxPair(Dataset):
    """A file of samples and a file of labels."""

    def __init__(self, values: Path, labels: Path, classes: int | None = None) -> None:
        """classes: their number; None: the largest label plus one. Raises DataError."""
        self._values = read_idx(values)
        found = read_idx(labels)
        if found.ndim != 1 or found.dtype.kind not in "ui":
            raise DataError(f"{str(labels)!r}: labels must be integers in one dimension")
        if self._values.ndim < 2:
            raise DataError(f"{str(values)!r}: samples need at least two dimensions")
        if len(found) != len(self._values):
            raise DataError(
                f"{str(values)!r} holds {len(self._values)} samples,"
                f" but {str(labels)!r} {len(found)} labels"
            )
        check_finite(
            self._values,
            lambda flat, _: f"{str(values)!r}, byte {_byte_of(self._values, flat)}",
        )
        numbers = found.astype(np.int64)
        count = check_labels(
            numbers, classes, lambda i: f"{str(labels)!r}, byte {_byte_of(found, i)}"
        )
        super().__init__(
            str(values),
            len(self._values),
            sample_shape=self._values.shape[1:],
            dtype=self._values.dtype.newbyteorder("="),
            labels=numbers,
            classes=count,
            inferred=classes is None,
        )

    def _take(self, indices: Indices) -> AnyArray:
        return self._values[indices].astype(self.dtype, copy=False)


def _byte_of(values: AnyArray, flat: int) -> int:
    """Byte of a value in its file."""
    return 4 + 4 * values.ndim + flat * values.dtype.itemsize


def open_idx(path: Path, *, split: str = "train", classes: int | None = None) -> IdxPair:
    """Open a pair of files; `path` is their folder or one of them.

    In a folder they are called train-images-idx3-ubyte and so on, also with .gz.
    Raises DataError.
    """
    stems = _STEMS[checked_split(split)]
    if path.is_dir():
        found = [
            one
            for one in sorted(path.iterdir())
            if is_idx_name(one.name) and one.name.startswith(stems)
        ]
        samples = [one for one in found if "labels" not in one.name]
        if not samples:
            raise DataError(
                f"{str(path)!r} has no {split} files:"
                f" {stems[0]}-images-idx3-ubyte and {stems[0]}-labels-idx1-ubyte"
            )
        path = samples[0]
    elif "labels" in path.name:
        path = _partner(path, "labels", "images")
    return IdxPair(path, _partner(path, "images", "labels"), classes)


def is_idx_name(name: str) -> bool:
    """Whether a file has a name like those of MNIST."""
    return _NAME.search(name) is not None


def _partner(path: Path, mine: str, other: str) -> Path:
    """The other file of a pair; names differ in the word, the number of dimensions and .gz."""
    wanted = _bare(path.name.replace(mine, other))
    for one in sorted(path.parent.iterdir() if path.parent.is_dir() else ()):
        if one.name != path.name and _bare(one.name) == wanted:
            return one
    raise DataError(f"{str(path)!r}: the file with its {other} is not in the same folder")


def _bare(name: str) -> str:
    return re.sub(r"idx\d", "idx", name.removesuffix(".gz"))


def read_idx(path: Path) -> AnyArray:
    """The values of one file: a read-only map, or an array in memory for gzip.

    Raises DataError with file and offset.
    """
    size = file_bytes(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                return _unpacked(path, raw)
            head = _head(path, raw.read(4 + 4 * _MAX_DIMENSIONS))
        _check_length(path, head, size - head.offset)
        return cast(
            "AnyArray", np.memmap(path, head.dtype, "r", offset=head.offset, shape=head.shape)
        )
    except OSError as error:
        raise cannot_read(path, error) from error


def _unpacked(path: Path, raw: IO[bytes]) -> AnyArray:
    done = 0
    with gzip.GzipFile(fileobj=raw) as stream:
        try:
            start = stream.read(4 + 4 * _MAX_DIMENSIONS)
            head = _head(path, start)
            if head.bytes > MAX_UNPACKED_BYTES:
                raise DataError(
                    f"{str(path)!r} unpacks to {head.bytes} bytes, more than {MAX_UNPACKED_BYTES}:"
                    " gunzip it, then it is mapped"
                )
            data: npt.NDArray[np.uint8] = np.empty(head.bytes, np.uint8)
            piece = start[head.offset :]
            while piece and done + len(piece) <= head.bytes:
                data[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                done += len(piece)
                piece = stream.read(_PIECE_BYTES)
            _check_length(path, head, done + len(piece))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{str(path)!r}: gzip data damaged or cut off at about byte {raw.tell()},"
                f" after {done} bytes of values ({error})"
            ) from error
    return data.view(head.dtype).reshape(head.shape)


def _head(path: Path, start: bytes) -> IdxHead:
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES:
        raise DataError(
            f"{str(path)!r}, byte 0: {start[:4].hex(' ') or 'nothing'} is no idx head"
            " (00 00 type dimensions)"
        )
    dimensions = start[3]
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise DataError(f"{str(path)!r}, byte 3: {dimensions} dimensions; 1 to {_MAX_DIMENSIONS}")
    offset = 4 + 4 * dimensions
    if len(start) < offset:
        raise DataError(f"{str(path)!r} ends at byte {len(start)}, inside its head of {offset}")
    shape = tuple(int.from_bytes(start[at : at + 4], "big") for at in range(4, offset, 4))
    if 0 in shape:
        raise DataError(f"{str(path)!r}, byte {4 + 4 * shape.index(0)}: a dimension of 0")
    return IdxHead(np.dtype(_TYPES[start[2]]), shape, offset)


def _check_length(path: Path, head: IdxHead, found: int) -> None:
    if found == head.bytes:
        return
    shape = "x".join(map(str, head.shape))
    if found < head.bytes:
        raise DataError(
            f"{str(path)!r} is short: it ends at byte {head.offset + found},"
            f" but {shape} values end at {head.offset + head.bytes}"
        )
    raise DataError(
        f"{str(path)!r} is too long: {shape} values end at byte {head.offset + head.bytes}"
    )
