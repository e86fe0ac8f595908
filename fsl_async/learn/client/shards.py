"""The part of a tensor that this process holds: all of it, or the rows of one rank.

A parameter under FSDP2 (`fully_shard`) is a DTensor of placement Shard(0). Of n rows, rank r of w
holds the rows from min(n, r*c) to min(n, r*c + c), with c = ceil(n / w): a contiguous range of the
flat vector, which may be empty. HSDP adds a mesh dimension with Replicate, and each of its rows
holds the whole model. So no gather is needed to copy a model out of its ranks or into them.

After a forward without a backward the root's parameters are plain and complete, in the precision of
the forward, and what is written into the shards is not seen: `reshard` comes before every copy.

Nothing here imports the modules of torch.distributed: a model that uses them has done that.
"""

import sys
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from fsl_async.errors import TaskError

WRAPPED = "_checkpoint_wrapped_module."
"""Activation checkpointing puts it into the names of parameters, but not of state_dict()."""


@frozen
class Local:
    """The part of a tensor that this process holds.

    values: the tensor itself, or the rows of this rank, in place. start: of the first value within
    the tensor, in values. is_copy: whether a lower rank holds the same, so that only that one
    copies it out.
    """

    values: Tensor
    start: int = 0
    is_copy: bool = False


def local_of(name: str, tensor: Tensor) -> Local:
    """Return what this process holds of `tensor`. Raises TaskError for a layout without support."""
    kind = _loaded("torch.distributed.tensor", "DTensor")
    if kind is None or not isinstance(tensor, kind):
        return Local(tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TaskError(
            f"fed.attach: {name} has no part on this rank (pipeline stages and models on some of"
            " the ranks are not supported): start one client for each model"
        )
    values = tensor.to_local()
    sharded = [index for index, one in enumerate(placements) if not one.is_replicate()]
    is_copy = any(at > 0 for index, at in enumerate(coordinate) if index not in sharded)
    if not sharded:
        return Local(values, 0, is_copy)
    dimension = sharded[0]
    placement = placements[dimension]
    if len(sharded) > 1 or type(placement).__name__ != "Shard" or placement.dim != 0:
        raise TaskError(
            f"fed.attach: {name} is laid out as {tuple(placements)}, and only whole tensors and one"
            " Shard(0) are supported: use fully_shard on a mesh of one or two dimensions, without"
            " tensor parallelism"
        )
    rows, width = tensor.shape[0], tensor.numel() // max(1, tensor.shape[0])
    share = -(-rows // mesh.size(dimension))
    first = min(rows, coordinate[dimension] * share)
    expected = min(rows, first + share) - first
    if len(values) != expected:
        raise TaskError(
            f"fed.attach: this rank holds {len(values)} rows of {name}, and {expected} were"
            " expected: shard with fully_shard"
        )
    return Local(values, first * width, is_copy)


def full_of(tensor: Tensor) -> Tensor:
    """Return all values of a tensor; of a DTensor all ranks must call it together."""
    kind = _loaded("torch.distributed.tensor", "DTensor")
    if kind is not None and isinstance(tensor, kind):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel; refuse wrappers without support.

    Raises TaskError.
    """
    parallel = _loaded("torch.nn.parallel", "DistributedDataParallel")
    if parallel is not None and isinstance(module, parallel):
        module = module.module
    old = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if old is not None and any(isinstance(part, old) for part in module.modules()):
        raise TaskError(
            "fed.attach: FullyShardedDataParallel (FSDP1) is not supported: use"
            " torch.distributed.fsdp.fully_shard"
        )
    return module


def reshard(module: nn.Module) -> None:
    """Have every part under FSDP2 hold its shards, which the next copy reads or writes."""
    kind = _loaded("torch.distributed.fsdp", "FSDPModule")
    if kind is not None:
        for part in module.modules():
            if isinstance(part, kind):
                part.reshard()


def plain_name(name: str) -> str:
    """Return a name as in the model without wrappers.

    torch.compile and activation checkpointing add to names; such clients train the same model.
    """
    return name.replace("_orig_mod.", "").replace(WRAPPED, "")


def _loaded(module: str, name: str) -> Any:
    """A class of a module, or None where nothing has imported that: then no object is of it."""
    return getattr(sys.modules.get(module), name, None)
