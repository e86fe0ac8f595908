"""Divides samples among clients, the same on every node.

A server has label counts only. From them and a seed it computes how many samples of each class a
client gets; a site turns these numbers into indices by the labels of its samples. The arithmetic is
integers from `counter` and decimals of stated precision (ADR 30), so no lists are sent.

    iid              all samples, shuffled, in parts that differ by at most one
    dirichlet        each class, shuffled, cut by shares drawn from Dirichlet(alpha, ..., alpha)
                     over the clients (Yurochkin et al., arXiv:1905.12022): with a small alpha
                     clients have few classes and unequal sizes, with a large one nearly IID data
    dirichlet-equal  parts that differ by at most one; each client, in order, takes classes by
                     shares drawn from Dirichlet(alpha, ..., alpha) over the classes (Hsu et al.,
                     arXiv:1909.06335). What a class no longer has is taken of the others by the
                     same shares, so the last clients take what is left
    sorted           all samples in order of their classes, cut into two equal pieces for each
                     client, dealt out by a shuffle (McMahan et al., arXiv:1602.05629)

A draw of `dirichlet` may leave a client without samples. It then gets one of the client with the
most, from that client's largest class; ties go to the lower number. Nothing is drawn again, so an
empty client does not change the parts of the others.
"""

import heapq
from collections.abc import Iterator, Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, localcontext
from itertools import accumulate, pairwise
from typing import Literal, get_args

import attrs
import numpy as np
import numpy.typing as npt

from fsl_async.errors import DataError
from fsl_async.learn.data.counter import permutation
from fsl_async.learn.data.dataset import Dataset, Indices
from fsl_async.store.rules.adapters.draws import stream

Kind = Literal["iid", "dirichlet", "dirichlet-equal", "sorted"]

MIN_ALPHA, MAX_ALPHA = 1e-6, 1e6
PIECES = 2
"""Pieces of each client, for sorted."""
MAX_SHARES = 100_000
"""Clients times classes at most; a share takes some 0.2 ms."""

_UNIT = Decimal("2.710505431213761085018632002E-20")
"""2^-65. A literal is exact; an operation here would round as the importing thread's context."""
_EXACT = Context(prec=28, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])
"""Decimal arithmetic of stated precision, whatever the caller's context is."""
_SQUEEZE = Decimal("0.0331")
_WORDS_AT_ONCE = 64


@attrs.frozen(slots=True)
class PartitionSpec:
    """The parameters of a partition. Raises DataError for values out of range."""

    kind: Kind
    clients: int
    seed: int = 0
    alpha: float = 1.0
    """Used by dirichlet and dirichlet-equal only."""

    def __attrs_post_init__(self) -> None:
        if self.kind not in (kinds := get_args(Kind)):
            raise DataError(f"partition {str(self.kind)[:80]!r}: use {' or '.join(kinds)}")
        if self.clients < 1:
            raise DataError(f"{self.clients} clients: give at least 1")
        if not MIN_ALPHA <= self.alpha <= MAX_ALPHA:  # also false for NaN
            raise DataError(
                f"alpha is {self.alpha:g}: must be above 0 ({MIN_ALPHA:g} to {MAX_ALPHA:g})"
            )

    def of_counts(self, counts: Sequence[int]) -> "Partition":
        """Divide samples by the number in each class.

        Raises DataError with more clients than samples.
        """
        counts = tuple(map(int, counts))
        total = sum(counts)
        if min(counts, default=0) < 0 or self.clients > total:
            raise DataError(
                f"{self.clients} clients, but {total} samples: give fewer clients or more data"
            )
        if self.kind == "iid":
            edges = [_even(total, self.clients)]
        elif self.kind == "sorted":
            edges = [_edges(row) for row in _sorted_shares(self, counts)]
        else:
            if self.clients * len(counts) > MAX_SHARES:
                raise DataError(
                    f"{self.clients} clients times {len(counts)} classes"
                    f" exceed {MAX_SHARES:,} shares"
                )
            shares = _equal_shares if self.kind == "dirichlet-equal" else _class_shares
            with localcontext(_EXACT):
                edges = [_edges(row) for row in shares(self, counts)]
        return Partition(self, counts, tuple(edges))

    def check_labels(self, data: Dataset) -> None:
        """Raise DataError for a division by classes of data without labels."""
        if self.kind != "iid" and data.labels is None:
            raise DataError(f"data {data.name!r} has no labels, which {self.kind} needs: use iid")


