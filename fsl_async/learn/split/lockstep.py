"""Evaluates the parts of a cut model in one process, one after the other."""

from collections.abc import Iterable

import attrs
import torch

from fsl_async.learn.models.cuts import CutModel
from fsl_async.learn.models.forward import Batch, call, evaluating
from fsl_async.learn.split import weights
from fsl_async.learn.split.smashed import IGNORED, Loss, cross_entropy


@attrs.frozen(slots=True)
class Score:
    """Mean loss, share of right answers, and count of samples (of language models: tokens)."""

    loss: float
    accuracy: float
    count: int


def evaluate(model: CutModel, batches: Iterable[Batch], loss: Loss = cross_entropy) -> Score:
    """Loss and accuracy in evaluation mode, each batch moved to the device of each part in turn."""
    parts = [part for part in (model.client, model.server, model.tail) if part is not None]
    summed, right, count = 0.0, 0, 0
    with torch.no_grad(), evaluating(*parts):
        for batch in batches:
            values, lengths = batch.inputs, batch.lengths
            for part in parts:
                device = weights.device_of(part)
                values = call(
                    part, values.to(device), None if lengths is None else lengths.to(device)
                )
            labels = batch.labels.to(values.device)
            counted = labels != IGNORED
            found = int(counted.sum())
            summed += loss(values, labels).item() * found
            right += int((values.argmax(-1)[counted] == labels[counted]).sum())
            count += found
    return Score(summed / max(count, 1), right / max(count, 1), count)
