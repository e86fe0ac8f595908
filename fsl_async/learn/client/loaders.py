"""Tells what a DataLoader has handed to the script from what its workers have read ahead.

A DataLoader with workers reads several batches ahead, so neither a sampler nor a data set knows
which of them the script has. `watch` replaces `DataLoader.__iter__`: iterators of loaders with a
sampler of `fed.sampler`, or with workers that draw from `fed.shard`, count each batch as the script
gets it. A worker puts the position after a batch beside it (`Mark`), and the process that trains
takes it off again. Other loaders are left as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from torch.utils.data import DataLoader, IterableDataset

from fsl_async.learn.data.packing import Position

_plain_iter = DataLoader.__iter__


@attrs.frozen
class Mark:
    """A worker has drawn its items before `following`, of those that begin at `start`.

    listener: the id of what is called (`watch`); workers inherit it. first: of each worker, the
    first item.
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


_listeners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By id: objects whose `trained_to` is called with positions that workers have marked."""
_batch = 1
"""Items of a batch of the loader whose workers were started last. They inherit it."""
_mark: Mark | None = None
"""In a worker: of the last item that it has drawn."""


def watch(listener: Any) -> None:
    """Call `listener.trained_to(position)` when batches of workers reach the script."""
    _listeners[id(listener)] = listener
    DataLoader.__iter__ = _iterate  # type: ignore[method-assign,assignment]


def batch_of_worker() -> int:
    """How many items a batch of this worker's loader has."""
    return _batch


def mark_worker(mark: Mark) -> None:
    """In a worker: the item that is given next is the one before `mark.following`."""
    global _mark  # noqa: PLW0603 - a worker has one loader
    _mark = mark


class _Collate:
    """Collates a batch in a worker, and adds its mark.

    Where the script is, it keeps what the loader's workers have left to give.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._start: Position | None = None
        self._following: list[Position] = []

    def __call__(self, items: Any) -> Any:
        batch = self.collate(items)
        return batch if _mark is None else _Marked(batch, _mark)

    def received(self, mark: Mark) -> Position:
        """Up to where all items have been received."""
        if mark.start != self._start:
            self._start, self._following = mark.start, list(mark.first)
        self._following[mark.worker] = mark.following
        return min(self._following, key=lambda one: (one.epoch, one.at))


def _iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    from fsl_async.learn.client.items import PartSampler

    global _batch  # noqa: PLW0603 - inherited by the workers that are started here
    if isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers:
            return _plain_iter(loader)
        _batch = loader.batch_size or 1
        if not isinstance(loader.collate_fn, _Collate):
            loader.collate_fn = _Collate(loader.collate_fn)
        collate = loader.collate_fn
        return _Received(_plain_iter(loader), lambda batch: _unmarked(batch, collate))
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


def _unmarked(batch: Any, collate: _Collate) -> Any:
    """Take a mark off, and tell its listener."""
    if not isinstance(batch, _Marked):
        return batch
    position = collate.received(batch.mark)
    listener = _listeners.get(batch.mark.listener)
    if listener is not None:
        listener.trained_to(position)
    return batch.batch
