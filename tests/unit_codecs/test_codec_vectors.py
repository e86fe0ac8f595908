"""Golden vectors: frames written once, which every version must read and this version still writes.

tests/vectors/codec_v6.json lists the inputs and the CRC-32 of the outputs. The frames are in files
beside it, except the large ones. The values are from `values_of` below, in integers and exact
operations, so that any language can repeat them. A wire change adds a new set and keeps this one
decoding; until a first release it replaces it. To write them again, which changes the reference of
all other tests of bytes, and to inspect the change:

    python tests/unit_codecs/test_codec_vectors.py && git diff --stat tests/vectors
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from fsl_codecs import CodecSpec, bound, decode, decode_into, encode_into
from fsl_codecs import info as info_of

FOLDER = Path(__file__).parent.parent / "vectors"
INDEX = FOLDER / "codec_v6.json"
FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")
LARGEST_FILE = 17_000


def hashes(count, salt):
    """Return 32-bit integers (count,) without visible order: multiply and shift, modulo 2**32."""
    mixed = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(salt)
    for shift, factor in ((15, 0x85EBCA77), (13, 0xC2B2AE3D)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))


def bell(count):
    """Return roughly Gaussian values: sums of four 16-bit integers, centered, times 2**-26."""
    total = np.zeros(count, dtype=np.int64)
    for salt in (1, 2):
        mixed = hashes(count, salt)
        total += (mixed & np.uint32(0xFFFF)).astype(np.int64) + (mixed >> np.uint32(16))
    return np.ldexp((total - 131_070).astype(np.float32), -26).astype(np.float32)


def zeros_below(numbers, most):
    """Return the number of zero bits below the lowest set one, at most `most`: 0 half of the time,
    then a quarter, and so on.
    """
    return sum(((numbers & np.uint32((2 << bit) - 1)) == 0).astype(np.int64) for bit in range(most))


def values_of(kind, count):
    """Return the values of a golden vector, (count,) float32."""
    values = bell(count)
    chance = hashes(count, 3)
    index = np.arange(count)
    is_sampled = index // 16 % 17 == 0
    if kind == "bell":
        return values
    if kind == "lopsided":  # negative ones are 64 times smaller
        return np.where(values < 0, np.ldexp(values, -6), values)
    if kind == "sparse":  # nine of ten are zero
        return np.where(chance % 10 == 0, values, np.float32(0))
    if kind == "touched":  # rows: one of twelve, and half of its values
        return np.where((index // 700 % 12 == 3) & (chance % 2 == 0), values, np.float32(0))
    if kind == "marked":  # two of five, all the same but for one outside the sample
        marks = np.where(index == 50_000, np.float32(-3), np.float32(0.5))
        return np.where((chance % 5 < 2) | (index == 50_000), marks, np.float32(0))
    if kind == "rows":  # a third are zeros of either sign, the others of sizes 2**-24 to 2**24
        sizes = (index // 1000 * 7 % 49) - 24
        zeros = np.where(chance % 2 == 0, np.float32(0), np.float32(-0.0))
        return np.where(index // 1000 % 3 == 1, zeros, np.ldexp(values, sizes))
    if kind == "wide":  # all exponents, of which the lowest give subnormal numbers
        exponents = (chance >> np.uint32(24)).astype(np.int64) - 134
        return np.ldexp(values, np.maximum(exponents, -123))
    if kind == "tiny":  # subnormal numbers alone
        return np.ldexp(values, -118)
    if kind == "heavy":  # twice as large is half as frequent
        return np.ldexp(values, zeros_below(chance, 20))
    if kind == "outside":  # large values outside the sample
        return np.ldexp(values, np.where((chance % 97 == 0) & ~is_sampled, 9, 0))
    if kind == "late":  # two of the four bytes change once, outside the sample
        numbers = 128 + chance % 97
        return np.where(index == count - 2000, -(2.0**100), numbers / 128).astype(np.float32)
    if kind == "misled":  # a sample has a few small bytes, the rest has others
        words = np.zeros(count, dtype=np.uint32)
        for shift in (0, 8, 16, 24):
            drawn = hashes(count, 10 + shift)
            shown = zeros_below(drawn, 12).astype(np.uint32)
            hidden = np.uint32(0x18) + (drawn >> np.uint32(8)) % np.uint32(0x58)
            words |= np.where(is_sampled, shown, hidden).astype(np.uint32) << np.uint32(shift)
        return words.view(np.float32)
    if kind == "constant":
        return np.full(count, values[0])
    if kind == "bits":
        return chance.view(np.float32)
    raise ValueError(kind)


def inputs():
    """Return the inputs of each vector, as in the list."""
    for name in FORMATS:
        is_scaled = name in ("e4m3", "e5m2", "uniform")
        for kind, count, spec in [
            ("bell", 0, {}),
            ("bell", 1001, {"entropy": False}),
            ("bell", 300, {}),
            ("bell", 1001, {}),
            ("bell", 3001, {}),
            ("bell", 3000, {"block_values": 16, "chunk_values": 1008}),
            ("bell", 20_001, {}),
            ("bell", 40_000, {"block_values": 1024}),
            ("lopsided", 3000, {}),
            ("sparse", 5000, {}),
            ("sparse", 3000, {"block_values": 16}),
            ("rows", 33_000, {}),
            ("wide", 2000, {}),
            ("tiny", 1000, {}),
            ("heavy", 3000, {}),
            ("heavy", 20_001, {"block_values": 16, "entropy": False}),
            ("outside", 40_000, {}),
            ("late", 40_000, {}),
            ("misled", 40_000, {}),
            ("constant", 3000, {"chunk_values": 1024}),
            ("bits", 300, {"chunk_values": 128}),
        ]:
            if is_scaled or "block_values" not in spec or spec["block_values"] == 16:
                yield {"values": kind, "count": count, "spec": {"format": name, **spec}}
        if name != "e5m2":
            yield {"values": "touched", "count": 30_000, "spec": {"format": name}}
        # Scales as ranks, with more of them above the most frequent one, and with fewer.
        ranked = [("lopsided", 64), ("bell", 32)] if name == "uniform" else []
        ranked += [("sparse", 32), ("lopsided", 16)] if is_scaled and name != "uniform" else []
        for kind, block_values in ranked:
            spec = {"format": name, "block_values": block_values, "entropy": False}
            yield {"values": kind, "count": 2001, "spec": spec}
        spec = {"format": name, "chunk_values": 1024}
        yield {"values": "bell", "count": 1500, "spec": spec, "reference": "lopsided"}
        yield {"values": "bell", "count": 1500, "spec": spec, "residual": "heavy"}
        feedback = {"reference": "rows", "residual": "lopsided"}
        yield {"values": "heavy", "count": 1500, "spec": spec, **feedback}
        yield {"values": "constant", "count": 200, "spec": spec, "residual": "constant"}
        yield {"values": "wide", "count": 1500, "spec": spec, "input": "bf16", "residual": "bell"}
    for step_log2 in (0, 8, 24, 33, 40):
        for kind in ("bell", "heavy"):
            spec = {"format": "uniform", "block_values": 64, "step_log2": step_log2}
            yield {"values": kind, "count": 1001, "spec": spec}
    yield {"values": "marked", "count": 70_000, "spec": {"format": "bf16"}}
    yield {"values": "sparse", "count": 60_000, "spec": {"format": "uniform"}, "residual": "sparse"}
    for step_log2 in (-8, -4, 0):  # groups
        for kind, count in (("bell", 33_003), ("sparse", 5001), ("misled", 40_000), ("heavy", 19)):
            spec = {"format": "uniform", "step_log2": step_log2}
            yield {"values": kind, "count": count, "spec": spec}


def name_of(given):
    """Return a unique name of the vector."""
    spec = given["spec"]
    parts = [spec["format"], given["values"], str(given["count"])]
    parts += [f"b{spec['block_values']}"] if "block_values" in spec else []
    parts += [f"f{spec['step_log2']}"] if "step_log2" in spec else []
    parts += [] if spec.get("entropy", True) else ["plain"]
    parts += [key for key in ("input", "reference", "residual") if key in given]
    return "_".join(parts)


def checksum(array):
    return zlib.crc32(array.astype(array.dtype.newbyteorder("<")).tobytes())


def made(given):
    """Return the frame, and the checksums of the other outputs."""
    values = values_of(given["values"], given["count"])
    if given.get("input") == "bf16":
        values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    feedback = {
        key: values_of(given[key], given["count"]).copy()
        for key in ("reference", "residual")
        if key in given
    }
    spec = CodecSpec(**given["spec"])
    out = bytearray(bound(values.size, spec))
    frame = bytes(out[: encode_into(values, out, spec, **feedback)])
    results = {"frame_bytes": len(frame), "frame_crc32": zlib.crc32(frame)}
    if "residual" in feedback:
        results["residual_crc32"] = checksum(feedback["residual"])
    return frame, results


def read(frame):
    """Return the checksums of the values that a frame decodes to."""
    values = decode(frame)
    halves = np.empty(values.size, np.uint16)
    decode_into(frame, halves)
    return {"decoded_crc32": checksum(values), "decoded_bf16_crc32": checksum(halves)}


def rewrite():
    """Write all vectors again."""
    for path in FOLDER.glob("codec_v6*"):
        path.unlink()
    lines = []
    for given in inputs():
        frame, results = made(given)
        entry = {"name": name_of(given), **given, **results, **read(frame)}
        if len(frame) <= LARGEST_FILE:
            entry["file"] = f"codec_v6_{entry['name']}.bin"
            (FOLDER / entry["file"]).write_bytes(frame)
        lines.append("  " + json.dumps(entry))
    INDEX.write_text("[\n" + ",\n".join(lines) + "\n]\n")


VECTORS = json.loads(INDEX.read_text()) if INDEX.exists() else []


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden_frames_are_written_and_read_unchanged(vector):
    """A changed byte needs a decision: another choice of the encoder, which older decoders read
    too, or a new format version.
    """
    frame, results = made(vector)
    assert results == {key: vector[key] for key in results}
    if "file" in vector:
        golden = (FOLDER / vector["file"]).read_bytes()
        assert frame == golden
        frame = golden
    assert read(frame) == {key: vector[key] for key in vector if key.startswith("decoded")}


def test_the_list_is_that_of_the_inputs():
    """`rewrite` wrote the list, and no file is missing or extra."""
    for given, vector in zip(inputs(), VECTORS, strict=True):
        assert given.items() <= vector.items()
        assert vector["name"] == name_of(given)
    files = {vector["file"] for vector in VECTORS if "file" in vector}
    assert files == {path.name for path in FOLDER.glob("codec_*.bin")}
    assert sum(path.stat().st_size for path in FOLDER.glob("codec_*")) < 500_000
    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)


def test_the_vectors_show_every_part_of_the_format():
    """Otherwise an error in another language's implementation could stay hidden."""
    # Imported here, because the script that writes the vectors runs without this folder.
    from frame_tables import tables_of

    seen = set()
    for vector in VECTORS:
        if "file" not in vector:
            continue
        frame = (FOLDER / vector["file"]).read_bytes()
        name = vector["spec"]["format"]
        info = info_of(frame)
        if info.raw_code_chunks == info.chunks > 0 and name != "bf16":
            form = frame[28 + 16 + (2 if name == "uniform" else 1)]
            seen.add((name, "scales", "planes" if form < 64 else form & 192))
        modes = ("raw_fp32", "constant", "raw_code", "coded")
        seen |= {(name, mode) for mode in modes if getattr(info, f"{mode}_chunks")}
        if info.coded_chunks == info.chunks > 0:
            own = tables_of(frame)
            seen |= {(name, "escape") for table in own if table.escape}
            seen |= {(name, "ranks", table.last_rank > 0) for table in own if table.escape}
            seen |= {(name, "low bits", table.low_bits > 0) for table in own if table.escape}
            seen.add((name, "split", frame[28 + 16]))
            seen.add((name, "plane", frame[28 + 16 + 1]))
            if frame[28 + 16 + 1] >= 2:
                seen.add((name, "many lanes", min(info.values, info.chunk_values) >= 16384))
    for name in FORMATS:
        expected = {"raw_fp32", "constant", "coded"} | ({"raw_code"} if name != "fp32" else set())
        assert {(name, mode) for mode in expected} <= seen
        assert (name, "plane", 2) in seen
    for name, splits in (("e4m3", 4), ("e5m2", 4), ("uniform", 5)):
        assert {(name, "split", at) for at in range(splits)} <= seen
        assert {(name, "escape"), (name, "ranks", True), (name, "low bits", True)} <= seen
        assert {(name, "scales", form) for form in ("planes", 64, 128)} <= seen
        assert {(name, "many lanes", many) for many in (False, True)} <= seen


if __name__ == "__main__":
    rewrite()
