"""A model part's exchanged weights as a flat fp32 vector, its whole state as named tensors.

For the wire there is `ModelWeights`: the vector and its manifest, made of every floating point
parameter and buffer. Of a part in which some weights are frozen (LoRA) only those that train are
exchanged, and the buffers: the frozen ones are the same everywhere.

For checkpoints there are dictionaries of named tensors on the CPU, exact in every dtype, ready for
a safetensors file.
"""

from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fsl_async.learn.client.buffers import ModelWeights, exchanged_names
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.models.cuts import CutModel
from fsl_async.learn.models.forward import Batch, call, evaluating
from fsl_async.learn.split.payload import IGNORED
from fsl_async.learn.split.smashed import ModelPartMisused, cross_entropy
from fsl_codecs import new_vector

_PIECE = 1 << 17
"""Values that are averaged at a time: what is wide must not double the memory."""


def export(module: nn.Module) -> Vector:
    """A new flat fp32 vector of what is exchanged."""
    weights = ModelWeights(module)
    out = new_vector(weights.layout.values)
    weights.copy_out(out)
    return out


def load(module: nn.Module, vector: Vector) -> None:
    """Set what is exchanged."""
    weights = ModelWeights(module)
    if vector.shape != (weights.layout.values,):
        raise ModelPartMisused(
            f"{vector.size} values for a part that exchanges {weights.layout.values}"
        )
    weights.copy_in(vector)


def named_state(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the exchanged tensors and integer buffers, on the CPU, by prefix + name.

    Where they are on the CPU already they are no copies.
    """
    state = module.state_dict()
    return {prefix + name: state[name].detach().cpu() for name in exchanged_names(module)}


def prefixed(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put a prefix in front of the names."""
    return {prefix + name: value for name, value in state.items()}


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def load_named(module: nn.Module, prefix: str, state: Mapping[str, Tensor]) -> None:
    """Take back what `named_state` gave. Raises ModelPartMisused when it is another module's."""
    found = under(prefix, state)
    another = f"the saved {prefix.strip('/')} is of another model"
    differing = found.keys() ^ set(exchanged_names(module))
    if differing:
        raise ModelPartMisused(f"{another}: only one of them has {min(differing)}")
    try:
        module.load_state_dict(found, strict=False)
    except RuntimeError as error:
        raise ModelPartMisused(f"{another}: {error}") from error


def average(vectors: Iterable[Vector], shares: Sequence[float]) -> Vector:
    """The mean of vectors weighted by their shares, whatever the shares' sum.

    Summed in double precision and rounded to fp32 once, as the parameter server does
    (docs/adr/0045). Vectors are taken one by one, so they may be made one by one. Batch norm's
    running statistics are averaged like any weight.
    """
    weight = float(sum(shares))
    if not shares or min(shares) < 0 or weight <= 0:
        raise ModelPartMisused("an average needs shares, none negative, not all zero")
    total: npt.NDArray[np.float64] | None = None
    taken = 0
    for vector, share in zip(vectors, shares, strict=False):
        taken += 1
        if total is None:
            total = np.zeros(len(vector), np.float64)
        for start in range(0, len(vector), _PIECE):
            piece = slice(start, start + _PIECE)
            total[piece] += np.multiply(vector[piece], share, dtype=np.float64)
    if total is None or taken != len(shares):
        raise ModelPartMisused(f"an average of {len(shares)} shares needs as many vectors")
    np.divide(total, weight, out=total)
    return total.astype(np.float32)


def parameter_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that train, by name; tied ones once."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def device_of(module: nn.Module) -> torch.device:
    """Where its weights are; the CPU if it has none."""
    for weight in module.parameters():
        return weight.device
    return torch.device("cpu")


@attrs.frozen(slots=True)
class Score:
    """Mean loss, share of right answers, and count of samples (of language models: tokens)."""

    loss: float
    accuracy: float
    count: int


def evaluate(model: CutModel, batches: Iterable[Batch]) -> Score:
    """Loss and accuracy in evaluation mode, each batch moved to the device of each part in turn."""
    parts = [part for part in (model.client, model.server, model.tail) if part is not None]
    summed, right, count = 0.0, 0, 0
    with torch.no_grad(), evaluating(*parts):
        for batch in batches:
            values, lengths = batch.inputs, batch.lengths
            for part in parts:
                device = device_of(part)
                values = call(
                    part, values.to(device), None if lengths is None else lengths.to(device)
                )
            labels = batch.labels.to(values.device)
            counted = labels != IGNORED
            found = int(counted.sum())
            summed += cross_entropy(values, labels).item() * found
            right += int((values.argmax(-1)[counted] == labels[counted]).sum())
            count += found
    return Score(summed / max(count, 1), right / max(count, 1), count)
