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

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

KEPT = 20_000
"""Atoms that a pursuit goes on with: those that lie most in the space of all rows."""
RANK_TOLERANCE = 1e-4
"""Singular values below this share of the largest are taken for rounding."""
CHANCE_MARGIN = 1.04
"""Above chance by this: atoms resemble each other more than random vectors do."""
EXPLAINED = 0.05**2
"""Atoms of which less than this share of their square is left are explained by those found."""
QUANTILE = 4.83
"""Standard deviations of a normal that the largest of a million draws reaches."""


def chance(dimensions: int, width: int) -> float:
    """The score that the best of a million random atoms reaches in a space that knows none.

    dimensions: of the rows' space, within `width`. The share of a random vector's square in a space
    follows a beta distribution; its quantile is here that of F by cube roots (Paulson, 1942).
    """
    within, outside = 2 / 9 / max(1, dimensions), 2 / 9 / max(1, width - dimensions)
    square = (1 - outside) ** 2 - QUANTILE**2 * outside
    if not 0 < dimensions < width or square <= 0:
        return 1.0
    linear, last = (1 - within) * (1 - outside), (1 - within) ** 2 - QUANTILE**2 * within
    ratio = dimensions * ((linear + math.sqrt(linear**2 - square * last)) / square) ** 3
    return math.sqrt(ratio / (ratio + width - dimensions))


def pursue(
    mixtures: Sequence[Tensor], atoms: Callable[[], Iterable[Tensor]], most: int, kept: int = KEPT
) -> list[list[int]]:
    """Return for each matrix the numbers of the atoms that it is made of, the most certain first.

    mixtures: (rows, width) each; one without a finite value that is not zero has no atoms. atoms:
    yields all of them in blocks, fp32 (atoms, width), twice the same; numbers count them. most: of
    one matrix.
    """
    spaces = [_space(rows.detach().double()).float() for rows in mixtures]
    best = _best(spaces, atoms(), kept)
    wanted: Tensor = torch.unique(torch.cat(best))
    found, first = list[Tensor](), 0
    for block in atoms() if len(wanted) else ():
        within = wanted[(wanted >= first) & (wanted < first + len(block))]
        found.append(block[within - first])
        first += len(block)
    every = torch.cat(found) if found else torch.empty(0, 1)
    return [
        numbers[_pursued(rows, every[torch.searchsorted(wanted, numbers)], most)].tolist()
        for rows, numbers in zip(mixtures, best, strict=True)
    ]


def _best(spaces: Sequence[Tensor], atoms: Iterable[Tensor], kept: int) -> list[Tensor]:
    """The numbers of the atoms that lie most in each space, at most `kept`, in their order."""
    scores: list[list[Tensor]] = [[] for _ in spaces]
    for block in atoms:
        sizes = block.norm(dim=1).clamp(min=1e-12)
        for space, found in zip(spaces, scores, strict=True):
            if len(space):
                found.append((block @ space.T).norm(dim=1) / sizes)
    every = [torch.cat(found) if found else torch.empty(0) for found in scores]
    return [one.topk(min(kept, len(one))).indices.sort().values for one in every]


def _pursued(mixtures: Tensor, atoms: Tensor, most: int) -> list[int]:
    """The places of the atoms that are found among these, the most certain first."""
    rows, chosen = mixtures.detach().double(), list[int]()
    units = atoms / atoms.norm(dim=1, keepdim=True).clamp(min=1e-12)
    size = rows.norm()
    taken = torch.empty(0, rows.shape[1]).double()  # orthonormal: what the chosen ones span
    squares = torch.ones(len(units))  # of each atom's length outside that
    while len(chosen) < min(most, len(units)) and rows.norm() > RANK_TOLERANCE * size:
        space = _space(rows).float()
        # Rows lie outside what is taken, so atoms need no change to be compared with them.
        scores = (units @ space.T).norm(dim=1) / squares.clamp(min=1e-12).sqrt()
        scores[squares < EXPLAINED] = 0.0
        best = int(scores.argmax())
        if scores[best] < CHANCE_MARGIN * chance(len(space), rows.shape[1] - len(chosen)):
            break
        chosen.append(best)
        unit = units[best].double()
        direction = unit - (taken @ unit) @ taken
        direction /= direction.norm()
        taken = torch.cat([taken, direction[None]])
        squares -= (units @ direction.float()) ** 2
        rows -= (rows @ direction)[:, None] * direction
    return chosen


def _space(rows: Tensor) -> Tensor:
    """An orthonormal basis of the rows' space: (dimensions, width)."""
    if not bool(torch.isfinite(rows).all()) or not bool(rows.any()):
        return rows[:0]
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    found: Tensor = basis[sizes > RANK_TOLERANCE * sizes[0]]
    return found
