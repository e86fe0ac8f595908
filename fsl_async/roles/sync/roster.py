"""The sites of one secure sum: who masks with whom, and how many answers open the sum. Pure.

Sites stand in a ring in the order of the hashes of their keys, which no one can choose. Each masks
with its NEIGHBOURS nearest ones, or with all where there are fewer. The neighbours and the site
itself hold shares of its two secrets: of the key of its masks with others, and of the seed of its
own mask. More than half of them give a secret back, so two disjoint groups never both can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from attrs import field, frozen

from fsl_async.roles.names import NAME

LEAST = 3
"""Sites in a sum: each of two would know the other's part."""
MOST = 256
NEIGHBOURS = 8
MOST_BITS = 24
KEY_BYTES = 32
RANGE = 6.0
"""Root mean squares of the last mean that a site's lattice reaches: sites differ from their mean.
"""
FIRST_STEP = 2.0**-23
"""The step of a round before which no mean is known, with MOST_BITS: weights between -1 and 1."""
SCALARS_STEP = 2.0**-13
"""The step of projected gradients, with MOST_BITS: to 1024, with an error of 4e-5."""


def lattice_of(bits: int, rms: float, *, of_scalars: bool) -> tuple[float, int]:
    """Return the public step of a round, and the bits of a site's numbers.

    bits: of the run. rms: of the values that are not zero in the last mean; 0: not known.
    """
    if of_scalars or not rms:
        return SCALARS_STEP if of_scalars else FIRST_STEP, MOST_BITS
    return RANGE * rms / ((1 << (bits - 1)) - 1), bits


def rows(what: str, found: Iterable[Any], *sizes: int) -> list[tuple[Any, ...]]:
    """Return the rows of a message: a site's name, then bytes of these lengths at most.

    Raises ValueError.
    """
    made = [tuple(one) if isinstance(one, list | tuple) else () for one in found]
    for row in made:
        good = len(row) == 1 + len(sizes) and type(row[0]) is str and NAME.fullmatch(row[0])
        if not good or any(
            type(one) is not bytes or len(one) > most
            for one, most in zip(row[1:], sizes, strict=True)
        ):
            raise ValueError(f"a row of {what} is a site's name and its bytes")
    if len(made) > MOST or len({row[0] for row in made}) < len(made):
        raise ValueError(f"{what} are of at most {MOST} sites, each once")
    return made


@frozen(slots=False)
class Roster:
    """A set of sites, for one attempt at the sum of a round. Raises ValueError.

    members: (name, long-term X25519 key, X25519 key of this attempt), 32 bytes each.
    step, bits: of the lattice (`fsl_async.secure.lattice`).
    """

    round: int
    attempt: int
    step: float
    bits: int
    members: list[Any] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        found = rows("members", self.members, KEY_BYTES, KEY_BYTES)
        if len(found) < LEAST or any(len(key) != KEY_BYTES for row in found for key in row[1:]):
            raise ValueError(f"a secure sum is of {LEAST} to {MOST} sites with keys")
        if not (0.0 < self.step < 1e30 and 2 <= self.bits <= MOST_BITS):
            raise ValueError("the lattice of a secure sum has a step above 0 and 2 to 24 bits")

    @cached_property
    def ring(self) -> list[str]:
        """The names in the order of the ring."""
        return [row[0] for row in sorted(self.members, key=lambda row: _hash(row[2]))]

    @cached_property
    def keys(self) -> dict[str, tuple[bytes, bytes]]:
        """Name -> its long-term key, and its key of this attempt."""
        return {row[0]: (row[1], row[2]) for row in self.members}

    def neighbours(self, name: str) -> list[str]:
        """The sites that mask with this one."""
        ring, at, reach = self.ring, self.ring.index(name), NEIGHBOURS // 2
        if len(ring) <= NEIGHBOURS + 1:
            return [one for one in ring if one != name]
        steps = [*range(-reach, 0), *range(1, reach + 1)]
        return [ring[(at + step) % len(ring)] for step in steps]

    def holders(self, name: str) -> list[str]:
        """The sites that hold shares of its secrets, in the order of the shares."""
        return [*self.neighbours(name), name]

    @property
    def threshold(self) -> int:
        """How many shares give a secret back."""
        return min(len(self.members), NEIGHBOURS + 1) // 2 + 1

    @property
    def largest(self) -> int:
        """The largest lattice number of a site."""
        return (1 << (self.bits - 1)) - 1

    @property
    def width(self) -> int:
        """Bits of a ring word: the sum of all sites fits."""
        return (2 * self.largest * len(self.members)).bit_length()

    def context(self, run: str) -> bytes:
        """Return a hash of all that sites have to agree on, which every key is derived with."""
        lines = [f"{run} {self.round} {self.attempt} {self.step.hex()} {self.bits}"]
        lines += [f"{name} {site.hex()} {key.hex()}" for name, site, key in self.members]
        return _hash("\n".join(lines).encode())

    def number(self, run: str) -> int:
        """Return the number by which a delta names the set whose masks it is under; above 0."""
        return int.from_bytes(self.context(run)[:6], "big") + 1

    def needed(self, survivors: Collection[str]) -> dict[str, bool]:
        """Site -> whether the seed of its own mask is needed, else the key of its masks.

        Of a site that is gone nothing is needed where none of its neighbours is left.
        """
        found = dict.fromkeys(survivors, True)
        for name in self.keys.keys() - set(survivors):
            if any(one in found and found[one] for one in self.neighbours(name)):
                found[name] = False
        return found

    def objection(self, survivors: Collection[str]) -> str:
        """Why the sum of these sites must not be opened; empty: it may."""
        left = set(survivors)
        if not left <= self.keys.keys() or len(left) < len(survivors):
            return "not all of these sites are in the set, each once"
        if len(left) < LEAST:
            return f"a sum of {len(left)} sites shows what each sent, {LEAST} are the least"
        reached, new = set[str](), {min(left)}
        while new:
            reached |= new
            new = {one for name in new for one in self.neighbours(name)} & left - reached
        return "" if reached == left else "these sites are no group that masks with each other"


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@frozen
class Answers:
    """What opens a sum. shares: site -> holder -> that holder's share of what is needed of it."""

    roster: Roster
    survivors: tuple[str, ...]
    shares: Mapping[str, Mapping[str, bytes]]
