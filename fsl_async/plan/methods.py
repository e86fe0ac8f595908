"""Bytes that a client sends and receives in a round, by method, category and direction. Pure.

A client has n samples in batches of B, so K = ceil(n / B) steps a round. With an auxiliary model
every q-th step uploads (steps 0, q, 2q, ...) and every l-th round aligns (rounds 0, l, 2l, ...).
Each sample has d values at the cut. |c|, |a|, |t| are the client's part, the auxiliary model, the
tail.

    method        up                                   down                             source
    sl            n d, labels, |c| to the next client  n d gradients, |c|               [1]
    sl-u          n d, n d' gradients, |c| + |t|       n d', n d gradients, |c| + |t|   [2]
    splitfed-v1   n d, labels, |c|                     n d gradients, |c|               [3]
    splitfed-v2   as splitfed-v1; the split server keeps one part for all clients       [3]
    cse-fsl       samples and labels of every q-th     |c|, |a|                         [4]
                  step, |c|, |a|
    fsl-sage      as cse-fsl, without |a|              |c|, and |a| every l rounds      [5]
    fedavg        the whole model                      the whole model                  [6]

    [1] Gupta and Raskar, arXiv:1810.06060     [4] Mu and Shen, arXiv:2302.05599
    [2] Vepakomma et al., arXiv:1812.00564     [5] Nair et al., arXiv:2505.23182
    [3] Thapa et al., arXiv:2004.12088         [6] McMahan et al., arXiv:1602.05629

A round of `pretrain` is a sync: the delta of the whole model goes up and the update comes down,
both in the run's format (DiLoCo, Douillard et al., arXiv:2311.08105; docs/ARCHITECTURE.md). Version
0, and the version that a late client downloads, are the whole model in lossless fp32. The first
client uploads version 0 instead of downloading it; the sum is the same.

The rows above follow from what a method decides (`fsl_async.roles.split.methods`). The name of a
method that waits for gradients, with "-u" behind it, is its U-shape: labels stay at the client, and
d' values cross a second cut. In sl and sl-u a client passes its part to the next one through the
parameter server, because clients only dial out: every turn begins with one transfer down and ends
with one up. The first turn needs no transfer: all clients have downloaded the weights before. After
the last turn all download once more, so that every site ends with the run's weights. splitfed-v1
averages the split server's copies inside one process.

What a client must hold to train its part, and to train the whole model, are fp32 values:
  * weights: 4 bytes for each parameter and buffer that the client holds;
  * gradients: 4 bytes for each trained parameter; optimizer: 8 more, Adam's two moments;
  * activations: 4 bytes for each value that a batch keeps for the backward pass
    (`Part.activations`); with the split methods also the tensors at the cut, sent and received.
An auxiliary model that the split server aligns (FSL-SAGE) is frozen at the client, but gradients
pass through it: its weights and activations count, its gradients and moments do not. Left out,
because they depend on the library and the device: temporary buffers, fragmentation, the framework
itself (some hundred megabytes with CUDA), and in pretraining the synchronization's own vectors in
host memory.

A round of fine-tuning sends and receives:

    lora     up: adapters and full modules, in the run's format; down: the same
    zeroth   up: steps x probes numbers of 4 bytes; down: the same

An adapted layer of `inputs` and `outputs` exchanges rank x (inputs + outputs) values, with ffa
those of B alone; fedex and flora also have a dense matrix of each layer
(`fsl_async.store.rules.adapters`). Zeros in a delta (rows beyond a site's rank, the factor that
rests in a round of rolora) cost next to nothing, coded.

Methods: Hu et al., LoRA, arXiv:2106.09685; Li et al., DeComFL, arXiv:2405.15861.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    Summed,
)
from fsl_async.config.settings_training import SplitConfig
from fsl_async.errors import UsageError
from fsl_async.roles.split.methods import METHODS, Method

_VALUE_BYTES = 4
_ADAM_BYTES = 8


@frozen
class Memory(Summed):
    """Estimated bytes by purpose. The names are keys of `plan --json`."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all four."""
        return self.weights + self.gradients + self.optimizer + self.activations


def trained(part: Part, batch: int) -> Memory:
    """Memory of a part that is trained on batches of `batch` samples."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        gradients=_VALUE_BYTES * part.parameters,
        optimizer=_ADAM_BYTES * part.parameters,
        activations=_VALUE_BYTES * batch * part.activations,
    )


def frozen_part(part: Part, batch: int) -> Memory:
    """Memory of a part that only passes gradients on."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        activations=_VALUE_BYTES * batch * part.activations,
    )


