"""Items of a Hugging Face data set for a training function of one's own: `fed.shard(dataset)`.

A `datasets.Dataset` is dealt out by index and shuffled anew in each epoch; an `IterableDataset` is
divided by `split_dataset_by_node`, and keeps its own order. Either goes on after the last item that
an acknowledged delta has trained. `datasets` is imported where
such an object is given, and so is there already.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any

import attrs

from fsl_async.errors import TaskError
from fsl_async.learn.client.fed_base import FedBase
from fsl_async.learn.data.counter import permutation
from fsl_async.learn.data.packing import Position, check_of


def is_hub_data(data: object) -> bool:
    """Whether `data` is a Dataset or an IterableDataset."""
    return _is_a(data, "Dataset") or _is_a(data, "IterableDataset")


def _is_a(data: object, name: str) -> bool:
    kind = getattr(sys.modules.get("datasets"), name, None)
    return kind is not None and isinstance(data, kind)


def hub_items(fed: FedBase, data: Any) -> Iterator[Any]:
    """The items of this rank's part, epoch after epoch, until the run ends.

    Raises TaskError for a part without items.
    """
    index, count = fed.part
    known = len(data) if _is_a(data, "Dataset") else -1
    if 0 <= known <= index:
        raise TaskError(
            f"fed.shard: {known} items leave none for part {index} of {count}: give more items"
        )
    # All ranks have the position of rank 0, since each step takes an item of each.
    check = check_of("items", known, fed.seed, index // fed.ranks, count)
    made = _indexed if known >= 0 else _streamed
    return made(fed, data, fed.position_in(check))


class _Place:
    """The position after the last item."""

    def __init__(self, fed: FedBase, position: Position) -> None:
        self.position = position
        fed.keep_position(self.facts)

    def facts(self) -> dict[str, float]:
        return self.position.to_facts()

    def next_epoch(self) -> None:
        if not self.position.at:
            raise TaskError("fed.shard: the data set has no items for this part: give more items")
        self.position = attrs.evolve(self.position, epoch=self.position.epoch + 1, at=0)

    def next_item(self) -> None:
        self.position = attrs.evolve(self.position, at=self.position.at + 1)


def _indexed(fed: FedBase, data: Any, start: Position) -> Iterator[Any]:
    index, count = fed.part
    place = _Place(fed, start)
    size = len(range(index, len(data), count))

    def endless() -> Iterator[Any]:
        while True:
            name = f"items/{index}/{count}/{place.position.epoch}"
            for item in permutation(fed.seed, name, size)[place.position.at :].tolist():
                if not fed.running:
                    return
                place.next_item()
                yield data[index + item * count]
            place.next_epoch()

    return endless()


def _streamed(fed: FedBase, data: Any, start: Position) -> Iterator[Any]:
    index, count = fed.part
    mine = import_module("datasets.distributed").split_dataset_by_node(
        data, rank=index, world_size=count
    )
    place = _Place(fed, start)

    def endless() -> Iterator[Any]:
        while True:
            mine.set_epoch(place.position.epoch)
            for item in islice(mine, place.position.at, None):
                if not fed.running:
                    return
                place.next_item()
                yield item
            place.next_epoch()

    return endless()
