"""Products of two factors: sums, norms and best approximations that never form the product. Pure.

A product is out x in, of a rank far below both; its factors are kept as the manifest has them, so
every function works on matrices with few rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


@frozen(eq=False)
class Factors:
    """The factors of a product b.T @ a, float64.

    a: (rows, in). b: (rows, out); row j is column j of the matrix B of the papers.
    """

    a: NDArray[np.float64]
    b: NDArray[np.float64]

    @property
    def rows(self) -> int:
        """Number of rows of each factor: at least the rank of the product."""
        return len(self.a)

    def first(self, rows: int) -> Factors:
        """Return the first `rows` rows of both."""
        return Factors(self.a[:rows], self.b[:rows])

    def __add__(self, other: Factors) -> Factors:
        """Add factor by factor, which is not the sum of the products."""
        return Factors(self.a + other.a, self.b + other.b)

    def __sub__(self, other: Factors) -> Factors:
        """Subtract factor by factor, which is not the difference of the products."""
        return Factors(self.a - other.a, self.b - other.b)


def stacked(products: Iterable[tuple[float, Factors]]) -> Factors:
    """Return factors of sum of weight x product: all rows, those of b times their weight."""
    pairs = list(products)
    return Factors(
        np.concatenate([one.a for _, one in pairs]),
        np.concatenate([weight * one.b for weight, one in pairs]),
    )


def difference(one: Factors, other: Factors) -> Factors:
    """Return factors of one.b.T @ one.a - other.b.T @ other.a.

    Small differences keep their digits: (b - b').T @ a + b'.T @ (a - a').
    """
    apart = one - other
    return Factors(np.concatenate([one.a, apart.a]), np.concatenate([apart.b, other.b]))


def squared_norm(product: Factors) -> float:
    """Return the squared Frobenius norm of the product, by the Gram matrices of its factors."""
    grams = (product.a @ product.a.T) * (product.b @ product.b.T)
    return max(0.0, math.fsum(grams.ravel()))


def norm(product: Factors) -> float:
    """Return the Frobenius norm of the product."""
    return math.sqrt(squared_norm(product))


def best(product: Factors, rank: int) -> tuple[Factors, Factors]:
    """Return the best approximation of rank `rank`, and the best one of what that leaves.

    Both have `rank` rows: a has orthonormal ones, and b the singular values. Rows of a that
    correspond to a singular value of zero are orthonormal too, so that training can use them; only
    where `in` is below `rank`, rows of both are zero. Signs: the largest entry of each left
    singular vector is positive (of the right one where there is none). Eckart and Young 1936; QR
    decompositions of the factors reduce the SVD to one of (rows, rows).
    """
    left, left_core = np.linalg.qr(product.b.T)
    right, right_core = np.linalg.qr(product.a.T)
    core = left_core @ right_core.T
    few = min(core.shape) < rank
    u, values, vt = np.linalg.svd(core, full_matrices=few)
    vectors, rights = (left @ u).T, vt @ right.T
    count = len(values)
    signs = np.ones(len(rights))
    signs[:count] = _signs(vectors[:count])
    signs[count:] = _signs(rights[count:])
    rights = rights * signs[:, None]
    lefts = vectors[:count] * (signs[:count] * values)[:, None]
    return _padded(rights, lefts, 0, rank), _padded(rights[:count], lefts, rank, rank)


def turned(factors: Factors, held: Factors) -> Factors:
    """Return the same product, each pair of rows with the sign that is closer to those held.

    Versions travel as coded changes, and the coding error grows with the change: a direction whose
    sign flips would cost twice its length.
    """
    along = np.sum(factors.a * held.a, axis=1) + np.sum(factors.b * held.b, axis=1)
    signs = np.where(along < 0.0, -1.0, 1.0)[:, None]
    return Factors(factors.a * signs, factors.b * signs)


def _signs(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sign of each row's entry of largest size."""
    places = np.argmax(np.abs(rows), axis=1)
    largest = rows[np.arange(len(rows)), places]
    return np.where(largest < 0.0, -1.0, 1.0)


def _padded(a: NDArray[np.float64], b: NDArray[np.float64], start: int, rows: int) -> Factors:
    """Return `rows` rows from `start` on; rows that are not there are zero."""
    made = Factors(np.zeros((rows, a.shape[1])), np.zeros((rows, b.shape[1])))
    for whole, part in ((made.a, a[start : start + rows]), (made.b, b[start : start + rows])):
        whole[: len(part)] = part
    return made
