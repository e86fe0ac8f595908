"""Opens the kind of data set of samples that a path holds."""

from collections.abc import Callable
from pathlib import Path

from fsl_async.errors import DataError
from fsl_async.learn.data.arrays import (
    is_cifar_folder,
    is_idx_name,
    open_cifar,
    open_idx,
    open_npz,
)
from fsl_async.learn.data.base import Dataset, checked_split
from fsl_async.learn.data.hub import is_hub_folder, open_saved


def _reader(root: Path) -> Callable[..., Dataset] | None:
    """Return the reader for the names of the files in `root`; None for plain text."""
    if not root.is_dir():
        if root.suffix == ".npz":
            return open_npz
        return open_idx if is_idx_name(root.name) else None
    if is_hub_folder(root):
        return open_saved
    if is_cifar_folder(root):
        return open_cifar
    return open_idx if any(is_idx_name(one.name) for one in root.iterdir()) else None


def is_text(root: Path) -> bool:
    """Whether a path holds text, and no data set of samples."""
    return _reader(root) is None


def open_dataset(path: str | Path, *, split: str = "train", classes: int | None = None) -> Dataset:
    """Open the data set at `path`: MNIST files, a CIFAR or Hugging Face folder, an .npz archive.

    classes: their number, where files do not give it (default: the largest label plus one).
    Raises DataError in one line.
    """
    checked_split(split)
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"cannot read data {str(root)!r} (no such file or directory)")
    read = _reader(root)
    if read is None:
        raise DataError(
            f"data {str(root)!r} holds none of MNIST files, a CIFAR folder, a Hugging Face folder"
            " and an .npz archive"
        )
    return read(root, split=split, classes=classes)
