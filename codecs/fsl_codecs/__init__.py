"""fsl_codecs: encodes fp32 vectors as small, self-describing frames, and decodes them.

    frame = encode(values, CodecSpec(format="e4m3"))
    values = decode(frame)

Hot paths use `encode_into`, `decode_into` and `decode_accumulate` with buffers they keep.
docs/WIRE.md specifies the bytes. The NumPy modules of this package are the reference and run
everywhere; where the native codec was built, it does the work (`dispatch`).
"""

from .dispatch import (
    add_signs,
    available,
    bound,
    decode,
    decode_accumulate,
    decode_into,
    encode,
    encode_into,
    implementation,
    info,
    sign_words,
)
from .errors import CodecError, CodecUsageError, FrameError, LimitError
from .frame import Buffer, CodecSpec, FrameInfo, Limits, format_of
from .seeds import (
    MOST_SCALARS,
    SEEDS_HEADER_BYTES,
    SEEDS_MAGIC,
    SeedsFrame,
    decode_seeds,
    direction_keys,
    encode_seeds,
    is_seeds,
)
from .vectors import new_vector

__all__ = [
    "MOST_SCALARS",
    "SEEDS_HEADER_BYTES",
    "SEEDS_MAGIC",
    "Buffer",
    "CodecError",
    "CodecSpec",
    "CodecUsageError",
    "FrameError",
    "FrameInfo",
    "LimitError",
    "Limits",
    "SeedsFrame",
    "add_signs",
    "available",
    "bound",
    "decode",
    "decode_accumulate",
    "decode_into",
    "decode_seeds",
    "direction_keys",
    "encode",
    "encode_into",
    "encode_seeds",
    "format_of",
    "implementation",
    "info",
    "is_seeds",
    "new_vector",
    "sign_words",
]
