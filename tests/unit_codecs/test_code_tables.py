"""Code tables: their content and their bytes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import CodecUsageError, FrameError
from fsl_codecs.code_tables import CodeTable, read_table, table_from_counts
from fsl_codecs.huffman import code_lengths
from fsl_codecs.reader import Reader

HEADER = 28
UNHURRIED = settings(deadline=None, max_examples=60)
WIRE = Path(__file__).parent.parent.parent / "docs" / "WIRE.md"
COUNTS = st.lists(st.integers(0, 3) | st.integers(0, 1 << 17), min_size=2, max_size=256).filter(
    lambda counts: sum(count > 0 for count in counts) >= 2
)


def reader(data):
    return Reader(np.frombuffer(data, np.uint8))


def padded(counts):
    """Return the counts of a plane, (2**width,), and its width."""
    width = (len(counts) - 1).bit_length()
    return np.array(counts + [0] * ((1 << width) - len(counts))), width


def by_distance(lengths):
    """Return the symbols without a code: those between coded ones, then the nearest below and
    above, and so on.
    """
    coded = [symbol for symbol, length in enumerate(lengths) if length]
    first, last = coded[0], coded[-1]
    found = [symbol for symbol in range(first, last) if not lengths[symbol]]
    for away in range(1, len(lengths)):
        found += [s for s in (first - away, last + away) if 0 <= s < len(lengths)]
    return found


def number_bits(number, highest, low_bits):
    """Return the bits of a number: its low bits, one bit per rank up to its own, and an end bit
    unless it is the last.
    """
    rank, last = number >> low_bits, highest >> low_bits
    return low_bits + (rank + 1 if rank < last else last)


def wire_form(lengths, escape, low_bits):
    """Return a table's bytes by the document: ends, escape and low bits, and hexadecimal digits
    swapped pair by pair.
    """
    digits = "".join(f"{length:x}" for length in lengths)
    first, last = len(digits) - len(digits.lstrip("0")), len(digits.rstrip("0")) - 1
    digits = digits[first : last + 1]
    digits += "0" * (len(digits) % 2)
    pairs = "".join(digits[at + 1] + digits[at] for at in range(0, len(digits), 2))
    return bytes((first, last, int(f"{low_bits:x}{escape:x}", 16))) + bytes.fromhex(pairs)


@UNHURRIED
@given(COUNTS, st.booleans())
def test_own_tables_follow_the_document(counts, sampled):
    """The escape follows all symbols, counts as all rare ones together, and exists only where
    allowed; no leaf is lighter than a 256th.
    """
    counts, width = padded(counts)
    total = int(counts.sum())
    kept = [count if 768 * count >= total else 0 for count in counts.tolist()]
    escape = max(1, total - sum(kept), total // 256)
    if 0 not in kept or (not sampled and sum(kept) == total):
        escape = 0
    weights = [count and max(count, total // 256) for count in kept]
    lengths = code_lengths(np.array([*weights, escape])).tolist()
    table = table_from_counts(counts, width, sampled=sampled)
    assert (list(table.lengths), table.escape) == (lengths[:-1], lengths[-1])
    assert (table.escape > 0) == (escape > 0)
    uncoded = by_distance(table.lengths) if table.escape else []
    assert table.uncoded.tolist() == uncoded
    highest = max(0, len(uncoded) - 1)
    expected = {
        low_bits: sum(
            (16 * int(counts[symbol]) + 1) * number_bits(number, highest, low_bits)
            for number, symbol in enumerate(uncoded)
        )
        for low_bits in range(9)
        if highest < 16 << low_bits and (low_bits == 0 or highest >= 1 << low_bits - 1)
    }
    # min() takes the first of equals.
    assert table.low_bits == min(expected, key=expected.get)
    assert table.last_rank == highest >> table.low_bits <= 15
    costs = list(table.lengths)
    for number, symbol in enumerate(uncoded):
        costs[symbol] = table.escape + number_bits(number, highest, table.low_bits)
    assert table.costs.tolist() == costs


@pytest.mark.parametrize(
    ("lengths", "order"),
    [
        ([0, 0, 0, 2, 2, 0, 0, 0], [2, 5, 1, 6, 0, 7]),
        ([0, 2, 0, 0, 2, 0, 0, 0], [2, 3, 0, 5, 6, 7]),
        ([2, 2, 0, 0, 0, 0, 0, 0], [2, 3, 4, 5, 6, 7]),
        ([0, 0, 0, 0, 0, 0, 2, 2], [5, 4, 3, 2, 1, 0]),
        ([2, 0, 0, 0, 0, 0, 0, 2], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_symbols_without_a_code_are_numbered_by_distance(lengths, order):
    """Most that occur are near the others, and low numbers take few bits."""
    assert CodeTable(3, 1, bytes(lengths), 1).uncoded.tolist() == order
    assert by_distance(lengths) == order


@pytest.mark.parametrize(
    ("listed", "low_bits"),
    [
        # Of 62 symbols: none, the nearest, some less near, and one far away. Six low bits give as
        # many bits as five.
        ({}, 5),
        ({30: 100}, 2),
        ({30: 5, 22: 5, 21: 5}, 3),
        ({5: 100}, 5),
    ],
)
def test_low_bits_are_few_where_near_symbols_are_listed(listed, low_bits):
    """The number that gives the fewest bits, where each symbol counts a sixteenth besides its
    occurrences.
    """
    counts = np.zeros(64, np.int64)
    counts[31:33] = 100_000
    for symbol, count in listed.items():
        counts[symbol] = count
    assert table_from_counts(counts, 6, sampled=True).low_bits == low_bits


@pytest.mark.parametrize(
    ("width", "escape", "lengths", "allowed"),
    [
        (8, 1, [2, 2] + [0] * 254, range(4, 9)),
        (6, 1, [2, 2] + [0] * 62, range(2, 7)),
        (5, 1, [2, 2] + [0] * 30, range(1, 6)),
        (5, 1, [5] * 16 + [0] * 16, range(5)),
        (5, 1, [5] * 14 + [4] + [0] * 17, range(1, 6)),
        (3, 1, [2, 2] + [0] * 6, range(4)),
        (2, 1, [2, 2, 0, 0], range(2)),
        (2, 3, [1, 2, 3, 0], range(1)),
        (2, 0, [1, 2, 2, 0], range(1)),
        (2, 0, [2, 2, 2, 2], range(1)),
    ],
)
def test_low_bits_leave_sixteen_ranks_at_most(width, escape, lengths, allowed):
    """There are at most as many as the bits of the highest number; none without a list."""
    for low_bits in range(-1, 17):
        if low_bits in allowed:
            table = CodeTable(width, escape, bytes(lengths), low_bits)
            assert read_table(reader(table.packed), width) == table
            assert table.packed == wire_form(lengths, escape, low_bits)
        else:
            with pytest.raises(CodecUsageError):
                CodeTable(width, escape, bytes(lengths), low_bits)


@pytest.mark.parametrize(
    ("counts", "sampled", "lengths", "escape"),
    [
        # 657 in all: a symbol that occurs once counts twice. With [8, 6, 4, 8, 1, 2, 8, 3, 8, 5]
        # they would take ten bits more.
        ([14, 15, 59, 1, 271, 200, 4, 70, 1, 22], False, [6, 6, 4, 8, 1, 2, 7, 3, 8, 6], 0),
        # 733 in all: the escape of a sample, needed for symbols not in it, counts twice too.
        ([1, 327, 1, 404], True, [4, 2, 4, 1], 3),
    ],
)
def test_no_leaf_weighs_less_than_a_256th(counts, sampled, lengths, escape):
    """A lighter one would be deeper than code words may be long, and lengthen the others."""
    width = 3 if sampled else 4
    padded_counts = np.array(counts + [0] * ((1 << width) - len(counts)))
    table = table_from_counts(padded_counts, width, sampled=sampled)
    assert (list(table.lengths[: len(counts)]), table.escape) == (lengths, escape)


@pytest.mark.parametrize(("count", "has_code"), [(10, True), (9, False)])
def test_a_symbol_has_a_code_from_one_in_768_on(count, has_code):
    """Rarer symbols cost more as leaves, which lengthen the others' codes, than in a list."""
    counts = np.array([7680 - count, count, 0, 0])
    table = table_from_counts(counts, 2, sampled=False)
    assert (table.lengths[1] > 0, table.escape > 0) == (has_code, not has_code)


