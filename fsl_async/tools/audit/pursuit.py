"""Finds the known vectors of which the rows of a matrix are mixtures. Pure numerics, by torch.

The change of a linear layer's weights, or of an adapter's factor A, is a sum of outer products with
the layer's inputs: its rows are mixtures of these inputs. Where the inputs are among many known
vectors, `atoms`, a pursuit finds them one by one: it takes the atom that lies most in the rows'
space, removes its direction from rows and atoms, and repeats (rank-aware order recursive matching
pursuit: Davies and Eldar, arXiv:1004.4529). With fewer rows than inputs the first choices are less
certain, and the following ones still find the rest. An atom counts as found where it lies in the
space by more than chance would have it.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

KEPT = 20_000
"""Atoms that a pursuit goes on with: those that lie most in the space of all rows."""
RANK_TOLERANCE = 1e-4
"""Singular values below this share of the largest are taken for rounding."""
CHANCE_MARGIN = 1.04
"""Above chance by this: atoms resemble each other more than random vectors do."""
_DRAWS = 1 << 20


@frozen
class Found:
    """An atom by its number in the order in which atoms were offered.

    score: the share of its length, within what earlier atoms left, that lies in the rows' space.
    """

    number: int
    score: float


@functools.lru_cache(maxsize=256)
def chance(dimensions: int, width: int) -> float:
    """The score that the best of a million random atoms reaches in a space that knows none.

    dimensions: of the rows' space, within `width`.
    """
    if not 0 < dimensions < width:
        return 1.0
    rng = np.random.default_rng(0)
    inside = rng.standard_gamma(dimensions / 2, _DRAWS)
    outside = rng.standard_gamma((width - dimensions) / 2, _DRAWS)
    return float(np.sqrt((inside / (inside + outside)).max()))


class Pursuit:
    """Searches the atoms that are offered for those of which the rows of `mixtures` are made.

    mixtures: (rows, width). A matrix without a finite value that is not zero has no atoms.
    """

    def __init__(self, mixtures: Tensor, kept: int = KEPT) -> None:
        self._rows = mixtures.detach().double()
        self._space = _space(self._rows).float()
        self._kept = kept
        self._scores = torch.empty(0)
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._atoms = torch.empty(0, self._rows.shape[1], dtype=torch.float16)
        self._offered = 0

    def offer(self, atoms: Tensor) -> None:
        """Consider these too: fp32 (atoms, width)."""
        first, self._offered = self._offered, self._offered + len(atoms)
        if not len(self._space):
            return
        scores = (atoms @ self._space.T).norm(dim=1) / atoms.norm(dim=1).clamp(min=1e-12)
        if len(self._scores) == self._kept:
            better = scores > self._scores.min()
            scores, atoms = scores[better], atoms[better]
            numbers = first + better.nonzero()[:, 0]
        else:
            numbers = torch.arange(first, first + len(atoms))
        all_scores = torch.cat([self._scores, scores])
        best = all_scores.topk(min(self._kept, len(all_scores))).indices
        self._scores = all_scores[best]
        self._numbers = torch.cat([self._numbers, numbers])[best]
        self._atoms = torch.cat([self._atoms, atoms.half()])[best]

    def found(self, most: int) -> tuple[Found, ...]:
        """The atoms that are found, at most so many, the most certain first."""
        rows = self._rows.clone()
        chosen: list[Found] = []
        left = self._atoms.double()
        left /= left.norm(dim=1, keepdim=True).clamp(min=1e-12)
        for _ in range(min(most, len(left))):
            space = _space(rows)
            if not len(space):
                break
            lengths = left.norm(dim=1)
            scores = (left @ space.T).norm(dim=1) / lengths.clamp(min=1e-12)
            scores[lengths < 0.05] = 0.0  # explained by those already found
            best = int(scores.argmax())
            score = float(scores[best])
            if score < CHANCE_MARGIN * chance(len(space), rows.shape[1] - len(chosen)):
                break
            chosen.append(Found(int(self._numbers[best]), score))
            direction = left[best] / lengths[best]
            rows -= (rows @ direction)[:, None] * direction
            left -= (left @ direction)[:, None] * direction
        return tuple(chosen)


def _space(rows: Tensor) -> Tensor:
    """An orthonormal basis of the rows' space: (dimensions, width)."""
    if not bool(torch.isfinite(rows).all()) or not bool(rows.any()):
        return rows[:0]
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    found: Tensor = basis[sizes > RANK_TOLERANCE * sizes[0]]
    return found
