"""Zeroth order: a round's projected gradients from losses alone. Pure functions on weights.

MeZO (Malladi et al., arXiv:2305.17333) with the rounds of DeComFL (Li et al., arXiv:2405.15861),
and central differences:

    g[k,p] = (L(w + mu z[k,p]) - L(w - mu z[k,p])) / (2 mu)
    w <- w + z[k,p] s,   s = fp32(-rate * g[k,p] / P)

The P probes of a step are measured from the same w, and then w moves along each in order. There are
K local steps, each on a batch of its own; the first is from the round's base. Both perturbed copies
are computed from w: adding and subtracting in place leaves rounding errors, and a client that
probed would hold other weights than one that did not. The caller's weights are never written, and
the steps of a round end with it: the next version replaces them.

On the CPU steps are made by `fsl_codecs.add_signs`. For another device the bits are made on the
CPU, one for each coordinate, copied, and unpacked there. A step is one fp32 addition of +s or -s to
each value, without a multiplication, so all devices hold the same bits.

A model is run twice for each direction of a step, on the same batch. Modules that train nothing,
and whose inputs do not depend on what trains, give the same outputs each time: the base below a
head that trains alone, or the blocks below the first with adapters. They are computed once a batch.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.models.forward import evaluating
from fsl_async.store.deltas.seed_step import Directions
from fsl_codecs import add_signs, direction_keys, sign_words


class KeptOutputs:
    """As a context: `model` computes its frozen parts once until `forget`.

    changing: the weights that are set meanwhile, or views of them, whether they require a gradient
    or not: some rules of merging let one factor rest for a round. A module takes part if it has
    weights and none of those. It must be in evaluation mode
    and give the same outputs for the same inputs. Inputs are compared by value, so a module whose
    inputs differ is computed, and from then on nothing of it is kept; so is one whose outputs were
    written to in place. What is kept are the outputs of one batch, not what a backward pass needs.
    """

    def __init__(self, model: nn.Module, changing: Iterable[Tensor]) -> None:
        storages = {_storage(one) for one in changing}
        self._modules = [_Kept(module) for module in _largest(model, storages)]

    def __enter__(self) -> Self:
        for one in self._modules:
            one.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._modules:
            one.end()

    def forget(self) -> None:
        """Forget all outputs: the next batch is another one."""
        for one in self._modules:
            one.forget()


class _Kept:
    """One module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")
        self._forward: Callable[..., Any] = module.forward
        self._varies = False
        self._inputs: Any = None  # as long as nothing is kept
        self._outputs: Any = None
        self._writes: list[int] = []

    def begin(self) -> None:
        self._module.forward = self._call

    def end(self) -> None:
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own

    def forget(self) -> None:
        self._inputs = self._outputs = None

    def _call(self, *given: Any, **named: Any) -> Any:
        if self._varies:
            return self._forward(*given, **named)
        if self._inputs is None:
            self._inputs, self._outputs = (given, named), self._forward(*given, **named)
            self._writes = self._count_writes()
        elif self._writes != self._count_writes() or not _same(self._inputs, (given, named)):
            self._varies = True
            self.forget()
            return self._forward(*given, **named)
        return self._outputs

    def _count_writes(self) -> list[int]:
        return [one._version for one in _tensors((self._inputs, self._outputs))]  # noqa: SLF001


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _largest(module: nn.Module, changing: set[int]) -> Iterator[nn.Module]:
    """The largest modules with weights of which none has one of these storages."""
    has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    own = {_storage(one) for one in (*module.parameters(), *module.buffers())}
    if has_forward and not own & changing:
        if own:
            yield module
        return
    for child in module.children():
        yield from _largest(child, changing)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _same(left: Any, right: Any) -> bool:
    """Whether two values are equal. False for kinds that are not known to be values."""
    if left is right:
        return left is None or isinstance(left, Tensor | bool | int | float | str)
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
            and torch.equal(left, right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return isinstance(left, bool | int | float | str) and left == right


_WORD = 64
_PIECE_WORDS = 1 << 16
"""Words that are unpacked together: four million signs, 16 MiB of terms and 32 MiB of indices."""

Loss = Callable[[Tensor, object], float]
"""The mean loss over a batch at a vector of weights, float32 (values,). It must be the same for the
same batch: dropout off, no statistics updated."""


def measure_round(
    fed: Fed,
    weights: ModelWeights,
    loss: Callable[[Any], float],
    batches: Iterable[object],
    *,
    number: int,
) -> NDArray[np.float32]:
    """Measure the scalars of round `number`, as the run's [tune] table says: float32 (K, P).

    For `fed.end_round`. weights: of the attached model. loss: of a batch at the model's present
    weights; called without gradients, with the model in evaluation mode. batches: K, tune.zo_steps.
    Raises TaskError for weights that are not fp32.
    """
    tune = TuneConfig(**fed.config["tune"])
    directions = Directions(fed.seed, tune.zo_steps, tune.zo_probes, tune.zo_rate)
    with probing(weights) as (base, put):

        def at(vector: Tensor, batch: object) -> float:
            put(vector)
            return loss(batch)

        return probe_round(at, base, batches, directions, number=number, mu=tune.zo_mu)


def probe_round(
    loss: Loss,
    weights: Tensor,
    batches: Iterable[object],
    directions: Directions,
    *,
    number: int,
    mu: float,
) -> NDArray[np.float32]:
    """Return the scalars of round `number`: float32 (K, P).

    weights: the round's base, float32 (values,); it is only read. batches: at least K. mu: the
    distance of a probe from the weights.
    """
    steps, probes = directions.steps, directions.probes
    keys = direction_keys(directions.seed, number, 1, steps, probes).reshape(steps, probes, 1, 2)
    scalars = np.zeros((steps, probes), np.float32)
    distance = np.float32(mu)
    local, probed = weights, torch.empty_like(weights)

    def at(k: int, p: int, step: np.float32, batch: object) -> float:
        probed.copy_(local)
        add_steps(probed, keys[k, p], np.array([step], np.float32))
        return loss(probed, batch)

    for k, batch in zip(range(steps), batches, strict=False):
        for p in range(probes):
            difference = at(k, p, distance, batch) - at(k, p, -distance, batch)
            scalars[k, p] = difference / (2 * float(distance))
        if k + 1 < steps:
            local = weights.clone() if local is weights else local
            step = directions.step(number, scalars[k])
            add_steps(local, keys[k, :, 0], step.scalars.ravel())
    return scalars


@contextmanager
def probing(weights: ModelWeights) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
    """Yield a copy of a model's weights, float32 (values,), and a function that sets them.

    Both are on the model's device. At the end the model has the weights of before, to the bit, and
    its modes of before; in between all of it is in evaluation mode, without gradients. Raises
    TaskError for weights that are not fp32.
    """
    pieces = list(weights.pieces())
    if any(piece.dtype != torch.float32 for piece, _, _ in pieces):
        raise TaskError("zeroth order needs fp32 weights where it trains: steps vanish in others")
    base = torch.empty(weights.layout.values, device=pieces[0][0].device)
    with torch.no_grad():
        for piece, start, stop in pieces:
            base[start:stop].view(piece.shape).copy_(piece)

    def put(vector: Tensor) -> None:
        with torch.no_grad():
            for piece, start, stop in pieces:
                piece.copy_(vector[start:stop].view(piece.shape))

    try:
        with torch.no_grad(), evaluating(weights.module):
            yield base, put
    finally:
        put(base)


def add_steps(values: Tensor, keys: NDArray[np.uint64], steps: NDArray[np.float32]) -> None:
    """Add each step times the signs of its key to `values`, in place, one step after the other.

    values: float32 (n,), contiguous, all coordinates of the run's flat vector. keys: uint64 (steps,
    2). steps: float32 (steps,). See `fsl_codecs.add_signs`.
    """
    assert values.dtype == torch.float32, "a step of zeroth order needs fp32 values"
    if values.device.type == "cpu":
        add_signs(values.detach().numpy(), 0, keys, steps)
        return
    add_unpacked(values, keys, steps)


def add_unpacked(values: Tensor, keys: NDArray[np.uint64], steps: NDArray[np.float32]) -> None:
    """See `add_steps`; with torch's own operations."""
    with torch.no_grad():
        for (seed, stream), step in zip(keys.tolist(), steps.tolist(), strict=True):
            terms = torch.tensor([-step, step], dtype=torch.float32, device=values.device)
            for start in range(0, len(values), _PIECE_WORDS * _WORD):
                part = values[start : start + _PIECE_WORDS * _WORD]
                count = -(-len(part) // _WORD)
                packed = sign_words(seed, stream, start // _WORD, count).astype("<u8", copy=False)
                bits = unpacked(torch.from_numpy(packed.view(np.uint8)).to(values.device))
                part += terms[bits[: len(part)]]


def unpacked(packed: Tensor) -> Tensor:
    """Return the bits of bytes, lowest first: int64 (8 * bytes,), 0 or 1."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).view(-1).long()
