"""Large chunks of 8-bit codes, whose values a native path may write while it reads their codes,
agree with NumPy.

The usual planes are six coded bits above two raw ones; then all pieces of 4096 values but the last
are read in one pass.
"""

import attrs
import numpy as np
import pytest
from frame_tables import plans_of
from native_paths import (
    BLOCK,
    PATHS,
    REFERENCE,
    TABLES,
    assert_agree,
    bfloat16_of,
    decoded_by,
    needs_native,
    outcome,
    sums_of,
    values_of,
)

from fsl_codecs import CodecError, CodecSpec, FrameError, planes
from fsl_codecs.code_tables import CodeTable
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.formats import FORMATS
from fsl_codecs.frame import CODED, pack_chunk_head, pack_header
from fsl_codecs.scales import write_scales

pytestmark = needs_native

with_every_name = pytest.mark.parametrize("name", ["e4m3", "e5m2", "uniform"])
PIECE = 4096
COUNT = BLOCK + PIECE + 256
"""Two inner blocks: in the second, one piece is read in one pass, and one with the last symbols is
not.
"""
RUN = 128
FLAT = CodeTable(6, 0, bytes([6] * 64))
with_both_tables = pytest.mark.parametrize("table", [None, FLAT], ids=["usual", "flat"])
WRONG_LIST = "a list of symbols without a code is too short or too long"
TOO_EARLY = "a stream ends before its symbols do"
PAYLOAD_ENDS = "payload ends too early"
DISAGREE = "and its flag disagree about NaN and infinity"


