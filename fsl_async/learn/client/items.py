"""Items of a client's part of a data set, and the position of what it has trained of them.

    Items         what `fed.shard(data)` gives: an iterator, and an IterableDataset for a DataLoader
    PartSampler   what `fed.sampler(data)` gives: indices of one epoch for a DataLoader
    Positions     which of them has the position that goes into the client's deltas

The order is a function of the run's seed, the client's name, its part and the epoch, so a relaunch
goes on in it after the last item of its last acknowledged delta. That is possible because an item
counts as trained when the script has it, and not when a worker of a DataLoader has read it ahead.
`datasets` is imported where an object of it is given, and so is there already.

A DataLoader with workers reads several batches ahead, so neither a sampler nor a data set knows
which of them the script has. `_iterate` replaces `DataLoader.__iter__`: iterators of loaders with a
sampler of `fed.sampler`, or with workers that draw from `fed.shard`, count each batch as the script
gets it. A worker puts the position after a batch beside it (`Mark`), and the process that trains
takes it off again. Other loaders are left as they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from fsl_async.errors import TaskError
from fsl_async.learn.client import script_values
from fsl_async.learn.data.counter import permutation
from fsl_async.learn.data.packing import Position, check_of
from fsl_async.roles.sync.delta import POSITION

if TYPE_CHECKING:
    from fsl_async.learn.client.context import ClientContext
    from fsl_async.learn.client.training import Training


_plain_iter = DataLoader.__iter__
_listeners: weakref.WeakValueDictionary[int, Positions] = weakref.WeakValueDictionary()
"""Positions by their id, which workers inherit."""
_batch = 1
"""Items of a batch of the loader whose workers were started last. They inherit it."""
_mark: Mark | None = None
"""The mark of the last item that this worker has drawn."""


@attrs.frozen
class Mark:
    """A worker has drawn its items before `following`, of those that begin at `start`.

    listener: the id of the Positions to tell. first: the first item of each worker.
    """

    listener: int
    worker: int
    following: Position
    start: Position
    first: list[Position]


@attrs.frozen
class _Marked:
    batch: Any
    mark: Mark

    def pin_memory(self) -> _Marked:
        """Called by a DataLoader that pins memory."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return _Marked(pin_memory(self.batch), self.mark)  # type: ignore[no-untyped-call]


class _Collate:
    """Collates a batch in a worker, and adds its mark; takes that off where the script is."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._start: Position | None = None
        self._following: list[Position] = []

    def __call__(self, items: Any) -> Any:
        batch = self.collate(items)
        return batch if _mark is None else _Marked(batch, _mark)

    def received(self, batch: Any) -> Any:
        """Return the batch without its mark, and tell up to where all items have been received."""
        if not isinstance(batch, _Marked):
            return batch
        mark = batch.mark
        if mark.start != self._start:
            self._start, self._following = mark.start, list(mark.first)
        self._following[mark.worker] = mark.following
        listener = _listeners.get(mark.listener)
        if listener is not None:
            listener.trained_to(min(self._following, key=lambda one: (one.epoch, one.at)))
        return batch.batch


def _iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    global _batch  # noqa: PLW0603 - inherited by the workers that are started here
    if isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers:
            return _plain_iter(loader)
        _batch = loader.batch_size or 1
        if not isinstance(loader.collate_fn, _Collate):
            loader.collate_fn = _Collate(loader.collate_fn)
        return _Received(_plain_iter(loader), loader.collate_fn.received)
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    if not isinstance(sampler, PartSampler) or size is None:
        return _plain_iter(loader)
    sampler.is_counted = True

    def counted(batch: Any) -> Any:
        sampler.count(size)  # batches come in its order
        return batch

    return _Received(_plain_iter(loader), counted, sampler.end_epoch)


class _Received(Iterator[Any]):
    """An iterator of a DataLoader, with whatever else it has.

    received: counts a batch, and returns what the script gets. ended: called at its end.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        received: Callable[[Any], Any],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches, self._received, self._ended = batches, received, ended

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended()
            raise
        return self._received(batch)


SAMPLED_ROWS = 8
"""Rows of a Hugging Face Dataset that are hashed to tell it from others of its length."""


