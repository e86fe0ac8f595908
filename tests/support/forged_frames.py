"""Frames with correct checksums and other errors, as an attacker can make them."""

import struct
import zlib

import numpy as np

from fsl_codecs import CodecSpec, encode

CODED = 3
_HEADER, _HEAD = 28, 16


def with_checksums(frame):
    """Return the frame with all checksums recomputed, as far as its lengths allow."""
    frame = bytearray(frame)
    if len(frame) < _HEADER:
        return bytes(frame)
    frame[24:28] = struct.pack("<I", zlib.crc32(frame[:24]))
    seed, position = zlib.crc32(frame[:24]), _HEADER
    while position + _HEAD <= len(frame):
        (size,) = struct.unpack_from("<I", frame, position)
        payload = frame[position + _HEAD : position + _HEAD + size]
        checksum = zlib.crc32(frame[position : position + 12], zlib.crc32(payload, seed))
        frame[position + 12 : position + 16] = struct.pack("<I", checksum)
        position += _HEAD + size
    return bytes(frame)


def forged(name, payload, values, mode=CODED, flags=0, **layout):
    """Make a frame of one chunk around a given payload; `layout` goes to CodecSpec."""
    header = bytearray(encode(np.zeros(0, np.float32), CodecSpec(name, **layout)))
    struct.pack_into("<Q", header, 16, values)
    return with_checksums(
        header + struct.pack("<IIBBHI", len(payload), 0, mode, flags, 0, 0) + payload
    )