@frozen
class Flow:
    """Bytes that one client sends or receives in rounds 0, every, 2 every, ..."""

    category: Category
    direction: Direction
    size: Size
    every: int = 1

    def total(self, rounds: int) -> Size:
        """The size over the first `rounds` rounds."""
        return self.size.times(-(-rounds // self.every))


@frozen
class Workload:
    """Samples of a round, and how often clients upload and align.

    Raises UsageError when a number is below 1.
    """

    clients: int
    batch: int
    samples: int
    """Samples of each client per round."""
    upload_every: int = 1
    align_every: int = 1

    def __attrs_post_init__(self) -> None:
        names = ("clients", "batch", "samples", "upload_every", "align_every")
        for name in names:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: give at least 1")

    @property
    def steps(self) -> int:
        """Steps of a client in a round."""
        return -(-self.samples // self.batch)

    def samples_of(self, every: int) -> int:
        """Samples of every `every`-th step; the last batch may be short."""
        uploads = -(-self.steps // every)
        last_step = (uploads - 1) * every
        last_batch = min(self.batch, self.samples - last_step * self.batch)
        return (uploads - 1) * self.batch + last_batch


_PUBLISHED = {"splitfed-v1", "splitfed-v2", "cse-fsl", "fsl-sage", "fedavg"}
"""Methods in the figures of FSL-SAGE."""

_MODEL_WAITS = 2
"""A model goes up, and the average comes down."""

PRETRAIN_WAITS = 5
"""The call comes down, the delta goes up; the version is announced, requested, and comes down."""

U_SHAPE = "-u"


def both_ways(category: Category, size: Size) -> tuple[Flow, Flow]:
    """Return flows of one size up and down."""
    return Flow(category, Direction.UP, size), Flow(category, Direction.DOWN, size)


@frozen
class PlannedMethod:
    """The planner's row of a method; by itself, of pretraining.

    is_cut: a split server holds a part of the model. sequential: clients take turns, so a round
    lasts as long as all turns together. published: whether FSL-SAGE's figures cover it.
    """

    name: str
    is_cut: bool = False
    sequential: bool = False
    published: bool = False

    def flows(self, shapes: ModelShapes, work: Workload, count: Accounting) -> Iterable[Flow]:
        """Return the bytes that a client sends and receives in a round."""
        return both_ways(Category.FULL_MODEL, count.values(shapes.whole.values, Kind.DELTA))

    def first(self, shapes: ModelShapes) -> Mapping[Category, Part]:
        """Return the parts that it downloads before the first round."""
        return {Category.FULL_MODEL: shapes.whole}

    def waits(self, work: Workload) -> float:
        """Return one-way delays per round that nothing overlaps, on average over rounds."""
        return PRETRAIN_WAITS

    def memory(self, shapes: ModelShapes, batch: int) -> Memory:
        """Memory of a client."""
        return trained(shapes.whole, batch)


@frozen(kw_only=True)
class SplitRow(PlannedMethod):
    """A method of split learning, or the full-model one that it is compared to."""

    kind: type[Method]
    labels_at_home: bool = False

    def _method(self, work: Workload | None = None) -> Method:
        settings = SplitConfig(
            method=self.kind.name,
            labels_at_home=self.labels_at_home,
            upload_every=1 if work is None else work.upload_every,
        )
        return self.kind(settings)

    def flows(self, shapes: ModelShapes, work: Workload, count: Accounting) -> Iterator[Flow]:
        """Return the bytes that cross the cut in the steps of a round, and those of models."""
        method = self._method(work)
        if not method.has_server:
            yield from both_ways(Category.FULL_MODEL, count.weights(shapes.whole))
            return
        samples = work.samples_of(method.upload_every)
        first, second = samples * shapes.cut_values, samples * shapes.tail_values
        yield Flow(Category.ACTIVATIONS, Direction.UP, count.values(first, Kind.ACTIVATIONS))
        if method.legs > 1:
            yield Flow(Category.GRADIENTS, Direction.UP, count.values(second, Kind.GRADIENTS))
            yield Flow(Category.ACTIVATIONS, Direction.DOWN, count.values(second, Kind.ACTIVATIONS))
        else:
            yield Flow(Category.LABELS, Direction.UP, count.plain(samples * shapes.label_bytes))
        if method.gradients:
            yield Flow(Category.GRADIENTS, Direction.DOWN, count.values(first, Kind.GRADIENTS))
        yield from both_ways(Category.CLIENT_MODEL, count.weights(_client(method, shapes)))
        auxiliary = count.weights(shapes.auxiliary)
        if "auxiliary" in method.averaged:
            yield from both_ways(Category.AUXILIARY, auxiliary)
        if method.aligned:
            yield Flow(Category.AUXILIARY, Direction.DOWN, auxiliary, every=work.align_every)

    def first(self, shapes: ModelShapes) -> Mapping[Category, Part]:
        """Return the parts that are not made from the seed at both ends."""
        method = self._method()
        if not method.has_server:
            return super().first(shapes)
        found = {Category.CLIENT_MODEL: _client(method, shapes)}
        if "auxiliary" in method.averaged:
            found[Category.AUXILIARY] = shapes.auxiliary
        return found

    def waits(self, work: Workload) -> float:
        """Count the way there and back of each upload that is answered.

        An aligned model answers one upload in l rounds.
        """
        method = self._method(work)
        answered = work.steps * method.legs if method.gradients else 0
        return _MODEL_WAITS + 2 * answered + (2 / work.align_every if method.aligned else 0)

    def memory(self, shapes: ModelShapes, batch: int) -> Memory:
        """Add up its part, the tensors at the cut, and an auxiliary model."""
        method = self._method()
        if not method.has_server:
            return trained(shapes.whole, batch)
        crossing = Memory(activations=2 * _VALUE_BYTES * batch * shapes.cut_values)
        found = trained(shapes.client, batch) + crossing
        if method.legs > 1:
            second = Memory(activations=2 * _VALUE_BYTES * batch * shapes.tail_values)
            found += trained(shapes.tail, batch) + second
        if method.auxiliary == "trained":
            found += trained(shapes.auxiliary, batch)
        if method.auxiliary == "aligned":
            found += frozen_part(shapes.auxiliary, batch)
        return found


def _client(method: Method, shapes: ModelShapes) -> Part:
    return shapes.client + shapes.tail if method.legs > 1 else shapes.client


def planned_methods() -> dict[str, PlannedMethod]:
    """All methods by name, each U-shape behind its straight form."""
    found: dict[str, PlannedMethod] = {}
    for kind in METHODS.values():
        for at_home in (False, True) if kind.gradients else (False,):
            name = kind.name + U_SHAPE * at_home
            found[name] = SplitRow(
                name,
                is_cut=kind.has_server,
                sequential=kind.sequential,
                published=name in _PUBLISHED,
                kind=kind,
                labels_at_home=at_home,
            )
    return found


PLANNED: Mapping[str, PlannedMethod] = planned_methods()
PRETRAIN = PlannedMethod("pretrain")
ALL_METHODS: dict[str, PlannedMethod] = {**PLANNED, PRETRAIN.name: PRETRAIN}


TUNED = ("lora", "zeroth")
"""Methods whose row depends on the run's adapters."""
ROUND_WAITS = PRETRAIN_WAITS - 1
"""One-way delays of training by rounds, where a version is sent with its announcement."""
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


@frozen(kw_only=True)
class Lora(PlannedMethod):
    """The planner's row of adapters."""

    name: str = "lora"
    exchanged: Exchanged
    by_rounds: bool

    def flows(self, shapes: ModelShapes, work: Workload, count: Accounting) -> Iterable[Flow]:
        """Adapters both ways, coded as finely as weights; zeros cost at most about a bit each."""
        down = count.values(self.exchanged.whole, Kind.WEIGHTS)
        coded = count.values(self.exchanged.trained, Kind.WEIGHTS).coded
        zeros = self.exchanged.whole - self.exchanged.trained
        up = Size(down.payload, min(down.coded, coded + zeros // 8))
        flow = Flow(Category.ADAPTERS, Direction.UP, up)
        return flow, Flow(Category.ADAPTERS, Direction.DOWN, down)

    def first(self, shapes: ModelShapes) -> Mapping[Category, Part]:
        """The adapters; every site has the base."""
        return {Category.ADAPTERS: shapes.client}

    def waits(self, work: Workload) -> float:
        """By rounds, or as in pretraining."""
        return ROUND_WAITS if self.by_rounds else PRETRAIN_WAITS

    def memory(self, shapes: ModelShapes, batch: int) -> Memory:
        """The base, frozen, and its adapters."""
        return trained(shapes.client, batch)


@frozen(kw_only=True)
class Zeroth(Lora):
    """The planner's row of zeroth order: neither gradients nor moments, only numbers travel."""

    name: str = "zeroth"
    by_rounds: bool = True
    scalars: int

    def flows(self, shapes: ModelShapes, work: Workload, count: Accounting) -> Iterable[Flow]:
        """Return flows of the same numbers both ways."""
        return both_ways(
            Category.SCALARS, Size(SCALAR_BYTES * self.scalars, SCALAR_BYTES * self.scalars)
        )

    def memory(self, shapes: ModelShapes, batch: int) -> Memory:
        """Count the base and its adapters, neither of which has gradients."""
        return frozen_part(shapes.client, batch)
