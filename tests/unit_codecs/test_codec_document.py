"""A reader of complete frames that follows docs/WIRE.md in plain Python, sharing no code with the
package.

Other tests check parts; this one checks the order of heads, streams, scales, planes and escaped
values.
"""

import math
import struct
import zlib

import numpy as np
import pytest
from attrs import evolve
from forged_frames import forged
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fsl_codecs import CodecError, CodecSpec, FrameError, available, decode, encode, format_of, info
from fsl_codecs.dispatch import implementation_named

FORMATS = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]
RANGES = {"e4m3": (10, 247), "e5m2": (17, 240), "uniform": (8, 992)}
"""The scales that a frame may hold."""
ONE = {"e4m3": 0x38, "e5m2": 0x3C, "uniform": 129}
"""The code of 1, which decodes to the scale."""
CODE_BITS = {"fp32": 32, "bf16": 16, "e4m3": 8, "e5m2": 8, "uniform": 8}
SPLITS = {
    "fp32": [("rotated", 8, 8, 8, 8), ("sparse",)],
    "bf16": [("rotated", 8, 8), ("sparse",)],
    "e4m3": [("rotated", 6, 2), ("plain", 6, 2), ("plain", 8), ("sparse",)],
    "e5m2": [("rotated", 6, 2), ("plain", 6, 2), ("plain", 8), ("sparse",)],
    "uniform": [("plain", 6, 2), ("plain", 8), ("groups of 2", 6), ("groups of 4", 8), ("sparse",)],
}


UNHURRIED = settings(deadline=None, max_examples=60)
SPECS = st.builds(
    lambda name, block, blocks, entropy, step_log2: CodecSpec(
        name, block, block * blocks, entropy, step_log2
    ),
    st.sampled_from(FORMATS),
    st.sampled_from([16, 32, 128, 1024]),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([-8, -3, 0, 8, 14, 20, 40]),
)
ANY_VALUES = hnp.arrays(np.float32, st.integers(0, 700), elements=st.floats(width=32))


class Bytes:
    """A cursor over bytes."""

    def __init__(self, data):
        self.data = data

    def take(self, count):
        """Return the next bytes."""
        assert len(self.data) >= count
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def numbers(self, form):
        """Return the next numbers, in struct's format letters."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def number(self, form):
        """Return the next number."""
        return self.numbers(form)[0]

    def bits(self, count):
        """Yield the next bits, lowest first, up to a full byte."""
        data = self.take(-(-count // 8))
        return [data[at // 8] >> at % 8 & 1 for at in range(count)]

    def planes(self, count, width):
        """Return numbers from bit planes, the highest bit first."""
        numbers = [0] * count
        for _ in range(width):
            numbers = [2 * n + bit for n, bit in zip(numbers, self.bits(count), strict=True)]
        return numbers

    def ranks(self, count, last):
        """Return numbers up to `last`: for each smaller number, a bit for each that is at least it,
        set if higher.
        """
        numbers, at = [0] * count, 0
        for rank in range(last):
            for which in [i for i, number in enumerate(numbers) if number >= rank]:
                numbers[which] += self.data[at // 8] >> at % 8 & 1
                at += 1
        self.take(-(-at // 8))
        return numbers


def single(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


class CodeTable:
    """The leaf of each code word (a text), None for the escape; and the plane's symbols without a
    code, by number.
    """

    def __init__(self, data, width):
        first, last, ends = data.numbers("BBB")
        self.low_bits, escape = divmod(ends, 16)
        digits = [
            digit for byte in data.take((last - first) // 2 + 1) for digit in (byte & 15, byte >> 4)
        ]
        lengths = {symbol: length for symbol, length in enumerate(digits, first) if length}
        leaves = sorted((length, symbol) for symbol, length in lengths.items())
        leaves = sorted([*leaves, (escape, 256)] if escape else leaves)
        self.uncoded = [s for s in range(first, last) if s not in lengths]
        for away in range(1, 1 << width):
            beside = (first - away, last + away)
            self.uncoded += [s for s in beside if 0 <= s < 1 << width]
        self.uncoded = self.uncoded if escape else []
        highest = max(0, len(self.uncoded) - 1)
        self.last_rank = highest >> self.low_bits
        assert self.last_rank <= 15
        assert self.low_bits <= highest.bit_length()
        code, self.leaves = 0, {}
        for length, symbol in leaves:
            word = format(code >> 8 - length, f"0{length}b")
            self.leaves[word] = None if symbol == 256 else symbol
            code += 1 << 8 - length
        assert code == 256


def stream_of(data, table, count, many_from=16384):
    """Return the symbols of a stream; None for a symbol in a list."""
    lanes = 128 if count >= many_from else 16
    data = Bytes(data.take(data.number("I")))
    lows, seconds = data.take(lanes), data.take(lanes)
    states = [
        (low + ((second - (1 << second.bit_length() - 1)) << 8), second.bit_length() - 1)
        for low, second in zip(lows, seconds, strict=True)
    ]
    symbols = []
    for at in range(count - lanes):
        v, p = states[at % lanes]
        bits = format(v >> p & 255, "08b")
        word = next(bits[:end] for end in range(1, 9) if bits[:end] in table.leaves)
        symbols.append(table.leaves[word])
        p -= len(word)
        if p < 0:
            v, p = 256 * v + data.number("B"), p + 8
        states[at % lanes] = v % (1 << 8 + p), p
    assert not data.data
    assert not any(p for _, p in states)
    ends = [states[at % lanes][0] for at in range(max(0, count - lanes), count)]
    lowest = min(table.uncoded, default=None)
    return symbols + [None if v == lowest else v for v in ends]


def head_of(data, width):
    kind = data.number("B")
    if kind == 0:
        return "raw", None
    if kind == 1:
        return "constant", data.number("B")
    assert kind == 2
    return "coded", CodeTable(data, width)


def plane_of(data, head, width, streamed):
    """Return the symbols of an inner block; `streamed` are the stream's, or as many None."""
    kind, what = head
    count = len(streamed)
    if kind == "constant":
        return [what] * count
    if kind == "raw":
        return list(data.take(count)) if width == 8 else data.planes(count, width)
    if not what.uncoded:
        return streamed
    listed = data.number("H")
    assert listed == streamed.count(None)
    low = data.planes(listed, what.low_bits)
    ranks = data.ranks(listed, what.last_rank)
    numbers = iter([rank << what.low_bits | n for rank, n in zip(ranks, low, strict=True)])
    return [what.uncoded[next(numbers)] if s is None else s for s in streamed]


