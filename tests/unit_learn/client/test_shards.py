"""What one rank holds of a model, by the layout of its tensors; without other ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.shards import local_of


@pytest.fixture
def ranks():
    """Be one rank of several; collectives do nothing."""

    def be(rank, world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield be
    dist.destroy_process_group()


def tensor(mesh, placements, rows, shape):
    """A DTensor whose local part has so many rows."""
    whole = torch.empty(shape)
    local = torch.zeros(rows, *shape[1:])
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize(("rank", "rows", "start"), [(0, 2, 0), (1, 2, 2), (2, 1, 4), (3, 0, 5)])
def test_shards_are_contiguous_ranges(ranks, rank, rows, start):
    """Of 5 rows on 4 ranks: 2, 2, 1 and none."""
    ranks(rank, 4)
    mesh = init_device_mesh("cpu", (4,))
    found = local_of("w", tensor(mesh, [Shard(0)], rows, (5, 5)))
    assert (tuple(found.values.shape), found.start, found.is_copy) == ((rows, 5), 5 * start, False)
    with pytest.raises(TaskError, match="rows of w"):
        local_of("w", tensor(mesh, [Shard(0)], rows + 1, (5, 5)))


@pytest.mark.parametrize("rank", range(4))
def test_the_first_replica_copies_out(ranks, rank):
    """HSDP: each row of the mesh holds the whole model."""
    ranks(rank, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    found = local_of("w", tensor(mesh, [Replicate(), Shard(0)], 2, (4, 3)))
    assert (found.start, found.is_copy) == (6 * (rank % 2), rank >= 2)


def test_other_layouts_are_refused(ranks):
    """One line names the tensor, the layout, and what to use."""
    ranks(0, 4)
    mesh = init_device_mesh("cpu", (4,))
    for placement in (Partial(), Shard(1), _StridedShard(0, split_factor=2)):
        with pytest.raises(TaskError, match=r"fed.attach: w is laid out as .* use fully_shard"):
            local_of("w", tensor(mesh, [placement], 8, (8, 8)))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(TaskError, match="laid out"):
        local_of("w", tensor(two, [Shard(0), Shard(0)], 2, (8, 8)))


def test_plain_tensors_are_copied_out_by_one(ranks):
    """A rank that copies nothing out has no ranges, and copies all in."""
    ranks(1, 2)
    model = nn.Linear(3, 2)
    weights = ModelWeights(model, copies_plain=False)
    assert weights.ranges() == []
    assert sum(stop - start for _, start, stop in weights.pieces()) == 8
    assert ModelWeights(model).ranges() == [(0, 8)]


def test_names_are_those_of_the_plain_model(ranks):
    """Of DDP, and of activation checkpointing, which names parameters unlike state_dict()."""
    ranks(0, 1)
    plain = ModelWeights(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))).manifest
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 2)), nn.Linear(2, 1))
    assert ModelWeights(model).manifest == plain
    parallel = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    assert ModelWeights(parallel).manifest == plain
