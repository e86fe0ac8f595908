"""Mutated frames, read by every native path and by the NumPy package: the same refusal or the same values. A script.

    python tests/unit_codecs/mutated_frames.py [FRAMES, 100000] [SEED, 0]

Exits with 1 at the first frame that two of them read differently, which it leaves in mutated-frame.bin.
"""

import struct
import sys
import time
from pathlib import Path

import numpy as np

from fsl_codecs import CodecError, CodecSpec, available, bound, codebooks_of
from fsl_codecs.dispatch import implementation_named

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from sealed_frames import sealed

REFERENCE = implementation_named("numpy")
COUNT = 700
MANY = 16_400
"""Values with streams of 128 lanes, whose last symbols lie in two inner blocks. Frames of so many are few, as the reference takes its time."""
FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")
WEIGHT = np.float32(0.3)
LARGE_SHARE = 0.1


def vectors(generator, count):
    """Vectors (count,) float32 that bring out the modes, planes and escapes."""
    bell = generator.standard_normal(count)
    heavy = bell * np.exp(3 * generator.standard_normal(count))
    sparse = np.where(generator.random(count) < 0.03, bell, 0)
    nan = np.where(np.arange(count) == count // 2, np.nan, bell)
    few = generator.integers(0, 3, count) - 1.0
    tiny = bell * 1e-39
    kinds = (bell, heavy, sparse, nan, few, np.abs(bell), tiny, np.full(count, 0.3))
    return [kind.astype(np.float32) for kind in kinds]


def encoded(values, spec, books=()):
    """The reference's frame."""
    out = np.empty(bound(values.size, spec), np.uint8)
    return out[: REFERENCE.encode_into(values, out, spec, books=books)].tobytes()


def seeds(generator):
    """Frames to start from, frames of many values, and the books that some of both share."""
    books = []
    for name in FORMATS[1:]:
        bell = generator.standard_normal(3000).astype(np.float32)
        books.extend(codebooks_of(encoded(bell, CodecSpec(name))))
    frames = [
        encoded(values, CodecSpec(name, 32, chunk, entropy), shared)
        for values in vectors(generator, COUNT)
        for name in FORMATS
        for chunk, entropy, shared in (
            (1024, True, ()),
            (256, True, ()),
            (1024, True, books),
            (1024, False, ()),
        )
    ]
    large = [
        encoded(values, CodecSpec(name), shared)
        for values in vectors(generator, MANY)[:3]
        for name in FORMATS
        for shared in ((), books)
    ]
    return frames, large, tuple(books)


def mutated(frames, generator):
    """One of the frames with bytes changed, cut, added, or taken from another; most with right checksums."""
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
        # Books and scales stand at the front of payloads; a changed head is nearly always refused at once.
        first = 0 if generator.random() < 0.2 else 44
        end = len(frame) if generator.random() < 0.5 else min(len(frame), 90)
        if first < end:
            frame[generator.integers(first, end)] = generator.integers(256)
    if generator.random() < 0.9 and len(frame) >= 28:
        if generator.random() < 0.5 and len(frame) >= 44:
            # The first chunk's length is right, so that what is wrong lies behind it.
            end = struct.unpack_from("<I", frame, 28)[0]
            if end > len(frame) - 44:
                frame[28:32] = struct.pack("<I", len(frame) - 44)
        frame = sealed(frame)
    return bytes(frame)


def reading(codec, frame, books, count):
    """What the frame gives, with room for `count`: the bytes of its values, or the class and text of its refusal."""
    out = np.zeros(count, np.float32)
    try:
        read = codec.decode_into(frame, out, books=books)
    except CodecError as error:
        return type(error), str(error)
    return read, out[:read].tobytes()


def inspected(codec, frame):
    """What the frame says about itself, or the class and text of its refusal."""
    try:
        return codec.info(frame)
    except CodecError as error:
        return type(error), str(error)


def expected_sums(found, count):
    """What adding the values to ones gives; a refused frame adds nothing."""
    total = np.ones(count, np.float32)
    if not isinstance(found[0], type):
        with np.errstate(all="ignore"):
            total[: found[0]] += WEIGHT * np.frombuffer(found[1], np.float32)
    return total.tobytes()


def difference(codec, frame, books, found, count):
    """How a path reads the frame otherwise than the reference, which `found`; or nothing."""
    ours = reading(codec, frame, books, count)
    if ours != found:
        return f"decode_into: {ours[:2]!r:.300} instead of {found[:2]!r:.300}"
    total = np.ones(count, np.float32)
    try:
        added = codec.decode_accumulate(frame, total, float(WEIGHT), books=books), found[1]
    except CodecError as error:
        added = type(error), str(error)
    if added != found:
        return f"decode_accumulate: {added!r:.300} instead of {found!r:.300}"
    if total.tobytes() != expected_sums(found, count):
        return "decode_accumulate: other sums"
    if inspected(codec, frame) != inspected(REFERENCE, frame):
        return "info: another answer"
    return None


def main(arguments):
    """Returns the exit code."""
    frames_wanted = int(arguments[0]) if arguments else 100_000
    generator = np.random.default_rng(int(arguments[1]) if len(arguments) > 1 else 0)
    frames, large, books = seeds(generator)
    paths = [implementation_named(name) for name in available() if name != "numpy"]
    if not paths:
        sys.stderr.write("the native codec is not built here\n")
        return 2
    refused = 0
    start = time.monotonic()
    for number in range(frames_wanted):
        some, count = (large, MANY) if generator.random() < LARGE_SHARE else (frames, COUNT)
        frame = mutated(some, generator)
        found = reading(REFERENCE, frame, books, count)
        refused += isinstance(found[0], type)
        for codec in paths:
            problem = difference(codec, frame, books, found, count)
            if problem:
                Path("mutated-frame.bin").write_bytes(frame)
                sys.stderr.write(f"frame {number}, {codec.name}: {problem}\n")
                return 1
    names = " ".join(codec.name for codec in paths)
    seconds = time.monotonic() - start
    sys.stdout.write(
        f"{frames_wanted} frames, {refused} refused, read alike by numpy {names}, {seconds:.0f} s\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
