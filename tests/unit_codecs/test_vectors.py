"""Vectors that begin on a cache line."""

import numpy as np
import pytest

from fsl_codecs import CodecSpec, decode, encode, new_vector


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16])
@pytest.mark.parametrize("values", [0, 1, 16, 1000, 131072, 3_000_001])
def test_they_begin_on_a_cache_line(values, dtype):
    """Zeros of the requested size and type, in memory of their own."""
    kept = [new_vector(values, dtype) for _ in range(4)]
    for number, vector in enumerate(kept):
        assert vector.shape == (values,)
        assert vector.dtype == dtype
        assert values == 0 or vector.ctypes.data % 64 == 0
        assert vector.flags.writeable
        assert not vector.any()
        vector.fill(number + 1)
    assert [int(vector[-1]) for vector in kept if values] == ([1, 2, 3, 4] if values else [])


def test_the_codec_takes_them():
    """The codec accepts them as any other vector."""
    values = new_vector(1000)
    values[:] = np.linspace(-1, 1, 1000)
    frame = encode(values, CodecSpec(format="fp32"))
    assert np.array_equal(decode(frame), values)


def test_a_negative_size_is_refused():
    """By a ValueError, as in NumPy."""
    with pytest.raises(ValueError, match="-1 values"):
        new_vector(-1)