@attrs.frozen(slots=True)
class Partition:
    """The parts of all clients.

    Client i has the samples edges[c][i] to edges[c][i + 1] of class c in its shuffled order. With
    iid there is one row of edges, over all samples.
    """

    spec: PartitionSpec
    counts: tuple[int, ...]
    edges: tuple[tuple[int, ...], ...]

    def indices(self, client: int, labels: npt.NDArray[np.int64] | None = None) -> Indices:
        """The samples of a client, ascending: int64.

        labels: of all samples; iid needs none.
        Raises DataError for labels other than those counted, IndexError for an unknown client.
        """
        if not 0 <= client < self.spec.clients:
            raise IndexError(f"client {client} of {self.spec.clients}")
        seed = self.spec.seed
        if self.spec.kind == "iid":
            total = sum(self.counts)
            if labels is not None and len(labels) != total:
                raise DataError(f"{len(labels)} samples here, {total} in the run")
            (row,) = self.edges
            return np.sort(permutation(seed, "iid", total)[row[client] : row[client + 1]])
        self._check(labels)
        parts = [np.empty(0, np.int64)]
        for label, row in enumerate(self.edges):
            if row[client] < row[client + 1]:
                order = permutation(seed, f"class/{label}", self.counts[label])
                mine = order[row[client] : row[client + 1]]
                parts.append(np.flatnonzero(labels == label)[mine])
        return np.sort(np.concatenate(parts))

    def _check(self, labels: npt.NDArray[np.int64] | None) -> None:
        if labels is None:
            raise DataError(f"a {self.spec.kind} partition needs the samples' labels")
        found = np.bincount(labels, minlength=len(self.counts))
        for label, count in enumerate(found.tolist()):
            expected = self.counts[label] if label < len(self.counts) else 0
            if count != expected:
                raise DataError(
                    f"class {label} has {count} samples here and {expected} in the run:"
                    " the data differ"
                )


def epoch_order(seed: int, client: str, epoch: int, samples: int) -> Indices:
    """Order of a client's samples in an epoch; a relaunched client resumes at any (epoch, step)."""
    return permutation(seed, f"epoch/{client}/{epoch}", samples)


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total * edge // parts for edge in range(parts + 1))


def _edges(shares: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(shares, initial=0))


def _class_shares(spec: PartitionSpec, counts: Sequence[int]) -> list[list[int]]:
    """Samples by [class][client], each class by shares of its own; no client has none."""
    shares = [
        _divided(count, _gammas(spec, f"dirichlet/{label}", spec.clients))
        if count
        else [0] * spec.clients
        for label, count in enumerate(counts)
    ]
    return _without_empty(shares)


def _equal_shares(spec: PartitionSpec, counts: Sequence[int]) -> list[list[int]]:
    """Samples by [class][client] for parts of equal sizes."""
    left, shares = list(counts), [[0] * spec.clients for _ in counts]
    for client, (start, stop) in enumerate(pairwise(_even(sum(counts), spec.clients))):
        drawn = _gammas(spec, f"dirichlet-equal/{client}", len(counts))
        missing = stop - start
        while missing:  # a class that gives less than asked for is empty then
            there = [label for label, count in enumerate(left) if count]
            asked = _divided(missing, [drawn[label] for label in there])
            for label, wanted in zip(there, asked, strict=True):
                given = min(wanted, left[label])
                shares[label][client] += given
                left[label] -= given
                missing -= given
    return shares