def test_a_plane_that_shows_one_symbol_may_have_a_sampled_table():
    """Two leaves are a code, also when one of them is the escape."""
    table = table_from_counts(np.array([0, 0, 9, 0]), 2, sampled=True)
    assert (table.lengths, table.escape) == (b"\0\0\1\0", 1)


@UNHURRIED
@given(COUNTS, st.booleans())
def test_tables_survive_the_wire(counts, sampled):
    """A receiver has only the table."""
    counts, width = padded(counts)
    table = table_from_counts(counts, width, sampled=sampled)
    assert table.packed == wire_form(table.lengths, table.escape, table.low_bits)
    source = reader(table.packed)
    assert read_table(source, width) == table
    source.finish()


@pytest.mark.parametrize(
    ("width", "escape", "lengths", "why"),
    [
        (2, 0, [1, 2, 0, 0], "incomplete"),
        (2, 0, [1, 1, 2, 0], "overfull"),
        (2, 2, [1, 1, 0, 0], "overfull by the escape"),
        (2, 0, [1, 0, 0, 0], "one leaf"),
        (2, 0, [0, 0, 0, 0], "no leaf"),
        (2, 1, [0, 0, 0, 0], "the escape alone"),
        (4, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 0, 0, 0, 0, 0, 0], "too long"),
        (4, 9, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0], "an escape too long"),
        (2, 2, [2, 2, 3, 3], "an escape that no symbol takes"),
        (2, 0, [1, 1], "another width"),
        (9, 0, [9] * 512, "a plane of more than 8 bits"),
        (0, 1, [1], "a plane of no bits"),
        (8, 8, [8] * 256, "257 leaves"),
    ],
)
def test_codes_that_do_not_fill_the_space_are_refused(width, escape, lengths, why):
    """A hostile table does not reach the tree builder."""
    with pytest.raises(CodecUsageError):
        CodeTable(width, escape, bytes(lengths))


@pytest.mark.parametrize(
    ("packed", "width"),
    [
        ("03030011", 3),
        ("04030011", 3),
        ("07080011", 3),
        ("08080001", 3),
        ("0002001001", 3),
        ("0002001110", 3),
        ("0002001201", 3),
        ("000400010100", 3),
        ("0002002152", 3),
        ("00010021", 3),
        ("00010211", 3),
        ("00010911", 3),
        ("0001ff11", 3),
        ("00010221", 1),
        ("0001099", 3),
        ("00000100", 3),
        ("00000001", 3),
        ("00000010", 3),
        ("0001012", 3),
    ],
)
def test_malformed_tables_are_refused(packed, width):
    """Ranges backwards or beyond the alphabet, missing ends, half bytes, escapes that do not
    fit.
    """
    with pytest.raises(FrameError):
        read_table(reader(bytes.fromhex(packed + "0" * (len(packed) % 2))), width)


def test_an_escape_may_be_any_leaf():
    """Also the shortest one, which no encoder writes for symbols it has seen."""
    assert read_table(reader(bytes.fromhex("00000101")), 3).escape == 1
    assert read_table(reader(bytes.fromhex("00010122")), 3).lengths == b"\2\2" + bytes(6)
