"""Which kind of data set a path is."""

from pathlib import Path

from fsl_async.learn.data.base import DataError, Dataset, checked_split
from fsl_async.learn.data.cifar import CifarFolder, is_cifar_folder
from fsl_async.learn.data.corpus import Corpus
from fsl_async.learn.data.hub import HubFolder, is_hub_folder
from fsl_async.learn.data.idx import is_idx_name, open_idx
from fsl_async.learn.data.npz import NpzFile
from fsl_async.learn.data.text import TextWindows

DEFAULT_CONTEXT = 256


def is_text(place: Path) -> bool:
    """Whether `open_dataset` takes what is there for text."""
    if not place.is_dir():
        return place.suffix != ".npz" and not is_idx_name(place.name)
    return not (
        is_hub_folder(place)
        or is_cifar_folder(place)
        or any(is_idx_name(one.name) for one in place.iterdir())
    )


def open_dataset(
    path: str | Path,
    *,
    split: str = "train",
    classes: int | None = None,
    context: int = DEFAULT_CONTEXT,
) -> Dataset:
    """Open what lies at `path`, by its names: MNIST files, a CIFAR or Hugging Face folder, an .npz archive, else text.

    classes: how many there are, where files do not say (default: as many as the largest label asks for). context: of text only; "train" and
    "test" are then the parts that `Corpus` trains on and holds out. Raises DataError in one line.
    """
    checked_split(split)
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(f"cannot read data {str(place)!r} (no such file or directory)")
    if place.is_dir():
        if is_hub_folder(place):
            return HubFolder(place, split=split, classes=classes)
        if is_cifar_folder(place):
            return CifarFolder(place, split=split)
        if any(is_idx_name(one.name) for one in place.iterdir()):
            return open_idx(place, split=split, classes=classes)
    elif place.suffix == ".npz":
        return NpzFile(place, split=split, classes=classes)
    elif is_idx_name(place.name):
        return open_idx(place, split=split, classes=classes)
    corpus = Corpus.open(place, context=context)
    return TextWindows(corpus, corpus.train if split == "train" else corpus.held_out)
