"""Golden vectors: frames written once, which every version must still read and this version still writes.

tests/vectors/codec_v1.json lists them with their settings and the CRC-32 of the little-endian fp32 bytes they decode to. Their values
come from `values_of` below, in integers and exact operations, so that any language can repeat them. A wire change adds a new set and
keeps this one decoding.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from fsl_codecs import CodecSpec, decode, encode

FOLDER = Path(__file__).parent.parent / "vectors"
VECTORS = json.loads((FOLDER / "codec_v1.json").read_text())


def hashes(count, salt):
    """32-bit integers (count,) without visible order: multiply and shift, modulo 2**32."""
    mixed = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(salt)
    for shift, factor in ((15, 0x85EBCA77), (13, 0xC2B2AE3D)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))


def bell(count):
    """Roughly Gaussian: sums of four 16-bit integers, centred, times 2**-26."""
    total = np.zeros(count, dtype=np.int64)
    for salt in (1, 2):
        mixed = hashes(count, salt)
        total += (mixed & np.uint32(0xFFFF)).astype(np.int64) + (mixed >> np.uint32(16))
    return np.ldexp((total - 131_070).astype(np.float32), -26).astype(np.float32)


def values_of(kind, count):
    """The values of a golden vector, (count,) float32."""
    values = bell(count)
    chance = hashes(count, 3)
    if kind == "lopsided":
        values = np.where(values < 0, np.ldexp(values, -6), values)
    elif kind == "sparse":
        values = np.where(chance % 10 == 0, values, np.float32(0))
    elif kind == "wide":
        values = np.ldexp(values, (chance >> np.uint32(24)).astype(np.int64) - 134)
    elif kind == "constant":
        values = np.full(count, values[0])
    elif kind == "bits":
        return chance.view(np.float32)
    elif kind != "bell":
        raise ValueError(kind)
    return values.astype(np.float32)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["file"])
def test_golden_frames_are_written_and_read_as_ever(vector):
    """A byte that moves breaks mixed fleets and old spool files: it needs a new version of the format."""
    values = values_of(vector["values"], vector["count"])
    golden = (FOLDER / vector["file"]).read_bytes()
    assert encode(values, CodecSpec(**vector["spec"])) == golden
    assert zlib.crc32(decode(golden).astype("<f4").tobytes()) == vector["decoded_crc32"]


def test_no_golden_file_is_left_out():
    """A file nobody reads protects nothing."""
    listed = {vector["file"] for vector in VECTORS}
    assert listed == {path.name for path in FOLDER.glob("codec_v1_*.bin")}
