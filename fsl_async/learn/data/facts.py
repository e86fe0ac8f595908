"""Facts of a run's data that every node needs to build its part of a model.

They are the shape of a sample, the number of classes and the samples of each class, and come from
the run's configuration. Where a parameter server has the data (`data.path`), `described` fills in
what the configuration leaves open; without data, `data.sample_shape` and `data.classes` must be
set. Sites compare their data with these facts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np

from fsl_async.config.presets import SIZES
from fsl_async.config.rules import LANGUAGE_FAMILIES, is_own
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError, DataError
from fsl_async.learn.data.dataset import (
    AnyArray,
    Dataset,
    check_gaps,
    is_cifar_folder,
    is_idx_name,
    open_cifar,
    open_idx,
    open_npz,
)
from fsl_async.learn.data.hub import is_hub_folder, open_saved
from fsl_async.learn.data.partition import Partition, PartitionSpec


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
    if split not in {"train", "test"}:
        raise DataError(f"split {split[:80]!r}: use train or test")
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


BYTES = 256
"""Classes of text: a token is a byte."""


@attrs.frozen(slots=True)
class Facts:
    """The data as a model takes them.

    shape: of one sample; (longest,) for text. classes: number of labels or tokens.
    language: labels are the next tokens.
    """

    shape: tuple[int, ...]
    classes: int
    language: bool


def context_of(config: Config) -> int:
    """Tokens of a language model's context."""
    return config.model.context or SIZES[config.model.preset].context


def facts_of(config: Config) -> Facts:
    """The run's facts.

    Raises ConfigError where the configuration lacks them or augments what are no images, DataError
    for data of no known kind.
    """
    found = _facts_of(config)
    given = [name for name in ("flip", "crop") if getattr(config.data, name)]
    if given and len(found.shape) != 3:
        raise ConfigError(
            f"data.{given[0]} is for images, and samples have shape {found.shape}",
            f"data.{given[0]}",
        )
    return found


def _facts_of(config: Config) -> Facts:
    data, family = config.data, config.model.family
    if family in LANGUAGE_FAMILIES:
        return Facts((context_of(config),), data.classes or BYTES, language=True)
    if data.sample_shape and data.classes:
        shape = tuple(int(size) for size in data.sample_shape.split("x"))
        return Facts(shape, data.classes, language=False)
    if is_own(family) and not data.sample_shape and (not data.path or _is_local(data.path)):
        return Facts((context_of(config),), data.classes or BYTES, language=True)
    if data.path and _is_local(data.path):
        raise DataError(
            f"data {data.path!r} holds none of MNIST files, a CIFAR folder, a Hugging Face folder"
            f" and an .npz archive, and {family} needs samples with labels"
        )
    raise ConfigError(
        f"{family} needs samples with labels of a known shape: give data.path a data set, or set"
        " data.sample_shape and data.classes, like 3x32x32 and 10",
        "data.sample_shape",
    )


def described(config: Config) -> Config:
    """Fill in the facts of the data set at `data.path`, if it is on this machine.

    Raises DataError where the data contradict the configuration or cannot be divided.
    """
    data = config.data
    if not config.split.is_on:
        return config
    if data.path and _is_local(data.path) and not is_text(Path(data.path).expanduser()):
        found = open_run_data(config)
        if _is_language(config, found):
            if found.sample_shape[1:] or found.dtype.kind not in "ui":
                raise DataError(
                    f"data {found.name!r} holds samples of shape {found.sample_shape}, and"
                    f" {config.model.family} trains on text or token ids"
                )
        else:
            labeled(found)
            check_gaps(found)
            shape = "x".join(map(str, model_shape(found.sample_shape)))
            _check_same("sample_shape", data.sample_shape, shape)
            data = attrs.evolve(data, sample_shape=shape, classes=found.classes)
        _check_same("fingerprint", data.fingerprint, found.fingerprint)
        data = attrs.evolve(data, fingerprint=found.fingerprint)
        counts = counts_of(config, found)
        if data.sharding == "disjoint":
            partition_spec(config).of_counts(counts)
    filled: Config = attrs.evolve(config, data=data)
    return filled


def open_run_data(config: Config, split: str = "train") -> Dataset:
    """Open the data set at `data.path`, with the run's classes.

    Raises DataError: one line with file and offset.
    """
    language = config.model.family in LANGUAGE_FAMILIES
    classes = None if language or not config.data.classes else config.data.classes
    return open_dataset(config.data.path, split=split, classes=classes)


def labeled(data: Dataset) -> Dataset:
    """Return `data`; raises DataError when its samples have no labels or differ in shape."""
    if data.labels is None or -1 in data.sample_shape:
        raise DataError(f"data {data.name!r} has no labeled samples of one shape")
    return data


def partition_spec(config: Config, clients: int | None = None) -> PartitionSpec:
    """How the run divides data sets of samples."""
    data = config.data
    return PartitionSpec(data.partition, clients or config.shards, config.run.seed, data.alpha)


def partition_of(config: Config, data: Dataset, clients: int) -> Partition:
    """Divide `data` among clients.

    Raises DataError for data other than the run's, or more clients than samples.
    """
    if config.data.fingerprint not in {"", data.fingerprint}:
        raise DataError(
            f"data {data.name!r} are not those of the run, or in another order"
            f" (fingerprints {data.fingerprint} and {config.data.fingerprint})"
        )
    return partition_spec(config, clients).of_counts(counts_of(config, data))


def counts_of(config: Config, data: Dataset) -> Sequence[int]:
    """Samples of each class; for language models their total.

    Raises DataError for a division by classes without labels.
    """
    if config.data.partition != "iid":
        partition_spec(config).check_labels(data)
        return data.label_counts()
    return (data.samples,) if _is_language(config, data) else data.label_counts()


def _is_language(config: Config, data: Dataset) -> bool:
    family = config.model.family
    return family in LANGUAGE_FAMILIES or (is_own(family) and data.labels is None)


def model_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a sample as model input: images get channels, and channels come first."""
    if len(shape) == 2:
        return (1, *shape)
    if len(shape) == 3 and _channels_last(shape):
        return (shape[2], *shape[:2])
    return shape


def to_model_input(values: AnyArray) -> AnyArray:
    """Convert (n, *sample_shape) of any type to float32 (n, *model_shape); bytes to -1 ... 1."""
    found = values.astype(np.float32)
    if values.dtype == np.uint8:
        found = found / np.float32(127.5) - np.float32(1)
    if found.ndim == 4 and _channels_last(found.shape[1:]):
        found = np.ascontiguousarray(found.transpose(0, 3, 1, 2))
    elif found.ndim == 3:
        found = found[:, None]
    return found


def _channels_last(shape: Sequence[int]) -> bool:
    return shape[2] in {1, 3} and shape[0] not in {1, 3}


def _is_local(path: str) -> bool:
    return Path(path).expanduser().exists()


def _check_same(key: str, given: str, found: str) -> None:
    if given not in {"", found}:
        raise DataError(
            f"data.{key} is {given[:80]}, and data.path holds {found[:80]}: leave it out"
        )
