"""Kinds of deltas: which frames a run's deltas have, and how each is checked.

    dense    the base minus the client's weights: one frame per chunk of the flat vector, fp32 sums;
             chunks of buffers hold the client's buffers themselves, in fp32, with float64 sums
    full     the client's weights (docs/adr/0045): the same frames, float64 sums
    seeds    projected gradients along directions of signs (`seed_step`): one frame
    mixed    dense deltas of some clients, deltas of seeds of others
    masked   words of a secure sum, of dense deltas or of seeds: one frame per chunk, or one

Ledger, spool, weights, staleness and quarantine are the same for all kinds. A run has one kind
(`StoreSettings.kind`). How deltas add up is in the run's merge (fsl_async.store.merge.merge).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from fsl_async.secure.lattice import unpack
from fsl_async.store.errors import FrameRefused
from fsl_async.store.rules.outer import squared_norm
from fsl_codecs import (
    CodecError,
    decode_accumulate,
    decode_into,
    decode_seeds,
    info,
    is_seeds,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike
    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.deltas.seed_step import Directions
    from fsl_async.store.model.manifest import Manifest


Adder = Callable[[int, "NDArray[np.float32]", float], object]
"""Adds a weight times a part of a delta to a vector in place: float32, of the part's length."""


@frozen
class Checked:
    """The decoded content of a frame; valid until the next frame is checked."""

    content: Any
    squared_norm: float
    """The frame's part of the delta's squared norm; not finite when a value is not finite."""
    base: int | None = None
    """The version from which the delta was measured, where the frame says so."""


class DeltaKind(ABC):
    """The contents of a delta. An object belongs to one store and is used in its thread."""

    name: ClassVar[str]
    comparable: ClassVar[bool] = False
    """Whether a rule can compare deltas of clients, part by part."""
    is_full: ClassVar[bool] = False
    """Whether the average of deltas is the next version, instead of a change of the current one."""
    has_seeds: ClassVar[bool] = False
    """Whether a delta may be one frame of scalars (`fsl_codecs.seeds`)."""
    is_scalars: ClassVar[bool] = False
    """Whether all deltas are, and a version is made from their mean alone."""

    directions: Directions
    """Those of the run, where a delta may be one of seeds."""

    def fits(self, key: DeltaKey, version: int) -> bool:
        """Whether a delta can count in a version.

        Scalars of an older round cannot: they are along other directions. They enter a version
        without weight.
        """
        return not self.is_scalars or key.base == version - 1

    @abstractmethod
    def frames(self, manifest: Manifest) -> int:
        """Return the number of frames of a complete delta that is not one of seeds."""

    @abstractmethod
    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """Decode a peer's frame. FrameRefused: it is not frame `index` of a delta."""

    def parts(self, manifest: Manifest) -> list[int]:
        """Return the lengths of the parts of which an `adder` adds one: here, of the chunks."""
        return [manifest.chunk_values(index) for index in range(manifest.chunks)]

    def adder(self, manifest: Manifest, frame: Callable[[int], bytes]) -> Adder:
        """Return how a merge gets a delta's dense values, whatever its form.

        frame: reads one of the delta's frames. CodecError, also later: a frame is damaged. Several
        threads may call the result.
        """
        del manifest
        return lambda index, total, weight: decode_accumulate(frame(index), total, weight)


class Dense(DeltaKind):
    """Pseudo-gradients."""

    name = "dense"
    comparable = True

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)

    def frames(self, manifest: Manifest) -> int:
        """One per chunk."""
        return manifest.chunks

    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """See `DeltaKind.check`; the content is float32, (values of the chunk,)."""
        if not len(self._buffer):
            self._buffer = np.empty(manifest.longest_chunk, np.float32)
        values = decode_checked(frame, index, manifest, self._buffer)
        if not manifest.is_buffer(index):
            return Checked(values, squared_norm(values))
        coding = info(frame).format
        if coding != "fp32":
            raise FrameRefused(f"chunk {index} holds buffers and is coded in {coding}, not in fp32")
        if not manifest.weights:  # a norm of 0 would have no weight in a merge
            return Checked(values, squared_norm(values))
        return Checked(values, 0.0 if np.isfinite(values).all() else np.nan)


class FullWeights(Dense):
    """The clients' weights themselves."""

    name = "full"
    comparable = False
    is_full = True


