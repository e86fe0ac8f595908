"""A torch module seen as one flat fp32 vector on the CPU: copy out, copy in, rebase in place.

What is in the vector, in the order of `state_dict()`: first weights, that is every parameter with
`requires_grad`, then buffers, that is every persistent buffer of floating point (a batch norm's
running mean); or what a list of patterns names, whether it trains or not. A complex tensor is two
real numbers for each of its values. What is not: integer and boolean state (batch norm's step
counter), and buffers with persistent=False (tables that are computed again). A tensor that should
be in the vector and cannot be is refused by name.

Weights are moved by differences. Buffers are statistics and constants: the run averages them, and
a rebase takes those of the version as they are (docs/adr/0142). By `exchange.buffers` of the run:

    average   as above
    local     shared once, when a client joins; then each client keeps its own (FedBN, Li et al.,
              arXiv:2102.07623), and versions keep the first ones
    none      not in the vector

Parameters that are neither exchanged nor trained (the base below LoRA adapters), and integer
buffers that are not scalars, must be the same at every client. Their digests are in the manifest,
so the parameter server refuses a client with others (`frozen_of`).

Tied tensors (same storage, offset, shape and strides) count once, under their first name. Tensors
that share memory in any other way are refused, because rebasing one would move the other a second
time.

Where a model is spread over the ranks of a torchrun (FSDP2, HSDP, DDP), each rank sees its own part
of the vector (`shards`): it copies out what no lower rank holds, and copies in all that it holds.
Names, shapes and offsets are those of the plain model.

The vector is fp32 whatever the model's dtype: bf16 and fp16 are widened without loss on the way out
and rounded to nearest even on the way in, fp64 is narrowed. What rounding on the way in has left
out of a narrow weight is kept on the CPU, in fp32, and subtracted on the way out: so a model that
does not train sends zeros, and outer steps below half a unit in the last place add up at the
parameter server. That is one more vector of the model's size, for narrow models only. Arithmetic is
done in fp32 on the model's device, in pieces of at most PIECE_VALUES, so a rebase needs two pieces
of extra memory rather than two models.

Host vectors are pageable. Pinned ones would copy several times faster, but torch's pinned allocator
rounds up to a power of two and the memory is lost to the page cache: a poor trade for one copy
every ten minutes.
"""

import fnmatch
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsl_async.config.settings_training import Buffers
from fsl_async.errors import TaskError, one_line
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.client.shards import (
    WRAPPED,
    full_of,
    local_of,
    plain_name,
    reshard,
    unwrapped,
)
from fsl_async.learn.models.adapters import Exchanged, View, adapter_settings
from fsl_async.learn.models.hf import keep_packed
from fsl_async.learn.models.saving import held_state
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.frozen_tensors import DIGEST_CHARACTERS, form_of, frozen_tensors
from fsl_async.store.model.manifest import Manifest

Saved = tuple[list[Tensor], dict[int, Tensor]]
"""Pieces of a model, and what rounding has added to them."""

PIECE_VALUES = 1 << 24
"""64 MiB in fp32: a copy to a GPU of that size runs at full speed; large models are far larger."""


