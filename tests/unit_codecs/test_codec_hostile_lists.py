"""Payloads written by hand with wrong streams or wrong lists of symbols without a code, and some
unusual ones with one meaning.
"""

import struct

import numpy as np
import pytest
from forged_frames import forged

from fsl_codecs import FrameError, available
from fsl_codecs.dispatch import implementation_named

# Half of the code is symbol 0, the other half the escape leaf of the 63 others, or of three in the
# lower plane, whose other plane is 0. Numbers have two low bits, and those of 63 a rank of up to
# 15.
UPPER, LOWER = "00 02 00 00 21 01 01 00", "00 01 00 02 00 00 21 01"
BOTH = "00 02 00 00 21 01 02 00 00 21 01"
RANKS = "00 01 00 02 00 00 01 01"
"""Like LOWER, without low bits."""
LOWS, SECONDS = "00" * 16, "80" * 16
ZEROS = "20000000" + LOWS + SECONDS
"""The stream of 128 times symbol 0: each lane holds the bits of seven codes, and its last
symbol.
"""
MARKED = "20000000" + "00" * 15 + "01" + SECONDS
"""As ZEROS, but the last symbol has no code."""
SCALES = "78 00"
WRONG_LIST = "a list of symbols without a code is too short or too long"
WRONG_CODES = "the listed codes of a block are too few or too many"
NONE = "00 00"
ONE = "01 00"
"""The number of symbols in a list."""
LAST = " 00 01 00"
"""The number 1 of 63, in two bit planes and a rank."""


