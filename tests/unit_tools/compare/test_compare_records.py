"""Records of several sites as one."""

import numpy as np
import pytest

from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.tools.compare.alone import joined


def tokenized(first, labels, *, rows=None, width=1):
    """Sequences of 1, 2, ... tokens, numbered from `first`."""
    lengths = np.arange(1, len(labels) * width + 1)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(first, first + starts[-1], dtype=np.int32)
    return Tokenized(
        ids,
        ids % 2 == 0,
        starts,
        np.array(labels, np.int64) if width == 1 else None,
        np.arange(len(labels)) if rows is None else np.array(rows),
        width,
        0,
        "",
        5,
    )


@pytest.mark.parametrize("width", [1, 2])
def test_joined_records_are_those_of_the_parts_in_order(width):
    """Also of parts that are not whole files."""
    one = tokenized(100, [0, 1, 1], rows=[2, 0], width=width)
    two = tokenized(500, [1, 0], width=width)
    both = joined([one, two])
    assert len(both) == 4
    assert both.source < 0
    assert both.tokens == one.tokens + two.tokens
    batches = [*one.batches(1), *two.batches(1)]
    for made, wanted in zip(both.batches(1), batches, strict=True):
        for name in ("ids", "mask", "labels"):
            assert np.array_equal(getattr(made, name), getattr(wanted, name))