@attrs.define
class Parts:
    """The parts of a chunk, each of which can be made wrong. `listed` are codes (n,) whose upper
    symbols are in lists.
    """

    name: str
    codes: np.ndarray
    listed: np.ndarray
    scales: np.ndarray
    escaped: list[np.ndarray]
    table: CodeTable
    split: int = 0
    stream_change: int = 0
    nonfinite: bool = False

    def payload(self):
        """Return the parts as bytes on the wire."""
        number_format, pieces, streams = FORMATS[self.name], [], []
        upper = planes.PlanePlan(6, bytes((planes.OWN,)) + self.table.packed, 0, self.table)
        plan = planes.ChunkPlan(self.split, (upper, planes.PlanePlan(2, bytes((planes.RAW,)), 0)))
        planes.write_plan(plan, pieces)
        planes.write_streams(self.codes, number_format, plan, streams)
        size = max(300, len(streams[1]) + self.stream_change)
        stream = streams[1][:size].ljust(size, b"\0")
        pieces += [len(stream).to_bytes(4, "little"), stream]
        for number, start in enumerate(range(0, self.codes.size, BLOCK)):
            runs = slice(start // RUN, (start + BLOCK) // RUN)
            write_scales(self.scales[runs], number_format, pieces)
            planes.write_words(self.listed[start : start + BLOCK], number_format, plan, pieces)
            pieces.append(self.escaped[number].astype("<f4").tobytes())
        return b"".join(pieces)

    def put(self, at, symbol, low_bits=0):
        """Put codes of that upper symbol at one place or more."""
        self.put_in_list(at, symbol, low_bits)
        self.codes = self.listed

    def put_in_list(self, at, symbol, low_bits=0):
        """Put the symbol into the list only, and into the planes below."""
        split = FORMATS[self.name].splits[self.split]
        upper, lower = planes.cut(self.codes, split, 8)
        upper[at], lower[at] = symbol, low_bits
        self.listed = planes.join([upper, lower], split, 8)

    def escape(self, places):
        """Put escaped values at these places, of uniform."""
        self.put(places, 0)
        inner = np.asarray(places) // BLOCK
        self.escaped = [np.arange(1.0, 1.0 + np.count_nonzero(inner == n)) for n in (0, 1)]


def parts_of(name, table=None, split=0, count=COUNT, seed=0):
    """Return parts with valid codes only, whose upper symbols have code words, and none escaped."""
    table = table or TABLES[name]
    generator = np.random.default_rng(seed)
    symbols = np.flatnonzero(np.frombuffer(table.lengths, np.uint8)).astype(np.uint8)
    # Symbols of the flat table that are numbers and not escaped, in any split.
    symbols = symbols[(symbols > 0) & (symbols % 32 < 30)]
    fields = [generator.choice(symbols, count), generator.integers(0, 4, count, dtype=np.uint8)]
    codes = planes.join(fields, FORMATS[name].splits[split], 8)
    scales = generator.integers(118, 125, -(-count // RUN))
    return Parts(name, codes, codes, scales, [np.zeros(0), np.zeros(0)], table, split)


def frame_of(*chunks):
    """Return a frame of these chunks, with correct checksums."""
    count = chunks[0].codes.size
    header = frame = pack_header(CodecSpec(chunks[0].name, RUN, count), count * len(chunks))
    for index, parts in enumerate(chunks):
        payload = parts.payload()
        head = pack_chunk_head(header, index, CODED, payload, nonfinite=parts.nonfinite)
        frame += head + payload
    return frame


def readings(codec, frame, count, room=None, **options):
    """Decode to fp32, to bf16 and add, with space for `room` values: bytes or refusals; a refused
    frame adds nothing.
    """
    room = room or (lambda dtype: np.full(count, 7, dtype))

    def decode(dtype):
        out = room(dtype)
        assert codec.decode_into(frame, out, **options) == count
        return out.tobytes()

    def accumulate():
        total = room(np.float32)
        total[:] = before = np.arange(count)
        try:
            codec.decode_accumulate(frame, total, 0.3, **options)
        except CodecError:
            assert np.array_equal(total, before)
            raise
        return total.tobytes()

    return [outcome(decode, np.float32), outcome(decode, np.uint16), outcome(accumulate)]


def readings_of_reference(frame, count):
    """Return the same readings of the NumPy package, which is slow and decodes once."""
    decoded = outcome(lambda: decoded_by(REFERENCE, frame, count))
    if isinstance(decoded, tuple):
        return [decoded] * 3
    sums = sums_of(np.arange(count, dtype=np.float32), 0.3, decoded)
    return [each.tobytes() for each in (decoded, bfloat16_of(decoded), sums)]


def assert_read_alike(parts, message=None):
    """Check the chunk alone, behind a good one and before a good one against NumPy.

    It is refused with `message` if that is given, and otherwise not refused.
    """
    good = parts_of(parts.name, count=parts.codes.size, seed=9)
    for chunks in ([parts], [good, parts], [parts, good]):
        frame, count = frame_of(*chunks), good.codes.size * len(chunks)
        theirs = readings_of_reference(frame, count)
        for reading in theirs:
            assert isinstance(reading, bytes) == (message is None), reading
            if message is not None:
                assert reading[0] is FrameError
                assert message in reading[1]
        for path in PATHS:
            for threads in (1, 2):
                ours = readings(implementation_named(path), frame, count, threads=threads)
                assert ours == theirs, (path, threads, len(chunks))


def assert_usual_planes(frame):
    """The first chunk has six coded bits above two raw ones."""
    upper, lower = plans_of(frame)[0].planes
    assert (upper.width, upper.table is None, lower.width, lower.kind) == (6, False, 2, planes.RAW)


@with_every_name
@pytest.mark.parametrize("block_values", [32, 64, 128, 1024])
def test_sizes_around_pieces_and_blocks(name, block_values):
    """The last symbols are in the fourth piece, are a complete block, or are in a piece of the
    second block.
    """
    for more in (0, 1, 128, 129, 256, 31 * 128, 32 * 128, 33 * 128, 34 * 128, 96 * 128, BLOCK):
        values = values_of("bell", BLOCK + more)
        values[::997] *= 40
        frame = assert_agree(values, CodecSpec(name, block_values))
        assert_usual_planes(frame)


@pytest.mark.sweep
@with_every_name
@pytest.mark.parametrize("more", [-128, 0, 128, 5001])
def test_places_that_are_not_aligned(name, more):
    """Around the size from which values are written past the cache: nothing beside them is
    written.
    """
    count = 8 * BLOCK + more
    values = values_of("bell", count)
    values[::97] *= 40
    frame = assert_agree(values, CodecSpec(name, chunk_values=4 * BLOCK))
    assert_usual_planes(frame)
    theirs = readings_of_reference(frame, count)
    for path in PATHS:
        for offset in (0, 1, 4, 8, 15):
            rows = []

            def place(dtype, rows=rows, offset=offset):
                row = np.full(count + 64, 7, dtype)
                start = -row.ctypes.data % 64 // row.itemsize + offset
                rows.append((row, start))
                return row[start : start + count]

            for threads in (1, 2):
                ours = readings(implementation_named(path), frame, count, place, threads=threads)
                assert ours == theirs, (path, offset, threads)
            for row, start in rows:
                assert (np.delete(row, slice(start, start + count)) == 7).all(), (path, offset)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "code"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0xFC)])
