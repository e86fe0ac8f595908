"""fed.shard and fed.sampler: each item once, and on from an acknowledged delta.

Of lists, of Hugging Face data sets, and in the workers of a DataLoader.
"""

from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fsl_async.errors import TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed

datasets = pytest.importorskip("datasets", reason="the extra datasets is not installed")


class Kept(LocalFed):
    """A client of which a snapshot's position is looked at."""

    @property
    def where(self):
        """Gives the position that a snapshot would have."""
        return self._own_training.facts.get("position")


def fed_of(index, count, position=(), **more):
    lines = []
    context = ClientContext(
        "a", shard_index=index, shard_count=count, position=dict(position), log=lines.append, **more
    )
    made = Kept(context)
    made.lines = lines
    return made


def data_of(kind, count=23, first=0, split=None, column="n"):
    if kind == "list":
        return [{column: first + n} for n in range(count)]
    if kind == "named":
        made = datasets.IterableDataset.from_generator(lambda: ({column: n} for n in range(count)))
        made._split = split
        return made
    data = datasets.Dataset.from_dict({column: list(range(first, first + count))}, split=split)
    return data if kind == "indexed" else data.to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize("kind", ["list", "indexed", "streamed"])
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


def by_chance(data):
    """A transform that is another function in each process, with chance in it."""
    return data.with_transform(lambda rows: {"n": [id(rows)] * len(rows["n"])})


@pytest.mark.parametrize(
    ("kind", "change", "is_other"),
    [
        ("indexed", {"first": 1}, True),
        ("indexed", {"split": "test"}, True),
        ("named", {"split": "test"}, True),
        ("streamed", {"column": "m"}, True),
        ("indexed", {}, False),  # rows are compared as they are stored
    ],
)
def test_other_data_of_the_same_kind_begin_at_their_start(kind, change, is_other):
    """Where nothing but a name or the rows differ."""
    made = data_of if is_other else lambda *kind, **change: by_chance(data_of(*kind, **change))
    fed = fed_of(0, 1)
    list(islice(fed.shard(made(kind)), 5))
    other = fed_of(0, 1, fed.where())
    next(other.shard(made(kind, **change)))
    assert len(other.lines) == is_other
    assert other.where()["data_at"] == (1 if is_other else 6)


@pytest.mark.parametrize("kind", ["list", "indexed", "streamed"])
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
    assert [line.partition(":")[0] for line in again.lines] == [
        "several data sets were given to fed.shard or fed.sampler"
    ]


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_a_part_without_items_is_an_error(kind):
    """Not an endless loop."""
    data = data_of(kind, 2)
    data = data if kind == "indexed" else data.filter(lambda row: row["n"] > 5)
    with pytest.raises(TaskError, match="give more items"):
        next(fed_of(3, 4).shard(data))


class Mine(IterableDataset):
    """A data set of the script's own around fed.shard; some of its items are two rows."""

    def __init__(self, fed, data, longest=1):
        self.fed, self.data, self.longest = fed, data, longest

    def __iter__(self):
        rows = self.fed.shard(self.data)
        for row in rows:
            for _ in range(row["n"] % self.longest):
                next(rows)
            yield row["n"]


def rows_of(batch):
    """Numbers of the rows in a batch."""
    return (batch["n"] if isinstance(batch, dict) else batch).tolist()


forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@forks
@pytest.mark.parametrize("kind", ["list", "indexed", "streamed"])
@pytest.mark.parametrize("makes", [lambda fed, data: fed.shard(data), Mine], ids=["shard", "mine"])
def test_workers_divide_the_part_and_the_position_is_what_the_script_has(kind, makes):
    """Each worker would give all rows, and a relaunch leave out what they had read ahead."""
    whole = [row["n"] for row in islice(fed_of(1, 2).shard(data_of(kind)), 33)]
    trained, position = [], {}
    for batches in (1, 4, 6):
        fed = fed_of(1, 2, position)
        loader = DataLoader(makes(fed, data_of(kind)), batch_size=3, num_workers=2)
        for batch in islice(loader, batches):
            trained += rows_of(batch)
        position = fed.where()
        assert fed.lines == []
    assert trained == whole


