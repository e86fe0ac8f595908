"""Keeps the models of clients that do not run as vectors in files.

A client's tensors are the trained parameters of the module that it attached, their gradients, and
the state of the optimizers that stepped in its thread. Where more clients than `limit` hold theirs,
the content of those that ran longest ago moves to one file each, and its memory is given back;
before a client runs, its content is back to the bit. The tensors stay the same objects. Others stay
where they are: frozen weights and buffers, which clients may share, data that the function keeps,
and memory that is not torch's alone (`torch.from_numpy`, `.numpy()`, mapped, shared, of a GPU).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import field, mutable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


@mutable(eq=False)
class Model:
    """The tensors of one client. file: where their content is while it is out."""

    file: Path
    module: nn.Module | None = None
    optimizers: weakref.WeakSet[Optimizer] = field(factory=weakref.WeakSet)
    moved: list[tuple[torch.UntypedStorage, int]] = field(factory=list)
    """Memory that is out, and its bytes."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that can move."""
        if self.module is not None:
            for one in self.module.parameters():
                if one.requires_grad:
                    yield one
                if one.grad is not None:
                    yield one.grad
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (one for one in state.values() if isinstance(one, Tensor))

    def move_out(self) -> None:
        """Write the content to the file, and give its memory back."""
        found = {}
        for tensor in self.tensors():
            if tensor.layout is torch.strided and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.resizable() and not storage.is_shared():
                    found[storage.data_ptr()] = storage
        self.moved = [(storage, storage.nbytes()) for storage in found.values()]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for (storage, _), place in self._places():
            place.copy_(_bytes_of(storage))
            storage.resize_(0)

    def move_in(self) -> None:
        """Bring the content back."""
        for (storage, size), place in self._places():
            storage.resize_(size)
            _bytes_of(storage).copy_(place)
        self.moved = []

    def _places(self) -> Iterator[tuple[tuple[torch.UntypedStorage, int], Tensor]]:
        """Yield each memory that moves, and its place in the file, uint8 (bytes,)."""
        sizes = [size for _, size in self.moved]
        if sizes:
            content = torch.from_file(
                str(self.file), shared=True, size=sum(sizes), dtype=torch.uint8
            )
            parts = content.split(sizes)  # type: ignore[no-untyped-call]
            yield from zip(self.moved, parts, strict=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Residents:
    """The models of all clients. limit: of those that are in place; None: all of them."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.limit = limit
        self._folder = folder
        self._models: dict[str, Model] = {}
        self._inside: dict[str, Model] = {}
        """Models in place, from the one that ran longest ago."""
        self._running: Model | None = None
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def attached(self, module: nn.Module) -> None:
        """Take the module that the running client has attached."""
        assert self._running is not None, "a client attaches while it runs"
        self._running.module = module

    def enter(self, name: str) -> None:
        """Bring a client's model in place, before it runs."""
        model = self._models.setdefault(name, Model(self._folder / name / "model"))
        self._running = model
        self._inside.pop(name, None)
        self._inside[name] = model
        while self.limit is not None and len(self._inside) > self.limit:
            self._inside.pop(next(iter(self._inside))).move_out()
        model.move_in()

    def forget(self, name: str) -> None:
        """Forget a client's process that has ended."""
        self._models.pop(name, None)
        self._inside.pop(name, None)

    def close(self) -> None:
        """Look at optimizers no longer."""
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._running is not None:
            self._running.optimizers.add(optimizer)
