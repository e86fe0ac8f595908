"""What a client sends and receives in a round of each method, by category and direction. Pure.

A client has n samples in batches of B, so K = ceil(n / B) steps a round. Every q-th step uploads
(steps 0, q, 2q, ...); every l-th round aligns (rounds 0, l, 2l, ...). Each sample has d values at
the cut. |c|, |a|, |t| are the client's part, the auxiliary model, the tail.

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

d' is the second cut of sl-u, where labels stay at the client. In sl and sl-u a client passes its
part to the next one through the parameter server, because clients only dial out: every turn begins
with one transfer down and ends with one up. The first turn needs no transfer: all clients have
downloaded the weights before. After the last turn all download once more, so that every site ends
with the run's weights. splitfed-v1 averages the split server's copies inside one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from fsl_async.accounting.categories import Category, Direction
from fsl_async.accounting.shapes import ModelShapes, Part
from fsl_async.accounting.sizes import Accounting, Kind, Size
from fsl_async.errors import UsageError


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
    """Of each client, per round."""
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

    @property
    def uploaded_samples(self) -> int:
        """Samples of every `upload_every`-th step; the last batch may be short."""
        uploads = -(-self.steps // self.upload_every)
        last_step = (uploads - 1) * self.upload_every
        last_batch = min(self.batch, self.samples - last_step * self.batch)
        return (uploads - 1) * self.batch + last_batch


@frozen
class Method:
    """The planner's row of a method.

    flows: what a client sends and receives in a round.
    first: what it downloads before the first round.
    waits: one-way delays per round that nothing overlaps, on average over rounds.
    sequential: clients take turns, so a round lasts as long as all turns together.
    published: whether FSL-SAGE's figures cover it.
    """

    name: str
    flows: Callable[[ModelShapes, Workload, Accounting], tuple[Flow, ...]]
    first: Callable[[ModelShapes], Mapping[Category, Part]]
    waits: Callable[[Workload], float]
    sequential: bool = False
    published: bool = True


def _both_ways(category: Category, size: Size) -> tuple[Flow, Flow]:
    return Flow(category, Direction.UP, size), Flow(category, Direction.DOWN, size)


def _exchange(shapes: ModelShapes, work: Workload, count: Accounting) -> tuple[Flow, ...]:
    values = work.samples * shapes.cut_values
    return (
        Flow(Category.ACTIVATIONS, Direction.UP, count.values(values, Kind.ACTIVATIONS)),
        Flow(Category.LABELS, Direction.UP, count.plain(work.samples * shapes.label_bytes)),
        Flow(Category.GRADIENTS, Direction.DOWN, count.values(values, Kind.GRADIENTS)),
        *_both_ways(Category.CLIENT_MODEL, count.weights(shapes.client)),
    )


def _u_shaped(shapes: ModelShapes, work: Workload, count: Accounting) -> tuple[Flow, ...]:
    first, second = work.samples * shapes.cut_values, work.samples * shapes.tail_values
    return (
        Flow(Category.ACTIVATIONS, Direction.UP, count.values(first, Kind.ACTIVATIONS)),
        Flow(Category.GRADIENTS, Direction.UP, count.values(second, Kind.GRADIENTS)),
        Flow(Category.ACTIVATIONS, Direction.DOWN, count.values(second, Kind.ACTIVATIONS)),
        Flow(Category.GRADIENTS, Direction.DOWN, count.values(first, Kind.GRADIENTS)),
        *_both_ways(Category.CLIENT_MODEL, count.weights(shapes.client + shapes.tail)),
    )


def _uploads(shapes: ModelShapes, work: Workload, count: Accounting) -> tuple[Flow, ...]:
    samples = work.uploaded_samples
    sent = count.values(samples * shapes.cut_values, Kind.ACTIVATIONS)
    return (
        Flow(Category.ACTIVATIONS, Direction.UP, sent),
        Flow(Category.LABELS, Direction.UP, count.plain(samples * shapes.label_bytes)),
        *_both_ways(Category.CLIENT_MODEL, count.weights(shapes.client)),
    )


def _cse_fsl(shapes: ModelShapes, work: Workload, count: Accounting) -> tuple[Flow, ...]:
    auxiliary = _both_ways(Category.AUXILIARY, count.weights(shapes.auxiliary))
    return (*_uploads(shapes, work, count), *auxiliary)


def _fsl_sage(shapes: ModelShapes, work: Workload, count: Accounting) -> tuple[Flow, ...]:
    aligned = count.weights(shapes.auxiliary)
    down = Flow(Category.AUXILIARY, Direction.DOWN, aligned, every=work.align_every)
    return (*_uploads(shapes, work, count), down)


def _fedavg(shapes: ModelShapes, _: Workload, count: Accounting) -> tuple[Flow, ...]:
    return _both_ways(Category.FULL_MODEL, count.weights(shapes.whole))


def _client_part(shapes: ModelShapes) -> Mapping[Category, Part]:
    return {Category.CLIENT_MODEL: shapes.client}


def _client_and_tail(shapes: ModelShapes) -> Mapping[Category, Part]:
    return {Category.CLIENT_MODEL: shapes.client + shapes.tail}


def _client_and_auxiliary(shapes: ModelShapes) -> Mapping[Category, Part]:
    return {Category.CLIENT_MODEL: shapes.client, Category.AUXILIARY: shapes.auxiliary}


def whole_model(shapes: ModelShapes) -> Mapping[Category, Part]:
    """First download of methods without a cut: the whole model."""
    return {Category.FULL_MODEL: shapes.whole}


_MODEL_WAITS = 2
"""A model goes up, and the average comes down."""

METHODS: Mapping[str, Method] = {
    one.name: one
    for one in (
        Method(
            "sl",
            _exchange,
            _client_part,
            lambda work: _MODEL_WAITS + 2 * work.steps,
            sequential=True,
            published=False,
        ),
        Method(
            "sl-u",
            _u_shaped,
            _client_and_tail,
            lambda work: _MODEL_WAITS + 4 * work.steps,
            sequential=True,
            published=False,
        ),
        Method("splitfed-v1", _exchange, _client_part, lambda work: _MODEL_WAITS + 2 * work.steps),
        Method("splitfed-v2", _exchange, _client_part, lambda work: _MODEL_WAITS + 2 * work.steps),
        Method("cse-fsl", _cse_fsl, _client_and_auxiliary, lambda _: _MODEL_WAITS),
        # Once in l rounds a client waits for the answer to an upload: the aligned model.
        Method(
            "fsl-sage",
            _fsl_sage,
            _client_part,  # both ends initialize auxiliary models from the seed
            lambda work: _MODEL_WAITS + 2 / work.align_every,
        ),
        Method("fedavg", _fedavg, whole_model, lambda _: _MODEL_WAITS),
    )
}
