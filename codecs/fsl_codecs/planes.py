"""Planes: code words cut into bit fields, each stored in the cheapest of several ways.

A split (formats.Split) cuts each code word into planes of at most 8 bits. A plane whose bits carry
no information is stored as it is, the others in Huffman's code, as one stream of `lanes` for the
whole chunk:

    kind 0  raw        width < 8: bit planes, top bit first; width 8: one byte per symbol
    kind 1  constant   one byte, the symbol
    kind 2  own        a code table in the plane's head

The choice depends on symbol counts of a sample, in integers only, so that every implementation
makes the same. docs/WIRE.md has the rules.
"""

from typing import Final

import numpy as np
from attrs import frozen

from .bitplanes import read_planes, read_ranks, write_planes, write_ranks
from .code_tables import CodeTable, Counts, read_table, table_from_counts
from .errors import FrameError
from .formats import ByteArray, Format, Split, WordArray
from .groups import (
    LIST_HEAD_BYTES,
    WRONG_LIST,
    grouped,
    is_listed,
    read_listed,
    ungrouped,
    write_listed,
)
from .lanes import MANY_LANES_FROM, StreamReader, lanes_of, write_stream
from .quantised import BLOCK_SYMBOLS
from .reader import Reader
from .uniform import ZERO_CODE

RAW: Final = 0
CONSTANT: Final = 1
OWN: Final = 2

_COUNTED_IN_FULL: Final = 16384
"""Largest chunk, in values, of which all values are counted."""
_SAMPLED_RUN: Final = 16
_SAMPLED_EVERY: Final = 17
"""Odd, so that samples meet a matrix's rows at different columns."""
_SAMPLED_EVERY_OF_MANY: Final = 29
"""A thinner sample is enough for large chunks; counting it is a tenth of the work of encoding."""
_MANY: Final = 65536
"""Largest chunk, in values, with the denser sample."""
_STREAM_HEAD_BYTES: Final = 4
_LIST_HEAD_BYTES: Final = 2
_WORD_TYPES: Final = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@frozen(eq=False)
class PlanePlan:
    """The storage of one plane of a chunk.

    head: as on the wire. cost_bits: estimate of the head and the data of all inner blocks.
    """

    width: int
    head: bytes
    cost_bits: int
    table: CodeTable | None = None

    @property
    def kind(self) -> int:
        """RAW, CONSTANT or OWN."""
        return self.head[0]


@frozen(eq=False)
class ChunkPlan:
    """The split of a chunk and the plans of its planes."""

    split_index: int
    planes: tuple[PlanePlan, ...]
    listed_bits: int = 0
    """Estimate for the listed codes of a grouped split."""

    @property
    def cost_bits(self) -> int:
        """Estimate of the coded size, without scales and escaped values."""
        return 8 + sum(plane.cost_bits for plane in self.planes) + self.listed_bits


class ConstantPlaneError(Exception):
    """A plane that is constant in the sample is not constant in the chunk."""


@frozen(eq=False)
class Sample:
    """Some or all code words of a chunk of `values` values."""

    words: WordArray
    values: int

    @property
    def is_everything(self) -> bool:
        """Whether the sample is the chunk."""
        return self.words.size == self.values


def sample_of(words: WordArray) -> Sample:
    """The code words (n,), or of a large chunk every 17th or 29th run of 16."""
    if words.size <= _COUNTED_IN_FULL:
        return Sample(words, words.size)
    every = _SAMPLED_EVERY if words.size <= _MANY else _SAMPLED_EVERY_OF_MANY
    starts = range(0, words.size, every * _SAMPLED_RUN)
    sampled = np.concatenate([words[start : start + _SAMPLED_RUN] for start in starts])
    return Sample(sampled, words.size)


def _rotate_left(words: WordArray, count: int, code_bits: int) -> WordArray:
    kind = words.dtype.type
    return (words << kind(count)) | (words >> kind(code_bits - count))


def cut(words: WordArray, split: Split, code_bits: int) -> list[ByteArray]:
    """The planes of code words (n,), top plane first: (n,), or a symbol for each group."""
    if split.group > 1:
        return [grouped(words, split.group)]
    if split.rotate:
        words = _rotate_left(words, 1, code_bits)
    planes = []
    shift = code_bits
    for width in split.widths:
        shift -= width
        planes.append((np.right_shift(words, shift) & ((1 << width) - 1)).astype(np.uint8))
    return planes


