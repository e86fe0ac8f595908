"""A learnable set of tiny images in MNIST's files: a bright square whose place is the class."""

import struct

import numpy as np
import pytest

SIDE, CLASSES = 8, 4


def write_idx(path, values):
    """One idx file of unsigned bytes."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """The folder; 48 images to train on, 32 held out."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for stem, count in (("train", 48), ("t10k", 32)):
        labels = np.arange(count) % CLASSES
        values = rng.integers(0, 60, (count, SIDE, SIDE))
        for value, label in zip(values, labels, strict=True):
            row, column = divmod(int(label), 2)
            value[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 180
        write_idx(folder / f"{stem}-images-idx3-ubyte", values)
        write_idx(folder / f"{stem}-labels-idx1-ubyte", labels)
    return folder
