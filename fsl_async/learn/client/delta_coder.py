"""Coding of deltas, chunk by chunk, with error feedback: the loss of one is added to the next.

Error feedback: Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", 2014. It needs one more vector of the model's
size, and makes coarse formats usable, whose error would otherwise be lost in every round.
"""

from attrs import define, field

from fsl_async.learn.client.ports import Vector
from fsl_codecs import CodecSpec, bound, encode_into, new_vector

LOSSLESS = CodecSpec(format="fp32")


@define(eq=False)
class DeltaCoder:
    """Codes differences of vectors. Not thread-safe; each chunk of a delta is coded once.

    whole: deltas are not differences but the weights themselves (docs/adr/0045); the learner looks
    at it.
    """

    spec: CodecSpec = LOSSLESS
    feedback: bool = field(default=False, kw_only=True)
    whole: bool = field(default=False, kw_only=True)
    residual: Vector | None = field(default=None, init=False)
    """The loss so far, float32, all values of the model; None while there can be none."""
    _scratch: bytearray = field(factory=bytearray, init=False)

    def encode(self, minuend: Vector, subtrahend: Vector | None, start: int, stop: int) -> bytes:
        """A frame of minuend - subtrahend (None: zero), values start to stop; NaN is kept."""
        if self.feedback and self.residual is None and self.spec.format != LOSSLESS.format:
            self.residual = new_vector(len(minuend))
        needed = bound(stop - start, self.spec)
        if len(self._scratch) < needed:
            self._scratch = bytearray(needed)
        size = encode_into(
            minuend[start:stop],
            self._scratch,
            self.spec,
            reference=None if subtrahend is None else subtrahend[start:stop],
            residual=None if self.residual is None else self.residual[start:stop],
        )
        return bytes(memoryview(self._scratch)[:size])