class Seeds(DeltaKind):
    """Projected gradients of a round: one frame of fp32 scalars, summed in float64.

    A version is made from the mean of its clients' scalars alone. Rules compare scalars.
    """

    name = "seeds"
    comparable = True
    has_seeds = is_scalars = True

    def __init__(self, directions: Directions) -> None:
        self.directions = directions

    def frames(self, manifest: Manifest) -> int:
        """One."""
        return 1

    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """See `DeltaKind.check`; the content is a SeedsFrame."""
        return check_seeds(self.directions, manifest, index, frame)

    def parts(self, manifest: Manifest) -> list[int]:
        """One, of all scalars."""
        return [self.directions.scalars]

    def adder(self, manifest: Manifest, frame: Callable[[int], bytes]) -> Adder:
        """See `DeltaKind.adder`: it adds scalars."""
        return partial(_add_scalars, decode_seeds(frame(0)).scalars.ravel())


class Mixed(Dense):
    """Dense deltas of some clients, and deltas of seeds of others."""

    name = "mixed"
    has_seeds = True

    def __init__(self, directions: Directions) -> None:
        super().__init__()
        self.directions = directions

    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """See `DeltaKind.check`; the content is a SeedsFrame, or as in `Dense.check`."""
        if not index and is_seeds(frame):
            return check_seeds(self.directions, manifest, index, frame)
        return super().check(manifest, index, frame)

    def adder(self, manifest: Manifest, frame: Callable[[int], bytes]) -> Adder:
        """See `DeltaKind.adder`."""
        first = frame(0)
        if not is_seeds(first):
            return super().adder(manifest, frame)
        found = decode_seeds(first)

        def add(index: int, total: NDArray[np.float32], weight: float) -> None:
            offset = manifest.chunk_range(index)[0]
            self.directions.add_delta(total, offset, found.first, found.scalars, weight)

        return add


class Masked(DeltaKind):
    """Masked words of a secure sum: only the sum of all is a value (fsl_async.secure)."""

    name = "masked"

    def frames(self, manifest: Manifest) -> int:
        """One per chunk."""
        return len(self.parts(manifest))

    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """See `DeltaKind.check`; masked words have no norm."""
        try:
            unpack(frame, self.parts(manifest)[index])
        except (CodecError, IndexError) as error:
            raise FrameRefused(f"chunk {index} cannot be taken: {error}") from None
        return Checked(None, 0.0)


class MaskedSeeds(Masked):
    """Masked projected gradients of a round: one frame."""

    name = "masked seeds"
    is_scalars = True

    def __init__(self, directions: Directions) -> None:
        self.directions = directions

    def parts(self, manifest: Manifest) -> list[int]:
        """One, of all scalars."""
        return [self.directions.scalars]


def check_seeds(
    directions: Directions, manifest: Manifest, index: int, frame: BytesLike
) -> Checked:
    """Check a peer's frame of scalars: one round, and the whole delta. Raises FrameRefused."""
    if index:
        raise FrameRefused(f"{index} is past the only frame of a delta of seeds")
    found = directions.check(frame)
    return Checked(found, directions.squared_norm(manifest.values, found.scalars), found.first)


def _add_scalars(
    scalars: NDArray[np.float32], index: int, total: NDArray[np.float32], weight: float
) -> None:
    assert not index, "a delta of scalars has one part"
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(total, scalars * np.float32(weight), out=total)


def decode_checked(
    frame: BytesLike, index: int, manifest: Manifest, out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Decode a peer's frame for chunk `index` into the start of `out`.

    FrameRefused: it is damaged or has the wrong length.
    """
    try:
        expected = manifest.chunk_values(index)
    except IndexError:
        raise FrameRefused(f"{index} is past the last of {manifest.chunks} chunks") from None
    try:
        values = decode_into(frame, out[:expected])
    except CodecError as error:
        with suppress(CodecError):  # a longer frame does not fit
            _check_length(index, info(frame).values, expected)
        raise FrameRefused(f"chunk {index} cannot be decoded: {error}") from error
    _check_length(index, values, expected)
    return out[:expected]


def _check_length(index: int, values: int, expected: int) -> None:
    if values != expected:
        raise FrameRefused(f"chunk {index} has {values} values, expected {expected}")
