"""NumPy archives (.npz): zip files of arrays.

Stored arrays (np.savez) are mapped inside the archive, compressed ones are unpacked into memory.
Arrays of Python objects are pickled, so they are refused. Names of the two arrays: see PAIRS.
Labels are integers, (n,) or (n, 1).
"""

import lzma
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

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
)

PAIRS = {
    "train": (
        ("x_train", "y_train"),
        ("X_train", "y_train"),
        ("train_images", "train_labels"),
        ("train_data", "train_labels"),
    ),
    "test": (
        ("x_test", "y_test"),
        ("X_test", "y_test"),
        ("test_images", "test_labels"),
        ("test_data", "test_labels"),
    ),
}
ONLY_PAIRS = (("x", "y"), ("X", "y"), ("images", "labels"), ("data", "labels"), ("data", "targets"))
"""Names in archives of one split, which counts as "train"."""

_LOCAL_HEAD_BYTES = 30
_LOCAL_SIGNATURE = b"PK\x03\x04"
_PIECE_BYTES = 1 << 22


class NpzFile(Dataset):
    """Samples and labels of one archive. Raises DataError."""

    def __init__(self, path: Path, *, split: str = "train", classes: int | None = None) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                values_name, labels_name = _names(path, archive, checked_split(split))
                self._values = _array(path, archive, values_name)
                labels = _array(path, archive, labels_name)
        except (
            zipfile.BadZipFile,
            NotImplementedError,  # a compression that zipfile lacks
            RuntimeError,  # encrypted
            lzma.LZMAError,
            ValueError,  # a shape or a dtype that no array can have
        ) as error:
            raise DataError(f"{str(path)!r} is no intact .npz archive ({error})") from error
        except OSError as error:
            raise cannot_read(path, error) from error
        if labels.dtype.kind not in "ui" or labels.shape not in {(labels.size,), (labels.size, 1)}:
            raise DataError(
                f"{str(path)!r}: {labels_name} must be integers, one for each sample,"
                f" not {labels.dtype} {labels.shape}"
            )
        if self._values.ndim < 1 or len(self._values) != labels.size:
            number = len(self._values) if self._values.ndim else 1
            raise DataError(
                f"{str(path)!r}: {values_name} has {number} samples, {labels_name} {labels.size}"
            )
        if self._values.dtype.kind not in "uifb":
            raise DataError(f"{str(path)!r}: {values_name} holds {self._values.dtype}, not numbers")
        check_finite(
            self._values,
            lambda _, index: f"{str(path)!r}, {values_name}[{', '.join(map(str, index))}]",
        )
        numbers = labels.reshape(-1).astype(np.int64)
        count = check_labels(numbers, classes, lambda i: f"{str(path)!r}, {labels_name}[{i}]")
        dtype = self._values.dtype.newbyteorder("=")
        super().__init__(
            str(path),
            labels.size,
            sample_shape=self._values.shape[1:],
            dtype=dtype,
            labels=numbers,
            classes=count,
            inferred=classes is None,
        )

    def _take(self, indices: Indices) -> AnyArray:
        return np.ascontiguousarray(self._values[indices]).astype(self.dtype, copy=False)


def _names(path: Path, archive: zipfile.ZipFile, split: str) -> tuple[str, str]:
    there = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
    pairs = PAIRS[split] + (ONLY_PAIRS if split == "train" else ())
    for pair in pairs:
        if there.issuperset(pair):
            return pair
    held = ", ".join(sorted(there))[:200] or "no arrays"
    wanted = ", ".join(f"{x} and {y}" for x, y in pairs)
    raise DataError(f"{str(path)!r} holds {held}; for {split} it needs one of: {wanted}")


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> AnyArray:
    member = archive.getinfo(name + ".npy")
    where = f"{str(path)!r}, {name}"
    with archive.open(member) as stream:
        try:
            shape, fortran, dtype = _head(where, stream)
            head_bytes = stream.tell()
            size = math.prod(shape) * dtype.itemsize
            if member.file_size != head_bytes + size:
                raise DataError(
                    f"{where} is short: {member.file_size - head_bytes} bytes of values"
                    f" for {shape} {dtype}"
                )
            order = "F" if fortran else "C"
            if member.compress_type == zipfile.ZIP_STORED and size:
                offset = _data_offset(path, member) + head_bytes
                mapped = np.memmap(  # type: ignore[call-overload]
                    path, dtype, "r", offset=offset, shape=shape, order=order
                )
                return cast("AnyArray", mapped)
            if size > MAX_UNPACKED_BYTES:
                raise DataError(
                    f"{where} unpacks to {size} bytes, more than {MAX_UNPACKED_BYTES}:"
                    " save it with np.savez, then it is mapped"
                )
            data = np.empty(size, np.uint8)
            done = 0
            while piece := stream.read(_PIECE_BYTES):
                data[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                done += len(piece)
        except (zlib.error, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{where}: damaged, the array begins at byte {member.header_offset} ({error})"
            ) from error
        flat = data.view(dtype)
        return flat.reshape(shape[::-1]).transpose() if fortran else flat.reshape(shape)


def _head(where: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise DataError(f"{where}: version {version} of the array format; 1.0 and 2.0 are read")
        shape, fortran, dtype = readers[version](stream)
    except ValueError as error:
        raise DataError(f"{where} is no array ({error})") from error
    if dtype.hasobject:
        raise DataError(f"{where} holds Python objects, which are pickled: save numbers")
    return shape, fortran, dtype


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """Byte at which a member's data begins; the local head has lengths of its own."""
    with path.open("rb") as raw:
        raw.seek(member.header_offset)
        head = raw.read(_LOCAL_HEAD_BYTES)
    if len(head) < _LOCAL_HEAD_BYTES or head[:4] != _LOCAL_SIGNATURE:
        raise DataError(f"{str(path)!r}, byte {member.header_offset}: no head of {member.filename}")
    names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return member.header_offset + _LOCAL_HEAD_BYTES + names
