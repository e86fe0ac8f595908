"""What every node must know of the data before it builds its part of a model: shape of a sample, classes, how many of each.

They come from the run's configuration. Where the server has the data (`data.path`), `described` fills in what the configuration leaves open; a
server without data must be told `data.sample_shape` and `data.classes`. Sites compare what they hold with it.
"""

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from fsl_async.config.presets import SIZES
from fsl_async.config.rules import LANGUAGE_FAMILIES, MAX_TEXT, is_own
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError, DataError
from fsl_async.learn.data.base import AnyArray, Dataset, check_gaps
from fsl_async.learn.data.find import is_text, open_dataset
from fsl_async.learn.data.partition import Partition, PartitionSpec

BYTES = 256
"""Classes of text: a token is a byte."""


@attrs.frozen(slots=True)
class Facts:
    """shape: of one sample as a model sees it, (longest,) for text. classes: of labels or tokens. language: whether labels are the next tokens."""

    shape: tuple[int, ...]
    classes: int
    language: bool


def context_of(config: Config) -> int:
    """How many tokens a language model sees at once."""
    return config.model.context or SIZES[config.model.preset].context


def facts_of(config: Config) -> Facts:
    """The run's facts. Raises ConfigError where neither the configuration nor the server's data say them."""
    data, family = config.data, config.model.family
    if family in LANGUAGE_FAMILIES:
        return Facts((context_of(config),), data.classes or BYTES, language=True)
    if data.sample_shape and data.classes:
        shape = tuple(int(size) for size in data.sample_shape.split("x"))
        return Facts(shape, data.classes, language=False)
    if is_own(family) and not data.sample_shape and (not data.path or _here(data.path)):
        return Facts((context_of(config),), data.classes or BYTES, language=True)
    if data.path and _here(data.path):
        raise DataError(
            f"data {data.path!r} holds no data set that is known here (MNIST files, CIFAR or Hugging Face folders, .npz), and {family} needs"
            " samples with labels"
        )
    raise ConfigError(
        f"{family} needs samples with labels, and what they are like is not known here: give data.path a data set, or set"
        " data.sample_shape and data.classes, like 3x32x32 and 10",
        "data.sample_shape",
    )


def described(config: Config) -> Config:
    """Fill in what the data set at `data.path` says, if it is on this machine. Raises DataError where it says otherwise, or cannot be divided."""
    data = config.data
    if not config.split.is_on:
        return config
    if data.path and _here(data.path) and not is_text(Path(data.path).expanduser()):
        found = open_run_data(config)
        if _is_language(config, found):
            if found.sample_shape[1:] or found.dtype.kind not in "ui":
                raise DataError(
                    f"data {found.name!r} holds samples of shape {found.sample_shape}, and {config.model.family} trains on text or token ids"
                )
        else:
            labelled(found)
            check_gaps(found)
            shape = "x".join(map(str, model_shape(found.sample_shape)))
            _same("sample_shape", data.sample_shape, shape)
            data = attrs.evolve(data, sample_shape=shape, classes=found.classes)
        counts = ",".join(map(str, counts_of(config, found)))
        _same("label_counts", data.label_counts, counts)
        _same("fingerprint", data.fingerprint, found.fingerprint)
        # What does not fit into a setting is left to the fingerprint.
        known = counts if len(counts) <= MAX_TEXT else ""
        data = attrs.evolve(data, label_counts=known, fingerprint=found.fingerprint)
    filled: Config = attrs.evolve(config, data=data)
    if data.label_counts and data.sharding == "disjoint":
        partition_spec(filled).of_counts(_counts(data.label_counts))
    return filled


def open_run_data(config: Config, split: str = "train") -> Dataset:
    """The data set at `data.path`, with the run's classes. Raises DataError in one line, with file and offset."""
    language = config.model.family in LANGUAGE_FAMILIES
    classes = None if language or not config.data.classes else config.data.classes
    return open_dataset(config.data.path, split=split, classes=classes)


def labelled(data: Dataset) -> Dataset:
    """The data set itself; DataError when its samples have no labels or differ in shape."""
    if data.labels is None or -1 in data.sample_shape:
        raise DataError(f"data {data.name!r} has no labelled samples of one shape")
    return data


def partition_spec(config: Config, clients: int | None = None) -> PartitionSpec:
    """How the run divides data sets of samples."""
    data = config.data
    return PartitionSpec(
        data.partition, clients or config.shards, seed=config.run.seed, alpha=data.alpha
    )


def partition_of(config: Config, data: Dataset, clients: int) -> Partition:
    """Who gets what of `data`. Raises DataError: other data than the run's, more clients than samples."""
    counts = counts_of(config, data)
    wanted = _counts(config.data.label_counts)
    for label, (here, there) in enumerate(zip(counts, wanted, strict=False)):
        if here != there:
            raise DataError(
                f"data {data.name!r}: class {label} has {here} samples here and {there} in the run: the data differ"
            )
    if config.data.fingerprint not in {"", data.fingerprint}:
        raise DataError(
            f"data {data.name!r} are not those of the run, or in another order (fingerprints {data.fingerprint} and"
            f" {config.data.fingerprint})"
        )
    return partition_spec(config, clients).of_counts(counts)


def counts_of(config: Config, data: Dataset) -> Sequence[int]:
    """Samples of each class; all of them where classes do not matter. Raises DataError for dirichlet without labels."""
    if config.data.partition == "dirichlet":
        if data.labels is None:
            raise DataError(f"data {data.name!r} has no labels, which dirichlet needs: use iid")
        return data.label_counts()
    return (data.samples,) if _is_language(config, data) else data.label_counts()


def _is_language(config: Config, data: Dataset) -> bool:
    family = config.model.family
    return family in LANGUAGE_FAMILIES or (is_own(family) and data.labels is None)


def model_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a sample as models see it: images have channels, and they come first."""
    if len(shape) == 2:
        return (1, *shape)
    if len(shape) == 3 and _channels_last(shape):
        return (shape[2], *shape[:2])
    return shape


def as_model_sees(values: AnyArray) -> AnyArray:
    """(n, *sample_shape) of any numbers to float32 (n, *model_shape); bytes are brought to -1 ... 1."""
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


def _here(path: str) -> bool:
    return Path(path).expanduser().exists()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(",") if count)


def _same(key: str, given: str, found: str) -> None:
    if given not in {"", found}:
        raise DataError(
            f"data.{key} is {given[:80]}, and data.path holds {found[:80]}: leave it out"
        )
