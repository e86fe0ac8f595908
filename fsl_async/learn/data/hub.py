"""Hugging Face data sets as `save_to_disk` writes them: Arrow stream files, mapped.

Needs pyarrow (extra `hf`), not the `datasets` library.

    state.json           names of the .arrow files
    dataset_info.json    features: which column is a class label
    dataset_dict.json    in a folder of several splits, each a folder of its own

Columns of values: numbers, (nested) lists of numbers, images (needs Pillow), text as its UTF-8
bytes. Text and lists of different lengths have samples of shape (-1,): read them with `rows`.
"""

import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsl_async.learn.data.base import (
    AnyArray,
    DataError,
    Dataset,
    Indices,
    cannot_read,
    check_labels,
    checked_split,
)
from fsl_async.process.program import to_install

_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_MOST_JSON_BYTES = 16 << 20
_VALUE_NAMES = ("image", "img", "pixel_values", "input_ids", "text", "x")
_LABEL_NAMES = ("label", "labels", "fine_label", "y")
_SPLITS = {"train": ("train",), "test": ("test", "validation")}


def is_hub_folder(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return (folder / _DICT).is_file() or (folder / _STATE).is_file()


class HubFolder(Dataset):
    """One split of a saved data set.

    values, labels: their columns; default: the first column with a usual name.
    Raises DataError, also when pyarrow, or Pillow for images, is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        split: str = "train",
        values: str = "",
        labels: str = "",
        classes: int | None = None,
    ) -> None:
        self._folder = _split_folder(folder, checked_split(split))
        self._arrow = _pyarrow()
        table = saved_table(folder, split)
        names = table.column_names
        label_name = labels or next((name for name in _LABEL_NAMES if name in names), "")
        value_name = values or next((name for name in _VALUE_NAMES if name in names), "")
        for name in filter(None, (label_name, value_name)):
            if name not in names:
                raise DataError(
                    f"{str(folder)!r} has no column {name[:80]!r}: {', '.join(names)[:200]}"
                )
        if not value_name:
            raise DataError(
                f"{str(folder)!r}: which column holds the samples?"
                f" columns: {', '.join(names)[:200]}"
            )
        self._where = f"{str(self._folder)!r}, column {value_name}"
        # Extension types (Array2D) are stored as lists; pyarrow shows them only where the
        # `datasets` library is imported.
        chunks = table.column(value_name).chunks
        self._chunks = [getattr(chunk, "storage", chunk) for chunk in chunks if len(chunk)]
        self._starts = np.cumsum([0, *map(len, self._chunks)])
        found, count, known = None, 0, None
        if label_name:
            known = _class_names(self._folder, label_name)
            found = self._numbers(table.column(label_name), label_name)
            count = check_labels(
                found,
                known if classes is None else classes,
                lambda i: f"{str(self._folder)!r}, {label_name}[{i}]",
            )
        if not self._chunks:
            raise DataError(f"data {str(self._folder)!r} holds no samples")
        shape, dtype = self._shape()
        super().__init__(
            str(self._folder),
            int(self._starts[-1]),
            sample_shape=shape,
            dtype=dtype,
            labels=found,
            classes=count,
            inferred=known is None and classes is None,
        )

    def _take(self, indices: Indices) -> AnyArray:
        if -1 in self.sample_shape:
            raise DataError(f"{self._where}: samples differ in length; take them with rows()")
        out = np.empty((len(indices), *self.sample_shape), self.dtype)
        for row, sample in enumerate(self.rows(indices)):
            if sample.shape != self.sample_shape:
                raise DataError(
                    f"{self._where}: sample {indices[row]} is {sample.shape},"
                    f" the first {self.sample_shape}"
                )
            out[row] = sample
        return out

    def rows(self, indices: npt.ArrayLike) -> list[AnyArray]:
        """Read samples one by one."""
        found = []
        for index in self._checked(indices).tolist():
            chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
            found.append(self._sample(self._chunks[chunk], index - int(self._starts[chunk])))
        return found

    def _numbers(self, column: Any, name: str) -> npt.NDArray[np.int64]:
        where = f"{str(self._folder)!r}, column {name}"
        if not self._arrow.types.is_integer(column.type):
            raise DataError(f"{where} holds {column.type}; labels must be integers")
        if column.null_count:
            raise DataError(f"{where} lacks {column.null_count} labels")
        return column.to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def _shape(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        first = self._sample(self._chunks[0], 0)
        types, kind = self._arrow.types, self._chunks[0].type
        varies = types.is_string(kind) or types.is_large_string(kind)
        if types.is_list(kind) or types.is_large_list(kind):
            # This reads the offsets only.
            lengths = {
                length
                for chunk in self._chunks
                for length in np.unique(chunk.value_lengths().to_numpy(zero_copy_only=False))
            }
            varies = len(lengths) > 1
        return ((-1, *first.shape[1:]) if varies else first.shape), first.dtype

    def _sample(self, chunk: Any, row: int) -> AnyArray:
        types, kind = self._arrow.types, chunk.type
        scalar = chunk[row]
        if not scalar.is_valid:
            raise DataError(f"{self._where}: a sample is missing (null)")
        if types.is_string(kind) or types.is_large_string(kind):
            return np.frombuffer(scalar.as_py().encode(), np.uint8)
        if types.is_struct(kind) and "bytes" in {
            kind.field(i).name for i in range(kind.num_fields)
        }:
            return self._image(scalar["bytes"].as_py())
        shape: list[int] = []
        values = chunk.slice(row, 1)
        while hasattr(values, "flatten") and types.is_nested(values.type):
            if types.is_struct(values.type):
                break
            lengths = set(values.value_lengths().to_pylist())
            if len(lengths) != 1 or None in lengths:
                raise DataError(f"{self._where}: lists of different lengths inside a sample")
            shape.append(lengths.pop())
            values = values.flatten()
        if values.null_count or not (
            types.is_integer(values.type) or types.is_floating(values.type)
        ):
            raise DataError(
                f"{self._where} holds {kind}: numbers, lists of numbers, images and text are read"
            )
        found: AnyArray = values.to_numpy(zero_copy_only=False).reshape(shape)
        return found

    def _image(self, data: bytes | None) -> AnyArray:
        try:
            images = importlib.import_module("PIL.Image")
        except ImportError:
            raise DataError(
                f"{self._where} holds images; to decode them: pip install pillow"
            ) from None
        if data is None:
            raise DataError(f"{self._where} names image files instead of holding them")
        try:
            with images.open(io.BytesIO(data)) as image:
                grey = image.mode in {"1", "L", "I;16"}
                pixels = np.asarray(image.convert("L" if grey else "RGB"), np.uint8)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{self._where}: a damaged image ({error})") from error
        return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def saved_table(folder: Path, split: str = "train") -> Any:
    """The table of one split of a saved data set, mapped. Raises DataError."""
    arrow, folder = _pyarrow(), _split_folder(folder, split)
    state = _json(folder / _STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{str(folder)!r} keeps its order in a file of its own:"
            " flatten_indices() and save it again"
        )
    named = state.get("_data_files")
    listed = named if isinstance(named, list) else []
    files = [str(one.get("filename", "")) if isinstance(one, dict) else "" for one in listed]
    if not files or any(Path(name).name != name for name in files):
        raise DataError(f"{str(folder / _STATE)!r} names no data files in its folder")
    tables = []
    for name in files:
        path = folder / name
        try:
            # The table's buffers keep the map open.
            tables.append(arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all())
        except OSError as error:
            raise cannot_read(path, error) from error
        except arrow.ArrowInvalid as error:
            raise DataError(
                f"{str(path)!r}, {path.stat().st_size} bytes, is short or damaged ({error})"
            ) from error
    try:
        return arrow.concat_tables(tables)
    except arrow.ArrowInvalid as error:
        raise DataError(f"{str(folder)!r}: its files do not fit ({error})") from error


def _pyarrow() -> Any:
    try:
        arrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.ipc")
    except ImportError:
        raise DataError(
            f"data sets saved by Hugging Face need pyarrow: {to_install('hf')}"
        ) from None
    return arrow


def _split_folder(folder: Path, split: str) -> Path:
    if not (folder / _DICT).is_file():
        return folder
    there = _json(folder / _DICT).get("splits")
    names = [name for name in there if isinstance(name, str)] if isinstance(there, list) else []
    for name in _SPLITS[split]:
        if name in names:
            return folder / name
    raise DataError(f"{str(folder)!r} has no {split} split: {', '.join(names)[:200] or 'none'}")


def _class_names(folder: Path, column: str) -> int | None:
    """Number of names of a ClassLabel column; None for any other column."""
    features = _json(folder / _INFO).get("features") if (folder / _INFO).is_file() else None
    feature = features.get(column) if isinstance(features, dict) else None
    names = feature.get("names") if isinstance(feature, dict) else None
    return len(names) if isinstance(names, list) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            found = json.loads(stream.read(_MOST_JSON_BYTES))
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is damaged ({error})") from error
    if not isinstance(found, dict):
        raise DataError(f"{str(path)!r} is damaged: no object")
    return found