class ModelWeights:
    """The exchanged state of `module`, which stays the caller's and may go on living where it is.

    Tensors are looked up by name at each use: `module.to(...)` replaces buffers, and a reference
    kept would go stale.

    exchange: patterns of tensor names (`*` stands for any characters), or a View, whose tensors all
    count as weights; None: what trains, and buffers. buffers: `exchange.buffers` of the run.
    checks_frozen: whether frozen weights must be equal at all clients (`tune.base_check`).
    copies_plain: whether this process copies plain tensors out; of the ranks that hold the same
    ones, the first does.

    Raises TaskError where the module has nothing to exchange, tensors that overlap in memory, or a
    layout that is not supported, and for a pattern that no tensor matches.
    """

    def __init__(
        self,
        module: nn.Module,
        exchange: Sequence[str] | View | None = None,
        *,
        buffers: Buffers = "average",
        checks_frozen: bool = True,
        copies_plain: bool = True,
    ) -> None:
        self.module = module = unwrapped(module)
        _check_shapes(module)
        keep_packed(module)
        self.copies_plain = copies_plain
        self._takes_buffers = buffers == "average"
        self._rounding: dict[int, Tensor] = {}
        """Rounding error of narrow weights, fp32 on the CPU, by offset in the vector."""
        reshard(module)
        weights = {name for name, _ in _parameters(module, remove_duplicate=False)}
        if isinstance(exchange, View):
            self._checks_frozen = exchange.checks_frozen
            self._tensors = exchange.tensors
            shapes = _shapes(module, [name for one in self._tensors for name in one.parts])
            weight_count = len(self._tensors)
        else:
            self._checks_frozen = checks_frozen
            names = exchanged_names(module, exchange)
            # Weights first: sorting keeps the order of each kind.
            names.sort(key=lambda name: name not in weights)
            if buffers == "none":
                names = [name for name in names if name in weights]
            shapes = _shapes(module, names)
            self._tensors = tuple(Exchanged(plain_name(name), (name,)) for name in shapes)
            weight_count = sum(name in weights for name in shapes)
        self._names = set(shapes)
        self._settings = () if isinstance(exchange, View) else adapter_settings(module, shapes)
        made = [(one.name, _joined(one, shapes)) for one in self._tensors]
        try:
            self.layout = Manifest.from_shapes(made[:weight_count], made[weight_count:])
            """Names, shapes and offsets; `manifest` without the digest of what is frozen."""
        except ManifestError as error:
            raise TaskError(f"fed.attach cannot exchange this module: {error}") from error

    @cached_property
    def manifest(self) -> Manifest:
        """The layout, and what is frozen; the first use reads the frozen weights."""
        tensors = frozen_of(self.module, self._names) if self._checks_frozen else ()
        return Manifest(self.layout.tensors, frozen_tensors(tensors, self._settings))

    def copy_out(self, out: Vector) -> bool:
        """Write all weights to `out`, fp32 (manifest.values,). Returns whether all are finite.

        Of a model that is spread over ranks, the ranges of this one.
        """
        target = torch.from_numpy(out)
        with torch.no_grad():
            for piece, start, stop in self.pieces(copied_out=True):
                # Widened on the model's own device: copy_ across devices and dtypes at once may
                # convert on the host from a staging tensor that a non-blocking copy has not filled
                # yet.
                target[start:stop].view(piece.shape).copy_(
                    self._widened(piece, start), non_blocking=piece.is_cuda
                )
            self._wait()
        return all(_is_finite(target[start:stop]) for start, stop in self.ranges())

    def ranges(self, *, copied_out: bool = True) -> list[tuple[int, int]]:
        """The ranges of the flat vector that `copy_out` writes, in order, none next to another.

        copied_out: False: those that `copy_in` and `rebase` read.
        """
        ranges: list[tuple[int, int]] = []
        for _, start, stop in self.pieces(copied_out=copied_out):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif start < stop:
                ranges.append((start, stop))
        return ranges

    def take(self, base: Vector) -> None:
        """Set all weights to a version, and buffers where the run averages them."""
        self.copy_in(base, buffers=self._takes_buffers)

    def copy_in(self, vector: Vector, *, buffers: bool = True) -> None:
        """Set all weights to `vector`, fp32 (manifest.values,), and buffers unless told not to."""
        source = torch.from_numpy(vector)
        with torch.no_grad():
            for piece, start, stop in self.pieces():
                if buffers or start < self.layout.weights:
                    self._set(piece, start, source[start:stop].view(piece.shape).to(piece.device))
            self._wait()

    def saved(self) -> Saved:
        """A copy of all weights on the CPU, in their own dtypes, for `restore`."""
        pieces = [piece.to("cpu", copy=True) for piece, _, _ in self.pieces()]
        return pieces, self._rounding.copy()

    def restore(self, saved: Saved) -> None:
        """Set all weights to what `saved` returned."""
        pieces, self._rounding = saved
        with torch.no_grad():
            for (piece, _, _), before in zip(self.pieces(), pieces, strict=True):
                piece.copy_(before)
            self._wait()

    def rebase(self, new: Vector, reference: Vector) -> None:
        """Set weights to new + (weights - reference), in fp32 and in this order of operations.

        Where a weight still equals the reference it becomes `new` to the bit; weights + (new -
        reference) would not. Buffers are set to those of `new` where the run averages them.
        """
        target, origin = torch.from_numpy(new), torch.from_numpy(reference)
        with torch.no_grad():
            for piece, start, stop in self.pieces():
                moved = target[start:stop].view(piece.shape).to(piece.device)
                if start < self.layout.weights:
                    before = origin[start:stop].view(piece.shape).to(piece.device)
                    moved = moved + (self._widened(piece, start) - before)
                elif not self._takes_buffers:
                    continue
                self._set(piece, start, moved)
            self._wait()

    def _widened(self, piece: Tensor, start: int) -> Tensor:
        """A part of the weights as the run counts it: in fp32, without what rounding has added."""
        added = self._rounding.get(start)
        wide = piece.float()
        return wide if added is None else wide - added.to(piece.device).view(piece.shape)

    def _set(self, piece: Tensor, start: int, values: Tensor) -> None:
        """Set a part of the weights to fp32 values, and keep what rounding adds."""
        piece.copy_(values)
        if piece.dtype.itemsize < values.dtype.itemsize and start < self.layout.weights:
            # Exact: the difference of an fp32 number and its neighbor in a narrower format.
            # Flat, for tensors whose memory format changes.
            self._rounding[start] = (piece.float() - values).cpu().flatten()
        else:  # it may have been narrow before
            self._rounding.pop(start, None)

    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite."""
        with torch.no_grad():
            return all(_is_finite(piece) for piece, _, _ in self.pieces())

    def trained_alone(self) -> Iterator[str]:
        """Names of what trains in the model, as it is now, and is not exchanged."""
        live = _named_tensors(self.module)
        keys = {_identity(live[name]) for name in self._names if name in live}
        for name, weight in _parameters(self.module):
            if weight.requires_grad and _identity(weight.detach()) not in keys:
                yield plain_name(name)

    def pieces(self, *, copied_out: bool = False) -> Iterator[tuple[Tensor, int, int]]:
        """(part of a weight, start, stop): flat where it is contiguous, else the whole tensor.

        start, stop: in the flat vector. Of a model under FSDP2, the shards of this rank;
        copied_out: without those that a lower rank copies out.
        """
        reshard(self.module)
        live = _named_tensors(self.module)
        if gone := min(self._names - live.keys(), default=""):
            raise TaskError(
                f"{gone} was in the model at fed.attach and is not any more: add layers, adapters"
                " and wrappers before fed.attach(model)"
            )
        for one, spec in zip(self._tensors, self.layout.tensors, strict=True):
            tensors = {name: _as_real(live[name]) for name in one.parts}
            found = _joined(one, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
            if found != spec.shape:
                raise TaskError(
                    f"{one.name} had shape {spec.shape} at fed.attach and has {found}: attach the"
                    " final model"
                )
            offset = spec.offset
            for tensor in tensors.values():
                local = local_of(one.name, tensor)
                is_plain = local.values is tensor
                if one.is_transposed and not is_plain:
                    raise TaskError(
                        f"fed.attach: {one.name} is exchanged transposed, and its weight is"
                        " sharded: adapters of this rule need a model that is not sharded"
                    )
                is_left_out = not self.copies_plain if is_plain else local.is_copy
                if not (copied_out and is_left_out):
                    values = local.values.t() if one.is_transposed else local.values
                    yield from _pieces_of(values, offset + local.start)
                offset += tensor.numel()

    def _wait(self) -> None:
        for device in {tensor.device for tensor in _named_tensors(self.module).values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def _as_real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: a complex number is two of them, in a last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_same(new: ModelWeights, old: ModelWeights | None) -> None:
    """Raise TaskError where another model than `old` is attached in its place."""
    problem = old and new.manifest.difference(old.manifest)
    if problem:
        raise TaskError(
            f"fed.attach: this is another model than that of the first fed.attach: {problem}; the"
            " tensors of a run are fixed by its first version: start a new run for this one"
        )


def _joined(one: Exchanged, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the parts of a tensor, which follow each other along their first dimension."""
    found = [shapes[name][:: -1 if one.is_transposed else 1] for name in one.parts]
    if len(found) == 1:
        return found[0]
    return (sum(shape[0] for shape in found), *found[0][1:])