def _sorted_shares(spec: PartitionSpec, counts: Sequence[int]) -> list[list[int]]:
    """Samples by [class][client] for pieces of the samples in order of their classes."""
    count = spec.clients * PIECES
    if count > sum(counts):
        raise DataError(f"{spec.clients} clients times {PIECES} pieces, but {sum(counts)} samples")
    pieces, classes = _even(sum(counts), count), _edges(counts)
    shares = [[0] * spec.clients for _ in counts]
    for number, piece in enumerate(permutation(spec.seed, "sorted", count).tolist()):
        for label, row in enumerate(shares):
            first = max(pieces[piece], classes[label])
            last = min(pieces[piece + 1], classes[label + 1])
            row[number // PIECES] += max(0, last - first)
    return shares


def _gammas(spec: PartitionSpec, name: str, parts: int) -> list[Decimal]:
    """Draw from Gamma(alpha, 1) for each part; over their sum they are a Dirichlet draw."""
    # repr is the shortest text of the float, and the same on every machine.
    alpha = Decimal(repr(float(spec.alpha)))
    uniform = _uniform(spec.seed, name)
    return [_gamma(alpha, uniform) for _ in range(parts)]


def _divided(count: int, weights: Sequence[Decimal]) -> list[int]:
    """Divide `count` in proportion to `weights`."""
    total = sum(weights)
    # Rounding is monotone: edges rise and do not exceed the count. Only the last could be below it.
    edges = [0]
    so_far = Decimal(0)
    for one in weights[:-1]:
        so_far += one
        edges.append(int(so_far * count / total))
    edges.append(count)
    return [stop - start for start, stop in pairwise(edges)]


def _uniform(seed: int, name: str) -> Iterator[Decimal]:
    """Endless numbers in (0, 1), from the stream `name`."""
    words = stream(seed, name)
    while True:
        for word in words.random_raw(_WORDS_AT_ONCE).tolist():
            yield (2 * word + 1) * _UNIT


def _gamma(alpha: Decimal, uniform: Iterator[Decimal]) -> Decimal:
    """Draw from Gamma(alpha, 1).

    Method of Marsaglia and Tsang, "A simple method for generating gamma variables", 2000; for
    alpha < 1 it is Gamma(alpha + 1) times U^(1 / alpha). Decimals do not underflow as floats do at
    alpha = 0.01.
    """
    one = Decimal(1)
    if alpha < one:
        lifted = _gamma(alpha + one, uniform)
        return lifted * (next(uniform).ln() / alpha).exp()
    shape = alpha - one / 3
    spread = one / (9 * shape).sqrt()
    while True:
        normal = _normal(uniform)
        cube = (one + spread * normal) ** 3
        if cube > 0:
            square, draw = normal * normal, next(uniform)
            # The paper's squeeze: nearly always true, and then no logarithm is needed.
            if draw < one - _SQUEEZE * square * square:
                return shape * cube
            if draw.ln() < square / 2 + shape - shape * cube + shape * cube.ln():
                return shape * cube


def _normal(uniform: Iterator[Decimal]) -> Decimal:
    """Draw from the standard normal distribution, by Marsaglia's polar method.

    It needs square root and logarithm, which `decimal` rounds correctly, and no cosine.
    """
    while True:
        x, y = 2 * next(uniform) - 1, 2 * next(uniform) - 1
        square = x * x + y * y
        if 0 < square < 1:
            return x * (-2 * square.ln() / square).sqrt()


def _without_empty(shares: list[list[int]]) -> list[list[int]]:
    """Give each client without samples one of the client with the most.

    shares: [class][client], changed in place.
    """
    sizes = [sum(column) for column in zip(*shares, strict=True)]
    largest = [(-size, client) for client, size in enumerate(sizes)]
    heapq.heapify(largest)
    for empty in [client for client, size in enumerate(sizes) if not size]:
        size, giver = heapq.heappop(largest)
        label = max(range(len(shares)), key=lambda one: (shares[one][giver], -one))
        shares[label][giver] -= 1
        shares[label][empty] += 1
        heapq.heappush(largest, (size + 1, giver))
    return shares