def join(planes: list[ByteArray], split: Split, code_bits: int) -> WordArray:
    """The inverse of `cut`."""
    words: WordArray = np.zeros(planes[0].size, dtype=_WORD_TYPES[code_bits])
    for plane, width in zip(planes, split.widths, strict=True):
        if width < code_bits:
            words <<= width
        words |= plane
    if split.rotate:
        words = _rotate_left(words, code_bits - 1, code_bits)
    return words


@frozen(eq=False)
class Counted:
    """Counts of each symbol (2**width,) of a plane in a sample of `total`.

    values: the size of the chunk.
    """

    counts: Counts
    width: int
    total: int
    values: int
    many_from: int = MANY_LANES_FROM

    @property
    def raw_bits(self) -> int:
        """Size of the plane in kind raw."""
        if self.width == 8:
            return 8 * self.values
        return 8 * self.width * ((self.values + 7) // 8)

    def coded_bits(self, table: CodeTable) -> int:
        """Estimated size with the chunk's own table, without the head."""
        ends = 8 * _STREAM_HEAD_BYTES + 16 * lanes_of(self.values, self.many_from)
        return ends + self.values * int((self.counts * table.costs).sum()) // self.total


def plan_plane(counted: Counted) -> PlanePlan:
    """The cheapest way to store a plane."""
    counts, width = counted.counts, counted.width
    present = int(np.count_nonzero(counts))
    if present == 1:
        return PlanePlan(width, bytes((CONSTANT, int(counts.argmax()))), 16)
    raw = PlanePlan(width, bytes((RAW,)), 8 + counted.raw_bits)
    # Nearly uniform planes, mantissas above all, are not worth the search for a code.
    if present > 1 << (width - 1) and int(counts.max()) <= counted.total >> (width - 1):
        return raw
    own = table_from_counts(counts, width, sampled=counted.total != counted.values)
    head = bytes((OWN,)) + own.packed
    bits = 8 * len(head) + counted.coded_bits(own)
    if bits > counted.raw_bits - (counted.raw_bits >> 6):
        return raw
    return PlanePlan(width, head, bits, own)


def plan_chunk(sample: Sample, number_format: Format) -> ChunkPlan:
    """Choose the split of a chunk of at least one value, and the kind of each plane."""
    words, splits = sample.words, number_format.splits
    if number_format.code_bits > 8:
        planes = cut(words, splits[0], number_format.code_bits)
        counts_of_planes = [np.bincount(plane, minlength=256) for plane in planes]
        return ChunkPlan(0, _plan_planes(counts_of_planes, splits[0], sample))
    counts = np.bincount(words, minlength=256)
    # A later split is tried only where it may pay, and must then save a sixteenth, because larger
    # alphabets are slower. Sign in the alphabet: if signs and magnitudes are correlated. Whole
    # codes: then too, or if one code dominates. Of uniform codes: if one is an eighth of all, since
    # the two low bits of codes near zero are far from equally likely.
    asymmetry = int(np.abs(counts[:128] - counts[128:]).sum())
    goes_together = asymmetry > words.size >> 2
    largest = int(counts.max())
    promising = (True, goes_together, goes_together or largest > words.size >> 2)
    if number_format.float8 is None:
        promising = (True, largest > words.size >> 3, False)
    best = None
    for index, split in enumerate(splits[:3]):
        if promising[index] and split.group == 1:
            counts_of_planes = _plane_counts(counts, split)
            plan = ChunkPlan(index, _plan_planes(counts_of_planes, split, sample))
            if best is None or plan.cost_bits < best.cost_bits - (best.cost_bits >> 4):
                best = plan
    assert best is not None
    # Groups are tried where enough codes are zero. They have fewer symbols, so any gain is taken.
    for index, split in enumerate(splits):
        if split.group > 1 and int(counts[ZERO_CODE]) > words.size >> (3 - split.group // 2):
            plan = _grouped_plan(index, split, sample)
            if plan.cost_bits < best.cost_bits:
                best = plan
    return best


def _grouped_plan(index: int, split: Split, sample: Sample) -> ChunkPlan:
    symbols = grouped(sample.words, split.group)
    (width,) = split.widths
    counts = np.bincount(symbols, minlength=1 << width)
    counted = Counted(counts, width, symbols.size, -(-sample.values // split.group))
    listed = int(np.count_nonzero(is_listed(sample.words, split.group)))
    heads = 8 * LIST_HEAD_BYTES * -(-sample.values // BLOCK_SYMBOLS)
    bits = heads + 8 * sample.values * listed // sample.words.size
    return ChunkPlan(index, (plan_plane(counted),), bits)


def _plane_counts(counts: Counts, split: Split) -> list[Counts]:
    """Return the counts of each plane's symbols, from the counts of 8-bit codes (256,)."""
    counts_of_planes = []
    codes = np.arange(256, dtype=np.uint8)
    for width, symbols in zip(split.widths, cut(codes, split, 8), strict=True):
        plane_counts = np.zeros(1 << width, dtype=np.int64)
        np.add.at(plane_counts, symbols, counts)
        counts_of_planes.append(plane_counts)
    return counts_of_planes


def _plan_planes(
    counts_of_planes: list[Counts], split: Split, sample: Sample
) -> tuple[PlanePlan, ...]:
    return tuple(
        plan_plane(Counted(counts, width, sample.words.size, sample.values))
        for counts, width in zip(counts_of_planes, split.widths, strict=True)
    )


def write_plan(plan: ChunkPlan, pieces: list[bytes]) -> None:
    """Append the split and the planes' heads."""
    pieces.append(bytes((plan.split_index,)))
    pieces.extend(plane.head for plane in plan.planes)


def write_streams(
    words: WordArray,
    number_format: Format,
    plan: ChunkPlan,
    pieces: list[bytes],
    many_from: int = MANY_LANES_FROM,
) -> None:
    """Append the streams of a chunk's code words (n,).

    ConstantPlaneError if the plan does not fit them.
    """
    fields = cut(words, number_format.splits[plan.split_index], number_format.code_bits)
    for plane, symbols in zip(plan.planes, fields, strict=True):
        if plane.kind == CONSTANT and (symbols != plane.head[1]).any():
            raise ConstantPlaneError
        if plane.table is not None:
            stream = write_stream(plane.table.code, symbols, many_from)
            pieces += [len(stream).to_bytes(_STREAM_HEAD_BYTES, "little"), stream]


def write_words(
    words: WordArray, number_format: Format, plan: ChunkPlan, pieces: list[bytes]
) -> None:
    """Append the planes' data of one inner block's code words (n,), without the streams."""
    fields = cut(words, number_format.splits[plan.split_index], number_format.code_bits)
    for plane, symbols in zip(plan.planes, fields, strict=True):
        if plane.table is not None:
            _write_listed(plane.table, symbols, pieces)
        elif plane.kind == RAW and plane.width == 8:
            pieces.append(symbols.tobytes())
        elif plane.kind == RAW:
            write_planes(symbols, plane.width, pieces)
    if (group := number_format.splits[plan.split_index].group) > 1:
        write_listed(words, group, pieces)


def _write_listed(table: CodeTable, symbols: ByteArray, pieces: list[bytes]) -> None:
    if not table.escape:
        return
    listed = symbols[np.isin(symbols, table.uncoded)]
    pieces.append(listed.size.to_bytes(_LIST_HEAD_BYTES, "little"))
    number_of = np.zeros(1 << table.width, dtype=np.uint8)
    number_of[table.uncoded] = np.arange(table.uncoded.size)
    numbers = number_of[listed]
    write_planes(numbers, table.low_bits, pieces)
    write_ranks(numbers >> np.uint8(table.low_bits), table.last_rank, pieces)


def read_plan(reader: Reader, number_format: Format) -> ChunkPlan:
    """Read what `write_plan` wrote; FrameError if it cannot have written it.

    Of a sparse split, the planes are not read.
    """
    split_index = reader.byte()
    if split_index >= len(number_format.splits):
        raise FrameError(f"unknown split {split_index} of format {number_format.name}")
    split = number_format.splits[split_index]
    if split.sparse:
        return ChunkPlan(split_index, ())  # each plane's head is before its symbols
    return ChunkPlan(split_index, tuple(read_plane(reader, width) for width in split.widths))


def read_plane(reader: Reader, width: int) -> PlanePlan:
    """Read the head of a plane of `width` bits."""
    kind = reader.byte()
    if kind == RAW:
        return PlanePlan(width, bytes((kind,)), 0)
    if kind == CONSTANT:
        constant = reader.byte()
        if constant >> width:
            raise FrameError(f"constant {constant} does not fit a plane of {width} bits")
        return PlanePlan(width, bytes((kind, constant)), 0)
    if kind == OWN:
        return PlanePlan(width, bytes((kind,)), 0, read_table(reader, width))
    raise FrameError(f"unknown plane kind {kind}")


def read_streams(
    reader: Reader,
    number_format: Format,
    plan: ChunkPlan,
    values: int,
    many_from: int = MANY_LANES_FROM,
) -> list[StreamReader | None]:
    """The streams that `write_streams` wrote, of `values` values; None for planes without one."""
    count = -(-values // number_format.splits[plan.split_index].group)
    streams: list[StreamReader | None] = []
    for plane in plan.planes:
        if plane.table is None:
            streams.append(None)
        else:
            stream = reader.take(reader.number(_STREAM_HEAD_BYTES))
            streams.append(StreamReader(plane.table.code, stream, plane.width, count, many_from))
    return streams


class BlockReader:
    """Reads an inner block's code words, piece by piece."""

    def __init__(
        self,
        reader: Reader,
        number_format: Format,
        plan: ChunkPlan,
        streams: list[StreamReader | None],
        count: int,
    ) -> None:
        """Read the planes' data of `count` values from `reader`, without the streams."""
        self._split = number_format.splits[plan.split_index]
        self._code_bits = number_format.code_bits
        symbols = -(-count // self._split.group)
        self._planes = [
            _PlaneReader(reader, plane, stream, symbols)
            for plane, stream in zip(plan.planes, streams, strict=True)
        ]
        self._listed = np.empty(0, dtype=np.uint8)
        if self._split.group > 1:
            self._listed = read_listed(reader, self._split.group, count)

    def read(self, count: int) -> WordArray:
        """The next code words (count,): a multiple of 128, or all that are left."""
        symbols = [plane.read(-(-count // self._split.group)) for plane in self._planes]
        if self._split.group == 1:
            return join(symbols, self._split, self._code_bits)
        codes, taken = ungrouped(symbols[0], self._split.group, count, self._listed)
        self._listed = self._listed[taken:]
        return codes

    def finish(self) -> None:
        """FrameError if, after the last piece, symbols or codes are left in a list."""
        for plane in self._planes:
            plane.finish()
        if self._listed.size:
            raise FrameError(WRONG_LIST)


class _PlaneReader:
    """The symbols of one plane of an inner block, piece by piece."""

    def __init__(
        self, reader: Reader, plane: PlanePlan, stream: StreamReader | None, count: int
    ) -> None:
        self._stream, self._table = stream, plane.table
        # The next symbols; for a plane with a stream, of those without a code.
        if plane.table is not None:
            self._waiting = _read_listed(reader, plane.table, count)
        elif plane.kind == CONSTANT:
            self._waiting = np.full(count, plane.head[1], dtype=np.uint8)
        elif plane.width == 8:
            self._waiting = reader.take(count)
        else:
            self._waiting = read_planes(reader, count, plane.width)

    def read(self, count: int) -> ByteArray:
        if self._stream is None or self._table is None:
            return self._next(count)
        symbols = self._stream.read(count)
        if self._table.escape:
            # In the stream they are all the lowest such symbol.
            is_listed = symbols == self._table.uncoded.min()
            symbols[is_listed] = self._next(int(np.count_nonzero(is_listed)))
        return symbols

    def _next(self, count: int) -> ByteArray:
        if count > self._waiting.size:
            raise FrameError(_WRONG_LIST)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def finish(self) -> None:
        if self._waiting.size:
            raise FrameError(_WRONG_LIST)


_WRONG_LIST: Final = "a list of symbols without a code is too short or too long"


def _read_listed(reader: Reader, table: CodeTable, count: int) -> ByteArray:
    """The symbols without a code among `count`, in order, that `_write_listed` wrote."""
    if not table.escape:
        return np.empty(0, dtype=np.uint8)
    listed = reader.number(_LIST_HEAD_BYTES)
    if listed > count:
        raise FrameError(f"{listed} symbols without a code among {count}")
    numbers = read_planes(reader, listed, table.low_bits)
    numbers |= read_ranks(reader, listed, table.last_rank) << np.uint8(table.low_bits)
    if (numbers >= table.uncoded.size).any():
        raise FrameError(f"a listed symbol is none of the {table.uncoded.size} without a code")
    return table.uncoded[numbers]