def readings(frame):
    """Return each implementation's reading of a frame: the bytes of its values, or the text of its
    refusal.
    """
    for name in available():
        out = np.zeros(128, np.float32)
        try:
            read = implementation_named(name).decode_into(frame, out)
        except FrameError as error:
            yield str(error)
        else:
            yield out[:read].tobytes()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (UPPER, "payload ends too early"),
        (UPPER + "20 00 00", "payload ends too early"),
        (UPPER + "ffffffff" + LOWS + SECONDS, "payload ends too early"),
        (UPPER + "21000000" + LOWS + SECONDS, "payload ends too early"),
        (UPPER + "00000000", "a stream ends before its symbols do"),
        (UPPER + "1f000000" + LOWS + SECONDS, "a stream ends before its symbols do"),
        (
            UPPER + "20000000" + LOWS + "80" * 15 + "40" + SCALES + NONE,
            "a stream ends before its symbols do",
        ),
        (UPPER + "20000000" + LOWS + "80" * 15 + "00", "a lane holds no bits"),
        (UPPER + "20000000" + LOWS + "00" + "80" * 15, "a lane holds no bits"),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + NONE,
            "a stream goes on after its symbols",
        ),
        (
            UPPER + "21000000" + LOWS + "80" * 15 + "4000" + SCALES + NONE,
            "a lane holds bits after its last code word",
        ),
        (
            UPPER + "20000000" + "00" * 15 + "40" + SECONDS + SCALES + NONE,
            "a lane ends with no symbol of a plane of 6 bits",
        ),
        (
            UPPER + "20000000" + "ff" + "00" * 15 + SECONDS + SCALES + NONE,
            "a lane ends with no symbol of a plane of 6 bits",
        ),
        (
            LOWER + "20000000" + "04" + "00" * 15 + SECONDS + SCALES + NONE,
            "a lane ends with no symbol of a plane of 2 bits",
        ),
        # Low bits that leave 17 ranks, or 16; more than the only number has; without a list.
        ("00 02 00 1e 15" + "55" * 15 + "05 01 00", "numbers up to 32 with 1 low bits"),
        ("00 02 00 1f 15" + "55" * 15 + "66 01 00", "payload ends too early"),
        ("00 01 00 02 00 02 12 22 02", "numbers up to 0 with 1 low bits"),
        ("00 02 00 01 10 11 01 00", "numbers up to 0 with 1 low bits"),
        # Lists that end too early, or have more symbols than there are.
        (UPPER + ZEROS, "payload ends too early"),
        (UPPER + ZEROS + SCALES, "payload ends too early"),
        (UPPER + ZEROS + SCALES + "00", "payload ends too early"),
        (UPPER + ZEROS + SCALES + NONE + "00", "1 bytes too many in a payload"),
        (UPPER + ZEROS + SCALES + "81 00", "129 symbols without a code among 128"),
        (UPPER + ZEROS + SCALES + "ff ff", "65535 symbols without a code among 128"),
        (UPPER + ZEROS + SCALES + "80 00" + "00" * 31, "payload ends too early"),
        (UPPER + ZEROS + SCALES + "80 00" + "00" * 47, "payload ends too early"),
        (UPPER + MARKED + SCALES + ONE, "payload ends too early"),
        (UPPER + MARKED + SCALES + ONE + "01", "payload ends too early"),
        (UPPER + MARKED + SCALES + ONE + "01 01", "payload ends too early"),
        (UPPER + MARKED + SCALES + ONE + "01 01 ff", "payload ends too early"),
        (
            UPPER + MARKED + SCALES + ONE + "01 01 ff 7f",
            "a listed symbol is none of the 63 without a code",
        ),
        (UPPER + MARKED + SCALES + ONE + LAST + "00", "1 bytes too many in a payload"),
        (LOWER + MARKED + SCALES + ONE + "01", "payload ends too early"),
        (
            LOWER + MARKED + SCALES + ONE + "01 01",
            "a listed symbol is none of the 3 without a code",
        ),
        (LOWER + MARKED + SCALES + ONE + "01 00 00", "1 bytes too many in a payload"),
        (RANKS + MARKED + SCALES + ONE, "payload ends too early"),
        (RANKS + MARKED + SCALES + ONE + "03 00", "1 bytes too many in a payload"),
        (RANKS + ZEROS + SCALES + "05 00" + "0f", "payload ends too early"),
        (
            RANKS + "20000000" + "01" * 5 + "00" * 11 + SECONDS + SCALES + "05 00" + "ff 03 00",
            "1 bytes too many in a payload",
        ),
        # And lists of fewer or more than the stream has.
        (UPPER + MARKED + SCALES + NONE, WRONG_LIST),
        (UPPER + MARKED + SCALES + "02 00" + LAST, WRONG_LIST),
        (UPPER + MARKED + SCALES + "80 00" + "00" * 48, WRONG_LIST),
        (UPPER + ZEROS + SCALES + ONE + LAST, WRONG_LIST),
        (UPPER + "20000000" + "01 00" * 8 + SECONDS + SCALES + "07 00" + LAST, WRONG_LIST),
        (UPPER + "20000000" + "01 00" * 8 + SECONDS + SCALES + "09 00" + "00" * 6, WRONG_LIST),
        (LOWER + MARKED + SCALES + NONE, WRONG_LIST),
        (LOWER + ZEROS + SCALES + ONE + "00 00", WRONG_LIST),
        # Of two bad streams, the first is reported.
        (
            "00 02 00002101 02 00002101" + "00000000" + "ffffffff",
            "a stream ends before its symbols do",
        ),
        # Heads, then lanes, then the scales of an inner block, the lists of its planes, its
        # symbols, and whether a list is used up.
        (UPPER + "21000000" + LOWS + "00" * 17, "a lane holds no bits"),
        (UPPER + "21000000" + LOWS + SECONDS + "00" + "78 09", "unknown form of scales 9"),
        (UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + "00", "payload ends too early"),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + "81 00",
            "129 symbols without a code among 128",
        ),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + ONE + "ff" * 4,
            "a listed symbol is none of the 63 without a code",
        ),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + ONE + LAST,
            "a stream goes on after its symbols",
        ),
        (BOTH + ZEROS + ZEROS + SCALES + ONE + LAST + "00", "payload ends too early"),
        (
            BOTH + ZEROS + ZEROS + SCALES + ONE + LAST + "81 00",
            "129 symbols without a code among 128",
        ),
        (
            BOTH + ZEROS + "21000000" + LOWS + SECONDS + "00" + SCALES + ONE + LAST + NONE,
            "a stream goes on after its symbols",
        ),
        (BOTH + MARKED + "21000000" + LOWS + SECONDS + "00" + SCALES + NONE + NONE, WRONG_LIST),
    ],
)
def test_forged_streams_and_lists_are_refused(payload, message):
    """Every error of the streams of 128 values and of the lists; on every path with the same
    text.
    """
    frame = forged("e4m3", bytes.fromhex(payload), 128)
    assert dict(zip(available(), readings(frame), strict=True)) == dict.fromkeys(
        available(), message
    )


