"""Which plane is stored how, and which split is taken: the rules of docs/WIRE.md, worked out a second time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs.formats import FORMATS
from fsl_codecs.huffman import code_lengths
from fsl_codecs.planes import CONSTANT, RAW, TREE, cut, join, plan_chunk, plan_plane

UNHURRIED = settings(deadline=None, max_examples=150)
NAMES = list(FORMATS)


def bitmaps(lengths):
    """Bitmaps and planes of a canonical tree, counted from its code lengths in ascending order."""
    if lengths[0] == lengths[-1]:
        return lengths[0]
    total, at = 0, 0
    while total < 1 << 19:
        total += 1 << (20 - lengths[at])
        at += 1
    children = (lengths[:at], lengths[at:])
    return 1 + sum(bitmaps([length - 1 for length in child]) for child in children)


def plane_rule(counts, width):
    """Kind and cost in bits, as the document tells it."""
    values, present = sum(counts), sum(count > 0 for count in counts)
    raw = 8 * values if width == 8 else 8 * width * -(-values // 8)
    if present == 1:
        return CONSTANT, 16
    if present > 2 ** (width - 1) and max(counts) <= values // 2 ** (width - 1):
        return RAW, 8 + raw
    lengths = code_lengths(np.array(counts)).tolist()
    occurring = [symbol for symbol, count in enumerate(counts) if count]
    codebook = 2 + -(-(occurring[-1] - occurring[0] + 1) // 2)
    tree = 8 + 8 * codebook + sum(n * length for n, length in zip(counts, lengths, strict=True))
    tree += 7 * bitmaps(sorted(filter(None, lengths))) * -(-values // 16384)
    return (TREE, tree) if tree <= raw - raw // 64 else (RAW, 8 + raw)


def split_rule(codes):
    """Index of the split an 8-bit format takes."""
    counts = np.bincount(codes, minlength=256).tolist()
    quarter = len(codes) // 4
    asymmetry = sum(abs(counts[code] - counts[code + 128]) for code in range(128))
    tried = [True, asymmetry > quarter, max(counts) > quarter]
    chosen, best = -1, 0
    for index, layout in enumerate([[(1, 5), (6, 3)], [(0, 6), (6, 2)], [(0, 8)]]):
        if not tried[index]:
            continue
        cost = 8
        for start, width in layout:
            plane = [0] * (1 << width)
            for code, count in enumerate(counts):
                bits = format(code, "08b")
                bits = bits[1:] + bits[0] if index == 0 else bits
                at = start - 1 if index == 0 else start
                plane[int(bits[at : at + width], 2)] += count
            cost += plane_rule(plane, width)[1]
        if chosen < 0 or cost < best - best // 16:
            chosen, best = index, cost
    return chosen


@UNHURRIED
@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_planes_are_stored_by_the_documented_rule(width, flatness, seed, scale):
    """Encoders in two languages must agree near every threshold, so skews from none to strong are drawn."""
    generator = np.random.default_rng(seed)
    weights = generator.random(1 << width) ** (flatness * generator.random() * 2)
    counts = generator.multinomial(7 * 10**scale + seed % 50, weights / weights.sum())
    plan = plan_plane(counts, width)
    assert (plan.kind, plan.cost_bits) == plane_rule(counts.tolist(), width)


def test_the_drawn_planes_meet_both_sides_of_the_sixty_fourth():
    """Between the raw size and a sixty-fourth below it, a code exists but is not used."""
    refused = 0
    for tenths in range(2, 80):
        counts = np.full(32, 1000)
        counts[0] += 100 * tenths
        counts[20:] -= 5 * tenths
        kind, cost = plane_rule(counts.tolist(), 5)
        plan = plan_plane(counts, 5)
        assert (plan.kind, plan.cost_bits) == (kind, cost)
        lengths = code_lengths(counts)
        refused += kind == RAW and int((counts * lengths).sum()) < 5 * int(counts.sum()) * 0.995
    assert refused > 3


def test_nearly_uniform_planes_are_not_searched():
    """Seventeen symbols of which none exceeds a sixteenth stay raw, although a code would pay: the search is what costs."""
    counts = np.array([1000] * 16 + [3] + [0] * 15)
    assert plan_plane(counts, 5).kind == RAW
    counts[0] += 1
    assert plan_plane(counts, 5).kind == TREE
    counts[:] = [1000] * 16 + [0] * 16
    assert plan_plane(counts, 5).kind == TREE


@UNHURRIED
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3000),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 4),
)
def test_splits_are_chosen_by_the_documented_rule(seed, count, sparsity, one_sided, spread):
    """Zeros and one-sided signs move the choice; both are drawn from none to all."""
    generator = np.random.default_rng(seed)
    codes = (96 + 8 * spread * generator.standard_normal(count)).clip(1, 126).astype(np.uint8)
    codes[generator.random(count) < sparsity] = 0
    negative = generator.random(count) < np.where(codes > 96, one_sided, 1 - one_sided)
    codes[negative] |= 128
    assert plan_chunk(codes, FORMATS["e4m3"]).split_index == split_rule(codes)


@UNHURRIED
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=50))
def test_cut_planes_join_again(name, numbers):
    """Every split of every format is a rearrangement of bits."""
    number_format = FORMATS[name]
    words = np.array(numbers, np.uint32).astype(f"u{number_format.code_bytes}")
    for split in number_format.splits:
        planes = cut(words, split, number_format.code_bits)
        assert all(
            (plane >> width == 0).all()
            for plane, width in zip(planes, split.widths, strict=True)
            if width < 8
        )
        assert join(planes, split, number_format.code_bits).tolist() == words.tolist()
