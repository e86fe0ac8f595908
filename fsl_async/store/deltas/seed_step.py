"""Steps along directions of signs: deltas and versions of zeroth order as seeds and scalars. Pure.

A client measures projected gradients, with z[k,p] the directions of a round (fsl_codecs.seeds):

    g[k,p] = (L(w + mu z) - L(w - mu z)) / (2 mu)

and its local steps would move its weights by the sum of z[k,p] * (-rate * g[k,p] / P) (Malladi et
al., MeZO, arXiv:2305.17333; Li et al., DeComFL, arXiv:2405.15861). So the K x P scalars g are its
delta, whatever the model's size, and the weighted mean of the clients' scalars makes the version:

    s = fp32(-rate * mean / P)         the mean in float64, rounded once
    Theta_next = Theta + z[0,0] s[0,0] + ...     for k, then p: one fp32 addition each

Every node makes the same additions, so all hold the same bits. A round has the number of the
version that it starts from, and directions of its own.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import frozen

from fsl_async.store.errors import FrameRefused
from fsl_codecs import (
    MOST_SCALARS,
    CodecError,
    SeedsFrame,
    add_signs,
    decode_seeds,
    direction_keys,
    encode_seeds,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.config.settings import Config
    from fsl_async.files.files import BytesLike


@frozen
class SeedStep:
    """The change from version `round` to the next: the steps s, as bytes of fp32 scalars."""

    seed: int
    round: int
    probes: int
    packed: bytes

    @property
    def scalars(self) -> NDArray[np.float32]:
        """The steps, float32 (K, P)."""
        return np.frombuffer(self.packed, "<f4").astype(np.float32).reshape(-1, self.probes)

    def to_json(self) -> dict[str, Any]:
        """Return all of it; a float of JSON holds each fp32 number exactly."""
        return {"seed": self.seed, "round": self.round, "steps": self.scalars.tolist()}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> Self:
        """Parse the output of `to_json`."""
        scalars = np.array(members["steps"], "<f4")
        return cls(members["seed"], members["round"], scalars.shape[1], scalars.tobytes())


def keys_of(steps: Sequence[SeedStep]) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Return keys and steps of several versions, in order, for `fsl_codecs.add_signs`."""
    keys = [direction_keys(one.seed, one.round, 1, *one.scalars.shape) for one in steps]
    return np.concatenate(keys), np.concatenate([one.scalars.ravel() for one in steps])


def frame_of(steps: Sequence[SeedStep]) -> bytes | None:
    """Return the frame of consecutive versions' steps, or None if they fit no frame.

    They do not where rounds are missing, have other seeds or shapes, or are too many.
    """
    follow = all(one.round + 1 == other.round for one, other in pairwise(steps))
    alike = len({(one.seed, one.probes, len(one.packed)) for one in steps}) == 1
    if not follow or not alike or sum(len(one.packed) for one in steps) > 4 * MOST_SCALARS:
        return None
    return encode_seeds(steps[0].round, np.stack([one.scalars for one in steps]))


@frozen
class Directions:
    """The directions of a run: its seed, K steps of P probes a round, and the learning rate."""

    seed: int
    steps: int
    probes: int
    rate: float

    @property
    def scalars(self) -> int:
        """Number of scalars of a round."""
        return self.steps * self.probes

    def check(self, frame: BytesLike) -> SeedsFrame:
        """Parse a peer's frame of one round. FrameRefused: it is no delta of this run."""
        try:
            found = decode_seeds(frame)
        except CodecError as error:
            raise FrameRefused(f"the frame of scalars cannot be decoded: {error}") from error
        if found.scalars.shape != (1, self.steps, self.probes):
            rounds, steps, probes = found.scalars.shape
            raise FrameRefused(
                f"the frame has {rounds} rounds of {steps} x {probes} scalars, expected one of"
                f" {self.steps} x {self.probes}"
            )
        return found

    def squared_norm(self, values: int, scalars: NDArray[Any]) -> float:
        """Return the expected squared norm of a delta of these scalars as a vector of `values`.

        values * sum of (rate * g / P)^2: the squared norm but for products of different directions,
        whose mean is zero and which are of relative size 1 / sqrt(values). Not finite exactly when
        a scalar is not.
        """
        wide = np.asarray(scalars, np.float64).ravel() * (self.rate / self.probes)
        with np.errstate(over="ignore", invalid="ignore"):
            return values * float(np.einsum("i,i->", wide, wide))

    def step(self, number: int, mean: NDArray[Any]) -> SeedStep:
        """Return the step of round `number` for the mean of its scalars, (K * P,)."""
        with np.errstate(over="ignore"):
            scalars = (np.asarray(mean, np.float64) * (-self.rate / self.probes)).astype("<f4")
        return SeedStep(self.seed, number, self.probes, scalars.tobytes())

    def add_delta(
        self,
        total: NDArray[np.float32],
        offset: int,
        number: int,
        scalars: NDArray[Any],
        weight: float,
    ) -> None:
        """Add weight times the delta that scalars of round `number` stand for, in place.

        total: float32, the coordinates from `offset` on. A delta is the base minus the weights, so
        it has the sign of the scalars.
        """
        terms = np.asarray(scalars, np.float64).ravel() * (weight * self.rate / self.probes)
        with np.errstate(over="ignore", invalid="ignore"):
            keys = direction_keys(self.seed, number, 1, self.steps, self.probes)
            add_signs(total, offset, keys, terms.astype(np.float32))


def directions_of(config: Config) -> Directions | None:
    """Return the directions of a run in which clients may send scalars, else None."""
    tune = config.tune
    if not tune.is_on:
        return None
    return Directions(config.run.seed, tune.zo_steps, tune.zo_probes, tune.zo_rate)


def is_finite(step: SeedStep) -> bool:
    """Whether no scalar is NaN or infinite."""
    return math.isfinite(float(np.abs(step.scalars).sum(dtype=np.float64)))