@pytest.mark.parametrize(
    ("payload", "at", "value"),
    [
        (UPPER + ZEROS + SCALES + NONE, 127, 0.0),
        (UPPER + MARKED + SCALES + ONE + "01 00 ff 7f", 127, 448 / 128),
        (UPPER + MARKED + SCALES + ONE + "ff fe ff ff", 127, 448 / 128),
        (UPPER + MARKED + SCALES + ONE + "00 00 00", 127, 2**-8 / 128),
        (UPPER + MARKED + SCALES + ONE + "fe fe fe", 127, 2**-8 / 128),
        (LOWER + MARKED + SCALES + ONE + "00 01", 127, 2**-9 / 128),
        (LOWER + MARKED + SCALES + ONE + "ff fe", 127, -(2**-9) / 128),
        (RANKS + MARKED + SCALES + ONE + "01", 127, 2**-9 / 128),
        (RANKS + MARKED + SCALES + ONE + "fd", 127, 2**-9 / 128),
        (RANKS + MARKED + SCALES + ONE + "03", 127, -(2**-9) / 128),
        (RANKS + MARKED + SCALES + ONE + "ff", 127, -(2**-9) / 128),
        # A lane may end with a symbol that has no code and is not the lowest such: it is in no
        # list.
        (UPPER + "20000000" + "00" * 15 + "3f" + SECONDS + SCALES + NONE, 127, 448 / 128),
        (UPPER + "20000000" + "3f" + "00" * 15 + SECONDS + SCALES + NONE, 112, 448 / 128),
        # Nor is any where there is no escape.
        ("00 02 00 01 00 11 01 00" + "20000000" + "02" * 16 + SECONDS + SCALES, 127, 2**-7 / 128),
        ("00 02 00 01 00 11 01 00" + "20000000" + "3f" * 16 + SECONDS + SCALES, 127, 448 / 128),
    ],
)
def test_streams_that_have_one_meaning_are_taken(payload, at, value):
    """Bits in the padding of a list, and last symbols that no encoder leaves to a lane."""
    for values in readings(forged("e4m3", bytes.fromhex(payload), 128)):
        assert np.frombuffer(values, np.float32)[[0, at]].tolist() == [0, np.float32(value)]


def test_a_lane_without_a_symbol_may_end_with_any():
    """Nine values have sixteen lanes; the others are checked too, but their content is not used."""
    for unseen in ("00", "01", "3f"):
        stream = "20000000" + "00" * 9 + unseen * 7 + "01" * 16
        frame = forged("e4m3", bytes.fromhex(UPPER + stream + SCALES + NONE), 9)
        assert set(readings(frame)) == {bytes(36)}


def bytes_of(bits):
    """Pack bits, the first in the lowest of the first byte."""
    parts = [bits[at : at + 8] for at in range(0, len(bits), 8)]
    return bytes(sum(bit << at for at, bit in enumerate(part)) for part in parts)


def list_of(numbers, low_bits, last_rank):
    """Return a list's bytes: the count, low bits in planes, and the rest as ranks up to the last
    one.
    """
    data = struct.pack("<H", len(numbers))
    for bit in reversed(range(low_bits)):
        data += bytes_of([number >> bit & 1 for number in numbers])
    ranks = [number >> low_bits for number in numbers]
    bits = [int(rank > below) for below in range(last_rank) for rank in ranks if rank >= below]
    return data + bytes_of(bits)