def whole_plane(data, count):
    """Return the symbols of a plane of a sparse chunk."""
    if count == 0:
        return []
    kind, what = head_of(data, 8)
    streamed = stream_of(data, what, count, 4096) if kind == "coded" else [None] * count
    parts = (streamed[start : start + 16384] for start in range(0, count, 16384))
    return [symbol for part in parts for symbol in plane_of(data, (kind, what), 8, part)]


def sparse_codes(data, name, count):
    """Return the codes of a sparse chunk."""
    groups, zero = -(-count // 8), 128 if name == "uniform" else 0
    shown = Bytes(whole_plane(data, -(-groups // 8))).bits(groups)
    lower = whole_plane(data, sum(shown))
    assert 0 not in lower
    mask = iter(lower)
    is_code = Bytes([next(mask) if bit else 0 for bit in shown]).bits(count)
    codes = [0] * sum(is_code)
    for _ in range(CODE_BITS[name] // 8):
        plane = whole_plane(data, len(codes))
        codes = [code << 8 | symbol for code, symbol in zip(codes, plane, strict=True)]
    if CODE_BITS[name] > 8:
        codes = [code >> 1 | (code & 1) << CODE_BITS[name] - 1 for code in codes]
    assert zero not in codes
    code = iter(codes)
    return [next(code) if bit else zero for bit in is_code]


def scales_in_use(data, codes, name, block_values):
    """Return the scales of an inner block of a sparse chunk."""
    runs = [codes[at : at + block_values] for at in range(0, len(codes), block_values)]
    in_use = [any(code != (128 if name == "uniform" else 0) for code in run) for run in runs]
    scales = iter(scales_of(data, sum(in_use), name) if any(in_use) else [])
    return [next(scales) if each else 127 for each in in_use]


def scales_of(data, runs, name):
    """Return the scales of an inner block, b or k + 512."""
    one, form = data.numbers("HB" if name == "uniform" else "BB")
    if form <= (10 if name == "uniform" else 8):
        return [one + n for n in data.planes(runs, form)]
    sign, last = (1, form - 64) if form < 128 else (-1, form - 128)
    assert 1 <= last <= 15
    # By rank: 0, 1, -1, 2, -2 and so on, or with the other sign.
    differences = [0] + [sign * each for ways in range(1, 9) for each in (ways, -ways)]
    return [one + differences[rank] for rank in data.ranks(runs, last)]


def float8(code, name):
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[name]
    exponent, mantissa = code >> mantissa_bits & (127 >> mantissa_bits), code % (1 << mantissa_bits)
    significand = mantissa + (1 << mantissa_bits if exponent else 0)
    value = math.ldexp(significand, max(exponent, 1) - bias - mantissa_bits)
    return -value if code & 128 else value


def values_of(codes, scales, block_values, name, data):
    for at, code in enumerate(codes):
        if name == "fp32":
            yield struct.pack("<I", code)
        elif name == "bf16":
            yield struct.pack("<I", code << 16)
        elif name == "uniform" and code == 0:
            yield data.take(4)
        elif name == "uniform":
            k = scales[at // block_values] - 512
            step = math.ldexp(single(2 ** (k % 4 / 4)), k // 4)
            yield struct.pack("<f", (code - 128) * step)
        else:
            scale = scales[at // block_values] - 127
            yield struct.pack("<f", math.ldexp(float8(code, name), scale))


def group_of(rotation):
    return int(rotation.removeprefix("groups of ")) if rotation.startswith("groups") else 1


def ungrouped(data, symbols, group, count):
    """Return the codes of an inner block's groups; those without a digit are listed."""
    base, first = {2: (8, 125), 4: (4, 127)}[group]
    digits = []
    for symbol in symbols:
        digits += [symbol // base**place % base for place in reversed(range(group))]
    listed = iter(data.take(data.number("H")))
    codes = [next(listed) if digit == base - 1 else first + digit for digit in digits]
    assert not list(listed)
    assert codes[count:] == [128] * (len(codes) - count)
    return codes[:count]


def inner_block(data, count, name, block_values, plan):
    """Return the bytes of an inner block's values."""
    scales = []
    if CODE_BITS[name] == 8 and isinstance(plan, list):
        scales = scales_in_use(data, plan, name, block_values)
    elif CODE_BITS[name] == 8:
        scales = scales_of(data, -(-count // block_values), name)
    if isinstance(plan, list):
        codes = plan
    elif plan is None:
        codes = data.numbers(f"{count}{'H' if name == 'bf16' else 'B'}")
    else:
        (rotation, *widths), heads, streams = plan
        group = group_of(rotation)
        codes = [0] * -(-count // group)
        for width, head, stream in zip(widths, heads, streams, strict=True):
            plane = plane_of(data, head, width, stream)
            codes = [code << width | symbol for code, symbol in zip(codes, plane, strict=True)]
        if rotation == "rotated":
            top = CODE_BITS[name] - 1
            codes = [code >> 1 | (code & 1) << top for code in codes]
        elif group > 1:
            codes = ungrouped(data, codes, group, count)
    return b"".join(values_of(codes, scales, block_values, name, data))


def read(frame):
    """Return the bytes of a frame's fp32 values."""
    data = Bytes(frame)
    assert zlib.crc32(frame[:24]) == struct.unpack("<I", frame[24:28])[0]
    magic, version, wire_id, reserved = data.numbers("4sBBH")
    block_values, chunk_values, values, seed = data.numbers("IIQI")
    assert (magic, version, reserved) == (b"FSLC", 6, 0)
    name, out = FORMATS[wire_id], b""
    for index in range(-(-values // chunk_values)):
        checked = data.data
        payload_bytes, written_index, mode, flags, reserved, checksum = data.numbers("IIBBHI")
        payload = Bytes(data.take(payload_bytes))
        assert zlib.crc32(payload.data + checked[:12], seed) == checksum
        assert (written_index, flags & ~1, reserved) == (index, 0, 0)
        count = min(chunk_values, values - index * chunk_values)
        if mode == 0:
            out += payload.take(4 * count)
        elif mode == 1:
            out += payload.take(4) * count
        else:
            plan = codes = None
            if mode == 3:
                split = SPLITS[name][payload.number("B")]
            if mode == 3 and split == ("sparse",):
                codes = sparse_codes(payload, name, count)
            elif mode == 3:
                heads = [head_of(payload, width) for width in split[1:]]
                group = group_of(split[0])
                symbols = -(-count // group)
                streams = [
                    stream_of(payload, what, symbols) if kind == "coded" else [None] * symbols
                    for kind, what in heads
                ]
            for start in range(0, count, 16384):
                part = min(16384, count - start)
                if codes is not None:
                    plan = codes[start : start + part]
                elif mode == 3:
                    those = slice(start // group, -(-(start + part) // group))
                    plan = split, heads, [stream[those] for stream in streams]
                out += inner_block(payload, part, name, block_values, plan)
        assert not payload.data
    assert not data.data
    return out


def drawn(draw, count):
    generator = np.random.default_rng(count)
    values = generator.standard_normal(count)
    if draw == "gelu":
        values = np.where(values > 0, values, values / 40)
    elif draw == "sparse":
        values = np.where(generator.random(count) < 0.04, values, 0)
    elif draw == "heavy":
        values = generator.standard_t(1.5, count)
    elif draw == "rows":
        values *= 2.0 ** np.repeat(generator.integers(-90, 90, -(-count // 300)), 300)[:count]
        values[3000:5000] = 0
    elif draw == "nan":
        values[count // 2] = np.nan
    return values.astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("draw", ["gauss", "gelu", "sparse", "heavy", "rows", "nan"])
def test_the_document_alone_reads_frames(name, draw):
    """Small and sampled chunks, coded and not, with code tables and escapes."""
    many = [(131_072, CodecSpec(name))] if draw == "sparse" else []
    for count, spec in [
        *many,
        (700, CodecSpec(name)),
        (3000, CodecSpec(name, 16, 1008)),
        (17_500, CodecSpec(name, 1024)),
        (17_000, CodecSpec(name, 64, entropy=False)),
        (17_003, CodecSpec(name, step_log2=0)),
        (33_001, CodecSpec(name, step_log2=-8)),
    ]:
        frame = encode(drawn(draw, count), spec)
        assert read(frame) == decode(frame).tobytes()


@UNHURRIED
@given(values=ANY_VALUES, spec=SPECS)
@example(values=np.full(300, -0.0, np.float32), spec=CodecSpec("e4m3", 16, 64))
@example(values=np.array([np.inf, 1.0], np.float32), spec=CodecSpec("bf16"))
def test_arbitrary_values_and_grids(values, spec):
    """Any fp32 bits through any grid: read as documented, never larger than raw fp32, flagged when
    not finite.
    """
    frame = encode(values, spec)
    chunks = -(-values.size // spec.chunk_values)
    assert len(frame) <= 28 + 16 * chunks + 4 * values.size
    assert read(frame) == decode(frame).tobytes()
    assert info(frame).nonfinite == (not np.isfinite(values).all())


@UNHURRIED
@given(
    bits=hnp.arrays(np.uint32, st.integers(1, 400), elements=st.integers(0, 0xFFFFFFFF)), spec=SPECS
)
def test_chunks_with_nonfinite_values_keep_every_bit(bits, spec):
    """NaN payloads, also signaling ones, infinities and their neighbors survive every format."""
    bits[0] = 0x7F800001
    values = bits.view(np.float32)
    spec = evolve(spec, chunk_values=1024)
    frame = encode(values, spec)
    assert read(frame) == values.tobytes()
    assert decode(frame).tobytes() == values.tobytes()
    assert info(frame).nonfinite


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(RANGES)), st.integers(1, 40), st.data())
def test_every_form_of_scales_is_read_by_its_meaning(name, runs, drawn_):
    """Also forms that no encoder writes, and forms that do not exist; all implementations agree."""
    lowest, highest = RANGES[name]
    near = st.integers(lowest - 8, lowest + 9) | st.integers(highest - 9, highest + 8)
    one = drawn_.draw(near).to_bytes(2 if name == "uniform" else 1, "little")
    form = drawn_.draw(st.integers(0, 10) | st.integers(0, 255))
    data = one + bytes([form]) + drawn_.draw(st.binary(min_size=75, max_size=75))
    source = Bytes(data)
    try:
        scales = scales_of(source, runs, name)
    except (AssertionError, IndexError):
        expected = f"unknown form of scales {form}"
    else:
        expected = f"a scale is not from {lowest} to {highest}"
        data = data[: len(data) - len(source.data)]
        if lowest <= min(scales) and max(scales) <= highest:
            codes = Bytes(b"")
            ones = values_of([ONE[name]] * runs, scales, 1, name, codes)
            expected = np.frombuffer(b"".join(ones), np.float32).tolist()
    payload = data + bytes([ONE[name]]) * 16 * runs
    frame = forged(name, payload, 16 * runs, 2, block_values=16, chunk_values=16384)
    for path in available():
        out = np.zeros(16 * runs, np.float32)
        try:
            implementation_named(path).decode_into(frame, out)
            found = out[::16].tolist()
        except FrameError as error:
            found = str(error)
        assert found == expected, path


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_stands_in_the_header(name):
    """It can be read without decoding; nothing else of the frame is looked at."""
    frame = encode(np.ones(300, np.float32), CodecSpec(format=name))
    assert format_of(frame) == name
    assert format_of(memoryview(frame)) == name
    for wrong in (b"", frame[:20], frame[:5] + b"\xff" + frame[6:]):
        with pytest.raises(CodecError, match="no known format"):
            format_of(wrong)
