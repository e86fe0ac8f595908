"""A script: every native path and the NumPy package read mutated frames alike.

They give the same refusal or the same values: as fp32, as bf16 and added, with several threads too.

    python tests/unit_codecs/mutated_frames.py [FRAMES, 100000] [SEED, 0]

Exits with 1 at the first frame that two of them read differently, and writes it to
mutated-frame.bin.
"""

import struct
import sys
import time
from pathlib import Path

import numpy as np

from fsl_codecs import CodecError, CodecSpec, available, bound
from fsl_codecs.codec import _rounded_to_bfloat16
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.frame import VERSION

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from forged_frames import with_checksums

REFERENCE = implementation_named("numpy")
VECTORS = Path(__file__).resolve().parent.parent / "vectors"
COUNT = 700
MANY = 16_400
"""Number of values whose streams have 128 lanes, with the last symbols in two inner blocks."""
MOST_GOLDEN = 40_000
"""Largest number of values in a golden vector."""
CHUNK = 131_072
"""A chunk of the runtime: from this size fp32 is written past the cache, and all pieces but the
last are read in one pass.
"""
FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")
WEIGHT = np.float32(0.3)
HEADER = 28
SHARES = (0.83, 0.05, 0.1, 0.02)
"""Shares of frames of few values, of many, of golden vectors, and of a full chunk or more. Most are
small, because the reference is slow.
"""
THREADS = (2, 3, 8)