@pytest.mark.parametrize(
    ("first", "last"), [(20, 23), (0, 3), (60, 63), (0, 63), (3, 62)], ids=lambda end: f"{end}"
)
@pytest.mark.parametrize("low_bits", [2, 3, 4, 5, 6])
def test_listed_symbols_are_numbered_from_the_coded_ones_on(low_bits, first, last):
    """Each of 62 symbols with each valid number of low bits; two symbols have a code, which no
    value uses.
    """
    nibbles = [2] + [0] * (last - first - 1) + [2] + [0] * ((last - first + 1) % 2)
    packed = bytes(low + 16 * high for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    order = list(range(first + 1, last))
    for away in range(1, 64):
        order += [symbol for symbol in (first - away, last + away) if 0 <= symbol <= 63]
    assert sorted([*order, first, last]) == list(range(64))
    symbols = np.random.default_rng(low_bits).permutation((order * 3)[:128]).tolist()
    numbers = [order.index(symbol) for symbol in symbols]
    lowest = min(order)
    payload = b"\0\2" + bytes((first, last, 1 + 16 * low_bits)) + packed + b"\1\1"
    payload += bytes.fromhex("20000000") + bytes([lowest]) * 16 + bytes.fromhex(SECONDS)
    payload += b"\0\2\0" + list_of(numbers, low_bits, 61 >> low_bits)
    # A code is four times the upper symbol and one; the step is one.
    expected = np.array([4 * symbol + 1 - 128 for symbol in symbols], np.float32).tobytes()
    assert list(readings(forged("uniform", payload, 128))) == [expected] * len(available())
    assert set(readings(forged("uniform", payload[:-1], 128))) == {"payload ends too early"}


@pytest.mark.parametrize("low_bits", range(16))
def test_low_bits_are_those_that_leave_few_ranks(low_bits):
    """For 255 symbols without a code: from four, with ranks up to 15, to the eight bits of their
    numbers.
    """
    heads = b"\0\2" + bytes((0, 0, 1 + 16 * low_bits)) + b"\1" + b"\1\0"
    payload = heads + bytes.fromhex(ZEROS) + bytes.fromhex(NONE)
    allowed = 4 <= low_bits <= 8
    refusal = f"numbers up to 254 with {low_bits} low bits"
    for read in readings(forged("bf16", payload, 128)):
        assert read == (bytes(512) if allowed else refusal)


# Groups of two and of four codes in raw planes: four symbols in six or eight bytes, after the
# scales. Digit 3, or 1, is zero.
PAIRS, FOURS = "02 00" + "00 02 00", "03 00" + "00 02 00"
ZERO_PAIRS = "00 0f 0f 00 0f 0f"
ZERO_FOURS = "55 55 55 55"


@pytest.mark.parametrize(
    ("payload", "values", "what"),
    [
        (PAIRS + ZERO_PAIRS + "00 00", 8, [0] * 8),
        (PAIRS + ZERO_PAIRS + "00 00", 7, [0] * 7),
        (PAIRS + "01 0e 0e 01 0f 0f" + "01 00 84", 8, [1, 4, 0, 0, 0, 0, 0, 0]),
        (FOURS + ZERO_FOURS + "00 00", 13, [0] * 13),
        (FOURS + "56 55 55 95" + "00 00", 13, [0, 0, 0, 1] + [0] * 8 + [1]),
        (FOURS + "d5 55 55 55" + "01 00 05", 16, [-123] + [0] * 15),
        (PAIRS + ZERO_PAIRS + "00 00 00", 8, "1 bytes too many in a payload"),
        (PAIRS + ZERO_PAIRS, 8, "payload ends too early"),
        (PAIRS + ZERO_PAIRS + "01 00", 8, "payload ends too early"),
        (PAIRS + ZERO_PAIRS + "09 00" + "01" * 9, 8, "9 listed codes among 8"),
        (PAIRS + ZERO_PAIRS + "01 00 84", 8, WRONG_CODES),
        (PAIRS + "01 0e 0e 01 0f 0f" + "00 00", 8, WRONG_CODES),
        (PAIRS + "01 0e 0e 01 0f 0f" + "02 00 84 84", 8, WRONG_CODES),
        (PAIRS + "01 0e 0e 01 0f 0f" + "01 00 7d", 8, "a listed code has a digit"),
        (PAIRS + "01 0e 0e 01 0f 0f" + "01 00 83", 8, "a listed code has a digit"),
        (FOURS + "d5 55 55 55" + "01 00 7f", 16, "a listed code has a digit"),
        (FOURS + "d5 55 55 55" + "01 00 81", 16, "a listed code has a digit"),
        (PAIRS + "00 0f 0f 08 0f 0f" + "00 00", 7, "a last group is not filled up with zeros"),
        (PAIRS + "00 0f 0f 08 0f 0f" + "01 00 90", 7, "a last group is not filled up with zeros"),
        (FOURS + "55 55 55 56" + "00 00", 15, "a last group is not filled up with zeros"),
    ],
)
def test_groups_have_one_representation(payload, values, what):
    """Digits, listed codes and the fill of a last group; refusals have the same text everywhere."""
    frame = forged("uniform", bytes.fromhex(payload), values)
    expected = what if isinstance(what, str) else np.array(what, np.float32).tobytes()
    found = dict(zip(available(), readings(frame), strict=True))
    assert found == dict.fromkeys(available(), expected)


# Sparse chunks with raw planes: the upper mask, the lower mask's bytes that are not 0, the codes.
ONE_BYTE, TWO_CODES = "04 00 01", "00 05 00 81 7e"
MASK_END, MASK_BYTE = "a mask goes on after its last bit", "a byte of a mask is zero"
ZERO_CODE = "a code that is not zero is zero"


@pytest.mark.parametrize(
    ("name", "payload", "values", "what"),
    [
        ("uniform", ONE_BYTE + TWO_CODES + "00 02 00", 8, [1, 0, -2, 0, 0, 0, 0, 0]),
        ("uniform", "04 01 01 01 05 00 81 7e 00 02 00", 3, [1, 0, -2]),
        ("uniform", "04 00 00", 64, [0] * 64),
        ("uniform", "04 00 00 00", 65, [0] * 65),
        # One of two runs has a scale; an escaped value.
        ("uniform", "04 00 04 00 01 00 81 00 02 00", 24, [0] * 16 + [1] + [0] * 7),
        ("uniform", "04 00 01 00 03 00 00 81 00 02 00 00 00 80 3f", 8, [1, 1] + [0] * 6),
        ("e4m3", "03 00 01 00 02 00 38 7f 00", 8, [0, 1] + [0] * 6),
        ("bf16", "01 00 01 00 02 00 7f 00 00", 8, [0, 1] + [0] * 6),
        ("bf16", "01 00 01 00 02 00 00 00 01", 8, [0, -0.0] + [0] * 6),
        ("fp32", "01 00 01 00 02 00 7f 00 00 00 00 00 00", 8, [0, 1] + [0] * 6),
        ("uniform", "04 00 03", 8, MASK_END),
        ("uniform", "04 00 01 00 00", 8, MASK_BYTE),
        ("uniform", "04 00 03 00 01 00", 16, MASK_BYTE),
        ("uniform", "04 00 01 00 80", 7, MASK_END),
        ("uniform", "04 00 01 00 05 00 81 80", 8, ZERO_CODE),
        ("e4m3", "03 00 01 00 02 00 00", 8, ZERO_CODE),
        ("bf16", "01 00 01 00 02 00 00 00 00", 8, ZERO_CODE),
        ("fp32", "01 00 01 00 02 00 00 00 00 00 00 00 00", 8, ZERO_CODE),
        ("uniform", "04 00", 8, "payload ends too early"),
        ("uniform", ONE_BYTE, 8, "payload ends too early"),
        ("uniform", ONE_BYTE + "00 05 00 81", 8, "payload ends too early"),
        ("uniform", ONE_BYTE + TWO_CODES, 8, "payload ends too early"),
        ("uniform", "04 00 01 00 01 00 00 00 02 00 00 00", 8, "payload ends too early"),
        ("uniform", "04 00 00" + "00 02 00", 64, "3 bytes too many in a payload"),
        ("uniform", ONE_BYTE + "05", 8, "unknown plane kind 5"),
        ("uniform", "04 02 00 00 41 01" + ZEROS + "03 00", 128,
         "3 symbols without a code among 2"),
        ("uniform", "04 02 00 00 41 01 20000000" + LOWS + "01" * 16 + "01 00" + "00" * 5, 128,
         WRONG_LIST),
    ],
)  # fmt: skip
def test_sparse_chunks_have_one_representation(name, payload, values, what):
    """Masks without spare bits or needless bytes, no zero among the codes, as many as announced."""
    frame = forged(name, bytes.fromhex(payload), values, block_values=16)
    expected = what if isinstance(what, str) else np.array(what, np.float32).tobytes()
    found = dict(zip(available(), readings(frame), strict=True))
    assert found == dict.fromkeys(available(), expected)
