"""Opens the kind of data set that a path holds."""

from pathlib import Path

from fsl_async.learn.data.arrays import (
    is_cifar_folder,
    is_idx_name,
    open_cifar,
    open_idx,
    open_npz,
)
from fsl_async.learn.data.base import DataError, Dataset, checked_split
from fsl_async.learn.data.corpus import Corpus
from fsl_async.learn.data.hub import is_hub_folder, open_saved
from fsl_async.learn.data.text import TextWindows

DEFAULT_CONTEXT = 256


def is_text(root: Path) -> bool:
    """Whether `open_dataset` opens the path as text."""
    if not root.is_dir():
        return root.suffix != ".npz" and not is_idx_name(root.name)
    return not (
        is_hub_folder(root)
        or is_cifar_folder(root)
        or any(is_idx_name(one.name) for one in root.iterdir())
    )


def open_dataset(
    path: str | Path,
    *,
    split: str = "train",
    classes: int | None = None,
    context: int = DEFAULT_CONTEXT,
) -> Dataset:
    """Open the data set at `path`.

    File names decide: MNIST files, a CIFAR or Hugging Face folder, an .npz archive, else text.
    classes: their number, where files do not give it (default: the largest label plus one).
    context: of text only; its "train" and "test" are the `train` and `held_out` spans of `Corpus`.
    Raises DataError in one line.
    """
    checked_split(split)
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"cannot read data {str(root)!r} (no such file or directory)")
    if root.is_dir():
        if is_hub_folder(root):
            return open_saved(root, split=split, classes=classes)
        if is_cifar_folder(root):
            return open_cifar(root, split=split)
        if any(is_idx_name(one.name) for one in root.iterdir()):
            return open_idx(root, split=split, classes=classes)
    elif root.suffix == ".npz":
        return open_npz(root, split=split, classes=classes)
    elif is_idx_name(root.name):
        return open_idx(root, split=split, classes=classes)
    corpus = Corpus.open(root, context=context)
    return TextWindows(corpus, corpus.train if split == "train" else corpus.held_out)
