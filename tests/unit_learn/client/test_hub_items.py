"""fed.shard of Hugging Face data sets: each item once, and on from an acknowledged delta."""

from collections import Counter
from itertools import islice

import pytest

from fsl_async.errors import TaskError
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.local_fed import LocalFed

datasets = pytest.importorskip("datasets", reason="the extra datasets is not installed")


class Kept(LocalFed):
    """Keeps what a snapshot would have of the position."""

    where = None

    def keep_position(self, position):
        """As `Fed` does."""
        self.where = position


def fed_of(index, count, position=(), **more):
    lines = []
    context = ClientContext(
        "a", shard_index=index, shard_count=count, position=dict(position), log=lines.append, **more
    )
    made = Kept(context)
    made.lines = lines
    return made


def data_of(kind, count=23, first=0, split=None, column="n"):
    if kind == "named":
        made = datasets.IterableDataset.from_generator(lambda: ({column: n} for n in range(count)))
        made._split = split
        return made
    data = datasets.Dataset.from_dict({column: list(range(first, first + count))}, split=split)
    return data if kind == "indexed" else data.to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_a_relaunched_client_goes_on_after_its_last_delta(kind):
    """Two clients, three epochs; after a kill what no delta had is trained again, and only that."""
    for index in range(2):
        whole = [row["n"] for row in islice(fed_of(index, 2).shard(data_of(kind)), 36)]
        size = 12 - index
        assert set(Counter(whole[:size]).values()) == {1}
        trained, position = [], {}
        for steps, lost in ((5, 2), (8, 0), (20, 3), (3, 0)):
            fed = fed_of(index, 2, position)
            drawn = fed.shard(data_of(kind))
            trained += [row["n"] for row in islice(drawn, steps)]
            position = fed.where()
            list(islice(drawn, lost))  # killed before the next delta
        assert trained == whole[:36]
    parts = [{row["n"] for row in islice(fed_of(i, 2).shard(data_of(kind)), 11)} for i in range(2)]
    assert not parts[0] & parts[1]


def test_a_position_of_other_data_begins_anew():
    """And a line reports it."""
    fed = fed_of(0, 1)
    list(islice(fed.shard(data_of("indexed")), 5))
    other = fed_of(0, 1, fed.where())
    first = [row["n"] for row in islice(other.shard(data_of("indexed", 24)), 24)]
    assert sorted(first) == list(range(24))
    assert "have changed since this client's last delta" in other.lines[0]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("indexed", {"first": 1}),
        ("indexed", {"split": "test"}),
        ("named", {"split": "test"}),
        ("streamed", {"column": "m"}),
    ],
)
def test_other_data_of_the_same_kind_begin_at_their_start(kind, change):
    """Where nothing but a name or the rows differ."""
    fed = fed_of(0, 1)
    list(islice(fed.shard(data_of(kind)), 5))
    other = fed_of(0, 1, fed.where())
    next(other.shard(data_of(kind, **change)))
    assert len(other.lines) == 1
    assert other.where()["data_at"] == 1


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_the_position_is_that_of_the_first_data_set(kind):
    """Validation between the steps neither moves the training data nor is moved by them."""
    fed = fed_of(0, 1)
    train = fed.shard(data_of(kind))
    whole = [row["n"] for row in islice(train, 9)]
    list(islice(fed.shard(data_of(kind)), 3))
    again = fed_of(0, 1, fed.where())
    train, checked = again.shard(data_of(kind)), again.shard(data_of(kind))
    beginning = [row["n"] for row in islice(checked, 9)]
    assert beginning == whole
    assert {row["n"] for row in islice(train, 14)}.isdisjoint(whole)
    assert again.where()["data_at"] == 23
    assert again.lines == []


def test_rows_are_compared_as_they_are_stored():
    """A transform with chance in it, or a new function, does not lose the position."""
    chance = iter(range(10**6))
    changing = [
        data_of("indexed").with_transform(lambda rows: {"n": [next(chance)] * len(rows["n"])})
        for _ in range(2)
    ]
    fed = fed_of(0, 1)
    list(islice(fed.shard(changing[0]), 5))
    again = fed_of(0, 1, fed.where())
    next(again.shard(changing[1]))
    assert again.where()["data_at"] == 6


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_a_part_without_items_is_an_error(kind):
    """Not an endless loop."""
    data = data_of(kind, 2)
    data = data if kind == "indexed" else data.filter(lambda row: row["n"] > 5)
    with pytest.raises(TaskError, match="give more items"):
        next(fed_of(3, 4).shard(data))
