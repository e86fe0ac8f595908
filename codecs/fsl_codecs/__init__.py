"""fsl_codecs: encodes fp32 vectors as small, self-describing frames, and decodes them.

    frame = encode(values, CodecSpec(format="e4m3"))
    values = decode(frame)

Hot paths use `encode_into`, `decode_into` and `decode_accumulate` with buffers they keep.
docs/WIRE.md specifies the bytes. The NumPy modules of this package are the reference and run
everywhere; where the native codec was built, it does the work (`dispatch`).
"""

from .dispatch import (
    available,
    bound,
    decode,
    decode_accumulate,
    decode_into,
    encode,
    encode_into,
    implementation,
    info,
)
from .errors import CodecError, CodecUsageError, FrameError, LimitError
from .frame import Buffer, CodecSpec, FrameInfo, Limits, format_of
from .vectors import new_vector

__all__ = [
    "Buffer",
    "CodecError",
    "CodecSpec",
    "CodecUsageError",
    "FrameError",
    "FrameInfo",
    "LimitError",
    "Limits",
    "available",
    "bound",
    "decode",
    "decode_accumulate",
    "decode_into",
    "encode",
    "encode_into",
    "format_of",
    "implementation",
    "info",
    "new_vector",
]
