"""Data that goes through a model that is cut in two: smashed data, and the loss.

A loss is a function (outputs, labels) -> scalar that is a *mean* over what counts in the batch. The
built-in one is cross entropy over the last dimension; positions whose label is IGNORED count
neither in the sum nor in the mean. For language models, labels are the next tokens already:
labels[b, t] is what outputs[b, t] should predict.
"""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from fsl_async.learn.split.payload import IGNORED, Payload, valid_rows
from fsl_async.store.errors import LearnError


class SmashedRefused(LearnError):  # noqa: N818 - named after what happened, like FrameRefused
    """Data of a peer cannot be trained on and has changed nothing. The sender is at fault."""


class ModelPartMisused(LearnError):  # noqa: N818
    """A model part was used in the wrong order or with the wrong shapes. This node is at fault."""


Loss = Callable[[Tensor, Tensor], Tensor]


@attrs.frozen(slots=True, eq=False)
class Smashed:
    """The data that a client sends of a batch.

    Activations at the cut (detached), labels unless they stay at home, lengths.
    """

    values: Tensor
    labels: Tensor | None
    lengths: Tensor | None = None

    @property
    def samples(self) -> int:
        """Size of the first dimension."""
        return self.values.shape[0]

    def to(self, device: torch.device) -> "Smashed":
        """The same on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def part(self, start: int, stop: int) -> "Smashed":
        """Samples start ... stop - 1, as views."""
        return self._each(lambda tensor: tensor[start:stop])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Smashed":
        rest = (None if one is None else change(one) for one in (self.labels, self.lengths))
        return Smashed(change(self.values), *rest)


def payload_of(values: Tensor, lengths: Tensor | None, labels: bytes = b"") -> Payload:
    """Return values as they travel: a copy, without padding and without the step's graph."""
    found = values.detach().float().cpu().numpy()
    sizes = () if lengths is None else tuple(int(each) for each in lengths)
    rows = np.array(valid_rows(found, sizes) if sizes else found)
    return Payload(rows.reshape(-1), rows.shape, labels, sizes)


def cross_entropy(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean over labels that are not IGNORED.

    outputs (..., classes) of any float dtype, labels int64 (...). smoothing: share of a label that
    is spread over all classes (Szegedy et al., arXiv:1512.00567).
    """
    return F.cross_entropy(
        outputs.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )


def joined(parts: Sequence[Smashed]) -> Smashed:
    """One batch of several.

    Shorter sequences are padded with zeros and IGNORED labels, and then lengths are given.
    """
    values = [part.values for part in parts]
    labels = [part.labels for part in parts if part.labels is not None]
    if len(labels) != len(parts):
        raise SmashedRefused("activations without labels cannot be aligned to")
    longest = max(each.shape[1] for each in values) if values[0].dim() == 3 else 0
    ragged = any(part.lengths is not None for part in parts) or (
        longest and any(each.shape[1] != longest for each in values)
    )
    if not ragged:
        return Smashed(torch.cat(values), torch.cat(labels))
    lengths = [
        torch.full((part.samples,), part.values.shape[1], device=part.values.device)
        if part.lengths is None
        else part.lengths
        for part in parts
    ]
    values = [F.pad(each, (0, 0, 0, longest - each.shape[1])) for each in values]
    labels = [F.pad(each, (0, longest - each.shape[1]), value=IGNORED) for each in labels]
    return Smashed(torch.cat(values), torch.cat(labels), torch.cat(lengths))


def check_smashed(smashed: Smashed, shape: tuple[int, ...] | None, classes: int | None) -> None:
    """Refuse what would poison a split server's model or make a GPU stop.

    Raises SmashedRefused, in one line.

    `shape`: activations of one sample, -1 where any size will do. `classes`: labels lie in [0,
    classes) or are IGNORED.
    """
    values, labels, lengths = smashed.values, smashed.labels, smashed.lengths
    found = tuple(values.shape[1:])
    if shape is not None and (
        len(found) != len(shape) or any(b not in (-1, a) for a, b in zip(found, shape, strict=True))
    ):
        raise SmashedRefused(f"activations have shape {found} per sample, the cut has {shape}")
    if not values.shape[0] or not bool(torch.isfinite(values).all()):
        raise SmashedRefused("activations are empty or not finite")
    if labels is not None:
        if labels.shape[0] != values.shape[0]:
            raise SmashedRefused(f"{labels.shape[0]} labels for {values.shape[0]} samples")
        if classes is not None and (
            labels.dtype != torch.int64
            or bool(((labels < 0) & (labels != IGNORED) | (labels >= classes)).any())
        ):
            raise SmashedRefused(f"labels must be int64 in 0 ... {classes - 1}, or {IGNORED}")
    if lengths is not None and (
        values.dim() != 3
        or lengths.shape != values.shape[:1]
        or bool(((lengths < 1) | (lengths > values.shape[1])).any())
    ):
        raise SmashedRefused(f"lengths must be one per sample, in 1 ... {found[0] if found else 0}")
