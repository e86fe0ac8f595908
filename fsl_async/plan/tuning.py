"""What a client sends and receives in a round of fine-tuning. Pure.

    lora     up: adapters and full modules, in the run's format; down: the same
    zeroth   up: steps x probes numbers of 4 bytes; down: the same

An adapted layer of `inputs` and `outputs` exchanges rank x (inputs + outputs) values, with ffa
those of B alone; fedex and flora also have a dense matrix of each layer
(`fsl_async.store.adapters`). Zeros in a delta (rows beyond a site's rank, the factor that rests in
a round of rolora) cost about a bit each, coded.

Methods: Hu et al., LoRA, arXiv:2106.09685; Li et al., DeComFL, arXiv:2405.15861.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from fsl_async.accounting.sizes import (
    Accounting,
    Category,
    Direction,
    Kind,
    ModelShapes,
    Part,
    Size,
)
from fsl_async.plan.methods import (
    PRETRAIN_WAITS,
    Flow,
    PlannedMethod,
    Workload,
    both_ways,
    frozen_part,
)
from fsl_async.plan.methods import trained as memory_of_trained

TUNED = ("lora", "zeroth")
"""Methods whose row depends on the run's adapters."""
ROUND_WAITS = PRETRAIN_WAITS - 1
"""By rounds a version is sent with its announcement."""
SCALAR_BYTES = 4


class Linear(Protocol):
    """A linear layer of a base model."""

    @property
    def inputs(self) -> int:
        """Values that it takes."""

    @property
    def outputs(self) -> int:
        """Values that it gives."""


@frozen
class Exchanged:
    """Values of a round of adapters.

    whole: of a version, and of the frames of a delta. trained: that a client trains in a round, on
    average; the others of its delta are zeros.
    """

    whole: int
    trained: int


def adapter_values(
    layers: Sequence[Linear], rule: str, *, rank: int, site_rank: int, full: int
) -> Exchanged:
    """Values that are exchanged for these adapted layers.

    rank: of the run's adapters. site_rank: of this site's. full: values of modules that train
    whole.
    """
    inputs = sum(layer.inputs for layer in layers)
    outputs = sum(layer.outputs for layer in layers)
    both = rank * (inputs + outputs) + full
    if rule == "ffa":
        return Exchanged(rank * outputs + full, site_rank * outputs + full)
    if rule == "rolora":  # A and B in turns
        return Exchanged(both, site_rank * (inputs + outputs) // 2 + full)
    if rule == "fedsvd":
        return Exchanged(both, site_rank * outputs + full)
    if rule in {"fedex", "flora"}:
        both += sum(layer.inputs * layer.outputs for layer in layers)
    return Exchanged(both, site_rank * (inputs + outputs) + full)


def adapter_shapes(name: str, exchanged: Exchanged, parameters: int) -> ModelShapes:
    """Shapes of a base with adapters. parameters: of the base.

    client: the base, frozen, with its adapters. whole: the base, all of which trains. Activations
    are not counted: they depend on the architecture and the length of samples.
    """
    trained = exchanged.trained
    client = Part(parameters=trained, buffers=exchanged.whole - trained, frozen=parameters)
    nothing = Part()
    whole = Part(parameters=parameters)
    return ModelShapes(name, "", client, nothing, whole, nothing, nothing, 0, 0, 0)


def planned_lora(exchanged: Exchanged, *, by_rounds: bool) -> PlannedMethod:
    """The planner's row of adapters."""

    def flows(_: ModelShapes, __: Workload, count: Accounting) -> tuple[Flow, ...]:
        down = count.values(exchanged.whole, Kind.DELTA)
        coded = count.values(exchanged.trained, Kind.DELTA).coded
        zeros = exchanged.whole - exchanged.trained
        up = Size(down.payload, min(down.coded, coded + zeros // 8))
        flow = Flow(Category.ADAPTERS, Direction.UP, up)
        return flow, Flow(Category.ADAPTERS, Direction.DOWN, down)

    return PlannedMethod(
        "lora",
        flows,
        lambda shapes: {Category.ADAPTERS: shapes.client},
        lambda _: ROUND_WAITS if by_rounds else PRETRAIN_WAITS,
        lambda shapes, batch: memory_of_trained(shapes.client, batch),
        is_cut=False,
    )


def planned_zeroth(steps: int, probes: int) -> PlannedMethod:
    """The planner's row of zeroth order: neither gradients nor moments, only numbers travel."""
    size = Size(SCALAR_BYTES * steps * probes, SCALAR_BYTES * steps * probes)

    def flows(*_: object) -> tuple[Flow, ...]:
        return both_ways(Category.SCALARS, size)

    return PlannedMethod(
        "zeroth",
        flows,
        lambda shapes: {Category.ADAPTERS: shapes.client},
        lambda _: ROUND_WAITS,
        lambda shapes, batch: frozen_part(shapes.client, batch),
        is_cut=False,
    )
