"""The built-in task of split learning.

Batches are a function of the run's seed, the part of the data and the round. So a client that is
launched again goes on where the run is, and saves no position. Three kinds are told apart by what
lies at `data.path`:

    text                    random windows of this client's part of the bytes, all of one length
    samples with labels     this client's part of the partition, shuffled in each epoch
    sentences, token ids    the same, of any length: batches are padded at their end, and padding
                            is not sent
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch

from fsl_async.config.settings import Config
from fsl_async.errors import DataError
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.pretrain import open_corpus
from fsl_async.learn.data.corpus import Corpus, held_out_windows, windows
from fsl_async.learn.data.counter import Words, random_words
from fsl_async.learn.data.dataset import AnyArray, Dataset, Indices
from fsl_async.learn.data.facts import (
    Facts,
    facts_of,
    is_text,
    labeled,
    model_shape,
    open_run_data,
    partition_of,
    to_model_input,
)
from fsl_async.learn.data.partition import epoch_order
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.learn.split.build import build_parts, client_options, client_part
from fsl_async.learn.split.payload import IGNORED
from fsl_async.learn.split.remote import SplitTraining, open_training
from fsl_async.process.memory import MemoryMark
from fsl_async.roles.split.methods import method_of

EVALUATED_BATCH = 64


def open_samples(config: Config, facts: Facts, part: tuple[int, int]) -> "_Text | _Indexed":
    """Part `part[0]` of `part[1]` of the run's data; its `round(number)` gives batches.

    Raises DataError in one line: missing, damaged, other data than the run's.
    """
    path = config.data.path
    if not path or is_text(Path(path).expanduser()):
        if not facts.language:
            raise DataError(
                f"data {path!r} is text, and this run trains on samples with labels:"
                " give --data a data set"
            )
        return _Text(config, facts, part)
    data = open_run_data(config)
    if not facts.language:
        _check(labeled(data), facts)
    shard, count = part
    if config.data.sharding == "local":
        indices = np.arange(data.samples)
    else:
        indices = partition_of(config, data, count).indices(shard, data.labels)
    kind = _Sequences if facts.language else _Labelled
    return kind(config, facts, data, indices, shard)


def held_out(config: Config, facts: Facts, limit: int = 1 << 12) -> Iterator[Batch]:
    """Held-out batches: of the data set's test split, or of the tail of the text.

    `limit` samples of it at most.
    """
    path = config.data.path
    if not path or is_text(Path(path).expanduser()):
        corpus = _corpus(config, facts)
        for window in held_out_windows(corpus, batch=EVALUATED_BATCH, limit=limit):
            yield _window(window)
        return
    data = open_run_data(config, "test")
    indices = np.arange(min(data.samples, limit))
    kind = _Sequences if facts.language else _Labelled
    found = kind(config, facts, data, indices, 0)
    for start in range(0, len(indices), EVALUATED_BATCH):
        yield from found.take(indices[start : start + EVALUATED_BATCH])


class _Text:
    def __init__(self, config: Config, facts: Facts, part: tuple[int, int]) -> None:
        self._config, self._shard = config, part[0]
        self._corpus = _corpus(config, facts)
        self._span = self._corpus.shard(*part)

    def round(self, number: int) -> Iterator[Batch]:
        """Windows of a round: inputs and labels int64 (batch, context); the last may be fewer."""
        config, corpus, span = self._config, self._corpus, self._span
        left = config.split.samples or max(1, (span.bytes - 1) // (corpus.window_bytes - 1))
        name, seed = f"shard {self._shard}", config.run.seed
        batch = config.train.batch
        for drawn in windows(corpus, span, batch=batch, seed=seed, name=name, start=number):
            yield _window(drawn[:left])
            left -= len(drawn[:left])
            if not left:
                return


class _Indexed(ABC):
    """Samples by index, in epochs that follow one another over the rounds."""

    def __init__(
        self, config: Config, facts: Facts, data: Dataset, indices: Indices, shard: int
    ) -> None:
        self._config, self._facts, self._data = config, facts, data
        self._indices, self._shard = indices, shard

    def round(self, number: int) -> Iterator[Batch]:
        chosen = self.indices(number)
        batch = self._config.train.batch
        # By round and place in it: a client that is launched again changes images as before.
        words = random_words(self._config.run.seed, f"augment/{self._shard}/{number}", len(chosen))
        for start in range(0, len(chosen), batch):
            taken = self.take(chosen[start : start + batch])
            yield from self.augmented(taken, words[start : start + batch])

    def indices(self, number: int) -> Indices:
        """Which samples a round takes, in order."""
        size = len(self._indices)
        count = self._config.split.samples or size
        first, last = number * count // size, ((number + 1) * count - 1) // size
        name = f"shard {self._shard}"
        orders = [
            epoch_order(self._config.run.seed, name, epoch, size)
            for epoch in range(first, last + 1)
        ]
        start = number * count - first * size
        found: Indices = self._indices[np.concatenate(orders)[start : start + count]]
        return found

    def augmented(self, taken: Iterator[Batch], words: Words) -> Iterator[Batch]:
        """Change samples for training. words: random, one for each sample."""
        del words
        return taken

    @abstractmethod
    def take(self, indices: Indices) -> Iterator[Batch]:
        """These samples as one batch, or none where none of them can be trained on."""


class _Labelled(_Indexed):
    def augmented(self, taken: Iterator[Batch], words: Words) -> Iterator[Batch]:
        data = self._config.data
        if not (data.flip or data.crop):
            yield from taken
            return
        fill = -1.0 if self._data.dtype == np.uint8 else 0.0  # black
        for batch in taken:
            images = flipped_and_cropped(
                batch.inputs.numpy(), words, flip=data.flip, margin=data.crop, fill=fill
            )
            yield attrs.evolve(batch, inputs=torch.from_numpy(images))

    def take(self, indices: Indices) -> Iterator[Batch]:
        assert self._data.labels is not None
        values = to_model_input(self._data.read(indices))
        yield Batch(torch.from_numpy(values), torch.from_numpy(self._data.labels[indices]))


class _Sequences(_Indexed):
    """Each sample is a row of tokens.

    What is longer than the context is cut off, what has no next token left out.
    """

    def take(self, indices: Indices) -> Iterator[Batch]:
        longest = self._facts.shape[0] + 1
        rows = [np.asarray(row[:longest], np.int64) for row in self._data.rows(indices)]
        rows = [row for row in rows if len(row) > 1]
        if rows:
            self._check(rows)
            yield padded(rows)

    def _check(self, rows: Sequence[Indices]) -> None:
        classes = self._facts.classes
        for row in rows:
            if row.ndim != 1 or row.min() < 0 or row.max() >= classes:
                token = row.max() if row.ndim == 1 else row.shape
                raise DataError(
                    f"data {self._data.name!r} has token {token}, not in 0 ... {classes - 1}:"
                    " set data.classes to the vocabulary's size"
                )


def flipped_and_cropped(
    images: AnyArray, words: Words, *, flip: bool, margin: int, fill: float
) -> AnyArray:
    """Augment images (n, channels, height, width) as for CIFAR (He et al., arXiv:1512.03385).

    flip: mirror half of them. margin: pixels of `fill` around an image, of which its size is cut
    out at a random place. words: uint64 (n,), random.
    """
    height, width = images.shape[2:]
    places = np.uint64(2 * margin + 1)
    down = ((words & np.uint64(0xFFFFFFFF)) % places).astype(int)
    right = ((words >> np.uint64(33)) % places).astype(int)
    mirrored = (words >> np.uint64(32) & np.uint64(1)).astype(bool) & flip
    around = ((0, 0), (0, 0), (margin, margin), (margin, margin))
    found = np.empty_like(images)
    for number, image in enumerate(np.pad(images, around, constant_values=fill)):
        rows = image[:, down[number] : down[number] + height]
        cut = rows[:, :, right[number] : right[number] + width]
        found[number] = cut[:, :, ::-1] if mirrored[number] else cut
    return found


def padded(rows: Sequence[Indices]) -> Batch:
    """Rows of at least two tokens as one batch, padded at their end.

    Each token's label is the next one.
    """
    lengths = [len(row) - 1 for row in rows]
    inputs = np.zeros((len(rows), max(lengths)), np.int64)
    labels = np.full((len(rows), max(lengths)), IGNORED, np.int64)
    for number, row in enumerate(rows):
        inputs[number, : len(row) - 1] = row[:-1]
        labels[number, : len(row) - 1] = row[1:]
    ragged = min(lengths) < max(lengths)
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(labels),
        torch.tensor(lengths) if ragged else None,
    )


def _corpus(config: Config, facts: Facts) -> Corpus:
    return open_corpus(
        {"data": {"path": config.data.path, "holdout": config.data.holdout}}, facts.shape[0]
    )


def _window(window: np.ndarray) -> Batch:
    found = torch.from_numpy(window).long()
    return Batch(found[:, :-1].contiguous(), found[:, 1:].contiguous())


def _check(data: Dataset, facts: Facts) -> None:
    shape = model_shape(data.sample_shape)
    if shape != facts.shape:
        raise DataError(
            f"data {data.name!r} has samples of shape {shape}, and this run trains on {facts.shape}"
        )


def warm_up() -> None:
    """A step of a tiny model, then mark memory.

    What torch loads at its first step is not the model's.
    """
    model = GPT(GPTConfig(layers=1, width=8, heads=2, context=8))
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    MemoryMark.take()


def begin(fed: Fed, config: Config | None = None) -> SplitTraining:
    """Build this client's part of the run's model and open its session with the split server.

    For loops of your own too.
    """
    config = config or fed.settings
    method = method_of(config.split)
    parts = build_parts(config, at_client=True)
    for module in (parts.model.client, parts.model.tail, parts.auxiliary):
        if module is not None:
            module.to(fed.device)
    options = client_options(config, fed.client_name, method.in_flight)
    part = client_part(method, parts.model, options, parts.auxiliary)
    classes, architecture = facts_of(config).classes, parts.architecture
    features = parts.features
    del parts  # the split server's part of a model that was built whole
    return open_training(
        fed, part, method, classes=classes, architecture=architecture, features=features
    )


def _held(training: SplitTraining) -> int:
    """Bytes of this client's weights, and of the vector from which deltas are computed."""
    part, averaged = training.part, training.method.averaged
    tensors = [*part.model.parameters(), *part.model.buffers()]
    if part.auxiliary is not None:
        tensors += [*part.auxiliary.parameters(), *part.auxiliary.buffers()]
    weights = {id(each): each.numel() * each.element_size() for each in tensors}
    return sum(weights.values()) + sum(part.export(name).nbytes for name in averaged)


def train(fed: Fed) -> None:
    """Train until the run ends."""
    training = _train(fed)
    method = training.method
    if method.aligned and method.settings.align_every and not training.installed:
        fed.log(
            f"{fed.client_name} has trained with the auxiliary model that it began with:"
            " the run ended before an aligned one was there"
        )


def _train(fed: Fed) -> SplitTraining:
    warm_up()
    config = fed.settings
    samples = open_samples(config, facts_of(config), fed.part)
    training = begin(fed, config)
    MemoryMark.take(_held(training))
    for number in fed.rounds():
        trained = 0
        for batch in samples.round(number):
            if not fed.running:
                return training
            training.train_batch(batch.inputs, batch.labels, batch.lengths)
            trained += len(batch.inputs)
        if not fed.end_round(samples=trained):
            break
    return training
