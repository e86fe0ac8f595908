"""Hugging Face data sets as `save_to_disk` writes them: Arrow stream files, mapped.

Needs pyarrow (extras `hf`, `datasets`), not the `datasets` library.

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

from fsl_async.errors import DataError, one_line
from fsl_async.learn.data.dataset import AnyArray, Arrays, Dataset, Indices, cannot_read, extra

_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_VALUE_NAMES = ("image", "img", "pixel_values", "input_ids", "text", "x")
_LABEL_NAMES = ("label", "labels", "fine_label", "y")
_SPLITS = {"train": ("train",), "test": ("test", "validation")}


def is_hub_folder(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return (folder / _DICT).is_file() or (folder / _STATE).is_file()


def open_saved(folder: Path, *, split: str = "train", classes: int | None = None) -> Dataset:
    """Open one split of a saved data set: its first columns with a usual name.

    Raises DataError, also when pyarrow, or Pillow for images, is not installed.
    """
    table, info = saved_table(folder, split)
    there = table.column_names
    label_name = next((name for name in _LABEL_NAMES if name in there), "")
    value_name = next((name for name in _VALUE_NAMES if name in there), "")
    if not value_name:
        raise DataError(
            f"{str(folder)!r}: none of its columns ({', '.join(there)[:200]}) has a name of"
            f" samples: {', '.join(_VALUE_NAMES)}; rename_column() and save it again"
        )
    where, found = f"{str(folder)!r}, column {value_name}", None
    if label_name:
        column = table.column(label_name)
        if column.null_count:
            raise DataError(
                f"{str(folder)!r}, column {label_name} lacks {column.null_count} labels"
            )
        found = column.to_numpy()
        named = info.get(label_name, {}).get("names")
        classes = len(named) if classes is None and isinstance(named, list) else classes
    column = table.column(value_name)
    if not len(column):
        raise DataError(f"data {str(folder)!r} holds no samples")
    if column.null_count:
        raise DataError(f"{where}: a sample is missing (null)")
    # Extension types (Array2D) are stored as lists; pyarrow shows them only where the
    # `datasets` library is imported.
    parts = [_array(getattr(one, "storage", one)) for one in column.chunks if len(one)]
    if any(one is None or one.shape[1:] != parts[0].shape[1:] for one in parts):
        return _Cells(where, column, found, classes)
    return Arrays(where, parts, found, classes)


def _array(chunk: Any) -> Any:
    """Samples (n, *shape) of numbers, mapped, or None where they are others or differ in length."""
    shape, values = [len(chunk)], chunk
    while hasattr(values, "value_lengths"):  # a list
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            return None
        shape.append(int(lengths[0]))
        values = values.flatten()
    found = values.to_numpy(zero_copy_only=False)
    is_array = not values.null_count and found.dtype.kind in "uif"
    return found.reshape(shape) if is_array else None


class _Cells(Dataset):
    """Samples that are read one by one: text, images, lists of different lengths."""

    def __init__(
        self, where: str, column: Any, labels: AnyArray | None, classes: int | None
    ) -> None:
        self._where, self._column = where, column
        first = self._sample(0)
        super().__init__(
            where,
            len(column),
            sample_shape=first.shape if first.ndim == 3 else (-1, *first.shape[1:]),
            dtype=first.dtype,
            labels=labels,
            classes=classes,
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
        return [self._sample(index) for index in self._checked(indices).tolist()]

    def _sample(self, index: int) -> AnyArray:
        value, kind = self._column[index].as_py(), self._column.type
        kind = getattr(kind, "storage_type", kind)
        if isinstance(value, str):
            return np.frombuffer(value.encode(), np.uint8)
        if isinstance(value, dict):
            return self._image(value.get("bytes"))
        while hasattr(kind, "value_type"):
            kind = kind.value_type
        try:
            found = np.asarray(value, kind.to_pandas_dtype())
        except (ValueError, TypeError, NotImplementedError) as error:
            raise DataError(f"{self._where}, sample {index}: {one_line(str(error))}") from error
        if found.dtype.kind not in "uif":
            raise DataError(
                f"{self._where} holds {self._column.type}: numbers, lists of numbers, images and"
                " text are read"
            )
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise DataError(f"{self._where}, sample {index} has a value that is no number")
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


def saved_table(folder: Path, split: str = "train") -> tuple[Any, dict[str, Any]]:
    """The table of one split of a saved data set, mapped, and its features by column.

    Raises DataError.
    """
    arrow = extra("pyarrow", f"data {str(folder)!r}")
    path = folder / _DICT
    try:
        if path.is_file():
            there = list(map(str, json.loads(path.read_bytes())["splits"]))
            name = next((name for name in _SPLITS[split] if name in there), None)
            if name is None:
                raise DataError(
                    f"{str(folder)!r} has no {split} split: {', '.join(there)[:200] or 'none'}"
                )
            folder = folder / name
        path = folder / _STATE
        state = json.loads(path.read_bytes())
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(
                f"{str(folder)!r} keeps its order in a file of its own:"
                " flatten_indices() and save it again"
            )
        tables = []
        for name in [Path(one["filename"]).name for one in state["_data_files"]]:
            path = folder / name
            # The table's buffers keep the map open.
            tables.append(arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all())
        path = folder / _INFO
        info = json.loads(path.read_bytes()) if path.is_file() else {}
        return arrow.concat_tables(tables), info.get("features") or {}
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{str(path)!r} is short or damaged ({one_line(str(error))[:200]})"
        ) from error
