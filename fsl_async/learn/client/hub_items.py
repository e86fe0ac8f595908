"""Items of a Hugging Face data set for a training function of one's own: `fed.shard(dataset)`.

A `datasets.Dataset` is dealt out by index and shuffled anew in each epoch; an `IterableDataset` is
divided by `split_dataset_by_node`, and keeps its own order. Either goes on after the last item that
an acknowledged delta has trained, if it is the first that the process has given: a client has one
position. `datasets` is imported where such an object is given, and so is there already.
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

SAMPLED_ROWS = 8
"""Of a Dataset, which tell it from others of its length."""


def is_hub_data(data: object) -> bool:
    """Whether `data` is a Dataset or an IterableDataset."""
    return _is_a(data, "Dataset") or _is_a(data, "IterableDataset")


def _is_a(data: object, name: str) -> bool:
    kind = getattr(sys.modules.get("datasets"), name, None)
    return kind is not None and isinstance(data, kind)


def hub_items(fed: FedBase, data: Any, *, is_first: bool) -> Iterator[Any]:
    """The items of this rank's part, epoch after epoch, until the run ends.

    is_first: whether it goes on at the client's position, and reports its own.
    Raises TaskError for a part without items.
    """
    index, count = fed.part
    known = len(data) if _is_a(data, "Dataset") else -1
    if 0 <= known <= index:
        raise TaskError(
            f"fed.shard: {known} items leave none for part {index} of {count}: give more items"
        )
    # All ranks have the position of rank 0, since each step takes an item of each.
    check = check_of("items", *_identity(data, known), fed.seed, index // fed.ranks, count)
    place = _Place(fed.position_in(check) if is_first else Position(check=check))
    if is_first:
        fed.keep_position(place.facts)
    made = _indexed if known >= 0 else _streamed
    return made(fed, data, place)


def _identity(data: Any, known: int) -> tuple[object, ...]:
    """What tells these data from others, the same on every machine.

    The library's own fingerprint is not: it has the paths and times of local files, and chance
    where a function cannot be hashed. Rows of a stream may come out of a function with chance.
    """
    info, sampled = data.info, ""
    if known > 0:  # as stored: before any set_transform, and images as their bytes
        rows = sorted({(known - 1) * part // (SAMPLED_ROWS - 1) for part in range(SAMPLED_ROWS)})
        sampled = repr(data.with_format("arrow")[rows].to_pylist())
    names = (info.dataset_name, info.builder_name, info.config_name, str(data.split))
    shards = None if known >= 0 else data.num_shards
    return (known, names, shards, data.column_names, sampled)


class _Place:
    """The position after the last item."""

    def __init__(self, position: Position) -> None:
        self.position = position

    def facts(self) -> dict[str, float]:
        return self.position.to_facts()

    def next_epoch(self) -> None:
        if not self.position.at:
            raise TaskError("fed.shard: the data set has no items for this part: give more items")
        self.position = attrs.evolve(self.position, epoch=self.position.epoch + 1, at=0)

    def next_item(self) -> None:
        self.position = attrs.evolve(self.position, at=self.position.at + 1)


def _indexed(fed: FedBase, data: Any, place: _Place) -> Iterator[Any]:
    index, count = fed.part
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


def _streamed(fed: FedBase, data: Any, place: _Place) -> Iterator[Any]:
    index, count = fed.part
    mine = import_module("datasets.distributed").split_dataset_by_node(
        data, rank=index, world_size=count
    )

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