def _pieces_of(tensor: Tensor, offset: int) -> Iterator[tuple[Tensor, int, int]]:
    values = tensor.numel()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, values, PIECE_VALUES):
            stop = min(start + PIECE_VALUES, values)
            yield flat[start:stop], offset + start, offset + stop
    else:
        yield tensor, offset, offset + values


def _is_finite(values: Tensor) -> bool:
    """One pass without a temporary: minimum and maximum are NaN where any value is."""
    if not values.numel():
        return True
    if values.dtype.itemsize == 1:  # torch compares no numbers of 8 bits
        values = values.float()
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that the module computes with, by name, unlike the values of state_dict()."""
    weights = _parameters(module, remove_duplicate=False)
    tensors: dict[str, Tensor] = {name: weight.detach() for name, weight in weights}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        tensors[name.replace(WRAPPED, "")] = buffer
    return tensors


def _parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by their names in state_dict()."""
    for name, weight in module.named_parameters(remove_duplicate=remove_duplicate):
        yield name.replace(WRAPPED, ""), weight


def exchanged_names(module: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Return the names of `held_state(module)` that are exchanged; see the top of this file.

    With tied names; integer state too where nothing excludes it. Raises TaskError for patterns that
    are no list of text, and for one that no name matches.
    """
    live = _named_tensors(module)
    # Others, such as the scales of a quantized weight, are neither parameters nor buffers.
    names = [name for name in held_state(module) if name in live]
    if patterns is None:
        weights = _parameters(module, remove_duplicate=False)
        frozen = {name for name, weight in weights if not weight.requires_grad}
        return [name for name in names if name not in frozen]
    if isinstance(patterns, str) or not patterns:
        raise TaskError('fed.attach: exchange must be a list of patterns, such as ["encoder.*"]')
    found: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(plain_name(name), pattern)]
        if not matched:
            raise TaskError(f"fed.attach: no tensor of the model matches {pattern!r}")
        found.update(matched)
    return [name for name in names if name in found]


def frozen_of(module: nn.Module, exchanged: set[str]) -> list[tuple[str, str, str]]:
    """Return (name, form, digest) of the tensors that must be equal at all clients.

    That is every parameter that neither trains nor is exchanged, and every persistent buffer of
    integers with at least one dimension (a scalar is a counter of batch norm). Of a quantized base
    the packed weights count, not their scales, which bitsandbytes may round again. Floating point
    buffers that a list of patterns leaves out are the client's own.

    Floating point values count as fp32, so a base that is stored in bf16 may be loaded as bf16 at
    one client and as fp32 at another. On the meta device values are left out. Raises TaskError for
    a tensor that cannot be read.
    """
    listed = held_state(module)  # first: it puts packed weights of bitsandbytes into their order
    live = _named_tensors(module)
    keys = {_identity(_as_real(live[name])) for name in exchanged}
    frozen = [
        (name, weight.detach())
        for name, weight in _parameters(module)
        if not weight.requires_grad and _identity(_as_real(weight.detach())) not in keys
    ]
    frozen += [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if name in listed and buffer.dim()
        if not (buffer.is_floating_point() or buffer.is_complex())
    ]
    return [
        (plain_name(name), form_of(str(weight.dtype), weight.shape), _digest_of(name, weight))
        for name, weight in frozen
    ]


def _digest_of(name: str, weight: Tensor) -> str:
    found = hashlib.sha256(f"{plain_name(name)} {tuple(weight.shape)}\n".encode())
    try:
        if not weight.is_meta:
            _hash_values(found, full_of(weight))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise TaskError(
            f"fed.attach cannot read the frozen {name}: {one_line(str(error))}"
        ) from error
    return found.hexdigest()[:DIGEST_CHARACTERS]


def _hash_values(found: Any, weight: Tensor) -> None:
    flat = weight.reshape(-1)
    for start in range(0, len(flat), PIECE_VALUES):
        piece = flat[start : start + PIECE_VALUES]
        values = piece.float() if piece.is_floating_point() else piece
        found.update(values.resolve_neg().cpu().contiguous().view(torch.uint8).numpy().data)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Identify a tensor by its storage and layout; data_ptr() is 0 for all tensors on "meta"."""
    local = local_of("a tensor", tensor).values
    if local.layout is not torch.strided:
        return (id(local),)
    storage = local.untyped_storage()._cdata  # noqa: SLF001
    offset = int(local.storage_offset())
    return (storage, tuple(tensor.shape), offset, tuple(local.shape), local.stride())


def _shapes(module: nn.Module, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the distinct tensors of these names that hold numbers, as real numbers.

    Raises TaskError for tensors that overlap in memory, or cannot be exchanged.
    """
    live = _named_tensors(module)
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[tuple[object, ...]] = set()
    used: dict[int, list[tuple[int, int, str]]] = {}  # by storage: first, last + 1, name
    for name in names:
        tensor = live[name]
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized):
            continue
        _check_tensor(name, tensor)
        real = _as_real(tensor)
        key, local = _identity(real), local_of(name, real).values
        if key in seen:
            continue
        seen.add(key)
        shapes[name] = tuple(real.shape)
        if not local.numel():
            continue
        first = int(local.storage_offset())
        steps = zip(local.shape, local.stride(), strict=True)
        end = first + sum((int(size) - 1) * int(stride) for size, stride in steps) + 1
        others = used.setdefault(local.untyped_storage()._cdata, [])  # noqa: SLF001
        for other_first, other_end, other in others:
            if first < other_end and other_first < end:
                raise TaskError(
                    f"{other} and {name} share memory with different shapes: clone one before"
                    " fed.attach"
                )
        others.append((first, end, name))
    return shapes


def _check_shapes(module: nn.Module) -> None:
    """Raise TaskError for lazy modules that have seen no batch."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise TaskError(
                f"fed.attach cannot exchange this module: {name} has no shape yet: run the model on"
                " one batch first"
            )


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Raise TaskError for a tensor that cannot be read and written value by value."""
    problem = ""
    if tensor.is_quantized:
        problem = "is quantized: give exchange=[...] without it, or dequantize it"
    elif tensor.layout is not torch.strided:
        problem = f"is {str(tensor.layout).removeprefix('torch.')}: make it dense, with to_dense()"
    elif tensor.is_conj():
        problem = "is conjugated: give it values of its own, with resolve_conj()"
    elif any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        problem = "repeats its values in memory (expand): give it memory of its own, with clone()"
    if problem:
        raise TaskError(f"fed.attach cannot exchange this module: {name} {problem}")
