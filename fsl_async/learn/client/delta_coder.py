"""Coding of deltas, chunk by chunk, with what coding loses.

What a delta lacks is sent with the next one. Where nothing was trained meanwhile, that would be
coded again and again, each time with finer steps: a row of an embedding that was trained once would
be sent in every later round. So values of a run wait where most of them are no larger than what
coding left there the last time. With steps above one root mean square, with which what is left is
as large as what was trained, they wait only where all of them are.
"""

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from fsl_async.learn.client.ports import Vector
from fsl_codecs import CodecSpec, bound, encode_into, new_vector

LOSSLESS = CodecSpec(format="fp32")

_WAITING = 0.75
"""The share of a run's values that are within what was left, from which on these wait. Of a run
that was trained, 40 % are, with a step of one root mean square."""
_LOOKED_AT = 16
"""The first values of a run tell whether the others are looked at."""
_ROUNDING = 1 + 2**-8
"""Moving a model onto a version rounds what is unsent."""
_FADING = 1 - 2**-8
"""With each delta of which a run sends some values while others wait, so that a large one does not
make later ones wait for ever."""


@frozen(eq=False)
class Lost:
    """The part of a chunk that coding has lost.

    values: what its frame lacks, float32 (n,); both add up to the difference. They are in memory
    that the next call uses again. square, of: sum of the squares of what coding lost, and of what
    was coded, both without values that wait.
    """

    values: Vector
    square: float
    of: float


@define(eq=False)
class DeltaCoder:
    """Codes differences of vectors. Not thread-safe; each chunk of a delta is coded once.

    keeps_error: what coding loses of a delta is to be sent with the next one; the exchange does it.
    whole: deltas are not differences but the weights themselves (docs/adr/0045), whose loss stays
    where it is; the exchange looks at it, too.
    """

    spec: CodecSpec = LOSSLESS
    keeps_error: bool = field(default=True, kw_only=True)
    whole: bool = field(default=False, kw_only=True)
    _frame: bytearray = field(factory=bytearray, init=False)
    _difference: Vector = field(factory=lambda: new_vector(0), init=False)
    _lost: Vector = field(factory=lambda: new_vector(0), init=False)
    _left: dict[int, Vector] = field(factory=dict, init=False)
    """By a chunk's start: the largest magnitude that coding left in each of its runs."""

    def forget(self) -> None:
        """Forget what coding left: the weights are now those of a version."""
        self._left = {}

    def is_new(self, minuend: Vector, subtrahend: Vector, start: int, stop: int) -> bool:
        """Whether values `start` to `stop`, a chunk, differ by more than coding left there.

        Every thread may call it.
        """
        left = self._left.get(start)
        minuend, subtrahend = minuend[start:stop], subtrahend[start:stop]
        if left is None:
            return not np.array_equal(minuend, subtrahend)
        size = self.spec.block_values
        difference = np.zeros(len(left) * size, np.float32)
        np.subtract(minuend, subtrahend, out=difference[: stop - start])
        rows = np.abs(difference).reshape(-1, size)
        return not bool((rows <= left[:, None] * _ROUNDING).all())

    def encode(
        self, minuend: Vector, subtrahend: Vector | None, start: int, stop: int
    ) -> tuple[bytes, Lost | None]:
        """Code values `start` to `stop` of minuend - subtrahend (None: zero); NaN is kept.

        Returns the frame, and what it lacks; None where nothing is to be kept.
        """
        values, minuend = stop - start, minuend[start:stop]
        needed = bound(values, self.spec)
        if len(self._frame) < needed:
            self._frame = bytearray(needed)
        reference = None if subtrahend is None else subtrahend[start:stop]
        if not self.keeps_error or reference is None or self.spec.format == LOSSLESS.format:
            size = encode_into(minuend, self._frame, self.spec, reference=reference)
            return bytes(memoryview(self._frame)[:size]), None
        size = self.spec.block_values
        padded = -(-values // size) * size
        if len(self._lost) < padded:
            self._difference, self._lost = new_vector(padded), new_vector(padded)
        self._difference[values:padded] = self._lost[values:padded] = 0.0
        runs, lost_runs = (one[:padded].reshape(-1, size) for one in (self._difference, self._lost))
        difference, lost = self._difference[:values], self._lost[:values]
        # Weights that have diverged may overflow here; their deltas are quarantined elsewhere.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(minuend, reference, out=difference)
            waits, held = self._hold_back(runs, start)
            lost.fill(0.0)
            size = encode_into(difference, self._frame, self.spec, residual=lost)
            squares = float(np.dot(lost, lost)), float(np.dot(difference, difference))
            self._remember(lost_runs, start, waits)
            lost_runs[waits] += held
        return bytes(memoryview(self._frame)[:size]), Lost(lost, *squares)

    def _hold_back(self, runs: Vector, start: int) -> tuple[NDArray[np.intp], Vector]:
        """Set values that wait to zero. Returns the runs that have some, and these values."""
        left = self._left.get(start)
        if left is None or len(left) != len(runs):
            return np.empty(0, np.intp), runs[:0]
        share = _WAITING if self.spec.step_log2 >= 0 else 1.0
        inside = np.abs(runs[:, :_LOOKED_AT]) <= left[:, None] * _ROUNDING
        waits = np.flatnonzero(inside.mean(axis=1) >= share)
        held = runs[waits]
        inside = np.abs(held) <= left[waits, None] * _ROUNDING
        chosen = inside.mean(axis=1) >= share
        waits, held = waits[chosen], np.where(inside, held, np.float32(0.0))[chosen]
        runs[waits] -= held
        return waits, held

    def _remember(self, lost: Vector, start: int, waits: NDArray[np.intp]) -> None:
        """Keep the largest magnitude that is left in each run: lost (runs, size)."""
        left, before = np.abs(lost).max(axis=1), self._left.get(start)
        if before is not None and len(waits):
            coded, kept = left[waits], before[waits]  # 0 was lost where all values of a run wait
            left[waits] = np.where(coded > 0, np.maximum(coded, kept * np.float32(_FADING)), kept)
        self._left[start] = left
