"""Payloads that cross the cut are read back unchanged, or refused."""

import numpy as np
import pytest

from fsl_async.learn.split import payload


@pytest.mark.parametrize(("classes", "width"), [(10, 1), (256, 1), (257, 2), (70_000, 4)])
def test_labels_take_the_narrowest_integers(classes, width):
    """They are counted to the byte, and read back unchanged."""
    labels = np.array([0, classes - 1, 1], np.int64)
    packed = payload.pack_labels(labels, classes)
    assert len(packed) == width * 3
    assert (payload.unpack_labels(packed, 3, classes) == labels).all()
    labels[1] = payload.IGNORED
    packed = payload.pack_labels(labels, classes)
    assert (payload.unpack_labels(packed, 3, classes) == labels).all()


def test_padding_is_not_sent_and_is_restored():
    """Rows get their places back for all lengths."""
    values = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    rows = payload.valid_rows(values, [1, 3])
    assert rows.shape == (4, 3)
    back = payload.put_back(rows, [1, 3], 4, 0.0)
    assert (back[0, :1] == values[0, :1]).all()
    assert (back[1, :3] == values[1, :3]).all()
    assert not back[0, 1:].any()


def test_frames_of_another_size_are_refused():
    """Received frames must have exactly the announced size."""
    values = np.ones(100, np.float32)
    frame = payload.encode_chunk(values, 0, payload.spec_for("fp32", 10))
    assert (payload.decode_chunks([frame], 100) == values).all()
    for frames, count in (([frame], 101), ([frame, frame], 100), ([frame[:-1]], 100)):
        with pytest.raises(payload.PayloadError):
            payload.decode_chunks(frames, count)