class Windows(IterableDataset):
    """Text, drawn in a data set of the script's own."""

    def __init__(self, fed, path):
        self.fed, self.path = fed, path

    def __iter__(self):
        return self.fed.shard(self.path, context=8, batch=4)


@forks
def test_workers_draw_different_windows_of_text(tmp_path):
    """Each would draw the same ones."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    loader = DataLoader(Windows(fed_of(0, 1), tmp_path / "text"), batch_size=None, num_workers=2)
    first, second = islice(loader, 2)
    assert not torch.equal(first, second)


@forks
def test_workers_that_need_several_rows_for_an_item_leave_none_out():
    """They are not equally far: what one has not reached is trained after a relaunch."""
    fed = fed_of(0, 1)
    loader = DataLoader(Mine(fed, data_of("list", 500), longest=3), batch_size=4, num_workers=2)
    seen = {row for batch in islice(loader, 25) for row in rows_of(batch)}
    order = [row["n"] for row in islice(fed_of(0, 1).shard(data_of("list", 500)), 500)]
    done = set(order[: int(fed.where()["data_at"])])
    assert len(done) > 150
    # A row is seen, or was taken together with the one before, which is.
    again = fed_of(0, 1, fed.where())
    rest = {row["n"] for row in islice(again.shard(data_of("list", 500)), 500 - len(done))}
    assert not done & rest
    assert len(seen - rest) > 80


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_goes_on_after_the_last_batch_that_the_script_has(workers):
    """Two clients, epochs of which some are left in the middle, a relaunch in each."""
    data = torch.arange(23)
    parts = []
    for index in range(2):
        epochs, position = [], {}
        for left_after in (2, 4, 1, None):
            fed = fed_of(index, 2, position)
            loader = DataLoader(data, batch_size=2, sampler=fed.sampler(data), num_workers=workers)
            epochs.append([row for batch in islice(loader, left_after) for row in batch.tolist()])
            assert fed.sampler(data) is loader.sampler
            position = fed.where()
        size = 12 - index
        assert len(loader.sampler) == size
        first = epochs[0] + epochs[1]
        assert len(set(first)) == len(first) == min(12, size)
        second = epochs[2] + epochs[3]
        assert set(second) == set(first)
        assert second != first
        third = [row for batch in loader for row in batch.tolist()]  # the process goes on
        assert set(third) == set(first)
        parts.append(set(first))
    assert not parts[0] & parts[1]


def test_an_epoch_ends_where_its_last_batch_is_left_out():
    """With drop_last the rest of an epoch would be an epoch without batches, for ever."""
    fed = fed_of(0, 1)
    loader = DataLoader(range(10), batch_size=4, sampler=fed.sampler(range(10)), drop_last=True)
    assert [len(list(loader)) for _ in range(3)] == [2, 2, 2]
    assert [row for batch in loader.sampler for row in [batch]]  # without a loader it counts too
    assert fed.where()["data_epoch"] == 3


def test_ranks_have_equally_many_items_in_an_epoch():
    """A rank with one more batch would wait for the others for ever."""
    ranks = [fed_of(0, 2, rank=rank, ranks=3) for rank in range(3)]
    drawn = [list(fed.sampler(range(14), shuffle=False)) for fed in ranks]
    assert drawn == [[0, 6], [1, 7], [2, 8]]


def test_fed_in_another_process_is_one_line():
    """Not a traceback about a lock that cannot be pickled."""
    data = Mine(fed_of(0, 1), [1, 2])
    with pytest.raises(TaskError, match=r"fed\.sampler"):
        next(iter(DataLoader(data, num_workers=1, multiprocessing_context="spawn")))
