"""Frames of the codec whose checksums are right, whatever else is wrong: an attacker has them."""

import struct
import zlib

_HEADER, _HEAD = 28, 16


def sealed(frame):
    """The frame with all checksums made right again, as far as its lengths allow."""
    frame = bytearray(frame)
    if len(frame) < _HEADER:
        return bytes(frame)
    frame[24:28] = struct.pack("<I", zlib.crc32(frame[:24]))
    seed, position = zlib.crc32(frame[:24]), _HEADER
    while position + _HEAD <= len(frame):
        (size,) = struct.unpack_from("<I", frame, position)
        payload = frame[position + _HEAD : position + _HEAD + size]
        checksum = zlib.crc32(payload, zlib.crc32(frame[position : position + 12], seed))
        frame[position + 12 : position + 16] = struct.pack("<I", checksum)
        position += _HEAD + size
    return bytes(frame)
