"""What a client sends and receives in a round of each method, by category and direction. Pure.

n samples a client, batches of B, so K = ceil(n / B) steps a round; every q-th step uploads (steps 0, q, 2q, ...); every l-th round
aligns (rounds 0, l, 2l, ...). d values a sample cross the cut. |c|, |a|, |t| are the client's half, the auxiliary model, the tail.

    method        up                                           down                              source
    sl            n d, labels, |c| to the next client          n d gradients, |c|                Gupta and Raskar, arXiv:1810.06060
    sl-u          n d, n d' gradients, |c| + |t|               n d', n d gradients, |c| + |t|    Vepakomma et al., arXiv:1812.00564
    splitfed-v1   n d, labels, |c|                             n d gradients, |c|                Thapa et al., arXiv:2004.12088
    splitfed-v2   the same; the server keeps one half instead of one for each client
    cse-fsl       the samples of every q-th step, labels,      |c|, |a|                          Mu and Shen, arXiv:2302.05599
                  |c|, |a|
    fsl-sage      the same without |a|                         |c|, and |a| every l rounds       Nair et al., arXiv:2505.23182
    fedavg        the whole model                              the whole model                   McMahan et al., arXiv:1602.05629

d' is the second cut of sl-u, where labels stay at home. In sl and sl-u a client hands its half to the next through the
server, because clients only dial out: every turn begins with one transfer down and ends with one up. (The first turn has the weights that all
download before; when the last one is over, all download once more, so that every site ends with the run's weights.) Averaging the server's copies in splitfed-v1 happens inside one process.
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
    """What one client sends or receives in rounds 0, every, 2 every, ..., in bytes."""

    category: Category
    direction: Direction
    size: Size
    every: int = 1

    def total(self, rounds: int) -> Size:
        """In the first `rounds` rounds."""
        return self.size.times(-(-rounds // self.every))


@frozen
class Workload:
    """How much is done in a round, and how often things are sent. Raises UsageError when a number is below 1."""

    clients: int
    batch: int
    samples: int
    """Of each client."""
    upload_every: int = 1
    align_every: int = 1

    def __attrs_post_init__(self) -> None:
        names = ("clients", "batch", "samples", "upload_every", "align_every")
        for name in names:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: give at least 1")

    @property
    def steps(self) -> int:
        """Of a client in a round."""
        return -(-self.samples // self.batch)

    @property
    def uploaded_samples(self) -> int:
        """Those of every `upload_every`-th step; the last batch may be short."""
        uploads = -(-self.steps // self.upload_every)
        last_step = (uploads - 1) * self.upload_every
        last_batch = min(self.batch, self.samples - last_step * self.batch)
        return (uploads - 1) * self.batch + last_batch


@frozen
class Method:
    """A method as the planner sees it.

    flows: what a client sends and receives; first: what it needs before it can start.
    waits: one-way delays in a round that nobody can hide, on average over rounds.
    relay: clients take turns, so that a round lasts as long as all of them together.
    published: whether FSL-SAGE's accounting has it.
    """

    name: str
    flows: Callable[[ModelShapes, Workload, Accounting], tuple[Flow, ...]]
    first: Callable[[ModelShapes], Mapping[Category, Part]]
    waits: Callable[[Workload], float]
    relay: bool = False
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


def _client_half(shapes: ModelShapes) -> Mapping[Category, Part]:
    return {Category.CLIENT_MODEL: shapes.client}


def _client_and_tail(shapes: ModelShapes) -> Mapping[Category, Part]:
    return {Category.CLIENT_MODEL: shapes.client + shapes.tail}


def _client_and_auxiliary(shapes: ModelShapes) -> Mapping[Category, Part]:
    return {Category.CLIENT_MODEL: shapes.client, Category.AUXILIARY: shapes.auxiliary}


def whole_model(shapes: ModelShapes) -> Mapping[Category, Part]:
    """Of methods that cut nothing: all of it is downloaded first."""
    return {Category.FULL_MODEL: shapes.whole}


_MODEL_WAITS = 2
"""A model goes up, and the average comes down."""

METHODS: Mapping[str, Method] = {
    one.name: one
    for one in (
        Method(
            "sl",
            _exchange,
            _client_half,
            lambda work: _MODEL_WAITS + 2 * work.steps,
            relay=True,
            published=False,
        ),
        Method(
            "sl-u",
            _u_shaped,
            _client_and_tail,
            lambda work: _MODEL_WAITS + 4 * work.steps,
            relay=True,
            published=False,
        ),
        Method("splitfed-v1", _exchange, _client_half, lambda work: _MODEL_WAITS + 2 * work.steps),
        Method("splitfed-v2", _exchange, _client_half, lambda work: _MODEL_WAITS + 2 * work.steps),
        Method("cse-fsl", _cse_fsl, _client_and_auxiliary, lambda _: _MODEL_WAITS),
        # an upload that is answered by the aligned model, once in l rounds
        Method(
            "fsl-sage",
            _fsl_sage,
            _client_half,  # auxiliary models begin as the seed makes them, at both ends
            lambda work: _MODEL_WAITS + 2 / work.align_every,
        ),
        Method("fedavg", _fedavg, whole_model, lambda _: _MODEL_WAITS),
    )
}