class Part:
    """A client's part of a data set: what it has, in which order, and what tells it from others.

    whole: all of the data are this client's. Raises TaskError for a part without items.
    """

    def __init__(
        self, context: ClientContext, data: Any, *, shuffle: bool = True, whole: bool = False
    ) -> None:
        self.data, self.shuffle = data, shuffle
        self._seed, self._name = context.seed, context.client_name
        self.index, self.count = (0, 1) if whole else context.part
        self.is_stream = _is_a(data, "IterableDataset")
        known = -1 if self.is_stream else len(data)
        if 0 <= known <= self.index:
            raise TaskError(
                f"fed.shard: {known} items leave none for part {self.index} of {self.count}: give"
                " more items"
            )
        self.size = -1 if self.is_stream else len(range(self.index, known, self.count))
        self.ranks = 1 if whole else context.ranks
        # All ranks have the position of rank 0, since each step takes an item of each.
        part = (self.index // self.ranks, self.count, shuffle)
        self.check = check_of("items", *identity(data), context.seed, *part)

    def order(self, epoch: int, size: int | None = None) -> npt.NDArray[np.int64]:
        """The numbers of the items in an epoch; size: only the first so many of them."""
        size = self.size if size is None else size
        if not self.shuffle:
            return self.index + np.arange(size) * self.count
        name = f"items/{self._name}/{self.index}/{self.count}/{epoch}"
        return self.index + permutation(self._seed, name, size) * self.count

    def read(self, position: Position) -> Iterator[Callable[[], Any]]:
        """Yield a function per item of an epoch, from a position on, that returns the item."""
        if not self.is_stream:
            for number in self.order(position.epoch)[position.at :]:
                yield lambda number=int(number): self.data[number]  # type: ignore[misc]
            return
        mine = import_module("datasets.distributed").split_dataset_by_node(
            self.data, rank=self.index, world_size=self.count
        )
        mine.set_epoch(position.epoch)
        rows = mine if get_worker_info() is None else _undivided(mine)
        for row in islice(rows, position.at, None):
            yield lambda row=row: row  # type: ignore[misc]

    def after(self, position: Position, items: int) -> Position:
        """The position so many items later; of a stream within the epoch, which may end before."""
        epoch, at = position.epoch, position.at + items
        while 0 < self.size < at:
            epoch, at = epoch + 1, at - self.size
        return attrs.evolve(position, epoch=epoch, at=at)

    def next_epoch(self, position: Position) -> Position:
        """The start of the next one. Raises TaskError where this one had no items."""
        if not position.at:
            raise TaskError("fed.shard: the data set has no items for this part: give more items")
        return attrs.evolve(position, epoch=position.epoch + 1, at=0)


def _is_a(data: object, name: str) -> bool:
    kind = getattr(sys.modules.get("datasets"), name, None)
    return kind is not None and isinstance(data, kind)


def _undivided(stream: Any) -> Iterator[dict[str, Any]]:
    """All rows of a stream in a worker of a DataLoader, which would leave out those of others."""
    for batch in stream.iter(batch_size=1):
        yield {name: column[0] for name, column in batch.items()}


def identity(data: Any) -> tuple[object, ...]:
    """Return values that distinguish these data from others, the same on every machine.

    The library's own fingerprint is not: it has the paths and times of local files, and chance
    where a function cannot be hashed. Rows of a stream, and items of data that are no Dataset of
    the library, may come out of a function with chance.
    """
    is_stream = _is_a(data, "IterableDataset")
    known = -1 if is_stream or not hasattr(data, "__len__") else len(data)
    if not (is_stream or _is_a(data, "Dataset")):
        return (known, type(data).__qualname__)
    info, sampled = data.info, ""
    if known > 0:  # as stored: before any set_transform, and images as their bytes
        rows = sorted({(known - 1) * part // (SAMPLED_ROWS - 1) for part in range(SAMPLED_ROWS)})
        sampled = repr(data.with_format("arrow")[rows].to_pylist())
    names = (info.dataset_name, info.builder_name, info.config_name, str(data.split))
    shards = data.num_shards if is_stream else None
    return (known, names, shards, data.column_names, sampled)


class Items(IterableDataset[Any], Iterator[Any]):
    """This rank's items, epoch after epoch, until the run ends.

    In a worker of a DataLoader it gives the worker's share: every so many batches one, so that the
    batches together are what the process would have drawn by itself.
    """

    def __init__(
        self, part: Part, start: Position, training: Training, *, listener: int = 0
    ) -> None:
        """listener: what workers mark their batches for; 0: these data have no position."""
        self._part, self._training, self._listener = part, training, listener
        self.position = start
        """After the last item that was drawn here, or that came from workers."""
        self._drawn = (give() for give in self._all())
        self._shared: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # noqa: PYI034 - in a worker it is another
        worker = get_worker_info()
        if worker is None:
            return self
        if self._shared is None:  # workers that stay for several epochs go on
            self._shared = self._share(worker.id, worker.num_workers)
        return self._shared

    def __next__(self) -> Any:
        return next(self._drawn if get_worker_info() is None else iter(self))

    def _all(self) -> Iterator[Callable[[], Any]]:
        """The items from the position on, which moves past each, until the run ends."""
        while True:
            for give in self._part.read(self.position):
                if self._training.stopped:
                    return
                self.position = attrs.evolve(self.position, at=self.position.at + 1)
                yield give
            self.position = self._part.next_epoch(self.position)

    def _share(self, worker: int, workers: int) -> Iterator[Any]:
        """Batch number `worker` of each `workers`."""
        global _mark  # noqa: PLW0603 - a worker has one loader
        part, start, block = self._part, self.position, _batch
        first = [part.after(start, other * block) for other in range(workers)]
        for number, give in enumerate(self._all()):  # from the start on
            if number // block % workers != worker:
                continue
            is_last = (number + 1) % block == 0
            following = part.after(self.position, (workers - 1) * block if is_last else 0)
            if self._listener:
                _mark = Mark(self._listener, worker, following, start, first)
            yield give()


class PartSampler(Sampler[int]):
    """Indices of this rank's items, one epoch each time it is iterated.

    It counts epochs itself, so that a script which was started again goes on in the epoch, and
    after the item, that its last acknowledged delta ended with. An epoch that was left before its
    end goes on where it was left. Ranks of a client have equally many indices.
    """

    def __init__(self, part: Part, start: Position) -> None:
        self._part = part
        last = part.index // part.ranks * part.ranks + part.ranks - 1
        self._size = len(range(last, len(part.data), part.count))
        if not self._size:
            raise TaskError("fed.sampler: some ranks of this client have no items: give more items")
        self.position = start
        self.is_counted = False
        """Whether a DataLoader counts what the script gets, and not this what is drawn."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: a script's own count begins anew with each start. For loops that call it."""

    def __len__(self) -> int:
        """Items of a whole epoch."""
        return self._size

    def __iter__(self) -> Iterator[int]:
        if self.position.at >= self._size:
            self.position = self._part.next_epoch(self.position)
        order = self._part.order(self.position.epoch, self._size)
        for number in order[self.position.at :]:
            if not self.is_counted:
                self.count(1)
            yield int(number)

    def count(self, items: int) -> None:
        """So many more items of this epoch have reached the script."""
        at = min(self.position.at + items, self._size)
        self.position = attrs.evolve(self.position, at=at)

    def end_epoch(self) -> None:
        """All of them have, but for those of a batch that was not full and left out."""
        self.count(self._size)


class Positions:
    """The data that a client has given out, of which the first have the position it reports."""

    def __init__(self, context: ClientContext, training: Training) -> None:
        self._context, self._training = context, training
        self._first: Items | PartSampler | None = None
        self._of_workers: Position | None = None  # where workers made their items themselves
        self._in_worker: dict[int, Items] = {}
        self._reported = False
        _listeners[id(self)] = self
        DataLoader.__iter__ = _iterate  # type: ignore[method-assign,assignment]

    def position_in(self, check: int) -> Position:
        """Where this client goes on in the data that `check` stands for.

        That is where its last acknowledged delta ended; the beginning, with a line in the log,
        where that was in other data.
        """
        found = Position.from_facts(self._context.position)
        if found is not None and found.check == check:
            return found
        if found is not None and get_worker_info() is None:
            self._context.log(
                "the data, their division or the tokenizer have changed since this client's last"
                " delta: it begins at the start of its part"
            )
        return Position(check=check)

    def keep_position(self, position: Callable[[], Mapping[str, float]]) -> None:
        """Report the position in the data with every delta, so that a relaunch goes on there.

        position: gives it when a delta is made; see `fsl_async.roles.sync.delta.POSITION`. That
        step raises TaskError for other names, and for values that are no whole numbers.
        """
        self._training.facts["position"] = script_values.facts(
            "fed.keep_position", position, POSITION, only_whole=True
        )

    def items(self, data: Any) -> Items:
        """The items of this rank's part of `data`. Raises TaskError for a part without items."""
        part = Part(self._context, data)
        if part.check in self._in_worker:  # it iterates its data set again
            return self._in_worker[part.check]
        start, is_first = self._start(part.check)
        made = Items(part, start, self._training, listener=id(self) if is_first else 0)
        if get_worker_info() is not None:
            self._in_worker[part.check] = made
        elif is_first:
            self._take_first(made)
        return made

    def sampler(self, data: Any, *, shuffle: bool, whole: bool) -> PartSampler:
        """A sampler of this rank's part of `data`; the same one for the same data."""
        part = Part(self._context, data, shuffle=shuffle, whole=whole)
        known = self._first
        if isinstance(known, PartSampler) and known.position.check == part.check:
            return known
        start, is_first = self._start(part.check)
        made = PartSampler(part, start)
        if is_first:
            self._take_first(made)
        return made

    def trained_to(self, position: Position) -> None:
        """Record that the script has received all items that workers drew before `position`."""
        if self._first is not None and self._first.position.check == position.check:
            self._first.position = position
        elif self._first is not None or not self._is_of_workers(position.check):
            self._report_others()
        else:
            if self._of_workers is None:
                self.position_in(position.check)  # for its line, which workers do not write
                self.keep_position(self._facts)
            self._of_workers = position

    def _start(self, check: int) -> tuple[Position, bool]:
        """Where the data of `check` begin, and whether they are the first."""
        if self._first is not None or not self._is_of_workers(check):
            self._report_others()
            return Position(check=check), False
        return self._of_workers or self.position_in(check), True

    def _is_of_workers(self, check: int) -> bool:
        return self._of_workers is None or self._of_workers.check == check

    def _take_first(self, made: Items | PartSampler) -> None:
        self._first = made
        self.keep_position(self._facts)

    def _facts(self) -> dict[str, float]:
        position = self._of_workers if self._first is None else self._first.position
        assert position is not None
        return position.to_facts()

    def _report_others(self) -> None:
        if not self._reported and get_worker_info() is None:
            self._reported = True
            self._context.log(
                "several data sets were given to fed.shard or fed.sampler: after a relaunch the"
                " first one goes on where it was, and others begin at their start"
            )