@pytest.mark.parametrize("at", [5, 2 * PIECE, BLOCK + PIECE - 1, COUNT - 1])
@with_both_tables
def test_codes_that_are_no_numbers(name, code, at, table):
    """One such code in any piece, in a list or with a code word, with the flag and without."""
    for split in (0, 1):
        parts = parts_of(name, table, split)
        parts.codes[at] = code
        assert_read_alike(parts, DISAGREE)
    parts.nonfinite = True
    assert_read_alike(parts, "announces NaN or infinity but is quantized")
    parts.codes[at] = 0x40
    assert_read_alike(parts, "announces NaN or infinity but is quantized")


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "highest"), [("e4m3", 247), ("e5m2", 240)])
@pytest.mark.parametrize("at", [0, PIECE + 130, BLOCK - 1, BLOCK, BLOCK + PIECE - 1, COUNT - 1])
def test_one_run_of_the_highest_scale(name, highest, at):
    """Its codes overflow from some exponent on, those of other runs do not, in either inner
    block.
    """
    parts = parts_of(name)
    parts.scales[at // RUN] = highest
    parts.codes[at // RUN * RUN :][:RUN] = 0x77
    assert_read_alike(parts)
    parts.codes[at] = 0xF8
    assert_read_alike(parts, DISAGREE)
    parts.scales[at // RUN] = highest + 1
    assert_read_alike(parts, f"to {highest}")


PLACES = {
    "first piece": [0, 7, *range(64, 192), PIECE - 1],
    "all pieces": range(3, COUNT, 611),
    "second block": [BLOCK, BLOCK + 7, BLOCK + 8, BLOCK + PIECE - 1],
    "last piece": [COUNT - 200, COUNT - 1],
}


@pytest.mark.sweep
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@with_both_tables
def test_escaped_values(places, table):
    """One that is not finite, one too few, one too many, in any piece."""
    parts = parts_of("uniform", table)
    parts.escape(list(places))
    assert_read_alike(parts)
    right = list(parts.escaped)
    for number, values in enumerate(right):
        for which, value in ((0, np.nan), (-1, -np.inf), (-1, -3.4e38)) if values.size else ():
            parts.escaped[number] = values.copy()
            parts.escaped[number][which] = value
            assert_read_alike(parts, None if np.isfinite(value) else DISAGREE)
        for wrong, message in ((values[:-1], PAYLOAD_ENDS), (np.append(values, 2), "4 bytes too")):
            parts.escaped[number] = wrong
            # After an error in the first block's, all that follows is misread.
            expected = message if number == 1 else ""
            assert_read_alike(parts, None if wrong.size == values.size else expected)
        parts.escaped[number] = values


@pytest.mark.sweep
@with_every_name
@pytest.mark.parametrize(("block", "piece"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_lists_that_are_too_short_or_too_long(name, block, piece):
    """By one symbol, in each inner block: found in the piece where it is missing, or at the block's
    end.
    """
    start = block * BLOCK
    parts = parts_of(name)
    coded = planes.cut(parts.codes, FORMATS[name].splits[0], 8)[0][0]
    last = min(start + piece * PIECE + 100, COUNT - 1)
    parts.put([start, start + 77, last], 5, 1)
    parts.put_in_list(last, coded)
    assert_read_alike(parts, WRONG_LIST)
    for place in (last + 1, min(start + BLOCK, COUNT) - 1):
        parts.put_in_list(place, 5)
        assert_read_alike(parts, WRONG_LIST)
    # The stream's fault is at the chunk's end: in a later piece, unless the block is the last one
    # and so is the piece.
    parts.put_in_list(last, coded)
    parts.stream_change = -1
    assert_read_alike(parts, TOO_EARLY if (block, piece) == (1, 1) else WRONG_LIST)
    # And here in the first.
    parts.stream_change = -COUNT
    assert_read_alike(parts, TOO_EARLY)


@with_every_name
@with_both_tables
@pytest.mark.parametrize("count", [BLOCK, BLOCK + 128, COUNT])
@pytest.mark.parametrize("change", [0, -1, -100, -5000, 1])
def test_streams_that_are_cut_or_go_on(name, table, count, change):
    """The bytes end in one of the pieces, or are not used up.

    Code words may end with an inner block. Signs may be in either plane.
    """
    for split in range(len(FORMATS[name].splits) - 1):
        parts = parts_of(name, table, split, count)
        parts.put(np.arange(50, count, 531), 5, 2)
        parts.stream_change = change
        too_long = "a stream goes on after its symbols" if change else None
        assert_read_alike(parts, TOO_EARLY if change < 0 else too_long)


@pytest.mark.parametrize(
    ("escaped", "listed", "message"),
    [(10, PIECE + 10, PAYLOAD_ENDS), (PIECE + 10, 10, WRONG_LIST), (10, 20, WRONG_LIST)],
)
def test_of_missing_values_and_symbols_the_earlier_piece_is_reported(escaped, listed, message):
    """Of the last block's pieces, the first without its escaped value or listed symbol; with both
    in one piece, the symbol.
    """
    parts = parts_of("uniform", CodeTable(6, 1, bytes([2, 2] + [0] * 62), 2))
    parts.put([BLOCK + listed], 5)
    parts.escape([BLOCK + escaped])
    parts.put_in_list([BLOCK + listed], 1)
    parts.escaped[1] = np.zeros(0)
    assert_read_alike(parts, message)