def vectors(generator, count):
    """Return vectors (count,) float32 that lead to all modes, planes and escapes."""
    bell = generator.standard_normal(count)
    heavy = bell * np.exp(3 * generator.standard_normal(count))
    sparse = np.where(generator.random(count) < 0.03, bell, 0)
    nan = np.where(np.arange(count) == count // 2, np.nan, bell)
    few = generator.integers(0, 3, count) - 1.0
    tiny = bell * 1e-39
    kinds = (bell, heavy, sparse, nan, few, np.abs(bell), tiny, np.full(count, 0.3))
    return [kind.astype(np.float32) for kind in kinds]


def encoded(values, spec):
    """Return the reference's frame."""
    out = np.empty(bound(values.size, spec), np.uint8)
    return out[: REFERENCE.encode_into(values, out, spec)].tobytes()


def seeds(generator):
    """Return frames to start from, with their largest number of values, in groups as in SHARES."""
    large = vectors(generator, CHUNK)[:2]
    few = [
        encoded(values, CodecSpec(name, 32, chunk, entropy))
        for values in vectors(generator, COUNT)
        for name in FORMATS
        for chunk, entropy in ((1024, True), (256, True), (1024, False))
    ]
    many = [
        encoded(values, CodecSpec(name))
        for values in vectors(generator, MANY)[:3]
        for name in FORMATS
    ]
    whole = [
        encoded(values, CodecSpec(name, chunk_values=chunk))
        for values in large
        for name in FORMATS
        for chunk in (CHUNK, CHUNK // 2)
    ]
    beyond = np.concatenate([large[0], large[1][:5000]])
    whole += [encoded(beyond, CodecSpec(name)) for name in FORMATS]
    golden = [path.read_bytes() for path in sorted(VECTORS.glob("*.bin"))]
    golden = [frame for frame in golden if len(frame) > HEADER]
    return (few, COUNT), (many, MANY), (golden, MOST_GOLDEN), (whole, beyond.size)


def mutated(frames, generator):
    """Return a frame with bytes changed, cut, added, or taken from another frame; most have correct
    checksums.
    """
    frame = bytearray(frames[generator.integers(len(frames))])
    kind = generator.integers(9)
    if kind == 0:
        del frame[generator.integers(len(frame)) :]
    elif kind == 1:
        frame += generator.bytes(generator.integers(1, 9))
    elif kind == 2:
        at = generator.integers(28, len(frame))
        other = frames[generator.integers(len(frames))]
        frame[at : at + 64] = other[at : at + 64]
    elif kind == 3:
        at = generator.integers(len(frame))
        del frame[at : at + generator.integers(1, 9)]
    for _ in range(generator.integers(1, 4)):
        # Code tables and scales are at the front of payloads; a changed head is nearly always
        # refused at once.
        first = 0 if generator.random() < 0.2 else 44
        end = len(frame) if generator.random() < 0.5 else min(len(frame), 90)
        if first < end:
            frame[generator.integers(first, end)] = generator.integers(256)
    if generator.random() < 0.9 and len(frame) >= 28:
        if generator.random() < 0.5 and len(frame) >= 44:
            # The first chunk's length is right, so the error is behind it.
            end = struct.unpack_from("<I", frame, 28)[0]
            if end > len(frame) - 44:
                frame[28:32] = struct.pack("<I", len(frame) - 44)
        frame = with_checksums(frame)
    return bytes(frame)


def reading(codec, frame, count, *, dtype=np.float32, threads=1):
    """Read a frame with space for `count` values; returns the bytes of its values, or the class and
    text of its refusal.
    """
    out = np.zeros(count, dtype)
    try:
        read = codec.decode_into(frame, out, threads=threads)
    except CodecError as error:
        return type(error), str(error)
    return read, out[:read].tobytes()


def inspected(codec, frame):
    """Return the frame's description, or the class and text of its refusal."""
    try:
        return codec.info(frame)
    except CodecError as error:
        return type(error), str(error)


def halves_of(found):
    """Return the result of reading to bf16: the reference rounds what it decoded to fp32."""
    if isinstance(found[0], type):
        return found
    return found[0], _rounded_to_bfloat16(np.frombuffer(found[1], np.float32)).tobytes()


def expected_sums(found, count):
    """Return the result of adding the values to ones; a refused frame adds nothing."""
    total = np.ones(count, np.float32)
    if not isinstance(found[0], type):
        with np.errstate(all="ignore"):
            total[: found[0]] += WEIGHT * np.frombuffer(found[1], np.float32)
    return total.tobytes()


def difference(codec, frame, found, *, count, threads):
    """Return how a path reads the frame differently from the reference; None if it does not.

    `found`: the reference's fp32, bf16 and description.
    """
    values, halves, description = found
    ours = reading(codec, frame, count, threads=threads)
    if ours != values:
        return f"decode_into: {ours[:2]!r:.300} instead of {values[:2]!r:.300}"
    ours = reading(codec, frame, count, dtype=np.uint16, threads=threads)
    if ours != halves:
        return f"decode_into bf16: {ours[:2]!r:.300} instead of {halves[:2]!r:.300}"
    total = np.ones(count, np.float32)
    try:
        added = codec.decode_accumulate(frame, total, float(WEIGHT), threads=threads)
        ours = added, values[1]
    except CodecError as error:
        ours = type(error), str(error)
    if ours != values:
        return f"decode_accumulate: {ours!r:.300} instead of {values!r:.300}"
    if total.tobytes() != expected_sums(values, count):
        return "decode_accumulate: other sums"
    if inspected(codec, frame) != description:
        return "info: another answer"
    return None


def main(arguments):
    """Run the script; returns the exit code."""
    frames_wanted = int(arguments[0]) if arguments else 100_000
    generator = np.random.default_rng(int(arguments[1]) if len(arguments) > 1 else 0)
    groups = seeds(generator)
    paths = [implementation_named(name) for name in available() if name != "numpy"]
    if not paths:
        sys.stderr.write("the native codec is not built here\n")
        return 2
    counts = dict.fromkeys(("refused", "whole", "threads"), 0)
    start = time.monotonic()
    for number in range(frames_wanted):
        group = generator.choice(len(groups), p=SHARES)
        frames, count = groups[group]
        frame = mutated(frames, generator)
        values = reading(REFERENCE, frame, count)
        found = values, halves_of(values), inspected(REFERENCE, frame)
        threads = int(generator.choice(THREADS)) if generator.random() < 0.3 else 1
        counts["refused"] += isinstance(values[0], type)
        counts["whole"] += frames is groups[-1][0]
        counts["threads"] += threads > 1
        for codec in paths:
            problem = difference(codec, frame, found, count=count, threads=threads)
            if problem:
                Path("mutated-frame.bin").write_bytes(frame)
                sys.stderr.write(f"frame {number}, {codec.name}, {threads} threads: {problem}\n")
                return 1
    names = " ".join(codec.name for codec in paths)
    seconds = time.monotonic() - start
    sys.stdout.write(
        f"{frames_wanted} frames, {counts['refused']} refused, "
        f"read alike by numpy {names}, {seconds:.0f} s; "
        f"{counts['whole']} of {CHUNK} values and more, {counts['threads']} by several threads; "
        f"frame version {VERSION}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
