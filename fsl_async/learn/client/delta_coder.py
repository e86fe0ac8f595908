"""Coding of deltas, chunk by chunk, with what coding loses."""

import numpy as np
from attrs import define, field, frozen

from fsl_async.learn.client.ports import Vector
from fsl_codecs import CodecSpec, bound, encode_into, new_vector

LOSSLESS = CodecSpec(format="fp32")


@frozen(eq=False)
class Lost:
    """The part of a chunk that coding has lost.

    values: what its frame lacks, float32 (n,); both add up to the difference. They are in memory
    that the next call uses again. square, of: sum of the squares of these values, and of the
    difference.
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
        if len(self._lost) < values:
            self._difference, self._lost = new_vector(values), new_vector(values)
        difference, lost = self._difference[:values], self._lost[:values]
        np.subtract(minuend, reference, out=difference)
        lost.fill(0.0)
        size = encode_into(difference, self._frame, self.spec, residual=lost)
        squares = float(np.dot(lost, lost)), float(np.dot(difference, difference))
        return bytes(memoryview(self._frame)[:size]), Lost(lost, *squares)
